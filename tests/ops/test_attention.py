"""The op against fp64: error at most twice that of eager attention in the same dtype, for out, LSE, dq, dk, dv, per
tensor and per 64 rows.

On a machine without a GPU the kernels run through Triton's interpreter (fp32 and fp16: its dot reads bf16 as integers).
The full matrix of head dims, dtypes, blocks and patterns is in test_attention_gpu.py.
"""

from itertools import combinations
from random import Random
from types import SimpleNamespace

import pytest
import torch

from s2_megatron.ops import parts
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import PackedSequence, build_layout
from s2_megatron.ops.parts import (
    attention_backward,
    attention_backward_dkdv,
    attention_backward_dq,
    attention_delta,
    attention_forward,
)
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from s2_megatron.testing.oracle import check_against_eager, make_inputs, packed_mask, random_mask, run_op, token_mask

pytestmark = [pytest.mark.op, pytest.mark.usefixtures("nan_scratch")]
BACKENDS = ("reference", "triton")
F32, F16 = torch.float32, torch.float16
PAPER, WINDOW = ((2, 1), (None, 4)), ((3, 1),)
SEVERAL = ((2, 1), (5, 2), (None, 4))
UNEVEN = ((2, 1), (5, 3), (None, 4))  # not KV-cache efficient


def pattern_of(ranges, block, heads, groups, slide="kv", **options):
    return make_range_pattern(
        block_size=block, num_heads=heads, num_kv_heads=groups, ranges=ranges, slide=slide, **options
    )


# Chosen by hand: (pattern, head dim, dtype, length, format, batch). PAIRWISE below has every pair of settings.
CASES = {
    "paper-gqa-48": (pattern_of(PAPER, 16, 4, 2), 48, F16, 200, "sbhd", 2),
    "paper-block64": (pattern_of(((1, 1), (None, 2)), 64, 2, 2), 64, F16, 333, "bshd", 1),
    "paper-block128-80": (pattern_of(((1, 1), (None, 2)), 128, 2, 1), 80, F32, 300, "sbhd", 1),
    "query-slide": (pattern_of(PAPER, 32, 4, 2, "query"), 32, F32, 260, "bhsd", 1),
    "several-96": (pattern_of(SEVERAL, 16, 2, 1), 96, F16, 200, "bshd", 1),
    "uneven": (pattern_of(UNEVEN, 16, 2, 2), 32, F32, 200, "sbhd", 1),
    "window-160": (pattern_of(WINDOW, 32, 2, 1), 160, F16, 200, "bhsd", 1),
    "dense-192": (RangePattern.dense(64, 1, 1), 192, F16, 130, "sbhd", 1),
    "dense-heads-256": (pattern_of(PAPER, 32, 4, 4, dense_heads=[1]), 256, F16, 100, "sbhd", 1),
    "length-1": (pattern_of(PAPER, 64, 2, 1), 32, F32, 1, "bshd", 2),
    "length-15": (pattern_of(PAPER, 16, 2, 2), 128, F16, 15, "sbhd", 1),
    "window-in-tokens": (pattern_of((), 16, 4, 2, window=[40, 7]), 48, F16, 200, "sbhd", 2),
    "window-stride-sink": (pattern_of(((None, 4),), 16, 4, 2, window=40, sink_tokens=3), 64, F16, 200, "bshd", 1),
    "window-sink-64": (pattern_of(((None, 2),), 64, 2, 1, window=100, sink_tokens=70), 32, F32, 333, "bhsd", 1),
    "sink-beside-blocks": (pattern_of(UNEVEN, 16, 2, 2, sink_tokens=37), 32, F32, 200, "sbhd", 1),
    "ranges-per-head": (
        RangePattern(
            16, 2, (HeadPattern(((3, 1),)), HeadPattern(((1, 1), (None, 2))), *[HeadPattern(((2, 1), (6, 2)), 1)] * 2)
        ),
        32,
        F32,
        150,
        "sbhd",
        1,
    ),
    "mask-shared": (random_mask(16, 2, 2, 1), 32, F32, 250, "sbhd", 1),
    "mask-kv-heads": (random_mask(32, 4, 2, 2), 64, F16, 300, "bhsd", 1),
    "mask-query-heads": (random_mask(64, 2, 1, 2, 4), 32, F16, 222, "bshd", 1),
    "mask-without-diagonal": (random_mask(16, 2, 2, 2, diagonal=False), 32, F32, 256, "sbhd", 1),
    "mask-block128": (random_mask(128, 1, 1, 1, 3), 32, F16, 300, "sbhd", 1),
}


SETTINGS = dict(
    kind=("paper", "several", "uneven", "window", "dense", "mask"),
    block=(16, 32, 64, 128),
    heads=((1, 1), (2, 1), (4, 2)),
    slide=("kv", "query"),
    dim=(32, 48, 64, 80, 96, 128, 160, 192, 256),
    dtype=(F32, F16),
    tail=(0, 1, 11),
    form=("sbhd", "bshd", "bhsd"),
)


def all_pairs(settings):
    """Rows of settings in which every pair of values of two settings occurs: greedy, the first best of 60 seeded random
    rows at a time."""
    names, random = list(settings), Random(0)
    missing = {((a, x), (b, y)) for a, b in combinations(names, 2) for x in settings[a] for y in settings[b]}
    rows = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)
        candidates = [{**{name: random.choice(settings[name]) for name in names}, a: x, b: y} for _ in range(60)]
        best = max(candidates, key=lambda row: len(missing & set(combinations(row.items(), 2))))
        rows.append(best)
        missing -= set(combinations(best.items(), 2))
    return rows


PAIRWISE = all_pairs(SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("row", PAIRWISE, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_gradients_pairwise(row, device):
    block, (heads, groups) = row["block"], row["heads"]
    n_blocks = {16: 8, 32: 6, 64: 4, 128: 3}[block]
    ranges = {
        "paper": ((1, 1), (None, 2)),
        "several": SEVERAL,
        "uneven": UNEVEN,
        "window": ((2, 1),),
        "dense": ((None, 1),),
    }
    if row["kind"] == "mask":
        pattern = random_mask(block, heads, groups, groups if row["slide"] == "kv" else heads, n_blocks)
    else:
        pattern = pattern_of(ranges[row["kind"]], block, heads, groups, row["slide"])
    length = block * n_blocks - row["tail"]
    inputs, grad_lse = make_inputs(pattern, length, row["dim"], row["dtype"], device, form=row["form"])
    check_against_eager(
        inputs,
        grad_lse,
        pattern,
        row["form"],
        token_mask(pattern, length, device),
        2 * row["dim"] ** -0.5,
        backend="triton",
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_gradients(case, backend, device):
    pattern, dim, dtype, length, form, batch = CASES[case]
    inputs, grad_lse = make_inputs(pattern, length, dim, dtype, device, batch, form=form)
    # A softmax scale at which single keys matter: a missing block then moves the result far beyond the bound.
    check_against_eager(
        inputs, grad_lse, pattern, form, token_mask(pattern, length, device), 2 * dim**-0.5, backend=backend
    )


def packed_case(pattern, lengths, padded, dim, dtype, device, extra=0):
    slots = lengths if padded in (None, "shifted") else padded
    shift = 150 if padded == "shifted" else 0
    starts = [shift + sum(slots[:index]) for index in range(len(lengths) + 1)]
    ends = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    total = starts[-1] + extra
    inputs, grad_lse = make_inputs(pattern, total, dim, dtype, device, form="thd")

    def as_tensor(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    packed = PackedSequence(as_tensor(ends), max(lengths), as_tensor(starts) if padded else None)
    return inputs, grad_lse, packed, packed_mask(pattern, starts, lengths, total, device)


PACKED = {
    "plain": ([70, 1, 45, 128, 33], None, 0),
    "padded starts": ([70, 1, 45, 16], [80, 16, 48, 32], 0),
    "tokens after the last document": ([40, 17], None, 13),
    "an empty document": ([40, 0, 50], None, 0),
    "tokens before the first document": ([70, 20], "shifted", 5),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("kind", ["ranges", "mask"])
def test_packed_gradients(case, kind, backend, device):
    pattern = pattern_of(PAPER, 16, 2, 1) if kind == "ranges" else random_mask(16, 2, 1, 2)
    inputs, grad_lse, packed, mask = packed_case(pattern, *PACKED[case][:2], 32, F32, device, PACKED[case][2])
    got, _ = check_against_eager(inputs, grad_lse, pattern, "thd", mask, 0.3, backend=backend, packed=packed)
    outside = ~mask.any(0).any(-1)
    for tensor in (got.out, got.grad_query, got.grad_key, got.grad_value):
        assert not tensor[:, :, outside].any(), "rows outside of every document must be zero"
    assert torch.isneginf(got.lse[:, :, outside]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_backward_in_parts_is_the_whole_one(backend, device):
    """Also in the rows between documents: they are zero, not what lay in memory."""
    pattern = pattern_of(PAPER, 16, 4, 2)
    (query, key, value, grad_out), _, packed, _ = packed_case(
        pattern, [50, 20, 33], [64, 32, 48], 32, F32, device, extra=9
    )
    call = AttentionCall(build_layout(pattern, device), 0.2, "thd", packed, None, backend, False)
    out, lse = attention_forward(query, key, value, call)
    whole = attention_backward(grad_out, None, query, key, value, out, lse, call)
    sums = attention_delta(grad_out, out, lse, call)
    grads = [
        torch.zeros_like(tensor) if backend == "reference" else torch.empty_like(tensor) for tensor in (key, value)
    ]
    attention_backward_dkdv(grad_out, query, key, value, lse, sums, *grads, call)
    parts = (attention_backward_dq(grad_out, query, key, value, lse, sums, call), *grads)
    for one, two in zip(whole, parts):
        assert torch.equal(one, two)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shuffled_documents_give_the_same_rows(backend, device):
    pattern, lengths = pattern_of(PAPER, 16, 2, 1), [70, 33, 90]
    inputs, _, packed, _ = packed_case(pattern, lengths, None, 32, F32, device)
    layout = build_layout(pattern, device)
    out = s2_attention(*inputs[:3], layout, tensor_format="thd", packed=packed, backend=backend)
    pieces = [tensor.split(lengths) for tensor in (*inputs[:3], out)]
    order = [2, 0, 1]
    query, key, value, expected = (torch.cat([piece[index] for index in order]) for piece in pieces)
    ends = torch.tensor([0, 90, 160, 193], dtype=torch.int32, device=device)
    shuffled = s2_attention(
        query, key, value, layout, tensor_format="thd", packed=PackedSequence(ends, 90), backend=backend
    )
    assert torch.allclose(shuffled, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prefix", [1, 15, 16, 17, 100])
def test_shorter_query_is_the_end_of_the_sequence(prefix, backend, device):
    pattern = pattern_of(PAPER, 16, 4, 2)
    (query, key, value, _), _ = make_inputs(pattern, 117, 32, F32, device, form="sbhd")
    layout = build_layout(pattern, device)
    whole = s2_attention(query, key, value, layout, backend=backend)
    for count in (1, 117 - prefix):
        end = s2_attention(
            query[prefix : prefix + count], key[: prefix + count], value[: prefix + count], layout, backend=backend
        )
        assert torch.allclose(end, whole[prefix : prefix + count], rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_blocks_on_is_causal_attention(backend, device):
    pattern = RangePattern.dense(32, 4, 2)
    inputs, grad_lse = make_inputs(pattern, 150, 64, F32, device, form="bhsd")
    got = run_op(inputs, torch.zeros_like(grad_lse), pattern, "bhsd", 0.2, backend=backend)
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in inputs[:3])
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.2, enable_gqa=True
    )
    expected = (out, *torch.autograd.grad(out, (query, key, value), inputs[3]))
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), (got.out, *got[2:]), expected):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-5), name


def with_block_flipped(pattern, head, query, key, n_blocks):
    def chosen(h, q, keys):
        row = torch.isin(torch.from_numpy(keys), torch.from_numpy(pattern.key_blocks(h, q))).numpy()
        if (h, q) == (head, query):
            row[key] = ~row[key]
        return row

    return BlockMaskPattern.from_function(pattern.block_size, pattern.num_heads, pattern.num_kv_heads, n_blocks, chosen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_wrong_block_is_noticed(backend, device):
    """One block dropped or added, anywhere, fails the gradient check: the bounds are tight enough to see it."""
    n_blocks = 6
    pattern = pattern_of(((1, 1), (None, 2)), 16, 2, 1)
    inputs, grad_lse = make_inputs(pattern, 16 * n_blocks, 32, F32, device)
    mask = token_mask(pattern, 16 * n_blocks, device)
    places = [(query % 2, query, key) for query in range(1, n_blocks) for key in range(query + 1)]
    if backend == "triton" and device == "cpu":
        places = places[::4]
    unchanged = with_block_flipped(pattern, -1, -1, -1, n_blocks)
    check_against_eager(inputs, grad_lse, unchanged, "bhsd", mask, 0.3, backend=backend)
    for place in places:
        wrong = with_block_flipped(pattern, *place, n_blocks)
        with pytest.raises(AssertionError, match="error"):
            check_against_eager(inputs, grad_lse, wrong, "bhsd", mask, 0.3, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_is_repeatable(backend, device):
    pattern = pattern_of(PAPER, 16, 4, 2)
    inputs, grad_lse = make_inputs(pattern, 200, 32, F16, device, form="sbhd")
    first, second = (
        run_op(inputs, grad_lse, pattern, "sbhd", 0.2, backend=backend, deterministic=True) for _ in range(2)
    )
    for name, one, two in zip(first._fields, first, second):
        assert torch.equal(one, two), name


def test_empty_batch(device):
    pattern = pattern_of(PAPER, 16, 2, 1)
    query, key = torch.zeros(8, 0, 2, 32, requires_grad=True, device=device), torch.zeros(8, 0, 1, 32, device=device)
    out = s2_attention(query, key, key, build_layout(pattern), backend="reference")
    out.sum().backward()
    assert out.shape == query.shape == query.grad.shape


GOOD = dict(query=(64, 1, 4, 32), key=(64, 1, 2, 32), value=(64, 1, 2, 32))


def test_mask_too_short_is_refused():
    tensors = [torch.zeros(GOOD[name]) for name in GOOD]
    with pytest.raises(ValueError, match="seq_length=64 has 4 blocks of 16, the block mask only 2"):
        s2_attention(*tensors, build_layout(random_mask(16, 4, 2, 1, 2)), backend="reference")


def test_blocks_too_small_for_the_kernels_are_refused():
    tensors = [torch.zeros(GOOD[name]) for name in GOOD]
    call = AttentionCall(build_layout(pattern_of(PAPER, 8, 4, 2)), 0.2, "sbhd", None, None, "triton", False)
    with pytest.raises(ValueError, match="block_size=8: the Triton kernels compute blocks of 16"):
        attention_forward(*tensors, call)


def test_strides_beyond_32_bits_inside_a_tile_are_refused():
    layout = build_layout(pattern_of(PAPER, 16, 4, 2))
    query, key, value = (torch.empty_strided(GOOD[name], (2**23, 1, 32, 1), device="meta") for name in GOOD)
    call = AttentionCall(layout, 0.2, "sbhd", None, None, "triton", False)
    with pytest.raises(ValueError, match="query has strides 8388608 and 1"):
        attention_forward(query, key, value, call)


def test_a_gradient_with_such_strides_is_copied(monkeypatch):
    lines, taken = [], []
    monkeypatch.setattr(parts, "print_once", lines.append)
    names = "backward", "delta", "backward_dkdv", "backward_dq"
    record = SimpleNamespace(
        **{name: lambda grad_out, *rest, **settings: taken.append(grad_out.stride()) for name in names}
    )
    monkeypatch.setattr(parts, "_implementation", lambda backend: record)
    shape = (4, 1, 2, 8)
    out, lse = torch.empty(shape, device="meta"), torch.empty(1, 2, 4, device="meta")
    call = AttentionCall(build_layout(pattern_of(PAPER, 16, 2, 1)), 0.2, "sbhd", None, None, "triton", False)
    for strides in ((16, 16, 8, 1), (1, 8, 4, 2**23)):
        grad = torch.empty_strided(shape, strides, device="meta")
        attention_backward(grad, None, out, out, out, out, lse, call)
        attention_delta(grad, out, lse, call)
        attention_backward_dkdv(grad, out, out, out, lse, lse, out, out, call)
        attention_backward_dq(grad, out, out, out, lse, lse, call)
    assert taken == [(16, 8, 16, 1)] * 4 + [(64, 32, 8, 1)] * 4
    line = (
        "S2 attention copies the gradient of its output, whose strides (1, 8, 4, 8388608) do not fit into 32 bits "
        "inside a tile"
    )
    assert lines == [line] * 4


@pytest.mark.parametrize("loss_of", [torch.sum, lambda out: out.square().sum()], ids=["constant", "not constant"])
def test_a_second_derivative_raises(loss_of):
    """A kernel's gradient is no differentiable function of its inputs: a gradient penalty must not lose its term in
    silence, whether the gradient of out depends on it or not."""
    query, key, value = (torch.randn(GOOD[name], requires_grad=True) for name in GOOD)
    out = s2_attention(query, key, value, build_layout(pattern_of(PAPER, 16, 4, 2)), backend="reference")
    loss = loss_of(out)
    (grad,) = torch.autograd.grad(loss, query, create_graph=True)
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        (loss + grad.square().sum()).backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_no_bit(backend, device):
    leaves = [torch.randn(GOOD[name], device=device, requires_grad=True) for name in GOOD]
    layout = build_layout(pattern_of(PAPER, 16, 4, 2))
    results = []
    for enabled in (False, True):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            out = s2_attention(*leaves, layout, backend=backend)
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(torch.equal(one, two) for one, two in zip(*results))


def test_fp64_is_exact():
    pattern = pattern_of(SEVERAL, 16, 4, 2)
    inputs, grad_lse = make_inputs(pattern, 200, 16, torch.float64, "cpu")
    got, truth = check_against_eager(
        inputs, grad_lse, pattern, "bhsd", token_mask(pattern, 200), 1.0, backend="reference"
    )
    for name, mine, theirs in zip(got._fields, got, truth):
        assert (mine - theirs).abs().max() <= 1e-12 * theirs.abs().max(), name
