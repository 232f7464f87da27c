"""Launches that leave Triton's look at their arguments out: the same machine code, grid and arguments as with it. Without a GPU."""

from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from s2_megatron.attention import AttentionCall, attention_backward, attention_forward
from s2_megatron.kernels import hopper, launch, portable
from s2_megatron.kernels.hopper_launch import Box
from s2_megatron.layout import PackedSequence, build_layout
from tests.record_launches import launch_of
from tests.test_attention import pattern_of

BF16, F16 = torch.bfloat16, torch.float16
LAYOUT = build_layout(pattern_of(((2, 1), (None, 4)), 64, 4, 2))


class Compiled(NamedTuple):
    seen: object
    start: object

    def __getitem__(self, grid):
        return lambda *values: self.start(self, grid, values)


class Launches:
    """Stands for Triton: every launch of a Gluon kernel, in order, as Triton would see it, and whether it was left out."""

    def __init__(self):
        self.made = []

    def run(self, kernel, *args, grid, warmup, **kwargs):
        if not kernel.is_gluon():
            return None
        seen = launch_of(kernel, *args, **kwargs)
        self.made.append((seen, grid, False))
        return Compiled(seen, self.start)

    def start(self, compiled, grid, values):
        """A compiled kernel is started with values for all of its arguments, in order."""
        first, given = compiled.seen, {}
        for (name, known), value in zip(first.arguments.items(), values, strict=True):
            if isinstance(known, TensorDescriptor):
                box = Box(value.base, known.block_shape[3], known.layout).descriptor()
                assert (value.shape, value.strides, value.padding) == (box.shape, box.strides, box.padding)
                value = box
            given[name] = value
        seen = launch_of(first.kernel, **given, **first.options)
        assert seen.variant == first.variant
        self.made.append((seen, grid, True))

    def take(self):
        """[(variant, numbers among the arguments, grid, whether it was started without Triton)] since the last time."""
        made, self.made = self.made, []
        numbers = [[value for value in seen.arguments.values() if isinstance(value, (int, float))] for seen, _, _ in made]
        return [(seen.kernel.__name__, seen.variant, own, grid, again) for own, (seen, grid, again) in zip(numbers, made)]


@pytest.fixture
def launches(monkeypatch):
    made = Launches()
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: made.run(*args, **kwargs))
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_is_hopper", lambda device: True)
    monkeypatch.setattr(launch, "GLUON", triton.__version__)
    monkeypatch.setattr(portable, "launch_delta", lambda *args: None)  # portable kernels run slowly here, and are not what is tested
    monkeypatch.setattr(hopper, "s2_scale_kernel", defaultdict(lambda: lambda *args, **kwargs: None))
    LAYOUT.kept.clear()
    return made


def tensors(rows=200, dim=64, dtype=BF16, batch=1, form="sbhd", wider=0, shift=0):
    """Query, key and value; `wider`: elements between rows, `shift`: between the beginning of the memory and theirs."""
    order = {"sbhd": (rows, batch), "bshd": (batch, rows), "thd": (rows,)}[form]
    made = []
    for heads in (4, 2, 2):
        memory = torch.randn(shift + torch.Size(order).numel() * heads * (dim + wider)).to(dtype)
        made.append(memory[shift:].view(*order, heads, dim + wider)[..., :dim])
    return made


def attend(query, key, value, form="sbhd", grad=torch.randn_like, **options):
    call = AttentionCall(LAYOUT, 0.5, form, None, None, "gluon", False)._replace(**options)
    out, lse = attention_forward(query, key, value, call)
    attention_backward(grad(out), None, query, key, value, out, lse, call)


def go_on(query, key, value, shift=0, wider=0):
    """The forward from an earlier out, `wider` elements between its rows, and an LSE that begins `shift` elements behind 16 bytes; fp32."""
    rows, batch, heads, dim = query.shape
    out = torch.zeros(rows, batch, heads, dim + wider)[..., :dim]
    lse = torch.zeros(batch * heads * rows + shift)[shift:].view(batch, heads, rows)
    attention_forward(query, key, value, AttentionCall(LAYOUT, 0.5, "sbhd", None, None, "gluon", False), (out, lse), torch.float32)


def strided_gradient(out):
    return torch.randn(*out.shape[:3], 80).to(out.dtype)[..., :64]


CALLS = {
    "plain": lambda: attend(*tensors()),
    "fp16": lambda: attend(*tensors(dtype=F16)),
    "rows": lambda: attend(*tensors(rows=1000)),
    "batch": lambda: attend(*tensors(batch=3)),
    "bshd": lambda: attend(*tensors(batch=3, form="bshd"), form="bshd"),
    "strides": lambda: attend(*tensors(wider=8)),
    "head dim": lambda: attend(*tensors(dim=128)),
    "smaller head dim": lambda: attend(*tensors(dim=56)),
    "wide": lambda: attend(*tensors(dim=192)),
    "scale": lambda: attend(*tensors(), softmax_scale=1.0),
    "deterministic": lambda: attend(*tensors(), deterministic=True),
    "strides of the gradient": lambda: attend(*tensors(), grad=strided_gradient),
    "continued": lambda: go_on(*tensors()),
    "continued, fp16": lambda: go_on(*tensors(dtype=F16)),
    "continued, LSE off its 16 bytes": lambda: go_on(*tensors(), shift=1),
    "continued, strides": lambda: go_on(*tensors(), wider=8),
}


def test_second_calls_are_started_without_triton_and_equal(launches):
    """Each call by itself, all through Triton; then all of them twice with one layout: the same variants, numbers and grids in the same order,
    and the second time nothing through Triton."""
    alone = {}
    for name, call in CALLS.items():
        LAYOUT.kept.clear()
        call()
        alone[name] = launches.take()
        assert len(alone[name]) in (1, 2, 3) and not any(again for *_, again in alone[name])
    LAYOUT.kept.clear()
    for turn in range(2):
        for name, call in CALLS.items():
            call()
            made = launches.take()
            assert [launch[:4] for launch in made] == [launch[:4] for launch in alone[name]], name
            assert turn == 0 or all(again for *_, again in made), name


def test_packed_documents_come_through_triton(launches):
    """Their tables are made anew for every batch."""
    packed = PackedSequence(torch.tensor([0, 100, 200], dtype=torch.int32), 100)
    for _ in range(2):
        attend(*tensors(form="thd"), form="thd", packed=packed)
        assert [again for *_, again in launches.take()] == [False] * 2
