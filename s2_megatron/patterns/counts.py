"""Attended blocks counted by formula, for any length: ranges of distance with strides repeat, so no block is visited.

A key block k is attended by the query blocks q = k + start .. k + end - 1 of a range, and the attended key blocks of a
range are residue classes: k = residue + j * period. Both sums are arithmetic series.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from s2_megatron.patterns.checks import Ranges

EXACT_IN_INT64 = 2**30  # blocks; the sums are below its square


def range_bounds(ranges: Ranges) -> list[tuple[int, int | None, int]]:
    """[(first distance, distance limit or None, stride)] of every range."""
    starts = [0, *(end for end, _ in ranges[:-1])]
    return [(start, end, stride) for start, (end, stride) in zip(starts, ranges)]


def attended_block_pairs(n_blocks: int, start: int, end: int | None, residues: Sequence[int], period: int) -> int:
    """(query block, key block) pairs of the first n_blocks blocks whose distance is start .. end - 1 (None: no limit)
    and whose key block is one of the residues, each in 0 .. period - 1, modulo the period."""
    end = n_blocks if end is None else min(end, n_blocks)
    if start >= end:
        return 0
    first = np.array(residues, dtype=np.int64 if n_blocks < EXACT_IN_INT64 else object)
    keys = np.maximum((n_blocks - 1 - start - first) // period + 1, 0)  # key blocks that some query block attends
    # The first ones are attended by end - start query blocks each, the later ones until the sequence ends.
    whole = np.maximum((n_blocks - end - first) // period + 1, 0)
    rest = (keys - whole) * (n_blocks - start - first) - period * ((keys - 1) * keys - (whole - 1) * whole) // 2
    return int((whole * (end - start) + rest).sum())


def head_block_pairs(ranges: Ranges, offset: int, n_blocks: int) -> int:
    """(query block, key block) pairs that one head attends in n_blocks blocks."""
    return sum(
        attended_block_pairs(n_blocks, start, end, [-offset % stride], stride)
        for start, end, stride in range_bounds(ranges)
    )


def covered_block_pairs(
    heads: Iterable[tuple[list[tuple[int, int | None, int]], int]],
    masks: Iterable[tuple[np.ndarray, np.ndarray]],
    n_blocks: int,
    sink_blocks: int = 0,
) -> int:
    """Causal (query block, key block) pairs of n_blocks blocks that at least one head or mask attends.

    heads: (bounds as HeadPattern.touched_bounds, offset). masks: (indptr, indices) as in BlockMaskPattern.tables.
    sink_blocks: the first so many key blocks are attended by every query block.
    """
    offsets: dict[tuple, set[int]] = {}
    for bounds, offset in heads:
        offsets.setdefault(tuple(bounds), set()).add(offset)
    ends = {edge for bounds in offsets for start, end, _ in bounds for edge in (start, end)}
    edges = [0, *sorted(end for end in ends if end is not None and 0 < end < n_blocks), n_blocks]
    tables = [(indptr[: n_blocks + 1], indices) for indptr, indices in masks]
    # Pairs of the masks as one number each, q * n_blocks + k, without repetition.
    pairs = np.unique(np.concatenate([_mask_pairs(*table, n_blocks) for table in tables] or [np.zeros(0, np.int64)]))
    query, key = np.divmod(pairs, n_blocks)
    sink = np.arange(min(sink_blocks, n_blocks))
    only_masks, total = np.ones(len(pairs), dtype=bool), 0
    for start, end in pairwise(edges):
        classes = set()  # (stride, residue) of the key blocks at these distances
        for bounds, shifts in offsets.items():
            for low, high, stride in bounds:
                if low <= start and (high is None or high >= end):
                    classes |= {(stride, -shift % stride) for shift in shifts}
        if not classes:
            continue
        period = math.lcm(*{stride for stride, _ in classes})
        if len(classes) == 1 or len({stride for stride, _ in classes}) == 1:
            residues = np.array(sorted(residue for _, residue in classes))
        else:
            period = min(period, n_blocks)
            seen = np.zeros(period, dtype=bool)
            for stride, residue in classes:
                seen[residue::stride] = True
            residues = np.flatnonzero(seen)
        total += attended_block_pairs(n_blocks, start, end, residues, period)
        total -= int(np.maximum(np.minimum(end, n_blocks - sink) - start, 0)[np.isin(sink % period, residues)].sum())
        here = (query - key >= start) & (query - key < end)
        only_masks &= ~(here & np.isin(key % period, residues))
    return total + int((only_masks & (key >= len(sink))).sum()) + int((n_blocks - sink).sum())


def _mask_pairs(indptr: np.ndarray, indices: np.ndarray, n_blocks: int) -> np.ndarray:
    rows = np.repeat(np.arange(len(indptr) - 1, dtype=np.int64), np.diff(indptr))
    return rows * n_blocks + indices[: indptr[-1]]
