"""How far apart runs of equal settings end, and how far apart their gaps: from repeats of one seed.

    python -m examples.quality.repeats docs/quality/repeats/bfee4945

A folder holds `<label>_repeat<n>.jsonl`, thinned losses of runs with the same flags, data, seed and kind of GPU, and
`switched-<arm>_repeat<n>.json`, the evaluation of the dense model of that repeat under the arm's attention. They differ
in rounding alone: sums of gradients whose order a GPU does not fix. Labels are those of the studies that go on from a
dense model (continued.py).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from examples.quality.continued import START, SWITCHED
from examples.quality.continued_page import read_switched
from examples.quality.results import header
from examples.quality.studies import BASELINE
from s2_megatron.tools.compare.measure import paired_steps
from s2_megatron.tools.compare.readers import read_run
from s2_megatron.tools.compare.runs import TRAINING_LOSS, VALIDATION_LOSS, Run

MARK = "_repeat"  # in the name of a file, before its number
LAST_SHARE = 0.25  # of the steps, as in the verdict of a comparison
WINDOWS = 4  # of the steps that all repeats have, for the gap over time


def read_repeats(folder: Path) -> dict[str, dict[str, Run]]:
    """{label: {its number: run}}."""
    found: dict[str, dict[str, Run]] = {}
    for path in sorted(folder.glob(f"*{MARK}*.jsonl")):
        label, _, repeat = path.stem.rpartition(MARK)
        found.setdefault(label, {})[repeat] = read_run(f"{label}={path}")[0]
    return found


def is_from_scratch(run: Run) -> bool:
    return not (run.arguments or {}).get("pretrained_checkpoint")


def final_loss(run: Run) -> float:
    """Mean training loss of the last quarter of the steps."""
    series = run.series[TRAINING_LOSS]
    return float(series.values[series.steps > (1 - LAST_SHARE) * series.steps[-1]].mean())


def spread(runs: Sequence[Run]) -> float:
    """Standard deviation of the final losses, in nats."""
    return float(np.std([final_loss(run) for run in runs], ddof=1))


def run_offset(repeats: dict[str, dict[str, Run]]) -> float:
    """Of runs from random weights, in nats: the spreads of all labels pooled by their degrees of freedom."""
    groups = [list(runs.values()) for runs in repeats.values() if all(map(is_from_scratch, runs.values()))]
    squares = sum((len(runs) - 1) * spread(runs) ** 2 for runs in groups)
    return math.sqrt(squares / sum(len(runs) - 1 for runs in groups))


def gaps(own: Run, dense: Run, last_step: int) -> list[tuple[int, float, float]]:
    """(last step, gap in nats, gap as a share of dense's loss) of each window of the steps up to `last_step`."""
    paired = paired_steps(own, dense)
    found = []
    for edges in np.array_split(np.flatnonzero(paired.steps <= last_step), WINDOWS):
        own_loss, dense_loss = (float(losses[edges].mean()) for losses in (paired.arm, paired.baseline))
        found.append((int(paired.steps[edges[-1]]), own_loss - dense_loss, own_loss / dense_loss - 1))
    return found


def _scratch_lines(repeats: dict[str, dict[str, Run]], table: Callable) -> list[str]:
    rows = []
    for label, runs in repeats.items():
        each = list(runs.values())
        if len(each) < 2 or not all(map(is_from_scratch, each)):
            continue
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


def _gap_lines(repeats: dict[str, dict[str, Run]], arm: str, table: Callable) -> list[str]:
    common = sorted(set(repeats[arm]) & set(repeats[BASELINE]))
    runs = {repeat: (repeats[arm][repeat], repeats[BASELINE][repeat]) for repeat in common}
    last = min(int(run.series[TRAINING_LOSS].steps[-1]) for pair in runs.values() for run in pair)
    found = {repeat: gaps(*pair, last) for repeat, pair in runs.items()}
    tokens = runs[common[0]][1].axis("tokens")[-1] / runs[common[0]][1].series[TRAINING_LOSS].steps[-1]
    ends = [f"{end * tokens / 1e6:.1f}M" for end, *_ in found[common[0]]]
    columns = (f"`{arm}` minus dense, training loss", *(f"up to {end} tokens" for end in ends))
    rows = [
        [f"repeat {repeat}", *(f"{gap:+.4f} ({100 * share:+.2f} %)" for _, gap, share in found[repeat])]
        for repeat in common
    ]
    return [*table(columns, rows), ""]


def section(folder: Path, table: Callable) -> list[str]:
    """The part of docs/quality.md about one folder of repeats."""
    repeats = read_repeats(folder)
    machine = header(next(iter(sorted(folder.glob("*.jsonl")))))["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name != "device")
    lines = [
        f"{machine['device']}; {versions}; corpus `{folder.name}`. From random weights, runs of equal settings end "
        f"{run_offset(repeats):.3f} nats apart (standard deviation, {START}-{BASELINE} and the others pooled).",
        "",
        *_scratch_lines(repeats, table),
    ]
    for arm in (arm for arm in repeats if arm != BASELINE and not is_from_scratch(next(iter(repeats[arm].values())))):
        lines += _gap_lines(repeats, arm, table)
    dense = read_switched(folder, BASELINE, MARK)
    arms = dict.fromkeys(path.stem.removeprefix(f"{SWITCHED}-").rpartition(MARK)[0]
                         for path in sorted(folder.glob(f"{SWITCHED}-*{MARK}*.json")))  # fmt: skip
    for arm in (arm for arm in arms if arm != BASELINE):
        pairs = [
            f"{own[TRAINING_LOSS]:.4f} for {other[TRAINING_LOSS]:.4f} "
            f"({100 * (own[TRAINING_LOSS] / other[TRAINING_LOSS] - 1):+.2f} %)"
            for repeat, own in read_switched(folder, arm, MARK).items()
            if (other := dense.get(repeat)) is not None
        ]
        lines.append(f"- Validation loss of dense's weights under `{arm}`, before any step: {'; '.join(pairs)}.")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.quality.repeats", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not any(folder.glob(f"*{MARK}*.jsonl")):
        parser.error(f"{folder}: no <label>_repeat<n>.jsonl there; expected thinned losses of repeated runs")
    from examples.quality.page import table

    print("\n".join(section(folder, table)))


if __name__ == "__main__":
    main()
