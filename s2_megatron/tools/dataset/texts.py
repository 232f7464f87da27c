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
    """The files, those of a folder below it in the order of their names; hidden ones are left out. Raises ValueError
    for a path that is not there, a folder without a file, and a .zst that cannot be opened here."""
    found: list[Source] = []
    for path in paths:
        shown = printable(path, 200)
        if path.is_dir():
            below = [
                Path(folder, name)
                for folder, _, names in os.walk(path)
                for name in names
                if not any(part.startswith(".") for part in Path(folder, name).relative_to(path).parts)
            ]
            files = sorted(file for file in below if file.is_file())
            if not files:
                raise ValueError(f"{shown}: no file in this folder; expected texts; name another one")
        elif path.is_file():
            files = [path]
        else:
            raise ValueError(f"{shown}: no such file or folder; expected texts; correct the path")
        for file in files:
            if not os.access(file, os.R_OK):
                raise ValueError(
                    f"{printable(file, 200)}: cannot be read by this user; expected a readable file; chmod u+r"
                )
            if file.suffix == ".zst":
                try:
                    _zstandard()
                except ImportError as error:
                    raise ValueError(
                        f"{printable(file, 200)}: nothing here opens a .zst; expected the package backports.zstd; "
                        "pip install 's2-megatron[zstd]', or use .gz"
                    ) from error
            found.append(Source(file, file.stat().st_size))
    return found


def batches(source: Source, lines: bool, at: Callable[[int], None]) -> Iterator[Batch]:
    """The documents of a file: of JSON lines each line, of a text each line with `lines`, else the whole of it. at:
    told how many bytes of the file have been read. Raises ValueError for a file that cannot be decompressed, and for a
    document above LARGEST."""
    path = source.path
    compressed = path.suffix if path.suffix in COMPRESSED else ""
    json = Path(path.name.removesuffix(compressed)).suffix in JSON_LINES
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
