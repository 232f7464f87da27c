"""The runs of a study that stand in docs/quality/, as comparisons with its baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from studies.results import SHORT, read_json
from studies.studies import Study
from s2_megatron.tools.compare.measure import Comparison, compare
from s2_megatron.tools.compare.readers import read_run
from s2_megatron.tools.compare.runs import Run, number
from s2_megatron.tools.compare.settings import check_comparable, make_arms

VARIED = ("lr", "min_lr")


@dataclass(frozen=True)
class Scale:
    """The runs of one study with one number of tokens and one corpus. folder: their thinned loss logs."""

    study: Study
    folder: Path
    comparison: Comparison
    corpus: dict

    @property
    def runs(self) -> list[Run]:
        return [run for result in self.comparison.results for run in result.arm.runs]

    @property
    def tokens(self) -> float:
        return float(self.runs[0].axis("tokens")[-1])

    @property
    def seeds(self) -> tuple[str, ...]:
        """Of the baseline's runs."""
        return tuple(seed_of(run) for run in self.comparison.results[0].arm.runs)

    def parts(self) -> list[Scale]:
        """One of all seeds with the same arms at the same learning rates, for what compares means over seeds; a seed
        of the baseline alone, or without it, is in none."""
        arms: dict[str, list[tuple[str, float | None]]] = {}
        for result in self.comparison.results:
            for run in result.arm.runs:
                arms.setdefault(seed_of(run), []).append((result.arm.name, number(run.arguments, "lr")))
        groups = list(dict.fromkeys(tuple(trained) for trained in arms.values()))
        fit = [group for group in groups if self.study.baseline in dict(group) and len(group) > 1]
        own = [[run for run in self.runs if tuple(arms[seed_of(run)]) == group] for group in fit]
        return [replace(self, comparison=_compared(runs)) for runs in own]


def seed_of(run: Run) -> str:
    return str(run.arguments["seed"])


def runs_by_key(comparison: Comparison) -> dict[tuple[str, str], Run]:
    """{(arm, seed): its run}."""
    return {(result.arm.name, seed_of(run)): run for result in comparison.results for run in result.arm.runs}


def seeds_text(seeds: tuple[str, ...]) -> str:
    """ "seed 1", "seeds 1, 2"."""
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)}"


def _compared(runs: list[Run]) -> Comparison:
    """runs: the baseline's first."""
    check_comparable(runs, VARIED)
    return compare(make_arms(runs, VARIED, [True] * len(runs)), VARIED)


def logs_by_seed(folder: Path, arm: str) -> list[Path]:
    """The losses of an arm's runs in a folder of results, in the order of the seeds as numbers."""
    return sorted(folder.glob(f"{arm}_seed*.jsonl"), key=file_seed)


def file_seed(path: Path) -> int:
    return int(path.stem.rpartition("_seed")[2])


def comparable_logs(folder: Path, baseline: str, arms: Sequence[str]) -> dict[str, list[Path]]:
    """{arm: the losses of its runs} of those of these arms that share a seed with the baseline, in this order. {}
    without a run of the baseline."""
    logs = {arm: logs_by_seed(folder, arm) for arm in arms}
    seeds = {file_seed(path) for path in logs_by_seed(folder, baseline)}
    return {arm: paths for arm, paths in logs.items() if any(file_seed(path) in seeds for path in paths)}


def read_scale(study: Study, folder: Path) -> Scale | None:
    """The comparison of all arms with the baseline; None where that has no run, or no other arm has one of its
    seeds."""
    baseline = study.baseline
    logs = comparable_logs(folder, baseline, (baseline, *(arm for arm in study.arm_names if arm != baseline)))
    if len(logs) < 2:
        return None
    runs = [read_run(f"{arm}={path}")[0] for arm, paths in logs.items() for path in paths]
    return Scale(study, folder, _compared(runs), read_json(folder / "corpus.json", {}))


def read_scales(study: Study, data: Path) -> list[Scale]:
    """The most tokens first. Short runs, which are kept for their times, are none of them."""
    folders = sorted(folder for folder in (data / study.name).glob("*") if folder.is_dir())
    folders = [folder for folder in folders if not folder.name.startswith(SHORT)]
    scales = [scale for folder in folders if (scale := read_scale(study, folder)) is not None]
    return sorted(scales, key=lambda scale: -scale.tokens)


def untested(arms: Sequence[str], found: Mapping) -> str:
    """A sentence that names the arms that are missing in `found`; "" without any."""
    missing = ", ".join(f"`{arm}`" for arm in arms if arm not in found)
    return f" Left out, for not every seed has scores: {missing}." if missing else ""


def read_text_tests(
    test: str, equal: Sequence[str], folder: Path, arms: Sequence[str], baseline: str, seeds: Sequence[str]
) -> dict[str, dict[str, dict]]:
    """{arm: {seed: its scores}} of those seeds of which the baseline has scores, and of the arms that have all of
    these; the baseline first. {} without it or without another arm. test: its module. Raises ValueError for scores that
    differ from the baseline's in what `equal` names."""
    scored = [seed for seed in seeds if (folder / f"{baseline}_seed{seed}.{test}.json").exists()]
    found = {}
    for arm in (baseline, *(arm for arm in arms if arm != baseline)):
        scores = {seed: read_json(folder / f"{arm}_seed{seed}.{test}.json", None) for seed in scored}
        if None not in scores.values():
            found[arm] = scores
    if not scored or len(found) < 2:
        return {}
    for arm, each in found.items():
        for own, other in zip(each.values(), found[baseline].values()):
            if any(own[name] != other[name] for name in equal):
                raise ValueError(
                    f"{folder}: the {test} of {arm} are not over the predictions of {baseline}'s; expected equal "
                    "sequences; train one of them again"
                )
    return found
