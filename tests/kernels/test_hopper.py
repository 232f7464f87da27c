"""The Hopper kernels against fp64, by the same bound as the others: error at most twice that of eager attention in the
same dtype."""

from itertools import product

import pytest
import torch

from benchmarks.cases import as_table
from s2_megatron import printing
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.testing.oracle import check_against_eager, make_inputs, random_mask, run_op, token_mask
from tests.kernels.placed_blocks import PAPER, RANGES, check_placed_blocks
from tests.ops.test_attention import packed_case, pattern_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nan_scratch"),
    pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs a Hopper GPU (compute capability 9.0)"),
]
BF16, F16 = torch.bfloat16, torch.float16
MIX = RangePattern(64, 3, (HeadPattern(((3, 1),)), HeadPattern(PAPER, 1), HeadPattern(((2, 1), (6, 2), (None, 4)), 3)))


@pytest.fixture(params=["heads", "sequence"])
def tiles(request, monkeypatch):
    """Both ways to fill a query tile: two heads where they can share one, two query blocks; the second also without
    persistent programs, and with the kernel of dK and dV for many KV heads."""
    from s2_megatron.kernels import tiles
    from s2_megatron.kernels.hopper import launch as hopper

    chosen = tiles.hopper_tiles_for

    def forced(*arguments):
        table = chosen(*arguments)
        if request.param == "heads":
            return table
        return table._replace(
            **{name: getattr(table, name)._replace(pack=False, persistent=False) for name in ("forward", "grad_query")}
        )

    monkeypatch.setattr(hopper, "hopper_tiles_for", forced)
    if request.param == "sequence":
        monkeypatch.setattr(hopper, "FEW_UNITS", 0)


@pytest.fixture
def in_parts(monkeypatch):
    """Columns of dK and dV are divided into parts, in some call at least: short ones, so that there are many."""
    from s2_megatron.kernels.hopper import launch as hopper

    found, choose = [], hopper.Geometry._key_tiles
    monkeypatch.setattr(hopper, "PART_STEPS", 4)

    def noted(geometry, tile):
        launches = choose(geometry, tile)
        arguments = launches.arguments
        found.append(arguments.get("n_split", 0) > 0 or arguments.get("sink_parts", 1) > 1)
        return launches

    monkeypatch.setattr(hopper.Geometry, "_key_tiles", noted)
    yield
    assert any(found)


def check(pattern, dim=128, dtype=BF16, length=1028, form="sbhd", batch=1, **options):
    inputs, grad_lse = make_inputs(pattern, length, dim, dtype, "cuda", batch, form=form)
    mask = token_mask(pattern, length, "cuda")
    for deterministic in (False, True):
        check_against_eager(
            inputs,
            grad_lse,
            pattern,
            form,
            mask,
            2 * dim**-0.5,
            backend="gluon",
            deterministic=deterministic,
            **options,
        )


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [32, 48, 64, 80, 96, 128, 136, 192, 256])
def test_head_dims(dim, dtype):
    check(pattern_of(PAPER, 64, 4, 2), dim, dtype, batch=2)


@pytest.mark.parametrize("dim", [128, 192])
@pytest.mark.parametrize("groups", [(4, 4), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("kind", RANGES)
def test_patterns(kind, groups, dim, tiles):
    check(pattern_of(RANGES[kind], 64, *groups), dim, length=1341)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("kind", RANGES)
def test_heads_of_a_group_that_differ(kind, dim):
    check(pattern_of(RANGES[kind], 64, 8, 2, "query"), dim, length=1341)


# Windows and sinks in tokens: (ranges, window, sink tokens)
RULES = [
    ((), 100, 0),
    ((), 128, 5),
    ((), 20, 0),
    ((), 65, 64),
    ((), 1, 1),
    (((None, 4),), 130, 4),
    (((None, 2),), 40, 70),
    (((None, 8),), 511, 0),
    (((2, 1), (None, 4)), None, 3),
    (((3, 2), (None, 4)), 33, 130),
]


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("groups", [(4, 4), (4, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_windows_and_sinks(rule, groups, dim, tiles):
    ranges, window, sink = rule
    check(pattern_of(ranges, 64, *groups, window=window, sink_tokens=sink), dim, length=1341)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 1028, 4099])
@pytest.mark.parametrize("dim", [128, 256])
def test_windows_and_sinks_of_lengths(dim, length):
    check(pattern_of(((None, 8),), 64, 4, 2, window=[300, 77], sink_tokens=5), dim, length=length, batch=2)


@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_windows_and_sinks_beside_large_blocks(dim, block):
    check(pattern_of(((None, 4),), block, 4, 2, window=333, sink_tokens=150), dim, length=2100)


def test_columns_of_the_sink_in_parts(in_parts):
    check(pattern_of((), 64, 8, 1, window=300, sink_tokens=70), 128, length=4099)
    check(pattern_of(((None, 8),), 64, 8, 1, window=300, sink_tokens=4), 64, length=4099)


@pytest.mark.parametrize("form", ["sbhd", "bshd", "bhsd"])
@pytest.mark.parametrize("dense", [0, 1, 2])
@pytest.mark.parametrize("dim", [64, 192])
def test_formats_and_dense_heads(dim, form, dense, tiles):
    check(pattern_of(((4, 1), (None, 8)), 64, 8, 4, dense_heads={"last": dense}), dim, length=1500, form=form, batch=3)


@pytest.mark.parametrize("dim", [128, 256])
def test_ranges_of_different_number(dim):
    check(MIX, dim, length=1600, batch=2)


@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 127, 128, 129, 191, 192, 1028, 4099])
@pytest.mark.parametrize("dim", [128, 192])
def test_lengths(dim, length, tiles):
    check(pattern_of(((8, 1), (None, 8)), 64, 4, 2), dim, length=length, batch=2)


@pytest.mark.parametrize("length, batch", [(2049, 1), (4099, 1), (2500, 2)])
@pytest.mark.parametrize("heads", [(8, 1), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_few_kv_heads(dim, heads, length, batch, in_parts):
    check(pattern_of(((8, 1), (None, 8)), 64, *heads), dim, length=length, batch=batch)


@pytest.mark.parametrize("dim", [64, 128])
def test_few_kv_heads_of_other_patterns(dim, in_parts):
    check(pattern_of(PAPER, 64, 8, 1, "query"), dim, length=2500)
    check(RangePattern(64, 1, MIX.heads), dim, length=4099)
    check(random_mask(64, 8, 1, 1, 40), dim, length=2500, batch=2)
    check(pattern_of(((2, 1), (5, 3), (None, 4)), 64, 8, 2), dim, length=2500)


@pytest.mark.parametrize("kind", ["paper", "query", "mask"])
@pytest.mark.parametrize("dim", [64, 128])
def test_few_kv_heads_of_placed_blocks(dim, kind, in_parts):
    """Also into fp32 gradients, and into slots whose heads share their rows."""
    check_placed_blocks(dim, kind, 2, 24, "cuda", BF16)


@pytest.mark.parametrize("dim", [64, 128])
def test_sums_of_parts_are_equal_bit_for_bit(dim, in_parts):
    """Whatever part is ready first; also where dQ is added up in any order."""
    pattern = pattern_of(((8, 1), (None, 8)), 64, 8, 1)
    inputs, grad_lse = make_inputs(pattern, 12345, dim, BF16, "cuda", form="sbhd")
    first = run_op(inputs, grad_lse, pattern, "sbhd", 0.2, backend="gluon", deterministic=True)
    for deterministic in (True, False) * 20:
        more = run_op(inputs, grad_lse, pattern, "sbhd", 0.2, backend="gluon", deterministic=deterministic)
        for name in ("grad_key", "grad_value"):
            assert torch.equal(getattr(first, name), getattr(more, name)), name


@pytest.mark.parametrize("length", [64, 1341, 1536])
@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2), (8, 2, 8), (6, 2, 1)], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_block_masks(dim, heads, length, tiles):
    """Arbitrary lists, also of rows that do not attend their own block: heads, KV heads, tables."""
    check(random_mask(64, *heads, 24, diagonal=dim in (64, 192)), dim, length=length, batch=2)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("kind", ["paper", "window", "several", "dense"])
def test_lists_of_a_pattern(kind, dim, tiles):
    """A pattern given as a block mask."""
    check(as_table(pattern_of(RANGES[kind], 64, 8, 4), 1500), dim, length=1500)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["paper", "block-local", "window", "several", "mask"])
def test_blocks_of_128(dim, kind, tiles):
    """As lists of parts of 64; the sequence ends inside of the first part of a block."""
    pattern = random_mask(128, 8, 4, 4, 12) if kind == "mask" else pattern_of(RANGES[kind], 128, 8, 4)
    check(pattern, dim, length=1450, batch=2)


@pytest.mark.parametrize("dim", [128, 192])
def test_strides_that_do_not_divide_each_other(dim):
    check(pattern_of(((2, 1), (5, 3), (None, 4)), 64, 4, 2), dim, length=1500, batch=2)


@pytest.mark.parametrize("dim", [128, 256])
def test_more_ranges_than_a_plan_holds(dim):
    check(pattern_of((*((end, 1) for end in range(1, 14)), (None, 2)), 64, 2, 2), dim, length=1500)


@pytest.mark.parametrize("kind", ["paper of 128", "mask of 128"])
def test_placed_blocks_of_128(kind):
    check_placed_blocks(128, kind, 4, 16, "cuda", BF16)


@pytest.mark.parametrize("size, n_blocks", [(2, 24), (3, 30), (4, 8)])
@pytest.mark.parametrize("kind", ["paper", "query", "several", "uneven", "mask", "dense heads"])
@pytest.mark.parametrize("dim", [128, 192, 256])
def test_placed_blocks_and_continued_softmax(dim, kind, size, n_blocks):
    check_placed_blocks(dim, kind, size, n_blocks, "cuda", BF16)


@pytest.mark.parametrize(
    "ways", list(product(["paper", "window", "several", "dense", "query"], [False, True])), ids=str
)
@pytest.mark.parametrize("dim", [128, 256])
def test_packed(dim, ways, tiles):
    kind, padded = ways
    pattern = pattern_of(RANGES.get(kind, PAPER), 64, 4, 2, "query" if kind == "query" else "kv")
    lengths = [700, 1, 64, 63, 900, 15, 128, 129]
    slots = [(length + 99) // 64 * 64 for length in lengths] if padded else None
    inputs, grad_lse, packed, mask = packed_case(pattern, lengths, slots, dim, BF16, "cuda", extra=7)
    for deterministic in (False, True):
        check_against_eager(
            inputs, grad_lse, pattern, "thd", mask, 0.2, backend="gluon", packed=packed, deterministic=deterministic
        )


@pytest.mark.parametrize("kind", ["paper", "window"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_documents_do_not_see_what_lies_between(deterministic, dim, kind, tiles):
    check_documents(deterministic, dim, kind, "cuda", BF16)


def check_documents(deterministic, dim, kind, device, dtype):
    """NaN in the rows between documents, and in a neighbour, stays there."""
    patterns = {
        "window": pattern_of(((8, 1),), 64, 4, 2),
        "tokens": pattern_of(((None, 4),), 64, 4, 2, window=150, sink_tokens=70),
        "short window": pattern_of((), 64, 4, 2, window=20, sink_tokens=3),
    }
    pattern = patterns.get(kind, pattern_of(PAPER, 64, 4, 2))
    starts, lengths = [0, 192, 448, 1024], [130, 250, 522]
    tensors = [torch.randn(1024, heads, dim, device=device).to(dtype) for heads in (4, 2, 2, 4)]
    inside = torch.zeros(1024, dtype=torch.bool, device=device)
    for start, length in zip(starts, lengths):
        inside[start : start + length] = True
    packed = PackedSequence(
        torch.tensor([0, 130, 380, 902], dtype=torch.int32, device=device),
        522,
        torch.tensor(starts, dtype=torch.int32, device=device),
    )
    results = []
    for filler in (0.0, float("nan")):
        query, key, value, grad = (tensor.clone() for tensor in tensors)
        for tensor in (query, key, value, grad):
            tensor[~inside] = filler
        query, key, value = (tensor.requires_grad_() for tensor in (query, key, value))
        out = s2_attention(
            query,
            key,
            value,
            build_layout(pattern, device),
            tensor_format="thd",
            packed=packed,
            backend="gluon",
            deterministic=deterministic,
        )
        results.append(
            [tensor[inside] for tensor in (out.detach(), *torch.autograd.grad(out, (query, key, value), grad))]
        )
    for clean, poisoned in zip(*results):
        assert torch.isfinite(poisoned).all()
        assert (clean.double() - poisoned.double()).norm() <= 1e-2 * clean.double().norm()


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_agrees_with_the_portable_kernels_at_length(dim):
    pattern = pattern_of(((16, 1), (None, 16)), 64, 8, 4, dense_heads=[1])
    inputs, grad_lse = make_inputs(pattern, 70001, dim, BF16, "cuda", form="sbhd")
    one, two = (run_op(inputs, grad_lse, pattern, "sbhd", 0.1, backend=backend) for backend in ("gluon", "triton"))
    for name, mine, theirs in zip(one._fields, one, two):
        assert (mine.double() - theirs.double()).norm() <= 6e-3 * theirs.double().norm(), name


def test_a_broadcast_gradient_is_taken():
    """The gradient of a sum has strides of 0, which TMA cannot read."""
    pattern = pattern_of(PAPER, 64, 2, 2)
    query, key, value = (torch.randn(300, 1, 2, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    found = []
    for backend in ("gluon", "triton"):
        out = s2_attention(query, key, value, build_layout(pattern, "cuda"), backend=backend)
        found.append(torch.autograd.grad(out.sum(), (query, key, value)))
    for mine, theirs in zip(*found):
        assert (mine.double() - theirs.double()).norm() <= 1e-2 * theirs.double().norm()


def test_what_they_do_not_compute_is_said(capfd, monkeypatch):
    monkeypatch.setattr(printing, "_printed", set())  # other tests may have had it said
    mask = build_layout(random_mask(64, 2, 2, 1), "cuda")
    tensors = [torch.randn(300, 1, 2, 64, device="cuda", dtype=BF16) for _ in range(3)]
    packed = PackedSequence(torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda"), 200)
    with pytest.raises(ValueError, match=r"documents are packed, and the pattern is a block mask.*use backend=auto"):
        s2_attention(*(tensor[:, 0] for tensor in tensors), mask, tensor_format="thd", packed=packed, backend="gluon")
    layout = build_layout(pattern_of(PAPER, 64, 2, 2), "cuda")
    with pytest.raises(ValueError, match="placed by blocks without their pattern"):
        s2_attention(
            *(tensor[:256] for tensor in tensors),
            layout,
            placement=Placement.make(range(4), 4, device="cuda"),
            backend="gluon",
        )
    s2_attention(*tensors, build_layout(pattern_of(PAPER, 32, 2, 2), "cuda"))
    assert "triton (portable), because block_size=32 is no multiple of 64" in capfd.readouterr().err
    s2_attention(*[tensor.float() for tensor in tensors], layout)
    assert "triton (portable), because torch.float32 is not a 16-bit type" in capfd.readouterr().err


@pytest.mark.parametrize("dim", [128, 192, 256])
def test_deterministic_repeats_are_equal_bit_for_bit(dim):
    pattern = pattern_of(((8, 1), (None, 8)), 64, 8, 2)
    inputs, grad_lse = make_inputs(pattern, 4096, dim, BF16, "cuda", form="sbhd")
    first = run_op(inputs, grad_lse, pattern, "sbhd", 0.2, backend="gluon", deterministic=True)
    for _ in range(20):
        for name, one, two in zip(
            first._fields, first, run_op(inputs, grad_lse, pattern, "sbhd", 0.2, backend="gluon", deterministic=True)
        ):
            assert torch.equal(one, two), name


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_calls_that_leave_triton_out_are_equal_bit_for_bit(dim, dtype):
    """With one layout, the calls after the first are started without Triton's look at the arguments
    (hopper_launch.py)."""
    pattern = pattern_of(((8, 1), (None, 8)), 64, 8, 2)
    used = build_layout(pattern, "cuda")
    for form, length, seed in product(("sbhd", "bshd"), (1000, 1024), range(3)):
        torch.manual_seed(seed)
        batch, rows = (2, length) if form == "bshd" else (length, 2)
        query, key, value = (
            torch.randn(batch, rows, heads, dim, device="cuda", dtype=dtype, requires_grad=True) for heads in (8, 2, 2)
        )
        found = []
        for layout in (used, build_layout(pattern, "cuda")):
            out, lse = s2_attention(
                query, key, value, layout, tensor_format=form, backend="gluon", deterministic=True, return_lse=True
            )
            found.append((out, lse, *torch.autograd.grad(out.float().sin().sum(), (query, key, value))))
        assert all(torch.equal(one, two) for one, two in zip(*found)), (form, length, seed)
