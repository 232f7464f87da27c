"""Which key block every attention head attends: the sparsity patterns of S2-Attention (arXiv 2407.17678), in NumPy
only.

Block indices count from the start of the sequence (or of the packed document). For a query block q and a key block k <=
q with distance d = q - k, a head's pattern is a list of ranges ((end_1, s_1), ..., (end_n, s_n)) and one offset. Range
i holds end_(i-1) <= d < end_i (end_0 = 0, the last end may be None: no limit). Block k is attended iff d lies in a
range and (k + offset) mod s_i == 0. s_1 is 1, so the diagonal block is always attended; inside it a token sees the
tokens up to itself.

Heads, layers and blocks are 0-based and global, i.e. before any tensor- or context-parallel slicing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

Ranges = tuple[tuple[int | None, int], ...]
DENSE: Ranges = ((None, 1),)
LARGEST_STRIDE = 2**24  # blocks; kernels compute with 32-bit integers


def _multiples(first, last, stride):
    """How many multiples of `stride` lie in [first, last]; arrays broadcast; 0 when last < first."""
    return np.maximum(np.floor_divide(last, stride) - np.floor_divide(np.asarray(first) - 1, stride), 0)


@dataclass(frozen=True)
class HeadPattern:
    """The pattern of one attention head.

    ranges: ((end in blocks or None, stride), ...), ends growing, the first stride 1. offset: added to the key block
    before the modulus. Raises ValueError when the ranges are not of that form.
    """

    ranges: Ranges
    offset: int = 0

    def __post_init__(self):
        previous = 0
        if not self.ranges:
            raise ValueError("ranges is empty; give at least one (end, stride), e.g. ((None, 1),) for dense attention")
        for position, (end, stride) in enumerate(self.ranges):
            if not 1 <= stride <= LARGEST_STRIDE:
                raise ValueError(
                    f"ranges={self.ranges}: stride {stride} at position {position}; expected 1 or more, {LARGEST_STRIDE} at most"
                )
            if end is None and position != len(self.ranges) - 1:
                raise ValueError(
                    f"ranges={self.ranges}: only the last end may be None (no limit), not the one at position {position}"
                )
            if end is not None and end <= previous:
                raise ValueError(
                    f"ranges={self.ranges}: end {end} at position {position}; ends must grow, expected {previous + 1} or more"
                )
            previous = end
        if self.ranges[0][1] != 1:
            raise ValueError(
                f"ranges={self.ranges}: the first stride is {self.ranges[0][1]}; expected 1, for a token must see its own block"
            )

    @property
    def is_dense(self) -> bool:
        return self.canonical[0] == DENSE

    @cached_property
    def is_kv_efficient(self) -> bool:
        """Every stride divides the next one: a key block once dropped is never attended again (paper, section 3.3)."""
        return all(wide % narrow == 0 for (_, narrow), (_, wide) in zip(self.ranges, self.ranges[1:]))

    @cached_property
    def canonical(self) -> tuple[Ranges, int]:
        """(ranges, offset) that are equal for two heads iff they attend the same blocks whatever the length."""
        merged: list[tuple[int | None, int]] = []
        for end, stride in self.ranges:
            if merged and merged[-1][1] == stride:
                merged.pop()
            merged.append((end, stride))
        return tuple(merged), self.offset % math.lcm(*(stride for _, stride in merged))

    def bounds(self) -> list[tuple[int, int | None, int]]:
        """[(first distance, distance limit or None, stride)] of every range."""
        starts = [0, *(end for end, _ in self.ranges[:-1])]
        return [(start, end, stride) for start, (end, stride) in zip(starts, self.ranges)]

    def attends(self, query_block: int, key_block: int) -> bool:
        distance = query_block - key_block
        for start, end, stride in self.bounds():
            if start <= distance and (end is None or distance < end):
                return (key_block + self.offset) % stride == 0
        return False

    def key_blocks(self, query_block: int) -> np.ndarray:
        """Key blocks that a query block attends, ascending, int64."""
        pieces = []
        for start, end, stride in self.bounds():
            low = 0 if end is None else max(0, query_block - end + 1)
            first = low + (-(low + self.offset)) % stride
            pieces.append(np.arange(first, query_block - start + 1, stride, dtype=np.int64))
        return np.concatenate(pieces[::-1])

    def key_block_counts(self, n_blocks: int) -> np.ndarray:
        """Number of attended key blocks of the query blocks 0 .. n_blocks-1, int64[n_blocks]."""
        query = np.arange(n_blocks, dtype=np.int64)
        total = np.zeros(n_blocks, dtype=np.int64)
        for start, end, stride in self.bounds():
            low = np.zeros_like(query) if end is None else np.maximum(0, query - end + 1)
            total += np.where(query >= start, _multiples(low + self.offset, query - start + self.offset, stride), 0)
        return total


@lru_cache(maxsize=4096)
def _range_pairs(head: HeadPattern, block_size: int, seq_length: int) -> int:
    return pairs_from_counts(head.key_block_counts(-(-seq_length // block_size)), True, block_size, seq_length)


def pairs_from_counts(counts, diagonal, block_size: int, seq_length: int) -> int:
    """(query, key) token pairs of one head. counts: attended blocks of each query block; diagonal: is the diagonal
    block among them."""
    rows = np.minimum(block_size, seq_length - block_size * np.arange(len(counts), dtype=np.int64))
    below = counts - np.asarray(diagonal, dtype=np.int64)
    return int((below * block_size * rows + np.where(diagonal, rows * (rows + 1) // 2, 0)).sum())


class Pattern:
    """The attention pattern of all heads of one layer. Subclasses: RangePattern, BlockMaskPattern."""

    block_size: int
    num_heads: int
    num_kv_heads: int

    def _check_heads(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "every KV head needs the same number of query heads"
            )
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size}; expected a power of two, e.g. 64")

    def key_blocks(self, head: int, query_block: int) -> np.ndarray:
        raise NotImplementedError

    def attended_pairs(self, seq_length: int) -> int:
        """(query, key) token pairs that are attended in a sequence, summed over the query heads."""
        raise NotImplementedError

    def density(self, seq_length: int) -> float:
        """Attended pairs over those of dense causal attention."""
        return self.attended_pairs(seq_length) / (self.num_heads * seq_length * (seq_length + 1) // 2)

    def coverage(self, n_blocks: int) -> float:
        """Share of the causal (query block, key block) pairs that at least one head attends."""
        return period_coverage([self], n_blocks)

    def head_slice(self, rank: int, size: int) -> tuple[range, range]:
        """Global (query heads, KV heads) of a tensor-parallel rank; with fewer KV heads than ranks several ranks share
        one."""
        if self.num_heads % size or (self.num_kv_heads % size and size % self.num_kv_heads):
            raise ValueError(
                f"tensor_parallel_size={size} fits neither num_heads={self.num_heads} nor num_kv_heads={self.num_kv_heads}; "
                "it must divide the heads, and divide the KV heads or be a multiple of them"
            )
        local = self.num_heads // size
        heads = range(rank * local, (rank + 1) * local)
        ratio = self.num_heads // self.num_kv_heads
        return heads, range(heads.start // ratio, (heads.stop - 1) // ratio + 1)

    def tensor_parallel_slice(self, rank: int, size: int) -> Pattern:
        raise NotImplementedError

    def canonical(self) -> dict:
        """JSON-able and complete: equal for two patterns iff they compute the same attention."""
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class RangePattern(Pattern):
    """Ranges of distance with strides, one HeadPattern per query head."""

    block_size: int
    num_kv_heads: int
    heads: tuple[HeadPattern, ...]

    def __post_init__(self):
        self._check_heads()

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @classmethod
    def dense(cls, block_size: int, num_heads: int, num_kv_heads: int) -> RangePattern:
        return cls(block_size, num_kv_heads, (HeadPattern(DENSE),) * num_heads)

    @cached_property
    def is_kv_efficient(self) -> bool:
        return all(head.is_kv_efficient for head in set(self.heads))

    def key_blocks(self, head: int, query_block: int) -> np.ndarray:
        return self.heads[head].key_blocks(query_block)

    def attended_pairs(self, seq_length: int) -> int:
        return sum(_range_pairs(head, self.block_size, seq_length) for head in self.heads)

    def tensor_parallel_slice(self, rank: int, size: int) -> RangePattern:
        heads, kv_heads = self.head_slice(rank, size)
        return RangePattern(self.block_size, len(kv_heads), self.heads[heads.start : heads.stop])

    def canonical(self) -> dict:
        groups: dict[Ranges, dict] = {}
        for index, head in enumerate(self.heads):
            ranges, offset = head.canonical
            group = groups.setdefault(ranges, {"ranges": [list(item) for item in ranges], "heads": [], "offsets": []})
            group["heads"].append(index)
            group["offsets"].append(offset)
        return {
            "kind": "ranges",
            "block_size": self.block_size,
            "kv_heads": self.num_kv_heads,
            "groups": list(groups.values()),
        }

    def describe(self) -> str:
        sparse = [head for head in self.heads if not head.is_dense]
        if not sparse:
            return "dense"
        parts = []
        for start, end, stride in sparse[0].bounds():
            span = f"{start}.." if end is None else f"{start}..{end - 1}"
            parts.append(f"local {end}" if stride == 1 and start == 0 and end is not None else f"stride {stride}")
            if len(sparse[0].ranges) > 2:
                parts[-1] += f" ({span})"
        stride = sparse[0].ranges[-1][1]
        text = " + ".join(parts)
        if stride > 1:
            text += f", {len({head.offset % stride for head in sparse})} offsets"
        dense = (len(self.heads) - len(sparse)) * self.num_kv_heads // self.num_heads
        return text + (f", {dense} dense KV heads" if dense else "")


def _choose_layer_step(stride: int, residues: set[int], pattern_heads: int) -> int:
    """The layer step whose consecutive layers together reach every residue soonest; `pattern_heads` where several
    do."""

    def layers_needed(step):
        seen: set[int] = set()
        for layer in range(stride):
            seen |= {(residue + layer * step) % stride for residue in residues}
            if len(seen) == stride:
                return layer + 1
        return stride + 1

    return min([pattern_heads, *range(1, stride)], key=layers_needed)


def dense_kv_heads(dense_heads, num_kv_heads: int) -> frozenset[int]:
    """KV heads that are dense. dense_heads: a list of KV heads, {"last": n} (the paper's) or {"spread": n} (evenly,
    hence over TP ranks)."""
    if isinstance(dense_heads, dict):
        ((kind, count),) = dense_heads.items()
        if not 0 <= count <= num_kv_heads:
            raise ValueError(f"dense_heads={{{kind}: {count}}}; expected 0 to {num_kv_heads}, the number of KV heads")
        if kind == "last":
            return frozenset(range(num_kv_heads - count, num_kv_heads))
        if kind == "spread":
            return frozenset(index * num_kv_heads // count for index in range(count))
        raise ValueError(f"dense_heads has the key {kind!r}; expected 'last' or 'spread'")
    wrong = [head for head in dense_heads if not 0 <= head < num_kv_heads]
    if wrong:
        raise ValueError(
            f"dense_heads={list(dense_heads)}: {wrong[0]} is not a KV head; expected 0 to {num_kv_heads - 1}"
        )
    return frozenset(dense_heads)


def make_range_pattern(
    *,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    ranges: Ranges,
    slide: str = "kv",
    head_step: str | int = "auto",
    base_offset: int = 0,
    layer_index: int = 0,
    layer_step: str | int = "auto",
    dense_heads=(),
) -> RangePattern:
    """The pattern of one layer: offset = base_offset + p * head_step + layer_index * layer_step, the same in all ranges
    of a head.

    p is the KV head (slide "kv") or the query head ("query"). head_step "paper" is max(1, s_n // num_heads), "auto"
    max(1, s_n // pattern heads). layer_index counts the layers of one named spec. layer_step "auto" is 0 when the heads
    of one layer reach every residue of the last stride, otherwise the step with which consecutive layers reach them
    soonest.
    Raises ValueError on settings that contradict each other.
    """
    if slide not in ("kv", "query"):
        raise ValueError(f"slide={slide!r}; expected 'kv' or 'query'")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    HeadPattern(ranges)  # refuses ranges of another form
    stride = ranges[-1][1]
    pattern_heads = num_kv_heads if slide == "kv" else num_heads
    ratio = num_heads // num_kv_heads
    if head_step == "paper":
        head_step = max(1, stride // num_heads)
    elif head_step == "auto":
        head_step = max(1, stride // pattern_heads)
    dense = dense_kv_heads(dense_heads, num_kv_heads)
    per_pattern_head = 1 if slide == "kv" else ratio
    if layer_step == "auto":
        residues = {p * head_step % stride for p in range(pattern_heads) if p // per_pattern_head not in dense}
        covered = not residues or len(residues) == stride
        layer_step = 0 if covered else _choose_layer_step(stride, residues, pattern_heads)
    sparse = {
        p: HeadPattern(ranges, base_offset + p * head_step + layer_index * layer_step) for p in range(pattern_heads)
    }
    heads = tuple(
        HeadPattern(DENSE) if h // ratio in dense else sparse[h // ratio if slide == "kv" else h]
        for h in range(num_heads)
    )
    return RangePattern(block_size, num_kv_heads, heads)


def period_coverage(patterns, n_blocks: int) -> float:
    """Share of the causal (query block, key block) pairs that at least one head of at least one of the layers' patterns
    attends."""
    members: dict[Ranges, list[np.ndarray]] = {}
    others = [pattern for pattern in patterns if not isinstance(pattern, RangePattern)]
    blocks = np.arange(n_blocks)
    for head in {head for pattern in patterns if isinstance(pattern, RangePattern) for head in pattern.heads}:
        if head.is_dense:
            return 1.0
        lists = members.setdefault(head.ranges, [np.zeros(n_blocks, dtype=bool) for _ in head.ranges])
        for seen, (_, stride) in zip(lists, head.ranges):
            seen |= (blocks + head.offset) % stride == 0
    total = 0
    for query in range(n_blocks):
        row = np.zeros(query + 1, dtype=bool)
        for ranges, lists in members.items():
            for seen, (start, end, _) in zip(lists, HeadPattern(ranges).bounds()):
                span = slice(0 if end is None else max(0, query - end + 1), max(0, query - start + 1))
                row[span] |= seen[span]
        for pattern in others:
            for indptr, indices in pattern.tables:
                if query < pattern.num_blocks:
                    row[indices[indptr[query] : indptr[query + 1]]] = True
        total += int(row.sum())
    return total / (n_blocks * (n_blocks + 1) // 2)
