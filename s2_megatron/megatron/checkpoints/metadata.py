"""Reads the `.metadata` file of a distributed checkpoint without running what it may hold.

The file is a pickle: which tensors and objects there are, and where in which file each of their parts lies. Unpickling
can call any function that the file names. Here it can name only the few classes of PyTorch's distributed checkpoints,
and none of them is called either: each name stands for a plain record or a plain function below, so that neither
PyTorch nor Megatron is imported.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from s2_megatron.printing import is_first_rank

MOST_BYTES = 2**31
BYTES_PER_SECOND = 4e6  # of the unpickler below, on a slow core
SLOW_BYTES = 20 * 10**6  # what is larger is announced: nothing else is printed meanwhile


class MetadataError(ValueError):
    """What is wrong with a `.metadata` file, as the end of a sentence that begins with its name."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """What a checkpoint consists of. shapes: of every tensor, over all ranks. objects: the names of what is not a
    tensor. sizes: bytes of every file beside `.metadata`, by its path in the checkpoint's folder."""

    shapes: dict[str, tuple[int, ...]]
    objects: frozenset[str]
    sizes: dict[str, int]


class _Record:
    """Stands for an object: its attributes, or its state if that is not a mapping."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, state):
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _Metadata(_Record):
    pass


class _Tensor(_Record):
    pass


class _Bytes(_Record):
    pass


class _Index(_Record):
    pass


class _StorageInfo(_Record):
    pass


def _first(value, *rest):
    """In the place of enumerations and of torch.serialization._get_layout: the value that names the member."""
    return value


def _size(values=()):
    return tuple(values)


def _path(*parts):
    return "/".join(map(str, parts))


_CHECKPOINT = "torch.distributed.checkpoint"
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    "bool", "complex128", "complex64", "complex32",
)  # fmt: skip
KNOWN = {
    (f"{_CHECKPOINT}.metadata", "Metadata"): _Metadata,
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"): _Index,
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"): _Record,
    (f"{_CHECKPOINT}.metadata", "TensorProperties"): _Record,
    (f"{_CHECKPOINT}.metadata", "StorageMeta"): _Record,
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): _first,
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): _StorageInfo,
    (f"{_CHECKPOINT}.filesystem", "_StoragePrefix"): _Record,
    (f"{_CHECKPOINT}.planner", "SavePlan"): _Record,
    (f"{_CHECKPOINT}.planner", "WriteItem"): _Record,
    (f"{_CHECKPOINT}.planner", "WriteItemType"): _first,
    (f"{_CHECKPOINT}.planner", "TensorWriteData"): _Record,
    (f"{_CHECKPOINT}.planner", "BytesIOWriteData"): _Record,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): _Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _Record,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _first,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): name for name in _DTYPES},
}


# The unpickler in Python rather than the one in C (4 instead of 25 MB/s): a single changed byte can make the latter
# reserve tens of gigabytes.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str):
        try:
            return KNOWN[module, name]
        except KeyError:
            raise MetadataError(
                f"names {f'{module}.{name}'[:80]!a}, which no checkpoint of PyTorch needs: it was not loaded"
            ) from None

    def persistent_load(self, pid):
        raise MetadataError("refers to objects outside of the file: it was not loaded")


def parse_metadata(content: bytes) -> CheckpointMetadata:
    """The content of a `.metadata` file. Raises MetadataError for anything that PyTorch would not have written."""
    if not content:
        raise MetadataError("is empty")
    try:
        loaded = _Unpickler(io.BytesIO(content)).load()
    except MetadataError:
        raise
    except Exception as error:
        raise MetadataError(f"cannot be read ({type(error).__name__}): it was cut or changed") from error
    try:
        return _contents(loaded)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise MetadataError("has not the structure of a checkpoint's metadata: it was cut or changed") from error


def _contents(loaded: _Metadata) -> CheckpointMetadata:
    if not isinstance(loaded, _Metadata):
        raise TypeError
    shapes, objects, sizes = {}, set(), {}
    for name, item in loaded.state_dict_metadata.items():
        if isinstance(item, _Tensor):
            shapes[str(name)] = tuple(map(int, item.size))
        else:
            objects.add(str(name))
    for info in loaded.storage_data.values():
        file, end = str(info.relative_path), int(info.offset) + int(info.length)
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\0" in file:
            raise ValueError
        sizes[file] = max(sizes.get(file, 0), end)
    return CheckpointMetadata(shapes, frozenset(objects), sizes)


def read_metadata(file: Path) -> CheckpointMetadata:
    """A `.metadata` file; a large one is announced on stderr. Raises MetadataError for one that PyTorch would not have
    written, and OSError."""
    status = file.stat()
    if status.st_size > MOST_BYTES:
        raise MetadataError(f"has {status.st_size} bytes, {MOST_BYTES} at most are read")
    if status.st_size <= SLOW_BYTES:
        return parse_metadata(file.read_bytes())
    return _read_large(file.absolute(), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1)  # a start looks at the same checkpoint more than once
def _read_large(file: Path, size: int, changed: int) -> CheckpointMetadata:
    """`read_metadata` of a file with this size and this time of its last change, in ns."""
    if is_first_rank():
        seconds = size / BYTES_PER_SECOND
        print(f"S2: checks {file} ({size / 1e6:.0f} MB), about {seconds:.0f} s", file=sys.stderr, flush=True)
    return parse_metadata(file.read_bytes())


def forget_metadata() -> None:
    """Frees what is remembered of a large file: a training does not need it."""
    _read_large.cache_clear()
