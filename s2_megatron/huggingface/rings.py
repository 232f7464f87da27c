"""Rings of slots: the newest blocks of each range of distance that a KV head attends; and the slots of a block mask.
NumPy only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from s2_megatron.patterns.head import HeadPattern

_NO_END = 2**40


@dataclass(frozen=True)
class Ring:
    """The newest blocks that are `residue` modulo `stride`; attended at distances from `first` to `limit` (not
    included)."""

    first: int
    limit: int | None
    stride: int
    residue: int

    @property
    def form(self) -> tuple:
        return self.first, self.limit, self.stride

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """first, limit (where there is none, more than any distance), stride, residue."""
        return self.first, _NO_END if self.limit is None else self.limit, self.stride, self.residue

    def size(self, n_blocks: int) -> int:
        span = n_blocks if self.limit is None else min(self.limit, n_blocks)
        return -(-span // self.stride)


def distinct(by_query_head: Sequence[Sequence[Ring]]) -> list[Ring]:
    return list(dict.fromkeys(ring for of_head in by_query_head for ring in of_head))


def keep_everything(rings: Sequence[Ring]) -> bool:
    """Whether the rings together have as many slots as there are blocks, or more."""
    return sum(1 / ring.stride for ring in rings if ring.limit is None) >= 1


def token_rings(heads: Sequence[HeadPattern]) -> tuple[list[Ring], np.ndarray, int]:
    """(rings, bool [R or 1, rings]: by which a query head attends, blocks of the sink beside them) of a KV head with a
    window or a sink in tokens; one ring of all blocks where the rings would keep as many."""
    by_query_head = [rings_of_bounds(head.touched_bounds(), head) for head in heads]
    rings = distinct(by_query_head)
    if keep_everything(rings):
        return [Ring(0, None, 1, 0)], np.ones((1, 1), dtype=bool), 0
    applies = np.array([[ring in of_head for ring in rings] for of_head in by_query_head])
    return rings, applies, heads[0].sink_blocks


def rings_of(head: HeadPattern) -> list[Ring]:
    head = HeadPattern(*head.canonical)
    return rings_of_bounds(head.bounds(), head)


def rings_of_bounds(bounds, head: HeadPattern) -> list[Ring]:
    return [Ring(start, end, stride, -head.offset % stride) for start, end, stride in bounds]


def last_use(blocks: int, tables) -> np.ndarray:
    """The last query block that attends each key block in any of the tables, at least the block itself (it is there
    while it is written)."""
    last = np.arange(blocks)
    for indptr, indices in tables:
        indptr = indptr[: blocks + 1]
        np.maximum.at(last, indices[: indptr[-1]], np.repeat(np.arange(blocks), np.diff(indptr)))
    return last


def assigned_slots(until: np.ndarray) -> tuple[np.ndarray, int]:
    """A slot for each block, free again after `until`; and how many there are."""
    slots, count = np.empty(len(until), np.int64), 0
    busy: list[tuple[int, int]] = []
    for block, end in enumerate(until.tolist()):
        if busy and busy[0][0] < block:
            slots[block] = heapq.heappop(busy)[1]
        else:
            slots[block], count = count, count + 1
        heapq.heappush(busy, (end, int(slots[block])))
    return slots, count
