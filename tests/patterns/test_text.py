"""A pattern as a text: complete, the same for equal patterns alone, and read back as it was."""

import json

import numpy as np
import pytest

from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from s2_megatron.patterns.text import pattern_of, text_of
from tests.refusing import refuses

PAPER = dict(block_size=64, num_heads=8, num_kv_heads=4, ranges=((16, 1), (None, 16)))
RANGES = [
    make_range_pattern(**PAPER),
    make_range_pattern(**PAPER, layer_index=1),
    make_range_pattern(**PAPER, dense_heads=[1]),
    make_range_pattern(**{**PAPER, "ranges": ((2, 1), (8, 4), (32, 6))}),
    make_range_pattern(**{**PAPER, "num_kv_heads": 8}),
    make_range_pattern(**{**PAPER, "ranges": ((None, 16),)}, window=[70, 100, 100, 3]),
    make_range_pattern(**{**PAPER, "ranges": ()}, window=70, sink_tokens=4),
    make_range_pattern(**PAPER, sink_tokens=4),
    # The same attention in other words is another text: kernels may sum in another order.
    RangePattern(64, 1, (HeadPattern(((2, 1), (None, 4)), 1),)),
    RangePattern(64, 1, (HeadPattern(((2, 1), (None, 4)), 5),)),
]


def mask(tables):
    def attends(head, query, keys):
        return (keys == query) | ((keys + head % tables) % 3 == 0)

    return BlockMaskPattern.from_function(32, 4, 2, 9, attends)


def test_a_range_pattern_comes_back():
    texts = [text_of(pattern) for pattern in RANGES]
    assert len(set(texts)) == len(RANGES) and max(map(len, texts)) < 300
    assert [pattern_of(text) for text in texts] == RANGES


@pytest.mark.parametrize("tables", [1, 2, 4])
def test_a_block_mask_comes_back(tables):
    pattern = mask(tables)
    other = pattern_of(text_of(pattern))
    assert (other.block_size, other.num_heads, other.num_kv_heads, other.num_blocks) == (32, 4, 2, 9)
    assert len(other.tables) == len(pattern.tables) and text_of(other) == text_of(pattern)
    for one, two in zip(pattern.tables, other.tables):
        assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, two))


def test_masks_that_differ_have_other_texts():
    assert len({text_of(mask(tables)) for tables in (1, 2, 3)}) == 3


@pytest.mark.parametrize("change", [
    {"format": 2}, {"format": None}, {"kind": "other"}, {"rules": []}, {"heads": [[0]]}, {"heads": [[0, 0.5]]},
    {"block_size": 60},
])  # fmt: skip
def test_another_content_is_refused(change):
    text = json.dumps(json.loads(text_of(RANGES[0])) | change)
    refuses(lambda: pattern_of(text), "the stored layout", "cannot be read", "export the program again")
