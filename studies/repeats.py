"""How far apart runs of equal settings end, and how far apart their gaps: from repeats of one seed.

    python -m studies.repeats docs/quality/repeats/bfee4945

A folder holds `<label>_repeat<n>.jsonl`, thinned losses of runs with the same flags, data, seed and kind of GPU, and
`switched-<arm>_repeat<n>.json`, the evaluation of the dense model of that repeat under the arm's attention. They differ
in rounding alone: sums of gradients whose order a GPU does not fix. Labels are those of the studies that go on from a
dense model (continued.py).
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from studies.cells import percent, table
from studies.continued import SWITCHED
from studies.continued_page import read_switched
from studies.effects import deviation_interval
from studies.results import header
from studies.studies import BASELINE
from s2_megatron.tools.compare.measure import VERDICT_SHARE, paired_steps
from s2_megatron.tools.compare.readers import read_run
from s2_megatron.tools.compare.runs import TRAINING_LOSS, VALIDATION_LOSS, Run
from s2_megatron.tools.compare.settings import begins_with

MARK = "_repeat"  # in the name of a file, before its number
WINDOWS = 4  # of the steps of the repeats that were not cut early, for the gap over time


def read_repeats(folder: Path) -> dict[str, dict[str, Run]]:
    """{label: {its number: run}}."""
    found: dict[str, dict[str, Run]] = {}
    for path in sorted(folder.glob(f"*{MARK}*.jsonl")):
        label, _, repeat = path.stem.rpartition(MARK)
        found.setdefault(label, {})[repeat] = read_run(f"{label}={path}")[0]
    return found


def final_loss(run: Run) -> float:
    """Mean training loss of the last quarter of the steps."""
    series = run.series[TRAINING_LOSS]
    return float(series.values[series.steps > (1 - VERDICT_SHARE) * series.steps[-1]].mean())


def spread(runs: Sequence[Run]) -> float:
    """Standard deviation of the final losses, in nats."""
    return float(np.std([final_loss(run) for run in runs], ddof=1))


def from_scratch(repeats: dict[str, dict[str, Run]]) -> dict[str, list[Run]]:
    """{label: its runs} of those that begin with random weights, where there are two or more."""
    found = {label: list(runs.values()) for label, runs in repeats.items()}
    return {
        label: runs for label, runs in found.items() if len(runs) > 1 and all(begins_with(run) is None for run in runs)
    }


class Offset(NamedTuple):
    """How far apart runs of equal settings end, in nats: standard deviation and its 95 % interval."""

    nats: float
    low: float
    high: float


def run_offset(repeats: dict[str, dict[str, Run]]) -> Offset | None:
    """Of runs from random weights, the spreads of all labels pooled by their degrees of freedom; None without two of
    one label."""
    groups = from_scratch(repeats).values()
    freedom = sum(len(runs) - 1 for runs in groups)
    if not freedom:
        return None
    squares = sum((len(runs) - 1) * spread(runs) ** 2 for runs in groups)
    deviation = math.sqrt(squares / freedom)
    return Offset(deviation, *deviation_interval(deviation, freedom))


def gaps(own: Run, dense: Run, last_step: int) -> list[tuple[int, float, float] | None]:
    """(last step, gap in nats, gap as a share of dense's loss) of each of WINDOWS equal parts of the steps to
    `last_step`; None of a part in which the shorter of the two ends, or of which no step was logged."""
    paired = paired_steps(own, dense)
    ends = np.linspace(0, last_step, WINDOWS + 1)
    found = []
    for start, end in itertools.pairwise(ends):
        inside = (paired.steps > start) & (paired.steps <= end)
        if _last_common(own, dense) < end or not inside.any():
            found.append(None)
            continue
        own_loss, dense_loss = (float(losses[inside].mean()) for losses in (paired.arm, paired.baseline))
        found.append((int(paired.steps[inside][-1]), own_loss - dense_loss, own_loss / dense_loss - 1))
    return found


def _last_common(own: Run, dense: Run) -> int:
    return min(int(run.series[TRAINING_LOSS].steps[-1]) for run in (own, dense))


def _scratch_lines(repeats: dict[str, dict[str, Run]]) -> list[str]:
    rows = []
    for label, each in from_scratch(repeats).items():
        validation = ", ".join(f"{run.series[VALIDATION_LOSS].values[-1]:.4f}" for run in each)
        training = ", ".join(f"{final_loss(run):.4f}" for run in each)
        tokens = f"{each[0].axis('tokens')[-1] / 1e6:.1f}M"
        rows.append([f"`{label}`", tokens, validation, training, f"{spread(each):.4f}"])
    columns = (
        "run from random weights",
        "tokens",
        "validation loss of each repeat",
        "training loss, last quarter",
        "standard deviation of the latter",
    )
    return [*table(columns, rows), ""]


def _gap_lines(repeats: dict[str, dict[str, Run]], arm: str) -> list[str]:
    common = sorted(set(repeats[arm]) & set(repeats.get(BASELINE, ())))
    if not common:
        return []
    runs = {repeat: (repeats[arm][repeat], repeats[BASELINE][repeat]) for repeat in common}
    ends = {repeat: _last_common(*pair) for repeat, pair in runs.items()}
    # A repeat that was cut early has the first parts of the others.
    last = min(end for end in ends.values() if 2 * end >= max(ends.values()))
    found = {repeat: gaps(*pair, last) for repeat, pair in runs.items()}
    longest = max(common, key=ends.get)
    tokens = runs[longest][1].axis("tokens")[-1] / runs[longest][1].series[TRAINING_LOSS].steps[-1]
    edges = [f"{end * tokens / 1e6:.1f}M" for end, *_ in found[longest]]
    windows = zip(["0", *edges], edges)
    columns = (f"`{arm}` minus dense, training loss", *(f"from {start} to {end} tokens" for start, end in windows))
    rows = [
        [f"repeat {repeat}", *("-" if part is None else f"{part[1]:+.4f} ({percent(part[2])})" for part in each)]
        for repeat, each in found.items()
    ]
    return [*table(columns, rows), ""]


def section(folder: Path) -> list[str]:
    """The part of a page about one folder of repeats."""
    repeats = read_repeats(folder)
    machine = header(next(iter(sorted(folder.glob("*.jsonl")))))["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name != "device")
    lines = [f"{machine['device']}; {versions}; corpus `{folder.name}`.", ""]
    if offset := run_offset(repeats):
        lines[0] += (
            f" From random weights, runs of equal settings end {offset.nats:.3f} nats apart (standard deviation over "
            f"the labels, 95 % interval {offset.low:.3f} to {offset.high:.3f})."
        )
        lines += _scratch_lines(repeats)
    going_on = [arm for arm, runs in repeats.items() if all(begins_with(run) is not None for run in runs.values())]
    for arm in (arm for arm in going_on if arm != BASELINE):
        lines += _gap_lines(repeats, arm)
    dense = read_switched(folder, BASELINE, MARK)
    arms = dict.fromkeys(path.stem.removeprefix(f"{SWITCHED}-").rpartition(MARK)[0]
                         for path in sorted(folder.glob(f"{SWITCHED}-*{MARK}*.json")))  # fmt: skip
    for arm in (arm for arm in arms if arm != BASELINE):
        pairs = [
            f"{own[TRAINING_LOSS]:.4f} for {other[TRAINING_LOSS]:.4f} "
            f"({percent(own[TRAINING_LOSS] / other[TRAINING_LOSS] - 1)})"
            for repeat, own in read_switched(folder, arm, MARK).items()
            if (other := dense.get(repeat)) is not None
        ]
        lines.append(f"- Validation loss of dense's weights under `{arm}`, before any step: {'; '.join(pairs)}.")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.repeats", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not any(folder.glob(f"*{MARK}*.jsonl")):
        parser.error(f"{folder}: no <label>_repeat<n>.jsonl there; expected thinned losses of repeated runs")
    print("\n".join(section(folder)))


if __name__ == "__main__":
    main()
