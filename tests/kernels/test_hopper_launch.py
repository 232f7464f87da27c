"""Launches that leave Triton's look at their arguments out: the same machine code, grid and arguments as with it.
Without a GPU."""

import copy
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from s2_megatron.context_parallel.exchange import slot_views
from s2_megatron.kernels import dispatch as launch
from s2_megatron.kernels import trial
from s2_megatron.kernels.hopper import descriptors as hopper_launch
from s2_megatron.kernels.hopper import launch as hopper
from s2_megatron.kernels.hopper.descriptors import Box
from s2_megatron.ops.api import (
    AttentionCall,
    attention_backward,
    attention_backward_dkdv,
    attention_backward_dq,
    attention_forward,
    empty_lse,
)
from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
from tests.kernels.record_launches import launch_of
from tests.ops.test_attention import pattern_of

BF16, F16 = torch.bfloat16, torch.float16
PATTERN = pattern_of(((2, 1), (None, 4)), 64, 4, 2)


class Compiled(NamedTuple):
    seen: object
    start: object

    def __getitem__(self, grid):
        return lambda *values: self.start(self, grid, values)


class Triton:
    """Stands for it. made: every launch of a Gluon kernel, and of `portable` ones, as Triton would see it, (launch,
    grid, whether Triton was left out), in order."""

    def __init__(self, *portable):
        self.made, self.portable = [], portable

    def run(self, kernel, *args, grid, warmup, **kwargs):
        if not kernel.is_gluon() and kernel not in self.portable:
            return None
        self.made.append((launch_of(kernel, *args, **kwargs), grid, False))
        return Compiled(self.made[-1][0], self.start)

    def start(self, compiled, grid, values):
        """A compiled kernel is started with values for all of its arguments, in order."""
        first, given = compiled.seen, {}
        for (name, known), value in zip(first.arguments.items(), values, strict=True):
            if isinstance(known, TensorDescriptor):
                box = Box(value.base, known.block_shape[3], known.layout).descriptor()
                assert (value.shape, value.strides, value.padding) == (box.shape, box.strides, box.padding)
                value = box
            given[name] = value
        self.made.append((launch_of(first.kernel, **given, **first.options), grid, True))


def same(one, two) -> bool:
    """Whether two arguments are the same tensor, boxes of the same tensor, or equal numbers."""
    if isinstance(one, TensorDescriptor):
        return one.base is two.base and (one.shape, one.strides, one.block_shape) == (
            two.shape,
            two.strides,
            two.block_shape,
        )
    return one is two if isinstance(one, torch.Tensor) else one == two


@pytest.fixture
def started(monkeypatch):
    """[whether Triton was left out] of all launches, each of which was compared with what it would be through
    Triton."""
    # Without a GPU the portable kernels are interpreted; this one is looked at as Triton compiles it.
    delta = JITFunction(hopper.s2_delta_kernel.fn, do_not_specialize=["n_rows", "stride_lb", "stride_lh"])
    triton_, real, found = Triton(delta), hopper_launch.Launches.start, []

    def start(launches, *args, **constants):
        real(hopper_launch.Launches(launches.grid[0], launches.arguments), *args, **constants)
        real(launches, *args, **constants)
        (expected, expected_grid, through), (got, grid, again) = triton_.made[-2:]
        assert (through, expected.kernel, expected.variant, expected_grid) == (False, got.kernel, got.variant, grid)
        for name, value in expected.arguments.items():
            assert same(value, got.arguments[name]), name
        found.append(again)

    monkeypatch.setattr(hopper_launch.Launches, "start", start)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: triton_.run(*args, **kwargs))
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_is_hopper", lambda device: True)
    monkeypatch.setattr(trial, "NEWEST", trial.release())
    monkeypatch.setattr(hopper, "s2_delta_kernel", delta)
    monkeypatch.setattr(hopper, "s2_scale_kernel", defaultdict(lambda: lambda *args, **kwargs: None))
    return found


def tensors(rows=200, dim=64, dtype=BF16, batch=1, form="sbhd", wider=0, shift=0):
    """Query, key and value; `wider`: elements between rows, `shift`: between the beginning of the memory and theirs."""
    order = {"sbhd": (rows, batch), "bshd": (batch, rows), "thd": (rows,)}[form]
    made = []
    for heads in (4, 2, 2):
        memory = torch.randn(shift + torch.Size(order).numel() * heads * (dim + wider)).to(dtype)
        made.append(memory[shift:].view(*order, heads, dim + wider)[..., :dim])
    return made


class Case:
    """Calls of one layout and one placement, of which launches are stored."""

    def __init__(self):
        self.layout = build_layout(PATTERN)
        slots = torch.full((2, 8), -1)
        slots[:, ::2] = torch.arange(4)
        self.placement = Placement.make(range(0, 8, 2), 8, slots, "cpu", PATTERN)
        slots = slots.clone()
        slots[:, 1::2] = 4 + torch.arange(8).view(2, 4)
        self.joined = Placement.make(range(0, 8, 2), 8, slots, "cpu", PATTERN, own_slots=4)

    def call(self, form="sbhd", **options):
        return AttentionCall(self.layout, 0.5, form, None, None, "gluon", False)._replace(**options)

    def attend(self, query, key, value, form="sbhd", grad=torch.randn_like, grad_lse=None, **options):
        call = self.call(form, **options)
        out, lse = attention_forward(query, key, value, call)
        grad_lse = None if grad_lse is None else grad_lse(lse)
        attention_backward(grad(out), grad_lse, query, key, value, out, lse, call)

    def go_on(self, query, key, value, shift=0, wider=0):
        """The forward from an earlier out, `wider` elements between its rows, and an LSE that begins `shift` elements
        behind 16 bytes; fp32."""
        rows, batch, heads, dim = query.shape
        out = torch.zeros(rows, batch, heads, dim + wider)[..., :dim]
        lse = torch.zeros(batch * heads * rows + shift)[shift:].view(batch, heads, rows)
        attention_forward(
            query, key, value, self.call(), (out, lse), into=(torch.empty(query.shape), empty_lse(query, "sbhd"))
        )

    def own_keys(self, query, key, value, dtype, slots=0):
        """dK and dV of placed keys, `slots` of which come back."""
        order = torch.arange(9, dtype=torch.int32).clamp(max=slots)
        returned = (torch.randn(max(1, slots), 64, 2, 1, key.shape[3]).to(key.dtype), order, order) if slots else None
        grads, sums = (torch.empty(key.shape, dtype=dtype) for _ in range(2)), torch.zeros(1, 4, query.shape[0])
        attention_backward_dkdv(
            query, query, key, value, sums, sums, *grads, self.call(placement=self.placement), returned
        )

    def two_tensors(self, query, key, value, **heads):
        """Forward and dQ over placed keys and eight slots."""
        more = slot_views(torch.randn(8, 64, 2, 1, key.shape[3]).to(key.dtype), 2)
        call, lse = self.call(placement=self.joined), empty_lse(query, "sbhd")
        attention_forward(query, key, value, call, more=more, into=(torch.empty_like(query), lse), **heads)
        attention_backward_dq(query, query, key, value, lse, lse, call, more=more, **heads)


def strided_gradient(out):
    return torch.randn(*out.shape[:3], 80).to(out.dtype)[..., :64]


def strided_lse_gradient(lse):
    return torch.randn(1, 1, lse.shape[2]).expand(lse.shape)


CALLS = {
    "plain": lambda case: case.attend(*tensors()),
    "fp16": lambda case: case.attend(*tensors(dtype=F16)),
    "rows": lambda case: case.attend(*tensors(rows=1000)),
    "batch": lambda case: case.attend(*tensors(batch=3)),
    "bshd": lambda case: case.attend(*tensors(batch=3, form="bshd"), form="bshd"),
    "strides": lambda case: case.attend(*tensors(wider=8)),
    "head dim": lambda case: case.attend(*tensors(dim=128)),
    "smaller head dim": lambda case: case.attend(*tensors(dim=56)),
    "wide": lambda case: case.attend(*tensors(dim=192)),
    "scale": lambda case: case.attend(*tensors(), softmax_scale=1.0),
    "deterministic": lambda case: case.attend(*tensors(), deterministic=True),
    "strides of the gradient": lambda case: case.attend(*tensors(), grad=strided_gradient),
    "gradient of LSE": lambda case: case.attend(*tensors(), grad_lse=torch.randn_like),
    "strides of the gradient of LSE": lambda case: case.attend(*tensors(), grad_lse=strided_lse_gradient),
    "continued": lambda case: case.go_on(*tensors()),
    "continued, fp16": lambda case: case.go_on(*tensors(dtype=F16)),
    "continued, LSE off its 16 bytes": lambda case: case.go_on(*tensors(), shift=1),
    "continued, strides": lambda case: case.go_on(*tensors(), wider=8),
    "own keys": lambda case: case.own_keys(*tensors(256), BF16),
    "own keys in fp32": lambda case: case.own_keys(*tensors(256), torch.float32),
    "own keys, some return": lambda case: case.own_keys(*tensors(256), BF16, 3),
    "own keys, more return": lambda case: case.own_keys(*tensors(256), BF16, 8),
    "two tensors": lambda case: case.two_tensors(*tensors(256)),
    "two tensors, the first KV head": lambda case: case.two_tensors(*tensors(256), kv_heads=(0, 1)),
    "two tensors, the second KV head": lambda case: case.two_tensors(*tensors(256), kv_heads=(1, 2)),
    "two tensors, D > 128": lambda case: case.two_tensors(*tensors(256, dim=192), kv_heads=(1, 2)),
    "own keys, D > 128, some return": lambda case: case.own_keys(*tensors(256, dim=192), BF16, 3),
}


def test_second_calls_are_started_without_triton_and_equal(started):
    """Each call after each other one, with other tensors every time: the second time nothing goes through Triton."""
    case = Case()
    for turn in range(3):
        for name, call in CALLS.items():
            call(case)
            assert started and (turn == 0 or all(started)), name
            started.clear()


def test_packed_documents_come_through_triton(started):
    """Their tables are made anew for every batch."""
    case, packed = Case(), PackedSequence(torch.tensor([0, 100, 200], dtype=torch.int32), 100)
    for _ in range(2):
        case.attend(*tensors(form="thd"), form="thd", packed=packed)
    assert started == [False] * 6  # forward, row sums, and dK, dV and dQ in one pass; twice


def test_what_has_been_launched_can_be_copied(started):
    """A compiled kernel cannot, and its copy is not needed."""
    case = Case()
    CALLS["own keys"](case)
    (stored,) = case.placement.steps.cache.values()
    twin = copy.deepcopy(stored)
    assert (
        twin.grid == stored.grid
        and twin.arguments.keys() == stored.arguments.keys()
        and stored._compiled
        and not twin._compiled
    )
