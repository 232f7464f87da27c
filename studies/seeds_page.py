"""The part of a study's page that shows every dense model by itself: what each arm loses by the switch, before any
step, and what it has lost at the end."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np

from studies.cells import last, table
from studies.continued_page import read_switched
from studies.scales import runs_by_key
from studies.studies import BASELINE, Study, density
from s2_megatron.tools.compare.figures import COLOURS
from s2_megatron.tools.compare.measure import Comparison
from s2_megatron.tools.compare.runs import TRAINING_LOSS, VALIDATION_LOSS

FEWEST = 10  # runs that make a correlation


def losses(folder: Path, comparison: Comparison) -> dict[tuple[str, str], tuple[float, float]]:
    """{(arm, seed): (validation loss right after the switch, at the end)}, each minus dense's of that seed, as a share
    of it."""
    at_end = {key: last(run, VALIDATION_LOSS) for key, run in runs_by_key(comparison).items()}
    switched = {
        (result.arm.name, seed): record[TRAINING_LOSS]
        for result in comparison.results
        for seed, record in read_switched(folder, result.arm.name).items()
    }
    return {
        (arm, seed): tuple(found[arm, seed] / found[BASELINE, seed] - 1 for found in (switched, at_end))
        for arm, seed in at_end
        if (arm, seed) in switched and (BASELINE, seed) in switched and (BASELINE, seed) in at_end
    }


def section(study: Study, folder: Path, comparison: Comparison, pictures: str) -> list[str]:
    """Lines of Markdown; [] without a run of another arm. pictures: the folder of them, from the page."""
    found = {key: both for key, both in losses(folder, comparison).items() if key[0] != BASELINE}
    if not found:
        return []
    seeds = sorted({seed for _, seed in found}, key=int)
    rows = [
        [
            f"`{arm}`",
            f"{100 * density(study, arm):.1f} %",
            *(_cell(found.get((arm, seed))) for seed in seeds),
        ]
        for arm in study.arm_names
        if any((arm, seed) in found for seed in seeds)
    ]
    lines = [
        "### Every dense model by itself",
        "",
        "Validation loss against dense's of the same seed, in percent: first right after the switch (the dense model's "
        "weights, before any step), then at the end.",
        "",
        *table(["arm", "pairs", *(f"seed {seed}" for seed in seeds)], rows),
        "",
    ]
    if len(found) >= FEWEST:
        before, after = np.array(list(found.values())).T
        lines += [
            f"Over these {len(found)} runs the correlation of the two is {np.corrcoef(before, after)[0, 1]:.3f}.",
            "",
        ]
    return [*lines, f"![Loss above dense right after the switch and at the end]({pictures}/seeds.png)", ""]


def draw(study: Study, folder: Path, comparison: Comparison, file: Path) -> None:
    """A row an arm, a colour a dense model: what it loses right after the switch (hollow) and at the end, in %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {key: both for key, both in losses(folder, comparison).items() if key[0] != BASELINE}
    arms = [arm for arm in study.arm_names if any(arm == each for each, _ in found)]
    seeds = sorted({seed for _, seed in found}, key=int)
    heights = _heights(arms, seeds, found)
    figure, panel = pyplot.subplots(figsize=(8, 1 + (0.2 + 0.04 * len(seeds)) * len(arms)), layout="constrained")
    for seed, colour in zip(seeds, itertools.cycle(COLOURS[1:])):
        rows = [row for row, arm in enumerate(arms) if (arm, seed) in found]
        before, after = 100 * np.array([found[arms[row], seed] for row in rows]).T
        height = [heights[arms[row], seed] for row in rows]
        panel.hlines(height, before, after, color=colour, linewidth=0.8)
        panel.scatter(before, height, s=28, facecolor="white", edgecolor=colour, linewidth=1.2, zorder=3)
        panel.scatter(after, height, s=28, color=colour, zorder=3, label=f"dense model {seed}")
    panel.axvline(0, color="#333333", linewidth=0.8)
    panel.set_yticks(range(len(arms)), [f"{arm}  ({100 * density(study, arm):.0f} %)" for arm in arms], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("validation loss above dense, percent: right after the switch (hollow), at the end (full)")
    panel.grid(axis="x", alpha=0.25, linewidth=0.5)
    panel.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _heights(arms: Sequence[str], seeds: Sequence[str], found: Container) -> dict[tuple[str, str], float]:
    """{(arm, seed): where it is drawn}, the seeds of an arm around its row, within 0.8 rows."""
    own = {arm: [seed for seed in seeds if (arm, seed) in found] for arm in arms}
    return {
        (arm, seed): row + 0.8 / len(seeds) * (index - (len(own[arm]) - 1) / 2)
        for row, arm in enumerate(arms)
        for index, seed in enumerate(own[arm])
    }


def _cell(both: tuple[float, float] | None) -> str:
    return "-" if both is None else ", ".join(f"{100 * share:+.2f}" for share in both)
