"""What the package tells its user, once and from rank 0 only: on stderr, for stdout is the program's that uses it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_printed: set[str] = set()
_holders: list[TextIO] = []


def is_first_rank() -> bool:
    """Whether this process is rank 0, from the environment that torchrun sets (works before torch.distributed
    starts)."""
    return int(os.environ.get("RANK", "0")) == 0


class _Tolerant(io.FileIO):
    """A file that drops what its disk or pipe does not take."""

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def open_streams() -> None:
    """Standard streams that take everything: what is written to one that the shell has closed (`>&-`) goes nowhere, and
    no file gets its number, into which libraries would write then; what a stream's encoding does not have, such as a
    table's lines on an ASCII terminal or the name of a file that is no UTF-8, is escaped. What a full disk or a reader
    that has gone does not take of stderr goes nowhere, too: no run ends because a remark found no room."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif mode == "w" and isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")
    error = sys.stderr
    raw = getattr(getattr(error, "buffer", None), "raw", None) or getattr(error, "buffer", None)
    if type(error) is io.TextIOWrapper and type(raw) is io.FileIO:  # the interpreter's own, nobody's that stands for it
        tolerant = _Tolerant(raw.fileno(), "w", closefd=False)
        buffer = tolerant if raw is error.buffer else io.BufferedWriter(tolerant)  # without one under `python -u`
        sys.stderr = io.TextIOWrapper(
            buffer, error.encoding, error.errors, line_buffering=True, write_through=error.write_through
        )


def stream() -> TextIO:
    """Where lines go: stderr, or what the innermost `held` has."""
    return _holders[-1] if _holders else sys.stderr


@contextmanager
def held(holder: TextIO) -> Iterator[None]:
    """Inside, everything that is printed here goes to holder."""
    _holders.append(holder)
    try:
        yield
    finally:
        _holders.remove(holder)


def print_once(text: str) -> None:
    """Print `text` on rank 0, the first time that this process is given it."""
    if text in _printed:
        return
    _printed.add(text)
    if is_first_rank():
        print(text, file=stream(), flush=True)


def print_table(table) -> None:
    """Print a rich table (or any rich renderable) on rank 0, as wide as it needs in a log file and as the terminal
    allows in a terminal."""
    if not is_first_rank():
        return
    from rich.console import Console

    terminal = Console(file=stream())
    console = terminal if terminal.is_terminal else Console(width=140, file=stream())
    console.print(table)
