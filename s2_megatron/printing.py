"""What a run tells its user: once, and from rank 0 only."""

from __future__ import annotations

import io
import os
import sys

_printed: set[str] = set()


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


def print_once(text: str) -> None:
    """Print `text` on rank 0, the first time that this process is given it."""
    if text in _printed:
        return
    _printed.add(text)
    if is_first_rank():
        print(text, flush=True)


def print_table(table) -> None:
    """Print a rich table (or any rich renderable) on rank 0, as wide as it needs in a log file and as the terminal
    allows in a terminal."""
    if not is_first_rank():
        return
    from rich.console import Console

    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=140)
    console.print(table)
