"""How the Hopper kernels are launched: once through Triton, which looks at every argument to choose what to compile,
and from then on without that look, which takes as long as a short kernel: by Triton's launcher in C, with the arguments
of the first launch but for the addresses (gluon_versions.py says what that relies on).

Triton chooses by the types of tensors, by whether a pointer lies on 16 bytes, by whether an integer is 1, a multiple of
16 or longer than 32 bits, and by the constants. Launches that are equal in all of it, because the numbers are the same,
run the same machine code. Triton's launch hooks run for all of them, and after a change of the settings that ask for
another compilation launches go through Triton.
"""
from __future__ import annotations

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from s2_megatron.kernels.compile_options import OPTIONS
from s2_megatron.kernels.hopper.gluon_versions import RawLaunch, compile_settings, current_stream, raw_launch

BLOCK = 64  # rows of a box
MOST_MAPS = 1024  # tensor maps that are remembered, of a box of a launch
MATRIX = gl.NVMMASharedLayout(128, 16, rank=4)
MATRIX_FP32 = gl.NVMMASharedLayout(128, 32, rank=4)


class Box(NamedTuple):
    """Of a tensor [B, heads, rows, D] 64 rows and `columns` columns go through TMA at a time; what lies outside reads
    as 0 and is not written. Heads with stride 0 are one."""

    tensor: object
    columns: int
    layout: gl.NVMMASharedLayout = MATRIX

    def descriptor(self) -> TensorDescriptor:
        shape, strides = list(self.tensor.shape), list(self.tensor.stride())
        if strides[1] == 0:
            shape[1] = 1
        for dim in range(3):
            if shape[dim] == 1:
                strides[dim] = BLOCK
        return TensorDescriptor(self.tensor, shape, strides, [1, 1, BLOCK, self.columns], self.layout)


class Repeat:
    """A launch that is made again, with tensors of the same kind elsewhere in memory.

    The tensor maps of a box (what TMA reads: 128 bytes on the host, passed by value) are made once for each address: a
    training step meets the same ones again and again.
    """

    def __init__(self, raw: RawLaunch):
        self._raw, self._maps = raw, [(place, number, {}) for place, number in raw.maps]

    def start(self, stream: int, boxes: list[int | None], pointers: list[int]) -> None:
        """boxes, pointers: addresses, for each box and each pointer of the first launch."""
        raw = self._raw
        values = raw.values.copy()
        values[raw.pointers] = pointers
        for place, number, maps in self._maps:
            address = boxes[number]
            found = maps.get(address)
            if found is None:
                if len(maps) >= MOST_MAPS:
                    maps.clear()
                found = maps[address] = raw.tensor_map(number, address)
            values[place] = found
        raw.start(stream, values)


class Launches:
    """The launches of a kernel for one shape. grid: programs. arguments: all that follow from the shape and the
    pattern, by name."""

    repeated = True  # False: there is one launch alone, and to prepare its repeat would take as long again

    def __init__(self, grid: int, arguments: dict):
        self.grid, self.arguments = (grid, 1, 1), arguments
        self._repeats = {}

    def __reduce__(self):  # compiled kernels can neither be copied nor pickled
        return type(self), (self.grid[0], self.arguments)

    def start(self, kernel, boxes, pointers, strided, **constants) -> Repeat | None:
        """boxes (None: there is no such tensor), pointers (tensors): the kernel's first arguments, in order. strided:
        {letter: tensor} whose strides are stride_<letter>b, h and s. constants: the other arguments, hashable. Returns
        how to make this launch again; None where it is not `repeated`, and where this Triton's launcher or settings are
        others than are known."""
        settings = compile_settings() if self.repeated else None
        kind = None if settings is None else (
            kernel.__name__, settings, *[box and (box.tensor.shape, box.tensor.stride(), box.tensor.dtype) for box in boxes],
            *[(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in pointers],
            *[tensor.stride() for tensor in strided.values()], *constants.values())
        repeat = self._repeats.get(kind)
        if repeat is not None:
            repeat.start(current_stream(), [box and box.tensor.data_ptr() for box in boxes], [tensor.data_ptr() for tensor in pointers])
            return repeat
        for letter, tensor in strided.items():
            constants.update(zip((f"stride_{letter}b", f"stride_{letter}h", f"stride_{letter}s"), tensor.stride()))
        named = {**self.arguments, **constants}
        descriptors = [box and box.descriptor() for box in boxes]
        compiled = kernel[self.grid](*descriptors, *pointers, **named, **OPTIONS)
        rest = [named[name] for name in kernel.arg_names[len(boxes) + len(pointers):]]
        raw = None if settings is None else raw_launch(compiled, self.grid, descriptors, pointers, rest)
        if raw is not None:
            repeat = self._repeats[kind] = Repeat(raw)
        return repeat


def share_rows(tensor) -> bool:
    """Whether the heads of a [B, heads, rows, D] view lie in the same memory: blocks in slots, each of one head."""
    return tensor.shape[1] > 1 and tensor.stride(1) == 0


def loadable(tensor) -> bool:
    """Whether TMA can address a [B, heads, rows, D] view: contiguous head dims, all else on 16 bytes."""
    *strides, unit = tensor.stride()
    whole = 16 // tensor.element_size()  # elements in 16 bytes
    return (unit == 1 and tensor.data_ptr() % 16 == 0
            and all((0 < stride < 2**36 and stride % whole == 0) or size == 1 or (dim == 1 and stride == 0)
                    for dim, (size, stride) in enumerate(zip(tensor.shape, strides))))
