"""Queries and keys that are whole blocks of a longer sequence: by hand, what context parallelism does, and what is
refused."""

import pytest
import torch

from s2_megatron.ops.autograd import _put_together, _taken_apart
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import Placement, build_layout
from s2_megatron.ops.parts import attention_backward, attention_forward
from s2_megatron.testing.oracle import make_inputs, random_mask, run_op
from tests.ops.test_attention import BACKENDS, F32, GOOD, PAPER, UNEVEN, pattern_of

pytestmark = [pytest.mark.op, pytest.mark.usefixtures("nan_scratch")]


def chunks_of(rank, size, n_blocks):
    """Query blocks of a context-parallel rank in zigzag order."""
    half = n_blocks // (2 * size)
    first, last = rank * half, (2 * size - 1 - rank) * half
    return [*range(first, first + half), *range(last, last + half)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind, block, n_blocks, runs",
    [
        ("ranges", 16, 12, False),
        ("ranges", 16, 16, True),
        pytest.param("uneven", 16, 16, True, marks=pytest.mark.slow),
        pytest.param("ranges", 64, 8, True, marks=pytest.mark.slow),
        pytest.param("mask", 16, 12, True, marks=pytest.mark.slow),
    ],
)
def test_placed_blocks_and_continued_softmax(kind, block, n_blocks, runs, backend, device):
    """Two ranks of context parallelism by hand: local keys, then the others from a flat buffer of slots; both
    directions."""
    dim, scale = 32, 0.4
    dtype, close = (torch.float64, 1e-12) if backend == "reference" else (F32, 3e-6)
    pattern = (
        random_mask(block, 4, 2, 2, n_blocks)
        if kind == "mask"
        else pattern_of(PAPER if kind == "ranges" else UNEVEN, block, 4, 2)
    )
    listed = pattern if runs else None
    length = block * n_blocks
    inputs, grad_lse = make_inputs(pattern, length, dim, dtype, device, form="sbhd")
    grad_lse = grad_lse.to(dtype)
    whole = run_op(inputs, grad_lse, pattern, "sbhd", scale, backend="reference")
    query, key, value, grad_out = inputs
    layout = build_layout(pattern, device)
    total = {"key": torch.zeros_like(whole.grad_key), "value": torch.zeros_like(whole.grad_value)}
    inside = torch.arange(block, device=device)
    for rank in range(2):
        blocks = chunks_of(rank, 2, n_blocks)
        rows = (torch.tensor(blocks, device=device)[:, None] * block + inside).reshape(-1)
        local_slot = torch.full((2, n_blocks), -1)
        local_slot[:, blocks] = torch.arange(len(blocks))
        call = AttentionCall(
            layout, scale, "sbhd", None, Placement.make(blocks, n_blocks, local_slot, device, listed), backend, False
        )
        q, k, v, do = (tensor[rows] for tensor in (query, key, value, grad_out))
        out, lse = attention_forward(q, k, v, call)
        # the other rank's blocks lie in a flat buffer, in another order for each KV head, with one slot that nobody
        # reads
        others = [number for number in range(n_blocks) if number not in blocks]
        remote_slot = torch.full((2, n_blocks), -1)
        buffers = [
            torch.full((2 * len(others) + 1, block, dim), float("nan"), dtype=dtype, device=device) for _ in range(2)
        ]
        for group, order in enumerate((others, others[::-1])):
            for position, number in enumerate(order):
                slot = 1 + group * len(others) + position
                remote_slot[group, number] = slot
                for buffer, tensor in zip(buffers, (key, value)):
                    buffer[slot] = tensor[number * block : (number + 1) * block, 0, group]
        flat = [buffer.view(-1, 1, 1, dim).expand(-1, 1, 2, dim) for buffer in buffers]
        remote = call._replace(placement=Placement.make(blocks, n_blocks, remote_slot, device, listed))
        out, lse = attention_forward(q, *flat, remote, initial=(out, lse))
        assert torch.allclose(out, whole.out.permute(2, 0, 1, 3)[rows], rtol=0, atol=close)
        assert torch.allclose(lse, whole.lse[:, :, rows], rtol=0, atol=close)
        part = (do, grad_lse[:, :, rows], q)
        local_grads = attention_backward(*part, k, v, out, lse, call)
        remote_grads = attention_backward(*part, *flat, out, lse, remote)
        assert torch.allclose(
            (local_grads[0] + remote_grads[0]), whole.grad_query.permute(2, 0, 1, 3)[rows], rtol=0, atol=7 * close
        )
        for name, mine, theirs in zip(total, local_grads[1:], remote_grads[1:]):
            total[name][:, :, rows] += mine.permute(1, 2, 0, 3)
            for group in range(2):
                for number in others:
                    slot = remote_slot[group, number].item()
                    span = slice(number * block, (number + 1) * block)
                    total[name][0, group, span] += theirs[slot * block : (slot + 1) * block, 0, group]
    assert torch.allclose(total["key"], whole.grad_key, rtol=0, atol=7 * close)
    assert torch.allclose(total["value"], whole.grad_value, rtol=0, atol=7 * close)


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_without_a_key_gives_zero(backend, device):
    pattern = pattern_of(PAPER, 16, 2, 1)
    (query, key, value, grad_out), grad_lse = make_inputs(pattern, 64, 32, F32, device, form="sbhd")
    slots = torch.full((1, 4), -1)
    slots[0, 1] = 0
    placement = Placement.make(range(4), 4, slots, device)
    layout = build_layout(pattern, device)
    call = AttentionCall(layout, 0.2, "sbhd", None, placement, backend, False)
    out, lse = attention_forward(query, key, value, call)
    blind = [row for row in range(64) if 1 not in pattern.key_blocks(0, row // 16)]
    assert blind, "the case must have query blocks that do not attend block 1"
    assert not out[blind].any() and torch.isneginf(lse[:, :, blind]).all()
    grads = attention_backward(grad_out, grad_lse, query, key, value, out, lse, call)
    assert not grads[0][blind].any()
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[1][16:].any(), "absent keys have no gradient"


def test_placements_that_do_not_fit_are_refused():
    layout = build_layout(pattern_of(PAPER, 16, 4, 2))
    tensors = [torch.zeros(GOOD[name]) for name in GOOD]
    call = AttentionCall(layout, 0.2, "sbhd", None, Placement.make(range(4), 6), "reference", False)
    with pytest.raises(ValueError, match="key has 64 rows, 4 blocks of 16; the placement reads 6"):
        attention_forward(*tensors, call)
    with pytest.raises(ValueError, match="the placement reads 51"):
        attention_forward(*tensors, call._replace(placement=Placement.make(range(4), 4, [[0, 1, 2, 50]] * 2)))
    two = call._replace(placement=Placement.make(range(4), 6, [[0, 1, 2, 3, 4, 5]] * 2, own_slots=4))
    with pytest.raises(ValueError, match="the second key has 0 blocks of 16; the placement reads 2"):
        attention_forward(*tensors, two)
    for wrong, message in (
        (torch.zeros(32, 1, 2, 8), "of key's shape"),
        (torch.zeros(32, 1, 2, 32), "memory of their own"),
        (torch.zeros(32, 1, 1, 32, dtype=torch.float64).expand(-1, -1, 2, -1), "float64"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_forward(*tensors, two, more=(wrong, wrong))
    assert _put_together(*_taken_apart(two)).placement.own_slots == 4, "an operator's arguments hold it, too"
    with pytest.raises(ValueError, match="own_slots=7; expected 1 to 6; use the slots of the first key"):
        Placement.make(range(4), 6, own_slots=7)
    other = pattern_of(UNEVEN, 16, 2, 2)
    with pytest.raises(ValueError, match="made for another pattern"):
        attention_forward(*tensors, call._replace(placement=Placement.make(range(4), 4, [range(4)] * 2, pattern=other)))
    with pytest.raises(
        ValueError, match=r"query_block_ids=\[0, 0\]; expected strictly ascending blocks within 0\.\.3; sort"
    ):
        Placement.make([0, 0], 4)
    with pytest.raises(ValueError, match="expected \\[KV heads, n_blocks=4\\]"):
        Placement.make([0], 4, [[0]])
