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


def open_streams() -> None:
    """Standard streams that take everything: what is written to one that the shell has closed (`>&-`) goes nowhere, and
    no file gets its number, into which libraries would write then; what a stream's encoding does not have, such as a
    table's lines on an ASCII terminal or the name of a file that is no UTF-8, is escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif mode == "w" and isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")


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
