"""The whole context as a picture, readable at any length: one small panel per distinct layer pattern and group of
heads, and beneath them how the heads of a layer together serve the query at the end of the context.

A panel is cut into cells (cells.py); a cell is as dark as the share of its (query block, key block) pairs that are
attended, so that windows and ranges of distance show while stripes blend into a shade. What blends there, the strip
below it shows: the blocks nearest to the last query, one cell each.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from s2_megatron.config.sparsity import ResolvedSparsity, joined_layers
from s2_megatron.patterns.ranges import Pattern, RangePattern
from s2_megatron.tools.inspect.cells import cell_counts, cell_edges, cell_shares
from s2_megatron.tools.inspect.layer_kinds import head_groups
from s2_megatron.tools.outputs import write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS = 64  # of a panel's side
STRIP = 64  # blocks of the strip
COLUMNS = 512  # cells of the whole context in the picture of the last query
MOST_PANELS = 48
PANELS_A_ROW = 6
DPI = 120
# Inches. A side of 192 dots has a whole number of them for each of 64 blocks: stripes are equally wide.
MARGIN, PANEL_SIDE, PANEL_WIDTH, PANEL_HEIGHT, WIDTH = 0.2, 1.6, 1.85, 2.3, 12.8
SHARES = {1.0: "all", 3 / 4: "3/4", 1 / 2: "1/2", 1 / 4: "1/4", 1 / 16: "1/16", 0.0: "none"}  # of the colour bar
ATTENDED, FUTURE = "#08306b", "#efe9dd"


def last_query_cells(
    patterns: list[Pattern], n_blocks: int, columns: int = COLUMNS, first: int = 0
) -> tuple[list[str], np.ndarray]:
    """(name of each row, float64[rows, columns]): the share of each cell's key blocks that the last query block
    attends. A row for every group of heads of the first layer, one for all of them together and, of several layers, one
    for all heads of all layers. patterns: of the layers. first: the first key block that is shown."""
    edges = cell_edges(patterns, n_blocks, columns, first)
    names, rows = [], []
    for heads in head_groups(patterns[0]):
        names.append(head_names(heads))
        rows.append(np.histogram(patterns[0].key_blocks(heads[0], n_blocks - 1), edges)[0] / np.diff(edges))
    for count in dict.fromkeys((1, len(patterns))):
        names.append("all heads" if count == 1 else f"all, {count} layers")
        rows.append(np.add.reduceat(last_query_sees(patterns[:count], n_blocks), edges[:-1]) / np.diff(edges))
    return names, np.stack(rows)


def last_query_sees(patterns: list[Pattern], n_blocks: int) -> np.ndarray:
    """bool[n_blocks]: whether the last query block attends a key block in at least one head of one layer."""
    seen = np.zeros(n_blocks, dtype=bool)
    for pattern in patterns:
        for heads in head_groups(pattern):
            seen[pattern.key_blocks(heads[0], n_blocks - 1)] = True
    return seen


def covering_layers(sparsity: ResolvedSparsity) -> list[Pattern]:
    """The patterns of the first S2 spec's first layers, as many as their coverage together grows with."""
    spec = next(layer.spec for layer in sparsity.layers if layer.pattern is not None)
    patterns = {id(layer.pattern): layer.pattern for layer in sparsity.layers if layer.spec == spec}
    count, _ = sparsity.spec_coverage()[spec]
    return list(patterns.values())[:count]


def head_names(heads: list[int]) -> str:
    return f"head{'s' * (len(heads) > 1)} {joined_layers([str(head) for head in heads])}"


def distinct_patterns(sparsity: ResolvedSparsity) -> list[tuple[str, Pattern]]:
    """[(the layers that share it, pattern)] of the S2 layers. Raises ValueError without one."""
    layers: dict[object, list[str]] = {}
    patterns: dict[object, Pattern] = {}
    for index, layer in enumerate(sparsity.layers):
        if layer.pattern is not None:
            key = layer.pattern
            if isinstance(key, RangePattern):  # offsets that differ by the stride are the same blocks
                key = tuple(head.canonical for head in key.heads)
            layers.setdefault(key, []).append(str(index))
            patterns.setdefault(key, layer.pattern)
    if not patterns:
        raise ValueError(
            "the model has no S2 layer among its decoder layers: there is nothing to draw; leave out --context-png"
        )
    return [(f"layer{'s' * (len(names) > 1)} {joined_layers(names)}", patterns[key]) for key, names in layers.items()]


def draw_context(sparsity: ResolvedSparsity, file: Path) -> list[str]:
    """Writes the picture as a PNG. Returns remarks: what was left out of it. Raises ValueError without an S2 layer."""
    patterns = distinct_patterns(sparsity)
    panels = [(name, pattern, heads) for name, pattern in patterns for heads in head_groups(pattern)]
    remarks = []
    if len(panels) > MOST_PANELS:
        remarks.append(f"{file.name}: {MOST_PANELS} of {len(panels)} pairs of layer pattern and heads are drawn")
        panels = panels[:MOST_PANELS]
    # Matplotlib is slow to import and only pictures need it.
    from matplotlib.figure import Figure

    rows = -(-len(panels) // PANELS_A_ROW)
    served = covering_layers(sparsity)
    below = 0.16 * (len(head_groups(served[0])) + 1 + (len(served) > 1)) + 0.75
    page = _Page(Figure(figsize=(WIDTH, PANEL_HEIGHT * rows + below + 0.35)))
    _draw_panels(page, sparsity, panels)
    _draw_last_query(page, sparsity, served, height=below - 0.75)
    write_figure(page.figure, file, dpi=DPI)
    return remarks


class _Page:
    """A figure whose axes are placed in inches from its upper left corner: matplotlib's own layouts take seconds for
    so many."""

    def __init__(self, figure: Figure):
        from matplotlib.colors import LinearSegmentedColormap

        self.figure = figure
        self.width, self.height = figure.get_size_inches()
        # As much of the colour as there are attended blocks: a cell looks as the blocks would from afar.
        colours = LinearSegmentedColormap.from_list("share", ["white", ATTENDED]).with_extremes(bad=FUTURE)
        self.style = dict(cmap=colours, vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")

    def axes(self, left: float, top: float, width: float, height: float):
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        axes.set_xticks([])
        axes.set_yticks([])
        return axes

    def image(self, cells: np.ndarray, left: float, top: float, width: float, height: float):
        """(axes, image) of shares, NaN in the future."""
        axes = self.axes(left, top, width, height)
        return axes, axes.imshow(np.ma.masked_invalid(cells), **self.style)

    def text(self, left: float, top: float, text: str, size: int = 9) -> None:
        self.figure.text(left / self.width, 1 - top / self.height, text, fontsize=size, va="top")


def _draw_panels(page: _Page, sparsity: ResolvedSparsity, panels: list[tuple[str, Pattern, list[int]]]) -> None:
    n_blocks, tail = sparsity.n_blocks, max(0, sparsity.n_blocks - STRIP)
    page.text(
        MARGIN,
        0.08,
        f"{sparsity.seq_length:,} tokens: queries downwards, keys to the right, as dark as the share of blocks that is "
        f"attended. Below a panel: the last query's nearest {n_blocks - tail} blocks of {sparsity.block_size}.",
    )
    image = None
    for at, (title, pattern, heads) in enumerate(panels):
        left = MARGIN + PANEL_WIDTH * (at % PANELS_A_ROW)
        top = 0.35 + PANEL_HEIGHT * (at // PANELS_A_ROW)
        edges = cell_edges([pattern], n_blocks, CELLS)
        share = cell_counts(pattern, heads[:1], n_blocks, edges).sum() / (n_blocks * (n_blocks + 1) / 2)
        page.text(left, top, f"{_cut(title)}\n{_cut(head_names(heads), 16)}: {share:.1%} of the blocks", size=7)
        cells = cell_shares(pattern, heads[0], n_blocks, edges)
        _, image = page.image(cells, left, top + 0.3, PANEL_SIDE, PANEL_SIDE)
        keys = pattern.key_blocks(heads[0], n_blocks - 1)
        line = np.zeros((1, n_blocks - tail))
        line[0, keys[keys >= tail] - tail] = 1.0
        page.image(line, left, top + 0.34 + PANEL_SIDE, PANEL_SIDE, 0.14)
    bar = page.figure.colorbar(image, cax=page.axes(WIDTH - 0.75, 0.65, 0.15, PANEL_SIDE), ticks=list(SHARES))
    bar.ax.set_yticklabels(SHARES.values(), fontsize=7)
    bar.ax.minorticks_off()


def _draw_last_query(page: _Page, sparsity: ResolvedSparsity, patterns: list[Pattern], height: float) -> None:
    """patterns: of the layers that serve it."""
    n_blocks, tail = sparsity.n_blocks, max(0, sparsity.n_blocks - STRIP)
    names, cells = last_query_cells(patterns, n_blocks)
    _, near = last_query_cells(patterns, n_blocks, STRIP, tail)
    first = next(index for index, layer in enumerate(sparsity.layers) if layer.pattern is patterns[0])
    text = f"How layer {first} serves the last query: all heads together see "
    text += f"{last_query_sees(patterns[:1], n_blocks).mean():.0%} of the blocks"
    if len(patterns) > 1:
        text += f", {len(patterns)} consecutive such layers {last_query_sees(patterns, n_blocks).mean():.0%}"
    top = page.height - height - 0.3
    page.text(MARGIN, top - 0.25, text)
    left, zoom = MARGIN + 1.0, 3.2  # 6 dots for each of 64 blocks
    width = WIDTH - left - zoom - 0.4
    whole, _ = page.image(cells, left, top, width, height)
    whole.set_yticks(range(len(names)), [_cut(text, 18) for text in names], fontsize=6)
    whole.set_xlabel(f"all {n_blocks:,} key blocks", fontsize=8)
    nearest, _ = page.image(near, WIDTH - zoom - 0.2, top, zoom, height)
    nearest.set_xlabel(f"the last {n_blocks - tail} key blocks", fontsize=8)


def _cut(text: str, most: int = 24) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
