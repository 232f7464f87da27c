"""What the Gluon of Triton 3.6, 3.7, 3.8 and 3.9 names differently, under one name each. Looked up by what the
installed Triton has, not by its version number: the public name comes first, wherever there is one.

    reinterpret(buffer, dtype, shape, layout)    shared memory seen as another shape     `reinterpret` from 3.9 on, `_reinterpret` before
    thread_barrier()                             of the threads of one warpgroup         `gl.barrier` from 3.7 on, `gl.thread_barrier` before
    tma_load(desc, coord, barrier, buffer)       global to shared memory, by TMA         `tma.async_load` from 3.8 on
    tma_store(desc, coord, buffer)               shared to global memory, by TMA         `tma.async_store` from 3.8 on
    tma_add(desc, coord, buffer)                 desc[coord] += buffer, by TMA           `tma.async_atomic_add` from 3.8 on, not exported before
    copy_to_shared(buffer, pointers, mask=)      global to shared memory, by threads     `async_copy.async_load` from 3.8 on
    @aggregate                                   a class of values that go together      `gluon.aggregate` from 3.8 on, not exported before
    raw_launch(compiled, grid, arguments)        a launch as the launcher in C takes it  private in all of them; None where it is another
    compile_settings()                           what Triton reads in every launch       `fpsan_homomorphic_casts` from 3.9 on
"""
import copy
import inspect
from typing import NamedTuple

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.language import core
from triton.runtime.driver import driver

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


class _At(NamedTuple):
    """A tensor of which only the address matters."""

    address: int

    def data_ptr(self) -> int:
        return self.address


_aggregate = getattr(gluon, "aggregate", None) or core._aggregate


def aggregate(cls):
    """A class of values that kernels pass on together. Its annotations are names for the reader: a field may hold any
    value of the language, also a constant, None or another aggregate. It is made with values for all fields, in order
    or by name, and its methods are jitted functions."""
    fields = tuple(cls.__annotations__)

    def __init__(self, *values, **named):
        given = dict(zip(fields, values)) | named
        if len(values) + len(named) != len(fields) or set(given) != set(fields):
            raise TypeError(f"{cls.__name__} has the fields {fields}, and was given {len(values)} values, {[*named]}")
        for name in fields:
            setattr(self, name, given[name])

    __init__.__triton_builtin__ = True  # the compiler runs it as it is
    cls.__init__ = __init__
    cls.__annotations__ = dict.fromkeys(fields, gl.base_value)
    made = _aggregate(cls)
    made.aggregate_fields = fields
    return made


def current_stream() -> int:
    """The stream of the current device that launches go to."""
    return driver.active.get_current_stream(driver.active.get_current_device())


def compile_settings() -> tuple | None:
    """Triton's settings that choose what is compiled beside a launch's arguments, read in every launch (a profiler that
    looks into kernels sets one). None where a hook decides anew for each."""
    if knobs.runtime.add_stages_inspection_hook is not None:
        return None
    compilation = knobs.compilation
    return knobs.runtime.debug, compilation.instrumentation_mode, getattr(compilation, "fpsan_homomorphic_casts", False)


class _OtherLauncher(Exception):
    """Triton's launcher is another than RawLaunch knows."""


class RawLaunch:
    """A launch of a compiled kernel as Triton's launcher in C takes it, to be made again with other addresses.

    Triton's own Python (the launcher's object, and what makes tensor maps of descriptors) makes the arguments once,
    for a function in place of the launcher in C that writes them down. In `values` a box is its tensor map, its shape
    and its strides, and tensors are addresses.
    """

    def __init__(self, compiled, grid, boxes, pointers, rest):
        launcher = copy.copy(compiled.run)
        if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
            raise _OtherLauncher  # each launch has memory of its own
        described = [box for box in boxes if box is not None]
        metadata = getattr(compiled.metadata, "tensordesc_meta", None) or []
        # Behind a function that makes tensor maps, where there is any to make.
        self._in_c = inspect.getclosurevars(launcher.launch).nonlocals["launcher"] if described else launcher.launch
        written, stream, asked, enter, leave = [], *(object() for _ in range(4))  # found again by what they are
        launcher.launch = nvidia.wrap_handle_tensordesc(lambda *given: written.extend(given), dict(compiled.src.signature), metadata)
        launcher(*grid, stream, compiled.function, compiled.packed_metadata, asked, enter, leave, *boxes, *pointers, *rest)
        self._one_list = hasattr(launcher, "kernel_signature")  # of the kernel's arguments, from 3.7 on
        begin = len(written) - 1 if self._one_list else written.index(leave) + 1
        self._front, values = written[:begin], list(written[-1]) if self._one_list else written[begin:]
        self._stream, self._asked, self._enter, self._leave = map(self._front.index, (stream, asked, enter, leave))
        self._front[self._asked] = self._front[self._enter] = self._front[self._leave] = None
        self._compiled, self._grid = compiled, grid

        self.maps, place = [], 0  # (place among the values, number of the box)
        for number, box in enumerate(boxes):
            if box is not None:
                self.maps.append((place, number))
            place += 1 if box is None else 1 + len(box.shape) + len(box.strides)
        self.pointers = slice(place, place + len(pointers))
        if len(values) != place + len(pointers) + len(rest) or any(a is not b for a, b in zip(values[self.pointers], pointers)):
            raise _OtherLauncher  # arguments in another order
        self._alive = [value for value in rest if hasattr(value, "data_ptr")]  # `values` has their addresses alone
        self.values = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in values]
        self._described = {}
        for (_, number), box, more in zip(self.maps, described, metadata, strict=True):
            self._described[number] = copy.copy(box), more
            self._described[number][0].base = None  # the first call's tensor, which must not live on
        # A third argument from 3.8 on, of no use for a box of this kind.
        self._more = (None,) * (len(inspect.signature(nvidia.make_tensordesc_arg).parameters) - 2)

    def tensor_map(self, number: int, address: int):
        """The tensor map of a box of this launch, at another address."""
        box, metadata = self._described[number]
        there = copy.copy(box)
        there.base = _At(address)
        return nvidia.make_tensordesc_arg(there, metadata, *self._more)[0]

    def start(self, stream: int, values: list) -> None:
        front = self._front.copy()
        front[self._stream] = stream
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            front[self._asked] = self._compiled.launch_metadata(self._grid, stream, *values)
            front[self._enter], front[self._leave] = enter, leave
        if self._one_list:
            self._in_c(*front, values)
        else:
            self._in_c(*front, *values)


def raw_launch(compiled, grid, boxes, pointers, rest) -> RawLaunch | None:
    """The arguments: a compiled kernel (or whatever stands for Triton without a GPU), the programs, and the kernel's
    arguments in order: descriptors or None, tensors, others. None for a launcher that is not as RawLaunch knows it;
    then every launch goes through Triton's Python."""
    try:
        return RawLaunch(compiled, grid, boxes, pointers, rest)
    except (_OtherLauncher, AttributeError, KeyError, TypeError, ValueError):
        return None
