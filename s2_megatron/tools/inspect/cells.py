"""A long context in few cells: how many of a cell's block pairs are attended, every one of them counted.

Where it can be, a cell is a whole number of strides wide and high, so that stripes blend into one shade and not into a
pattern of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from s2_megatron.patterns.ranges import Pattern, RangePattern

ROWS_AT_ONCE = 4096  # query blocks, for the memory
FEWEST = 16  # cells: a stride so long that there would be fewer is cut


def cell_edges(patterns: Sequence[Pattern], n_blocks: int, most: int, first: int = 0) -> np.ndarray:
    """int64[cells + 1]: where the cells begin and end, from block `first` to n_blocks. most: cells; a block each where
    there are no more blocks."""
    count = n_blocks - first
    if count <= most:
        return np.arange(first, n_blocks + 1)
    strides = {
        stride
        for pattern in patterns
        if isinstance(pattern, RangePattern)
        for head in set(pattern.heads)
        for _, _, stride in head.bounds()
    }
    period = math.lcm(*strides) if strides else 1
    if count // period < FEWEST:
        return np.linspace(first, n_blocks, most + 1).round().astype(np.int64)
    size = period * math.ceil(count / most / period)
    return np.append(np.arange(first, n_blocks, size), n_blocks)


def cell_counts(pattern: Pattern, heads: Sequence[int], n_blocks: int, edges: np.ndarray) -> np.ndarray:
    """float64[kinds, cells, cells]: the block pairs of each cell (query, key) that at least one of the query heads
    attends, by kind: the index of the nearest range in which one does (0 for block masks)."""
    parts = _range_rows(pattern, heads, n_blocks, edges) if isinstance(pattern, RangePattern) else None
    if parts is None:
        rows = np.zeros((n_blocks, len(edges) - 1))
        for query in range(n_blocks):
            keys = np.unique(np.concatenate([pattern.key_blocks(head, query) for head in heads]))
            rows[query] = np.histogram(keys, edges)[0]
        return np.add.reduceat(rows, edges[:-1], axis=0)[None]
    return parts


def _range_rows(pattern: RangePattern, heads: Sequence[int], n_blocks: int, edges: np.ndarray) -> np.ndarray | None:
    own = list({pattern.heads[head].canonical: pattern.heads[head] for head in heads}.values())
    kinds = max(len(head.touched_ranges) for head in own)
    ends = {end for head in own for _, end, _ in head.touched_bounds() if end is not None and end < n_blocks}
    starts = sorted({0, *ends})
    found = np.zeros((kinds, len(edges) - 1, len(edges) - 1))
    keys, low_edges, high_edges = np.arange(n_blocks), edges[:-1], edges[1:]
    for start, end in zip(starts, [*starts[1:], n_blocks]):
        # The kind of each key at these distances; `kinds` where no head attends it.
        nearest = np.full(n_blocks, kinds)
        for head in own:
            bounds = head.touched_bounds()
            within = [kind for kind, (first, limit, _) in enumerate(bounds) if limit is None or start < limit]
            shown = keys < head.sink_blocks  # at any distance; beyond the last range they are of its kind
            if within:
                shown = shown | ((keys + head.offset) % bounds[within[0]][2] == 0)
            nearest = np.where(shown, np.minimum(nearest, within[0] if within else len(bounds) - 1), nearest)
        for kind in range(kinds):
            before = np.concatenate([[0], np.cumsum(nearest == kind)])  # such keys in front of each block
            if not before[-1]:
                continue
            for at in range(0, n_blocks, ROWS_AT_ONCE):
                queries = np.arange(at, min(at + ROWS_AT_ONCE, n_blocks))[:, None]
                high = np.maximum(queries - start + 1, 0)
                low = np.minimum(np.maximum(queries - end + 1, 0), high)
                counts = before[np.clip(high, low_edges, high_edges)] - before[np.clip(low, low_edges, high_edges)]
                rows = np.searchsorted(high_edges, queries[:, 0], side="right")
                begins = np.flatnonzero(np.diff(rows, prepend=-1))  # the rows ascend
                found[kind][rows[begins]] += np.add.reduceat(counts, begins, axis=0)
    return found


def causal_counts(n_blocks: int, edges: np.ndarray) -> np.ndarray:
    """float64[cells, cells]: the block pairs of each cell that are not in the future."""
    sizes = np.diff(edges)
    rows = np.clip(np.arange(edges[0], n_blocks)[:, None] + 1 - edges[:-1], 0, sizes)
    return np.add.reduceat(rows, edges[:-1] - edges[0], axis=0).astype(np.float64)


def cell_shares(pattern: Pattern, head: int, n_blocks: int, edges: np.ndarray) -> np.ndarray:
    """float64[cells, cells]: the share of a cell's causal block pairs that a head attends, NaN in the future."""
    attended, causal = cell_counts(pattern, [head], n_blocks, edges).sum(0), causal_counts(n_blocks, edges)
    return np.divide(attended, causal, out=np.full(causal.shape, np.nan), where=causal > 0)
