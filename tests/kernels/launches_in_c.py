"""Launches of the Hopper kernels as a CUDA driver sees them, on a machine without a GPU: Triton's compiler, driver and
launcher in C are real, the CUDA driver is fake_cuda.c.

    TRITON_LIBCUDA_PATH=folder LD_LIBRARY_PATH=folder python tests/kernels/launches_in_c.py

folder: of libcuda.so.1, compiled from fake_cuda.c. Every launch is made through Triton and again without it, with the
same tensors, and both must give the driver the same function, grid, stream and parameters, byte for byte. Prints JSON
as its last line: how many launches were compared, and what else the test asks for.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import weakref
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime.driver import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from s2_megatron.kernels.hopper import descriptors
from s2_megatron.ops import api
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.ranges import make_range_pattern
from tests.kernels.record_launches import believe_in_hopper

PATTERN = make_range_pattern(block_size=64, num_heads=4, num_kv_heads=2, ranges=((2, 1), (None, 4)))
SIZES = {"1": 1, "8": 1, "16": 2, "32": 4, "64": 8}  # by the digits of a type


class OneGpu:
    """Triton's driver of one GPU, as far as launches ask; its launcher and utilities are the real ones."""

    def __init__(self):
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0x57E4

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Cuda:
    """The fake CUDA driver."""

    def __init__(self):
        self.library = ctypes.CDLL(os.path.join(os.environ["TRITON_LIBCUDA_PATH"], "libcuda.so.1"))
        self.library.fake_recorded.restype = ctypes.POINTER(ctypes.c_uint8)
        self._known = set()

    def record(self, start) -> bytes:
        """What the launches of start() gave the driver."""
        self.library.fake_record(1)
        start()
        count = ctypes.c_size_t()
        found = self.library.fake_recorded(ctypes.byref(count))
        recorded = bytes(found[: count.value])
        self.library.fake_record(0)
        return recorded

    def learn(self, kernel) -> None:
        """Tells the fake driver the sizes of the parameters of a kernel's compiled variants."""
        for compiled in kernel.device_caches[0][0].values():
            if compiled.function in self._known:
                continue
            sizes = []
            for kind in compiled.src.signature.values():
                if kind.startswith("tensordesc"):
                    sizes += [128] + [4] * 4 + [8] * 4
                elif kind != "constexpr":
                    sizes.append(8 if kind.startswith("*") else SIZES["".join(filter(str.isdigit, kind))])
            self.library.fake_parameters(
                ctypes.c_ssize_t(compiled.function), len(sizes), (ctypes.c_int * len(sizes))(*sizes)
            )
            self._known.add(compiled.function)

    @property
    def maps(self) -> int:
        """How many tensor maps were made so far."""
        return self.library.fake_maps()


def compare_launches(cuda: Cuda) -> list[int]:
    """From here on each launch is made through Triton and again without it. Returns a list that grows: the bytes of
    every launch that was compared."""
    compared, real = [], descriptors.Launches.start

    def start(launches, kernel, *args, **constants):
        def through(made):
            return lambda: real(made, kernel, *args, **constants)

        through(descriptors.Launches(launches.grid[0], launches.arguments))()  # compiled
        cuda.learn(kernel)
        expected = cuda.record(through(descriptors.Launches(launches.grid[0], launches.arguments)))
        repeat = through(launches)()
        assert repeat is not None, f"{kernel.__name__}: Triton {triton.__version__} has another launcher"
        again = cuda.record(through(launches))
        assert again == expected, f"{kernel.__name__}: {expected.hex(' ', 8)}\n{again.hex(' ', 8)}"
        compared.append(len(expected))
        return repeat

    descriptors.Launches.start = start
    return compared


def attend(layout, dim, rows=200, **options):
    """Forward and backward with new tensors. Returns whether their memory outlives the call."""
    fused = torch.randn(rows, 1, 8, dim).to(torch.bfloat16)
    inputs = [part.requires_grad_() for part in fused.split([4, 2, 2], 2)]
    out, lse = api.s2_attention(*inputs, layout, return_lse=True, **options)
    torch.autograd.grad((out, lse), inputs, (torch.randn_like(out), torch.randn_like(lse)))
    alive = [weakref.ref(tensor.untyped_storage()) for tensor in (fused, out, lse)]
    del fused, inputs, out, lse
    gc.collect()
    return any(storage() is not None for storage in alive)


def main() -> None:
    driver.set_active(OneGpu())
    believe_in_hopper()
    api.resolve_backend = lambda name, device_type: "gluon"
    cuda, layout = Cuda(), build_layout(PATTERN)
    compared = compare_launches(cuda)
    assert not attend(layout, 64), "what is remembered of a call holds its tensors"
    assert not attend(layout, 128)  # dQ in a kernel of its own
    assert len(compared) == 8 and min(compared) > 60, compared

    maps, seen = cuda.maps, []
    fused = torch.randn(200, 1, 8, 128).to(torch.bfloat16).split([4, 2, 2], 2)
    call = api.AttentionCall(layout, 128**-0.5, backend="gluon")
    out, lse = torch.empty(200, 1, 4, 128, dtype=torch.bfloat16), torch.empty(1, 4, 200)
    again, _ = layout.known_forwards[api.kind_of_call(call, *fused)]
    first = cuda.record(lambda: again(*fused, out, lse))
    new, maps = cuda.maps - maps, cuda.maps
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    for hook in hooks:
        hook.add(lambda metadata: seen.append(metadata.get()["name"]))
    second = cuda.record(lambda: again(*fused, out, lse))
    assert first == second and len(compared) == 8  # not by Launches.start
    print(json.dumps(dict(compared=len(compared), new_maps=new, more_maps=cuda.maps - maps, hooks=seen)))


if __name__ == "__main__":
    main()
