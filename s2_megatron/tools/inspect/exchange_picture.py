"""Which key blocks the ranks of context parallelism hold, receive and never read, as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.context_parallel.plan import check_block_count, make_plan
from s2_megatron.tools.inspect.pictures import MAX_HEADS, shown_layers
from s2_megatron.tools.outputs import write_figure


def draw_exchange(sparsity: ResolvedSparsity, file: Path, size: int, *, layer: int | None = None) -> None:
    """Writes a PNG: for the first KV heads of a layer, which key blocks each context-parallel rank holds, receives, and
    never reads.

    size: ranks. layer: default the first S2 layer. Raises ValueError for a sequence that cannot be cut, and without an
    S2 layer.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    layer = shown_layers(sparsity)[0] if layer is None else layer
    pattern = sparsity.layers[layer].pattern
    if pattern is None:
        raise ValueError(
            f"--layers {layer}: layer {layer} is dense; expected an S2 layer, for there is nothing to draw"
        )
    n_blocks = check_block_count(sparsity.seq_length, size, sparsity.block_size)
    plans = [make_plan(pattern, rank, size, n_blocks) for rank in range(size)]
    shown = min(pattern.num_kv_heads, MAX_HEADS)
    colours, line = ListedColormap(["#e9ebef", "#2f6db3", "#e58a2e"]), {"edgecolors": "white", "linewidth": 0.4}
    figure, axes = pyplot.subplots(
        shown, 1, figsize=(9.5, (0.26 * size + 0.55) * shown + 0.7), squeeze=False, layout="constrained"
    )
    for head, axis in enumerate(axes[:, 0]):
        grid = np.stack(
            [np.where(plan.local_slot[head] >= 0, 1, np.where(plan.remote_slot[head] >= 0, 2, 0)) for plan in plans]
        )
        axis.pcolormesh(
            np.arange(n_blocks + 1),
            np.arange(size + 1),
            grid,
            cmap=colours,
            vmin=0,
            vmax=2,
            **(line if n_blocks <= 256 else {}),
        )
        share = (grid == 2).sum() / (grid != 1).sum()
        axis.set_title(
            f"layer {layer}, KV head {head}: {share:.0%} of the remote blocks travel", fontsize=10, loc="left"
        )
        axis.set_yticks(np.arange(size) + 0.5, [f"rank {rank}" for rank in range(size)], fontsize=8)
        axis.set_xticks([])
        axis.invert_yaxis()
        axis.spines[:].set_visible(False)
    axes[-1, 0].set_xlabel(f"key block, {n_blocks} in the sequence", fontsize=9)
    names = ("never read", "its own (two chunks, zigzag)", "received")
    patches = [Patch(facecolor=colours(index), label=name) for index, name in enumerate(names)]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    write_figure(figure, file, dpi=110)
    pyplot.close(figure)
