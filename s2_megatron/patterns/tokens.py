"""Windows and sinks that are said in tokens: which token pairs of a block pair they add, and how many.

B is the block size, W the window, n the sink tokens; w, e = divmod(W, B) and b, s = divmod(n, B). Query block q and key
block k lie d = q - k apart, r and c are places inside of them. The window sees token pairs with B * d + r - c < W:
all of a block pair with d < w (on the diagonal as far as it is causal), of d = w those with c > r - e, and, if e > 1,
of d = w + 1 those with c > r - e + B. The sink sees all of the key blocks before b, and of b the places c < s.

A `head` is a HeadPattern (head.py, which imports this module).
"""

from __future__ import annotations

import numpy as np

from s2_megatron.patterns.checks import Ranges

Bounds = list[tuple[int, int | None, int]]  # [(first distance, distance limit or None, stride)]


def bounds_beyond(bounds: Bounds, distance: int) -> Bounds:
    """The part of the bounds from a distance on, and a window of as many blocks before it."""
    beyond = [(max(start, distance), end, stride) for start, end, stride in bounds if end is None or end > distance]
    return [(0, distance, 1), *beyond]


def whole_blocks(window: int, block_size: int) -> int:
    """From this distance on a window does not see block pairs as a whole."""
    return window // block_size


def touched_blocks(window: int, block_size: int) -> int:
    """From this distance on a window sees nothing of a block pair."""
    return (window + block_size - 2) // block_size + 1


def outside_window(ranges: Ranges, window: int, block_size: int) -> Ranges:
    """The ranges that attend something which the window does not see. Empty ones stay out; what they say of nearer
    blocks is true in the window, too."""
    return tuple((end, stride) for end, stride in ranges if end is None or end > whole_blocks(window, block_size))


def covers_window(ranges: Ranges, window: int, block_size: int) -> bool:
    """Whether the ranges attend everything that the window sees."""
    if not ranges or ranges[0][1] != 1:
        return False
    end = ranges[0][0]
    return end is None or end >= touched_blocks(window, block_size)


def attends_whole(head, query_block, key_block) -> np.ndarray:
    """bool: whether all causal token pairs of two blocks are attended. Integers or arrays, which broadcast."""
    query_block, key_block = np.asarray(query_block), np.asarray(key_block)
    distance = query_block - key_block
    seen = np.zeros(distance.shape, dtype=bool)
    for start, end, stride in head.bounds():
        near = distance >= start if end is None else (distance >= start) & (distance < end)
        seen |= near & ((key_block + head.offset) % stride == 0)
    if head.sink_tokens:
        seen |= (distance >= 0) & (key_block < head.sink_tokens // head.block_size)
    return seen


def _seen_whole_below(head, query: np.ndarray) -> np.ndarray:
    """How many key blocks below the diagonal each query block attends as a whole."""
    first = 0 if not head.sink_tokens else head.sink_tokens // head.block_size  # the blocks before it are all seen
    total = np.minimum(first, query)
    for start, end, stride in head.bounds():
        low = np.full_like(query, first) if end is None else np.maximum(first, query - end + 1)
        high = query - max(start, 1)
        many = np.floor_divide(high + head.offset, stride) - np.floor_divide(low + head.offset - 1, stride)
        total += np.where(high >= low, many, 0)
    return total


def row_terms(head, block_size: int, n_blocks: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """How many keys each query token attends, as a sum of products: [(weights int64 [n_blocks], keys int64
    [block_size])], where row r of query block q attends the sum of weights[q] * keys[r] keys."""
    query, row = np.arange(n_blocks, dtype=np.int64), np.arange(block_size, dtype=np.int64)
    every = np.full_like(row, block_size)
    own = attends_whole(head, query, query)
    terms = [(_seen_whole_below(head, query), every), (own.astype(np.int64), row + 1)]
    sink_block, rest = divmod(head.sink_tokens, block_size)

    def add(distance: int, seen: np.ndarray, hidden: np.ndarray) -> None:
        """The block pairs at a distance that are seen in part. seen: keys that the window shows each row; hidden: keys
        before those."""
        part = (query >= distance) & ~attends_whole(head, query, query - distance)
        terms.append((part.astype(np.int64), seen))
        if rest and sink_block + distance < n_blocks:
            at_sink = np.zeros_like(query)
            at_sink[sink_block + distance] = part[sink_block + distance]
            terms.append((at_sink, np.minimum(hidden, rest)))

    window_end = 1  # from this distance on the sink's block is a matter of its own
    if head.window is not None:
        whole, edge = divmod(head.window, block_size)
        hidden = np.clip(row - edge + 1, 0, block_size)
        add(whole, (row + 1 if whole == 0 else block_size) - hidden, hidden)
        if edge > 1:
            hidden = np.clip(row - edge + 1 + block_size, 0, block_size)
            add(whole + 1, block_size - hidden, hidden)
        window_end = whole + (2 if edge > 1 else 1)
    if rest:
        beyond = (query - sink_block >= window_end) & ~attends_whole(head, query, sink_block)
        terms.append((beyond.astype(np.int64), np.full_like(row, rest)))
    return terms


def joined(terms: list[tuple[np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Equal keys of `row_terms` once, with the sum of their weights."""
    known: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
    for weights, keys in terms:
        before, _ = known.get(keys.tobytes(), (0, keys))
        known[keys.tobytes()] = before + weights, keys
    return list(known.values())


def pairs_of_terms(terms: list[tuple[np.ndarray, np.ndarray]], seq_length: int) -> int:
    """(query, key) token pairs of a sequence; the terms have its query blocks."""
    whole, rest = divmod(seq_length, len(terms[0][1]))
    return sum(
        int(weights[:whole].sum()) * int(keys.sum()) + (int(weights[whole]) * int(keys[:rest].sum()) if rest else 0)
        for weights, keys in terms
    )
