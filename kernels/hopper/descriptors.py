"""How the Hopper kernels are launched: once through Triton, which looks at every argument to choose what to compile,
and from then on without that look, which takes as long as a short kernel. What it relies on is the same in Triton 3.6
to 3.9, see gluon_versions.py.

Triton chooses by the types of tensors, by whether a pointer lies on 16 bytes, by whether an integer is 1, a multiple of
16 or longer than 32 bits, and by the constants. Launches that are equal in all of it, because the numbers are the same,
run the same machine code. Triton's launch hooks run for all of them; settings that ask for another compilation count at
the first launch of a kind.
"""
from __future__ import annotations

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from s2_megatron.kernels.compile_options import OPTIONS

BLOCK = 64  # rows of a box
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


class _Described(NamedTuple):
    """What Triton's launcher reads of a descriptor; the last from 3.7 on."""

    base: object
    shape: list
    strides: list
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class Launches:
    """The launches of a kernel for one shape. grid: programs. arguments: all that follow from the shape and the
    pattern, by name."""

    def __init__(self, grid: int, arguments: dict):
        self.grid, self.arguments = (grid, 1, 1), arguments
        self._compiled = {}

    def __reduce__(self):  # compiled kernels can neither be copied nor pickled
        return type(self), (self.grid[0], self.arguments)

    def start(self, kernel, boxes, pointers, strided, **constants):
        """boxes (None: there is no such tensor), pointers (tensors): the kernel's first arguments, in order. strided:
        {letter: tensor} whose strides are stride_<letter>b, h and s. constants: the other arguments, hashable."""
        kind = (kernel.__name__, *[box and (box.tensor.shape, box.tensor.stride(), box.tensor.dtype) for box in boxes],
                *[(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in pointers],
                *[tensor.stride() for tensor in strided.values()], *constants.values())
        known = self._compiled.get(kind)
        if known is not None:
            compiled, described, rest = known
            compiled[self.grid](*[box and _Described(box.tensor, *sizes) for box, sizes in zip(boxes, described)], *pointers, *rest)
            return
        for letter, tensor in strided.items():
            constants.update(zip((f"stride_{letter}b", f"stride_{letter}h", f"stride_{letter}s"), tensor.stride()))
        named = {**self.arguments, **constants}
        descriptors = [box and box.descriptor() for box in boxes]
        compiled = kernel[self.grid](*descriptors, *pointers, **named, **OPTIONS)
        if compiled is not None:  # None from whatever stands for Triton without a GPU
            self._compiled[kind] = (compiled, [box and (box.shape, box.strides) for box in descriptors],
                                    [named[name] for name in kernel.arg_names[len(boxes) + len(pointers):]])
