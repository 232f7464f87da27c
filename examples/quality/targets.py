"""What the language models are held to, and whether it was met: at equal tokens, and at equal time.

At equal time dense attention has seen fewer tokens. A dense run of the full length is no measure there: its learning
rate has not come down yet. So it is compared with a dense run whose schedule ends at about that time: `--arms dense
--tokens ...` writes one, beside the study, in a folder of its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from s2_megatron.tools.compare.measure import ArmResult
from s2_megatron.tools.compare.readers import read_run
from s2_megatron.tools.compare.runs import VALIDATION_LOSS, Run

# Largest gap to dense at equal tokens.
TARGETS = {"hybrid": 0.005, "dense-fourth": 0.005, "s2": 0.01}
# A dense run stands for an arm's time when its own is within this share of it.
SAME_TIME = 0.05


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
    """The baseline's runs of other lengths over the same corpus; folder: of the study's scale, `<tokens>-<corpus>`."""
    corpus = folder.name.rpartition("-")[2]
    found = []
    for other in sorted(folder.parent.glob(f"*-{corpus}")):
        if other == folder:
            continue
        for path in sorted(other.glob(f"{baseline}_seed*.jsonl")):
            run = read_run(f"{baseline}={path}")[0]
            loss = float(run.series[VALIDATION_LOSS].values[-1])
            found.append(Planned(path.stem.rpartition("_seed")[2], float(run.axis("tokens")[-1]), seconds(run), loss))
    return found


def target_lines(results: Sequence[ArmResult], planned: Sequence[Planned], step_tokens: int) -> list[str]:
    """One line for every target that the results can decide, what is missed first. The first result is the baseline."""
    dense = results[0]
    found = []
    for result in results[1:]:
        limit = TARGETS.get(result.arm.name)
        if limit is not None:
            found += [_at_equal_tokens(result, limit), _at_equal_time(result, dense, planned, step_tokens)]
    return [text for _, text in sorted(found, key=lambda entry: entry[0])]


def _at_equal_tokens(result: ArmResult, limit: float) -> tuple[int, str]:
    mean, low, high = (f"{100 * each:+.2f} %" for each in result.difference.relative)
    _, lowest, highest = result.difference.relative
    order, verdict = (2, "met") if highest <= limit else (0, "missed") if lowest > limit else (1, "not decided")
    return order, (
        f"{result.arm.name} at most {100 * limit:g} % above dense at equal tokens: **{verdict}** ({mean}, 95 % "
        f"interval {low} to {high})."
    )


def _at_equal_time(
    result: ArmResult, dense: ArmResult, planned: Sequence[Planned], step_tokens: int
) -> tuple[int, str]:
    """By validation losses; pairs of one seed where there are any."""
    name = f"{result.arm.name} ahead of dense at equal time"
    pairs = []
    for run in result.arm.runs:
        spent = seconds(run)
        seed = str((run.arguments or {}).get("seed"))
        near = [each for each in planned if each.seed == seed and abs(each.seconds / spent - 1) <= SAME_TIME]
        if near:
            pairs.append((run, min(near, key=lambda each: abs(each.seconds - spent))))
    if not pairs:
        spent = float(np.mean([seconds(run) for run in result.arm.runs]))
        share = spent / np.mean([seconds(run) for run in dense.arm.runs])
        tokens = float(dense.arm.runs[0].axis("tokens")[-1]) * share // step_tokens * step_tokens
        return 1, (
            f"{name}: **not decided**. It takes a dense run whose schedule ends after {spent:.0f} s: `--arms dense "
            f"--tokens {tokens / 1e6:.4g}e6`."
        )
    own = float(np.mean([float(run.series[VALIDATION_LOSS].values[-1]) for run, _ in pairs]))
    other = float(np.mean([each.validation for _, each in pairs]))
    spent, time = (float(np.mean(each)) for each in zip(*((seconds(run), each.seconds) for run, each in pairs)))
    return (2 if own < other else 0), (
        f"{name}: **{'met' if own < other else 'missed'}** (validation loss {own:.4f} after {spent:.0f} s; dense, "
        f"planned for {pairs[0][1].tokens / 1e6:.1f}M tokens, {other:.4f} after {time:.0f} s; {len(pairs)} "
        f"{'seed' if len(pairs) == 1 else 'seeds'})."
    )
