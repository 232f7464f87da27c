"""The rule by which one attention head attends key blocks: S2-Attention (arXiv 2407.17678), in NumPy only.

Block indices count from the start of the sequence (or of the packed document). For a query block q and a key block k <=
q with distance d = q - k, a head's pattern is a list of ranges ((end_1, s_1), ..., (end_n, s_n)) and one offset. Range
i holds end_(i-1) <= d < end_i (end_0 = 0, the last end may be None: no limit). Block k is attended iff d lies in a
range and (k + offset) mod s_i == 0. s_1 is 1, so the diagonal block is always attended; inside it a token sees the
tokens up to itself. Beside that rule a head may have a window and a sink that are said in tokens (tokens.py).

Heads, layers and blocks are 0-based and global, i.e. before any tensor- or context-parallel slicing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from s2_megatron.patterns.checks import LARGEST_OFFSET, Ranges, check_integer, check_ranges, check_tokens
from s2_megatron.patterns.counts import head_block_pairs, range_bounds
from s2_megatron.patterns.tokens import (
    bounds_beyond,
    covers_window,
    outside_window,
    pairs_of_terms,
    row_terms,
    touched_blocks,
    whole_blocks,
)

DENSE: Ranges = ((None, 1),)
MOST_ROWS = 2**24  # query blocks that are counted one by one


def _multiples(first, last, stride):
    """How many multiples of `stride` lie in [first, last]; arrays broadcast; 0 when last < first."""
    return np.maximum(np.floor_divide(last, stride) - np.floor_divide(np.asarray(first) - 1, stride), 0)


@dataclass(frozen=True)
class HeadPattern:
    """The pattern of one attention head.

    ranges: ((end in blocks or None, stride), ...), ends growing, the first stride 1; lists are taken, too. offset:
    added to the key block before the modulus.

    window: tokens; query i also attends the keys i - window + 1 to i. Then the ranges may be empty, and their first
    stride may be any: what is attended is the union. sink_tokens: the first so many keys are attended by every query
    that comes after them. block_size: tokens of a block, where one of both is given.

    Raises ValueError for anything else, and for values that are not integers.
    """

    ranges: Ranges
    offset: int = 0
    window: int | None = None
    sink_tokens: int = 0
    block_size: int | None = None

    def __post_init__(self):
        tokens = check_tokens(self.window, self.sink_tokens, self.block_size)
        for name, value in zip(("window", "sink_tokens", "block_size"), tokens):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "ranges", check_ranges(self.ranges, beside_window=self.window is not None))
        offset = check_integer("offset", self.offset, -LARGEST_OFFSET, LARGEST_OFFSET, "use 0")
        object.__setattr__(self, "offset", offset)

    @property
    def by_token(self) -> bool:
        """Whether a block pair below the diagonal may be attended in part."""
        return self.window is not None or self.sink_tokens > 0

    @property
    def is_dense(self) -> bool:
        return self.canonical[0] == DENSE

    @cached_property
    def is_kv_efficient(self) -> bool:
        """Every stride divides the next one: a key block once dropped is never attended again (paper, section 3.3)."""
        return all(wide % narrow == 0 for (_, _, narrow), (_, _, wide) in pairwise(self.bounds()))

    @cached_property
    def canonical(self) -> tuple[Ranges, int, int | None, int, int | None]:
        """(ranges, offset, window, sink tokens, block size) that are equal for two heads iff they attend the same
        tokens whatever the length."""
        ranges, window = self.ranges, self.window
        if window is not None:
            ranges = outside_window(ranges, window, self.block_size)
        merged: list[tuple[int | None, int]] = []
        for end, stride in ranges:
            if merged and merged[-1][1] == stride:
                merged.pop()
            merged.append((end, stride))
        if window is not None and covers_window(tuple(merged), window, self.block_size):
            window = None
        if tuple(merged) == DENSE:
            return DENSE, 0, None, 0, None
        size = None if window is None and not self.sink_tokens else self.block_size
        return tuple(merged), self.offset % math.lcm(*(stride for _, stride in merged)), window, self.sink_tokens, size

    @cached_property
    def _bounds(self) -> list[tuple[int, int | None, int]]:
        ranges = range_bounds(self.ranges)
        return ranges if self.window is None else bounds_beyond(ranges, whole_blocks(self.window, self.block_size))

    def bounds(self) -> list[tuple[int, int | None, int]]:
        """[(first distance, distance limit or None, stride)] of the block pairs that are attended as a whole, beside
        those of the sink. The first stride is 1; with a window of less than a block its range is empty."""
        return self._bounds

    @cached_property
    def touched_ranges(self) -> Ranges:
        """Ranges of the block pairs of which at least one token pair is attended, beside those of the sink; the first
        one is the window."""
        if self.window is None:
            return self.ranges
        window = touched_blocks(self.window, self.block_size)
        return ((window, 1), *((end, stride) for end, stride in self.ranges if end is None or end > window))

    def touched_bounds(self) -> list[tuple[int, int | None, int]]:
        """`bounds` of these."""
        return range_bounds(self.touched_ranges)

    @property
    def sink_blocks(self) -> int:
        """How many key blocks hold tokens of the sink."""
        return -(-self.sink_tokens // self.block_size) if self.sink_tokens else 0

    def attends(self, query_block: int, key_block: int) -> bool:
        """Whether at least one token pair of the two blocks is attended."""
        distance = query_block - key_block
        if distance >= 0 and key_block < self.sink_blocks:
            return True
        for start, end, stride in self.touched_bounds():
            if start <= distance and (end is None or distance < end):
                return (key_block + self.offset) % stride == 0
        return False

    def key_blocks(self, query_block: int) -> np.ndarray:
        """Key blocks of which a query block attends at least one token, ascending, int64."""
        sink = min(self.sink_blocks, query_block + 1)
        pieces = []
        for start, end, stride in self.touched_bounds():
            low = sink if end is None else max(sink, query_block - end + 1)
            first = low + (-(low + self.offset)) % stride
            pieces.append(np.arange(first, query_block - start + 1, stride, dtype=np.int64))
        return np.concatenate([np.arange(sink, dtype=np.int64), *pieces[::-1]])

    def key_block_counts(self, n_blocks: int) -> np.ndarray:
        """Number of key blocks that `key_blocks` has for the query blocks 0 .. n_blocks-1, int64[n_blocks]."""
        query = np.arange(n_blocks, dtype=np.int64)
        sink = np.minimum(self.sink_blocks, query + 1)
        total = sink.copy()
        for start, end, stride in self.touched_bounds():
            low = sink if end is None else np.maximum(sink, query - end + 1)
            total += np.where(query >= start, _multiples(low + self.offset, query - start + self.offset, stride), 0)
        return total


@lru_cache(maxsize=4096)
def head_pairs(head: HeadPattern, block_size: int, seq_length: int) -> int:
    """(query, key) token pairs of one head. Raises ValueError for a by_token head of more than MOST_ROWS blocks."""
    whole, last = divmod(seq_length - 1, block_size)  # query blocks before the last one; its tokens but one
    last += 1
    if head.by_token:
        if whole >= MOST_ROWS:
            raise ValueError(
                f"seq_length={seq_length}; expected at most {MOST_ROWS * block_size} with a window or a sink in "
                "tokens; use a shorter sequence"
            )
        return pairs_of_terms(row_terms(head, block_size, whole + 1), seq_length)
    below = head_block_pairs(head.ranges, head.offset, whole)
    below_last = head_block_pairs(head.ranges, head.offset, whole + 1) - below - 1
    pairs = (below - whole) * block_size**2 + whole * (block_size * (block_size + 1) // 2)
    return pairs + below_last * block_size * last + last * (last + 1) // 2
