"""Safetensors files (https://huggingface.co/docs/safetensors), tensor by tensor. The library safetensors reads
them and checks the header. They are written here, because the library needs all tensors of a file in memory. A file has
8 bytes with the header's length, a JSON header with dtype, shape and place of every tensor, and then the bytes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from s2_megatron.config.errors import joined, printable

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INDEX = "model.safetensors.index.json"
READ_AT_A_TIME = 1 << 20  # bytes: beside them their check takes a few times as many


class TensorShape(NamedTuple):
    """A tensor that is not in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


class SafetensorsWriter:
    """Writes tensors into files of at most `largest_file` bytes (one tensor at least), in the order of `tensors`."""

    def __init__(self, folder: Path, tensors: Iterable[TensorShape], largest_file: int):
        self.folder = folder
        files: list[list[TensorShape]] = [[]]
        for tensor in tensors:
            if files[-1] and sum(other.nbytes for other in files[-1]) + tensor.nbytes > largest_file:
                files.append([])
            files[-1].append(tensor)
        count = len(files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        self._files = list(zip(names if count > 1 else ["model.safetensors"], files))
        self._waiting = [(name, tensor) for name, tensors in self._files for tensor in tensors]
        self._open = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensors in self._files for tensor in tensors)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, exactly as announced."""
        file, expected = self._waiting.pop(0)
        assert (name, tuple(tensor.shape), tensor.dtype) == expected, f"{name} {tensor.shape} instead of {expected}"
        if self._open is None or not self._open.name.endswith(file):
            self._begin(file)
        self._open.write(_bytes(tensor))

    def _begin(self, file: str) -> None:
        if self._open is not None:
            self._open.close()
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for tensor in dict(self._files)[file]:
            place = [at, at + tensor.nbytes]
            header[tensor.name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
            at += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._open = (self.folder / file).open("wb")
        self._open.write(struct.pack("<Q", len(text)) + text)

    def finish(self) -> None:
        """Closes the last file, and writes the index of several."""
        assert not self._waiting, f"{len(self._waiting)} tensors were announced and not written"
        self._open.close()
        if len(self._files) > 1:
            places = {tensor.name: file for file, tensors in self._files for tensor in tensors}
            content = {"metadata": {"total_size": self.nbytes}, "weight_map": places}
            (self.folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


class SafetensorsFolder:
    """The tensors of a model's folder. tensors: their shapes by name."""

    def __init__(self, folder: Path):
        """Raises ValueError when there are no safetensors, a file is not one, and when files and index differ."""
        from safetensors import SafetensorError, safe_open

        files, places = _files(folder)
        self.tensors: dict[str, TensorShape] = {}
        self._places: dict[str, Path] = {}
        dtypes = {text: dtype for dtype, text in DTYPES.items()}
        for file in files:
            path = folder / file
            try:
                with safe_open(path, framework="pt") as opened:
                    found = {
                        name: (part.get_dtype(), part.get_shape())
                        for name in opened.keys()  # noqa: SIM118, it is no mapping
                        for part in [opened.get_slice(name)]
                    }
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} cannot be read as safetensors ({printable(error, 200)}); expected a complete file; copy "
                    "it again, or save the model again with save_pretrained"
                ) from error
            for name, (dtype, shape) in found.items():
                if dtype not in dtypes:
                    raise ValueError(
                        f"{path}: {printable(name, 100)} has dtype {dtype}; expected one of {', '.join(dtypes)}; save "
                        "the model again in one of them"
                    )
                if name in self._places or places.get(name, file) != file:
                    other = self._places[name].name if name in self._places else places[name]
                    raise ValueError(
                        f"{path} holds {printable(name, 100)}, and so does {printable(other, 100)}, or {INDEX} says "
                        "so; expected every tensor once; save the model again with save_pretrained"
                    )
                self.tensors[name] = TensorShape(name, tuple(shape), dtypes[dtype])
                self._places[name] = path
        missing = [name for name in places if name not in self._places]
        if missing:
            raise ValueError(
                f"{folder / INDEX} names tensors that its files do not hold ({joined(missing, 3)}); expected an index "
                "of these files; copy the folder again, or save the model again with save_pretrained"
            )

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its own dtype. Raises ValueError when it cannot be read, or holds NaN or infinity."""
        from safetensors import SafetensorError, safe_open

        path, expected = self._places[name], self.tensors[name]
        tensor = torch.empty(expected.shape, dtype=expected.dtype)
        rows = max(1, READ_AT_A_TIME // max(1, expected.nbytes // max(1, tensor.shape[0])))
        try:
            for first in range(0, tensor.shape[0], rows):
                with safe_open(path, framework="pt") as opened:  # each time: what was mapped before is let go
                    tensor[first : first + rows] = opened.get_slice(name)[first : first + rows]
                if not bool(tensor[first : first + rows].isfinite().all()):
                    raise ValueError(
                        f"{path}: {name} holds NaN or infinity; expected numbers; the model was damaged, or had "
                        "diverged; take another checkpoint of it"
                    )
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: {name} cannot be read ({printable(error, 200)}); copy the file again") from error
        return tensor


def _files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The names of the weights' files, and the file of every tensor as the index says: of transformers' choice where
    there are both a single file and an index. Raises ValueError."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if single.is_file() or single.is_symlink():
        return [single.name], {}
    if not (index.is_file() or index.is_symlink()):
        raise ValueError(
            f"{folder}: neither model.safetensors nor {INDEX}; expected a Hugging Face folder with safetensors; "
            "save the model again with save_pretrained"
        )
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        places = content.get("weight_map") if isinstance(content, dict) else None
        reason = "it has no object weight_map of tensors and files"
    except (OSError, ValueError, RecursionError) as error:
        places, reason = None, printable(error, 200)
    names = places.values() if isinstance(places, dict) else []
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        places, reason = None, "weight_map names files that are not in this folder"
    if not isinstance(places, dict) or not places:
        raise ValueError(
            f"{index} cannot be read as the index of the weights ({reason}); expected what save_pretrained writes; "
            "copy it again, or save the model again with save_pretrained"
        )
    return sorted(set(places.values())), places
