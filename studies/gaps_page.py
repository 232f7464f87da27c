"""What a study's page says of runs from random weights by seed: every run beside dense of its seed, where the seeds
have other arms or other learning rates, so that a mean over them would mix unlike runs; how far like ones scatter."""

from __future__ import annotations

import math
from dataclasses import replace

from studies.cells import gap, last, paired, percent, table
from studies.effects import Effects, deviation_interval, fit
from studies.scales import Scale, runs_by_key, seed_of
from studies.studies import density
from studies.targets import target_lines
from s2_megatron.tools.compare.measure import ArmResult
from s2_megatron.tools.compare.runs import VALIDATION_LOSS, Run, number
from s2_megatron.tools.compare.statistics import SPREAD_PAIRS


def decides(part: Scale) -> bool:
    """Whether so many seeds with the same arms and learning rates have an interval of their own spread."""
    return len(part.seeds) >= SPREAD_PAIRS


def noise_lines(part: Scale) -> list[str]:
    """Lines of Markdown: how far the runs of these seeds are from each other, from all arms together. [] where other
    seeds or arms are wanted for it, and for runs that go on, whose gaps differ from seed to seed by more than noise."""
    if part.study.start is not None or not decides(part) or len(part.comparison.results) < 3:
        return []
    losses = {key: last(run, VALIDATION_LOSS) for key, run in runs_by_key(part.comparison).items()}
    effects = fit(losses)
    low, high = deviation_interval(effects.noise, effects.freedom)
    gaps, pairs = _comparisons(effects)
    fewer = {seed: fit({key: loss for key, loss in losses.items() if key[1] != seed}) for seed in part.seeds}
    return [
        f"Beside what arm and seed explain, the validation losses of these runs scatter by {effects.noise:.4f} nats "
        f"(standard deviation, {effects.freedom} degrees of freedom, 95 % interval {low:.4f} to {high:.4f}). The table "
        "has the gaps to dense in validation loss, in percent of dense's. By this scatter, in place of the spread of "
        f"each arm alone, every gap of a row has the same 95 % interval: for the {gaps} gaps to dense together, and, "
        f"wider, for all {pairs} between any two arms. The rows below the first leave out one seed: a gap that is "
        "larger than its interval in every row does not depend on a single seed.",
        "",
        *table(
            ["seeds", *effects.arms[1:], f"± for {gaps} gaps to dense", f"± for all {pairs} gaps"],
            [_gap_row("all", effects), *(_gap_row(f"without {seed}", each) for seed, each in fewer.items())],
        ),
        "",
    ]


def _comparisons(effects: Effects) -> tuple[int, int]:
    """How many gaps to the first arm there are, and how many between any two."""
    return len(effects.arms) - 1, math.comb(len(effects.arms), 2)


def _gap_row(title: str, effects: Effects) -> list[str]:
    """Every seed has every arm, so that one interval is that of all."""
    dense, *others = effects.arms
    halves = (effects.half_width(others[0], dense, count) for count in _comparisons(effects))
    return [
        title,
        *(percent(effects.difference(arm, dense) / effects.mean(dense)) for arm in others),
        *(f"± {100 * half / effects.mean(dense):.2f} %" for half in halves),
    ]


def gaps_section(scale: Scale) -> list[str]:
    """Lines of Markdown: the losses by seed, and the targets at equal tokens over all seeds of the arms of which not
    enough seeds are alike to decide."""
    dense, *others = scale.comparison.results
    runs = {seed_of(run): run for run in dense.arm.runs}
    decided = {result.arm.name for part in scale.parts() if decides(part) for result in part.comparison.results}
    asked = replace(scale.comparison, results=[dense, *(each for each in others if each.arm.name not in decided)])
    held = target_lines(asked, [], scale.study.step_tokens, ("tokens",))
    rates = {seed: _rates(scale, seed) for seed in runs}
    mixed = " The seeds have several learning rates." if len(set(rates.values())) > 1 else ""
    return [
        "### Every seed by itself",
        "",
        *(f"- {line}" for line in held),
        *([""] if held else []),
        "Validation loss, and how far it is above that of dense with the same seed (in the heading with the learning "
        f"rate of its runs). At the right the training loss against dense, paired, over all seeds of the arm.{mixed} "
        "Three seeds or more have the 95 % interval of their own spread, fewer one by the distance of equal runs.",
        "",
        *table(
            ["arm", "pairs attended", *(f"seed {seed}, {rate}" for seed, rate in rates.items()), "all its seeds"],
            [_row(scale, dense, runs), *(_row(scale, result, runs) for result in others)],
        ),
        "",
    ]


def _rates(scale: Scale, seed: str) -> str:
    rates = dict.fromkeys(f"{number(run.arguments, 'lr'):g}" for run in scale.runs if seed_of(run) == seed)
    return ", ".join(rates)


def _row(scale: Scale, result: ArmResult, dense: dict[str, Run]) -> list[str]:
    own, is_dense = {seed_of(run): run for run in result.arm.runs}, result.difference is None
    return [
        result.arm.name,
        f"{100 * density(scale.study, result.arm.name):.1f} %",
        *(_cell(own.get(seed), None if is_dense else dense[seed]) for seed in dense),
        paired(result) + ("" if is_dense else f", seeds: {result.difference.pairs}"),
    ]


def _cell(run: Run | None, dense: Run | None) -> str:
    if run is None:
        return "-"
    own = last(run, VALIDATION_LOSS)
    return f"{own:.4f}" if dense is None else gap(own, last(dense, VALIDATION_LOSS))
