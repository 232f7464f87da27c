"""Blocks counted by formula are those that the patterns list, for short sequences; long ones take no time."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.counts import attended_block_pairs
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern, period_coverage


@st.composite
def head_patterns(draw):
    ends = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=3)))
    strides = [1, *draw(st.lists(st.integers(1, 7), min_size=len(ends) - 1, max_size=len(ends) - 1))]
    ranges = list(zip(ends, strides))
    if draw(st.booleans()):
        ranges.append((None, draw(st.integers(1, 7))))
    return HeadPattern(tuple(ranges), draw(st.integers(-9, 9)))


def grid(pattern, head, n_blocks):
    """bool[n_blocks, n_blocks] of what key_blocks lists."""
    seen = np.zeros((n_blocks, n_blocks), dtype=bool)
    for query in range(n_blocks):
        seen[query, pattern.key_blocks(head, query)] = True
    return seen


@settings(max_examples=200, deadline=None)
@given(heads=st.lists(head_patterns(), min_size=1, max_size=4), tokens=st.integers(1, 100), data=st.data())
def test_pairs_and_coverage_are_those_of_the_lists(heads, tokens, data):
    pattern = RangePattern(4, 1, tuple(heads))
    n_blocks = -(-tokens // 4)
    grids = [grid(pattern, head, n_blocks) for head in range(len(heads))]
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
    both = np.any([*grids, grid(mask, 0, n_blocks)], axis=0).sum() / total
    assert period_coverage([pattern, mask], n_blocks) == both
    assert mask.coverage(n_blocks) == grid(mask, 0, n_blocks).sum() / total


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
