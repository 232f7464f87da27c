"""An output folder that is complete or not there."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from s2_megatron.megatron.host.paths import check_writable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _no_space(output: Path, flag: str, reason: str) -> str:
    return f"{flag} {output}: no space left ({reason}); nothing was kept; free some, or name a folder on another disk"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def refuse_existing(output: Path, flag: str) -> None:
    """Raises ValueError for an output that is there, a link that leads nowhere included."""
    if output.exists() or output.is_symlink():
        raise ValueError(f"{flag} {output} exists and is never overwritten; name another folder, or move it away")


@contextmanager
def complete_folder(output: Path, flag: str, needed: int = 0) -> Iterator[Path]:
    """A folder to write into, in a hidden one beside `output` that no one else has; renamed to `output` at the end,
    removed when something fails. needed: bytes that will be written, as far as they are known.

    Raises ValueError when `output` exists, which is never overwritten, where no folder can be made, and where there is
    no space, before or while it is written.
    """
    refuse_existing(output, flag)
    check_writable(f"{flag} {output}", output, is_file=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(output.parent).free) < needed:
        raise ValueError(_no_space(output, flag, f"{needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} free"))
    hidden = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        work = hidden / output.name  # for mkdtemp's own folder is closed to others
        work.mkdir()
        yield work
        refuse_existing(output, flag)  # another process may have written it meanwhile
        work.rename(output)
    except (OSError, RuntimeError) as error:  # torch.save hides the disk's error behind its own
        if not any(getattr(cause, "errno", None) in FULL for cause in _causes(error)):
            raise
        raise ValueError(_no_space(output, flag, "the disk, or the quota, became full while it was written")) from error
    finally:  # also an interruption leaves nothing behind
        shutil.rmtree(hidden, ignore_errors=True)
