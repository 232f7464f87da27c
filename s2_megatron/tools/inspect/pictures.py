"""The S2 layers as a picture: a row per layer, a column per head, then the heads and the layers together.

Of a context of at most EXACT blocks every block is drawn. A longer one is drawn whole in cells, each in the mean colour
of its blocks, so that a panel is as full as the text above it says; and beneath it, block by block, the part of its end
in which the window and some strides show.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.patterns.ranges import Pattern, RangePattern
from s2_megatron.tools.inspect.cells import causal_counts, cell_counts, cell_edges
from s2_megatron.tools.outputs import write_figure

FUTURE, SKIPPED, LOCAL = 0, 1, 2  # what a cell of the picture is; LOCAL + i: attended in range i of the pattern
COLOURS = ["#ffffff", "#e9ebef", "#2f6db3", "#e58a2e", "#c0392b", "#7d3c98", "#1e8449"]
MAX_ROWS, MAX_HEADS = 3, 4
MOST_DRAWN = 512  # blocks
EXACT = 64  # blocks of a context that is drawn block by block
CELLS = 96  # of the side of a longer one
STRIDES_SHOWN = 3  # of the longest stride, beside the window, in the enlarged part


def block_grid(pattern: Pattern, heads: Sequence[int], n_blocks: int, first: int = 0) -> np.ndarray:
    """What at least one of the query heads attends, uint8[query blocks, key blocks], from block `first` to n_blocks.

    FUTURE, SKIPPED, or LOCAL + the index of the range of distances in which the block is attended (0 for block masks).
    """
    grid = np.full((n_blocks - first, n_blocks - first), FUTURE, dtype=np.uint8)
    for query in range(first, n_blocks):
        row = grid[query - first]
        row[: query - first + 1] = SKIPPED
        for head in heads:
            keys = pattern.key_blocks(head, query)
            keys = keys[keys >= first]
            kind = np.zeros(len(keys), dtype=np.int64)
            if isinstance(pattern, RangePattern):
                ends = [end for end, _ in pattern.heads[head].touched_ranges[:-1]]
                kind = np.searchsorted(ends, query - keys, side="right")
            attended = np.minimum(LOCAL + kind, len(COLOURS) - 1)
            # Heads with other ranges may attend the same block: the nearest range is shown.
            old = row[keys - first]
            row[keys - first] = np.where(old >= LOCAL, np.minimum(old, attended), attended)
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


def enlarged_blocks(patterns: Sequence[Pattern], n_blocks: int) -> int:
    """How many blocks of the context's end show the window and STRIDES_SHOWN of the longest stride."""
    ranges = [head.bounds() for pattern in patterns if isinstance(pattern, RangePattern) for head in set(pattern.heads)]
    window = max((start for bounds in ranges for start, _, _ in bounds), default=0)
    stride = max((stride for bounds in ranges for _, _, stride in bounds), default=EXACT // STRIDES_SHOWN)
    return min(n_blocks, max(EXACT // 2, min(MOST_DRAWN // 4, window + STRIDES_SHOWN * stride)))


def mean_colours(counts: np.ndarray, sizes: np.ndarray, causal: np.ndarray) -> np.ndarray:
    """float64[cells, cells, 3]: the mean colour of a cell's blocks. counts: cells.cell_counts. sizes, causal: float
    [cells, cells], the block pairs of a cell, and those that are not in the future."""
    from matplotlib.colors import to_rgb

    palette = np.array([to_rgb(colour) for colour in COLOURS])
    kinds = np.minimum(LOCAL + np.arange(len(counts)), len(COLOURS) - 1)
    total = (sizes - causal)[..., None] * palette[FUTURE] + (causal - counts.sum(0))[..., None] * palette[SKIPPED]
    for kind, count in zip(kinds, counts):
        total = total + count[..., None] * palette[kind]
    return total / sizes[..., None]


def draw(
    sparsity: ResolvedSparsity, file: Path, *, layers: Sequence[int] | None = None, blocks: int | None = None
) -> None:
    """Writes a PNG.

    layers: which ones (default: shown_layers). blocks: draw so many, from the sequence's start, block by block
    (default: the whole context). Raises ValueError for a layer that does not exist or is dense.
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
    n_blocks = sparsity.n_blocks
    patterns = [sparsity.layers[index].pattern for index in rows]
    heads = distinct_heads(patterns[0])
    several_heads, several_layers = len(heads) > 1, len(rows) > 1
    singles = heads[:MAX_HEADS]
    columns = len(singles) + several_heads + several_layers
    in_cells = blocks is None and n_blocks > EXACT
    # (first block, limit, what the title calls it) of the parts that are drawn block by block.
    first = n_blocks - enlarged_blocks(patterns, n_blocks)
    part = (
        (first, n_blocks, f"the last {n_blocks - first} of {n_blocks:,} blocks")
        if in_cells
        else (0, min(n_blocks, blocks or n_blocks), "")
    )
    whole_rows = len(rows) if in_cells else 0

    colours = ListedColormap(COLOURS)
    widths = [1.0] * (columns - several_layers) + [1.5] * several_layers
    figure, axes = pyplot.subplots(
        whole_rows + len(rows),
        columns,
        figsize=(2.5 * sum(widths), 2.85 * (whole_rows + len(rows)) + 0.6),
        width_ratios=widths,
        squeeze=False,
        layout="constrained",
    )
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.14)
    ranges_seen: set[int] = set()

    def panel(axis, grid: np.ndarray, title: str) -> None:
        ranges_seen.update(np.unique(grid[grid >= LOCAL]).tolist())
        edges = np.arange(part[0], part[1] + 1)
        # Lines between the cells show the blocks, until they are too many to tell apart.
        line = {"edgecolors": "white", "linewidth": 0.25} if len(grid) <= 48 else {}
        axis.pcolormesh(edges, edges, grid, cmap=colours, vmin=0, vmax=len(COLOURS) - 1, **line)
        if in_cells:
            title = f"{title}\n{part[2]}"
        else:
            shown = f"{(grid >= LOCAL).sum() / (grid != FUTURE).sum():.0%} of the blocks"
            title += f"\n{shown}" if part[1] == n_blocks else f"\n{shown}, the first {part[1]} of {n_blocks:,}"
        _bare(axis, title)
        axis.set_aspect("equal")
        axis.invert_yaxis()

    def whole(axis, counts: np.ndarray, edges: np.ndarray, title: str) -> None:
        causal, sizes = causal_counts(n_blocks, edges), np.outer(np.diff(edges), np.diff(edges))
        ranges_seen.update((LOCAL + np.flatnonzero(counts.sum((1, 2)))).tolist())
        axis.imshow(mean_colours(counts, sizes, causal), extent=(0, 1, 1, 0))
        _bare(axis, f"{title}\n{counts.sum() / causal.sum():.1%} of the blocks")

    drawn = list(zip(rows, patterns))
    edges = cell_edges(patterns, n_blocks, CELLS)
    for row, (index, pattern) in enumerate(drawn if in_cells else []):
        for column, (head, label) in enumerate(singles):
            whole(axes[row, column], cell_counts(pattern, [head], n_blocks, edges), edges, f"layer {index}, {label}")
        if several_heads:
            counts = cell_counts(pattern, range(pattern.num_heads), n_blocks, edges)
            whole(axes[row, len(singles)], counts, edges, f"layer {index}, all heads together")
    together = []
    for row, (index, pattern) in enumerate(drawn, start=whole_rows):
        for column, (head, label) in enumerate(singles):
            panel(axes[row, column], block_grid(pattern, [head], part[1], part[0]), f"layer {index}, {label}")
        together.append(block_grid(pattern, range(pattern.num_heads), part[1], part[0]))
        if several_heads:
            panel(axes[row, len(singles)], together[-1], f"layer {index}, all heads together")
    for axis in axes[:, 0]:
        axis.set_ylabel("query block", fontsize=9)
    for axis in axes[-1, : len(singles) + several_heads]:
        axis.set_xlabel("key block", fontsize=9)
    if several_layers:
        for axis in axes[:, -1]:
            axis.remove()
        axis = figure.add_subplot(axes[0, 0].get_gridspec()[whole_rows:, -1])
        stacked = np.stack(together)
        attended = np.where(stacked >= LOCAL, stacked, len(COLOURS)).min(axis=0)
        names = ", ".join(map(str, rows[:-1])) + f" and {rows[-1]}"
        panel(
            axis, np.where(attended < len(COLOURS), attended, stacked[0]).astype(np.uint8), f"layers {names}, all heads"
        )
        axis.set_xlabel("key block", fontsize=9)

    names = {SKIPPED: "not attended", **{kind: _range_label(patterns[0], kind - LOCAL) for kind in sorted(ranges_seen)}}
    figure.legend(
        handles=[Patch(facecolor=COLOURS[min(kind, len(COLOURS) - 1)], label=label) for kind, label in names.items()],
        loc="outside lower center",
        ncols=len(names),
        frameon=False,
        fontsize=10,
    )
    write_figure(figure, file, dpi=130)
    pyplot.close(figure)


def _bare(axis, title: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


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
