"""A block-sparse pattern as explicit lists of steps, which the Hopper kernels walk. NumPy only.

For block masks, and for calls whose query and key blocks are placed (context parallelism): there the steps of a query tile or of a key column
are no arithmetic on a few ranges. Two key blocks make a step of the forward and of dq, two key blocks make a column of dk and dv.

H query heads, G KV heads. Row block r is the rows r * block_size ... of the query, and is the block query_blocks[r] of the whole sequence.
A slot is where a key block lies in the key and value: key_slot[g, k], -1 when absent; without key_slot block k lies in slot k.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from s2_megatron.block_mask import BlockMaskPattern
from s2_megatron.patterns import HeadPattern, Pattern

MOST_SLOTS, MOST_ROW_BLOCKS, MOST_MEMBERS = 2**24, 2**19, 127  # what the bits of a step and of a word can hold
LAST = 1 << 4  # the bit of a word that ends a column
# Where masked entries stand in a tile, by flags: own blocks, the free entry left over, half 0 alone, half 1 alone.
_ENTRY_KIND = np.array([0, 2, 3, 1] + [0] * 12)


class QueryLists(NamedTuple):
    """The steps of every query tile.

    A unit is a query head; with pack two neighbouring ones, 2u and 2u + 1. A tile has two halves: the row blocks 2t and 2t + 1 of a head (of an
    odd number the last one is missing), with pack the row block t of both heads. Masked steps come first, then free ones: both halves attend
    both key blocks and see all of their tokens. A tile with entries has a masked step, if need be of two free entries: ptxas 12.8 computes the
    address of the queries for the loop over masked steps and takes it for known behind the loop, also when the loop was passed by.

    A step is two key blocks, each slot | flags << 24. Bits 0, 1 of the flags: half 0, 1 attends it; bits 2, 3: half 0, 1 attends it and it is
    that half's own block, masked by token.
    """

    rows: np.ndarray  # int32 [units]: which list a unit has
    tiles: np.ndarray  # int32 [lists, tiles, 3]: first step, masked steps, free steps
    steps: np.ndarray  # int32 [steps, 2]; one of zeros when there are none, so that the array has an address


class KeyLists(NamedTuple):
    """The query row blocks of every column, which is two slots of a KV head.

    Every present slot is in one column, attended or not. A word is one row block of one member (query head of the KV head's group), with the
    bits that hopper_columns.step_word gives it. Bits 0, 1: it attends the first, second slot; bits 2, 3: it attends it and it is its own block,
    masked by token; bit 4: last of the column; bits 5..23: row block; bits 24..30: member. Words of a column: member ascending, then row block
    descending. A column without queries has one word, with bit 4 alone.
    """

    rows: np.ndarray  # int32 [G]: which list a KV head has
    columns: np.ndarray  # int32 [lists, columns, 3]: first slot, second slot (n_slots when missing), first word. Longest first. Columns
    # that only pad a list to the length of the others: (n_slots, n_slots, 0)
    words: np.ndarray  # int32 [words]; one of LAST when there are none
    n_long: int  # columns of a list with at least half of the words of the longest column of all lists; the most of any list, 1 at least


def _heads(pattern: Pattern, n_blocks: int) -> list[HeadPattern | int]:
    """What a query head attends: a range pattern, or the index of a table; equal iff two heads attend the same."""
    if isinstance(pattern, BlockMaskPattern):
        pattern.check_length(n_blocks * pattern.block_size)
        return [pattern.table_of(head) for head in range(pattern.num_heads)]
    return [HeadPattern(*head.canonical) for head in pattern.heads]


def _slot_rows(pattern: Pattern, key_slot, n_blocks: int) -> list[tuple[int, np.ndarray]]:
    """(number, slot of every block int64[n_blocks]) of each KV head; equal rows have equal numbers. Raises ValueError on another shape."""
    if key_slot is None:
        return [(0, np.arange(n_blocks))] * pattern.num_kv_heads
    key_slot = np.asarray(key_slot, dtype=np.int64)
    if key_slot.shape != (pattern.num_kv_heads, n_blocks):
        raise ValueError(f"key_slot has shape {list(key_slot.shape)}; expected [KV heads, n_blocks] = [{pattern.num_kv_heads}, {n_blocks}]")
    known: dict[bytes, tuple[int, np.ndarray]] = {}
    return [known.setdefault(row.tobytes(), (len(known), row)) for row in key_slot]


def _number(items) -> tuple[list, np.ndarray]:
    """(the distinct items in order of appearance, which of them each item is, int32)."""
    known: dict = {}
    index = [known.setdefault(item, len(known)) for item in items]
    return list(known), np.array(index, dtype=np.int32)


def _ranks(group: np.ndarray) -> np.ndarray:
    """The place of every element in its run of equal values. group: ints, 0 or more."""
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    return np.arange(len(group)) - np.repeat(starts, np.diff(starts, append=len(group)))


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _pairs(pattern: Pattern, head: HeadPattern | int, query_blocks: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row block, key block) of everything that a head attends and that is present; int64, by row, then key block, ascending."""
    if isinstance(pattern, BlockMaskPattern):
        indptr, indices = pattern.tables[head]
        first, stride = indptr[query_blocks][:, None], 1
        counts = np.diff(indptr)[query_blocks][:, None]
    else:
        bounds = head.bounds()[::-1]  # far ranges first: key blocks ascending
        stride = np.array([stride for _, _, stride in bounds])
        low = np.stack([np.zeros_like(query_blocks) if end is None else np.maximum(query_blocks - end + 1, 0) for _, end, _ in bounds], axis=1)
        first = low + (-(low + head.offset)) % stride
        high = query_blocks[:, None] - np.array([start for start, _, _ in bounds])
        counts = np.maximum((high - first) // stride + 1, 0)
    row = np.broadcast_to(np.arange(len(query_blocks))[:, None], counts.shape)
    stride = np.broadcast_to(stride, counts.shape)
    first, counts, row, stride = (array.ravel() for array in (first, counts, row, stride))
    # Sequences first, first + stride, ... one after another: a step within a sequence is its stride.
    place = np.arange(counts.sum()) - np.repeat(_starts(counts), counts)
    block = np.repeat(first, counts) + place * np.repeat(stride, counts)
    if isinstance(pattern, BlockMaskPattern):
        block = indices[block].astype(np.int64)
    row = np.repeat(row, counts)
    present = slots[block] >= 0
    return (row, block) if present.all() else (row[present], block[present])


def _merge(code: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct codes ascending, 1 when it occurs with second = 0, plus 2 when with second = 1). No (code, second) may occur twice."""
    code = np.sort(code << 1 | second)
    bits = 1 << (code & 1)
    code >>= 1
    again = np.diff(code, prepend=-1) == 0
    bits[:-1][again[1:]] = 3
    return code[~again], bits[~again]


def _tile_entries(row, block, query_blocks, n_blocks: int, pack: bool):
    """(tile, key block, flags) of the key blocks that a half of a tile attends, by tile, then block, ascending."""
    if pack:
        return row, block, np.where(query_blocks[row] == block, 15, 3)
    code, flags = _merge((row >> 1) * n_blocks + block, row & 1)
    tile, block = np.divmod(code, n_blocks)
    half_block = np.append(query_blocks, -1)  # -1: the half that is missing when the number of rows is odd
    own = (half_block[2 * tile] == block) | (half_block[2 * tile + 1] == block) << 1
    return tile, block, flags | (own & flags) << 2


def _masked_steps(tile, entry, flags) -> tuple[np.ndarray, np.ndarray]:
    """(tile [steps], steps [steps, 2]) of the masked entries, in the order of the list."""
    order = np.argsort(tile * 4 + _ENTRY_KIND[flags], kind="stable")
    tile, entry = tile[order], entry[order]
    rank = _ranks(tile)
    even = rank % 2 == 0
    step = np.cumsum(even) - 1
    steps = np.repeat(entry[even][:, None], 2, axis=1)
    steps[:, 1] &= MOST_SLOTS - 1  # the step's own first slot without flags, unless there is a second entry
    steps[step[~even], 1] = entry[~even]
    tile = tile[even]
    # Work that only concerns one half is done by one of two warpgroups: they take turns, so that neither waits long.
    halves = (steps[:, 0] | steps[:, 1]) >> 24 & 3
    by_halves = np.argsort(tile * 4 + halves, kind="stable")
    turn = np.empty_like(by_halves)
    turn[by_halves] = _ranks((tile * 4 + halves)[by_halves])
    order = np.lexsort((halves, turn, halves != 3, tile))
    return tile[order], steps[order]


def _tile_steps(tile, slot, flags, n_tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """(tiles [n_tiles, 3], steps [N, 2]) of one list. tile, slot, flags: its entries, by tile and then block."""
    entry = slot | flags << 24
    free = flags == 3
    free_at = np.flatnonzero(free)
    free_tile = tile[free_at]
    ends = np.diff(free_tile, append=n_tiles) != 0
    free[free_at[ends & (_ranks(free_tile) % 2 == 0)]] = False  # the one left over of an odd number
    entries, masked = (np.bincount(of, minlength=n_tiles) for of in (tile, tile[~free]))
    free &= (masked[tile] > 0) | (_ranks(tile) < entries[tile] - 2)  # a tile begins with a masked step: see QueryLists
    free_tile, free_steps = tile[free][::2], entry[free].reshape(-1, 2)
    masked_tile, masked_steps = _masked_steps(tile[~free], entry[~free], flags[~free])

    n_masked, n_free = (np.bincount(of, minlength=n_tiles) for of in (masked_tile, free_tile))
    first = _starts(n_masked + n_free)
    steps = np.empty((len(masked_steps) + len(free_steps), 2), dtype=np.int32)
    steps[first[masked_tile] + _ranks(masked_tile)] = masked_steps
    steps[(first + n_masked)[free_tile] + _ranks(free_tile)] = free_steps
    return np.stack([first, n_masked, n_free], axis=1).astype(np.int32), steps


def query_lists(pattern: Pattern, query_blocks, key_slot, n_blocks: int, pack: bool) -> QueryLists:
    """The lists of the query heads of a RangePattern or BlockMaskPattern.

    query_blocks: int [row blocks], ascending. key_slot: int [G, n_blocks] or None. n_blocks: of the whole sequence. pack: only where the heads
    2u and 2u + 1 share their KV head and their pattern. Memory beyond the result is O(nonzeros of one head).
    Raises ValueError when the slots do not fit into a step.
    """
    query_blocks = np.asarray(query_blocks, dtype=np.int64)
    heads, slot_rows = _heads(pattern, n_blocks), _slot_rows(pattern, key_slot, n_blocks)
    n_slots = max(int(row.max(initial=-1)) for _, row in slot_rows) + 1
    if n_slots > MOST_SLOTS:
        raise ValueError(f"{n_slots} key slots; expected {MOST_SLOTS} at most, a step holds no more")
    ratio = pattern.num_heads // pattern.num_kv_heads
    sources = [(head, slot_rows[index // ratio][0]) for index, head in enumerate(heads)]
    if pack:
        assert ratio % 2 == 0 and sources[::2] == sources[1::2], "packed heads share the KV head and the pattern"
        sources = sources[::2]
    lists, rows = _number(sources)
    slots_of = dict(slot_rows)
    n_tiles = len(query_blocks) if pack else -(-len(query_blocks) // 2)
    tiles, steps, base = [], [], 0
    for head, number in lists:
        row, block = _pairs(pattern, head, query_blocks, slots_of[number])
        tile, block, flags = _tile_entries(row, block, query_blocks, n_blocks, pack)
        tile_rows, tile_steps = _tile_steps(tile, slots_of[number][block], flags, n_tiles)
        tile_rows[:, 0] += base
        base += len(tile_steps)
        tiles.append(tile_rows)
        steps.append(tile_steps)
    if not base:
        steps = [np.zeros((1, 2), dtype=np.int32)]
    return QueryLists(rows, np.stack(tiles), np.concatenate(steps))


def balanced(lists: QueryLists) -> bool:
    """Whether all lists have the same number of steps, within 10 %."""
    steps = lists.tiles[:, :, 1:].sum(axis=(1, 2), dtype=np.int64)
    return bool(10 * steps.max() <= 11 * steps.min())


def _column_blocks(pairs: list[tuple[np.ndarray, np.ndarray]], slots: np.ndarray, n_rows: int) -> np.ndarray:
    """The present key blocks of a KV head in the order in which two neighbours make a column. pairs: of the distinct members.

    Neighbours are attended by about the same row blocks: by last, then first attending row block.
    """
    last, first = np.full(len(slots), -1), np.full(len(slots), n_rows)
    for row, block in pairs:
        seen = np.full(len(slots), -1)
        seen[block] = row  # rows ascend and the last assignment stays
        last = np.maximum(last, seen)
        seen = np.full(len(slots), n_rows)
        seen[block[::-1]] = row[::-1]
        first = np.minimum(first, seen)
    blocks = np.flatnonzero(slots >= 0)
    return blocks[np.lexsort((slots[blocks], first[blocks], -last[blocks]))]


def _group_columns(pattern: Pattern, members: tuple, slots: np.ndarray, query_blocks: np.ndarray, n_slots: int):
    """(columns [C, 3], words, words per column [C]) of one list. members: what each query head of the group attends."""
    n_rows = len(query_blocks)
    distinct, member_of = _number(members)
    pairs = [_pairs(pattern, head, query_blocks, slots) for head in distinct]
    blocks = _column_blocks(pairs, slots, n_rows)
    n_columns = -(-len(blocks) // 2)
    place = np.empty(len(slots), dtype=np.int64)
    place[blocks] = np.arange(len(blocks))
    halves = np.pad(blocks, (0, len(blocks) % 2), constant_values=-1).reshape(-1, 2)  # -1: the missing second one

    parts = []  # of each distinct member: column, word without member, words per column
    for row, block in pairs:
        code, bits = _merge((place[block] >> 1) * n_rows + (n_rows - 1 - row), place[block] & 1)
        column, row = np.divmod(code, n_rows)
        row = n_rows - 1 - row
        own = (halves[column, 0] == query_blocks[row]) | (halves[column, 1] == query_blocks[row]) << 1
        word = (bits | (own & bits) << 2 | row << 5).astype(np.int32)
        parts.append((column, word, np.bincount(column, minlength=n_columns)))
    del pairs

    counts = np.maximum(sum(parts[number][2] for number in member_of), 1)
    order = np.argsort(-counts, kind="stable")
    starts = np.empty_like(counts)
    starts[order] = _starts(counts[order])
    words = np.zeros(counts.sum(), dtype=np.int32)
    words[starts + counts - 1] = LAST
    next_word = starts.copy()
    for member, number in enumerate(member_of):
        column, word, per_column = parts[number]
        words[next_word[column] + _ranks(column)] |= word | np.int32(member << 24)
        next_word += per_column
    slots_of = np.append(slots, n_slots)  # the block -1 stands for no slot
    columns = np.concatenate([slots_of[halves], starts[:, None]], axis=1)
    return columns[order], words, counts[order]


def key_lists(pattern: Pattern, query_blocks, key_slot, n_blocks: int, n_slots: int) -> KeyLists:
    """The lists of the KV heads of a RangePattern or BlockMaskPattern; arguments as in query_lists, n_slots: more than every slot.

    Memory beyond the result is O(nonzeros of the distinct heads of one group).
    Raises ValueError when members or row blocks do not fit into a word, or when there are fewer slots than key_slot names.
    """
    query_blocks = np.asarray(query_blocks, dtype=np.int64)
    heads, slot_rows = _heads(pattern, n_blocks), _slot_rows(pattern, key_slot, n_blocks)
    ratio = pattern.num_heads // pattern.num_kv_heads
    if ratio > MOST_MEMBERS:
        raise ValueError(f"{ratio} query heads per KV head; expected {MOST_MEMBERS} at most, a word holds no more")
    if len(query_blocks) > MOST_ROW_BLOCKS:
        raise ValueError(f"{len(query_blocks)} query row blocks; expected {MOST_ROW_BLOCKS} at most, a word holds no more")
    named = max(int(row.max(initial=-1)) for _, row in slot_rows) + 1
    if named > n_slots:
        raise ValueError(f"n_slots={n_slots}; key_slot names {named} slots, expected as many at least")
    lists, rows = _number((tuple(heads[group * ratio : (group + 1) * ratio]), number) for group, (number, _) in enumerate(slot_rows))
    slots_of = dict(slot_rows)
    parts, base = [], 0
    for members, number in lists:
        columns, words, counts = _group_columns(pattern, members, slots_of[number], query_blocks, n_slots)
        columns[:, 2] += base
        base += len(words)
        parts.append((columns, words, counts))
    most = max(1, *(len(columns) for columns, _, _ in parts))
    columns = np.full((len(parts), most, 3), (n_slots, n_slots, 0), dtype=np.int32)
    for index, (part, _, _) in enumerate(parts):
        columns[index, : len(part)] = part
    longest = max(int(counts.max(initial=0)) for _, _, counts in parts)
    n_long = max(1, *(int((2 * counts >= longest).sum()) for _, _, counts in parts))
    words = np.concatenate([words for _, words, _ in parts]) if base else np.array([LAST], dtype=np.int32)
    return KeyLists(rows, columns, words, n_long)
