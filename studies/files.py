"""The text files of the machine that are worth training on, in documents of one directory each.

Installed Python packages with their headers and documentation (`sys.prefix`), the standard library, /usr/include,
/usr/local and /usr/share. A document is a directory, its files in the order of their names: modules of one package
import, repeat and test each other, so that what stands early in a context helps with what comes late.

Left out: files that are no UTF-8 text, tables and other generated text (`refusal_of_text`), and duplicates: of files
whose lines mostly stand in files before them only the first one stays. All rules depend on the files alone, so that the
same image of a machine gives the same documents.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SUFFIXES = """
    .py .pyi .pyx .pxd .h .hh .hpp .hxx .cuh .cu .c .cc .cpp .cxx .inl .inc .ipp .md .rst .txt .cmake .sh .pl .pm .js
    .ts .go .rs .java .lua .tcl .m4 .f90 .r .jl .html .toml .yaml .yml
"""
SUFFIXES = frozenset(_SUFFIXES.split())
EXCLUDED_FOLDERS = frozenset({"__pycache__", "node_modules", "locale", "zoneinfo", "unicore", "test_data", "testdata"})
SMALLEST_FILE, LARGEST_FILE = 200, 1 << 20  # bytes
LARGEST_DOCUMENT = 1 << 20  # bytes
MOST_DIGITS, FEWEST_LETTERS = 0.2, 0.5  # of the characters that are no spaces
LONGEST_MEAN_LINE = 160  # characters
SMALLEST_COMPRESSED = 0.12  # of the bytes, by zlib level 1: what is smaller repeats itself
SHORTEST_LINE = 12  # characters; shorter lines say nothing about duplicates
FEWEST_NEW_LINES = 0.1  # of a file's lines


@dataclass(frozen=True)
class Root:
    """A folder to search. label: what its files' names begin with, the same on every machine."""

    label: str
    folder: Path


@dataclass(frozen=True)
class Document:
    """One directory, or a part of a large one. name: `label/path`, with `#2` for the second part; directory: without
    it; files: paths, in the order of their names; size: bytes."""

    name: str
    directory: str
    files: tuple[Path, ...]
    size: int


def machine_roots() -> list[Root]:
    """The folders of this machine; none lies in another one, and those that are not there are left out."""
    candidates = [
        Root("stdlib", Path(sysconfig.get_paths()["stdlib"])),
        Root("prefix", Path(sys.prefix)),
        *(Root(folder, Path("/", folder)) for folder in ("usr/include", "usr/local", "usr/share", "usr/lib/python3")),
    ]
    roots: list[Root] = []
    for root in candidates:
        folder = root.folder.resolve()
        if not folder.is_dir() or any(folder.is_relative_to(other.folder) for other in roots):
            continue
        roots = [other for other in roots if not other.folder.is_relative_to(folder)] + [Root(root.label, folder)]
    return roots


def find_files(roots: Sequence[Root]) -> list[tuple[str, Path]]:
    """(name, path) of every candidate, sorted by name. Links are not followed."""
    found = []
    for root in roots:
        for folder, folders, names in os.walk(root.folder):
            folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS and not name.startswith(".")]
            inside = Path(folder).relative_to(root.folder).as_posix()
            prefix = root.label if inside == "." else f"{root.label}/{inside}"
            # The headers of the C++ standard library have no suffix.
            bare_is_text = "include" in prefix.split("/")
            for name in names:
                suffix = os.path.splitext(name)[1].lower()
                path = os.path.join(folder, name)
                if (suffix in SUFFIXES or (bare_is_text and not suffix)) and not os.path.islink(path):
                    found.append((f"{prefix}/{name}", Path(path)))
    return sorted(found)


def refusal_of_text(text: str) -> str | None:
    """Why a text is left out: it is a table or was made by a program; None for one that stays."""
    lines = text.count("\n") + 1
    if len(text) > LONGEST_MEAN_LINE * lines:
        return "long lines"
    data = text.encode()
    if len(zlib.compress(data, 1)) < SMALLEST_COMPRESSED * len(data):
        return "repeats itself"
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    visible = counts[33:].sum()
    if counts[48:58].sum() > MOST_DIGITS * visible:
        return "numbers"
    letters = counts[65:91].sum() + counts[97:123].sum() + counts[128:].sum()
    return "few letters" if letters < FEWEST_LETTERS * visible else None


@dataclass(frozen=True)
class Scanned:
    """What was found of one file. refusal: why it is left out, None where it stays so far. lines: uint32 hashes."""

    name: str
    path: Path
    size: int
    refusal: str | None
    lines: np.ndarray


def scan(entry: tuple[str, Path]) -> Scanned:
    """Read one file and judge it by itself."""
    name, path = entry
    nothing = np.empty(0, np.uint32)
    text = read_text(path)
    if text is None:
        return Scanned(name, path, 0, "no UTF-8 text of a fitting size", nothing)
    refusal = refusal_of_text(text)
    if refusal is not None:
        return Scanned(name, path, len(text), refusal, nothing)
    stripped = (line.strip() for line in text.encode().split(b"\n"))
    hashes = [zlib.crc32(line) for line in stripped if len(line) >= SHORTEST_LINE]
    return Scanned(name, path, len(text.encode()), None, np.array(hashes, np.uint32))


def read_text(path: Path) -> str | None:
    """The text of a file; None where it is not UTF-8, too small or too large, or cannot be read."""
    try:
        if not SMALLEST_FILE <= path.stat().st_size <= LARGEST_FILE:
            return None
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None


def new_line_shares(files: Sequence[Scanned]) -> np.ndarray:
    """Of every file the share of its lines that stand in no file before it, float64; 0 for a file without lines."""
    counts = np.array([len(file.lines) for file in files], np.int64)
    lines = np.concatenate([file.lines for file in files]) if len(files) else np.empty(0, np.uint32)
    owner = np.repeat(np.arange(len(files)), counts)
    # A line counts for the first file that has it, as often as it stands there.
    unique, inverse = np.unique(lines, return_inverse=True)
    first = np.full(len(unique), len(files), np.int64)
    np.minimum.at(first, inverse, owner)
    new = np.bincount(owner[first[inverse] == owner], minlength=len(files))
    return new / np.maximum(counts, 1)


def make_documents(scanned: Sequence[Scanned]) -> tuple[list[Document], Counter]:
    """(the documents, sorted by name; how many files were left out for each reason)."""
    dropped = Counter(file.refusal for file in scanned if file.refusal is not None)
    files = [file for file in scanned if file.refusal is None]
    directories: dict[str, list[Scanned]] = {}
    for file, share in zip(files, new_line_shares(files)):
        if share < FEWEST_NEW_LINES:
            dropped["duplicate"] += 1
        else:
            directories.setdefault(file.name.rpartition("/")[0], []).append(file)
    documents = [document for name, members in sorted(directories.items()) for document in _documents_of(name, members)]
    return documents, dropped


def _documents_of(directory: str, files: Sequence[Scanned]) -> list[Document]:
    """A directory of more than LARGEST_DOCUMENT bytes makes several documents, of files that follow each other."""
    parts: list[list[Scanned]] = [[]]
    for file in files:
        if parts[-1] and sum(each.size for each in parts[-1]) + file.size > LARGEST_DOCUMENT:
            parts.append([])
        parts[-1].append(file)
    return [
        Document(
            directory if number == 1 else f"{directory}#{number}",
            directory,
            tuple(file.path for file in part),
            sum(file.size for file in part),
        )
        for number, part in enumerate(parts, start=1)
    ]


def file_texts(document: Document) -> list[str]:
    """The texts of a document's files, each after a line with its name."""
    return [f"# {document.directory}/{path.name}\n{read_text(path) or ''}\n" for path in document.files]
