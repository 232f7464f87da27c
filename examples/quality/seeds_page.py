"""The part of docs/quality.md that shows every dense model by itself: what each arm loses by the switch, before any
step, and what it has lost at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from examples.quality.continued_page import read_switched
from examples.quality.studies import BASELINE, Study, density
from s2_megatron.tools.compare.measure import Comparison
from s2_megatron.tools.compare.runs import TRAINING_LOSS, VALIDATION_LOSS


def losses(folder: Path, comparison: Comparison) -> dict[tuple[str, str], tuple[float, float]]:
    """{(arm, seed): (validation loss right after the switch, at the end)}, each minus dense's of that seed, as a share
    of it."""
    at_end = {
        (result.arm.name, str(run.arguments["seed"])): float(run.series[VALIDATION_LOSS].values[-1])
        for result in comparison.results
        for run in result.arm.runs
    }
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


def section(study: Study, folder: Path, comparison: Comparison, table: Callable) -> list[str]:
    """Lines of Markdown; [] without a run of another arm. table: (header, rows) to lines."""
    found = {key: both for key, both in losses(folder, comparison).items() if key[0] != BASELINE}
    if not found:
        return []
    seeds = sorted({seed for _, seed in found})
    rows = [
        [
            f"`{arm}`",
            f"{100 * density(study, arm):.1f} %",
            *(cell for seed in seeds for cell in _cells(found.get((arm, seed)))),
        ]
        for arm in study.arm_names
        if any((arm, seed) in found for seed in seeds)
    ]
    columns = [f"seed {seed}: {when}" for seed in seeds for when in ("right after the switch", "at the end")]
    lines = [
        "#### Every dense model by itself",
        "",
        "Validation loss against dense's of the same seed: with the dense model's weights, before any step, and at the "
        "end.",
        "",
        *table(["arm", "pairs", *columns], rows),
        "",
    ]
    if len(found) > 2:
        before, after = np.array(list(found.values())).T
        lines += [
            f"Over these {len(found)} runs the two go together: their correlation is "
            f"{np.corrcoef(before, after)[0, 1]:.3f}.",
            "",
        ]
    return lines


def _cells(both: tuple[float, float] | None) -> list[str]:
    return ["-", "-"] if both is None else [f"{100 * share:+.2f} %" for share in both]
