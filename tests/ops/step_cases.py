"""Patterns and placements for the tests of the step lists, and what a brute-force reading of them says."""

import numpy as np

from s2_megatron.context_parallel.plan import make_plan
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import DENSE, HeadPattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern

PAPER, SEVERAL, UNEVEN, WINDOW = (
    ((4, 1), (None, 8)),
    ((2, 1), (5, 2), (None, 4)),
    ((2, 1), (5, 3), (None, 4)),
    ((3, 1),),
)
N = 32  # blocks of a sequence; a multiple of 2 * CP


def ranges_of(ranges, heads, groups, slide="kv", **options):
    return make_range_pattern(
        block_size=64, num_heads=heads, num_kv_heads=groups, ranges=ranges, slide=slide, **options
    )


def mask_of(heads, groups, tables, n_blocks=N, seed=0, density=0.4, diagonal=True):
    random = np.random.default_rng(seed)
    rows = [[np.flatnonzero(random.random(query + 1) < density) for query in range(n_blocks)] for _ in range(tables)]
    always = [query if diagonal else query // 2 for query in range(n_blocks)]
    rows = [[np.union1d(row, [block]) for row, block in zip(table, always)] for table in rows]
    indptr = [np.concatenate([[0], np.cumsum([len(row) for row in table])]) for table in rows]
    return BlockMaskPattern.from_csr(64, heads, groups, indptr, [np.concatenate(table).astype(int) for table in rows])


PATTERNS = {
    "paper": ranges_of(PAPER, 4, 2),
    "query-slide": ranges_of(PAPER, 4, 2, "query"),
    "several": ranges_of(SEVERAL, 4, 4),
    "not-efficient": ranges_of(UNEVEN, 4, 2),
    "window": ranges_of(WINDOW, 4, 1),
    "dense": RangePattern.dense(64, 2, 1),
    "dense-kv-head": ranges_of(PAPER, 8, 4, dense_heads=[1]),
    "uneven-heads": RangePattern(
        64, 2, (HeadPattern(WINDOW), HeadPattern(DENSE), *[HeadPattern(((2, 1), (6, 2)), 1)] * 2)
    ),
    "mask-shared": mask_of(4, 2, 1),
    "mask-kv-heads": mask_of(4, 2, 2),
    "mask-heads": mask_of(4, 2, 4),
    "mask-no-diagonal": mask_of(4, 2, 2, diagonal=False),
    "mask-thin": mask_of(2, 2, 2, density=0.05),
}


def placements(pattern, n_blocks=N):
    """{name: (query_blocks, key_slot, n_blocks, n_slots)}"""
    every = np.arange(n_blocks)
    chosen = {
        "whole": (every, None, n_blocks, n_blocks),
        "odd": (every[: n_blocks - 1], None, n_blocks, n_blocks),
        "gaps": (every[[0, 1, 2, 5, 8, 9, n_blocks - 1]], None, n_blocks, n_blocks),
        "one": (every[-1:], None, n_blocks, n_blocks + 3),
    }
    for size in (2, 4):
        for rank in range(size):
            plan = make_plan(pattern, rank, size, n_blocks)
            chosen[f"local-{rank}of{size}"] = (
                plan.query_blocks,
                plan.local_slot,
                n_blocks,
                int(plan.local_slot.max()) + 1,
            )
            chosen[f"remote-{rank}of{size}"] = (
                plan.query_blocks,
                plan.remote_slot,
                n_blocks,
                int(plan.remote_slot.max()) + 1,
            )
    odd = make_plan(pattern, 1, 2, 20)  # five row blocks in a chunk: the third tile has a half in each
    chosen["odd-chunks"] = (odd.query_blocks, odd.local_slot, 20, 10)
    return chosen


def slot_of(key_slot, group, block):
    return block if key_slot is None else int(key_slot[group, block])


def attended(pattern, head, query_block, key_slot):
    """{(key block, slot): is it the own block} of the key blocks that are present."""
    group = head * pattern.num_kv_heads // pattern.num_heads
    pairs = [(block, slot_of(key_slot, group, block)) for block in pattern.key_blocks(head, query_block).tolist()]
    return {(block, slot): bool(block == query_block) for block, slot in pairs if slot >= 0}
