"""What a command tells while it works, on standard error: a bar or a spinner in a terminal, elsewhere a line now and
then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

TOLD_SECONDS = 10.0  # between two lines where there is no terminal


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


@contextmanager
def working(what: str) -> Iterator[None]:
    """Around something of which nobody knows how long it takes: says what it is, at once in a terminal and elsewhere
    when it has taken TOLD_SECONDS."""
    console = Console(file=sys.stderr)
    if console.is_terminal:
        with console.status(what):
            yield
        return
    told = threading.Timer(TOLD_SECONDS, lambda: print(f"{what} ...", file=console.file, flush=True))
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


@contextmanager
def progress(what: str, total: float) -> Iterator[Callable[[float, str], None]]:
    """Around something of known size. Yields tell(done, text): done of `total`, and what else is to be said."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    if console.is_terminal:
        columns = ("{task.description}", BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
        bar = Progress(*columns, "left:", TimeRemainingColumn(), console=console, transient=True)
        with bar:
            task = bar.add_task(what, total=total, text="")
            yield lambda done, text: bar.update(task, completed=done, text=text)
        return
    began = told = time.monotonic()

    def tell(done: float, text: str) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < TOLD_SECONDS:
            return
        told, taken = now, now - began
        left = f", about {duration(taken * (total - done) / done)} left" if 0 < done <= total else ""
        print(f"{what}: {text}, {duration(taken)}{left}", file=console.file, flush=True)

    yield tell
