"""The patterns of a layer's heads, by ranges of distance with strides: the sparsity of S2-Attention (arXiv 2407.17678),
in NumPy only. head.py has the rule of one head.

Heads, layers and blocks are 0-based and global, i.e. before any tensor- or context-parallel slicing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from s2_megatron.patterns.checks import (
    LARGEST_STRIDE,
    LARGEST_WINDOW,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_TOKENS,
    Ranges,
    check_integer,
    check_ranges,
    check_sequence,
    check_shape,
    check_tokens,
    shown,
)
from s2_megatron.patterns.counts import covered_block_pairs
from s2_megatron.patterns.head import DENSE, HeadPattern, head_pairs
from s2_megatron.patterns.layer_step import choose_layer_step
from s2_megatron.patterns.tokens import joined, row_terms


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

    def row_terms(self, n_blocks: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """How many keys each query token attends, summed over the query heads, as a sum of products: [(weights int64
        [n_blocks], keys int64 [block_size])], where row r of query block q attends the sum of weights[q] * keys[r]
        keys. Raises ValueError for more blocks than a block mask has."""
        raise NotImplementedError

    def nonzeros(self, n_blocks: int) -> int:
        """(query block, key block) pairs of which at least one token pair is attended, summed over the query heads."""
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
        for index, head in enumerate(heads):
            first = heads[(first_index := index // (len(heads) // num_kv_heads) * (len(heads) // num_kv_heads))]
            if head.by_token and head.block_size != block_size:
                raise ValueError(
                    f"heads[{index}] has block_size={head.block_size}; expected the pattern's, {block_size}; use that"
                )
            if (head.window, head.sink_tokens) != (first.window, first.sink_tokens):
                raise ValueError(
                    f"heads[{index}] has window={head.window} and sink_tokens={head.sink_tokens}, heads[{first_index}] "
                    f"window={first.window} and sink_tokens={first.sink_tokens}; expected the same for the query heads "
                    "of one KV head; use a window and a sink for each KV head"
                )
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

    def row_terms(self, n_blocks: int) -> list[tuple[np.ndarray, np.ndarray]]:
        terms = []
        for head, count in Counter(self.heads).items():
            terms += [(count * weights, keys) for weights, keys in row_terms(head, self.block_size, n_blocks)]
        return joined(terms)

    def nonzeros(self, n_blocks: int) -> int:
        return sum(count * int(head.key_block_counts(n_blocks).sum()) for head, count in Counter(self.heads).items())

    def attended_pairs(self, seq_length: int) -> int:
        seq_length = check_integer("seq_length", seq_length, 1, MOST_TOKENS, "use the number of tokens")
        counts = Counter(HeadPattern(*head.canonical) for head in self.heads)
        return sum(count * head_pairs(head, self.block_size, seq_length) for head, count in counts.items())

    def tensor_parallel_slice(self, rank: int, size: int) -> RangePattern:
        heads, kv_heads = self.head_slice(rank, size)
        return RangePattern(self.block_size, len(kv_heads), self.heads[heads.start : heads.stop])

    def canonical(self) -> dict:
        groups: dict[tuple, dict] = {}
        for index, head in enumerate(self.heads):
            ranges, offset, window, sink_tokens, _ = head.canonical
            rule: dict = {"ranges": [list(item) for item in ranges]}
            if window is not None:
                rule["window"] = window
            if sink_tokens:
                rule["sink_tokens"] = sink_tokens
            group = groups.setdefault((ranges, window, sink_tokens), rule | {"heads": [], "offsets": []})
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
        head = sparse[0]
        parts = [] if head.window is None else [f"window {_between(head.window for head in sparse)}"]
        for start, end, stride in head.bounds()[len(parts) :]:
            span = f"{start}.." if end is None else f"{start}..{end - 1}"
            parts.append(f"local {end}" if stride == 1 and start == 0 and end is not None else f"stride {stride}")
            if len(head.ranges) > (2 if head.window is None else 1):
                parts[-1] += f" ({span})"
        if head.sink_tokens:
            parts.append(f"sink {_between(head.sink_tokens for head in sparse)}")
        text = " + ".join(parts)
        stride = head.bounds()[-1][2]
        if stride > 1:
            text += f", {len({head.offset % stride for head in sparse})} offsets"
        dense = (len(self.heads) - len(sparse)) * self.num_kv_heads // self.num_heads
        return text + (f", {dense} dense KV heads" if dense else "")


def _between(values) -> str:
    low, high = min(values := sorted(values)), values[-1]
    return f"{low}" if low == high else f"{low} to {high}"


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


def _checked_windows(window, num_kv_heads: int) -> tuple:
    """One window, or None, for each KV head."""
    if not isinstance(window, list | tuple):
        return check_tokens(window, 0, 1)[:1] * num_kv_heads
    if len(window) != num_kv_heads:
        raise ValueError(
            f"window={shown(window)} has {len(window)} entries; expected one number, or one for each of the "
            f"{num_kv_heads} KV heads"
        )
    fix = "use a number of tokens for each KV head"
    return tuple(check_integer("window", one, 1, LARGEST_WINDOW, fix) for one in window)


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
    window: int | list[int] | tuple[int, ...] | None = None,
    sink_tokens: int = 0,
) -> RangePattern:
    """The pattern of one layer, of offsets base_offset + p * head_step + layer_index * layer_step.

    ranges: ((end in blocks or None, stride), ...), see HeadPattern. p is the KV head (slide "kv") or the query head
    ("query"). head_step "paper" is max(1, s_n // num_heads), "auto" max(1, s_n // pattern heads). layer_index counts
    the layers of one named spec from 0. layer_step "auto" is 0 when the heads of one layer reach every residue of the
    last stride, otherwise the step with which consecutive layers reach them soonest. dense_heads: see dense_kv_heads.
    window, sink_tokens: see HeadPattern; a list of windows has one for every KV head. With a window `ranges` may be
    empty: ().
    Raises ValueError for an argument of another type or out of range, and for settings that contradict each other.
    """
    if not isinstance(slide, str) or slide not in ("kv", "query"):
        raise ValueError(f"slide={shown(slide)}; expected 'kv' or 'query'; use 'kv'")
    block_size, num_heads, num_kv_heads = check_shape(block_size, num_heads, num_kv_heads)
    windows = _checked_windows(window, num_kv_heads)
    ranges = check_ranges(ranges, beside_window=window is not None)
    _, sink_tokens, _ = check_tokens(None, sink_tokens, block_size)
    head_step = _checked_step("head_step", head_step, ("auto", "paper"))
    layer_step = _checked_step("layer_step", layer_step, ("auto",))
    base_offset = check_integer("base_offset", base_offset, -LARGEST_STRIDE, LARGEST_STRIDE, "use 0")
    layer_index = check_integer("layer_index", layer_index, 0, MOST_LAYERS, "count the layers of a spec from 0")
    stride = ranges[-1][1] if ranges else 1
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
    size = block_size if sink_tokens or window is not None else None
    sparse = {
        p: HeadPattern(
            ranges,
            base_offset + p * head_step + layer_index * layer_step,
            windows[p // per_pattern_head],
            sink_tokens,
            size,
        )
        for p in range(pattern_heads)
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
    sink = max((head.sink_blocks for head in heads), default=0)
    covered = covered_block_pairs(((head.touched_bounds(), head.offset) for head in heads), masks, n_blocks, sink)
    return covered / (n_blocks * (n_blocks + 1) // 2)
