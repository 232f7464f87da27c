"""softmax_offset: the op against eager attention with one more column of scores, in fp64; what it refuses; that it
goes wherever the op goes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from s2_megatron.ops.api import make_call as checked_call
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.call import canonical_view
from s2_megatron.ops.layout import PackedSequence, build_layout
from s2_megatron.ops.recompute import RecomputeOutputs, recompute_attention
from s2_megatron.testing.oracle import make_inputs, packed_mask, random_mask, token_mask
from tests.calls import KINDS, make_call
from tests.ops.test_attention import PAPER, pattern_of

pytestmark = pytest.mark.op
NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_offset")
F64, F32, F16 = torch.float64, torch.float32, torch.float16
SCALE = 0.3
OFFSETS = torch.tensor([-2.0, 0.0, 1.5, 6.0])
PATTERNS = {
    "paper": pattern_of(PAPER, 16, 4, 2),
    "window-and-sink": pattern_of(((None, 4),), 16, 4, 2, window=[40, 7], sink_tokens=3),
    "mask-without-diagonal": random_mask(16, 4, 2, 2, diagonal=False),
}


def with_a_column(inputs, offset, mask, grad_lse, dtype=F64):
    """Attention whose softmax has the offset as one more score, whose probability is dropped; by autograd, in `dtype`.
    Tensors [B, heads, S, D], mask [H, S, S]."""
    query, key, value, offset = (tensor.detach().to(dtype).requires_grad_() for tensor in (*inputs[:3], offset))
    ratio = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(ratio, 1).mT * SCALE
    scores = scores.masked_fill(~mask, float("-inf"))
    scores = torch.cat([scores, offset[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    out = torch.softmax(scores, -1)[..., :-1] @ value.repeat_interleave(ratio, 1)
    lse = torch.logsumexp(scores, -1)
    loss = (out * inputs[3].to(dtype)).sum() + (lse * grad_lse.to(dtype)).sum()
    return out, lse, *torch.autograd.grad(loss, (query, key, value, offset))


def by_the_op(inputs, offset, grad_lse, pattern, form, **options):
    leaves = [tensor.detach().requires_grad_() for tensor in (*inputs[:3], offset)]
    out, lse = s2_attention(
        *leaves[:3], pattern, tensor_format=form, softmax_scale=SCALE, softmax_offset=leaves[3],
        return_lse=True, **options,
    )  # fmt: skip
    grad_lse = (grad_lse[0] if form == "thd" else grad_lse).to(lse.dtype)
    grads = torch.autograd.grad((out, lse), leaves, (inputs[3], grad_lse))
    views = [canonical_view(tensor, form) for tensor in (out, *grads[:3])]
    return views[0], lse if form != "thd" else lse[None], *views[1:], grads[3]


def distance(got, truth) -> float:
    return ((got.double() - truth.double()).norm() / truth.double().norm()).item()


def assert_close(got, expected, tolerance, names=NAMES):
    """tolerance: of all, or one for each."""
    bounds = tolerance if isinstance(tolerance, list) else [tolerance] * len(names)
    for name, mine, truth, bound in zip(names, got, expected, bounds, strict=True):
        error = distance(mine, truth)
        assert error <= bound, (name, error, bound)


@pytest.mark.parametrize("dtype, backend, tolerance", [(F64, "reference", 1e-13), (F32, "triton", 2e-6)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_one_more_column(pattern, dtype, backend, tolerance, device):
    """Also for rows that see no key (the mask has some): out is 0, LSE the offset."""
    pattern = PATTERNS[pattern]
    inputs, grad_lse = make_inputs(pattern, 90, 32, dtype, device, batch=2, form="sbhd")
    mask, offsets = token_mask(pattern, 90, device), OFFSETS.to(device, dtype)
    truth = with_a_column([canonical_view(tensor, "sbhd") for tensor in inputs], offsets, mask, grad_lse)
    got = by_the_op(inputs, offsets, grad_lse, pattern, "sbhd", backend=backend)
    assert_close(got, truth, tolerance)
    unseen = ~mask.any(-1)
    assert not got[0][:, unseen].any()
    assert torch.equal(got[1], torch.where(unseen, offsets[:, None], got[1]))


@pytest.mark.parametrize("dtype, backend, tolerance", [(F64, "reference", 1e-13), (F32, "triton", 2e-6)])
def test_packed_documents(dtype, backend, tolerance, device):
    """Rows beside the documents are rows without a key."""
    pattern, length, starts, lengths = PATTERNS["window-and-sink"], 80, [0, 31, 35], [30, 1, 36]
    inputs, grad_lse = make_inputs(pattern, length, 32, dtype, device, form="thd")
    borders = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0, 30, 31, 67], [*starts, length])
    )
    ends, padded = borders
    packed = PackedSequence(ends, length, padded)
    mask, offsets = packed_mask(pattern, starts, lengths, length, device), OFFSETS.to(device, dtype)
    truth = with_a_column([canonical_view(tensor, "thd") for tensor in inputs], offsets, mask, grad_lse)
    got = by_the_op(inputs, offsets, grad_lse, pattern, "thd", packed=packed, backend=backend)
    assert_close(got, truth, tolerance)


@pytest.mark.parametrize("form", ["bshd", "bhsd"])
def test_sixteen_bits_and_an_offset_of_another_type(form, device):
    pattern = PATTERNS["paper"]
    inputs, grad_lse = make_inputs(pattern, 90, 32, F16, device, batch=2, form=form)
    views, mask = [canonical_view(tensor, form) for tensor in inputs], token_mask(pattern, 90, device)
    truth = with_a_column(views, OFFSETS.to(device), mask, grad_lse)
    for dtype in (F32, torch.bfloat16):
        got = by_the_op(inputs, OFFSETS.to(device, dtype), grad_lse, pattern, form, backend="triton")
        assert got[5].dtype == dtype and got[0].dtype == F16
        assert_close(got[:5], truth[:5], 1e-3, NAMES[:5])
        assert_close(got[5:], truth[5:], 1e-3 if dtype == F32 else 4e-3, NAMES[5:])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_on_the_hopper_kernels(head_dim):
    """In bf16, twice as far from fp64 as plain attention at most; also captured in a graph: nothing waits for the
    GPU."""
    pattern, offsets = pattern_of(((None, 4),), 64, 4, 2, window=150, sink_tokens=3), OFFSETS.to("cuda")
    inputs, grad_lse = make_inputs(pattern, 700, head_dim, torch.bfloat16, "cuda", batch=2, form="sbhd")
    views, mask = [canonical_view(tensor, "sbhd") for tensor in inputs], token_mask(pattern, 700, "cuda")
    truth = with_a_column(views, offsets, mask, grad_lse)
    plain = with_a_column(views, offsets, mask, grad_lse, torch.bfloat16)
    tolerances = [2 * distance(*pair) for pair in zip(plain, truth, strict=True)]
    assert_close(by_the_op(inputs, offsets, grad_lse, pattern, "sbhd"), truth, tolerances)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = by_the_op(inputs, offsets, grad_lse, pattern, "sbhd")
    graph.replay()
    assert_close(got, truth, tolerances)


def test_very_negative_offsets_are_none():
    pattern = PATTERNS["paper"]
    inputs, _ = make_inputs(pattern, 90, 32, F64, "cpu", form="sbhd")
    layout = build_layout(pattern)
    plain = s2_attention(*inputs[:3], layout, return_lse=True)
    far = s2_attention(*inputs[:3], layout, softmax_offset=torch.full((4,), -1e4), return_lse=True)
    assert all(map(torch.equal, plain, far))


def results(attend, leaves):
    """(out, LSE, the gradients of a loss over both)"""
    out, lse = attend(*leaves)
    return out, lse, *torch.autograd.grad(out.float().sin().sum() + lse.cos().sum(), leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_by_other_ways(kind):
    """torch.compile, compiled autograd, a mode that looks on, saved tensors on their way elsewhere: the formulas that
    PyTorch differentiates give what ours give."""
    leaves, options = make_call(kind, "cpu")
    leaves.append(OFFSETS.clone().requires_grad_())

    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def attend(query, key, value, offset):
        return s2_attention(query, key, value, softmax_offset=offset, **options)

    def with_hooks(*tensors):
        with torch.autograd.graph.saved_tensors_hooks(torch.neg, torch._neg_view):
            return attend(*tensors)

    expected = results(attend, leaves)
    torch._dynamo.reset()
    ways = [results(torch.compile(attend, backend="aot_eager", fullgraph=True), leaves), results(with_hooks, leaves)]
    with Passing():
        ways.append(results(attend, leaves))
    if kind == "sbhd":
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            for leaf in leaves:
                leaf.grad = None
            out, lse = attend(*leaves)
            (out.sin().sum() + lse.cos().sum()).backward()
        ways.append((out, lse, *(leaf.grad for leaf in leaves)))
    for got in ways:
        assert_close(got, expected, 1e-6)


def test_vmap():
    leaves, options = make_call("sbhd", "cpu")
    offsets = torch.stack([OFFSETS, OFFSETS.flip(0)])
    both = torch.vmap(lambda offset: s2_attention(*leaves, softmax_offset=offset, **options)[0])(offsets)
    for offset, got in zip(offsets, both):
        assert torch.allclose(got, s2_attention(*leaves, softmax_offset=offset, **options)[0], atol=1e-6)


def test_only_lse_or_only_out_has_a_gradient():
    leaves, options = make_call("sbhd", "cpu")
    offset = OFFSETS.clone().requires_grad_()
    out, lse = s2_attention(*leaves, softmax_offset=offset, **options)
    parts = [torch.autograd.grad(total, offset, retain_graph=True)[0] for total in (out.sum(), lse.sum())]
    (both,) = torch.autograd.grad(out.sum() + lse.sum(), offset)
    assert torch.allclose(sum(parts), both, rtol=1e-5)
    frozen, _ = s2_attention(*(leaf.detach() for leaf in leaves), softmax_offset=offset, **options)
    assert torch.equal(torch.autograd.grad(frozen.sum(), offset)[0], parts[0])
    second = torch.autograd.grad(
        s2_attention(*leaves, softmax_offset=offset, **options)[0].sum(), offset, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no second derivative"):
        second[0].sum().backward()


def test_a_result_kept_for_the_second_pass():
    leaves, options = make_call("sbhd", "cpu")
    offset = OFFSETS.clone().requires_grad_()
    call = checked_call(*leaves, options["layout"])
    outputs = RecomputeOutputs()
    outputs.begin()
    with torch.no_grad():
        first = recompute_attention(*leaves, call, outputs.of("layer"), offset)
    outputs.begin()
    again = recompute_attention(*leaves, call, outputs.of("layer"), offset)
    assert len(outputs) == 0 and torch.equal(first, again)
    plain = s2_attention(*leaves, options["layout"], softmax_offset=offset)
    grads = [torch.autograd.grad(out.sin().sum(), (*leaves, offset)) for out in (again, plain)]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    "offset, message",
    [
        (0.0, r"softmax_offset=0.0; expected a floating-point tensor \[4\]"),
        (torch.zeros(2), r"softmax_offset has shape \[2\] .*expected a floating-point tensor \[4\]"),
        (torch.zeros(4, dtype=torch.int32), r"torch.int32 on cpu; expected a floating-point"),
        (torch.zeros(4, device="meta"), r"on meta; expected .* on cpu"),
    ],
)
def test_refused(offset, message):
    leaves, options = make_call("sbhd", "cpu")
    with pytest.raises(ValueError, match=message):
        s2_attention(*leaves, softmax_offset=offset, **options)
