"""Compute every headline number of docs/quality.md from studies/results, and compare them with the page.

    python studies/check.py              # prints each; status 1 where the page, runs.csv or the manifest differs
    python studies/check.py lm8k         # prints a study's table: every arm and seed

NumPy alone, a few seconds. A headline is a piece of the page's text, with its numbers made from the data. The page may
hold no number with a decimal point outside of them.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __package__ is None or __package__ == "":  # python studies/check.py
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from studies.data import RESULTS, Run, as_csv_rows, manifest_entry, read_manifest, read_study, select
from studies.decide import LARGEST_GAP, copied_shares, parts, tested
from studies.gaps import (
    Fitted,
    Gap,
    beyond_4k,
    far_less_near,
    first_512,
    fitted_gaps,
    gap,
    joint_half_width,
    scatter,
)

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "quality.md"
LM_RATE, LM_SCALE = 7.5e-4, "150M-bfee4945"
RECALL_MODELS = ((8, 7), (8, 11), (8, 14), (32, 12), (32, 13))  # thousands of tokens, seed
LM_SEEDS, LM_ARMS = (2, 3, 4, 5), ("hybrid", "one-offset", "s2", "window")
UNMEASURED = ("hybrid", "dense-middle", "dense-last", "dense-fourth", "dense-one", "dense-heads")


def runs_of(study: str) -> list[Run]:
    """The runs of a study that are compared: of lm8k those of the chosen learning rate."""
    runs = select(read_study(study), role="")
    return [run for run in select(runs, scale=LM_SCALE) if run.rate == LM_RATE] if study == "lm8k" else runs


def recall_runs(thousands: int, seed: int) -> list[Run]:
    """One dense model's arms on recall; thousands: of tokens in a sequence."""
    study = {8: "from-dense-recall8k", 32: "extend-recall32k"}[thousands]
    return select(read_study(study), role="", seed=seed)


def signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}"


def interval(found: Gap | Fitted, digits: int = 1) -> str:
    return f"{signed(found.mean, digits)} % [{signed(found.low, digits)}, {signed(found.high, digits)}]"


def span(values: Sequence[float], digits: int = 2) -> str:
    """From the least to the largest, in percent."""
    return f"{signed(min(values), digits)} to {signed(max(values), digits)} %"


def answers(runs: Sequence[Run], arm: str) -> dict[str, float]:
    """{"recall", "needle": right answers in percent, "worst": of the needles at the worst depth or residue}."""
    found = select(runs, arm=arm)[0].about["tests"]["recall"]
    groups = [share for kind in ("by_depth", "by_residue") for share in found["needle"][kind] if share is not None]
    return {name: 100 * found[name]["accuracy"] for name in ("recall", "needle")} | {"worst": 100 * min(groups)}


HEADLINES: list[Callable[[], list[str]]] = []


def require(holds: bool, claim: str) -> None:
    """Raises ValueError where the data do not bear out what the page says in words."""
    if not holds:
        raise ValueError(f"the page says, and the data do not: {claim}")


def headline(function: Callable[[], list[str]]) -> Callable[[], list[str]]:
    HEADLINES.append(function)
    return function


@headline
def from_random_weights() -> list[str]:
    runs = runs_of("lm8k")
    hybrid, s2, window = (interval(gap(runs, arm)) for arm in ("hybrid", "s2", "window"))
    return [
        f"hybrid (first two layers dense) missed its target: {hybrid} of loss beside dense, where 0.5 was allowed",
        f"S2 in all layers is undecided ({s2})",
        f"| the first two layers dense: don't | {hybrid} |",
        f"| S2 in all layers, beside a short dense twin | {s2} |",
        f"| windows of as many pairs | {window} |",
        f"**missed**: {hybrid}, {len(LM_SEEDS)} seeds",
        f"not decided: {s2}, {len(LM_SEEDS)} seeds",
        f"learning rate {LM_RATE * 1e4:g}e-4",
        "first two layers dense at most 0.5 % above dense",  # the targets' own numbers
        "measured heads at most 0.5 % above dense",
    ]


@headline
def by_position() -> list[str]:
    runs, arms = runs_of("lm8k"), ("dense", *LM_ARMS)
    near, far = (gap(runs, "window", part, percent=False) for part in (first_512, beyond_4k))
    paid = {arm: gap(runs, arm, far_less_near, percent=False).mean for arm in LM_ARMS}
    deviation, freedom = scatter(runs, arms, LM_SEEDS, far_less_near)
    of_loss, _ = scatter(runs, arms, LM_SEEDS)
    half = joint_half_width(deviation, freedom, len(LM_SEEDS), len(LM_ARMS))
    ahead = [gap(runs, arm, first_512, percent=False).mean for arm in LM_ARMS]
    require(max(ahead) < 0, "every sparse arm is ahead of dense in the first 512 tokens")
    require(min(paid.values()) > half, "by the difference every sparse arm pays")
    require(far.low < 0 < far.high, "windows are not told apart from dense beyond 4K")
    return [
        f"windows by {signed(near.mean, 3)} nats",
        f"Beyond 4K windows are at {signed(far.mean, 3)} ± {far.half_width:.3f}",
        f"varies by {deviation:.3f} nats between runs of an arm, the loss itself by {of_loss:.3f}",
        f"windows {signed(paid['window'], 3)}, S2 {signed(paid['s2'], 3)}, first two dense "
        f"{signed(paid['hybrid'], 3)}, one offset for "
        f"all heads {signed(paid['one-offset'], 3)} nats, each ± {half:.3f}",
    ]


def _no_dense_head() -> dict[str, Gap]:
    return {study: gap(runs_of(study), "s2") for study in ("from-dense-rules8k", "from-dense8k", "extend-rules32k")}


@headline
def going_on_without_dense_heads() -> list[str]:
    found = _no_dense_head()
    lost = span([value for each in found.values() for value in each.values.values()])
    counts = {study: len(each.values) for study, each in found.items()}
    require(list(counts.values()) == [8, 2, 4], "fourteen models: 8 and 2 at 8K, 4 at 32K")
    best = max(answers(recall_runs(*model), "s2")["recall"] for model in RECALL_MODELS)
    small, longer = found["from-dense-rules8k"], found["extend-rules32k"]
    return [
        f"with no dense head fourteen models lost {lost} and gave at most {best:.0f} % of the answers in recall",
        f"| S2 with no dense head: don't | 8K {interval(small)}; 32K {interval(longer)} | at most {best:.0f} % |",
        f"**missed** in all fourteen models: {lost}",
    ]


@headline
def going_on_with_places_nobody_measured() -> list[str]:
    gaps = {(study, arm): gap(runs_of(study), arm) for study in _no_dense_head() for arm in UNMEASURED}
    found = {(*key, seed): value for key, each in gaps.items() for seed, value in each.values.items()}
    models = {(study, seed) for study, _, seed in found}
    runs = [run for model in RECALL_MODELS for run in recall_runs(*model) if run.arm in UNMEASURED]
    recalled = [answers([run], run.arm)["recall"] for run in runs]
    lost, right = span([*found.values()]), f"{min(recalled):.0f} to {max(recalled):.0f} %"
    return [
        f"| dense layers or heads that nobody measured | {lost} | {right} | {len(found)} runs of {len(models)} models |"
    ]


@headline
def going_on_with_measured_heads() -> list[str]:
    small, longer = (gap(runs_of(study), "chosen-few") for study in ("from-dense-rules8k", "extend-rules32k"))
    larger, windows = gap(runs_of("from-dense8k"), "chosen-heads"), gap(runs_of("from-dense-rules8k"), "chosen-window")
    wider = gap(runs_of("extend-rules32k"), "chosen-window")
    ended = [*small.values.values(), *longer.values.values(), *larger.values.values()]
    tests = {
        model: answers(recall_runs(*model), "chosen-few") for model in ((8, 7), (8, 11), (8, 14), (32, 12), (32, 13))
    }
    worst = {model: found["worst"] for model, found in tests.items()}
    missed = [model for model, share in worst.items() if share < 100]
    require(missed == [(32, 13)], "measured heads find every needle in four of five models")
    windows_of = {(8, 7): "chosen-window", (8, 11): "own-window", (32, 13): "chosen-window", (32, 12): "own-window"}
    beside = [answers(recall_runs(*model), arm)["worst"] == 100 for model, arm in windows_of.items()]
    require(beside == [True, True, False, False], "beside windows they do in two models at 8K, in none at 32K")
    dense, sparse = (answers(recall_runs(32, 13), arm)["recall"] for arm in ("dense", "chosen-few"))
    require(len(ended) == 7, "seven models")
    return [
        f"seven models ended {span(ended)} from dense",
        f"{interval(small, 2)} | every needle, three of three models |",
        f"{interval(longer, 2)} | every needle in one of two models",
        f"| {signed(larger.mean)} % | not asked |",
        f"| 8K {interval(windows, 2)}; 32K {signed(wider.mean)} % | every needle in two models at 8K, not in two",
        f"({sparse:.1f} % on recall, dense {dense:.1f} %)",
        f"met: {interval(small, 2)} at 8K, {interval(longer, 2)} at 32K",
    ]


@headline
def a_public_model() -> list[str]:
    runs, few = runs_of("smollm2-8k"), "16h-w-sink-few"
    found = fitted_gaps(parts(runs, "dense")[0], lambda run: tested(run)["loss"], "dense")
    losses = {(run.arm, run.seed): tested(run)["loss"] for run in runs}
    older = sorted(100 * (losses[few, seed] / losses["dense", seed] - 1) for seed in (1, 2))
    far = [tested(run)["copied"][at] for run in select(runs, arm=("w", "w-sink")) for at in ("2048", "4096", "7168")]
    without = [tested(run)["uncopied"] for run in runs if "uncopied" in tested(run)]
    nothing = max(far) - min(without) < 0.01
    require(nothing, "windows predict no more of the passages from far back than what needs no copy")
    sixteen, eight = found["16h-w-sink"], found["8h-w-sink"]
    copied = [share for arm in ("16h-w-sink", "8h-w-sink") for share in copied_shares(runs, arm).values()]
    require(min(copied) > 0.985, "measured heads copy as dense does")
    require({sixteen.seeds, eight.seeds} == {1}, "one seed so far")
    both = f"{signed(older[0], 1)} and {signed(older[1], 1)} %"
    return [
        f"with a sink end {interval(found['w-sink'])} above dense",
        f"ends {signed(sixteen.mean)} % above and copies as dense does from everywhere, with 8 heads "
        f"{signed(eight.mean)} %",
        f"and ended {both} above",
        f"one seed ended at {signed(sixteen.mean, 1)} %",
        f"without a sink {interval(found['w'])}, with one {interval(found['w-sink'])}",
        f"{signed(sixteen.mean)} and {signed(eight.mean)} %",
        f"| {both} | in one seed as dense |",
        f"at most {LARGEST_GAP} % above dense on a public model",
        f"not decided: {signed(sixteen.mean)} % in one seed; {both} in two by an older ranking",
    ]


@headline
def by_residue() -> list[str]:
    found = select(recall_runs(8, 11), arm="s2")[0].about["tests"]["recall"]["recall"]["by_residue"]
    shares = sorted((100 * share for share in found), reverse=True)
    near, others = f"{shares[0]:.0f} and {shares[1]:.0f} %", f"{shares[2]:.0f} %"
    return [f"gives {near} of the answers in two of the eight residues, at most {others} in the others"]


@headline
def repeats() -> list[str]:
    """How far runs from random weights end apart that differ in rounding alone: pooled over two kinds of runs."""
    runs = [run for run in read_study("repeats") if run.about["role"] in ("start", "scratch")]
    groups = [[run.training_loss for run in runs if run.about["role"] == role] for role in ("start", "scratch")]
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(float(np.var(group, ddof=1)) * (len(group) - 1) for group in groups)
    return [f"rounding alone end {np.sqrt(squares / freedom):.3f} nats apart"]


def prose(text: str) -> str:
    """The page on one line, without code blocks, addresses and comments, which may hold numbers of their own."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return " ".join(re.sub(r"arXiv \d+\.\d+", "arXiv", text).split())


def check_page(text: str, found: Sequence[str], tell: Callable[[str], None]) -> int:
    """The number of differences between the page and the headlines."""
    page, wrong = prose(text), 0
    left = page
    for fragment in sorted(found, key=len, reverse=True):
        left = left.replace(fragment, "|")
    for fragment in found:
        if fragment in page:
            tell(f"ok       {fragment}")
            continue
        wrong += 1
        anything = re.sub(r"[+-]?\d+(\\\.\d+)?", r"[+-]?\\d+(?:\\.\\d+)?", re.escape(fragment).replace(r"\-", "-"))
        there = re.search(anything.replace("\\+[+-]?", "[+-]?").replace("-[+-]?", "[+-]?"), page)
        tell(f"DIFFERS  {fragment}\n         the page: {there[0] if there else 'has no such text'}")
    for number in re.findall(r"[^ ]*\d\.\d[^ ]*", left):
        wrong += 1
        tell(f"DIFFERS  {number} stands on the page outside of the headlines")
    return wrong


def check_results(results: Path, tell: Callable[[str], None]) -> int:
    """The number of files of results that runs.csv and the manifest do not describe."""
    manifest, wrong = read_manifest(results), 0
    table = {}
    for row in [*csv.reader((results / "runs.csv").read_text().splitlines())][1:]:
        table.setdefault(row[0], []).append(row)
    studies = sorted(path.stem for path in results.glob("*.npz"))
    for study in sorted({*studies, *manifest, *table}):
        runs = read_study(study, results)
        agree = study in studies and manifest.get(study) == manifest_entry(study, runs, results)
        if agree and table.get(study) == as_csv_rows(study, runs):
            tell(f"ok       {study}: {len(runs)} runs")
        else:
            wrong += 1
            tell(f"DIFFERS  {study}: the file, runs.csv and manifest.json do not agree")
    return wrong


def study_table(study: str, results: Path = RESULTS) -> list[str]:
    """Lines of a table: of each set of runs an arm a row, its last validation losses and gaps to dense by seed."""
    lines = []
    runs = select(read_study(study, results), role="", repeat=0)
    for scale in dict.fromkeys(run.about["scale"] for run in runs):
        own = select(runs, scale=scale)
        seeds = sorted({run.seed for run in own})
        lines += [f"{study}, {scale}: validation loss, percent above dense", f"{'arm':<14}{'pairs':>7}  "
                  + "".join(f"{f'seed {seed}':<17}" for seed in seeds)]  # fmt: skip
        for arm in dict.fromkeys(run.arm for run in own):
            gaps, row = gap(own, arm).values, ""
            for seed in seeds:
                there = select(own, arm=arm, seed=seed)
                beside = f" ({signed(gaps[seed])})" if seed in gaps and arm != "dense" else ""
                row += f"{f'{there[0].last_loss:.4f}{beside}' if there else '-':<17}"
            lines.append(
                f"{arm:<14}{100 * select(own, arm=arm)[0].about.get('density', np.nan):>6.1f}%  {row.rstrip()}"
            )
    return lines


def main() -> None:
    if sys.argv[1:]:
        lines = [line for study in sys.argv[1:] for line in study_table(study)]
        if not lines:
            there = ", ".join(sorted(path.stem for path in RESULTS.glob("*.npz")))
            print(f"error: {' '.join(sys.argv[1:])}: no results; expected some of {there}", file=sys.stderr)
            sys.exit(2)
        print("\n".join(lines))
        return
    wrong, found = check_results(RESULTS, print), []
    for each in HEADLINES:
        try:
            found += each()
        except (ValueError, LookupError) as error:  # a claim that fails, a run that is not there
            wrong += 1
            print(f"DIFFERS  {each.__name__}: {error}")
    wrong += check_page(PAGE.read_text(), found, print)
    print(f"{wrong} differences" if wrong else "docs/quality.md is what the data give")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
