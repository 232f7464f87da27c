"""Documents of files: plain text, JSON lines, both of them compressed, and folders of these."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from s2_megatron.config.errors import printable

JSON_LINES = (".jsonl", ".ndjson", ".json")
BATCH_BYTES, BATCH_DOCUMENTS = 2**20, 1000  # of what a worker gets at a time
LARGEST = 2**28  # bytes of one document, more than any book: its tokens are in memory many times over


class Source(NamedTuple):
    """A file that was found. size: its bytes on the disk."""

    path: Path
    size: int


class Batch(NamedTuple):
    """Documents as they stand in a file, still to be decoded. first: the number of its first line, from 1; 0 for a
    whole file. json: whether each is an object of JSON."""

    path: Path
    first: int
    json: bool
    documents: list[bytes]


def _zstandard() -> Callable[[BinaryIO], BinaryIO]:
    """What opens a .zst: Python's from 3.14 on, or its backport. (The package zstandard takes a file that was cut for a
    shorter one.) Raises ImportError without both."""
    try:
        from compression import zstd
    except ImportError:
        from backports import zstd
    return zstd.ZstdFile


COMPRESSED: dict[str, Callable[[], Callable[[BinaryIO], BinaryIO]]] = {
    ".gz": lambda: lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": lambda: bz2.BZ2File,
    ".xz": lambda: lzma.LZMAFile,
    ".zst": _zstandard,
}


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """The files, those of a folder below it in the order of their names; hidden ones are left out, and links are
    followed. Raises ValueError for what is no file or not there, a folder without a file, and a .zst that cannot be
    opened here."""
    found: list[Source] = []
    for path in paths:
        shown = printable(path, 200)
        if path.is_dir():
            files = _below(path)
            if not files:
                raise ValueError(f"{shown}: no file in this folder; expected texts; name another one")
        else:
            files = [path]
        for file in files:
            if not file.is_file():
                what = "no file and no folder" if file.exists() else "no such file or folder"
                what += f", a link to {printable(os.readlink(file), 200)}" if file.is_symlink() else ""
                raise ValueError(f"{printable(file, 200)}: {what}; expected texts; correct the path, or remove it")
            if not os.access(file, os.R_OK):
                raise ValueError(
                    f"{printable(file, 200)}: cannot be read by this user; expected a readable file; chmod u+r"
                )
            if file.suffix.lower() == ".zst":
                try:
                    _zstandard()
                except ImportError as error:
                    raise ValueError(
                        f"{printable(file, 200)}: nothing here opens a .zst; expected the package backports.zstd; "
                        "pip install 's2-megatron[zstd]', or use .gz"
                    ) from error
            found.append(Source(file, file.stat().st_size))
    return found


def _below(folder: Path) -> list[Path]:
    """All that is below a folder but folders and hidden names; what links lead to twice counts once, where it comes
    first by name."""
    found, seen = [], set()
    for here, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            found += [Path(here, name) for name in names if not name.startswith(".")]
        seen.add(real)
    first: dict[str, Path] = {}
    for file in sorted(found):
        first.setdefault(os.path.realpath(file), file)
    return list(first.values())


def batches(source: Source, lines: bool, at: Callable[[int], None]) -> Iterator[Batch]:
    """The documents of a file: of JSON lines each line, of a text each line with `lines`, else the whole of it. at:
    told how many bytes of the file have been read. Raises ValueError for a file that cannot be decompressed, and for a
    document above LARGEST."""
    path = source.path
    name = path.name.lower()
    compressed = next((suffix for suffix in COMPRESSED if name.endswith(suffix)), "")
    json = name.removesuffix(compressed).endswith(JSON_LINES)
    shown = printable(path, 200)
    with path.open("rb") as file:
        opened = COMPRESSED[compressed]()(file) if compressed else file
        read = opened.readline if json or lines else opened.read
        number, batch = 1, Batch(path, 1 if json or lines else 0, json, [])
        size = 0
        while True:
            try:
                document = read(LARGEST + 1 if json or lines or compressed else min(source.size, LARGEST) + 1)
            except Exception as error:  # each library has errors of its own for a file that was cut or is none
                why = " ".join(str(error).split()) or type(error).__name__
                raise ValueError(
                    f"{shown}: cannot be read ({printable(why)}); expected {compressed or 'a whole file'}; fetch it "
                    "again"
                ) from error
            if len(document) > LARGEST:
                raise ValueError(
                    f"{shown}: a document of more than {LARGEST // 2**20} MB; expected smaller ones; cut the file"
                    + ("" if json or lines else ", or give --lines, with which each line is a document")
                )
            at(file.tell())
            if not document:
                break
            batch.documents.append(document)
            size, number = size + len(document), number + 1
            if size >= BATCH_BYTES or len(batch.documents) == BATCH_DOCUMENTS:
                yield batch
                size, batch = 0, Batch(path, number if batch.first else 0, json, [])
        if batch.documents:
            yield batch
