"""The text of the small examples: Python's standard library, byte by byte; `small.sh` calls it.

    python -m examples.small_corpus runs/examples/corpus       # writes text.bin and text.idx, once

A token is a byte (vocabulary 256). No byte of UTF-8 is 255: that one ends a document.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import numpy as np

from s2_megatron.tools.dataset.write import write_dataset

END_OF_DOCUMENT = 255


def write_corpus(folder: Path) -> None:
    """The files `text.bin` and `text.idx`, as Megatron's --data-path reads them; nothing where they are already."""
    if (folder / "text.idx").exists():
        return
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ended = (path.read_bytes() + bytes([END_OF_DOCUMENT]) for path in files)
    write_dataset(folder / "text", (np.frombuffer(content, np.uint8) for content in ended))


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))
