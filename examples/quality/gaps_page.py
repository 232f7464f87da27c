"""The part of a study's page that lays every run from random weights beside dense of its seed, where the seeds have
other arms or other learning rates, so that a mean over them would mix unlike runs."""

from __future__ import annotations

from collections.abc import Callable

from examples.quality.cells import gap, last, paired
from examples.quality.scales import Scale, seed_of
from examples.quality.studies import density
from examples.quality.targets import target_lines
from s2_megatron.tools.compare.measure import ArmResult
from s2_megatron.tools.compare.runs import VALIDATION_LOSS, Run, number


def gaps_section(scale: Scale, table: Callable) -> list[str]:
    """Lines of Markdown: the targets at equal tokens over all seeds, and the losses by seed. table: (header, rows) to
    lines."""
    dense, *others = scale.comparison.results
    runs = {seed_of(run): run for run in dense.arm.runs}
    held = target_lines(scale.comparison, [], scale.study.step_tokens, ("tokens",))
    rates = {seed: _rates(scale, seed) for seed in runs}
    mixed = " The seeds have several learning rates." if len(set(rates.values())) > 1 else ""
    return [
        "### Every seed by itself",
        "",
        *(f"- {line}" for line in held),
        *([""] if held else []),
        "Validation loss, and how far it is above that of dense with the same seed (in the heading with the learning "
        f"rate of its runs). At the right the training loss against dense, paired, over all seeds of the arm.{mixed} "
        "Three seeds have the 95 % interval of their own spread, fewer one by the distance of equal runs.",
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
