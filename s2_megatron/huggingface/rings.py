"""Rings of slots: the newest blocks of each range of distance that a KV head attends. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from s2_megatron.patterns.head import HeadPattern


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
