"""Draw the pictures of docs/quality.md from the data in studies/results.

python -m studies.figures            # writes docs/quality_gaps.png, quality_positions.png, quality_recall.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from studies.check import DOCS, LM_ARMS, LM_SEEDS, recall_runs, runs_of
from studies.data import Run, select
from studies.gaps import Gap, gap

# {heading: (study, {arm: what it is})}; the arms as they stand in the picture, from the top.
GROUPS = {
    "from random weights, 100M parameters, 8K": (
        "lm8k",
        {
            "hybrid": "first two layers dense",
            "one-offset": "S2, one offset for all heads",
            "s2": "S2 in all layers",
            "window": "windows of as many pairs",
        },
    ),
    "from random weights, 42M, 8K (two seeds)": (
        "rules8k",
        {
            "hybrid": "first two layers dense",
            "dense-middle": "two layers in the middle dense",
            "s2": "S2 in all layers",
            "dense-heads": "two of 8 KV heads in every layer dense",
            "dense-fourth": "last of every four layers dense",
        },
    ),
    "going on from dense, 42M, 8K": (
        "from-dense-rules8k",
        {
            "window-128": "S2, window of 128",
            "window-256": "S2, window of 256",
            "stride-32": "S2, stride 32",
            "stride-16": "S2, stride 16",
            "one-offset": "S2, one offset for all heads",
            "offsets-layer": "S2, offsets by layer",
            "s2": "S2: window 512, stride 8",
            "hybrid": "S2, first two layers dense",
            "dense-one": "S2, one layer in the middle dense",
            "stride-4": "S2, stride 4",
            "dense-middle": "S2, two layers in the middle dense",
            "dense-heads": "S2, two of 8 heads in every layer dense",
            "dense-fourth": "S2, last of every four layers dense",
            "window-1024": "S2, window of 1,024",
            "dense-last": "S2, last two layers dense",
            "chosen-few": "S2, 4 of 64 heads dense, measured",
            "chosen-window": "windows, 4 of 64 heads dense, measured",
            "chosen-heads": "S2, 16 of 64 heads dense, measured",
        },
    ),
    "going on from dense, 100M, 8K": (
        "from-dense8k",
        {
            "dense-fourth": "S2, last of every four layers dense",
            "hybrid": "S2, first two layers dense",
            "s2": "S2 in all layers",
            "dense-heads": "S2, one of 4 heads in every layer dense",
            "chosen-heads": "S2, 12 of 48 heads dense, measured",
        },
    ),
    "from dense at 8K to 32K, 42M": (
        "extend-rules32k",
        {
            "stride-16": "S2, stride 16",
            "s2": "S2: window 512, stride 8",
            "dense-fourth": "S2, last of every four layers dense",
            "window": "windows of 2,624",
            "chosen-few": "S2, 4 of 64 heads dense, measured",
            "chosen-window": "windows, the same 4 dense",
            "chosen-wide": "S2 of 1,024 and 16, the same 4 dense",
        },
    ),
}
BAND = 0.5  # percent
LOSES, HOLDS, UNSURE, PLAIN = "#c2410c", "#15803d", "#6b7280", "#1f2937"
ARM_COLOURS = {"hybrid": "#c2410c", "one-offset": "#9333ea", "s2": "#1d4ed8", "window": "#15803d"}
ARM_NAMES = GROUPS["from random weights, 100M parameters, 8K"][1]


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    return pyplot


def _colour(found: Gap) -> str:
    """By what the interval says of the band; one seed says nothing sure."""
    if found.low > BAND:
        return LOSES
    return HOLDS if found.low >= -BAND and found.high <= BAND else UNSURE


def draw_gaps(file: Path) -> None:
    """All gaps: a dot a seed, a mark for their mean, a bar for its interval, and the band of +-BAND %."""
    pyplot = _pyplot()
    from matplotlib.lines import Line2D

    rows = sum(2 + len(arms) for _, arms in GROUPS.values())
    figure, panel = pyplot.subplots(figsize=(9.5, 0.235 * rows + 1.1), layout="constrained")
    panel.set_xscale("symlog", linthresh=1.0, linscale=1.2)
    panel.axvspan(-BAND, BAND, color="#dbeafe", zorder=0)
    panel.axvline(0, color=PLAIN, linewidth=0.8)
    places, labels, row = [], [], 0
    for heading, (study, arms) in GROUPS.items():
        runs = runs_of(study)
        box = dict(facecolor="white", edgecolor="none", pad=1)
        panel.text(-8.8, row, heading, fontweight="bold", va="center", bbox=box)
        row += 1
        for arm, name in arms.items():
            found = gap(runs, arm)
            colour, values = _colour(found), [*found.values.values()]
            if len(values) > 1:
                low, high = max(found.low, -9), min(found.high, 14)
                panel.hlines(row, low, high, color=colour, linewidth=1.6)
            panel.scatter(values, [row] * len(values), s=22, color=colour, alpha=0.5, zorder=3, linewidth=0)
            panel.scatter(found.mean, row, s=34, marker="|", color=colour, zorder=4, linewidth=2.2)
            places.append(row)
            labels.append(f"{name}  ({len(values)})")
            row += 1
        row += 1
    panel.set_yticks(places, labels)
    panel.set_ylim(row - 1.2, -1)
    panel.set_xlim(-9, 14)
    ticks = (-8, -4, -2, -1, -0.5, 0, 0.5, 1, 2, 4, 8)
    panel.set_xticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
    panel.xaxis.set_minor_locator(pyplot.NullLocator())
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", alpha=0.25, linewidth=0.5)
    panel.set_xlabel("validation loss above dense of the same seed, percent (in brackets: seeds; bar: 95 % interval)")
    handles = [Line2D([], [], color=colour, linewidth=2) for colour in (LOSES, HOLDS, UNSURE)]
    texts = ("more than 0.5 % above dense", "within ±0.5 %", "not decided, or one seed")
    figure.legend(handles, texts, loc="outside upper center", frameon=False, ncols=3)
    _save(figure, file)


def draw_positions(file: Path) -> None:
    """From random weights: the gap over tokens, in the first 512 positions and beyond 4K; a thin line a seed."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.9), layout="constrained")
    runs = {(run.arm, run.seed): run for run in runs_of("lm8k")}
    length = 8192
    parts = (
        ("first 512 tokens: all arms see the same", lambda run, row: run.by_position(0, 512, row)),
        ("beyond 4K", lambda run, row: run.by_position(4096, length, row)),
        ("beyond 4K less the first 512",
         lambda run, row: run.by_position(4096, length, row) - run.by_position(0, 512, row)),
    )  # fmt: skip
    for panel, (title, part) in zip(panels, parts):
        for arm in LM_ARMS:
            curves = []
            for seed in LM_SEEDS:
                own, dense = runs[arm, seed], runs["dense", seed]
                rows = range(len(own.validation["step"]))
                curves.append([part(own, row) - part(dense, row) for row in rows])
                tokens = own.validation["tokens"] / 1e6
                panel.plot(tokens, curves[-1], color=ARM_COLOURS[arm], linewidth=0.6, alpha=0.35)
            panel.plot(tokens, np.mean(curves, axis=0), color=ARM_COLOURS[arm], linewidth=2, label=ARM_NAMES[arm])
        panel.axhline(0, color=PLAIN, linewidth=0.8)
        panel.set_title(title, fontsize=9.5)
        panel.set_xlabel("training tokens, millions")
        panel.grid(alpha=0.25, linewidth=0.5)
    for panel in panels[:2]:
        panel.set_ylim(-0.75, 0.2)
    panels[0].set_ylabel("validation loss minus dense's, nats")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    _save(figure, file)


RECALL_ROWS = {
    "dense": "dense",
    "chosen-few": "S2, 4 of 64 heads dense, measured",
    "dense-fourth": "S2, last of every four layers dense",
    "dense-last": "S2, last two layers dense",
    "stride-4": "S2, stride 4",
    "s2": "S2: window 512, stride 8",
    "hybrid": "S2, first two layers dense",
    "one-offset": "S2, one offset for all heads",
    "window": "windows of as many pairs",
}


def draw_recall(file: Path) -> None:
    """Right answers on recall by the residue of the block that holds the value, of three models that learnt it."""
    pyplot = _pyplot()
    models = {"8K, seed 11": (8, 11), "8K, seed 14": (8, 14), "32K, seed 12": (32, 12)}
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.9), sharey=True, layout="constrained")
    for panel, (title, model) in zip(panels, models.items()):
        runs = recall_runs(*model)
        values = np.array([_by_residue(runs, arm) for arm in RECALL_ROWS])
        panel.imshow(np.ma.masked_invalid(values), cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for (row, column), share in np.ndenumerate(values):
            if not np.isnan(share):
                colour = "white" if share > 60 else PLAIN
                panel.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=8, color=colour)
        for row in np.flatnonzero(np.isnan(values).all(axis=1)):
            panel.text(3.5, row, "not trained", ha="center", va="center", fontsize=8, color=UNSURE)
        panel.set_xticks(range(8))
        panel.set_yticks(range(len(RECALL_ROWS)), RECALL_ROWS.values())
        panel.set_title(title, fontsize=9.5)
        panel.tick_params(length=0)
    figure.supxlabel("residue: the block that holds the value, modulo 8. Right answers in percent", fontsize=9)
    _save(figure, file)


def _by_residue(runs: Sequence[Run], arm: str) -> list[float]:
    found = select(runs, arm=arm)
    return (
        [100 * share for share in found[0].about["tests"]["recall"]["recall"]["by_residue"]] if found else [np.nan] * 8
    )


def _save(figure, file: Path) -> None:
    figure.savefig(file, dpi=110, metadata={"Software": None})
    print(file)


PICTURES = {"quality_gaps.png": draw_gaps, "quality_positions.png": draw_positions, "quality_recall.png": draw_recall}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.figures", description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=DOCS, help="default: docs")
    folder = parser.parse_args().to
    for name, draw in PICTURES.items():
        draw(folder / name)


if __name__ == "__main__":
    main()
