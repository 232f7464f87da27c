"""An output folder that is complete or not there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from s2_megatron.megatron.preflight.files import check_writable


def _refuse_existing(output: Path, flag: str) -> None:
    if output.exists():
        raise ValueError(f"{flag} {output} exists and is never overwritten; name another folder, or move it away")


@contextmanager
def complete_folder(output: Path, flag: str) -> Iterator[Path]:
    """A folder to write into, in a hidden one beside `output` that no one else has; renamed to `output` at the end,
    removed when something fails.

    Raises ValueError when `output` exists, which is never overwritten, and where no folder can be made.
    """
    _refuse_existing(output, flag)
    check_writable(f"{flag} {output}", output, is_file=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        work = hidden / output.name  # for mkdtemp's own folder is closed to others
        work.mkdir()
        yield work
        _refuse_existing(output, flag)  # another process may have written it meanwhile
        work.rename(output)
    finally:  # also an interruption leaves nothing behind
        shutil.rmtree(hidden, ignore_errors=True)
