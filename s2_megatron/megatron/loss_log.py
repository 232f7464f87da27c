"""The exact loss of every iteration as JSON lines: `--s2-loss-log PATH`.

Megatron's printed losses have seven digits and the second one of every run, or resume, is the mean of two iterations;
TensorBoard's files hold the exact ones but stay in a buffer for two minutes and are lost when a run is killed. This log
is flushed line by line, so that an iteration that has a checkpoint has its line too (patches.py puts it into the
training loop):

    {"run": {"arguments": {...}, "flops_per_token": {"attended": 5.1e9, "dense": 6.3e9}}, "iteration": 1, "time": ...}
    {"iteration": 1, "lm loss": 7.69140625, "grad_norm": 1.337, "learning_rate": 0.0001, "skipped": 0, "samples": 4,
     "time": 1760000000.25}
    {"iteration": 100, "validation": "iteration 100 on validation set", "lm loss": 4.25}

Each process begins with the first kind, Megatron's arguments. With --s2-position-loss the others have "lm loss by
position/..." and "tokens by position/...", too. `time` is in seconds of the clock, `samples` the sequences consumed.

A resumed run appends. `read_loss_log` takes back what was logged after the iteration that it resumed at, so that one
gapless run is left. The log has one writer at a time: a second process is refused, and a process whose torchrun was
killed is killed with it (processes.py).
Reading the loss costs one device synchronisation an iteration, as `--log-interval 1` does.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

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
        """Raises ValueError when the file cannot be written, as on a full disk."""
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
            raise ValueError(
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


def read_records(path: str | Path) -> list[dict]:
    """Every record of a loss log in the order of writing, headers included; [] where there is no file.

    A last line without its end (the run was killed while writing it) is left out. Raises ValueError on any other line
    that is no JSON object.
    """
    path = Path(path)
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict) or not {HEADER, "iteration"} & set(record):
            raise ValueError(
                f"{path}, line {number}: expected one JSON object of a loss log, got {line[:80]!r}; remove the line"
            )
        records.append(record)
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
