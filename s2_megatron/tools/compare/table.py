"""A comparison in words and numbers: the verdicts, the table, the JSON."""

from __future__ import annotations

import numpy as np
from rich.table import Table

from s2_megatron.tools.compare.measure import (
    MIN_SMOOTHED,
    SMOOTHED_SHARE,
    THROUGHPUTS,
    VERDICT_SHARE,
    ArmResult,
    Comparison,
)
from s2_megatron.tools.compare.runs import LEARNING_RATE, Run
from s2_megatron.tools.compare.settings import Arm, mixed_settings
from s2_megatron.tools.compare.statistics import CONFIDENCE, SPREAD_PAIRS, Difference

AXIS_NAMES = {"tokens": "tokens", "hours": "hours", "flops": "attended FLOPs", "dense-flops": "dense-equivalent FLOPs"}
# A run is in the middle of its schedule when its learning rate has yet to fall by more than this share of its highest.
LEFT_TO_FALL = 0.05
_AMOUNT_NAMES = {
    "tokens": "tokens",
    "hours": "time",
    "flops": "attended FLOPs",
    "dense-flops": "dense-equivalent FLOPs",
}


def amount_text(axis: str, amount: float, least: float | None = None) -> str:
    """1.23e+09 FLOPs, 12.3 M tokens, 4.56 h or, where the amount (or `least`, the row's smallest) is below 0.1 h,
    seconds."""
    if axis == "hours":
        return f"{amount:,.2f} h" if min(amount, least or amount) >= 0.1 else f"{3600 * amount:,.0f} s"
    if axis == "tokens":
        for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
            if amount >= size:
                return f"{amount / size:,.3g} {unit} tokens"
        return f"{amount:,.0f} tokens"
    return f"{amount:.3g} FLOPs"


def interval_text(difference: Difference) -> str:
    relative, low, high = difference.relative
    return (
        f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}] "
        f"({relative:+.2%} [{low:+.2%}, {high:+.2%}])"
    )


def verdict_line(result: ArmResult, comparison: Comparison) -> str:
    """One sentence: better, worse or not told apart, by how much, and where the interval comes from."""
    difference, baseline = result.difference, comparison.results[0].arm.name
    verdict = {
        "better": f"{result.arm.name} is better than {baseline}",
        "worse": f"{result.arm.name} is worse than {baseline}",
        "not told apart": f"{result.arm.name} and {baseline} are not told apart",
    }[difference.verdict]
    text = f"{verdict}: training loss {interval_text(difference)}, "
    text += f"{CONFIDENCE:.0%} interval over the last {VERDICT_SHARE:.0%} of the steps. "
    if difference.pairs >= SPREAD_PAIRS:
        return text + f"It is the spread of {difference.pairs} pairs of seeds."
    offset = comparison.run_offset
    pairs = "one pair of runs" if difference.pairs == 1 else f"{difference.pairs} pairs of runs"
    return text + (
        f"It is {pairs}: ±{difference.step_error:.4f} from the steps (bootstrap, blocks of {difference.block}) and "
        f"±{difference.offset_error:.4f} because runs of equal settings end "
        f"{offset.nats:g} apart ({offset.source}). "
        f"{SPREAD_PAIRS} seeds or more replace that number by their own spread."
    )


def table_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """(column names, rows): a column per arm, a row per quantity that any arm has."""
    results = comparison.results
    rows: list[list[str]] = []

    def add(name: str, values, form) -> None:
        values = list(values)
        if any(value is not None for value in values):
            rows.append([name, *("-" if value is None else form(value) for value in values)])

    def loss(value: float) -> str:
        return f"{value:.4f}"

    rows.append(["runs (seeds)", *(f"{len(r.arm.runs)} ({', '.join(_seeds(r))})" for r in results)])
    add("final training loss", (r.final_loss for r in results), loss)
    add("its spread over seeds", (r.spread for r in results), loss)
    add("validation loss", (r.validation for r in results), loss)
    for axis, limit in comparison.limits.items():
        name = f"loss at equal {_AMOUNT_NAMES[axis]} ({amount_text(axis, limit)})"
        add(name, (r.at_equal.get(axis) for r in results), loss)
    for axis in comparison.limits:
        name = f"{_AMOUNT_NAMES[axis]} to loss {comparison.target:.4f}"
        amounts = [r.to_target.get(axis) for r in results]
        least = min((amount for amount in amounts if amount is not None), default=None)
        add(name, amounts, lambda value, axis=axis, least=least: amount_text(axis, value, least))
    add("effective speed-up (time to that loss)", (r.speed_up for r in results), lambda value: f"{value:.3f}x")
    add("tokens/s", (r.tokens_per_second for r in results), lambda value: f"{value:,.0f}")
    for key, name in THROUGHPUTS.items():
        add(name, (r.throughputs.get(key) for r in results), lambda value: f"{value:.4g}")
    add("difference of validation loss", (r.validation_difference for r in results), lambda value: f"{value:+.4f}")
    add("paired difference of training loss", (r.difference for r in results), interval_text)
    add("verdict", (r.difference for r in results), lambda difference: difference.verdict)
    return ["", *(r.arm.name for r in results)], rows


def _seeds(result: ArmResult) -> list[str]:
    return [str((run.arguments or {}).get("seed", "?")) for run in result.arm.runs]


def footnote() -> str:
    return (
        f"Losses are means of the last {SMOOTHED_SHARE:.0%} of the logged steps up to the point ({MIN_SMOOTHED} steps "
        "at least). "
        "Times are of the clock between logged steps, start-ups left out; only runs on equal machines that did nothing "
        "else compare by them. Attended FLOPs are those that S2 computes; "
        "dense-equivalent FLOPs are those of the same model with dense attention."
    )


def remarks(comparison: Comparison) -> list[str]:
    """Which arms mix runs of different settings, what joining the pieces of each run showed, and which runs were
    measured in the middle of their schedules."""
    runs = [run for result in comparison.results for run in result.arm.runs]
    mixed = [line for result in comparison.results for line in _mixed(result.arm)]
    joined = [f"{run.name}: {remark}" for run in runs for remark in run.remarks]
    return mixed + joined + [line for run in runs for line in _unfinished(run, comparison.limits)]


def _mixed(arm: Arm) -> list[str]:
    """A line on an arm whose runs differ in what decides what is learnt; none on others."""
    if not (mixed := mixed_settings(arm)):
        return []
    differing = "; ".join(f"{name} ({', '.join(values)})" for name, values in mixed.items())
    return [f"The runs of {arm.name} differ in {differing}: its numbers are means over runs that are not alike."]


def _unfinished(run: Run, limits: dict[str, float]) -> list[str]:
    """At which of the amounts where losses are compared the run's learning rate had not come down yet."""
    if LEARNING_RATE not in run.series or "tokens" not in run.axes:
        return []
    rate, points = run.series[LEARNING_RATE], []
    highest = float(rate.values.max())
    for axis, limit in limits.items():
        step = np.interp(limit, run.axis(axis), run.steps)
        here = float(np.interp(step, rate.steps, rate.values))
        if here - rate.values[-1] > LEFT_TO_FALL * highest:
            tokens = float(run.at(np.array([step]), "tokens")[0])
            share = f"learning rate at {here / highest:.0%} of its highest"
            points.append(f"{_AMOUNT_NAMES[axis]} ({amount_text('tokens', tokens)}, {share})")
    if not points:
        return []
    return [
        f"{run.name} was in the middle of its schedule at equal {', '.join(points)}, and ended it at "
        f"{rate.values[-1] / highest:.0%}; a run whose schedule ends there would usually have a lower loss."
    ]


def rich_table(comparison: Comparison) -> Table:
    columns, rows = table_rows(comparison)
    table = Table(title="Runs compared", title_justify="left", caption=footnote(), caption_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def as_json(comparison: Comparison) -> dict:
    """Plain values: what the table shows, unrounded."""
    return {
        "baseline": comparison.results[0].arm.name,
        "target_loss": comparison.target,
        "run_offset": {"nats": comparison.run_offset.nats, "source": comparison.run_offset.source},
        "limits": comparison.limits,
        "arms": [_arm_json(result) for result in comparison.results],
        "remarks": remarks(comparison),
    }


def _arm_json(result: ArmResult) -> dict:
    difference = result.difference
    return {
        "name": result.arm.name,
        "runs": [{"name": run.name, "sources": list(run.sources)} for run in result.arm.runs],
        "seeds": _seeds(result),
        "final_loss": result.final_loss,
        "spread": result.spread,
        "validation_loss": result.validation,
        "loss_at_equal": result.at_equal,
        "to_target": result.to_target,
        "speed_up": result.speed_up,
        "tokens_per_second": result.tokens_per_second,
        "throughputs": result.throughputs,
        "validation_difference": result.validation_difference,
        "difference": difference
        and {
            "verdict": difference.verdict,
            "mean": difference.mean,
            "low": difference.low,
            "high": difference.high,
            "relative": list(difference.relative),
            "step_error": difference.step_error,
            "offset_error": difference.offset_error,
            "pairs": difference.pairs,
            "steps": difference.steps,
            "block": difference.block,
        },
    }
