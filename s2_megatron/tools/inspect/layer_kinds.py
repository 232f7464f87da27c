"""What the layers of one kind see: density, what lies beyond the window, coverage, the keys and values that generation
has to keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from s2_megatron.config.sparsity import ResolvedSparsity, joined_layers
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import Pattern


@dataclass(frozen=True)
class LayerKind:
    """The layers of one spec; numbers are those of its first layer, tokens those of the sequence's last query.

    layers: their names. window: tokens that every head sees without a gap. head_beyond: tokens that a head sees beyond
    the window, the mean over the heads; all_beyond: that at least one head sees. cache_tokens: whose keys and values a
    KV head keeps at the end of the context, the mean over the KV heads, since a later query may attend them.
    """

    spec: str
    kind: str
    layers: str
    pattern: str
    density: float
    coverage: float
    window: int
    head_beyond: float
    all_beyond: int
    cache_tokens: float


def head_groups(pattern: Pattern) -> list[list[int]]:
    """The query heads, those that attend the same blocks together."""
    groups: dict = {}
    for head in range(pattern.num_heads):
        same = pattern.table_of(head) if isinstance(pattern, BlockMaskPattern) else pattern.heads[head].canonical
        groups.setdefault(same, []).append(head)
    return list(groups.values())


def window_tokens(pattern: Pattern, n_blocks: int) -> int:
    """Tokens up to the last query of so many blocks that every head shows it without a gap, by whatever rule."""
    block = pattern.block_size
    least = n_blocks * block
    for heads in head_groups(pattern):
        gaps = np.flatnonzero(tokens_beyond(pattern, heads[0], n_blocks, 0)[::-1] < block)
        run = (int(gaps[0]) if len(gaps) else n_blocks) * block
        if not isinstance(pattern, BlockMaskPattern):
            run = max(run, pattern.heads[heads[0]].window or 0)
        least = min(least, run)
    return least


def kept_blocks(pattern: Pattern, n_blocks: int) -> np.ndarray:
    """bool[KV heads, n_blocks]: the key blocks that a query of the last block, or a later one, attends in a query head
    of the KV head's group. A block mask has no later queries: those of its last block count."""
    kept = np.zeros((pattern.num_kv_heads, n_blocks), dtype=bool)
    ratio = pattern.num_heads // pattern.num_kv_heads
    distance, keys = n_blocks - 1 - np.arange(n_blocks), np.arange(n_blocks)
    for heads in head_groups(pattern):
        if isinstance(pattern, BlockMaskPattern):
            row = np.zeros(n_blocks, dtype=bool)
            row[pattern.key_blocks(heads[0], n_blocks - 1)] = True
        else:
            head = pattern.heads[heads[0]]
            row = np.zeros(n_blocks, dtype=bool)
            row[: head.sink_blocks] = True
            for _, end, stride in head.touched_bounds():
                residue = (keys + head.offset) % stride == 0
                row |= residue if end is None else residue & (distance < end)
        for group in {head // ratio for head in heads}:
            kept[group] |= row
    return kept


def tokens_beyond(pattern: Pattern, head: int, n_blocks: int, window: int) -> np.ndarray:
    """int64[n_blocks]: how many tokens of each key block a head shows the last query beyond a window of so many."""
    block, seen = pattern.block_size, np.zeros(n_blocks, dtype=np.int64)
    keys, distance = np.arange(n_blocks), n_blocks - 1 - np.arange(n_blocks)
    if isinstance(pattern, BlockMaskPattern) or not pattern.heads[head].by_token:
        seen[pattern.key_blocks(head, n_blocks - 1)] = block
    else:
        rule = pattern.heads[head]
        for start, end, stride in rule.bounds():
            inside = (distance >= start) & (distance < (n_blocks if end is None else end))
            seen[inside & ((keys + rule.offset) % stride == 0)] = block
        # The sink has the first tokens of its block, the window the last ones: perhaps of the same block.
        in_part = np.clip(rule.sink_tokens - keys * block, 0, block)
        in_part += np.clip((rule.window or 0) - distance * block, 0, block)
        seen = np.maximum(seen, np.minimum(in_part, block))
    return np.maximum(seen - np.clip(window - distance * block, 0, block), 0)


def layer_kinds(sparsity: ResolvedSparsity) -> list[LayerKind]:
    """One entry per spec, in the order of their first layers."""
    found = []
    for spec in dict.fromkeys(layer.spec for layer in sparsity.all_layers):
        names = [
            str(index) if index < len(sparsity.layers) else f"mtp {index - len(sparsity.layers)}"
            for index, layer in enumerate(sparsity.all_layers)
            if layer.spec == spec
        ]
        pattern = next(layer.pattern for layer in sparsity.all_layers if layer.spec == spec)
        length, block, n_blocks = sparsity.seq_length, sparsity.block_size, sparsity.n_blocks
        if pattern is None:
            found.append(
                LayerKind(spec, "dense", joined_layers(names), "dense", 1.0, 1.0, length, 0.0, 0, float(length))
            )
            continue
        window = window_tokens(pattern, n_blocks)
        beyond, union = [], np.zeros(n_blocks, dtype=np.int64)
        for heads in head_groups(pattern):
            seen = tokens_beyond(pattern, heads[0], n_blocks, window)
            union = np.maximum(union, seen)
            beyond += [seen.sum()] * len(heads)
        kept = kept_blocks(pattern, n_blocks).sum(1)
        found.append(
            LayerKind(
                spec,
                "s2",
                joined_layers(names),
                pattern.describe(),
                pattern.density(length),
                pattern.coverage(n_blocks),
                min(window, length),
                float(np.mean(beyond)),
                int(union.sum()),
                float(np.minimum(kept * block, length).mean()),
            )
        )
    return found
