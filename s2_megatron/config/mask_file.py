"""Block masks in .npz files from elsewhere: nothing is allocated before the header is known to be true, nothing is
unpickled, and every way a file can be broken is one ValueError."""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from s2_megatron.patterns.block_mask import MOST_BLOCKS

MOST_HEADER = 4096  # bytes
MOST_INDICES = 2**30


def read_mask(file: Path, head_counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(indptr [P, n + 1], indices [nonzeros]) of an .npz, integers of the file's own dtype.

    head_counts: what P may be. Raises ValueError for a file that is no .npz of these two arrays, in words that follow
    "which cannot be read: ".
    """
    try:
        with zipfile.ZipFile(file) as archive:
            indptr = _read_array(archive, "indptr", 2, lambda shape: _check_indptr_shape(shape, head_counts))
            if indptr.size and indptr.min() < 0:
                raise ValueError("indptr has negative numbers")
            counts = sum(int(count) for count in indptr[:, -1])
            if counts > MOST_INDICES:
                raise ValueError(f"indptr counts {counts:,} key blocks, more than {MOST_INDICES:,}")
            indices = _read_array(archive, "indices", 1, lambda shape: _check_indices_shape(shape, counts))
    except zipfile.BadZipFile as error:
        raise ValueError(f"it is no .npz ({error})") from error
    except (OSError, EOFError, KeyError, IndexError, TypeError, OverflowError, MemoryError, RuntimeError) as error:
        # RuntimeError: encrypted; its NotImplementedError: a compression or a version that zipfile does not know
        raise ValueError(str(error) or type(error).__name__) from error
    except (struct.error, zlib.error, SyntaxError) as error:
        raise ValueError(f"it is broken ({error})") from error
    return indptr, indices


def _check_indptr_shape(shape: tuple[int, ...], head_counts: tuple[int, ...]) -> None:
    heads = shape[0] if len(shape) == 2 else 1
    if heads not in head_counts:
        near = min(head_counts, key=lambda count: abs(count - heads))
        raise ValueError(f"indptr has the shape {list(shape)}, {heads} pattern heads; P = {near} fits the model")
    if not 2 <= shape[-1] <= MOST_BLOCKS + 1:
        raise ValueError(f"indptr has {shape[-1]} numbers a head; 2 to {MOST_BLOCKS + 1} can be")


def _check_indices_shape(shape: tuple[int, ...], counts: int) -> None:
    if shape != (counts,):
        raise ValueError(f"indices has the shape {list(shape)}, and indptr counts {counts}: one index for each")


def _read_array(archive: zipfile.ZipFile, name: str, most_dims: int, check_shape) -> np.ndarray:
    """An integer array with most_dims dimensions or fewer (as many after np.atleast_nd). check_shape(shape) raises
    ValueError before anything is read."""
    names = archive.namelist()
    if f"{name}.npy" not in names:
        found = ", ".join(entry.removesuffix(".npy") for entry in names[:6]) or "nothing"
        raise ValueError(f"it has no array {name}, but {found}")
    entry = archive.getinfo(f"{name}.npy")
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{name} has the .npy version {version}, not 1.0 or 2.0")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream, max_header_size=MOST_HEADER)
        if dtype.hasobject:
            raise ValueError(f"{name} holds pickled objects, which are never loaded (no allow_pickle)")
        if dtype.kind not in "iu" or not 1 <= len(shape) <= most_dims or min(shape) < 0 or (fortran and len(shape) > 1):
            order = " in Fortran's order" if fortran and len(shape) > 1 else ""
            raise ValueError(f"{name} is {dtype}{list(shape)}{order}, not integers of {most_dims} dimensions or fewer")
        check_shape(shape)
        size = math.prod(shape) * dtype.itemsize
        if stream.tell() + size != entry.file_size:
            raise ValueError(f"{name} has the shape {list(shape)}, and {entry.file_size:,} bytes in all")
        content = stream.read()  # ends where the archive says, and checks its sum
    if len(content) != size:
        raise ValueError(f"{name} ends after {len(content):,} of {size:,} bytes")
    array = np.frombuffer(content, dtype=dtype).reshape(shape)
    return array if len(shape) == most_dims else array.reshape(1, -1)
