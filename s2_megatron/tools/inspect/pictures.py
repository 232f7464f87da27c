"""The first blocks of the S2 layers as a picture: a row per layer, a column per head, then the heads and the layers
together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.patterns.ranges import Pattern, RangePattern
from s2_megatron.tools.outputs import write_figure

FUTURE, SKIPPED, LOCAL = 0, 1, 2  # what a cell of the picture is; LOCAL + i: attended in range i of the pattern
COLOURS = ["#ffffff", "#e9ebef", "#2f6db3", "#e58a2e", "#c0392b", "#7d3c98", "#1e8449"]
MAX_ROWS, MAX_HEADS = 3, 4
MOST_DRAWN = 512  # blocks


def block_grid(pattern: Pattern, heads: Sequence[int], n_blocks: int) -> np.ndarray:
    """What at least one of the query heads attends, uint8[n_blocks query blocks, n_blocks key blocks].

    FUTURE, SKIPPED, or LOCAL + the index of the range of distances in which the block is attended (0 for block masks).
    """
    grid = np.full((n_blocks, n_blocks), FUTURE, dtype=np.uint8)
    for query in range(n_blocks):
        grid[query, : query + 1] = SKIPPED
        for head in heads:
            keys = pattern.key_blocks(head, query)
            kind = np.zeros(len(keys), dtype=np.int64)
            if isinstance(pattern, RangePattern):
                ends = [end for end, _ in pattern.heads[head].touched_ranges[:-1]]
                kind = np.searchsorted(ends, query - keys, side="right")
            attended = np.minimum(LOCAL + kind, len(COLOURS) - 1)
            # Heads with other ranges may attend the same block: the nearest range is shown.
            old = grid[query, keys]
            grid[query, keys] = np.where(old >= LOCAL, np.minimum(old, attended), attended)
    return grid


def shown_layers(sparsity: ResolvedSparsity) -> list[int]:
    """The layers worth drawing: the first S2 layers with patterns of their own, as many as cover the context together.

    Raises ValueError when the model has no S2 layer.
    """
    counts = sparsity.spec_coverage()
    chosen: list[int] = []
    for spec, (count, _) in counts.items():
        own = [index for index, layer in enumerate(sparsity.layers) if layer.spec == spec]
        chosen += own[:count]
    if not chosen:
        raise ValueError(
            "the model has no S2 layer among its decoder layers: there is nothing to draw; leave out --png"
        )
    return sorted(chosen)[:MAX_ROWS]


def distinct_heads(pattern: Pattern) -> list[tuple[int, str]]:
    """[(query head, its label)], one for each KV head whose query heads share their blocks, or every query head."""
    ratio = pattern.num_heads // pattern.num_kv_heads
    if isinstance(pattern, RangePattern):
        shared = all(len(set(pattern.heads[g * ratio : (g + 1) * ratio])) == 1 for g in range(pattern.num_kv_heads))
    else:
        shared = ratio > 1 and len(pattern.tables) <= pattern.num_kv_heads
    if shared and ratio > 1:
        return [(group * ratio, f"KV head {group}") for group in range(pattern.num_kv_heads)]
    return [(head, f"head {head}") for head in range(pattern.num_heads)]


def draw(sparsity: ResolvedSparsity, file: Path, *, layers: Sequence[int] | None = None, max_blocks: int = 32) -> None:
    """Writes a PNG: a row per layer, a column per head (the first ones), then the heads and the layers together.

    layers: which ones (default: shown_layers). max_blocks: how much of the sequence is drawn, from its start.
    Raises ValueError for a layer that does not exist or is dense.
    """
    # Matplotlib is slow to import and only pictures need it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rows = list(layers) if layers is not None else shown_layers(sparsity)
    for index in rows:
        if not 0 <= index < len(sparsity.layers) or sparsity.layers[index].pattern is None:
            s2 = [i for i, layer in enumerate(sparsity.layers) if layer.pattern is not None]
            raise ValueError(f"--layers {index}: expected an S2 layer; they are {s2}")
    n_blocks = min(sparsity.n_blocks, max_blocks)
    patterns = [sparsity.layers[index].pattern for index in rows]
    heads = distinct_heads(patterns[0])
    several_heads, several_layers = len(heads) > 1, len(rows) > 1
    singles = heads[:MAX_HEADS]
    columns = len(singles) + several_heads + several_layers

    colours = ListedColormap(COLOURS)
    widths = [1.0] * (columns - several_layers) + [1.5] * several_layers
    figure, axes = pyplot.subplots(
        len(rows),
        columns,
        figsize=(2.5 * sum(widths), 2.85 * len(rows) + 0.6),
        width_ratios=widths,
        squeeze=False,
        layout="constrained",
    )
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.14)
    ranges_seen: set[int] = set()

    def panel(axis, grid: np.ndarray, title: str) -> None:
        ranges_seen.update(np.unique(grid[grid >= LOCAL]).tolist())
        edges = np.arange(n_blocks + 1)
        # Lines between the cells show the blocks, until they are too many to tell apart.
        line = {"edgecolors": "white", "linewidth": 0.25} if n_blocks <= 48 else {}
        axis.pcolormesh(edges, edges, grid, cmap=colours, vmin=0, vmax=len(COLOURS) - 1, **line)
        share = (grid >= LOCAL).sum() / (n_blocks * (n_blocks + 1) / 2)
        axis.set_title(f"{title}\n{share:.0%} of the blocks", fontsize=10)
        axis.set_aspect("equal")
        axis.invert_yaxis()
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_visible(False)

    together = []
    for row, (index, pattern) in enumerate(zip(rows, patterns)):
        for column, (head, label) in enumerate(singles):
            panel(axes[row, column], block_grid(pattern, [head], n_blocks), f"layer {index}, {label}")
        together.append(block_grid(pattern, range(pattern.num_heads), n_blocks))
        if several_heads:
            panel(axes[row, len(singles)], together[-1], f"layer {index}, all heads together")
        axes[row, 0].set_ylabel("query block", fontsize=9)
    for axis in axes[-1, : len(singles) + several_heads]:
        axis.set_xlabel("key block", fontsize=9)
    if several_layers:
        for axis in axes[:, -1]:
            axis.remove()
        axis = figure.add_subplot(axes[0, 0].get_gridspec()[:, -1])
        stacked = np.stack(together)
        attended = np.where(stacked >= LOCAL, stacked, len(COLOURS)).min(axis=0)
        names = ", ".join(map(str, rows[:-1])) + f" and {rows[-1]}"
        panel(
            axis, np.where(attended < len(COLOURS), attended, stacked[0]).astype(np.uint8), f"layers {names}, all heads"
        )
        axis.set_xlabel("key block", fontsize=9)

    names = {SKIPPED: "not attended", **{kind: _range_label(patterns[0], kind - LOCAL) for kind in sorted(ranges_seen)}}
    figure.legend(
        handles=[Patch(facecolor=COLOURS[kind], label=label) for kind, label in names.items()],
        loc="outside lower center",
        ncols=len(names),
        frameon=False,
        fontsize=10,
    )
    write_figure(figure, file, dpi=130)
    pyplot.close(figure)


def _range_label(pattern: Pattern, index: int) -> str:
    if not isinstance(pattern, RangePattern):
        return "attended"
    head = next((head for head in pattern.heads if not head.is_dense), pattern.heads[0])
    ranges = head.touched_ranges
    if index == 0 and head.window is not None:
        return f"window of {head.window} tokens"
    end, stride = ranges[min(index, len(ranges) - 1)]
    if stride == 1:
        return "dense" if end is None else f"window of {end} blocks"
    return f"one block in {stride}" + ("" if end is None else f", up to {end} blocks away")
