"""What a run tells its user: once, and from rank 0 only."""

from __future__ import annotations

import os

_printed: set[str] = set()


def is_first_rank() -> bool:
    """Whether this process is rank 0, from the environment that torchrun sets (works before torch.distributed
    starts)."""
    return int(os.environ.get("RANK", "0")) == 0


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
