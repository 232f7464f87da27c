"""Writes Megatron's indexed dataset, PREFIX.bin and PREFIX.idx: both are there and complete, or neither is."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Around an import of Megatron, which remarks on every optional package that is not there."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_dataset(prefix: Path, documents: Iterable[np.ndarray], dtype: type[np.number] = np.uint16) -> int:
    """Write `<prefix>.bin` and `.idx` by Megatron's own builder, one document an array of token ids; the number of
    tokens. dtype: of the ids in the file. An older dataset of that name is replaced. Raises OSError, of a full disk
    for example, and what `documents` raises; then nothing is left."""
    with quiet_import():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished = prefix.with_name(f"{prefix.name}.unfinished-{os.getpid()}")
    files = {suffix: unfinished.with_name(unfinished.name + suffix) for suffix in (".bin", ".idx")}
    builder, tokens = IndexedDatasetBuilder(str(files[".bin"]), dtype=dtype), 0
    try:
        for ids in documents:
            builder.add_document(ids, [len(ids)])
            tokens += len(ids)
        builder.finalize(str(files[".idx"]))
        for file in files.values():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        index = prefix.with_name(f"{prefix.name}.idx")  # without it there is no dataset
        index.unlink(missing_ok=True)
        os.replace(files[".bin"], prefix.with_name(f"{prefix.name}.bin"))
        os.replace(files[".idx"], index)
    except OSError as error:
        if error.filename is None:  # a write, whose error has no name
            raise OSError(error.errno, error.strerror, str(prefix) + ".bin") from error
        raise
    finally:
        with contextlib.suppress(OSError):  # of a full disk, once more
            builder.data_file.close()
        for file in files.values():
            file.unlink(missing_ok=True)
    return tokens
