"""What the benchmark measures, without a GPU: patterns from flags and configs, the same pattern at a peer's block,
index tables, documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import attention as benchmark
from benchmarks import peers
from benchmarks.cases import Case, as_table, block_lists, coarsen, equal_pairs, lognormal_documents, pattern_from_flags
from benchmarks.gate import short_case
from benchmarks.suites import s2_pattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from s2_megatron.testing.oracle import token_mask

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def flags(*arguments):
    return benchmark.parse_arguments(list(arguments))


def test_flags_make_the_papers_pattern():
    assert pattern_from_flags(flags(), 8192) == s2_pattern()
    assert pattern_from_flags(flags("--stride", "0"), 8192).heads[0].ranges == ((16, 1),)
    several = pattern_from_flags(flags("--ranges", "1024:1,8192:4,:16"), 8192)
    assert several.heads[0].ranges == ((16, 1), (128, 4), (None, 16))
    assert sum(head.is_dense for head in pattern_from_flags(flags("--dense-heads", "2"), 8192).heads) == 2
    table = pattern_from_flags(flags("--as-table", "--num-kv-heads", "8"), 2048)
    assert len(table.tables) == 8 and table.attended_pairs(2048) == s2_pattern(32, 8).attended_pairs(2048)


@pytest.mark.parametrize("given, words", [
    (("--local-tokens", "1000"), ("--local-tokens 1000", "64")),
    (("--ranges", "1000:1,:16"), ("--ranges", "1024")),
    (("--ranges", "x:1"), ("--ranges", "END_TOKENS:STRIDE")),
    (("--config", str(CONFIGS / "phi3_small.yaml"), "--layer", "1"), ("dense", "[0]")),
    (("--config", str(CONFIGS / "phi3_small.yaml"), "--layer", "2", "--num-layers", "2"), ("--layer 2", "0 to 1")),
], ids=lambda value: " ".join(value[:2]))  # fmt: skip
def test_wrong_flags_are_named(given, words):
    with pytest.raises(ValueError) as caught:
        pattern_from_flags(flags(*given), 8192)
    assert all(word in str(caught.value) for word in words)


def test_pattern_of_a_config_layer():
    args = flags("--config", str(CONFIGS / "phi3_small.yaml"), "--layer", "2", "--num-kv-heads", "8")
    expected = make_range_pattern(
        block_size=64,
        num_heads=32,
        num_kv_heads=8,
        ranges=((16, 1), (None, 8)),
        slide="query",
        head_step="paper",
        base_offset=1,
        layer_step=0,
    )
    assert pattern_from_flags(args, 8192) == expected
    groups = benchmark.chosen_groups(
        flags("--config", str(CONFIGS / "s2_7b_mixed.yaml"), "--layer", "1", "--seq-lengths", "1024,3000")
    )
    assert [case.name for group in groups for case, _ in group.cases] == ["1K 32/32 D128", "3000 32/32 D128"]


def dense_blocks(pattern, length):
    n_blocks = -(-length // pattern.block_size)
    return [
        {query: set(pattern.key_blocks(head, query).tolist()) for query in range(n_blocks)}
        for head in range(pattern.num_heads)
    ]


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_peers_pattern_has_the_same_window_and_stride_in_tokens(offset):
    fine = make_range_pattern(
        block_size=64, num_heads=4, num_kv_heads=4, ranges=((4, 1), (None, 8)), base_offset=offset
    )
    coarse = coarsen(fine, 128, 4096)
    assert isinstance(coarse, RangePattern) and coarse.block_size == 128
    assert {head.ranges for head in coarse.heads} == {((2, 1), (None, 4))}
    for small, large in zip(fine.heads, coarse.heads):
        # The large block that remains is the one that holds the small one that is attended.
        stripes = {key // 2 for key in range(64) if (key + small.offset) % 8 == 0}
        assert {key for key in range(32) if (key + large.offset) % 4 == 0} == stripes
    case = Case("x", fine, 1000, batch=2)
    assert case.pairs(coarse) == 2 * int(token_mask(coarse, 1000).sum())
    assert coarsen(coarse, 128, 4096) is coarse


@pytest.mark.parametrize("ranges", [((3, 1), (None, 8)), ((4, 1), (None, 7))], ids=["odd window", "odd stride"])
def test_what_large_blocks_cannot_express_becomes_their_union(ranges):
    fine = make_range_pattern(block_size=16, num_heads=4, num_kv_heads=2, ranges=ranges)
    coarse = coarsen(fine, 32, 500)
    expected = [{} for _ in range(4)]
    for head, rows in enumerate(dense_blocks(fine, 500)):
        for query, keys in rows.items():
            expected[head].setdefault(query // 2, set()).update(key // 2 for key in keys)
    assert dense_blocks(coarse, 500) == expected
    again = coarsen(as_table(fine, 500), 32, 500)
    assert dense_blocks(again, 500) == expected


def test_share_of_pairs_at_block_64_and_128():
    """A block of 128 for one of 64 is twice the pairs of a stripe; with the same stride in blocks they are about
    equal."""
    case = Case("x", s2_pattern(), 131072)
    same_tokens, same_pairs = coarsen(case.pattern, 128, 131072), equal_pairs(case.pattern, 128)
    shares = [case.pairs(pattern) / case.dense_pairs for pattern in (case.pattern, same_tokens, same_pairs)]
    assert shares == pytest.approx([0.0766, 0.1378, 0.0762], abs=2e-4)
    assert [head.ranges for head in (same_tokens.heads[0], same_pairs.heads[0])] == [
        ((8, 1), (None, 8)),
        ((8, 1), (None, 16)),
    ]
    assert len({head.offset % 16 for head in same_pairs.heads}) == 16
    with pytest.raises(ValueError, match="equal pairs"):
        equal_pairs(s2_pattern(ranges=((15, 1), (None, 16))), 128)


def test_index_tables_of_peers():
    pattern = make_range_pattern(block_size=16, num_heads=4, num_kv_heads=2, ranges=((2, 1), (None, 4)))
    case = Case("x", pattern, 330)
    n = 21
    below, above = peers._index_tensors(pattern, case, "cpu")
    blocks = token_mask(pattern, 336).unflatten(2, (n, 16)).unflatten(1, (n, 16)).any(4).any(2)

    def dense(counts, indices):
        found = torch.zeros(4, n, n, dtype=torch.bool)
        for head in range(4):
            for row in range(n):
                found[head, row, indices[0, head, row, : counts[0, head, row]].long()] = True
        return found

    own = torch.eye(n, dtype=torch.bool)
    assert torch.equal(dense(*below) | own, blocks) and not (dense(*below) & own).any()
    assert torch.equal(dense(*above).transpose(1, 2), dense(*below))
    assert below[0].dtype == above[1].dtype == torch.int32


def test_what_counts_as_a_sliding_window():
    assert peers.window_tokens(s2_pattern(ranges=((16, 1),))) == 1024
    assert peers.window_tokens(s2_pattern(ranges=(), window=1000)) == 1000
    assert peers.window_tokens(s2_pattern(ranges=(), window=1000, sink_tokens=4)) is None
    assert peers.window_tokens(s2_pattern(ranges=((None, 16),), window=1000)) is None
    assert peers.window_tokens(s2_pattern()) is None
    assert peers.window_tokens(RangePattern.dense(64, 4, 4)) is None
    assert peers.window_tokens(s2_pattern(ranges=((16, 1),), dense_heads={"spread": 1})) is None
    assert peers.window_tokens(as_table(s2_pattern(ranges=((16, 1),)), 2048)) is None


def test_block_lists_refuse_a_row_without_its_own_block():
    class Skewed:
        block_size, num_heads = 16, 1

        def table_of(self, head):
            return 0

        def key_blocks(self, head, query):
            return np.array([0])

    with pytest.raises(ValueError, match="own block"):
        block_lists(Skewed(), 64)


def test_lognormal_documents_are_fixed_and_sum_up():
    lengths = lognormal_documents(64, 2048)
    assert lengths == lognormal_documents(64, 2048)
    assert sum(lengths) == 64 * 2048 and min(lengths) >= 16 and max(lengths) > 3 * 2048
    packed = Case("x", s2_pattern(), 2048, tensor_format="thd", documents=lengths)
    assert packed.tokens == 64 * 2048 and sum(short_case(packed, 100).documents) <= 100
