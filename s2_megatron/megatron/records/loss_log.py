"""The exact loss of every iteration as JSON lines: `--s2-loss-log PATH`.

Megatron's printed losses have seven digits and the second one of every run, or resume, is the mean of two iterations;
TensorBoard's files hold the exact ones but stay in a buffer for two minutes and are lost when a run is killed. This log
is flushed line by line, so that an iteration that has a checkpoint has its line too (patches.py puts it into the
training loop):

    {"run": {"arguments": {...}, "flops_per_token": {"attended": 5.1e9, "dense": 6.3e9},
             "machine": {"device": "NVIDIA H100 80GB HBM3"}}, "iteration": 1, "time": ...}
    {"iteration": 1, "lm loss": 7.69140625, "grad_norm": 1.337, "learning_rate": 0.0001, "skipped": 0, "samples": 4,
     "time": 1760000000.25}
    {"iteration": 100, "validation": "iteration 100 on validation set", "lm loss": 4.25}

Each process begins with the first kind, Megatron's arguments. A loss is null where no target counted. With
--s2-position-loss the others have "lm loss by position/..." and "tokens by position/...", too. `time` is in seconds
of the clock, `samples` the sequences consumed.

A resumed run appends. `read_loss_log` takes back what was logged after the iteration that it resumed at, so that one
gapless run is left. The log has one writer at a time: a second process is refused, and a process whose torchrun was
killed is killed with it (host/processes.py).
Reading the loss costs one device synchronisation an iteration, as `--log-interval 1` does.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from s2_megatron.megatron.errors import RunError

logger = logging.getLogger(__name__)

HEADER = "run"  # the key of the first record of each process: its arguments, and FLOPs per token


def exact_number(value) -> float | int | None:
    """A Python number from a tensor, a number or None; exact, since JSON carries every digit of a float."""
    if value is None:
        return None
    return value.item() if hasattr(value, "item") else value


def _locked(path: Path, wait_seconds: float = 0.0) -> TextIO:
    """The file, opened for appending and locked until it is closed or the process ends.

    Raises ValueError when another process still holds it after `wait_seconds`.
    """
    deadline = time.monotonic() + wait_seconds
    file = path.open("a", encoding="utf-8")
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            file.close()
            raise ValueError(
                f"loss log {path} is being written by another process; expected none; wait until it has ended, stop "
                "it, or give another path"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            logger.warning("%s is on a file system without locks: nothing keeps two runs from writing it at once", path)
        return file


class LossLog:
    """Appends records to a file on the last rank, where Megatron has the losses and prints from. path: absolute.

    header: gives the process's header, asked for at its first record.

    Raises ValueError when another process writes the file.
    """

    def __init__(self, path: Path, header: Callable[[], dict]):
        self.path, self.header, self.has_header = path, header, False
        self.file: TextIO | None = None
        if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = _locked(path)
            _drop_unfinished_line(path)

    def append(self, record: dict) -> None:
        """Raises RunError when the file cannot be written, as on a full disk."""
        if self.file is None:
            return
        lines = json.dumps(record) + "\n"
        if not self.has_header:
            header = {HEADER: self.header(), "iteration": record["iteration"], "time": time.time()}
            lines = f"{json.dumps(header)}\n{lines}"
        self.has_header = True
        try:
            self.file.write(lines)
            self.file.flush()
        except OSError as error:
            raise RunError(
                f"--s2-loss-log={self.path} cannot be written: {error.strerror}; expected room for a line; free some "
                "space; the same command goes on from the last checkpoint"
            ) from error


def _drop_unfinished_line(path: Path) -> None:
    """A process that was killed while it wrote a line leaves a piece of it, which the next line would join."""
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - (1 << 16))
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start if newline < 0 else start + newline + 1
            if newline >= 0:
                break
        if end < size:
            file.truncate(end)


def finite_number(value) -> bool:
    """Whether a JSON value is a number that a float holds, other than NaN and infinity."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _mistake(record: dict) -> str | None:
    """What a record should have, as the end of a sentence; None for a good one. NaN and infinity are good: losses of
    runs that diverged."""
    if HEADER in record and not isinstance(record[HEADER], dict):
        return f", with a JSON object as {HEADER}"
    iteration = record.get("iteration", 0 if HEADER in record else None)
    if isinstance(iteration, bool) or not isinstance(iteration, int) or not 0 <= iteration < 2**63:
        return ", with an integer of 0 or more as iteration"
    if not isinstance(record.get("validation", ""), str):
        return ", with a text as validation"
    time_or_none = record.get("time")
    if time_or_none is not None and not (finite_number(time_or_none) and time_or_none >= 0):
        return ", with a number of 0 or more as time"
    for name, value in record.items():
        number = finite_number(value) or isinstance(value, float)
        if not number and (isinstance(value, (bool, int)) or (name == "lm loss" and value is not None)):
            return f", with a number that a float holds as {name}"
    return None


def read_records(path: str | Path) -> list[dict]:
    """Every record of a loss log in the order of writing, headers included; [] where there is no file.

    A last line without its end (the run was killed while writing it) is left out. Raises ValueError on any other line
    that is no JSON object, or has values of other types than LossLog writes.
    """
    return [record for _, record in numbered_records(path)]


def numbered_records(path: str | Path) -> list[tuple[int, dict]]:
    """The same as read_records, each with the number of its line, from 1 on."""
    path = Path(path)
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):  # no UTF-8, no JSON, or nested too deeply
            record = None
        mistake = ""
        if isinstance(record, dict) and {HEADER, "iteration"} & set(record):
            mistake = _mistake(record)
        if mistake is not None:
            shown = line[:80].decode("utf-8", "backslashreplace")
            raise ValueError(
                f"{path}, line {number}: expected one JSON object of a loss log{mistake}, got {shown!r}; remove the "
                "line"
            )
        records.append((number, record))
    return records


def read_loss_log(path: str | Path) -> tuple[dict[int, dict], dict[str, dict]]:
    """The records of the training iterations by iteration, and of the evaluations by name.

    Later lines win, and a process that resumes at an iteration takes back everything that was logged from there on:
    what remains is one run. Raises ValueError as read_records does.
    """
    iterations: dict[int, dict] = {}
    evaluations: dict[str, dict] = {}
    begins = False  # whether the next training record is the first one of its process
    for record in read_records(path):
        if HEADER in record:
            begins = True
        elif "validation" in record:
            evaluations[record["validation"]] = record
        else:
            first = record["iteration"]
            if begins:
                iterations = {number: kept for number, kept in iterations.items() if number < first}
                evaluations = {name: kept for name, kept in evaluations.items() if kept["iteration"] < first}
            begins = False
            iterations[first] = record
    return iterations, evaluations


def truncate_loss_log(path: str | Path, iteration: int, wait_seconds: float = 60.0) -> None:
    """Drop what a run logged after its checkpoint of `iteration`, and will do again, so that the log joins without a
    seam.

    Waits for a writer that is about to end. The file is replaced in one step: a crash leaves the old one or the new
    one. Raises ValueError when it is still being written after `wait_seconds`.
    """
    path = Path(path)
    if not path.exists():
        return
    with _locked(path, wait_seconds):
        records, evaluations = read_loss_log(path)
        # A header stands before the first record of its process: one without a record that stays goes, too.
        headers = [record for record in read_records(path) if HEADER in record and record["iteration"] <= iteration]
        remaining = headers + [record for number, record in records.items() if number <= iteration]
        # The evaluation at the checkpoint itself is repeated, too, or belongs to the end of a shorter run.
        remaining += [record for record in evaluations.values() if record["iteration"] < iteration]
        remaining.sort(key=lambda record: (record["iteration"], HEADER not in record, "validation" in record))
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text("".join(json.dumps(record) + "\n" for record in remaining), encoding="utf-8")
        unfinished.replace(path)
