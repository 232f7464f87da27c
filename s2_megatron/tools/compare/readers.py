"""Readers of runs: `--s2-loss-log` files, TensorBoard folders, offline wandb folders, wandb run paths.

A run on the command line is `[NAME=]PLACE[,PLACE ...]`. Places of one kind are pieces of the run, joined at its
resumes; places of several kinds are several logs of the same run, of which the later ones fill in what the first one
does not have.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.megatron.records.loss_log import HEADER, finite_number, numbered_records
from s2_megatron.tools.compare.runs import LEARNING_RATE, TRAINING_LOSS, Piece, Run, join

# Fields of a loss log's records that have another name than Megatron's TensorBoard tag.
_LOSS_LOG_NAMES = {"grad_norm": "grad-norm", "learning_rate": LEARNING_RATE, "samples": "samples vs steps"}
_NO_SERIES = {"iteration", "validation", "time", "skipped"}


def read_runs(texts: Sequence[str], wandb_project: str | None = None) -> list[tuple[Run, bool]]:
    """read_run of each. Runs that the user did not name and that would share a name have their place as theirs."""
    read = [read_run(text, wandb_project) for text in texts]
    taken = Counter(run.name for run, _ in read)
    return [
        (run if named or taken[run.name] == 1 else replace(run, name=split_run(text)[1][0]), named)
        for text, (run, named) in zip(texts, read)
    ]


def read_run(text: str, wandb_project: str | None = None) -> tuple[Run, bool]:
    """(the run, whether the user named it). text: `[NAME=]PLACE[,PLACE ...]`.

    Raises ValueError for a place that is empty, is not there or holds no run.
    """
    name, places = split_run(text)
    logs: dict[str, list[Piece]] = {}
    for place in places:
        kind, pieces = read_place(place, wandb_project)
        logs.setdefault(kind, []).extend(pieces)
    return join(name or _short_name(places[0]), list(logs.values())), bool(name)


def split_run(text: str) -> tuple[str, list[str]]:
    """(name, "" without one; places) of a run on the command line. Raises ValueError for an empty place.

    Places may have `=` in their paths, as in runs/lr=3e-4, and so may names: the first way to read it counts by which
    the places exist, and without one the first `=`. A name has no slash.
    """
    signs = [at for at, letter in enumerate(text) if letter == "=" and at > 0 and "/" not in text[:at]]
    ways = [("", text.split(",")), *((text[:at], text[at + 1 :].split(",")) for at in signs)]
    there = (way for way in ways if all(map(os.path.exists, filter(str.strip, way[1]))))
    name, places = next(there, ways[min(1, len(signs))])
    if not all(place.strip() for place in places):
        raise ValueError(
            f"run {text!r}: an empty place; expected [NAME=]PLACE[,PLACE...]; is a variable of the shell unset, or a "
            "comma too many?"
        )
    return name, places


def _short_name(place: str) -> str:
    path = Path(place)
    generic = {"losses", "tensorboard", "events", "wandb", "latest-run"}
    return path.parent.name if path.stem in generic and path.parent.name else path.stem


def read_place(place: str, wandb_project: str | None = None) -> tuple[str, list[Piece]]:
    """(kind, pieces) of one place: "loss log", "TensorBoard", "wandb" or "wandb server"."""
    path = Path(place)
    if path.is_file():
        return (
            ("wandb", [_read_wandb_file(path)]) if path.suffix == ".wandb" else ("loss log", read_loss_log_pieces(path))
        )
    if path.is_dir():
        return _read_folder(path)
    if wandb_project is not None or re.fullmatch(r"[^/\s]+/[^/\s]+/[^/\s]+", place):
        return "wandb server", [read_wandb_path(place if place.count("/") == 2 else f"{wandb_project}/{place}")]
    raise ValueError(
        f"run {place}: no such file or folder; expected a --s2-loss-log file, a TensorBoard folder, an offline wandb "
        "folder, or "
        "entity/project/run of a wandb server; check the path"
    )


def _read_folder(folder: Path) -> tuple[str, list[Piece]]:
    events = sorted(folder.glob("events.out.tfevents.*"))
    if events:
        return "TensorBoard", [piece for file in events if (piece := _read_events(file)).values or piece.arguments]
    wandb_files = sorted(folder.glob("run-*.wandb"))
    if not wandb_files:
        inner = folder / "wandb" if (folder / "wandb").is_dir() else folder
        wandb_files = sorted(inner.glob("offline-run-*/run-*.wandb"))
    if wandb_files:
        names = sorted({file.stem for file in wandb_files})
        if len(names) > 1:
            raise ValueError(
                f"run {folder}: holds {len(names)} wandb runs ({', '.join(names)}); expected one; give one of "
                f"{', '.join(str(file.parent) for file in wandb_files)}, or several joined by commas when they are "
                "one run's pieces"
            )
        return "wandb", [_read_wandb_file(file) for file in wandb_files]
    logs = sorted(folder.glob("*.jsonl"))
    if len(logs) == 1:
        return "loss log", read_loss_log_pieces(logs[0])
    raise ValueError(
        f"run {folder}: expected event files (events.out.tfevents.*), an offline wandb run or one .jsonl loss log in "
        "this "
        f"folder, found {len(logs)} .jsonl files; give the folder or file that holds the run"
    )


def read_loss_log_pieces(path: Path) -> list[Piece]:
    """The pieces of a loss log: a new one begins with a header, or where the iterations go back (logs of older
    releases have no headers). Raises ValueError for a file that is not a loss log, such as what a training printed."""
    _check_is_loss_log(path)
    pieces = [Piece(str(path))]
    last = 0
    for number, record in numbered_records(path):
        if HEADER in record:
            _check_header(path, number, record[HEADER])
            if pieces[-1].values:
                pieces.append(Piece(str(path)))
            pieces[-1].arguments = record[HEADER]["arguments"]
            pieces[-1].flops_per_token = record[HEADER]["flops_per_token"]
            pieces[-1].device = _text((record[HEADER].get("machine") or {}).get("device"))
            last = 0
            continue
        step = record["iteration"]
        if "validation" in record:
            if "test set" not in record["validation"]:
                _add_record(pieces[-1], record, step, " validation")
            continue
        if step <= last:
            before = pieces[-1]
            known = {name: getattr(before, name) for name in ("arguments", "flops_per_token", "device")}
            pieces.append(Piece(str(path), **known))
        last = step
        if record.get("time") is not None:
            pieces[-1].times[step] = record["time"]
        _add_record(pieces[-1], record, step, "")
    return pieces


def _check_is_loss_log(path: Path) -> None:
    """Raises ValueError for a file without one line of a loss log. An empty file may become one."""
    with path.open("rb") as file:
        first = file.readline(81)
        file.seek(0)
        if not first or any(map(_is_record, file)):
            return
    shown = first.rstrip(b"\r\n")[:80].decode("utf-8", "backslashreplace")
    raise ValueError(
        f"run {path}: not a loss log, because no line of it is a record of one (it begins with {printable(shown)!r}); "
        "expected a file of --s2-loss-log, a TensorBoard folder, or an offline wandb folder; what a training prints "
        "cannot be read: train with --s2-loss-log FILE, or give the folder of its --tensorboard-dir"
    )


def _is_record(line: bytes) -> bool:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and bool({HEADER, "iteration"} & set(record))


def _check_header(path: Path, line: int, header: dict) -> None:
    flops = header.get("flops_per_token", "")
    numbers = flops is None or (isinstance(flops, dict) and all(map(finite_number, flops.values())))
    machine = isinstance(header.get("machine"), dict | None)
    if not isinstance(header.get("arguments"), dict) or not numbers or not machine:
        raise ValueError(
            f"{path}, line {line}: a header without a JSON object as arguments, without numbers or null as "
            "flops_per_token, or with something else than a JSON object as machine; expected the first line of a "
            "process's --s2-loss-log; remove the line, and pass --vary all if no other header is left"
        )


def _add_record(piece: Piece, record: dict, step: int, suffix: str) -> None:
    for name, value in record.items():
        if name not in _NO_SERIES and isinstance(value, (int, float)):
            piece.add(_LOSS_LOG_NAMES.get(name, name) + suffix, step, value)


def _read_events(file: Path) -> Piece:
    """One event file, which is one process's: Megatron's scalars, and its arguments, which it writes as texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    accumulator = EventAccumulator(
        str(file), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False
    ).Reload()
    piece = Piece(str(file))
    tags = accumulator.Tags()
    for tag in tags["scalars"]:
        if tag.endswith((" vs samples", " ppl")):
            continue
        for event in accumulator.Scalars(tag):
            piece.add(tag, event.step, event.value)
            if tag == TRAINING_LOSS:
                piece.times.setdefault(event.step, event.wall_time)
    texts = {
        tag.removesuffix("/text_summary"): accumulator.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in tags["tensors"]
        if tag.endswith("/text_summary")
    }
    if "seq_length" in texts:
        piece.arguments = texts
    if "s2/flops_per_token" in texts:
        piece.flops_per_token = json.loads(texts["s2/flops_per_token"])
    piece.device = texts.get("s2/device")
    return piece


def _read_wandb_file(file: Path) -> Piece:
    """An offline run, through wandb's own reader of its transaction log (`wandb leet inspect --json`)."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"run {file}: wandb leet inspect --json ended with status {done.returncode} ({last}); expected a wandb "
            "of "
            "release 0.31 or later that can read it; pip install -U wandb"
        )
    piece = Piece(str(file.parent), arguments={})
    for line in done.stdout.splitlines():
        record = json.loads(line)
        if record["type"] == "run":
            piece.arguments |= record["run"].get("config", {}).get("update", {})
        elif record["type"] == "config":
            piece.arguments |= record["config"].get("update", {})
        elif record["type"] == "history":
            _add_history(piece, record["history"]["item"])
    _take_settings(piece)
    return piece


def _add_history(piece: Piece, row: dict) -> None:
    """A row of wandb's history; `_step` is Megatron's iteration."""
    step = row.get("_step")
    if step is None:
        return
    pictures = tuple(name.removesuffix("_type") for name in row if name.endswith("._type"))
    for name, value in row.items():
        if isinstance(value, (int, float)) and not name.startswith(("_", *pictures)):
            piece.add(name, step, value)
    if TRAINING_LOSS in row and row.get("_timestamp") is not None:
        piece.times[step] = _seconds(row["_timestamp"])


def _seconds(timestamp: float | str) -> float:
    return datetime.fromisoformat(timestamp).timestamp() if isinstance(timestamp, str) else float(timestamp)


def _take_settings(piece: Piece) -> None:
    piece.arguments = piece.arguments or None
    if piece.arguments and isinstance(piece.arguments.get("s2_flops_per_token"), dict):
        piece.flops_per_token = piece.arguments["s2_flops_per_token"]
    if piece.arguments:
        piece.device = _text(piece.arguments.get("s2_device"))


def _text(value) -> str | None:
    return value if isinstance(value, str) else None


def read_wandb_path(path: str) -> Piece:
    """A run on a wandb server. path: entity/project/run. WANDB_BASE_URL and WANDB_API_KEY choose and open the
    server."""
    import wandb

    try:
        run = wandb.Api().run(path)
        piece = Piece(path, arguments=dict(run.config))
        for row in run.scan_history(use_cache=False):
            _add_history(piece, row)
    except (wandb.errors.Error, ValueError) as error:
        raise ValueError(
            f"run {path}: no such file or folder here, and as entity/project/run the wandb server does not give it "
            f"({error}); expected a path that exists, or a run that this machine's wandb login may read; check the "
            "path, or see `wandb login` and WANDB_BASE_URL"
        ) from error
    _take_settings(piece)
    return piece
