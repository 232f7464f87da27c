"""Safetensors files (https://huggingface.co/docs/safetensors), tensor by tensor: 8 bytes with the header's length, a
JSON header with dtype, shape and place of every tensor, the bytes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INDEX = "model.safetensors.index.json"


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
        """Raises ValueError when there are no safetensors, or a file is not one."""
        index, single = folder / INDEX, folder / "model.safetensors"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif single.is_file():
            files = [single.name]
        else:
            raise ValueError(
                f"{folder}: neither model.safetensors nor {INDEX}; expected a Hugging Face folder with safetensors; "
                "save the model again with save_pretrained"
            )
        self.tensors: dict[str, TensorShape] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        dtypes = {text: dtype for dtype, text in DTYPES.items()}
        for file in files:
            path = folder / file
            try:
                with path.open("rb") as opened:
                    (length,) = struct.unpack("<Q", opened.read(8))
                    header = json.loads(opened.read(length))
                end = 8 + length + max(entry["data_offsets"][1] for key, entry in header.items() if key[:2] != "__")
            except (OSError, ValueError, struct.error, KeyError, MemoryError, OverflowError) as error:
                raise ValueError(f"{path} cannot be read as safetensors ({error}); the folder is damaged") from error
            if path.stat().st_size < end:
                raise ValueError(f"{path} has {path.stat().st_size} bytes; expected {end}; the file is not complete")
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if entry["dtype"] not in dtypes:
                    raise ValueError(f"{path}: {name} has dtype {entry['dtype']}; expected one of {', '.join(dtypes)}")
                self.tensors[name] = TensorShape(name, tuple(entry["shape"]), dtypes[entry["dtype"]])
                self._places[name] = (path, 8 + length + entry["data_offsets"][0])

    def read(self, name: str) -> torch.Tensor:
        path, start = self._places[name]
        tensor = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            left = _bytes(tensor)
            while left:
                count = file.readinto(left)
                if not count:
                    raise ValueError(f"{path} ends inside of {name}; the file is damaged")
                left = left[count:]
        return tensor
