"""The text of the small examples: Python's standard library, byte by byte; `small.sh` calls it.

    python -m examples.small_corpus runs/examples/corpus       # writes text.bin and text.idx, once

A token is a byte (vocabulary 256). No byte of UTF-8 is 255: that one ends a document.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 255


def write_corpus(folder: Path) -> None:
    """The files `text.bin` and `text.idx`, as Megatron's --data-path reads them; nothing where they are already."""
    if (folder / "text.idx").exists():
        return
    warnings.simplefilter("ignore")  # of Megatron, about optional packages
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"text.{os.getpid()}"
    builder = IndexedDatasetBuilder(f"{unfinished}.bin", dtype=np.uint16)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tokens = np.frombuffer(path.read_bytes() + bytes([END_OF_DOCUMENT]), dtype=np.uint8)
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{unfinished}.idx")
    for suffix in (".bin", ".idx"):
        Path(f"{unfinished}{suffix}").rename(folder / f"text{suffix}")


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))
