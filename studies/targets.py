"""What the language models are held to, and whether it was met: at equal tokens, and at equal time.

At equal time dense attention has seen fewer tokens. A dense run of the full length alone is no fair measure there: its
learning rate has not come down yet. So a dense run is asked for whose schedule ends at about that time: `--arms dense
--tokens ...` writes one, beside the study, in a folder of its own tokens. A schedule can also come down too soon. So
dense has, seed by seed, the lower of two losses: that of this run, and that of the full run when the arm ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from studies.cells import last, percent
from studies.results import SHORT, header
from studies.scales import seed_of
from s2_megatron.tools.compare.measure import ArmResult, Comparison
from s2_megatron.tools.compare.readers import read_run
from s2_megatron.tools.compare.runs import VALIDATION_LOSS, Run, number
from s2_megatron.tools.compare.statistics import CONFIDENCE, SPREAD_PAIRS

# Largest gap to dense at equal tokens.
TARGETS = {"hybrid": 0.005, "dense-fourth": 0.005, "dense-heads": 0.005, "s2": 0.01}
# A dense run stands for an arm's time when its own is within this share of it.
TIME_TOLERANCE = 0.02
# Of the baseline's run of another length these are the study's own.
SAME = ("seed", "lr", "seq_length", "global_batch_size", "num_layers", "hidden_size")


@dataclass(frozen=True)
class Planned:
    """A baseline run of another length. seconds: of training steps. validation: its last loss."""

    seed: str
    tokens: float
    seconds: float
    validation: float


def seconds(run: Run) -> float:
    return 3600 * float(run.axis("hours")[-1])


def read_planned(folder: Path, baseline: str) -> list[Planned]:
    """The baseline's runs of other lengths over the same corpus, of the same model and batch, on the same kind of
    device; folder: of the study's scale, `<tokens>-<corpus>`."""
    corpus, found = folder.name.rpartition("-")[2], []
    own = {path.name: header(path) for path in folder.glob(f"{baseline}_seed*.jsonl")}
    for path in sorted(folder.parent.glob(f"*-{corpus}/{baseline}_seed*.jsonl")):
        other = own.get(path.name)
        if path.parent == folder or path.parent.name.startswith(SHORT) or other is None:
            continue
        about = header(path)
        alike = all(about["arguments"].get(name) == other["arguments"].get(name) for name in SAME)
        if alike and about.get("machine", {}).get("device") == other.get("machine", {}).get("device"):
            run = read_run(f"{baseline}={path}")[0]
            tokens, loss = float(run.axis("tokens")[-1]), last(run, VALIDATION_LOSS)
            found.append(Planned(seed_of(run), tokens, seconds(run), loss))
    return found


def target_lines(
    comparison: Comparison, planned: Sequence[Planned], step_tokens: int, at_equal: Sequence[str] = ("tokens", "time")
) -> list[str]:
    """One line for every target that the results can decide, what is missed first. The first result is the
    baseline. at_equal: the targets that are asked for."""
    found = []
    for result in comparison.results[1:]:
        limit = TARGETS.get(result.arm.name)
        if limit is not None and "tokens" in at_equal:
            found.append(_at_equal_tokens(result, limit))
        if limit is not None and "time" in at_equal:
            found.append(_at_equal_time(result, comparison, planned, step_tokens))
    return [text for _, text in sorted(found, key=lambda entry: entry[0])]


def _at_equal_tokens(result: ArmResult, limit: float) -> tuple[int, str]:
    mean, low, high = map(percent, result.difference.relative)
    _, lowest, highest = result.difference.relative
    order, verdict = (2, "met") if highest <= limit else (0, "missed") if lowest > limit else (1, "not decided")
    return order, (
        f"{result.arm.name} at most {100 * limit:g} % above dense at equal tokens: **{verdict}** ({mean}, 95 % "
        f"interval {low} to {high})."
    )


def _at_equal_time(
    result: ArmResult, comparison: Comparison, planned: Sequence[Planned], step_tokens: int
) -> tuple[int, str]:
    """By validation losses of the seeds that have a planned run; dense's is its last one, or that of the full run when
    the arm ended, if this is lower. Decided when the 95 % interval of the mean difference leaves out zero: that of the
    seeds' spread, for fewer than three seeds two standard errors of the ends of equal runs. The other seeds are asked
    for where there are fewer than three, or nothing is decided."""
    name = f"{result.arm.name} ahead of dense at equal time"
    full = {seed_of(run): run for run in comparison.results[0].arm.runs}
    gaps, spent, tokens, losses, left = [], [], [], [], []
    for run in result.arm.runs:
        near = [each for each in planned if each.seed == seed_of(run)]
        near = [each for each in near if abs(each.seconds / seconds(run) - 1) <= TIME_TOLERANCE]
        if near:
            spent.append(seconds(run))
            dense = min(near, key=lambda each: abs(each.seconds - spent[-1]))
            own, by_then = last(run, VALIDATION_LOSS), _validation_after(full[dense.seed], spent[-1])
            gaps.append(own - min(dense.validation, by_then))
            tokens.append(dense.tokens)
            losses.append(f"seed {dense.seed}: {own:.4f} against {dense.validation:.4f} and {by_then:.4f}")
        else:
            left.append(run)
    wanted = f" {_wanted(left, comparison.results[0], step_tokens)}" if left else ""
    if not gaps:
        return 1, f"{name}: **not decided**.{wanted}"
    if len(gaps) < SPREAD_PAIRS:
        error = 2 * math.sqrt(2 / len(gaps)) * comparison.run_offset.nats
    else:
        error = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(gaps) - 1) * np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
    gap = np.mean(gaps)
    order, verdict = (2, "met") if gap < -error else (0, "missed") if gap > error else (1, "not decided")
    share = f" in {len(gaps)} of {len(result.arm.runs)} seeds" if left else ""
    if len(gaps) >= SPREAD_PAIRS and verdict != "not decided":
        wanted = ""
    return order, (
        f"{name}: **{verdict}**{share} (validation loss {gap:+.4f} ± {error:.4f} against dense after "
        f"{np.mean(spent):.0f} s, the better of a run planned for {np.mean(tokens) / 1e6:.1f}M tokens and the full one "
        f"by then; {'; '.join(losses)}).{wanted}"
    )


def _validation_after(run: Run, spent: float) -> float:
    """The validation loss after so many seconds, on a straight line between two evaluations, which is a little above
    the curve where that flattens; the first or last one outside of them."""
    series = run.series[VALIDATION_LOSS]
    return float(np.interp(spent, 3600 * run.at(series.steps, "hours"), series.values))


def _wanted(runs: Sequence[Run], dense: ArmResult, step_tokens: int) -> str:
    """The command of the dense runs that these runs of an arm still want."""
    spent = float(np.mean([seconds(run) for run in runs]))
    run = dense.arm.runs[0]
    tokens = float(run.axis("tokens")[-1]) * spent / seconds(run) // step_tokens * step_tokens
    seeds = " ".join(map(seed_of, runs))
    return (
        f"It takes dense runs whose schedules end after {spent:.0f} s: `--arms dense --tokens {tokens / 1e6:.4g}e6 "
        f"--seeds {seeds} --rate {number(run.arguments, 'lr'):g}`."
    )
