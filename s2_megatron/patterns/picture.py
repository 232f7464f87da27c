"""A picture of patterns: which share of a layer's heads attends each key block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from s2_megatron.patterns.ranges import Pattern

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PATTERNS = 4
MOST_BLOCKS = 48


def attended_share(pattern: Pattern, n_blocks: int) -> np.ndarray:
    """float64 [n_blocks query blocks, n_blocks key blocks]: the share of the query heads that attend."""
    share = np.zeros((n_blocks, n_blocks))
    for head in range(pattern.num_heads):
        for query in range(n_blocks):
            share[query, pattern.key_blocks(head, query)] += 1 / pattern.num_heads
    return share


def draw_patterns(patterns: Sequence[tuple[str, Pattern]], n_blocks: int) -> Figure:
    """One panel for each of the first patterns, over the first blocks of the sequence.

    patterns: (title, pattern), one at least. n_blocks: of the sequence. The figure belongs to no window and no pyplot.
    """
    from matplotlib.figure import Figure

    shown, n_blocks = patterns[:MOST_PATTERNS], min(n_blocks, MOST_BLOCKS)
    figure = Figure(figsize=(2.6 * len(shown), 2.9), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False)
    for axis, (title, pattern) in zip(axes.flat, shown):
        share = np.ma.masked_equal(attended_share(pattern, n_blocks), 0)
        axis.imshow(share, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(title, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0, 0].set_ylabel(f"query block (first {n_blocks})", fontsize=8)
    return figure
