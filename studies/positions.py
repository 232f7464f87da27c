"""Losses by position: an arm's gap to the baseline in each part of the context, and where it begins to lose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from studies.cells import table
from s2_megatron.tools.compare.figures import position_losses
from s2_megatron.tools.compare.measure import ArmResult, Comparison


def mean_positions(result: ArmResult) -> tuple[np.ndarray, np.ndarray]:
    """(first position of each bucket, mean loss over the arm's runs)."""
    found = [position_losses(run, True) for run in result.arm.runs]
    return found[0][0], np.mean([losses for _, losses in found], axis=0)


def position_gaps(result: ArmResult, baseline: ArmResult) -> np.ndarray:
    """The arm's loss over the baseline's, less 1, in each bucket; mean over the seeds that both have."""
    losses, others = (
        {run.arguments["seed"]: position_losses(run, True)[1] for run in each.arm.runs} for each in (result, baseline)
    )
    return np.mean([losses[seed] / others[seed] - 1 for seed in losses.keys() & others.keys()], axis=0)


def position_lines(comparison: Comparison) -> list[str]:
    """The gap to the baseline in each part of the context, and from where on it is one, as lines of Markdown."""
    baseline = comparison.results[0]
    gaps = {result.arm.name: position_gaps(result, baseline) for result in comparison.results[1:]}
    return [
        f"Validation loss against {baseline.arm.name}, in percent, by position (from the one that heads the column):",
        "",
        *table(
            ["arm", *_starts(baseline)], [[arm, *(f"{100 * gap:+.2f}" for gap in each)] for arm, each in gaps.items()]
        ),
        "",
        *losing_lines(comparison),
    ]


def losing_lines(comparison: Comparison) -> list[str]:
    """Of every arm one line of Markdown: from where on it loses to the baseline."""
    baseline = comparison.results[0]
    starts = _starts(baseline)
    return [
        *(
            f"- {loses_from(result.arm.name, position_gaps(result, baseline), starts, baseline.arm.name)}"
            for result in comparison.results[1:]
        ),
        "",
    ]


def _starts(result: ArmResult) -> list[str]:
    """How the buckets of positions are called."""
    return [f"{place / 1024:g}K" if place >= 1024 else str(place) for place in mean_positions(result)[0]]


def loses_from(arm: str, gaps: np.ndarray, starts: Sequence[str], baseline: str) -> str:
    """From which position on an arm's loss is above the baseline's to the end. gaps: one for each of the starts."""
    ahead = np.flatnonzero(gaps <= 0)
    first = int(ahead[-1]) + 1 if len(ahead) else 0
    if first == len(gaps):
        return f"{arm} does not lose to {baseline} at the end of the context."
    if first == 0:
        return f"{arm} loses to {baseline} at every position."
    return f"{arm} loses to {baseline} from {starts[first]} on."
