"""Triton on a machine without a GPU, as far as launches of the Hopper kernels ask it: it writes them down."""

import copy

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from s2_megatron.kernels import dispatch, trial
from s2_megatron.kernels.hopper import descriptors as hopper_launch
from s2_megatron.kernels.hopper import launch as hopper
from s2_megatron.kernels.hopper import repeats
from s2_megatron.kernels.hopper.gluon_versions import RawLaunch
from tests.kernels.record_launches import launch_of


class Raw(RawLaunch):
    """The launcher in C of a launch that Triton saw: it rebuilds the arguments from addresses."""

    def __init__(self, made, launch, grid, boxes, pointers, rest):
        self.made, self.seen, self.launched = made, launch, grid
        self.values = [*boxes, *[None] * len(pointers), *rest]
        self.maps = [(number, number) for number, box in enumerate(boxes) if box is not None]
        self.pointers = slice(len(boxes), len(boxes) + len(pointers))

    def tensor_map(self, number, address):
        return number, address

    def start(self, stream, values):
        given = {}
        for (name, known), value in zip(self.seen.arguments.items(), values, strict=True):
            if isinstance(known, TensorDescriptor):
                assert value[0] == len(given)
                value = copy.copy(known)
                value.base = Address(value_at(values, given), known.base)
            elif isinstance(known, torch.Tensor) and isinstance(value, int):
                value = Address(value, known)
            given[name] = value
        self.made.append((launch_of(self.seen.kernel, **given, **self.seen.options), self.launched, True))


def value_at(values, given):
    """The address of the box that comes next."""
    return values[len(given)][1]


class Address:
    """A tensor at an address, of another one's type."""

    def __init__(self, address, like):
        self.address, self.dtype, self.device = address, like.dtype, like.device

    def data_ptr(self):
        return self.address


class Triton:
    """Stands for it. made: every launch of a Gluon kernel, and of `portable` ones, as Triton would see it, (launch,
    grid, whether Triton was left out), in order."""

    def __init__(self, *portable):
        self.made, self.portable = [], portable

    def run(self, kernel, *args, grid, warmup, **kwargs):
        if not kernel.is_gluon() and kernel not in self.portable:
            return None
        self.made.append((launch_of(kernel, *args, **kwargs), grid, False))
        return self.made[-1][0]

    def raw_launch(self, compiled, grid, boxes, pointers, rest):
        """For a kernel that `run` returned."""
        return compiled and Raw(self.made, compiled, grid, boxes, pointers, rest)


def stand_in(monkeypatch) -> Triton:
    """A Triton of one Hopper GPU, on a machine without; the fixture `triton_`."""
    # Without a GPU the portable kernels are interpreted; these are looked at as Triton compiles them.
    delta = JITFunction(hopper.s2_delta_kernel.fn, do_not_specialize=["n_counters", "n_rows", "stride_lb", "stride_lh"])
    scale = JITFunction(hopper.s2_scale_kernel.fn, do_not_specialize=["n_rows"])
    triton_ = Triton(delta, scale)
    monkeypatch.setattr(hopper_launch, "raw_launch", triton_.raw_launch)
    for module in (hopper_launch, repeats):
        monkeypatch.setattr(module, "current_stream", lambda: 0)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: triton_.run(*args, **kwargs))
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(dispatch, "_is_hopper", lambda device: True)
    monkeypatch.setattr(trial, "MEASURED", (trial.release(),))
    monkeypatch.setattr(hopper, "s2_delta_kernel", delta)
    monkeypatch.setattr(hopper, "s2_scale_kernel", scale)
    return triton_
