"""The host's part of a call without a GPU: all of the op's and Triton's Python, and no kernel.

What is replaced: Triton's driver (it names a Hopper GPU), the compiler, and the compiled kernels, which do nothing.
What a measurement under it leaves out of a real call: Triton's launcher in C, the making of tensor maps, and the switch
to the tensors' device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from s2_megatron.kernels import dispatch, trial
from s2_megatron.kernels.hopper import descriptors, gluon_versions, launch
from s2_megatron.ops import api

HOPPER = GPUTarget("cuda", 90, 32)
MULTIPROCESSORS = 132


class _Driver:
    """Triton's driver of one GPU, of which no more is asked than what a launch asks."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 2**18})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


class _Compiled:
    """A compiled kernel that does nothing."""

    function, packed_metadata = 0, None

    def launch_metadata(self, grid, stream, *arguments):
        return None

    def run(self, *arguments) -> None:
        pass


class _RawLaunch(gluon_versions.RawLaunch):
    """A launch of it again: the same way through Python up to the launcher in C, which does nothing. A tensor map is
    its address; its shape and strides are left out."""

    def __init__(self, compiled, grid, boxes, pointers, rest):
        self._front, self._stream, self._one_list = [*grid, 0, compiled.function, *[None] * 10], 3, True
        self.values = [*boxes, *[tensor.data_ptr() for tensor in pointers], *rest]
        self.maps = [(number, number) for number, box in enumerate(boxes) if box is not None]
        self.pointers = slice(len(boxes), len(boxes) + len(pointers))

    def _in_c(self, *arguments) -> None:
        pass

    def tensor_map(self, number: int, address: int) -> int:
        return address


def _compile(function, key, signature, device, *more) -> _Compiled:
    kernels, *_ = function.device_caches[device]
    kernels[key] = _Compiled()
    return kernels[key]


def _always(value):
    """A function as fast as the one that it stands for; a Mock would take longer than what is measured."""
    return lambda device: value


@contextmanager
def stubbed(hopper: bool) -> Iterator[None]:
    """Calls of the op on CPU tensors take the way of GPU tensors: to the kernels for Hopper, or to the portable ones.

    Raises RuntimeError under TRITON_INTERPRET=1, which replaces Triton's launches itself."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 is set, and kernels are interpreted; unset it")
    resolve, before = api.resolve_backend, driver._active
    driver.set_active(_Driver())
    try:
        with (
            mock.patch.object(JITFunction, "_do_compile", _compile),
            mock.patch.object(dispatch, "_is_hopper", _always(hopper)),
            mock.patch.object(trial, "MEASURED", (trial.release(),)),  # a trial would run kernels
            mock.patch.object(descriptors, "raw_launch", _RawLaunch),
            mock.patch.object(launch, "_multiprocessors", _always(MULTIPROCESSORS)),
            mock.patch.object(api, "resolve_backend", lambda name, device_type: resolve(name, "cuda")),
        ):
            yield
    finally:
        driver.set_active(before)
