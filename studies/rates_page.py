"""What a study's page says of learning rates."""

from __future__ import annotations

from pathlib import Path

from studies.cells import table
from studies.results import chosen_rate, read_json
from studies.scales import Scale
from studies.studies import Study
from s2_megatron.tools.compare.runs import number


def rates_table(study: Study, data: Path) -> list[str]:
    """The short runs that chose the learning rates; the chosen ones are bold. Empty where there are none."""
    content = read_json(data / study.name / "learning_rates.json", None)
    if content is None:
        return []
    rows = []
    for arm in [arm for arm in study.arm_names if arm in content["arms"]]:
        losses, best = content["arms"][arm], chosen_rate(content, arm, study.rates)
        cells = [f"{losses[f'{rate:g}']:.4f}" if f"{rate:g}" in losses else "-" for rate in study.rates]
        rows.append([arm, *(f"**{cell}**" if rate == best else cell for rate, cell in zip(study.rates, cells))])
    whose, trained = ("each arm's", "the arm") if study.own_rates else ("one for all arms,", "every arm")
    return [
        f"Learning rates of `{study.name}`, {whose} from short runs of {content['tokens'] / 1e6:.1f}M tokens "
        f"(validation loss; the best in bold is what {trained} trains with, where `--rate` gives no other one):",
        "",
        *table(["arm", *(f"{rate:g}" for rate in study.rates)], rows),
        "",
    ]


def given_rate(scale: Scale) -> str:
    """A sentence on the one learning rate of all runs, "" where they have several or it is every arm's choice."""
    rates = {number(run.arguments, "lr") for run in scale.runs}
    content = read_json(scale.folder.parent / "learning_rates.json", None)
    if len(rates) > 1:
        return ""
    if content is None:
        return f" One learning rate for all, {rates.pop():g}; none was chosen."
    arms = [result.arm.name for result in scale.comparison.results] if scale.study.own_rates else [scale.study.baseline]
    choices = {chosen_rate(content, arm, scale.study.rates) for arm in arms}
    return "" if choices == rates else f" One learning rate for all, {rates.pop():g}, given with `--rate`."
