"""A comparison in words and numbers: the verdicts, the table, the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
from s2_megatron.tools.compare.settings import Arm, mixed_settings, sparsity_name
from s2_megatron.tools.compare.statistics import CONFIDENCE, SPREAD_PAIRS, Difference
from s2_megatron.tools.compare.times import StepTimes

AXIS_NAMES = {"tokens": "tokens", "hours": "hours", "flops": "attended FLOPs", "dense-flops": "dense-equivalent FLOPs"}
# A run is in the middle of its schedule when its learning rate has yet to fall by more than this share of its highest.
LEFT_TO_FALL = 0.05
# So many arms stand beside each other in the table; more stand below each other, with what is asked for first.
MOST_BESIDE = 6
# Remarks of one kind that are printed one by one.
MOST_REMARKS = 5
_AMOUNT_NAMES = {
    "tokens": "tokens",
    "hours": "time",
    "flops": "attended FLOPs",
    "dense-flops": "dense-equivalent FLOPs",
}


class Row(NamedTuple):
    """A quantity of the table. cells: one an arm. main: whether it stands in the table of many arms."""

    name: str
    cells: list[str]
    main: bool = False


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


def seconds_text(times: StepTimes) -> str:
    """The median, and the middle half of the steps."""
    factor, unit = (1, "s") if times.median >= 1 else (1e3, "ms")
    return f"{times.median * factor:.3g} {unit} ({times.low * factor:.3g} to {times.high * factor:.3g})"


def share_text(share: float) -> str:
    """How far a loss is from the baseline's: 0.40 % better, 0.12 % worse."""
    return f"{abs(100 * share):.2f} % {'better' if share < 0 else 'worse'}"


def range_text(difference: Difference) -> str:
    """Between 0.40 % better and 0.12 % worse; between 0.12 % and 0.40 % worse."""
    _, low, high = difference.relative
    if (low < 0) == (high < 0):
        near, far = sorted((low, high), key=abs)
        return f"between {abs(100 * near):.2f} % and {share_text(far)}"
    return f"between {share_text(low)} and {share_text(high)}"


def verdict_line(result: ArmResult, comparison: Comparison) -> str:
    """One sentence: better, worse or not told apart, and by how much."""
    difference, baseline = result.difference, comparison.results[0].arm.name
    verdict = {
        "better": f"{result.arm.name} is better than {baseline}",
        "worse": f"{result.arm.name} is worse than {baseline}",
        "not told apart": f"{result.arm.name} and {baseline} are not told apart",
    }[difference.verdict]
    if difference.undecided:
        return (
            f"{verdict}: {difference.undecided} (the mean is {share_text(difference.relative[0])}). Train longer, log "
            f"every step, or give {SPREAD_PAIRS} seeds or more."
        )
    return f"{verdict}: its training loss is {range_text(difference)}."


def verdict_lines(comparison: Comparison) -> list[tuple[str, str]]:
    """[(verdict, its sentence)] of every arm; of many arms a sentence for each verdict, as the table has the rest."""
    baseline, *others = comparison.results
    if len(others) < MOST_BESIDE:
        return [(result.difference.verdict, verdict_line(result, comparison)) for result in others]
    lines = []
    for verdict, text in (
        ("better", f"better than {baseline.arm.name}"),
        ("worse", f"worse than {baseline.arm.name}"),
        ("not told apart", f"not told apart from {baseline.arm.name}"),
    ):
        names = [result.arm.name for result in others if result.difference.verdict == verdict]
        if names:
            lines.append((verdict, f"{len(names)} of {len(others)} are {text}: {', '.join(names)}."))
    return lines


def about_verdicts(comparison: Comparison) -> list[str]:
    """Where the intervals come from."""
    others = comparison.results[1:]
    if not others:
        return ["All runs have the same settings: there is nothing to compare but their spread over seeds."]
    undecided = [result for result in others if result.difference.undecided]
    lines = _about_intervals(comparison)
    if undecided and len(others) >= MOST_BESIDE:
        lines.insert(
            0, f"{len(undecided)} have no interval, as {undecided[0].arm.name}: {undecided[0].difference.undecided}."
        )
    return lines


def _about_intervals(comparison: Comparison) -> list[str]:
    decided = [each for each in comparison.results[1:] if not each.difference.undecided]
    if not decided:
        return []
    lines = [
        f"These are {CONFIDENCE:.0%} intervals of the difference over the last {VERDICT_SHARE:.0%} of the steps that "
        "both runs have."
    ]
    several = [each.difference.pairs for each in decided if each.difference.pairs >= SPREAD_PAIRS]
    if several:
        least, most = min(several), max(several)
        lines[0] += f" {least if least == most else f'{least} to {most}'} pairs of seeds give their own spread."
    few = [each.difference for each in decided if each.difference.pairs < SPREAD_PAIRS]
    if few:
        offset = comparison.run_offset
        steps, ends = (max(getattr(each, name) for each in few) for name in ("step_error", "offset_error"))
        most = "" if len(few) == 1 else "up to "
        lines[0] += (
            f" Fewer than {SPREAD_PAIRS} pairs of seeds: {most}±{steps:.4f} from the steps and {most}±{ends:.4f} "
            f"because runs of equal settings end {offset.nats:g} apart ({offset.source}); {SPREAD_PAIRS} seeds or more "
            "replace both by their own spread."
        )
    chance = (1 - CONFIDENCE) * len(decided)
    if chance >= 0.5:
        lines.append(f"Of {len(decided)} such verdicts about {chance:.0f} would name a difference where there is none.")
    return lines


def table_rows(comparison: Comparison) -> tuple[list[str], list[Row]]:
    """(names of the arms, rows): a row per quantity that any arm has."""
    results = comparison.results
    rows: list[Row] = []

    def add(name: str, values, form, main: bool = False) -> None:
        values = list(values)
        if any(value is not None for value in values):
            rows.append(Row(name, ["-" if value is None else form(value) for value in values], main))

    def loss(value: float) -> str:
        return f"{value:.4f}"

    add("runs (seeds)", results, lambda r: f"{len(r.arm.runs)} ({', '.join(_seeds(r))})", main=True)
    add("sparsity", (_sparsity(result.arm) for result in results), str, main=True)
    if len(results) > 1:
        add(f"training loss, last {VERDICT_SHARE:.0%} of the steps", _compared_losses(comparison), loss, main=True)
        add("against the baseline", (r.difference for r in results), _interval, main=True)
        add("verdict", (r.difference for r in results), lambda difference: difference.verdict, main=True)
    else:
        add("final training loss", (r.final_loss for r in results), loss, main=True)
    add("spread of the final loss over seeds", (r.spread for r in results), loss)
    add("validation loss, last", (r.validation for r in results), loss, main=True)
    axes = _asked(comparison)
    for axis in axes:
        limit = comparison.limits[axis]
        name = f"loss at equal {_AMOUNT_NAMES[axis]} ({amount_text(axis, limit)})"
        if axis != "tokens" or _lengths_differ(comparison):
            add(name, (r.at_equal.get(axis) for r in results), loss)
    for axis in axes:
        name = f"{_AMOUNT_NAMES[axis]} to loss {comparison.target:.4f}"
        amounts = [r.to_target.get(axis) for r in results]
        least = min((amount for amount in amounts if amount is not None), default=None)
        add(name, amounts, lambda value, axis=axis, least=least: amount_text(axis, value, least))
    add("effective speed-up (time to that loss)", (r.speed_up for r in results), lambda value: f"{value:.2f} x")
    add("time of a step (middle half)", (r.step_seconds for r in results), seconds_text, main=True)
    add("tokens/s", (r.tokens_per_second for r in results), lambda value: f"{value:,.0f}")
    for key, name in THROUGHPUTS.items():
        add(name, (r.throughputs.get(key) for r in results), lambda value: f"{value:.4g}")
    return [result.arm.name for result in results], rows


def _sparsity(arm: Arm) -> str | None:
    names = dict.fromkeys(sparsity_name(run) for run in arm.runs if run.arguments is not None)
    return ", ".join(names) or None


def _compared_losses(comparison: Comparison) -> list[float]:
    """Over the steps of the verdicts, so that their differences are those of the verdicts. The baseline's is the mean
    over the arms, which have other steps where the runs end elsewhere."""
    differences = [result.difference for result in comparison.results[1:]]
    baseline = float(np.mean([difference.baseline for difference in differences]))
    return [baseline, *(difference.baseline + difference.mean for difference in differences)]


def _interval(difference: Difference) -> str:
    mean, low, high = difference.relative
    return f"{mean:+.2%}" + (" (no interval)" if difference.undecided else f" [{low:+.2%}, {high:+.2%}]")


def _lengths_differ(comparison: Comparison) -> bool:
    ends = [run.axis("tokens")[-1] for result in comparison.results for run in result.arm.runs]
    return max(ends) > 1.001 * min(ends)


def _asked(comparison: Comparison) -> list[str]:
    """The axes that ask a question of their own: of equal models the dense-equivalent FLOPs are the tokens once
    more."""
    axes = list(comparison.limits)
    if {"tokens", "dense-flops"} <= set(axes):
        runs = [run for result in comparison.results for run in result.arm.runs]
        ratios = [run.axis("dense-flops")[-1] / run.axis("tokens")[-1] for run in runs]
        if max(ratios) <= 1.001 * min(ratios):
            axes.remove("dense-flops")
    return axes


def _seeds(result: ArmResult) -> list[str]:
    return [str((run.arguments or {}).get("seed", "?")) for run in result.arm.runs]


def footnote() -> str:
    return (
        f"Other losses than that of the last {VERDICT_SHARE:.0%} are means of the last {SMOOTHED_SHARE:.0%} of the "
        f"logged steps up to the point ({MIN_SMOOTHED} steps at least). Times are of the clock between logged steps. "
        "Attended FLOPs are those that S2 computes; dense-equivalent FLOPs are those of the same model with dense "
        "attention."
    )


def remarks(comparison: Comparison) -> list[str]:
    """Why times are left out, which arms mix runs of different settings, what joining the pieces of each run showed,
    and which runs were measured in the middle of their schedules."""
    runs = [run for result in comparison.results for run in result.arm.runs]
    times = []
    if comparison.times_withheld:
        times = [f"No times are compared, and no speed-up: {comparison.times_withheld}."]
    mixed = [line for result in comparison.results for line in _mixed(result.arm)]
    joined = [f"{run.name}: {remark}" for run in runs for remark in run.remarks]
    return times + mixed + _first(joined) + _unfinished(runs, comparison.limits)


def _first(lines: list[str]) -> list[str]:
    rest = len(lines) - MOST_REMARKS
    return lines if rest <= 0 else [*lines[:MOST_REMARKS], f"... and {rest} more such remarks"]


def _mixed(arm: Arm) -> list[str]:
    """A line on an arm whose runs differ in what decides what is learnt; none on others."""
    if not (mixed := mixed_settings(arm)):
        return []
    differing = "; ".join(f"{name} ({', '.join(values)})" for name, values in mixed.items())
    return [f"The runs of {arm.name} differ in {differing}: its numbers are means over runs that are not alike."]


def _unfinished(runs: Sequence[Run], limits: dict[str, float]) -> list[str]:
    """At which of the amounts where losses are compared the learning rates of runs had not come down yet: one line for
    each amount."""
    lines = []
    for axis, limit in limits.items():
        found = [(run, share) for run in runs if (share := _left_to_fall(run, axis, limit)) is not None]
        if not found:
            continue
        names = ", ".join(run.name for run, _ in found[:MOST_REMARKS])
        more = f" and {len(found) - MOST_REMARKS} more" if len(found) > MOST_REMARKS else ""
        low, high = min(share for _, share in found), max(share for _, share in found)
        rate = f"{low:.0%}" if len(found) == 1 else f"{low:.0%} to {high:.0%}"
        lines.append(
            f"At equal {_AMOUNT_NAMES[axis]} {names}{more} {'was' if len(found) == 1 else 'were'} in the middle of the "
            f"schedule (learning rate at {rate} of its highest): a run whose schedule ends there would usually have a "
            "lower loss."
        )
    return lines


def _left_to_fall(run: Run, axis: str, limit: float) -> float | None:
    """The learning rate at this amount as a share of its highest; None where it has hardly fallen any more since."""
    if LEARNING_RATE not in run.series:
        return None
    rate = run.series[LEARNING_RATE]
    highest = float(rate.values.max())
    here = float(np.interp(np.interp(limit, run.axis(axis), run.steps), rate.steps, rate.values))
    return here / highest if here - rate.values[-1] > LEFT_TO_FALL * highest else None


def shown_table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """(column names, rows) as they are shown: the arms beside each other, or many of them below each other with the
    main quantities."""
    names, rows = table_rows(comparison)
    if len(names) <= MOST_BESIDE:
        return ["", *names], [[row.name, *row.cells] for row in rows]
    main = [row for row in rows if row.main]
    return ["", *(row.name for row in main)], [
        [name, *cells] for name, *cells in zip(names, *(row.cells for row in main))
    ]


def rich_table(comparison: Comparison) -> Table:
    columns, rows = shown_table(comparison)
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
        "times_withheld": comparison.times_withheld or None,
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
        "step_seconds": result.step_seconds and vars(result.step_seconds),
        "tokens_per_second": result.tokens_per_second,
        "throughputs": result.throughputs,
        "validation_difference": result.validation_difference,
        "difference": difference
        and {
            "verdict": difference.verdict,
            "undecided": difference.undecided or None,
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
