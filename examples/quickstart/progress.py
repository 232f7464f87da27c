"""What the user sees of a training process: which attention runs where, the loss as it falls, and when it will be done.

Two channels, both files that the process writes: its output (start-up messages) and its loss log (exact losses).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from s2_megatron.megatron.records.loss_log import read_loss_log

POLL_SECONDS = 0.25
PLAIN_SECONDS = 10.0  # between two lines where there is no terminal
TABLE_TITLE = "Attention of "
TABLE_CHARACTERS = set("┏┓┃━┡┩│├┤└┘─╇┴┳┬┼")
SHOWN_PREFIXES = ("S2", "No GPU found")


class OutputFollower:
    """The lines of a growing text file that are worth showing: the attention table with its caption, and S2's
    remarks."""

    def __init__(self, path: Path, caption_lines: int):
        self.path = path
        self.position = path.stat().st_size if path.exists() else 0
        self.rest = ""
        self.caption_lines = caption_lines
        self.caption_left = 0
        self.in_table = False
        self.table_seen = False

    def new_lines(self) -> Iterator[str]:
        with self.path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self.position)
            text = self.rest + file.read()
            self.position = file.tell()
        *lines, self.rest = text.split("\n")
        for line in lines:
            if self._is_shown(line):
                yield line.rstrip()

    def _is_shown(self, line: str) -> bool:
        if line.startswith(TABLE_TITLE):
            self.in_table = self.table_seen = True
            return True
        if self.in_table:
            if TABLE_CHARACTERS.intersection(line):
                return True
            self.in_table, self.caption_left = False, self.caption_lines
        if self.caption_left:
            self.caption_left -= 1
            return True
        return line.startswith(SHOWN_PREFIXES)


class Speed:
    """Tokens a second from the times at which iterations were first seen; the start-up and the first iterations left
    out."""

    WARM_UP = 3

    def __init__(self, tokens_per_iteration: int):
        self.tokens_per_iteration = tokens_per_iteration
        self.seen: list[tuple[int, float]] = []

    def update(self, iteration: int) -> None:
        if not self.seen or iteration > self.seen[-1][0]:
            self.seen.append((iteration, time.monotonic()))

    def tokens_per_second(self) -> float | None:
        later = [entry for entry in self.seen if entry[0] - self.seen[0][0] >= self.WARM_UP]
        if len(later) < 2:
            return None
        (first, start), (last, end) = later[0], later[-1]
        return (last - first) * self.tokens_per_iteration / (end - start)


def follow_training(
    process: subprocess.Popen, loss_log: Path, output: OutputFollower, iterations: int, console: Console, speed: Speed
) -> int:
    """Show the process's progress until it ends; its exit status. A bar in a terminal, otherwise a line every ten
    seconds."""
    if not console.is_terminal:
        return _follow_plainly(process, loss_log, output, iterations, console, speed)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=60) as progress:
        task = progress.add_task("starting Megatron", total=iterations, loss="-", speed="")
        for iteration, loss in _watch(process, loss_log, output, console, speed):
            if iteration is not None:
                done = iteration >= iterations
                progress.update(
                    task,
                    completed=iteration,
                    loss=f"{loss:.3f}",
                    speed=_speed_text(speed),
                    description="evaluating and saving" if done else "training",
                )
    return process.returncode


def _follow_plainly(process, loss_log, output, iterations, console, speed) -> int:
    began = shown = time.monotonic()
    last_shown = None
    console.print("starting Megatron", highlight=False)
    for iteration, loss in _watch(process, loss_log, output, console, speed):
        now = time.monotonic()
        if iteration is None or iteration == last_shown or (iteration < iterations and now - shown < PLAIN_SECONDS):
            continue
        rate = speed.tokens_per_second()
        eta = "" if not rate else f", ETA {(iterations - iteration) * speed.tokens_per_iteration / rate:.0f} s"
        console.print(
            f"iteration {iteration}/{iterations}, loss {loss:.3f}{', ' * bool(rate)}{_speed_text(speed)}, "
            f"{now - began:.0f} s{eta}",
            highlight=False,
        )
        shown, last_shown = now, iteration
    return process.returncode


def _speed_text(speed: Speed) -> str:
    rate = speed.tokens_per_second()
    return f"{rate:,.0f} tokens/s" if rate else ""


def _watch(process, loss_log, output, console, speed) -> Iterator[tuple[int | None, float | None]]:
    """Yields the newest (iteration, loss), or (None, None) before this process's first one, until the process has
    ended."""
    before = max(read_loss_log(loss_log)[0], default=0)
    while True:
        ended = process.poll() is not None
        for line in output.new_lines():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        records, _ = read_loss_log(loss_log)
        newest = max(records, default=0)
        if newest > before:
            speed.update(newest)
            yield newest, records[newest]["lm loss"]
        else:
            yield None, None
        if ended:
            return
        time.sleep(POLL_SECONDS)
