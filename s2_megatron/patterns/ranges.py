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
from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import numpy as np

from s2_megatron.patterns.checks import (
    LARGEST_OFFSET,
    LARGEST_STRIDE,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_TOKENS,
    Ranges,
    check_integer,
    check_ranges,
    check_sequence,
    check_shape,
    shown,
)
from s2_megatron.patterns.counts import covered_block_pairs, head_block_pairs, range_bounds
from s2_megatron.patterns.layer_step import choose_layer_step

DENSE: Ranges = ((None, 1),)


def _multiples(first, last, stride):
    """How many multiples of `stride` lie in [first, last]; arrays broadcast; 0 when last < first."""
    return np.maximum(np.floor_divide(last, stride) - np.floor_divide(np.asarray(first) - 1, stride), 0)


@dataclass(frozen=True)
class HeadPattern:
    """The pattern of one attention head.

    ranges: ((end in blocks or None, stride), ...), ends growing, the first stride 1; lists are taken, too. offset:
    added to the key block before the modulus. Raises ValueError for anything else, and for values that are not
    integers.
    """

    ranges: Ranges
    offset: int = 0

    def __post_init__(self):
        object.__setattr__(self, "ranges", check_ranges(self.ranges))
        offset = check_integer("offset", self.offset, -LARGEST_OFFSET, LARGEST_OFFSET, "use 0")
        object.__setattr__(self, "offset", offset)

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
        return range_bounds(self.ranges)

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
def _range_pairs(ranges: Ranges, offset: int, block_size: int, seq_length: int) -> int:
    whole, last = divmod(seq_length - 1, block_size)  # query blocks before the last one; its tokens but one
    last += 1
    below = head_block_pairs(ranges, offset, whole)
    below_last = head_block_pairs(ranges, offset, whole + 1) - below - 1
    pairs = (below - whole) * block_size**2 + whole * (block_size * (block_size + 1) // 2)
    return pairs + below_last * block_size * last + last * (last + 1) // 2


def pairs_of_rows(below, diagonal, block_size: int, seq_length: int) -> int:
    """(query, key) token pairs of a sequence from what Pattern.row_counts returns for it, or from one head's share."""
    rows = np.minimum(block_size, seq_length - block_size * np.arange(len(below), dtype=np.int64))
    return int((below * block_size * rows + diagonal * (rows * (rows + 1) // 2)).sum())


class Pattern:
    """The attention pattern of all heads of one layer. Subclasses: RangePattern, BlockMaskPattern."""

    block_size: int
    num_heads: int
    num_kv_heads: int

    def __getstate__(self) -> dict:
        """What is copied and pickled: the fields, without what was derived from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def key_blocks(self, head: int, query_block: int) -> np.ndarray:
        raise NotImplementedError

    def row_counts(self, n_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """(attended blocks below the diagonal, heads that attend the diagonal block) of the query blocks 0 ..
        n_blocks-1, summed over the query heads, int64[n_blocks] each. Raises ValueError for more blocks than a block
        mask has."""
        raise NotImplementedError

    def attended_pairs(self, seq_length: int) -> int:
        """(query, key) token pairs that are attended in a sequence of seq_length tokens, 1 or more, summed over the
        query heads."""
        raise NotImplementedError

    def density(self, seq_length: int) -> float:
        """Attended pairs over those of dense causal attention. Raises ValueError as attended_pairs."""
        seq_length = check_integer("seq_length", seq_length, 1, MOST_TOKENS, "use the number of tokens")
        return self.attended_pairs(seq_length) / (self.num_heads * seq_length * (seq_length + 1) // 2)

    def coverage(self, n_blocks: int) -> float:
        """Share of the causal (query block, key block) pairs that at least one head attends."""
        return period_coverage([self], n_blocks)

    def head_slice(self, rank: int, size: int) -> tuple[range, range]:
        """Global (query heads, KV heads) of a tensor-parallel rank; with fewer KV heads than ranks several ranks share
        one. Raises ValueError for a rank outside of 0 .. size-1, and for a size that the heads cannot be dealt to."""
        size = check_integer("size", size, 1, MOST_HEADS, "use the number of tensor-parallel ranks")
        rank = check_integer("rank", rank, 0, size - 1, f"use the number of a rank of {size}, counted from 0")
        if self.num_heads % size or (self.num_kv_heads % size and size % self.num_kv_heads):
            raise ValueError(
                f"tensor_parallel_size={size} fits neither num_heads={self.num_heads} nor "
                f"num_kv_heads={self.num_kv_heads}; it must divide the heads, and divide the KV heads or be a multiple "
                "of them"
            )
        local = self.num_heads // size
        heads = range(rank * local, (rank + 1) * local)
        ratio = self.num_heads // self.num_kv_heads
        return heads, range(heads.start // ratio, (heads.stop - 1) // ratio + 1)

    def tensor_parallel_slice(self, rank: int, size: int) -> Pattern:
        """The pattern of one tensor-parallel rank's heads. Raises ValueError as head_slice."""
        raise NotImplementedError

    def canonical(self) -> dict:
        """JSON-able and complete: equal for two patterns iff they compute the same attention."""
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class RangePattern(Pattern):
    """Ranges of distance with strides, one HeadPattern per query head (a list or tuple). Raises ValueError for what is
    no integer, and as check_shape."""

    block_size: int
    num_kv_heads: int
    heads: tuple[HeadPattern, ...]

    def __post_init__(self):
        heads = check_sequence("heads", self.heads, "a list or tuple with a HeadPattern per query head", "list them")
        for index, head in enumerate(heads):
            if not isinstance(head, HeadPattern):
                raise ValueError(
                    f"heads[{index}]={shown(head)}; expected a HeadPattern; use HeadPattern(ranges, offset)"
                )
        object.__setattr__(self, "heads", heads)
        block_size, _, num_kv_heads = check_shape(self.block_size, len(heads), self.num_kv_heads)
        object.__setattr__(self, "block_size", block_size)
        object.__setattr__(self, "num_kv_heads", num_kv_heads)

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @classmethod
    def dense(cls, block_size: int, num_heads: int, num_kv_heads: int) -> RangePattern:
        """Every head attends everything."""
        block_size, num_heads, num_kv_heads = check_shape(block_size, num_heads, num_kv_heads)
        return cls(block_size, num_kv_heads, (HeadPattern(DENSE),) * num_heads)

    @cached_property
    def is_kv_efficient(self) -> bool:
        return all(head.is_kv_efficient for head in set(self.heads))

    def key_blocks(self, head: int, query_block: int) -> np.ndarray:
        return self.heads[head].key_blocks(query_block)

    def row_counts(self, n_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        below = np.zeros(n_blocks, dtype=np.int64)
        for head, count in Counter(self.heads).items():
            below += count * (head.key_block_counts(n_blocks) - 1)
        return below, np.full(n_blocks, self.num_heads, dtype=np.int64)

    def attended_pairs(self, seq_length: int) -> int:
        seq_length = check_integer("seq_length", seq_length, 1, MOST_TOKENS, "use the number of tokens")
        counts = Counter(head.canonical for head in self.heads)
        return sum(count * _range_pairs(*head, self.block_size, seq_length) for head, count in counts.items())

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


def dense_kv_heads(dense_heads, num_kv_heads: int) -> frozenset[int]:
    """KV heads that are dense. dense_heads: a list of KV heads, {"last": n} (the paper's), {"spread": n} (evenly, hence
    over TP ranks), or n alone, which means the same. Raises ValueError for anything else, and for heads that do not
    exist."""
    if not isinstance(dense_heads, dict | list | tuple | set | frozenset | range):
        fix = "use a list of KV heads, {'last': n}, {'spread': n} or n"
        dense_heads = {"spread": check_integer("dense_heads", dense_heads, 0, num_kv_heads, fix)}
    if not isinstance(dense_heads, dict):
        fix = f"use KV heads from 0 to {num_kv_heads - 1}"
        return frozenset(
            check_integer(f"dense_heads[{index}]", head, 0, num_kv_heads - 1, fix)
            for index, head in enumerate(dense_heads)
        )
    kind = next(iter(dense_heads), None)
    if len(dense_heads) != 1 or kind not in ("last", "spread"):
        raise ValueError(
            f"dense_heads={shown(dense_heads)}; expected {{'last': n}} or {{'spread': n}}; use one of them"
        )
    fix = f"use 0 to {num_kv_heads}, the number of KV heads"
    count = check_integer(f"dense_heads[{kind!r}]", dense_heads[kind], 0, num_kv_heads, fix)
    if kind == "last":
        return frozenset(range(num_kv_heads - count, num_kv_heads))
    return frozenset(index * num_kv_heads // count for index in range(count))


def _checked_step(name: str, value, words: tuple[str, ...]):
    if isinstance(value, str):
        if value not in words:
            raise ValueError(
                f"{name}={value!r}; expected {', '.join(map(repr, words))} or a number of blocks; use {words[0]!r}"
            )
        return value
    return check_integer(name, value, 0, LARGEST_STRIDE, f"use {words[0]!r}, or a number of blocks")


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
    """The pattern of one layer, of offsets base_offset + p * head_step + layer_index * layer_step.

    ranges: ((end in blocks or None, stride), ...), see HeadPattern. p is the KV head (slide "kv") or the query head
    ("query"). head_step "paper" is max(1, s_n // num_heads), "auto" max(1, s_n // pattern heads). layer_index counts
    the layers of one named spec from 0. layer_step "auto" is 0 when the heads of one layer reach every residue of the
    last stride, otherwise the step with which consecutive layers reach them soonest. dense_heads: see dense_kv_heads.
    Raises ValueError for an argument of another type or out of range, and for settings that contradict each other.
    """
    if not isinstance(slide, str) or slide not in ("kv", "query"):
        raise ValueError(f"slide={shown(slide)}; expected 'kv' or 'query'; use 'kv'")
    block_size, num_heads, num_kv_heads = check_shape(block_size, num_heads, num_kv_heads)
    ranges = check_ranges(ranges)
    head_step = _checked_step("head_step", head_step, ("auto", "paper"))
    layer_step = _checked_step("layer_step", layer_step, ("auto",))
    base_offset = check_integer("base_offset", base_offset, -LARGEST_STRIDE, LARGEST_STRIDE, "use 0")
    layer_index = check_integer("layer_index", layer_index, 0, MOST_LAYERS, "count the layers of a spec from 0")
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
        layer_step = 0 if covered else choose_layer_step(stride, residues, pattern_heads)
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
    heads = {head for pattern in patterns if isinstance(pattern, RangePattern) for head in pattern.heads}
    if any(head.is_dense for head in heads):
        return 1.0
    masks = [table for pattern in patterns if not isinstance(pattern, RangePattern) for table in pattern.tables]
    covered = covered_block_pairs(((head.ranges, head.offset) for head in heads), masks, n_blocks)
    return covered / (n_blocks * (n_blocks + 1) // 2)
