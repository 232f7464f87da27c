"""Launches that leave Triton's look at their arguments out: the same machine code, grid and arguments as with it.
Without a GPU."""

import copy

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from s2_megatron.context_parallel.exchange import slot_views
from s2_megatron.kernels import dispatch as launch
from s2_megatron.kernels.hopper import descriptors as hopper_launch
from s2_megatron.ops import api
from s2_megatron.ops.call import AttentionCall, canonical_view
from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
from s2_megatron.ops.parts import (
    attention_backward,
    attention_backward_dkdv,
    attention_backward_dq,
    attention_forward,
    empty_lse,
)
from tests.ops.test_attention import pattern_of, random_mask

BF16, F16 = torch.bfloat16, torch.float16
PATTERN = pattern_of(((2, 1), (None, 4)), 64, 4, 2)


def address_of(value):
    """The address of an argument, or None of a number."""
    value = value.base if isinstance(value, TensorDescriptor) else value
    return value.data_ptr() if hasattr(value, "data_ptr") else None


def same(one, two) -> bool:
    """Whether two arguments lie at the same address, are boxes of the same tensor, or equal numbers."""
    if isinstance(one, TensorDescriptor) and any(
        getattr(one, name) != getattr(two, name) for name in ("shape", "strides", "block_shape")
    ):
        return False
    place = address_of(one)
    return one == two if place is None else place == address_of(two)


@pytest.fixture
def started(monkeypatch, triton_):
    """[whether Triton was left out] of all launches, each of which was compared with what it would be through
    Triton."""
    real, found = hopper_launch.Launches.start, []

    def start(launches, *args, **constants):
        real(hopper_launch.Launches(launches.grid[0], launches.arguments), *args, **constants)
        real(launches, *args, **constants)
        (expected, expected_grid, through), (got, grid, again) = triton_.made[-2:]
        assert (through, expected.kernel, expected.variant, expected_grid) == (False, got.kernel, got.variant, grid)
        for name, value in expected.arguments.items():
            assert same(value, got.arguments[name]), name
        found.append(again)

    monkeypatch.setattr(hopper_launch.Launches, "start", start)
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
    assert started == [False] * 8  # forward, row sums, dK, dV and dQ in one pass, dQ rounded; twice


def test_what_has_been_launched_can_be_copied(started):
    """A compiled kernel cannot, and its copy is not needed."""
    case = Case()
    CALLS["own keys"](case)
    (stored,) = case.placement.steps.cache.values()
    twin = copy.deepcopy(stored)
    assert (
        twin.grid == stored.grid
        and twin.arguments.keys() == stored.arguments.keys()
        and stored._repeats
        and not twin._repeats
    )


def check_same_launches(expected, got, given):
    """Both are launches of one call, as Triton.made. given: the call's tensors, which must be where they are; what is
    made for the call alone may lie elsewhere, every tensor of it in one place of its own."""
    there, moved = {tensor.data_ptr() for tensor in given if tensor is not None}, {}
    assert len(expected) == len(got) > 0 and all(through for *_, through in got)
    for (one, one_grid, _), (two, two_grid, _) in zip(expected, got):
        assert (one.kernel, one.variant, one_grid) == (two.kernel, two.variant, two_grid)
        for name, value in one.arguments.items():
            before, after = address_of(value), address_of(two.arguments[name])
            if before is None or before in there or before == after:
                assert same(value, two.arguments[name]), name
            else:
                assert after not in there and moved.setdefault(before, after) == after, name
    assert len(set(moved.values())) == len(moved)
    return moved


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("dim, deterministic, grad_lse, mask", [
    (64, False, True, False), (64, True, False, False), (128, False, False, False), (192, False, True, False),
    (128, False, False, True),
])  # fmt: skip
def test_a_call_is_made_again_with_addresses_alone(triton_, form, dim, deterministic, grad_lse, mask):
    layout = build_layout(random_mask(64, 4, 2, 4) if mask else PATTERN)
    call = AttentionCall(layout, 0.5, form, None, None, "gluon", deterministic)

    def attend():
        """The tensors of a forward and of a backward, which are made anew."""
        inputs = tensors(dim=dim, form=form)
        out, lse = api._op_forward(*inputs, call)
        gradients = torch.randn_like(out), torch.randn_like(lse) if grad_lse else None
        grads = api._op_backward(*gradients, *inputs, out, lse, call)
        return (*inputs, out, lse), (*gradients, *inputs, out, lse, *grads)

    attend()
    assert len(layout.known_forwards) == len(layout.known_backwards) == 1
    triton_.made.clear()
    forward, backward = attend()
    repeated = triton_.made[:]
    assert len(layout.known_forwards) == len(layout.known_backwards) == 1

    def views(given):
        """As the kernels take them; LSE and its gradient are [B, H, rows]."""
        return [canonical_view(t, form) if t is not None and t.ndim == 4 else t for t in given]

    triton_.made.clear()
    launch.forward(*views(forward), call)
    count = len(triton_.made)
    check_same_launches(triton_.made, repeated[:count], forward)
    triton_.made.clear()
    launch.backward(*views(backward), call)
    moved = check_same_launches(triton_.made, repeated[count:], backward)
    assert moved  # the row sums, at least
