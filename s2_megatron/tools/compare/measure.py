"""The numbers of a comparison: losses at equal tokens, time and FLOPs, what it takes to reach a loss, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from s2_megatron.tools.compare.runs import AXES, TRAINING_LOSS, VALIDATION_LOSS, Run
from s2_megatron.tools.compare.settings import Arm, begins_with, pair_by_seed
from s2_megatron.tools.compare.statistics import Difference, RunOffset, difference_of_pairs, run_offset_for
from s2_megatron.tools.compare.times import StepTimes, step_times, why_withheld

# A loss "at" a point is the mean of this share of the run's logged steps up to it (of MIN_SMOOTHED at least).
SMOOTHED_SHARE = 0.05
MIN_SMOOTHED = 10
# Verdicts are about this last share of the steps that both runs have.
VERDICT_SHARE = 0.25
MIN_PAIRED_STEPS = 20
THROUGHPUTS = {"throughput": "attended TFLOP/s/GPU", "throughput-dense-equivalent": "dense-equivalent TFLOP/s/GPU"}


@dataclass(frozen=True)
class Paired:
    """The difference of one pair, arm minus baseline, step by step. steps: int64 [n], iterations of the baseline's run;
    arm, baseline: losses, float64 [n]."""

    steps: np.ndarray
    arm: np.ndarray
    baseline: np.ndarray


@dataclass(frozen=True)
class ArmResult:
    """One arm's row of the table; means over its runs, None where it was not logged.

    at_equal: {axis: smoothed training loss where the shortest run ends}. to_target: {axis: how much it took to reach
    the target loss}. speed_up: the baseline's hours to the target over the arm's. spread: standard deviation of the
    final smoothed loss over seeds. step_seconds: over the steps of all its runs.
    """

    arm: Arm
    final_loss: float
    validation: float | None
    spread: float | None
    at_equal: dict[str, float]
    to_target: dict[str, float]
    speed_up: float | None
    tokens_per_second: float | None
    throughputs: dict[str, float]
    difference: Difference | None
    validation_difference: float | None
    step_seconds: StepTimes | None = None


@dataclass(frozen=True)
class Comparison:
    """target: the loss of to_target. limits: {axis: where the shortest run ends}. The first arm is the baseline.
    times_withheld: why hours are not an axis and nothing that follows from times is given; "" if all of it is given."""

    results: tuple[ArmResult, ...]
    target: float
    limits: dict[str, float]
    run_offset: RunOffset
    paired: dict[str, list[Paired]]
    times_withheld: str = ""


def smoothed_steps(run: Run) -> int:
    return min(len(run.steps), max(MIN_SMOOTHED, round(SMOOTHED_SHARE * len(run.steps))))


def smoothed(run: Run) -> np.ndarray:
    """Mean of the training losses up to each step over smoothed_steps; of those that there are at the start."""
    values = run.series[TRAINING_LOSS].values
    width = min(smoothed_steps(run), len(values))
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


def loss_at(run: Run, axis: str, amount: float) -> float:
    """The smoothed training loss when the run had spent `amount`."""
    return float(np.interp(amount, run.axis(axis), smoothed(run)))


def amount_to(run: Run, axis: str, loss: float) -> float | None:
    """How much the run spent until its smoothed loss reached `loss`; None when it never did."""
    curve = smoothed(run)
    width = smoothed_steps(run)
    reached = np.flatnonzero(curve[width - 1 :] <= loss)  # not in the first steps, whose mean is of few
    return float(run.axis(axis)[width - 1 + reached[0]]) if len(reached) else None


def paired_steps(run: Run, baseline: Run) -> Paired:
    """The losses of both runs at the same data: at equal steps, or, where their batches differ in size, at the steps of
    the larger batch, over which the other run is averaged."""
    own, other = run.series[TRAINING_LOSS], baseline.series[TRAINING_LOSS]
    tokens, other_tokens = run.axes.get("tokens"), baseline.axes.get("tokens")
    same_batch = tokens is None or other_tokens is None or _tokens_at_common(run, baseline)
    if same_batch:
        steps, at_own, at_other = np.intersect1d(own.steps, other.steps, return_indices=True)
        return Paired(steps, own.values[at_own], other.values[at_other])
    end = min(tokens[-1], other_tokens[-1])
    edges = max((tokens, other_tokens), key=lambda each: each[-1] / len(each))
    edges = edges[edges <= end]
    return Paired(
        np.rint(np.interp(edges[1:], other_tokens, other.steps)).astype(np.int64),
        _averaged(own.values, tokens, edges),
        _averaged(other.values, other_tokens, edges),
    )


def _tokens_at_common(run: Run, baseline: Run) -> bool:
    common, at_own, at_other = np.intersect1d(run.steps, baseline.steps, return_indices=True)
    return len(common) > 0 and np.allclose(run.axes["tokens"][at_own], baseline.axes["tokens"][at_other], rtol=1e-9)


def _averaged(values: np.ndarray, tokens: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean loss of the tokens between each two edges."""
    spent = np.concatenate([[0.0], tokens])
    total = np.concatenate([[0.0], np.cumsum(values * np.diff(spent))])
    return np.diff(np.interp(edges, spent, total)) / np.diff(edges)


def _check_finite(run: Run) -> None:
    """Raises ValueError where a loss is NaN or infinite: no mean, interval or verdict is left of such a run."""
    for name in (TRAINING_LOSS, VALIDATION_LOSS):
        series = run.series.get(name)
        bad = [] if series is None else series.steps[~np.isfinite(series.values)].tolist()
        if bad:
            raise ValueError(
                f"run {run.name} ({', '.join(run.sources)}): {len(bad)} of {len(series)} values of {name!r} are no "
                f"finite numbers, the first at iteration {bad[0]}; expected finite losses; the run diverged there: "
                f"compare a log that ends before iteration {bad[0]}, or train it again with a lower learning rate"
            )


def _last(paired: Paired, names: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    count = max(MIN_PAIRED_STEPS, round(VERDICT_SHARE * len(paired.steps)))
    if len(paired.steps) < count:
        raise ValueError(
            f"{names[0]} and {names[1]} have {len(paired.steps)} logged steps in common; expected {MIN_PAIRED_STEPS} "
            "or more "
            "for a verdict; train longer, or log more often (--tensorboard-log-interval 1, --s2-loss-log)"
        )
    return paired.arm[-count:], paired.baseline[-count:]


def compare(
    arms: Sequence[Arm], vary: Sequence[str] = (), target: float | None = None, run_offset: float | None = None
) -> Comparison:
    """Compare every arm with the first one.

    target: the loss of to_target; default the largest final loss of any run, which all of them reach. run_offset: in
    nats, see statistics.difference_of_pairs; default that of runs of as many tokens, or of runs of which each pair goes
    on from one checkpoint. Raises ValueError for arms without a common seed, for runs that are too short and for losses
    that are no finite numbers.
    """
    runs = [run for arm in arms for run in arm.runs]
    for run in runs:
        _check_finite(run)
    if target is None:
        target = max(float(smoothed(run)[-1]) for run in runs)
    shared = [axis for axis in AXES if all(axis in run.axes for run in runs)]
    withheld = why_withheld(runs) if "hours" in shared else ""
    if withheld:
        shared.remove("hours")
    limits = {axis: min(float(run.axis(axis)[-1]) for run in runs) for axis in shared}
    baseline = arms[0]
    pairs_of = {arm.name: [] if arm is baseline else pair_by_seed(arm, baseline, vary) for arm in arms}
    starts = [(begins_with(run), begins_with(other)) for pairs in pairs_of.values() for run, other in pairs]
    going_on = bool(starts) and all(start == other and start is not None for start, other in starts)
    offset = run_offset_for(limits.get("tokens"), going_on)
    if run_offset is not None:
        offset = RunOffset(run_offset, "as given by --run-offset")
    results, paired = [], {}
    baseline_hours = _mean(amount_to(run, "hours", target) for run in baseline.runs) if "hours" in limits else None
    for arm in arms:
        pairs = pairs_of[arm.name]
        paired[arm.name] = [paired_steps(*pair) for pair in pairs]
        difference = None
        if pairs:
            losses = [_last(each, (pair[0].name, pair[1].name)) for each, pair in zip(paired[arm.name], pairs)]
            difference = difference_of_pairs(losses, offset.nats)
        finals = [float(smoothed(run)[-1]) for run in arm.runs]
        to_target = {axis: _mean(amount_to(run, axis, target) for run in arm.runs) for axis in shared}
        hours = to_target.get("hours")
        results.append(
            ArmResult(
                arm=arm,
                final_loss=float(np.mean(finals)),
                validation=_mean(_last_value(run, VALIDATION_LOSS) for run in arm.runs),
                spread=float(np.std(finals, ddof=1)) if len(finals) > 1 else None,
                at_equal={
                    axis: float(np.mean([loss_at(run, axis, limits[axis]) for run in arm.runs])) for axis in shared
                },
                to_target={axis: amount for axis, amount in to_target.items() if amount is not None},
                speed_up=baseline_hours / hours if baseline_hours and hours else None,
                tokens_per_second=None if withheld else _mean(map(_tokens_per_second, arm.runs)),
                throughputs={
                    name: value
                    for name in (() if withheld else THROUGHPUTS)
                    if (value := _mean(_mean_value(run, name) for run in arm.runs)) is not None
                },
                difference=difference,
                validation_difference=_mean(_validation_difference(*pair) for pair in pairs),
                step_seconds=step_times(arm.runs),
            )
        )
    return Comparison(tuple(results), target, limits, offset, paired, withheld)


def _mean(values) -> float | None:
    """None when a value is missing, or all are."""
    values = list(values)
    return None if not values or any(value is None for value in values) else float(np.mean(values))


def _last_value(run: Run, name: str) -> float | None:
    return float(run.series[name].values[-1]) if name in run.series else None


def _mean_value(run: Run, name: str) -> float | None:
    """The median, which a step with a checkpoint or an evaluation does not move."""
    return float(np.median(run.series[name].values)) if name in run.series else None


def _tokens_per_second(run: Run) -> float | None:
    if "hours" not in run.axes or "tokens" not in run.axes or run.axes["hours"][-1] == 0:
        return None
    return float(run.axes["tokens"][-1] / (3600 * run.axes["hours"][-1]))


def _validation_difference(run: Run, baseline: Run) -> float | None:
    """At the last evaluation that both have."""
    if VALIDATION_LOSS not in run.series or VALIDATION_LOSS not in baseline.series:
        return None
    own, other = run.series[VALIDATION_LOSS], baseline.series[VALIDATION_LOSS]
    common, at_own, at_other = np.intersect1d(own.steps, other.steps, return_indices=True)
    return float(own.values[at_own[-1]] - other.values[at_other[-1]]) if len(common) else None
