"""The memory of emulator.py: pointers and tensor descriptors into CPU tensors, shared memory with its chunks of
128 bytes."""

from copy import copy
from types import SimpleNamespace

import numpy as np
import torch


class Pointer:
    """A place, or an array of places, in a tensor's memory."""

    def __init__(self, memory, at=0):
        self.memory, self.at, self.dtype = memory, at, SimpleNamespace(element_ty=memory.dtype.type)

    def __add__(self, more):
        return Pointer(self.memory, self.at + more)

    def load(self, mask=True, other=None):
        if isinstance(self.at, np.ndarray):
            mask = np.broadcast_to(mask, self.at.shape)
            return np.where(mask, self.memory[np.where(mask, self.at, 0)], 0 if other is None else other).astype(
                self.memory.dtype
            )
        assert 0 <= self.at < len(self.memory)
        return self.memory[self.at].item()

    def store(self, values, mask=True):
        mask = np.broadcast_to(mask, self.at.shape)
        self.memory[self.at[mask]] = np.broadcast_to(values, self.at.shape)[mask]


def memory_of(tensor):
    """All that lies behind a tensor's first element, flat."""
    rest = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    return torch.as_strided(tensor, (rest,), (1,), tensor.storage_offset()).numpy()


class Box:
    """A tensor descriptor on the device."""

    def __init__(self, descriptor):
        self.view = torch.as_strided(
            descriptor.base, descriptor.shape, descriptor.strides, descriptor.base.storage_offset()
        ).numpy()
        self.rows, self.columns = descriptor.block_shape[2:]
        self.dtype, self.layout = self.view.dtype.type, None

    def _inside(self, coordinates):
        batch, head, row, column = (int(number) for number in coordinates)
        assert 0 <= batch < self.view.shape[0] and 0 <= head < self.view.shape[1] and row >= 0 and column >= 0
        return self.view[batch, head, row : row + self.rows, column : column + self.columns]

    def read(self, coordinates):
        found, inside = np.zeros((self.rows, self.columns), self.dtype), self._inside(coordinates)
        found[: inside.shape[0], : inside.shape[1]] = inside
        return found

    def write(self, coordinates, values):
        inside = self._inside(coordinates)
        inside[...] = values[: inside.shape[0], : inside.shape[1]]


class Shared:
    """Shared memory [..., rows, columns], where matrices lie in chunks of 128 bytes of columns."""

    def __init__(self, machine, flat, shape, chunk, turned=False):
        self.machine, self.flat, self.shape, self.chunk, self.turned = machine, flat, list(shape), chunk, turned
        self.dtype, self.part, self.whole = flat.dtype.type, slice(None), list(shape)
        assert flat.size == np.prod(shape)

    def index(self, number):
        size = self.flat.size // self.shape[0]
        assert 0 <= number < self.shape[0]
        return Shared(self.machine, self.flat[number * size : (number + 1) * size], self.shape[1:], self.chunk)

    def permute(self, order):
        assert order == (1, 0)
        found = copy(self)
        found.turned = not self.turned
        return found

    def slice(self, start, length):
        """Some rows of a matrix, which stay where they lie in it."""
        assert start >= 0 and start + length <= self.shape[0] and len(self.shape) == 2 and not self.turned
        found = copy(self)
        found.part, found.shape = slice(start, start + length), [length, self.shape[1]]
        return found

    def reinterpret(self, dtype, shape):
        assert dtype == self.dtype
        return Shared(self.machine, self.flat, shape, self.chunk)

    def _in_order(self):
        if self.chunk is None:
            return self.flat.reshape(self.whole)[self.part]
        *outer, rows, columns = self.whole
        wide = min(self.chunk, columns)
        return self.flat.reshape(*outer, columns // wide, rows, wide).swapaxes(-3, -2)[self.part]

    def read(self):
        values = self._in_order().reshape(self.shape)
        return values.T if self.turned else values.copy()

    def write(self, values):
        place = self._in_order()
        place[...] = np.asarray(values).reshape(place.shape)

    def load(self, layout):
        return self.read()

    def store(self, values):
        assert np.shape(values) == tuple(self.shape)
        self.machine.partition.unfenced |= self.chunk is not None
        self.write(values)
