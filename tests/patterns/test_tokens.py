"""Windows and sinks in tokens: blocks, counts and coverage against the mask that the definition gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern, period_coverage
from s2_megatron.patterns.tokens import attends_whole, pairs_of_terms
from s2_megatron.testing.oracle import token_mask

BLOCK = 8


@st.composite
def heads(draw) -> HeadPattern:
    window = draw(st.none() | st.integers(1, 6 * BLOCK))
    ends = sorted(draw(st.sets(st.integers(1, 9), max_size=2)))
    strides = [draw(st.sampled_from((1, 2, 3, 4))) for _ in range(len(ends) + 1)]
    ranges = list(zip([*ends, None], strides))
    if draw(st.booleans()):
        ranges.pop()
    if window is None:
        ranges = ranges or [(2, 1)]
        ranges[0] = (ranges[0][0], 1)
    return HeadPattern(
        tuple(ranges), draw(st.integers(-3, 5)), window, draw(st.sampled_from((0, 0, 1, 5, 8, 11, 16, 40))), BLOCK
    )


def mask_of(head: HeadPattern, length: int) -> np.ndarray:
    return token_mask(RangePattern(BLOCK, 1, (head,)), length)[0].numpy()


@settings(max_examples=150)
@given(heads(), st.integers(1, 12 * BLOCK))
def test_blocks_and_pairs_are_those_of_the_mask(head, length):
    pattern = RangePattern(BLOCK, 1, (head,))
    mask, n_blocks = mask_of(head, length), -(-length // BLOCK)
    padded = mask_of(head, n_blocks * BLOCK)
    tiles = padded.reshape(n_blocks, BLOCK, n_blocks, BLOCK).transpose(0, 2, 1, 3)
    touched = tiles.any((2, 3))
    triangle = np.tril(np.ones((BLOCK, BLOCK), dtype=bool))
    for query in range(n_blocks):
        assert head.key_blocks(query).tolist() == np.flatnonzero(touched[query]).tolist()
        for key in range(query + 1):
            whole = tiles[query, key].all() if key < query else (tiles[query, key] == triangle).all()
            if BLOCK > 1 and head.by_token and whole != attends_whole(head, query, key):
                # A window and a sink that see a block between them are no whole block for the kernels.
                assert whole and head.window is not None and head.sink_tokens
            assert head.attends(query, key) == touched[query, key]
    assert head.key_block_counts(n_blocks).tolist() == touched.sum(1).tolist()
    assert pattern.nonzeros(n_blocks) == touched.sum()
    assert pattern.attended_pairs(length) == mask.sum()
    assert pattern.density(length) == pytest.approx(mask.sum() / (length * (length + 1) // 2))
    terms = pattern.row_terms(n_blocks)
    assert [pairs_of_terms(terms, short) for short in range(1, length + 1)] == np.cumsum(mask.sum(1)).tolist()
    assert pattern.coverage(n_blocks) == pytest.approx(touched.sum() / (n_blocks * (n_blocks + 1) // 2))


@settings(max_examples=60)
@given(heads(), heads())
@example(HeadPattern(((1, 1), (2, 1)), 0, 7, 0, BLOCK), HeadPattern(((2, 1),)))  # two ranges cover the window together
def test_equal_canonical_forms_are_equal_masks(first, second):
    length = 12 * BLOCK
    assert (HeadPattern(*first.canonical).canonical) == first.canonical
    assert (mask_of(HeadPattern(*first.canonical), length) == mask_of(first, length)).all()
    if first.canonical == second.canonical:
        assert (mask_of(first, length) == mask_of(second, length)).all()
    union = mask_of(first, length) | mask_of(second, length)
    tiles = union.reshape(12, BLOCK, 12, BLOCK).any((1, 3))
    patterns = [RangePattern(BLOCK, 1, (head,)) for head in (first, second)]
    assert period_coverage(patterns, 12) == pytest.approx(tiles.sum() / 78)


def test_a_window_differs_by_kv_head_and_names_itself():
    pattern = make_range_pattern(
        block_size=64, num_heads=4, num_kv_heads=2, ranges=((None, 4),), window=[100, 300], sink_tokens=4
    )
    assert [head.window for head in pattern.heads] == [100, 100, 300, 300]
    assert pattern.describe() == "window 100 to 300 + stride 4 + sink 4, 2 offsets"
    plain = make_range_pattern(block_size=64, num_heads=1, num_kv_heads=1, ranges=(), window=128)
    assert plain.describe() == "window 128"
    groups = pattern.canonical()["groups"]
    assert [(group["window"], group["sink_tokens"], group["heads"]) for group in groups] == [
        (100, 4, [0, 1]), (300, 4, [2, 3])
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(window=0), "window=0; expected 1 to"),
        (dict(window=1.5), "window=1.5; expected an integer"),
        (dict(window=True), "window=True; expected an integer"),
        (dict(window=[4]), "window=[4] has 1 entries; expected one number, or one for each of the 2 KV heads"),
        (dict(window=[4, 0]), "window=0; expected 1 to"),
        (dict(sink_tokens=-1), "sink_tokens=-1; expected 0 to"),
        (dict(sink_tokens=math.nan), "sink_tokens=nan; expected an integer"),
        (dict(ranges=()), "ranges=(); expected at least one"),
    ],
)
def test_bad_tokens_are_named(settings, words):
    arguments = dict(block_size=64, num_heads=4, num_kv_heads=2, ranges=((2, 1), (None, 4)))
    with pytest.raises(ValueError) as raised:
        make_range_pattern(**arguments | settings)
    assert words in str(raised.value)


def test_heads_of_a_group_share_window_and_sink():
    heads = (HeadPattern((), 0, 5, 0, 8), HeadPattern((), 0, 6, 0, 8))
    with pytest.raises(ValueError, match="heads\\[1\\] has window=6 and sink_tokens=0, heads\\[0\\] window=5"):
        RangePattern(8, 1, heads)
    with pytest.raises(ValueError, match="heads\\[0\\] has block_size=8; expected the pattern's, 16"):
        RangePattern(16, 2, heads)
