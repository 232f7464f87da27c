"""The pictures of a study: of its curves, and of the arms of one question."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from studies.positions import mean_positions
from s2_megatron.tools.compare.figures import COLOURS, draw_difference, draw_loss
from s2_megatron.tools.compare.measure import Comparison

BY_TOKENS, BY_POSITION = "tokens", "first position of the bucket"


def draw_curves(comparison: Comparison, file: Path) -> None:
    """Four panels: training loss over tokens and hours (over FLOPs where a run has no times), paired differences, the
    gap in validation loss by position."""
    figure, axes = _panels(2, 2, 7.5)
    spent, label = ("hours", "hours of training steps") if "hours" in comparison.limits else ("flops", "FLOPs")
    draw_loss(axes[0, 0], comparison, "tokens")
    draw_difference(axes[0, 1], comparison, "tokens")
    draw_loss(axes[1, 0], comparison, spent)
    _draw_position_gap(axes[1, 1], comparison, {result.arm.name for result in comparison.results})
    _save(figure, axes.flat, (BY_TOKENS, BY_TOKENS, label, BY_POSITION), file)


def draw_arms(comparison: Comparison, arms: Collection[str], file: Path) -> None:
    """Two panels of these arms against the baseline: paired differences over tokens, the gap in validation loss by
    position. An arm has one colour in the pictures of all questions."""
    figure, axes = _panels(1, 2, 3.9)
    draw_difference(axes[0], comparison, "tokens", arms)
    axes[0].set_title(f"training loss minus that of {comparison.results[0].arm.name}, and the interval of the verdict")
    _draw_position_gap(axes[1], comparison, arms)
    _save(figure, axes, (BY_TOKENS, BY_POSITION), file)


def _panels(rows: int, columns: int, height: float):
    """A figure, its height in inches, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(11, height), layout="constrained")


def _draw_position_gap(axis, comparison: Comparison, arms: Collection[str]) -> None:
    base = comparison.results[0]
    places, losses = mean_positions(base)
    for index, result in enumerate(comparison.results[1:], start=1):
        if result.arm.name not in arms:
            continue
        colour = COLOURS[index % len(COLOURS)]
        axis.plot(places, mean_positions(result)[1] - losses, color=colour, marker="o", label=result.arm.name)
    axis.axhline(0, color="#333333", linewidth=0.8)
    axis.set_title(f"validation loss minus that of {base.arm.name}, by position, at the end")


def _save(figure, axes, labels: tuple[str, ...], file: Path) -> None:
    from matplotlib import pyplot

    for axis, label in zip(axes, labels):
        axis.set_xlabel(label)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
