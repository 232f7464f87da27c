"""Tensors of Megatron's torch_dist checkpoints, one at a time, read and written without a process group.

The format is torch.distributed.checkpoint's: a `.metadata` file with the global shape of every tensor, where its pieces
lie in it and where in which file; the pieces are what `torch.save` writes. Megatron stacks the layers of a model into
one tensor whose first dimension counts them.
"""

from __future__ import annotations

import io
import math
import pickle
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from s2_megatron.config.errors import joined
from s2_megatron.megatron.checkpoints.checksums import damaged_files, read_checksums
from s2_megatron.megatron.checkpoints.folder import (
    FOLDER,
    TRACKER,
    Checkpoint,
    CheckpointError,
    find_problem,
    is_legacy,
    newest_complete,
    read_tracker,
)
from s2_megatron.tools.hf.weights import stored_name

SLOW_BYTES = 10**9  # to hash more takes seconds, which are announced


def iteration_folder(load: Path) -> Path:
    """The folder of the newest checkpoint in Megatron's --load folder (or that folder itself): complete, and its files
    verified by their checksums, as far as it has some.

    Raises ValueError when there is none, for a damaged one, and for another format than torch_dist.
    """
    try:
        chosen = read_tracker(load)
    except CheckpointError as error:
        raise ValueError(
            f"--load {load}: its tracker {TRACKER} {error}; without it no iteration is known; {_other(load)}"
        ) from None
    folder = load if chosen is None else chosen.path
    if not folder.is_dir():
        what = "no such folder" if chosen is None else f"{folder.name}, which its tracker names, does not exist"
        fix = "correct the path" if chosen is None else _other(load, chosen.iteration)
        raise ValueError(
            f"--load {load}: {what}; expected a checkpoint that Megatron saved, such as --save's folder; {fix}"
        )
    metadata = any((folder / name).exists() for name in (".metadata", "metadata.json"))
    if chosen is None and not metadata and not is_legacy(folder):
        raise ValueError(
            f"--load {load}: neither a tracker {TRACKER} nor a checkpoint's .metadata is there; expected a complete "
            f"checkpoint; {_other(load)}"
        )
    number = FOLDER.fullmatch(folder.absolute().name)
    parent, below = folder.absolute().parent, int(number[1]) if number else None
    problem = find_problem(folder)
    if problem is not None:
        raise ValueError(
            f"--load {load}: {folder} {problem}; expected a complete checkpoint of --ckpt-format torch_dist; "
            f"{_other(parent, below)}"
        )
    if not (folder / "metadata.json").is_file():
        raise ValueError(
            f"--load {load}: {folder} has no metadata.json; expected a checkpoint of --ckpt-format torch_dist; "
            "convert others with Megatron's --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )
    checksums = read_checksums(folder)
    size = sum(path.stat().st_size for name in checksums if (path := folder / name).is_file())
    if size > SLOW_BYTES:
        print(f"verifying {folder} ({size / 1e9:.1f} GB)", file=sys.stderr)
    damaged = damaged_files(folder, checksums)
    if damaged:
        raise ValueError(
            f"--load {load}: {folder} is not what was saved: {joined(damaged, 3)}; expected files with its checksums; "
            f"{_other(parent, below)}"
        )
    return folder


def _other(folder: Path, below: int | None = None) -> str:
    """What to load instead of a checkpoint that cannot be: the newest complete one (before the iteration `below`)."""
    newest = newest_complete(folder, below)
    if newest is None:
        return "no other checkpoint there is complete; copy it again, or name another folder"
    return f"load the newest complete one: --load {shlex.quote(str(Checkpoint(folder, newest).path))}"


class _FilePart(io.RawIOBase):
    """The bytes [start, start + length) of an open file, as a file."""

    def __init__(self, file, start: int, length: int):
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self):
        return True

    def readable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self):
        return self._at

    def readinto(self, buffer):
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count


class TorchDistReader:
    """The tensors of one checkpoint. shapes, dtypes: by name, of the model's own tensors, not the optimizer's. rename:
    from a name in the checkpoint to the one that is used here."""

    def __init__(self, folder: Path, rename: Callable[[str], str] = str):
        self.folder = folder
        self._metadata = FileSystemReader(folder).read_metadata()
        tensors = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(("optimizer.", "rng_state"))
        }
        # import-hf writes the norm before experts by both of its names.
        twice = [name for name in tensors if stored_name(name) != name and stored_name(name) in tensors]
        tensors = {name: entry for name, entry in tensors.items() if name not in twice}
        self._stored = {rename(name): name for name in tensors}
        assert len(self._stored) == len(tensors), "two tensors of one name"
        self.shapes = {name: tuple(tensors[stored].size) for name, stored in self._stored.items()}
        self.dtypes = {name: tensors[stored].properties.dtype for name, stored in self._stored.items()}
        self._chunks = {(name, tuple(one.offsets)): one for name, entry in tensors.items() for one in entry.chunks}
        self._places = {
            (index.fqn, tuple(index.offset)): place
            for index, place in self._metadata.storage_data.items()
            if index.offset is not None
        }

    def read(self, name: str, first: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """The box of a tensor that begins at `first`. Where one stored piece holds all of it, a view of that piece, so
        that nothing is in memory twice.

        Raises ValueError when the checkpoint does not hold all of the box.
        """
        result, found, name = None, 0, self._stored[name]
        whole = self._chunks.get((name, tuple(first)))  # of 10,000 experts and more: not looked for among all
        if whole is not None and whole.sizes == torch.Size(size):
            return self._piece(name, whole)
        for chunk in self._metadata.state_dict_metadata[name].chunks:
            low = [max(*pair) for pair in zip(first, chunk.offsets)]
            high = [min(a + n, b + m) for a, n, b, m in zip(first, size, chunk.offsets, chunk.sizes)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            piece = self._piece(name, chunk)
            for axis, (a, b, start) in enumerate(zip(low, high, chunk.offsets)):
                piece = piece.narrow(axis, a - start, b - a)
            if piece.shape == torch.Size(size):
                return piece
            if result is None:
                result = torch.empty(size, dtype=piece.dtype)
            target = result
            for axis, (a, b, start) in enumerate(zip(low, high, first)):
                target = target.narrow(axis, a - start, b - a)
            target.copy_(piece)
            found += piece.numel()
            del piece
        if result is None or found != math.prod(size):
            raise ValueError(f"{self.folder}: {name} is not complete; the checkpoint is damaged; use another one")
        return result

    def _piece(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        place = self._places.get((name, tuple(chunk.offsets)))
        if place is None or place.transform_descriptors:
            raise ValueError(
                f"{self.folder}: a piece of {name} is missing or compressed; expected a plain torch_dist file"
            )
        path = self.folder / place.relative_path
        try:
            with path.open("rb", buffering=0) as file:
                part = io.BufferedReader(_FilePart(file, place.offset, place.length), 1 << 20)
                piece = torch.load(part, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path}: {name} cannot be read ({error}); the checkpoint is damaged") from error
        if piece.shape != chunk.sizes:
            raise ValueError(f"{path}: {name} has a piece of shape {list(piece.shape)}; expected {list(chunk.sizes)}")
        return piece


@dataclass
class TorchDistWriter:
    """Writes one checkpoint, piece by piece, into an empty folder; complete after `finish`."""

    folder: Path

    def __post_init__(self):
        self._file = (self.folder / "__0_0.distcp").open("wb")
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def add(self, name: str, shape: tuple[int, ...], first: tuple[int, ...], piece: torch.Tensor) -> None:
        """One piece of the tensor `name` of a global shape; it begins at `first`."""
        assert piece.is_contiguous() and piece.untyped_storage().nbytes() == piece.nbytes
        entry = self._entries.setdefault(
            name, TensorStorageMetadata(TensorProperties(dtype=piece.dtype), torch.Size(shape), [])
        )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(first), piece.shape))
        self._save(MetadataIndex(name, torch.Size(first)), piece)

    def add_object(self, name: str, content) -> None:
        """A pickled object, as Megatron names them: <key>/shard_<index>_<count>."""
        self._entries[name] = BytesStorageMetadata()
        self._save(MetadataIndex(name), content)

    def _save(self, index: MetadataIndex, content) -> None:
        start = self._file.tell()
        torch.save(content, self._file)
        self._places[index] = _StorageInfo(self._file.name.rsplit("/", 1)[-1], start, self._file.tell() - start)

    def finish(self) -> None:
        self._file.close()
        (self.folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        with (self.folder / ".metadata").open("wb") as file:
            pickle.dump(Metadata(self._entries, planner_data={}, storage_data=self._places), file)
