"""Whether a path can be written; the tools and the preflight ask here."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from s2_megatron.config.errors import printable


def is_remote(path: str) -> bool:
    return "://" in path


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())


def check_writable(flag: str, value: str | Path, *, is_file: bool) -> None:
    """Raises ValueError for a folder that cannot be made or written, or a file that cannot be made there. flag: the
    flag and its value, as the message begins."""
    path = Path(value).absolute()
    if "\0" in str(value):
        raise ValueError(f"{flag}: expected a path without a null byte; name another one")
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # says what exists() is silent about: links that loop, names that are too long
        if is_file and path.exists() and not path.is_file():
            raise ValueError(f"{flag}: a folder or a device; expected a file; name a file in it")
        if is_file and path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{flag}: expected a file that can be written; chmod u+w it, or name another one")
        folder = existing(path.parent if is_file else path)
        where = f"{flag}: {printable(folder, 200)}"
        if not folder.is_dir():
            raise ValueError(f"{where} is a file; expected a folder; name another one, or move the file away")
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            raise ValueError(
                f"{where} cannot be written (Read-only file system); expected a writable folder; mount it for writing, "
                "or name another one"
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(
                f"{where} cannot be written by this user; expected a writable folder; chmod u+w it, or name another one"
            )
    except OSError as error:
        raise ValueError(f"{flag}: {error.strerror}; expected a path that can be used; name another one") from error
