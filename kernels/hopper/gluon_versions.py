"""What the Gluon of Triton 3.6, 3.7, 3.8 and 3.9 names differently, under one name each. Looked up by what the
installed Triton has, not by its version number: the public name comes first, wherever there is one.

    reinterpret(buffer, dtype, shape, layout)    shared memory seen as another shape     `reinterpret` from 3.9 on, `_reinterpret` before
    thread_barrier()                             of the threads of one warpgroup         `gl.barrier` from 3.7 on, `gl.thread_barrier` before
    tma_load(desc, coord, barrier, buffer)       global to shared memory, by TMA         `tma.async_load` from 3.8 on
    tma_store(desc, coord, buffer)               shared to global memory, by TMA         `tma.async_store` from 3.8 on
    tma_add(desc, coord, buffer)                 desc[coord] += buffer, by TMA           `tma.async_atomic_add` from 3.8 on, not exported before
    copy_to_shared(buffer, pointers, mask=)      global to shared memory, by threads     `async_copy.async_load` from 3.8 on
    @aggregate                                   a class of values that go together      `gluon.aggregate` from 3.8 on, not exported before
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.language import core

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

if not (hasattr(tma, "async_atomic_add") and hasattr(gl.shared_memory_descriptor, "reinterpret")):
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:

    @builtin
    def tma_add(desc, coord, buffer, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, buffer.handle)


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return buffer.reinterpret(dtype, shape, layout)
else:

    @builtin
    def reinterpret(buffer, dtype, shape, layout, _semantic=None):
        return buffer._reinterpret(dtype, shape, layout, _semantic=_semantic)


_aggregate = getattr(gluon, "aggregate", None) or core._aggregate


def aggregate(cls):
    """A class of values that kernels pass on together. Its annotations are names for the reader: a field may hold any
    value of the language, also a constant, None or another aggregate. It is made with values for all fields, in order,
    and its methods are jitted functions."""
    fields = tuple(cls.__annotations__)

    def __init__(self, *values):
        if len(values) != len(fields):
            raise TypeError(f"{cls.__name__} has the fields {fields}, and was given {len(values)} values")
        for name, value in zip(fields, values):
            setattr(self, name, value)

    __init__.__triton_builtin__ = True  # the compiler runs it as it is
    cls.__init__ = __init__
    cls.__annotations__ = dict.fromkeys(fields, gl.base_value)
    made = _aggregate(cls)
    made.aggregate_fields = fields
    return made
