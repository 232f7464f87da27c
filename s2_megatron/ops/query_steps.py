"""The steps of query tiles as explicit lists, which the Hopper kernels of the forward and of dQ walk. NumPy only.

For block masks, and for calls whose query and key blocks are placed (context parallelism): there the steps of a query
tile cannot be computed from a few ranges. Two key blocks make a step. Row blocks, key blocks and slots: see
ops/attended_blocks.py. Bits: kernels/step_descriptor.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from s2_megatron.kernels.step_descriptor import (
    ATTENDED,
    BOTH_HALVES,
    FLAG_MASK,
    MOST_SLOTS,
    OWN,
    SINK,
    SLOT_BITS,
    SLOT_MASK,
)
from s2_megatron.ops.attended_blocks import (
    MORE_RANKS,
    MOST_STEPS,
    Attended,
    chunks,
    heads_of,
    key_rows_of,
    nonzero,
    numbered,
    sequences,
    starts_of,
)
from s2_megatron.patterns.ranges import Pattern

# By flags: which halves attend; where masked entries stand in a tile, own blocks, those of both halves, half 0 alone,
# half 1 alone; which halves attend in part, by window or sink.
_FLAGS = np.arange(FLAG_MASK + 1)
_HALVES = (_FLAGS | _FLAGS >> 2 | _FLAGS >> 4) & BOTH_HALVES
_OWN = _FLAGS & _FLAGS >> 2 & BOTH_HALVES
_ENTRY_KIND = np.where(_OWN > 0, 0, np.array([0, 2, 3, 1])[_HALVES])
_BY_TOKEN = (_FLAGS >> 4 | _FLAGS >> 2 & ~_FLAGS) & BOTH_HALVES


class QueryLists(NamedTuple):
    """The steps of every query tile.

    A unit is a query head; with pack two neighbouring ones, 2u and 2u + 1. A tile has two halves: the row blocks 2t and
    2t + 1 of a head (of an odd number the last one is missing), with pack the row block t of both heads. Masked steps
    come first, then free ones: both halves attend both key blocks and see all of their tokens. A tile with entries has
    a masked step, if need be of two free entries: ptxas 12.8 computes the address of the queries for the loop over
    masked steps and takes it for known behind the loop, also when the loop was passed by.

    A step is two key blocks, each slot | flags << SLOT_BITS.
    """

    rows: np.ndarray  # int32 [units]: which list a unit has
    tiles: np.ndarray  # int32 [lists, tiles, 3]: first step, masked steps, free steps
    steps: np.ndarray  # int32 [steps, 2]; one of zeros when there are none, so that the array has an address


def _ranks(group: np.ndarray) -> np.ndarray:
    """The place of every element in its run of equal values. group: ints, 0 or more."""
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return np.arange(len(group)) - np.repeat(starts, np.diff(starts, append=len(group)))


def _masked_steps(tile, entry, flags) -> tuple[np.ndarray, np.ndarray]:
    """(tile [steps], steps [steps, 2]) of the masked entries, in the order of the list."""
    order = np.lexsort((entry & SLOT_MASK, _ENTRY_KIND[flags], tile))
    tile, entry = tile[order], entry[order]
    rank = _ranks(tile)
    even = rank % 2 == 0
    step = np.cumsum(even) - 1
    steps = np.repeat(entry[even][:, None], 2, axis=1)
    steps[:, 1] &= SLOT_MASK  # the step's own first slot without flags, unless there is a second entry
    steps[step[~even], 1] = entry[~even]
    tile = tile[even]
    # Work that only concerns one half is done by one of two warpgroups: the steps of one and of the other alternate, so
    # that neither waits long.
    halves = _HALVES[steps[:, 0] >> SLOT_BITS] | _HALVES[steps[:, 1] >> SLOT_BITS]
    by_halves = np.argsort(tile * 4 + halves, kind="stable")
    nth = np.empty_like(by_halves)
    nth[by_halves] = _ranks((tile * 4 + halves)[by_halves])
    order = np.lexsort((halves, nth, halves != BOTH_HALVES, tile))
    return tile[order], steps[order]


def _tile_flags(attended: Attended, rows: slice, columns: slice, pack: bool) -> np.ndarray:
    """uint8 [tiles, columns]: the flags of a step for the tiles of some row blocks."""
    if pack:
        flags = BOTH_HALVES * attended.by_row(rows, columns)
    else:
        flags, second = (attended.by_row(slice(rows.start + half, rows.stop, 2), columns) for half in range(2))
        flags = flags.copy()  # a view of the mask, or of its like
        flags[: len(second)] |= second << 1
    own = attended.own[rows] - columns.start
    row = np.flatnonzero((own >= 0) & (own < flags.shape[1]))
    for half in range(2):
        chosen = row if pack else row[row % 2 == half]
        cell = (chosen if pack else chosen // 2), own[chosen]
        seen = flags[cell] & (ATTENDED << half) != 0
        flags[cell] |= seen * np.uint8(OWN << half)
    if columns.start <= attended.sink_place < columns.stop:
        at_sink = flags[:, attended.sink_place - columns.start]
        at_sink[_BY_TOKEN[at_sink] > 0] |= SINK
    return flags


def _tile_steps(attended: Attended, n_rows: int, pack: bool) -> tuple[np.ndarray, np.ndarray]:
    """(tiles [n_tiles, 3], steps [N, 2]) of one list, with the places of key blocks among the present ones instead of
    slots."""
    free, n_free, masked, n_masked = [], [], [], []
    for rows in chunks(n_rows, len(attended.first)):
        columns = attended.columns(rows)
        flags = _tile_flags(attended, rows, columns, pack)
        column, _, count = nonzero(flags == BOTH_HALVES)
        free.append((column + (columns.start | BOTH_HALVES << SLOT_BITS)).astype(np.int32))
        n_free.append(count)
        column, flag, count = nonzero(np.where(flags == BOTH_HALVES, 0, flags))
        masked.append(column + columns.start | flag.astype(np.int64) << SLOT_BITS)
        n_masked.append(count)
    free, n_free, masked, n_masked = (np.concatenate(parts) for parts in (free, n_free, masked, n_masked))

    odd = n_free % 2  # the free entry left over
    pair = (n_masked + odd == 0) & (n_free > 0)  # a tile begins with a masked step: see QueryLists
    last = np.cumsum(n_free) - 1
    every = np.arange(len(n_free))
    moved = np.concatenate([last[(odd > 0) | pair], last[pair] - 1])
    entry = np.concatenate([masked, free[moved]])
    tile = np.concatenate([np.repeat(every, n_masked), every[(odd > 0) | pair], every[pair]])
    free = np.delete(free, moved).reshape(-1, 2)
    tile, masked = _masked_steps(tile, entry, entry >> SLOT_BITS)

    n_masked, n_free = np.bincount(tile, minlength=len(every)), (n_free - odd) // 2 - pair
    first = starts_of(n_masked + n_free)
    steps = np.empty((len(masked) + len(free), 2), dtype=np.int32)
    steps[sequences(first, n_masked)] = masked
    steps[sequences(first + n_masked, n_free)] = free
    return np.stack([first, n_masked, n_free], axis=1).astype(np.int32), steps


def query_lists(pattern: Pattern, query_blocks, key_slot, n_blocks: int, pack: bool, split: int = 1) -> QueryLists:
    """The lists of the query heads of a RangePattern or BlockMaskPattern.

    query_blocks: int [row blocks], ascending. key_slot: int [G, n_blocks] or None. n_blocks: of the whole sequence.
    pack: only where the heads 2u and 2u + 1 share their KV head and their pattern. split: all these blocks are parts of
    the pattern's, so many of each (ops/attended_blocks.py). Memory beyond the result is
    O(nonzeros of one head), for masks and a byte for every pair of a row block and a present key block.
    Raises ValueError when the slots do not fit into a step, or for too many steps.
    """
    query_blocks = np.asarray(query_blocks, dtype=np.int64)
    heads, key_rows = heads_of(pattern, n_blocks, split), key_rows_of(pattern, key_slot, n_blocks)
    n_slots = max(int(row.slots.max(initial=-1)) for row in key_rows) + 1
    if n_slots > MOST_SLOTS:
        raise ValueError(f"{n_slots} key slots; expected {MOST_SLOTS} at most, a step holds no more")
    ratio = pattern.num_heads // pattern.num_kv_heads
    sources = [(head, key_rows[index // ratio].number) for index, head in enumerate(heads)]
    if pack:
        assert ratio % 2 == 0 and sources[::2] == sources[1::2], "packed heads share the KV head and the pattern"
        sources = sources[::2]
    lists, rows = numbered(sources)
    row_of = {row.number: row for row in key_rows}
    known, tiles, steps, base = {}, [], [], 0
    for head, number in lists:
        key_row = row_of[number]
        if (head, key_row.order) not in known:
            attended = Attended(pattern, head, query_blocks, key_row.blocks, n_blocks, split)
            known[head, key_row.order] = _tile_steps(attended, len(query_blocks), pack)
        tile_rows, places = known[head, key_row.order]
        tiles.append(tile_rows + np.array([base, 0, 0], dtype=np.int32))
        steps.append(key_row.slots[places & SLOT_MASK] | places & ~np.int32(SLOT_MASK))
        base += len(places)
        if base >= MOST_STEPS:
            raise ValueError(f"lists of {base} steps; expected fewer than {MOST_STEPS}; {MORE_RANKS}")
    return QueryLists(rows, np.stack(tiles), np.concatenate(steps) if base else np.zeros((1, 2), dtype=np.int32))
