"""The steps of key tiles as explicit lists, which the Hopper kernels of dK and dV walk. NumPy only.

For block masks, and for calls whose query and key blocks are placed (context parallelism): there the steps of a column
cannot be computed from a few ranges. Two key blocks make a column. Row blocks, key blocks and slots: see
ops/attended_blocks.py. Bits: kernels/step_descriptor.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from s2_megatron.kernels.step_descriptor import (
    ATTENDED,
    LAST_STEP,
    MEMBER_SHIFT,
    MOST_MEMBERS,
    MOST_ROW_BLOCKS,
    OWN,
    ROW_SHIFT,
    SINK_SLOT,
)
from s2_megatron.ops.attended_blocks import (
    MORE_RANKS,
    MOST_STEPS,
    Attended,
    KeyRow,
    chunks,
    heads_of,
    key_rows_of,
    nonzero,
    numbered,
    sequences,
    starts_of,
)
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import Pattern

LONG = 1.5  # times the mean number of steps, from where on a column is a long one


class KeyLists(NamedTuple):
    """The query row blocks of every column, which is two slots of a KV head. Lists of equal steps share them.

    Every present slot is in one column, attended or not. A step is one query row block of one member (query head of the
    KV head's group). Steps of a column: member ascending, then row block descending. A column without queries has one
    step, which attends nothing.
    """

    rows: np.ndarray  # int32 [G]: which list a KV head has
    # int32 [lists, columns, 3]: first slot, second slot (n_slots when missing; with SINK_SLOT that which holds the last
    # tokens of the sink), first step. Longest first. Columns that only pad a list to the length of the others:
    # (n_slots, n_slots, 0)
    columns: np.ndarray
    steps: np.ndarray  # int32 [steps], descriptors; one of LAST_STEP when there are none
    # Columns of a list with more steps than LONG times the mean (of all lists; where no column has so many: with half
    # as many as the longest, or more); the most of any list, 1 at least. They are computed first: equally long ones
    # pass by the same queries together.
    n_long: int


def _column_steps(attended: Attended, halves: np.ndarray, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(steps without a member, steps per column) of a head. halves: int64 [columns, 2], places of key blocks among the
    present ones."""
    steps, counts = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
    row_of = np.full(len(attended.first), -1)
    row_of[attended.own] = np.arange(n_rows)
    row_of[-1] = -1
    for chunk in chunks(len(halves), n_rows):
        pair = halves[chunk]
        rows = slice(int(attended.first[pair].min()), int(attended.last[pair].max()) + 1)
        rows = slice(min(rows.start, rows.stop), rows.stop)
        cells = attended.by_column(pair[:, 0], rows)
        cells |= attended.by_column(pair[:, 1], rows) << 1
        for half in range(2):
            own = row_of[pair[:, half]] - rows.start
            column = np.flatnonzero((own >= 0) & (own < cells.shape[1]))
            seen = cells[column, own[column]] & (ATTENDED << half) != 0
            cells[column, own[column]] |= seen * np.uint8(OWN << half)
        place, flags, count = nonzero(np.ascontiguousarray(cells[:, ::-1]))  # row blocks descend
        steps.append((rows.stop - 1 - place << ROW_SHIFT).astype(np.int32) | flags)
        counts.append(count)
    return np.concatenate(steps), np.concatenate(counts)


def _group_columns(members: tuple, heads: dict, key_row: KeyRow, n_rows: int):
    """(columns [C, 3] with places among the slots in use instead of slots, steps, steps per column [C]) of one list.
    members: what each query head of the group attends. heads: of the distinct ones."""
    # Two neighbours make a column: they are attended by about the same row blocks, by last, then first attending row
    # block.
    first = np.min([head.first for head in heads.values()], axis=0)[:-1]
    last = np.max([head.last for head in heads.values()], axis=0)[:-1]
    place = np.empty_like(key_row.by_slot)
    place[key_row.by_slot] = np.arange(len(place))
    halves = np.lexsort((place, first, -last))
    halves = np.pad(halves, (0, len(halves) % 2), constant_values=-1).reshape(-1, 2)  # -1: the missing second one

    parts = {member: _column_steps(attended, halves, n_rows) for member, attended in heads.items()}
    counts = np.maximum(sum(parts[member][1] for member in members), 1)
    order = np.argsort(-counts, kind="stable")
    starts = np.empty_like(counts)
    starts[order] = starts_of(counts[order])
    steps = np.zeros(counts.sum(), dtype=np.int32)
    next_step = starts.copy()
    for number, member in enumerate(members):
        own_steps, per_column = parts[member]
        steps[sequences(next_step, per_column)] = own_steps | np.int32(number << MEMBER_SHIFT)
        next_step += per_column
    steps[starts + counts - 1] |= LAST_STEP
    columns = np.concatenate([np.append(place, len(place))[halves], starts[:, None]], axis=1)
    return columns[order], steps, counts[order]


def key_lists(pattern: Pattern, query_blocks, key_slot, n_blocks: int, n_slots: int, split: int = 1) -> KeyLists:
    """The lists of the KV heads of a RangePattern or BlockMaskPattern; arguments as in query_lists, n_slots: more than
    every slot.

    Memory beyond the result is O(nonzeros of the distinct heads of one group), for masks and a byte for every pair of a
    row block and a present key block in each of them. Lists that differ only in the names of slots share their steps.
    Raises ValueError when members or row blocks do not fit into a step descriptor, when there are fewer slots than
    key_slot names, or for too many steps.
    """
    query_blocks = np.asarray(query_blocks, dtype=np.int64)
    heads, key_rows = heads_of(pattern, n_blocks, split), key_rows_of(pattern, key_slot, n_blocks)
    ratio = pattern.num_heads // pattern.num_kv_heads
    if ratio > MOST_MEMBERS:
        raise ValueError(
            f"{ratio} query heads per KV head; expected {MOST_MEMBERS} at most, a step descriptor holds no more"
        )
    if len(query_blocks) > MOST_ROW_BLOCKS:
        raise ValueError(
            f"{len(query_blocks)} query row blocks; expected {MOST_ROW_BLOCKS} at most, a step descriptor holds no more"
        )
    named = max(int(row.slots.max(initial=-1)) for row in key_rows) + 1
    if named > n_slots:
        raise ValueError(f"n_slots={n_slots}; key_slot names {named} slots, expected as many at least")
    lists, rows = numbered(
        (tuple(heads[group * ratio : (group + 1) * ratio]), row.number) for group, row in enumerate(key_rows)
    )
    row_of = {row.number: row for row in key_rows}
    known, steps, parts = {}, [], []
    for members, number in lists:
        key_row = row_of[number]
        if (members, key_row.order) not in known:
            attended = {
                head: Attended(pattern, head, query_blocks, key_row.blocks, n_blocks, split)
                for head in dict.fromkeys(members)
            }
            columns, new_steps, counts = _group_columns(members, attended, key_row, len(query_blocks))
            columns[:, 2] += sum(map(len, steps))
            steps.append(new_steps)
            total = sum(map(len, steps))
            if total >= MOST_STEPS:
                raise ValueError(f"lists of {total} steps; expected fewer than {MOST_STEPS}; {MORE_RANKS}")
            known[members, key_row.order] = columns, counts
        columns, counts = known[members, key_row.order]
        slots = key_row.slots[key_row.by_slot].copy()
        # One sink for all members, but for those that are dense whatever it says.
        sink = max(head.sink_tokens if isinstance(head, HeadPattern) else 0 for head in members)
        if sink:
            last, rest = divmod(sink, pattern.block_size // split)
            slots[(key_row.blocks[key_row.by_slot] == last) & (rest > 0)] |= SINK_SLOT
        slots = np.append(slots, n_slots)  # of places; the last one stands for no slot
        parts.append((np.concatenate([slots[columns[:, :2]], columns[:, 2:]], axis=1), counts))
    most = max(1, *(len(columns) for columns, _ in parts))
    columns = np.full((len(parts), most, 3), (n_slots, n_slots, 0), dtype=np.int32)
    for index, (part, _) in enumerate(parts):
        columns[index, : len(part)] = part
    every = np.concatenate([counts for _, counts in parts])
    long = every > LONG * every.mean() if len(every) else every
    limit = every[long].min() if long.any() else every.max(initial=0) / 2
    n_long = max(1, *(int((counts >= limit).sum()) for _, counts in parts))
    steps = np.concatenate(steps) if any(map(len, steps)) else np.array([LAST_STEP], dtype=np.int32)
    return KeyLists(rows, columns, steps, n_long)


def column_steps(lists: KeyLists) -> np.ndarray:
    """int [G, columns]: how many steps every column of a KV head has, none where it only pads."""
    ends, starts = np.flatnonzero(lists.steps & LAST_STEP), lists.columns[:, :, 2]
    counts = ends[np.searchsorted(ends, starts)] + 1 - starts
    return np.where(lists.columns[:, :, 0] == lists.columns[:, :, 1], 0, counts)[lists.rows]
