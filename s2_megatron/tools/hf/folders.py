"""An output folder that is complete or not there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def complete_folder(output: Path, flag: str) -> Iterator[Path]:
    """A folder to write into, beside `output`; renamed to it at the end, removed when something fails.

    Raises ValueError when `output` exists, which is never overwritten.
    """
    if output.exists():
        raise ValueError(f"{flag} {output} exists and is never overwritten; name another folder, or move it away")
    output.parent.mkdir(parents=True, exist_ok=True)
    work = output.parent / f".{output.name}.unfinished"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
        work.rename(output)
    except BaseException:  # also an interruption leaves nothing behind
        shutil.rmtree(work, ignore_errors=True)
        raise
