"""A block-sparse pattern as explicit lists of steps, which the Hopper kernels walk. NumPy only.

For block masks, and for calls whose query and key blocks are placed (context parallelism): there the steps of a query
tile or of a key column are no arithmetic on a few ranges. Two key blocks make a step of the forward and of dq, two key
blocks make a column of dk and dv.

H query heads, G KV heads. Row block r is the rows r * block_size ... of the query, and is the block query_blocks[r] of
the whole sequence. A slot is where a key block lies in the key and value: key_slot[g, k], -1 when absent; without
key_slot block k lies in slot k.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np

from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import HeadPattern, Pattern

MOST_SLOTS, MOST_ROW_BLOCKS, MOST_MEMBERS = 2**24, 2**19, 127  # what the bits of a step and of a word can hold
MOST_STEPS, MORE_RANKS = (
    2**30,
    "use more context- or tensor-parallel ranks",
)  # and words: kernels address them in 32 bits, a step has two
CELLS = 2**19  # of the table of row blocks and key blocks, at a time
LAST = 1 << 4  # the bit of a word that ends a column
LONG = 1.5  # times the mean number of words, from where on a column is a long one
# Where masked entries stand in a tile, by flags: own blocks, the free entry left over, half 0 alone, half 1 alone.
_ENTRY_KIND = np.array([0, 2, 3, 1] + [0] * 12)


class QueryLists(NamedTuple):
    """The steps of every query tile.

    A unit is a query head; with pack two neighbouring ones, 2u and 2u + 1. A tile has two halves: the row blocks 2t and
    2t + 1 of a head (of an odd number the last one is missing), with pack the row block t of both heads. Masked steps
    come first, then free ones: both halves attend both key blocks and see all of their tokens. A tile with entries has
    a masked step, if need be of two free entries: ptxas 12.8 computes the address of the queries for the loop over
    masked steps and takes it for known behind the loop, also when the loop was passed by.

    A step is two key blocks, each slot | flags << 24. Bits 0, 1 of the flags: half 0, 1 attends it; bits 2, 3: half 0,
    1 attends it and it is that half's own block, masked by token.
    """

    rows: np.ndarray  # int32 [units]: which list a unit has
    tiles: np.ndarray  # int32 [lists, tiles, 3]: first step, masked steps, free steps
    steps: np.ndarray  # int32 [steps, 2]; one of zeros when there are none, so that the array has an address


class KeyLists(NamedTuple):
    """The query row blocks of every column, which is two slots of a KV head. Lists of equal words share them.

    Every present slot is in one column, attended or not. A word is one row block of one member (query head of the KV
    head's group), with the bits that hopper_columns.step_word gives it. Bits 0, 1: it attends the first, second slot;
    bits 2, 3: it attends it and it is its own block, masked by token; bit 4: last of the column; bits 5..23: row block;
    bits 24..30: member. Words of a column: member ascending, then row block descending. A column without queries has
    one word, with bit 4 alone.
    """

    rows: np.ndarray  # int32 [G]: which list a KV head has
    columns: (
        np.ndarray
    )  # int32 [lists, columns, 3]: first slot, second slot (n_slots when missing), first word. Longest first. Columns
    # that only pad a list to the length of the others: (n_slots, n_slots, 0)
    words: np.ndarray  # int32 [words]; one of LAST when there are none
    n_long: int  # columns of a list with more words than LONG times the mean (of all lists; where no column has so many: with half as many as
    # the longest, or more); the most of any list, 1 at least. They are computed first: equally long ones pass by the
    # same queries together


def _heads(pattern: Pattern, n_blocks: int) -> list[HeadPattern | int]:
    """What a query head attends: a range pattern, or the index of a table; equal iff two heads attend the same."""
    if isinstance(pattern, BlockMaskPattern):
        pattern.check_length(n_blocks * pattern.block_size)
        return [pattern.table_of(head) for head in range(pattern.num_heads)]
    return [HeadPattern(*head.canonical) for head in pattern.heads]


class _KeyRow(NamedTuple):
    """The key blocks of a KV head that are present. Heads with equal numbers have equal slots; with equal orders, the
    same blocks in the same order of slots: their lists differ in the names of the slots alone."""

    number: int
    order: int
    blocks: np.ndarray  # int64 [K]: the present blocks, ascending
    slots: np.ndarray  # int32 [K]: theirs
    by_slot: np.ndarray  # int64 [K]: argsort of slots


def _key_rows(pattern: Pattern, key_slot, n_blocks: int) -> list[_KeyRow]:
    """Of every KV head. Raises ValueError on a key_slot of another shape."""
    if key_slot is None:
        every = np.arange(n_blocks)
        return [_KeyRow(0, 0, every, every.astype(np.int32), every)] * pattern.num_kv_heads
    key_slot = np.asarray(key_slot, dtype=np.int32)
    if key_slot.shape != (pattern.num_kv_heads, n_blocks):
        raise ValueError(
            f"key_slot has shape {list(key_slot.shape)}; expected [KV heads, n_blocks] = [{pattern.num_kv_heads}, {n_blocks}]"
        )
    known: dict[bytes, _KeyRow] = {}
    orders: dict[bytes, int] = {}
    rows = []
    for row in key_slot:
        name = row.tobytes()
        if name not in known:
            blocks = np.flatnonzero(row >= 0)
            by_slot = np.argsort(row[blocks], kind="stable")
            order = orders.setdefault(blocks.tobytes() + by_slot.tobytes(), len(orders))
            known[name] = _KeyRow(len(known), order, blocks, row[blocks], by_slot)
        rows.append(known[name])
    return rows


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


def _sequences(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... (counts[0] of them), first[1], ... one after another."""
    return np.repeat(first - _starts(counts), counts) + np.arange(counts.sum())


def _nonzero(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(column [N], value [N], how many in each row) of what is not 0 in [rows, columns], row after row."""
    n_rows, width = cells.shape
    flat = np.flatnonzero(cells != 0)
    counts = np.diff(np.searchsorted(flat, np.arange(n_rows + 1) * width))
    return flat - np.repeat(np.arange(n_rows) * width, counts), cells.ravel()[flat], counts


class _Attended:
    """Which row blocks attend which of K present key blocks in a head; key block K (or -1) is one that none attends.

    first, last: int64 [K + 1], the first and the last row block that attends a key block; n_rows and -1 when none does.
    Parts of the table of cells are made where they are looked at (for ranges: of masks the whole one is kept, a byte a
    cell).
    """

    def __init__(
        self, pattern: Pattern, head: HeadPattern | int, query_blocks: np.ndarray, blocks: np.ndarray, n_blocks: int
    ):
        n_rows = len(query_blocks)
        self.first, self.last = np.full(len(blocks) + 1, n_rows), np.full(len(blocks) + 1, -1)
        place = np.full(n_blocks, len(blocks))
        place[blocks] = np.arange(len(blocks))
        self.own = place[query_blocks]  # int64 [row blocks]: the row block's own key block, K when it is absent
        self._spans, self._mask = [], None
        if isinstance(pattern, BlockMaskPattern):
            indptr, indices = pattern.tables[head]
            counts = np.diff(indptr)[query_blocks]
            row, column = np.repeat(np.arange(n_rows), counts), place[indices[_sequences(indptr[query_blocks], counts)]]
            self._mask = np.zeros((n_rows, len(blocks) + 1), dtype=bool)
            self._mask[row, column] = True
            self._mask[:, -1] = False
            self.last[column] = row  # rows ascend and the last assignment stays
            self.first[column[::-1]] = row[::-1]
            self.first[-1], self.last[-1] = n_rows, -1
            return
        for start, end, stride in head.bounds():
            # Row blocks low .. high - 1 attend a block whose residue is the right one.
            low = np.searchsorted(query_blocks, blocks + start)
            high = np.full_like(low, n_rows) if end is None else np.searchsorted(query_blocks, blocks + end)
            high = np.where((blocks + head.offset) % stride == 0, high, low)
            np.minimum(self.first[:-1], low, out=self.first[:-1], where=low < high)
            np.maximum(self.last[:-1], high - 1, out=self.last[:-1], where=low < high)
            self._spans.append(tuple(np.append(bound, 0).astype(np.int32) for bound in (low, high)))

    def columns(self, rows: slice) -> slice:
        """The key blocks between the first and the last one that some of the row blocks may attend."""
        seen = np.flatnonzero((self.first < rows.stop) & (self.last >= rows.start))
        return slice(seen[0], seen[-1] + 1) if len(seen) else slice(0, 0)

    def by_row(self, rows: slice, columns: slice) -> np.ndarray:
        """uint8 [rows, columns], 0 or 1."""
        if self._mask is not None:
            return self._mask[rows, columns].view(np.uint8)
        row = np.arange(rows.start, rows.stop, rows.step, dtype=np.int32)[:, None]
        return self._any((row >= low[columns]) & (row < high[columns]) for low, high in self._spans)

    @staticmethod
    def _any(cells) -> np.ndarray:
        return reduce(np.bitwise_or, cells).view(np.uint8)

    def by_column(self, columns: np.ndarray, rows: slice) -> np.ndarray:
        """uint8 [columns, rows], 0 or 1."""
        if self._mask is not None:
            return self._mask[rows, columns].T.view(np.uint8)
        row = np.arange(rows.start, rows.stop, dtype=np.int32)
        return self._any((row >= low[columns, None]) & (row < high[columns, None]) for low, high in self._spans)


def _chunks(n: int, width: int):
    """Slices of 0..n, of even lengths but for the last one, so that one times the width is few cells: they stay in a
    cache."""
    step = max(CELLS // max(width, 1) // 2 * 2, 2)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _masked_steps(tile, entry, flags) -> tuple[np.ndarray, np.ndarray]:
    """(tile [steps], steps [steps, 2]) of the masked entries, in the order of the list."""
    order = np.lexsort((entry & MOST_SLOTS - 1, _ENTRY_KIND[flags], tile))
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


def _tile_flags(attended: _Attended, rows: slice, columns: slice, pack: bool) -> np.ndarray:
    """uint8 [tiles, columns]: the flags of a step for the tiles of some row blocks."""
    if pack:
        flags = 3 * attended.by_row(rows, columns)
    else:
        flags, second = (attended.by_row(slice(rows.start + half, rows.stop, 2), columns) for half in range(2))
        flags = flags.copy()  # a view of the mask, or of its like
        flags[: len(second)] |= second << 1
    own = attended.own[rows] - columns.start
    row = np.flatnonzero((own >= 0) & (own < flags.shape[1]))
    for half in range(1 if pack else 2):
        chosen = row if pack else row[row % 2 == half]
        cell = (chosen if pack else chosen // 2), own[chosen]
        flags[cell] |= (flags[cell] & (3 if pack else 1 << half)) << 2
    return flags


def _tile_steps(attended: _Attended, n_rows: int, pack: bool) -> tuple[np.ndarray, np.ndarray]:
    """(tiles [n_tiles, 3], steps [N, 2]) of one list, with the places of key blocks among the present ones instead of
    slots."""
    free, n_free, masked, n_masked = [], [], [], []
    for rows in _chunks(n_rows, len(attended.first)):
        columns = attended.columns(rows)
        flags = _tile_flags(attended, rows, columns, pack)
        column, _, count = _nonzero(flags == 3)
        free.append((column + (columns.start | 3 << 24)).astype(np.int32))
        n_free.append(count)
        column, flag, count = _nonzero(np.where(flags == 3, 0, flags))
        masked.append(column + columns.start | flag.astype(np.int64) << 24)
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
    tile, masked = _masked_steps(tile, entry, entry >> 24)

    n_masked, n_free = np.bincount(tile, minlength=len(every)), (n_free - odd) // 2 - pair
    first = _starts(n_masked + n_free)
    steps = np.empty((len(masked) + len(free), 2), dtype=np.int32)
    steps[_sequences(first, n_masked)] = masked
    steps[_sequences(first + n_masked, n_free)] = free
    return np.stack([first, n_masked, n_free], axis=1).astype(np.int32), steps


def query_lists(pattern: Pattern, query_blocks, key_slot, n_blocks: int, pack: bool) -> QueryLists:
    """The lists of the query heads of a RangePattern or BlockMaskPattern.

    query_blocks: int [row blocks], ascending. key_slot: int [G, n_blocks] or None. n_blocks: of the whole sequence.
    pack: only where the heads 2u and 2u + 1 share their KV head and their pattern. Memory beyond the result is
    O(nonzeros of one head), for masks and a byte for every pair of a row block and a present key block.
    Raises ValueError when the slots do not fit into a step, or for too many steps.
    """
    query_blocks = np.asarray(query_blocks, dtype=np.int64)
    heads, key_rows = _heads(pattern, n_blocks), _key_rows(pattern, key_slot, n_blocks)
    n_slots = max(int(row.slots.max(initial=-1)) for row in key_rows) + 1
    if n_slots > MOST_SLOTS:
        raise ValueError(f"{n_slots} key slots; expected {MOST_SLOTS} at most, a step holds no more")
    ratio = pattern.num_heads // pattern.num_kv_heads
    sources = [(head, key_rows[index // ratio].number) for index, head in enumerate(heads)]
    if pack:
        assert ratio % 2 == 0 and sources[::2] == sources[1::2], "packed heads share the KV head and the pattern"
        sources = sources[::2]
    lists, rows = _number(sources)
    row_of = {row.number: row for row in key_rows}
    known, tiles, steps, base = {}, [], [], 0
    for head, number in lists:
        key_row = row_of[number]
        if (head, key_row.order) not in known:
            attended = _Attended(pattern, head, query_blocks, key_row.blocks, n_blocks)
            known[head, key_row.order] = _tile_steps(attended, len(query_blocks), pack)
        tile_rows, places = known[head, key_row.order]
        tiles.append(tile_rows + np.array([base, 0, 0], dtype=np.int32))
        steps.append(key_row.slots[places & MOST_SLOTS - 1] | places & ~np.int32(MOST_SLOTS - 1))
        base += len(places)
        if base >= MOST_STEPS:
            raise ValueError(f"lists of {base} steps; expected fewer than {MOST_STEPS}; {MORE_RANKS}")
    return QueryLists(rows, np.stack(tiles), np.concatenate(steps) if base else np.zeros((1, 2), dtype=np.int32))


def _column_words(attended: _Attended, halves: np.ndarray, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(words without a member, words per column) of a head. halves: int64 [columns, 2], places of key blocks among the
    present ones."""
    words, counts = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
    row_of = np.full(len(attended.first), -1)
    row_of[attended.own] = np.arange(n_rows)
    row_of[-1] = -1
    for chunk in _chunks(len(halves), n_rows):
        pair = halves[chunk]
        rows = slice(int(attended.first[pair].min()), int(attended.last[pair].max()) + 1)
        rows = slice(min(rows.start, rows.stop), rows.stop)
        cells = attended.by_column(pair[:, 0], rows)
        cells |= attended.by_column(pair[:, 1], rows) << 1
        for half in range(2):
            own = row_of[pair[:, half]] - rows.start
            column = np.flatnonzero((own >= 0) & (own < cells.shape[1]))
            cells[column, own[column]] |= (cells[column, own[column]] & 1 << half) << 2
        place, bits, count = _nonzero(np.ascontiguousarray(cells[:, ::-1]))  # row blocks descend
        words.append((rows.stop - 1 - place << 5).astype(np.int32) | bits)
        counts.append(count)
    return np.concatenate(words), np.concatenate(counts)


def _group_columns(members: tuple, heads: dict, key_row: _KeyRow, n_rows: int):
    """(columns [C, 3] with places among the slots in use instead of slots, words, words per column [C]) of one list.
    members: what each query head of the group attends. heads: of the distinct ones."""
    # Two neighbours make a column: they are attended by about the same row blocks, by last, then first attending row
    # block.
    first = np.min([head.first for head in heads.values()], axis=0)[:-1]
    last = np.max([head.last for head in heads.values()], axis=0)[:-1]
    place = np.empty_like(key_row.by_slot)
    place[key_row.by_slot] = np.arange(len(place))
    halves = np.lexsort((place, first, -last))
    halves = np.pad(halves, (0, len(halves) % 2), constant_values=-1).reshape(-1, 2)  # -1: the missing second one

    parts = {member: _column_words(attended, halves, n_rows) for member, attended in heads.items()}
    counts = np.maximum(sum(parts[member][1] for member in members), 1)
    order = np.argsort(-counts, kind="stable")
    starts = np.empty_like(counts)
    starts[order] = _starts(counts[order])
    words = np.zeros(counts.sum(), dtype=np.int32)
    next_word = starts.copy()
    for number, member in enumerate(members):
        word, per_column = parts[member]
        words[_sequences(next_word, per_column)] = word | np.int32(number << 24)
        next_word += per_column
    words[starts + counts - 1] |= LAST
    columns = np.concatenate([np.append(place, len(place))[halves], starts[:, None]], axis=1)
    return columns[order], words, counts[order]


def key_lists(pattern: Pattern, query_blocks, key_slot, n_blocks: int, n_slots: int) -> KeyLists:
    """The lists of the KV heads of a RangePattern or BlockMaskPattern; arguments as in query_lists, n_slots: more than
    every slot.

    Memory beyond the result is O(nonzeros of the distinct heads of one group), for masks and a byte for every pair of a
    row block and a present key block in each of them. Lists that differ only in the names of slots share their words.
    Raises ValueError when members or row blocks do not fit into a word, when there are fewer slots than key_slot names,
    or for too many words.
    """
    query_blocks = np.asarray(query_blocks, dtype=np.int64)
    heads, key_rows = _heads(pattern, n_blocks), _key_rows(pattern, key_slot, n_blocks)
    ratio = pattern.num_heads // pattern.num_kv_heads
    if ratio > MOST_MEMBERS:
        raise ValueError(f"{ratio} query heads per KV head; expected {MOST_MEMBERS} at most, a word holds no more")
    if len(query_blocks) > MOST_ROW_BLOCKS:
        raise ValueError(
            f"{len(query_blocks)} query row blocks; expected {MOST_ROW_BLOCKS} at most, a word holds no more"
        )
    named = max(int(row.slots.max(initial=-1)) for row in key_rows) + 1
    if named > n_slots:
        raise ValueError(f"n_slots={n_slots}; key_slot names {named} slots, expected as many at least")
    lists, rows = _number(
        (tuple(heads[group * ratio : (group + 1) * ratio]), row.number) for group, row in enumerate(key_rows)
    )
    row_of = {row.number: row for row in key_rows}
    known, words, parts = {}, [], []
    for members, number in lists:
        key_row = row_of[number]
        if (members, key_row.order) not in known:
            attended = {
                head: _Attended(pattern, head, query_blocks, key_row.blocks, n_blocks)
                for head in dict.fromkeys(members)
            }
            columns, new_words, counts = _group_columns(members, attended, key_row, len(query_blocks))
            columns[:, 2] += sum(map(len, words))
            words.append(new_words)
            if sum(map(len, words)) >= MOST_STEPS:
                raise ValueError(
                    f"lists of {sum(map(len, words))} words; expected fewer than {MOST_STEPS}; {MORE_RANKS}"
                )
            known[members, key_row.order] = columns, counts
        columns, counts = known[members, key_row.order]
        slots = np.append(key_row.slots[key_row.by_slot], n_slots)  # of places; the last one stands for no slot
        parts.append((np.concatenate([slots[columns[:, :2]], columns[:, 2:]], axis=1), counts))
    most = max(1, *(len(columns) for columns, _ in parts))
    columns = np.full((len(parts), most, 3), (n_slots, n_slots, 0), dtype=np.int32)
    for index, (part, _) in enumerate(parts):
        columns[index, : len(part)] = part
    every = np.concatenate([counts for _, counts in parts])
    long = every > LONG * every.mean() if len(every) else every
    limit = every[long].min() if long.any() else every.max(initial=0) / 2
    n_long = max(1, *(int((counts >= limit).sum()) for _, counts in parts))
    words = np.concatenate(words) if any(map(len, words)) else np.array([LAST], dtype=np.int32)
    return KeyLists(rows, columns, words, n_long)


def column_words(lists: KeyLists) -> np.ndarray:
    """int [G, columns]: how many words every column of a KV head has, none where it only pads."""
    ends, starts = np.flatnonzero(lists.words & LAST), lists.columns[:, :, 2]
    counts = ends[np.searchsorted(ends, starts)] + 1 - starts
    return np.where(lists.columns[:, :, 0] == lists.columns[:, :, 1], 0, counts)[lists.rows]
