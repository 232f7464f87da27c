"""Which query row blocks attend which present key blocks, as parts of a table: what the step lists are made from. NumPy
only.

H query heads, G KV heads. Row block r is the rows r * block_size ... of the query, and is the block query_blocks[r] of
the whole sequence. A slot is where a key block lies in the key and value: key_slot[g, k], -1 when absent; without
key_slot block k lies in slot k.

Where a block of the pattern is larger than what the kernels compute, all of these are its parts, `split` of each: the
part p of block b is the block b * split + p here. Below the diagonal the parts of two blocks attend each other like the
blocks; in a diagonal block a part attends itself, by token, and the parts before it.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np

from s2_megatron.kernels.step_descriptor import ATTENDED, EDGE, FAR, NEAR
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.counts import range_bounds
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import Pattern

# Of steps in a list: kernels address them in 32 bits, and a step of a query tile has two entries.
MOST_STEPS, MORE_RANKS = 2**30, "use more context- or tensor-parallel ranks"
CELLS = 2**19  # of the table of row blocks and key blocks, at a time


def split_blocks(blocks: np.ndarray, split: int) -> np.ndarray:
    """Blocks or slots cut into `split` parts along the last axis, -1 (no slot) kept: [..., N] -> [..., N * split]."""
    if split == 1:
        return blocks
    parts = blocks[..., None] * split + np.arange(split, dtype=blocks.dtype)
    return np.where(blocks[..., None] < 0, blocks[..., None], parts).reshape(*blocks.shape[:-1], -1)


def heads_of(pattern: Pattern, n_blocks: int, split: int = 1) -> list[HeadPattern | int]:
    """What a query head attends: a range pattern, or the index of a table; equal iff two heads attend the same."""
    if isinstance(pattern, BlockMaskPattern):
        pattern.check_length(n_blocks * (pattern.block_size // split))
        return [pattern.table_of(head) for head in range(pattern.num_heads)]
    return [HeadPattern(*head.canonical) for head in pattern.heads]


class KeyRow(NamedTuple):
    """The key blocks of a KV head that are present. Heads with equal numbers have equal slots; with equal orders, the
    same blocks in the same order of slots: their lists differ in the names of the slots alone."""

    number: int
    order: int
    blocks: np.ndarray  # int64 [K]: the present blocks, ascending
    slots: np.ndarray  # int32 [K]: theirs
    by_slot: np.ndarray  # int64 [K]: argsort of slots


def key_rows_of(pattern: Pattern, key_slot, n_blocks: int) -> list[KeyRow]:
    """Of every KV head. Raises ValueError on a key_slot of another shape."""
    if key_slot is None:
        every = np.arange(n_blocks)
        return [KeyRow(0, 0, every, every.astype(np.int32), every)] * pattern.num_kv_heads
    key_slot = np.asarray(key_slot, dtype=np.int32)
    if key_slot.shape != (pattern.num_kv_heads, n_blocks):
        raise ValueError(
            f"key_slot has shape {list(key_slot.shape)}; expected [KV heads, n_blocks] = [{pattern.num_kv_heads}, "
            f"{n_blocks}]; use the same pattern for both"
        )
    known: dict[bytes, KeyRow] = {}
    orders: dict[bytes, int] = {}
    rows = []
    for row in key_slot:
        name = row.tobytes()
        if name not in known:
            blocks = np.flatnonzero(row >= 0)
            by_slot = np.argsort(row[blocks], kind="stable")
            order = orders.setdefault(blocks.tobytes() + by_slot.tobytes(), len(orders))
            known[name] = KeyRow(len(known), order, blocks, row[blocks], by_slot)
        rows.append(known[name])
    return rows


def numbered(items) -> tuple[list, np.ndarray]:
    """(the distinct items in order of appearance, which of them each item is, int32)."""
    known: dict = {}
    index = [known.setdefault(item, len(known)) for item in items]
    return list(known), np.array(index, dtype=np.int32)


def starts_of(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def sequences(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... (counts[0] of them), first[1], ... one after another."""
    return np.repeat(first - starts_of(counts), counts) + np.arange(counts.sum())


def nonzero(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(column [N], value [N], how many in each row) of what is not 0 in [rows, columns], row after row."""
    n_rows, width = cells.shape
    flat = np.flatnonzero(cells != 0)
    counts = np.diff(np.searchsorted(flat, np.arange(n_rows + 1) * width))
    return flat - np.repeat(np.arange(n_rows) * width, counts), cells.ravel()[flat], counts


class Attended:
    """Which row blocks attend which of K present key blocks in a head; key block K (or -1) is one that none attends.

    What they attend of it are the flags of half 0 in step_descriptor.py; OWN, of the own block, is the caller's to add.

    first, last: int64 [K + 1], the first and the last row block that attends a key block; n_rows and -1 when none does.
    Parts of the table of cells are made where they are looked at (for ranges: of masks the whole is stored, a byte a
    cell).
    """

    def __init__(
        self,
        pattern: Pattern,
        head: HeadPattern | int,
        query_blocks: np.ndarray,
        blocks: np.ndarray,
        n_blocks: int,
        split: int = 1,
    ):
        n_rows = len(query_blocks)
        self.first, self.last = np.full(len(blocks) + 1, n_rows), np.full(len(blocks) + 1, -1)
        place = np.full(n_blocks, len(blocks))
        place[blocks] = np.arange(len(blocks))
        self.own = place[query_blocks]  # int64 [row blocks]: the row block's own key block, K when it is absent
        self._spans, self._mask = [], None
        self._parts: list[tuple[int, np.ndarray, np.ndarray]] = []  # (flags, low, high) of blocks attended in part
        self.sink_place = len(blocks)  # of the key block that holds the sink's last tokens
        if isinstance(pattern, BlockMaskPattern):
            indptr, indices = pattern.tables[head]
            counts = np.diff(indptr)[query_blocks // split]
            column = split_blocks(indices[sequences(indptr[query_blocks // split], counts)], split)
            row = np.repeat(np.arange(n_rows), counts * split)
            if split > 1:
                causal = column <= query_blocks[row]
                row, column = row[causal], column[causal]
            column = place[column]
            self._mask = np.zeros((n_rows, len(blocks) + 1), dtype=bool)
            self._mask[row, column] = True
            self._mask[:, -1] = False
            self.last[column] = row  # rows ascend and the last assignment stays
            self.first[column[::-1]] = row[::-1]
            self.first[-1], self.last[-1] = n_rows, -1
            return
        for start, end, stride in range_bounds(head.ranges):
            # Row blocks low .. high - 1 attend a block whose residue is the right one.
            whole = blocks // split
            low = np.searchsorted(query_blocks, np.maximum((whole + start) * split, blocks))
            high = np.full_like(low, n_rows) if end is None else np.searchsorted(query_blocks, (whole + end) * split)
            high = np.where((whole + head.offset) % stride == 0, high, low)
            self._add_span(low, high)
        if head.by_token:
            self._add_tokens(head, query_blocks, blocks, pattern.block_size // split)

    def _add_span(self, low: np.ndarray, high: np.ndarray, flags: int = ATTENDED) -> None:
        """Row blocks low .. high - 1 attend the key blocks, int64 [K] each."""
        np.minimum(self.first[:-1], low, out=self.first[:-1], where=low < high)
        np.maximum(self.last[:-1], high - 1, out=self.last[:-1], where=low < high)
        low, high = (np.append(bound, 0).astype(np.int32) for bound in (low, high))
        if flags == ATTENDED:
            self._spans.append((low, high))
        else:
            self._parts.append((flags, low, high))

    def _add_tokens(self, head: HeadPattern, query_blocks: np.ndarray, blocks: np.ndarray, unit: int) -> None:
        """The window and the sink of a head, in blocks of `unit` tokens (patterns/tokens.py)."""

        def from_distance(first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
            return np.searchsorted(query_blocks, blocks + first), np.searchsorted(query_blocks, blocks + end)

        if head.window is not None:
            edge, rest = divmod(head.window, unit)
            self._add_span(*from_distance(0, edge))
            self._add_span(*from_distance(edge, edge + 1), NEAR if edge else ATTENDED | EDGE)
            if rest > 1:
                self._add_span(*from_distance(edge + 1, edge + 2), FAR)
        if head.sink_tokens:
            sink_block, rest = divmod(head.sink_tokens, unit)
            low = np.searchsorted(query_blocks, blocks)
            self._add_span(low, np.where(blocks < sink_block, len(query_blocks), low))
            if rest:
                at_sink = blocks == sink_block
                self._add_span(low, np.where(at_sink, len(query_blocks), low), EDGE)
                self.sink_place = int(np.flatnonzero(at_sink)[0]) if at_sink.any() else len(blocks)

    def columns(self, rows: slice) -> slice:
        """The key blocks between the first and the last one that some of the row blocks may attend."""
        seen = np.flatnonzero((self.first < rows.stop) & (self.last >= rows.start))
        return slice(seen[0], seen[-1] + 1) if len(seen) else slice(0, 0)

    def by_row(self, rows: slice, columns: slice) -> np.ndarray:
        """uint8 [rows, columns]: flags, 0 for none."""
        if self._mask is not None:
            return self._mask[rows, columns].view(np.uint8)
        row = np.arange(rows.start, rows.stop, rows.step, dtype=np.int32)[:, None]
        return self._flags(lambda low, high: (row >= low[columns]) & (row < high[columns]))

    def _flags(self, inside) -> np.ndarray:
        """inside(low, high): bool of the cells."""
        whole = reduce(np.bitwise_or, (inside(*span) for span in self._spans)).view(np.uint8)
        for flags, *span in self._parts:
            whole[inside(*span) & (whole == 0)] = flags
        return whole

    def by_column(self, columns: np.ndarray, rows: slice) -> np.ndarray:
        """uint8 [columns, rows]: flags, 0 for none."""
        if self._mask is not None:
            return self._mask[rows, columns].T.view(np.uint8)
        row = np.arange(rows.start, rows.stop, dtype=np.int32)
        return self._flags(lambda low, high: (row >= low[columns, None]) & (row < high[columns, None]))


def chunks(n: int, width: int):
    """Slices of 0..n, of even lengths but for the last one, so that one times the width is few cells: they stay in a
    cache."""
    step = max(CELLS // max(width, 1) // 2 * 2, 2)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
