"""The offset from layer to layer with which the layers of a spec cover the context together."""

from __future__ import annotations

MOST_LAYER_STEP_WORK = 2**20  # layers of 4096 blocks of stride, when a layer step is looked for


def choose_layer_step(stride: int, residues: set[int], pattern_heads: int) -> int:
    """The layer step whose consecutive layers together reach every residue soonest; `pattern_heads` where several do.
    For strides of thousands of blocks the search ends after MOST_LAYER_STEP_WORK, with the best step up to there."""
    every, first = (1 << stride) - 1, sum(1 << residue for residue in residues)
    fewest = -(-stride // len(residues))  # layers that any step needs
    best, best_layers, work = pattern_heads, stride + 1, 0
    for step in [pattern_heads, *range(1, stride)]:
        seen = moved = first
        layers, turn = 1, step % stride
        while seen != every and layers < best_layers and work <= MOST_LAYER_STEP_WORK:
            moved = (moved << turn | moved >> stride - turn) & every
            seen, layers, work = seen | moved, layers + 1, work + 1 + stride // 4096
        if seen == every and layers < best_layers:
            best, best_layers = step, layers
        if best_layers == fewest or work > MOST_LAYER_STEP_WORK:
            break
    return best
