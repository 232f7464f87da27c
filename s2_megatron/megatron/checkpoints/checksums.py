"""SHA-256 checksums of a checkpoint's files, made while training goes on and verified when it is loaded.

Each rank hashes the shards that it wrote, in a thread of low priority (hashing and reading do not hold Python's lock),
and writes `rank_<n>.sha256` beside them; rank 0 adds the files that belong to no rank. The format is that of coreutils,
so `cd iter_0000100 && sha256sum --check --quiet rank_*.sha256` verifies a checkpoint by hand.

A checkpoint whose run was killed before its checksums were written is still complete. Files without a checksum are not
verified, and a line says so.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SUFFIX = ".sha256"
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_PRIORITY = 10  # nice value of the hashing thread


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of_rank(folder: Path, rank: int, world_size: int) -> list[Path]:
    """The files that this rank hashes: its shards, and on rank 0 what no other rank of the job has written."""

    def owner(path: Path) -> int:
        shard = _SHARD.fullmatch(path.name)
        return int(shard[1]) if shard and int(shard[1]) < world_size else 0

    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != SUFFIX)
    return [path for path in files if owner(path) == rank and not path.name.endswith(".tmp")]


def write_checksums(folder: Path, rank: int, world_size: int) -> None:
    """Hashes this rank's files and writes `rank_<rank>.sha256` in one step. Raises OSError."""
    lines = [f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in files_of_rank(folder, rank, world_size)]
    if lines:
        unfinished = folder / f"rank_{rank}{SUFFIX}.tmp"
        unfinished.write_text("".join(lines), encoding="utf-8")
        unfinished.replace(folder / f"rank_{rank}{SUFFIX}")


class BackgroundChecksums:
    """Makes checksums one checkpoint after another. The process does not end before the last ones are there."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, "checksums", initializer=self._lower_priority)

    @staticmethod
    def _lower_priority() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)  # of the thread, on Linux

    def start(self, folder: Path, rank: int, world_size: int) -> None:
        self._thread.submit(self._write, folder, rank, world_size)

    @staticmethod
    def _write(folder: Path, rank: int, world_size: int) -> None:
        try:
            write_checksums(folder, rank, world_size)
        except FileNotFoundError:
            pass  # an old checkpoint was removed meanwhile
        except OSError as error:
            print(
                f"S2: no checksums for {folder}: {error}; the checkpoint itself is complete",
                file=sys.stderr,
                flush=True,
            )


def read_checksums(folder: Path) -> dict[str, str]:
    """{file name relative to the folder: its SHA-256}, of the checkpoint's checksum files; {} without any."""
    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            match = _LINE.fullmatch(line)
            if match:
                found[match[2]] = match[1]
            else:
                found[path.name] = ""  # a damaged checksum file is named like a damaged file
    return found


def damaged_files(folder: Path, checksums: dict[str, str], rank: int = 0, world_size: int = 1) -> list[str]:
    """The files of this rank's share that have changed since they were hashed, each with the reason."""
    damaged = []
    for name in sorted(checksums)[rank::world_size]:
        try:
            if sha256_of(folder / name) != checksums[name]:
                damaged.append(f"{name} has changed")
        except OSError as error:
            damaged.append(f"{name}: {error.strerror}")
    return damaged
