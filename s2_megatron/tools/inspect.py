"""Shows what a sparsity YAML means for a model: a table of its layers, and a picture of its patterns.

    s2-megatron inspect configs/quickstart.yaml --num-layers 4 --num-attention-heads 4 --num-query-groups 2 \
        --seq-length 512 --png docs/pattern.png

    Attention of 4 layers, 4 query / 2 KV heads, 512 tokens, blocks of 32
     layer   spec   kind    pattern                         density   coverage
     0, 2    D      dense   dense                            100.0%     100.0%
     1       S      s2      local 2 + stride 4, 2 offsets     40.0%      64.0%
     3       S      s2      local 2 + stride 4, 2 offsets     37.2%      58.8%
    attended pairs a sequence: 1,456,128 of 2,101,248 (69.3%)
    S: 2 consecutive S layers together cover 100.0% of the causal blocks

The command above draws the README's picture; with --context-parallel-size 4 --exchange-png FILE it draws which blocks
the ranks of context parallelism send each other. The flags are named as Megatron's own. No GPU and no Megatron is
needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from s2_megatron.config.errors import printable
from s2_megatron.config.load import load_config
from s2_megatron.config.resolve import MOST_HEADS, MOST_LAYERS, MOST_SEQ_LENGTH
from s2_megatron.config.sparsity import ResolvedSparsity, tensor_parallel_balance
from s2_megatron.context_parallel.plan import check_block_count, layer_costs, make_plan
from s2_megatron.patterns.ranges import Pattern, RangePattern

FUTURE, SKIPPED, LOCAL = 0, 1, 2  # what a cell of the picture is; LOCAL + i: attended in range i of the pattern
COLOURS = ["#ffffff", "#e9ebef", "#2f6db3", "#e58a2e", "#c0392b", "#7d3c98", "#1e8449"]
MAX_ROWS, MAX_HEADS = 3, 4
MOST_DRAWN = 512  # blocks
MOST_CP_RANKS = 1024
MOST_CP_WORK = 2**24  # ranks times blocks of the sequence, for the exchange


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
                ends = [end for end, _ in pattern.heads[head].ranges[:-1]]
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
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


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
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def exchange_summary(sparsity: ResolvedSparsity, size: int, tp_size: int = 1) -> list[str]:
    """One line per S2 spec: what its first layer sends over `size` ranks, relative to gathering everything, and how
    evenly the work falls."""
    lines = []
    for spec in dict.fromkeys(layer.spec for layer in sparsity.layers if layer.pattern is not None):
        pattern = next(layer.pattern for layer in sparsity.layers if layer.spec == spec)
        parts = {pattern.tensor_parallel_slice(rank, tp_size) for rank in range(tp_size)}
        settings = dict(head_dim=1, itemsize=1)
        sparse = [layer_costs(part, size, sparsity.seq_length, "sparse", **settings) for part in parts]
        gathered = layer_costs(next(iter(parts)), size, sparsity.seq_length, "all_gather", **settings).sent_forward[0]
        busiest = max(max(cost.sent_forward) for cost in sparse)
        balance = max(cost.balance for cost in sparse)
        share = f"the busiest sends {busiest / gathered:.1%} of an all-gather"
        lines.append(f"{spec} over {size} context-parallel ranks: {share}, work max / mean {balance:.3f}")
    return lines


def _range_label(pattern: Pattern, index: int) -> str:
    if not isinstance(pattern, RangePattern):
        return "attended"
    ranges = next((head.ranges for head in pattern.heads if not head.is_dense), pattern.heads[0].ranges)
    end, stride = ranges[min(index, len(ranges) - 1)]
    if stride == 1:
        return "dense" if end is None else f"window of {end} blocks"
    return f"one block in {stride}" + ("" if end is None else f", up to {end} blocks away")


def _count(least: int, most: int):
    """An argument's type: integers from least to most."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {printable(text)}; expected an integer, {least} to {most}")
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    heads = _count(1, MOST_HEADS)
    parser.add_argument("config", type=Path, help="the sparsity YAML")
    parser.add_argument("--num-layers", type=_count(1, MOST_LAYERS), required=True)
    parser.add_argument("--num-attention-heads", type=heads, required=True)
    parser.add_argument("--num-query-groups", type=heads, help="KV heads (default: as many as attention heads)")
    parser.add_argument("--seq-length", type=_count(1, MOST_SEQ_LENGTH), required=True)
    parser.add_argument("--mtp-num-layers", type=_count(0, MOST_LAYERS), default=0)
    parser.add_argument(
        "--tensor-model-parallel-size", type=heads, default=1, help="also show the balance of its ranks"
    )
    parser.add_argument(
        "--context-parallel-size",
        type=_count(1, MOST_CP_RANKS),
        default=1,
        help="also show what its ranks send each other",
    )
    parser.add_argument(
        "--exchange-png", type=Path, help="draw which blocks the context-parallel ranks hold and receive into this file"
    )
    parser.add_argument(
        "--s2-allow-python-patterns", action="store_true", help="import the functions that the YAML names"
    )
    parser.add_argument("--png", type=Path, help="draw the patterns into this file")
    parser.add_argument(
        "--layers", type=_count(0, MOST_LAYERS - 1), nargs="+", help="the layers to draw (default: the first S2 layers)"
    )
    parser.add_argument(
        "--blocks", type=_count(1, MOST_DRAWN), default=32, help="blocks of the sequence to draw (default: 32)"
    )


def _check_pictures(args: argparse.Namespace) -> None:
    """Raises ValueError for a picture's path that is no file name of a picture, before the work is done."""
    for flag, file in (("--png", args.png), ("--exchange-png", args.exchange_png)):
        if file is not None and (file.suffix.lower() != ".png" or file.is_dir()):
            what = "a folder" if file.is_dir() else "another kind of file"
            raise ValueError(f"{flag} {printable(file, 200)}: {what}; expected a file name that ends in .png")


def run(args: argparse.Namespace) -> None:
    """Prints the table and draws what is asked for. Raises ValueError for a config that is wrong or does not fit, and
    for a picture that shows nothing."""
    _check_pictures(args)
    config = load_config(args.config, allow_python_patterns=args.s2_allow_python_patterns)
    sparsity = config.resolve(
        num_layers=args.num_layers,
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_query_groups or args.num_attention_heads,
        seq_length=args.seq_length,
        mtp_num_layers=args.mtp_num_layers,
    )
    tp_size, cp_size = args.tensor_model_parallel_size, args.context_parallel_size
    if cp_size > 1 and cp_size * sparsity.n_blocks > MOST_CP_WORK:
        raise ValueError(
            f"--context-parallel-size {cp_size} with {sparsity.n_blocks} blocks: expected at most "
            f"{MOST_CP_WORK // sparsity.n_blocks} ranks at this length; use fewer, or a shorter --seq-length"
        )
    # Redirected output has no width of its own, and a table cut to 80 columns is hard to read.
    Console(width=None if sys.stdout.isatty() else 140).print(sparsity.table())
    if tp_size > 1:
        balance = tensor_parallel_balance(sparsity, tp_size)
        print(f"attention work of {tp_size} tensor-parallel ranks, max / mean: {balance:.3f}")
    if cp_size > 1:
        print("\n".join(exchange_summary(sparsity, cp_size, tp_size)))
    if args.exchange_png:
        if cp_size == 1:
            raise ValueError(
                "--exchange-png with --context-parallel-size 1; expected 2 or more ranks; add --context-parallel-size 4"
            )
        draw_exchange(sparsity, args.exchange_png, cp_size, layer=args.layers[0] if args.layers else None)
        print(f"wrote {args.exchange_png}")
    if args.png:
        draw(sparsity, args.png, layers=args.layers, max_blocks=args.blocks)
        print(f"wrote {args.png}")
