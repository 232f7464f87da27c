"""What a call is checked for, and which kernels compute it, is looked at once for each kind of call, and again for
every other kind."""

import pytest
import torch

from s2_megatron.kernels import dispatch, trial
from s2_megatron.ops import checks
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.call import AttentionCall, canonical_view
from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
from s2_megatron.ops.parts import attention_forward
from s2_megatron.patterns.ranges import make_range_pattern

PATTERN = make_range_pattern(block_size=16, num_heads=4, num_kv_heads=2, ranges=((1, 1), (None, 2)))
HOPPER = make_range_pattern(block_size=64, num_heads=4, num_kv_heads=2, ranges=((1, 1), (None, 2)))


def tensors(rows=64, dim=16, dtype=torch.float32, wider=0, shift=0, form="sbhd"):
    shape = {"sbhd": (rows, 1), "bshd": (1, rows), "thd": (rows,)}[form]
    made = []
    for heads in (4, 2, 2):
        memory = torch.randn(shift + rows * heads * (dim + wider)).to(dtype)
        made.append(memory[shift:].view(*shape, heads, dim + wider)[..., :dim])
    return made


@pytest.fixture
def looked(monkeypatch):
    """Grows by one entry for every look."""
    found, real = [], checks.check_call
    monkeypatch.setattr(checks, "check_call", lambda *args: found.append("check") or real(*args))
    return found


def test_each_kind_of_call_is_checked_once(looked):
    layout = build_layout(PATTERN)
    kinds = [
        dict(), dict(rows=80), dict(dim=32), dict(dtype=torch.float64), dict(wider=4), dict(form="bshd"),
    ]  # fmt: skip
    for count, kind in enumerate(kinds, 1):
        for _ in range(3):
            s2_attention(*tensors(**kind), layout, tensor_format=kind.get("form", "sbhd"))
        assert len(looked) == count, kind
    s2_attention(*tensors(), build_layout(PATTERN))
    assert len(looked) == len(kinds) + 1  # another layout


def test_what_was_refused_is_refused_again(looked):
    layout = build_layout(PATTERN)
    query, key, value = tensors()
    s2_attention(query, key, value, layout)
    for wrong in ((query, key, value[:32]), (query, key[..., :8], value), (query[:, :, :2], key, value)):
        for _ in range(2):
            with pytest.raises(ValueError):
                s2_attention(*wrong, layout)
    assert len(looked) == 7


def test_calls_with_index_tensors_are_always_checked(looked):
    """Another tensor of the same shape may be wrong."""
    layout = build_layout(PATTERN)
    packed = PackedSequence(torch.tensor([0, 40, 64], dtype=torch.int32), 40)
    placement = Placement.make(range(4), 4)
    for _ in range(2):
        s2_attention(*tensors(form="thd"), layout, tensor_format="thd", packed=packed)
        s2_attention(*tensors(), layout, placement=placement)
    assert len(looked) == 4


def test_not_more_is_remembered_than_fits(looked, monkeypatch):
    """Decoding meets every length."""
    monkeypatch.setattr(checks, "MOST_KINDS", 3)
    layout = build_layout(PATTERN)
    for rows in range(16, 26):
        s2_attention(*tensors(rows), layout)
        assert len(layout.passed_checks) <= 3


def test_the_results_are_those_of_a_first_call():
    layout, inputs = build_layout(PATTERN), tensors()
    call = AttentionCall(layout, 0.25)
    first, again = attention_forward(*inputs, call), attention_forward(*inputs, call)
    assert all(torch.equal(one, other) for one, other in zip(first, again))


def test_kernels_are_chosen_once_for_each_kind(monkeypatch):
    """By alignment, too: tensors off their 16 bytes go to the portable kernels."""
    from s2_megatron.kernels.hopper import launch as hopper

    monkeypatch.setattr(dispatch, "_is_hopper", lambda device: True)
    monkeypatch.setattr(trial, "MEASURED", (trial.release(),))
    looked, real = [], hopper.refusal
    monkeypatch.setattr(hopper, "refusal", lambda *args: looked.append(1) or real(*args))
    layout = build_layout(HOPPER)

    def chosen(backend="auto", **kind):
        views = [canonical_view(tensor, "sbhd") for tensor in tensors(dim=64, **({"dtype": torch.bfloat16} | kind))]
        return dispatch._hopper(*views, AttentionCall(layout, 0.125, backend=backend))

    for count, (expected, kind) in enumerate([
        (hopper, dict()), (hopper, dict(rows=128)), (hopper, dict(wider=8)), (None, dict(shift=1)),
        (None, dict(dtype=torch.float32)), (hopper, dict(backend="gluon")),
    ], 1):  # fmt: skip
        for _ in range(3):
            assert chosen(**kind) is expected
        assert len(looked) == count, kind
    for _ in range(2):  # a refusal is not remembered as a choice
        with pytest.raises(ValueError, match="aligned to 16 bytes"):
            chosen(backend="gluon", shift=1)
    assert chosen(backend="triton") is None and len(looked) == 8
