"""Patterns against the definition, against the two published rules (bit for bit, by enumeration), and their
invariants. Blocks counted by formula are those that the patterns list; long sequences take no time."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2_megatron.ops.layout import NO_END, build_layout
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.counts import attended_block_pairs
from s2_megatron.patterns.head import DENSE, HeadPattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern, period_coverage

N_BLOCKS = 40


def blocks_of(pattern, head, n_blocks=N_BLOCKS):
    """bool [n_blocks, n_blocks] from the pattern's block lists."""
    mask = np.zeros((n_blocks, n_blocks), dtype=bool)
    for query in range(n_blocks):
        mask[query, pattern.key_blocks(head, query)] = True
    return mask


@st.composite
def ranges(draw, kv_efficient=None):
    count = draw(st.integers(1, 4))
    ends = sorted(draw(st.sets(st.integers(1, 24), min_size=count, max_size=count)))
    strides = [1]
    for _ in range(count - 1):
        strides.append(strides[-1] * draw(st.integers(1, 3)) if kv_efficient else draw(st.integers(1, 9)))
    if draw(st.booleans()):
        ends[-1] = None
    return tuple(zip(ends, strides))


@st.composite
def head_patterns(draw):
    ends = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=3)))
    strides = [1, *draw(st.lists(st.integers(1, 7), min_size=len(ends) - 1, max_size=len(ends) - 1))]
    ranges = list(zip(ends, strides))
    if draw(st.booleans()):
        ranges.append((None, draw(st.integers(1, 7))))
    return HeadPattern(tuple(ranges), draw(st.integers(-9, 9)))


@given(ranges(), st.integers(0, 50))
def test_block_lists_and_counts_are_the_definition(head_ranges, offset):
    head = HeadPattern(head_ranges, offset)
    counts = head.key_block_counts(N_BLOCKS)
    for query in range(N_BLOCKS):
        expected = [key for key in range(query + 1) if head.attends(query, key)]
        assert head.key_blocks(query).tolist() == expected
        assert counts[query] == len(expected)
        assert expected[-1] == query, "the diagonal is always attended"


@given(ranges(kv_efficient=True), st.integers(0, 30))
def test_kv_efficient_patterns_never_take_a_block_back(head_ranges, offset):
    head = HeadPattern(head_ranges, offset)
    assert head.is_kv_efficient
    for key in range(N_BLOCKS):
        queries = [query for query in range(key, N_BLOCKS) if head.attends(query, key)]
        assert queries == list(range(key, key + len(queries))), (
            "each key block is attended by one contiguous run of query blocks"
        )


@given(ranges(), st.integers(0, 30), st.integers(0, 200))
def test_canonical_form_is_equal_for_the_same_blocks(head_ranges, offset, other):
    one, two = HeadPattern(head_ranges, offset), HeadPattern(head_ranges, other)
    same = all(one.key_blocks(query).tolist() == two.key_blocks(query).tolist() for query in range(80))
    if one.canonical == two.canonical:
        assert same
    normal = HeadPattern(*one.canonical)
    assert all(one.key_blocks(query).tolist() == normal.key_blocks(query).tolist() for query in range(80))


@pytest.mark.parametrize("heads", [4, 8, 12, 32])
@pytest.mark.parametrize("kv_ratio", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 3, 8, 16])
@pytest.mark.parametrize("local", [1, 3, 16])
@pytest.mark.parametrize("dense_last", [0, 1, 2])
def test_equals_the_papers_library(heads, kv_ratio, stride, local, dense_last):
    """(q - k) < local or (k + h * step + offset) % stride == 0, h the KV head, step max(1, stride // query heads),
    offset 0, dense last."""
    dense_last = min(dense_last, heads // kv_ratio)
    pattern = make_range_pattern(
        block_size=64,
        num_heads=heads,
        num_kv_heads=heads // kv_ratio,
        ranges=((local, 1), (None, stride)),
        head_step="paper",
        layer_step=0,
        dense_heads={"last": dense_last},
    )
    query, key = np.arange(N_BLOCKS)[:, None], np.arange(N_BLOCKS)[None, :]
    for head in range(heads):
        kv_head = head // kv_ratio
        step = max(1, stride // heads)
        expected = ((query - key) < local) | ((key + kv_head * step) % stride == 0)
        if kv_head >= heads // kv_ratio - dense_last:
            expected = np.ones_like(expected)
        assert (blocks_of(pattern, head) == (expected & (key <= query))).all()


@pytest.mark.parametrize(
    "heads, kv_heads, stride, local", [(32, 8, 8, 16), (32, 32, 8, 16), (8, 2, 16, 4), (48, 8, 16, 2)]
)
def test_equals_phi3_small(heads, kv_heads, stride, local):
    """The query head slides, step max(1, stride // heads), offset 1."""
    pattern = make_range_pattern(
        block_size=64,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ranges=((local, 1), (None, stride)),
        slide="query",
        head_step="paper",
        base_offset=1,
        layer_step=0,
    )
    query, key = np.arange(N_BLOCKS)[:, None], np.arange(N_BLOCKS)[None, :]
    for head in range(heads):
        step = max(1, stride // heads)
        expected = ((query - key) < local) | ((key + head * step + 1) % stride == 0)
        assert (blocks_of(pattern, head) == (expected & (key <= query))).all()


@pytest.mark.parametrize("slide", ["kv", "query"])
@pytest.mark.parametrize("heads, kv_heads, size", [(8, 8, 4), (8, 4, 2), (8, 2, 4), (12, 4, 4), (8, 1, 8)])
def test_tensor_parallel_slices_are_the_global_heads(heads, kv_heads, size, slide):
    pattern = make_range_pattern(
        block_size=64,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ranges=((2, 1), (None, 8)),
        slide=slide,
        dense_heads=[0] if kv_heads > 1 else [],
    )
    mask = BlockMaskPattern.from_function(
        64, heads, kv_heads, N_BLOCKS, lambda head, query, keys: np.isin(keys, pattern.key_blocks(head, query))
    )
    local_pairs = 0
    for rank in range(size):
        for whole in (pattern, mask):
            part = whole.tensor_parallel_slice(rank, size)
            assert part.num_heads == heads // size and part.num_kv_heads == max(1, kv_heads // size)
            for head in range(part.num_heads):
                assert (blocks_of(part, head) == blocks_of(pattern, rank * heads // size + head)).all()
        local_pairs += pattern.tensor_parallel_slice(rank, size).attended_pairs(1000)
    assert local_pairs == pattern.attended_pairs(1000)


def test_bad_tensor_parallel_size():
    with pytest.raises(ValueError, match="tensor_parallel_size=3"):
        RangePattern.dense(64, 8, 4).tensor_parallel_slice(0, 3)


@settings(max_examples=30, deadline=None)
@given(ranges(), st.integers(1, 700), st.sampled_from([16, 64]))
def test_attended_pairs_are_the_tokens_counted_one_by_one(head_ranges, length, block):
    pattern = make_range_pattern(block_size=block, num_heads=2, num_kv_heads=2, ranges=head_ranges)
    mask = BlockMaskPattern.from_function(
        block, 2, 2, -(-length // block), lambda head, query, keys: np.isin(keys, pattern.key_blocks(head, query))
    )
    total = 0
    for head in range(2):
        tokens = blocks_of(pattern, head, -(-length // block)).repeat(block, 0).repeat(block, 1)[:length, :length]
        total += int(np.tril(tokens).sum())
    assert pattern.attended_pairs(length) == total == mask.attended_pairs(length)


def test_density_of_the_papers_pattern():
    """The shares of causal pairs that the S2 pattern attends at block 64, window 1024, stride 16."""
    pattern = make_range_pattern(block_size=64, num_heads=32, num_kv_heads=32, ranges=((16, 1), (None, 16)))
    assert [round(100 * pattern.density(length), 2) for length in (8192, 32768, 131072)] == [27.59, 11.84, 7.66]
    assert RangePattern.dense(64, 4, 2).density(1000) == 1.0


@settings(max_examples=25, deadline=None)
@given(ranges(), st.sampled_from([(4, 4), (4, 2), (8, 1)]), st.integers(0, 3))
def test_coverage_is_the_union_of_the_heads(head_ranges, shape, layer):
    heads, kv_heads = shape
    patterns = [
        make_range_pattern(block_size=16, num_heads=heads, num_kv_heads=kv_heads, ranges=head_ranges, layer_index=index)
        for index in range(layer + 1)
    ]
    union = np.zeros((N_BLOCKS, N_BLOCKS), dtype=bool)
    for pattern in patterns:
        for head in range(heads):
            union |= blocks_of(pattern, head)
    assert period_coverage(patterns, N_BLOCKS) == union.sum() / (N_BLOCKS * (N_BLOCKS + 1) // 2)


@pytest.mark.parametrize("stride, kv_heads", [(16, 8), (16, 4), (8, 2), (16, 32), (12, 5), (16, 1)])
def test_consecutive_layers_cover_the_context(stride, kv_heads):
    """Where the heads divide the stride, ceil(stride / KV heads) layers suffice; elsewhere a few more."""
    layers = -(-stride // kv_heads) if stride % kv_heads == 0 or kv_heads > stride else stride
    patterns = [
        make_range_pattern(
            block_size=64, num_heads=kv_heads, num_kv_heads=kv_heads, ranges=((2, 1), (None, stride)), layer_index=index
        )
        for index in range(layers)
    ]
    assert period_coverage(patterns, 100) == 1.0


@settings(max_examples=40, deadline=None)
@given(ranges(), st.sampled_from(["kv", "query"]))
def test_range_layout_is_the_mask(head_ranges, slide):
    """The arithmetic that kernels do on the layout's table gives the same blocks, by row and by column."""
    pattern = make_range_pattern(
        block_size=16, num_heads=4, num_kv_heads=2, ranges=head_ranges, slide=slide, dense_heads=[1]
    )
    layout = build_layout(pattern)
    assert layout.ranges.shape == (4, len(head_ranges), 4)
    for head in range(4):
        expected = blocks_of(pattern, head)
        mask = np.zeros_like(expected)
        for start, end, stride, offset in layout.ranges[head].tolist():
            for key in range(N_BLOCKS):
                if (key + offset) % stride == 0:
                    mask[min(key + start, N_BLOCKS) : min(key + end, N_BLOCKS), key] = True
        assert (mask == expected).all()


@settings(max_examples=40, deadline=None)
@given(ranges(kv_efficient=True))
def test_shared_tiles_differ_only_at_their_edges(head_ranges):
    """tile_blocks: within a tile, blocks that not every row attends lie in the tile itself or in the T - 1 blocks at a
    range's end."""
    pattern = make_range_pattern(block_size=16, num_heads=1, num_kv_heads=1, ranges=head_ranges)
    tile = build_layout(pattern).tile_blocks
    mask = blocks_of(pattern, 0)
    for low in range(0, N_BLOCKS - tile + 1, tile):
        high = low + tile - 1
        edges = {key for end, _ in head_ranges if end is not None for key in range(low - end + 1, high - end + 1)}
        for key in range(low):
            rows = mask[low : high + 1, key]
            assert rows.all() or not rows.any() or key in edges


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]))
def test_table_layout_and_its_transpose_agree(seed, tables):
    generator = np.random.default_rng(seed)
    masks = [np.tril(generator.random((12, 12)) < 0.3) | np.eye(12, dtype=bool) for _ in range(tables)]
    indptr = [np.concatenate([[0], mask.sum(1).cumsum()]) for mask in masks]
    indices = [np.nonzero(mask)[1] for mask in masks]
    pattern = BlockMaskPattern.from_csr(16, 4, 2, indptr, indices)
    layout = build_layout(pattern)
    for table, mask in enumerate(masks):
        by_column = np.zeros_like(mask)
        for key in range(12):
            rows = layout.query_blocks[layout.column_starts[table, key] : layout.column_starts[table, key + 1]].numpy()
            assert (np.diff(rows) > 0).all()
            by_column[rows, key] = True
        assert (by_column == mask).all()
    for head in range(4):
        assert (blocks_of(pattern, head, 12) == masks[head * tables // 4]).all()


def test_index_data_is_small():
    """1M tokens, 32 heads: a few KB for ranges; a block mask takes its nonzeros twice and its row starts."""
    pattern = make_range_pattern(block_size=64, num_heads=32, num_kv_heads=32, ranges=((16, 1), (None, 16)))
    assert build_layout(pattern).index_bytes < 2048
    n = 256
    mask = BlockMaskPattern.from_function(64, 2, 1, n, lambda head, query, keys: keys >= query - 3)
    nonzeros = sum(len(indices) for _, indices in mask.tables)
    assert build_layout(mask).index_bytes == 2 * 4 * nonzeros + 2 * 8 * 2 * (n + 1)


def test_canonical_json_tells_patterns_apart():
    def make(**options):
        settings = {"block_size": 64, "num_heads": 4, "num_kv_heads": 2, "ranges": ((2, 1), (None, 4)), **options}
        return json.dumps(make_range_pattern(**settings).canonical(), sort_keys=True)

    assert make() == make(ranges=((1, 1), (2, 1), (None, 4))) == make(base_offset=4)
    different = [
        make(),
        make(block_size=32),
        make(ranges=((2, 1), (None, 8))),
        make(base_offset=1),
        make(dense_heads=[0]),
        make(layer_step=3, layer_index=1),
        make(slide="query"),
    ]
    assert len(set(different)) == len(different)


def test_a_dense_head_is_padded_with_unused_ranges():
    pattern = make_range_pattern(
        block_size=64, num_heads=2, num_kv_heads=2, ranges=((2, 1), (None, 4)), dense_heads=[1]
    )
    assert pattern.heads[1].ranges == DENSE
    assert build_layout(pattern).ranges[1].tolist() == [[0, NO_END, 1, 0], [NO_END, NO_END, 1, 0]]


@settings(max_examples=200, deadline=None)
@given(heads=st.lists(head_patterns(), min_size=1, max_size=4), tokens=st.integers(1, 100), data=st.data())
def test_pairs_and_coverage_are_those_of_the_lists(heads, tokens, data):
    pattern = RangePattern(4, 1, tuple(heads))
    n_blocks = -(-tokens // 4)
    grids = [blocks_of(pattern, head, n_blocks) for head in range(len(heads))]
    causal = np.tril(np.ones((tokens, tokens), dtype=bool))
    pairs = sum((np.kron(seen, np.ones((4, 4), dtype=bool))[:tokens, :tokens] & causal).sum() for seen in grids)
    assert pattern.attended_pairs(tokens) == pairs
    total = n_blocks * (n_blocks + 1) // 2
    assert pattern.coverage(n_blocks) == np.any(grids, axis=0).sum() / total
    # A mask beside the ranges: what only it attends is counted once.
    mask_of = data.draw(head_patterns())
    mask = BlockMaskPattern.from_function(
        4, 1, 1, n_blocks, lambda head, query, keys: np.isin(keys, mask_of.key_blocks(query))
    )
    both = np.any([*grids, blocks_of(mask, 0, n_blocks)], axis=0).sum() / total
    assert period_coverage([pattern, mask], n_blocks) == both
    assert mask.coverage(n_blocks) == blocks_of(mask, 0, n_blocks).sum() / total


def test_integers_of_any_size():
    # Ranges of 2^40 tokens: the number of pairs needs more than 64 bits.
    n_blocks = 2**36
    assert attended_block_pairs(n_blocks, 0, None, [0], 1) == n_blocks * (n_blocks + 1) // 2
    halves = [attended_block_pairs(n_blocks, 3, 2**35, [residue], 2) for residue in (0, 1)]
    assert sum(halves) == attended_block_pairs(n_blocks, 3, 2**35, [0], 1)
    assert RangePattern.dense(64, 2, 1).density(2**40) == 1


@pytest.mark.parametrize("stride", [16, 4096, 20000])
def test_ten_million_tokens_take_no_time(stride):
    begin = time.process_time()
    pattern = make_range_pattern(block_size=64, num_heads=32, num_kv_heads=8, ranges=((16, 1), (None, stride)))
    assert 0 < pattern.density(10 * 2**20) < pattern.coverage(10 * 2**14) < 1
    assert time.process_time() - begin < 2
