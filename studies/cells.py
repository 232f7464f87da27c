"""The tables of a study's page, and how a number stands in them."""

from __future__ import annotations

from collections.abc import Sequence

from s2_megatron.tools.compare.measure import ArmResult
from s2_megatron.tools.compare.runs import Run


def last(run: Run, name: str) -> float:
    """The last value of a series."""
    return float(run.series[name].values[-1])


def percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


def gap(value: float, baseline: float) -> str:
    return f"{value:.4f} ({percent(value / baseline - 1)})"


def paired(result: ArmResult) -> str:
    """The training loss against the baseline's, with its interval; "-" for the baseline."""
    if result.difference is None:
        return "-"
    mean, low, high = result.difference.relative
    return f"{percent(mean)} [{percent(low)}, {percent(high)}]"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    return [
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
