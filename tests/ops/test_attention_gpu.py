"""The op's full matrix on a GPU: every head dim x dtype, block size, grouping, format, length and pattern kind, against
fp64 and eager."""

import pytest
import torch

from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.testing.oracle import check_against_eager, make_inputs, random_mask, run_op, token_mask
from tests.ops.test_attention import PAPER, SEVERAL, UNEVEN, WINDOW, packed_case, pattern_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_scratch")]
HEAD_DIMS = (32, 48, 64, 80, 96, 128, 160, 192, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANGES = {"paper": PAPER, "window": WINDOW, "several": SEVERAL, "uneven": UNEVEN, "dense": ((None, 1),)}


def check(pattern, dim, dtype, length, form="sbhd", batch=1, **options):
    inputs, grad_lse = make_inputs(pattern, length, dim, dtype, "cuda", batch, form=form)
    check_against_eager(
        inputs, grad_lse, pattern, form, token_mask(pattern, length, "cuda"), 2 * dim**-0.5, backend="triton", **options
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dims(dim, dtype):
    check(pattern_of(((4, 1), (None, 4)), 64, 4, 2), dim, dtype, 1028, batch=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", RANGES)
def test_patterns_and_blocks(kind, block, dtype):
    check(pattern_of(RANGES[kind], block, 6, 2, "query"), 64, dtype, 1111)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "bhsd"])
def test_grouping_and_formats(form, groups):
    check(
        pattern_of(((4, 1), (None, 8)), 64, 8, groups, dense_heads={"spread": groups // 4}),
        128,
        torch.bfloat16,
        1500,
        form,
        2,
    )


@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 129, 1028, 5175])
def test_lengths(length):
    check(pattern_of(((8, 1), (None, 8)), 64, 2, 1), 128, torch.bfloat16, length)


@pytest.mark.parametrize("tables", [1, 2, 4])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_block_masks(block, tables):
    check(random_mask(block, 4, 2, tables, diagonal=tables != 2), 128, torch.bfloat16, 16 * block - 30)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["paper", "uneven", "mask"])
def test_packed(kind, padded):
    pattern = random_mask(64, 4, 2, 2) if kind == "mask" else pattern_of(RANGES[kind], 64, 4, 2)
    lengths = [700, 1, 64, 63, 900, 15]
    slots = [(length + 63) // 64 * 64 for length in lengths] if padded else None
    inputs, grad_lse, packed, mask = packed_case(pattern, lengths, slots, 128, torch.bfloat16, "cuda", extra=7)
    check_against_eager(inputs, grad_lse, pattern, "thd", mask, 0.2, backend="triton", packed=packed)


def test_agrees_with_the_reference_backend_at_length():
    """The two backends are independent ways to the same function; 20K tokens reach lengths that an [S, S] mask
    cannot."""
    pattern = pattern_of(((16, 1), (None, 16)), 64, 4, 4)
    inputs, grad_lse = make_inputs(pattern, 20000, 128, torch.bfloat16, "cuda", form="sbhd")
    mine, theirs = (
        run_op(inputs, grad_lse, pattern, "sbhd", 0.1, backend=backend) for backend in ("triton", "reference")
    )
    for name, one, two in zip(mine._fields, mine, theirs):
        assert (one.double() - two.double()).norm() <= 6e-3 * two.double().norm(), name


def test_offsets_beyond_32_bits():
    """Rows whose element offsets pass 2**31: the last block's result must equal that of a copy that starts at 0."""
    pattern = pattern_of(((2, 1),), 64, 1, 1)
    length, stride = 20000, 2**17
    storage = torch.empty(length * stride, dtype=torch.bfloat16, device="cuda")
    wide = storage.view(length, stride)[:, :128].view(length, 1, 1, 128)
    wide.copy_(torch.randn(length, 1, 1, 128, device="cuda"))
    layout = build_layout(pattern)
    assert torch.equal(s2_attention(wide, wide, wide, layout), s2_attention(*[wide.contiguous()] * 3, layout))


def test_repeats_are_equal_bit_for_bit():
    pattern = pattern_of(((8, 1), (None, 8)), 64, 8, 2)
    inputs, grad_lse = make_inputs(pattern, 4096, 128, torch.bfloat16, "cuda", form="sbhd")
    first = run_op(inputs, grad_lse, pattern, "sbhd", 0.2)
    for _ in range(20):
        for name, one, two in zip(first._fields, first, run_op(inputs, grad_lse, pattern, "sbhd", 0.2)):
            assert torch.equal(one, two), name


def test_all_blocks_on_is_causal_attention_in_bf16():
    pattern = RangePattern.dense(64, 8, 2)
    inputs, grad_lse = make_inputs(pattern, 2000, 128, torch.bfloat16, "cuda", form="bhsd")
    got = run_op(inputs, torch.zeros_like(grad_lse), pattern, "bhsd", 0.1)
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in inputs[:3])
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.1, enable_gqa=True
    )
    for mine, theirs in zip((got.out, *got[2:]), (out, *torch.autograd.grad(out, (query, key, value), inputs[3]))):
        assert (mine.double() - theirs.double()).norm() <= 8e-3 * theirs.double().norm()
