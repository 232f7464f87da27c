"""Which keys travel between context-parallel ranks when documents are packed, for windows and sinks: planned for each
batch from its documents. NumPy only.

A piece is what a rank holds of one document without a gap; a rank has at most two of a document. The queries of a piece
need the sink of their document and the keys shortly before the piece, and no others. So a rank computes documents of
its own: sink, halo and piece, one behind the other. What is left out between sink and halo no query sees, and windows
and sinks know only distances and first tokens: nothing else has to be told to the kernels. The two pieces of a
document share one such document where the second one's halo reaches the first piece.

Tokens count from the start of the packed row, rows from that of a rank's share, places in a rank's own documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from s2_megatron.context_parallel.plan import zigzag_chunks
from s2_megatron.ops.attended_blocks import sequences
from s2_megatron.patterns.ranges import Pattern, RangePattern

# The places are filled up to a multiple, so that kernels see few different alignments.
PLACES = 128


class Reach(NamedTuple):
    """What the queries of a KV head attend beside their own token."""

    before: int  # so many tokens before each query; with `unit` > 1 before the start of its block
    sink: int  # the first tokens of the document
    unit: int  # tokens keep their position in the document modulo this: the block size where a window counts blocks


@lru_cache(maxsize=256)
def reaches(pattern: Pattern) -> tuple[Reach, ...] | None:
    """Of every KV head; None where a head attends more than a window and a sink: it is dense, has strides or a mask."""
    if not isinstance(pattern, RangePattern):
        return None
    found, by_block = [], False
    for head in pattern.heads:
        blocks, _, window, sink, _ = head.canonical
        if any(end is None or stride > 1 for end, stride in blocks):
            return None
        by_block |= bool(blocks)
        before = [(end - 1) * pattern.block_size for end, _ in blocks] + ([] if window is None else [window - 1])
        found.append((max(before), sink))
    unit, ratio = pattern.block_size if by_block else 1, pattern.num_heads // pattern.num_kv_heads
    groups = [found[first : first + ratio] for first in range(0, len(found), ratio)]
    return tuple(Reach(max(a for a, _ in group), max(b for _, b in group), unit) for group in groups)


def most_received_slots(pattern: Pattern) -> int:
    """The most slots (one token of one KV head) that a rank receives in a forward, whatever the documents: of a row
    that is cut as one sequence; of documents that are cut by themselves, for each of them. pattern: as `reaches` takes
    it."""
    of_heads = reaches(pattern)
    return 2 * sum(one.before + one.unit - 1 + -(-one.sink // one.unit) * one.unit for one in of_heads)


def why_not(pattern: Pattern) -> str | None:
    """What of a pattern cannot be exchanged for packed documents by `sparse`, in words."""
    if reaches(pattern) is not None:
        return None
    return (
        "packed documents with s2_cp_comm_type='sparse' and a layer or head that is dense, has strides or a mask: its "
        "keys lie all over a document; expected windows, with or without sinks; use --s2-cp-comm-type all_gather or "
        "a2a for the layer"
    )


class _Cut(NamedTuple):
    """How the tokens of a row lie on the ranks: arrays, one entry a stretch, in the order of tokens."""

    start: np.ndarray
    end: np.ndarray
    rank: np.ndarray
    row: np.ndarray  # of the first token, on its rank

    @classmethod
    def make(cls, borders: np.ndarray, tokens: int, size: int) -> _Cut:
        """borders: of what was cut in zigzag by itself; tokens behind the last border count as one more."""
        starts, ends = borders, np.append(borders[1:], tokens)
        lengths = ends - starts
        unit = 2 * size
        if borders[0] or (lengths < 0).any() or (lengths % unit).any():
            wrong = f"the lengths {lengths[(lengths < 0) | (lengths % unit > 0)].tolist()}, first {borders[0]}"
            raise ValueError(
                f"packed rows of {tokens} tokens cut over {size} context-parallel ranks have borders with {wrong}; "
                f"expected lengths that are multiples of 2 * {size}, from 0 on; pad them"
            )
        starts, chunk = starts[lengths > 0, None], lengths[lengths > 0, None] // unit
        number = np.arange(unit)
        start = starts + number * chunk
        rank = np.empty(unit, dtype=np.int64)
        for owner in range(size):
            rank[list(zigzag_chunks(owner, size))] = owner
        row = starts // size + np.where(number >= size, chunk, 0)
        return cls(start.ravel(), (start + chunk).ravel(), np.tile(rank, len(starts)), row.ravel())

    def split(self, low: np.ndarray, high: np.ndarray):
        """(which interval, first token, token behind the last, stretch) of intervals low .. high - 1, split where
        stretches meet."""
        full = np.flatnonzero(low < high)
        first = np.searchsorted(self.start, low[full], "right") - 1
        counts = np.searchsorted(self.start, high[full], "left") - first
        interval, stretch = np.repeat(full, counts), sequences(first, counts)
        return (
            interval,
            np.maximum(low[interval], self.start[stretch]),
            np.minimum(high[interval], self.end[stretch]),
            stretch,
        )


class _Pieces(NamedTuple):
    """Of one rank, in the order of tokens."""

    document: np.ndarray
    origin: np.ndarray  # where the document starts
    start: np.ndarray
    end: np.ndarray

    @property
    def second(self) -> np.ndarray:
        """bool: whether the piece before it is of the same document."""
        return np.append(False, self.document[1:] == self.document[:-1])[: len(self.document)]

    @property
    def behind(self) -> np.ndarray:
        """The end of the piece before in the same document, else the document's start."""
        return np.where(self.second, np.append(0, self.end[:-1])[: len(self.end)], self.origin)

    def halo(self, reach: Reach) -> tuple[np.ndarray, np.ndarray]:
        """(end of the sink, start of the halo): keys origin .. end of the sink, and start of the halo .. start of the
        piece."""
        inside = self.start - self.origin - reach.before
        start = self.origin + np.maximum(inside // reach.unit * reach.unit, 0)
        sink = -(-reach.sink // reach.unit) * reach.unit
        return np.minimum(self.origin + sink, start), start

    def needed(self, reach: Reach) -> tuple[np.ndarray, np.ndarray]:
        """Tokens low .. high - 1 that the rank must receive for a KV head, ascending, two intervals a piece. What lies
        before the first piece of a document covers what the second one needs there."""
        sink_end, halo = self.halo(reach)
        low = np.stack([self.origin, halo], axis=1)
        high = np.stack([sink_end, self.start], axis=1)
        return np.maximum(low, self.behind[:, None]).ravel(), high.ravel()


@dataclass(frozen=True, eq=False)
class DocumentPlan:
    """What one rank computes, sends and receives for one packed batch. A slot is one token of one KV head, K and V.

    Slots are ordered by the rank at the other end, then by KV heads of equal reach, KV head, token; on both sides.
    """

    size: int
    rank: int
    n_places: int  # of the rank's own documents, its tokens without a document, and filling
    borders: np.ndarray  # int64 [documents + 1] of its own documents
    place: np.ndarray  # int64 [tokens / size]: of each of its rows
    copies: np.ndarray  # int64: places of a sink that stands before in another document, too ...
    copied: np.ndarray  # int64: ... and where
    receive_places: np.ndarray  # int64 [slots to receive]
    receive_heads: np.ndarray
    send_rows: np.ndarray  # int64 [slots to send]
    send_heads: np.ndarray
    counts: np.ndarray  # int64 [size, size]: slots from each rank to each


def slot_bytes(head_dim: int, itemsize: int) -> int:
    """Bytes of one slot, K and V together."""
    return 2 * head_dim * itemsize


def plan_documents(
    of_heads: tuple[Reach, ...],
    starts: np.ndarray,
    lengths: np.ndarray,
    borders: np.ndarray,
    tokens: int,
    rank: int,
    size: int,
) -> DocumentPlan:
    """The plan of one rank; every rank makes its own, without a word to the others.

    of_heads: of `reaches`. starts, lengths: int64 of the documents. borders: of what was cut in zigzag by itself: the
    documents with their padding, or [0, tokens]. Raises ValueError for documents that overlap or do not fit, and for
    what cannot be cut so.
    """
    starts, lengths = starts[lengths != 0], lengths[lengths != 0]
    ends = starts + lengths
    if (lengths < 0).any() or (starts[1:] < ends[:-1]).any() or (len(ends) and (starts[0] < 0 or ends[-1] > tokens)):
        raise ValueError(
            f"packed documents from {starts[:8].tolist()} on of {lengths[:8].tolist()} tokens; expected one behind the "
            f"other within the {tokens} tokens of all ranks; give every rank the borders of the whole row"
        )
    cut = _Cut.make(borders, tokens, size)
    document, first, end, stretch = cut.split(starts, ends)
    owner = cut.rank[stretch]

    def pieces_of(rank: int) -> _Pieces:
        mine = owner == rank
        return _Pieces(document[mine], starts[document[mine]], first[mine], end[mine])

    kinds = {reach: np.flatnonzero([other == reach for other in of_heads]) for reach in dict.fromkeys(of_heads)}
    counts = np.zeros((size, size), dtype=np.int64)
    received, sent = [[] for _ in range(size)], []  # by the rank at the other end: (tokens or rows, KV heads)
    for receiver in range(size):
        pieces = pieces_of(receiver)
        for reach, heads in kinds.items():
            _, low, high, stretch = cut.split(*pieces.needed(reach))
            source, row = cut.rank[stretch], cut.row[stretch] + low - cut.start[stretch]
            of_source = np.bincount(source, weights=high - low, minlength=size).astype(np.int64)
            counts[:, receiver] += of_source * len(heads)
            if receiver == rank:
                for other in np.flatnonzero(of_source):
                    received[other].append(_slots(low, high - low, source == other, heads))
            elif of_source[rank]:
                sent.append(_slots(row, high - low, source == rank, heads))
    tokens_in, heads_in = _joined([slots for of_rank in received for slots in of_rank])
    rows_out, heads_out = _joined(sent)

    own_documents, own_tokens = _own_documents(pieces_of(rank), of_heads)
    at = np.full(tokens, -1, dtype=np.int64)
    order = np.arange(len(own_tokens))
    at[own_tokens[::-1]] = order[::-1]  # the first place of each token stays
    copies = np.flatnonzero(at[own_tokens] != order)
    mine = np.flatnonzero(cut.rank == rank)
    of_rows = np.empty(tokens // size, dtype=np.int64)
    long = cut.end[mine] - cut.start[mine]
    of_rows[sequences(cut.row[mine], long)] = sequences(cut.start[mine], long)
    place = at[of_rows]
    outside = np.flatnonzero(place < 0)
    place[outside] = len(own_tokens) + np.arange(len(outside))
    return DocumentPlan(
        size=size,
        rank=rank,
        n_places=-(-(len(own_tokens) + len(outside)) // PLACES) * PLACES,
        borders=own_documents,
        place=place,
        copies=copies,
        copied=at[own_tokens[copies]],
        receive_places=at[tokens_in],
        receive_heads=heads_in,
        send_rows=rows_out,
        send_heads=heads_out,
        counts=counts,
    )


def _slots(first: np.ndarray, counts: np.ndarray, chosen: np.ndarray, heads: np.ndarray):
    """(places first, first + 1, ... of the chosen stretches, for every head again; the head of each)"""
    places = sequences(first[chosen], counts[chosen])
    return np.tile(places, len(heads)), np.repeat(heads, len(places))


def _joined(parts: list) -> tuple[np.ndarray, np.ndarray]:
    none = np.zeros(0, dtype=np.int64)
    return tuple(np.concatenate([none, *column]) for column in zip(*parts)) if parts else (none, none)


def _own_documents(pieces: _Pieces, of_heads: tuple[Reach, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(borders, the token at each place) of what a rank computes: for all KV heads what one of them needs."""
    reach = Reach(max(one.before for one in of_heads), max(one.sink for one in of_heads), of_heads[0].unit)
    sink_end, halo = pieces.halo(reach)
    joined = pieces.second & (halo <= pieces.behind)
    low = np.stack([pieces.origin, np.where(joined, pieces.behind, halo)], axis=1)
    high = np.stack([np.where(joined, pieces.origin, sink_end), pieces.end], axis=1)
    lengths = (high - low).sum(1)
    of_documents = np.add.reduceat(lengths, np.flatnonzero(~joined)) if len(lengths) else np.zeros(1, dtype=np.int64)
    return np.append(0, np.cumsum(of_documents)), sequences(low.ravel(), (high - low).ravel())
