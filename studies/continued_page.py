"""The part of a study's page on models that go on from a dense one: what the switch costs, when the loss is
back at dense's, and what the same compute gives from random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from studies.cells import gap, last, table
from studies.continued import SCRATCH, START, SWITCHED
from studies.results import read_json
from studies.scales import seed_of
from studies.studies import BASELINE, Start
from s2_megatron.tools.compare.figures import COLOURS, POSITION, position_losses
from s2_megatron.tools.compare.measure import Comparison, Paired, smoothed, smoothed_steps
from s2_megatron.tools.compare.readers import read_run
from s2_megatron.tools.compare.runs import TRAINING_LOSS, VALIDATION_LOSS, Run

# A model is back when its loss is at most this far above dense's, as a share.
LIMITS = (0.005, 0.001)
TRAILING = "lm loss by position/trailing"


def tokens_to_return(paired: Paired, tokens: np.ndarray, width: int, limit: float) -> float | None:
    """Tokens after which the loss stays at most `limit` (a share) above the baseline's, both as means of `width` steps;
    None when it ends above. tokens: float64 [n], of the steps of `paired`."""
    sums = np.cumsum(np.concatenate([[0.0], paired.arm / paired.baseline - 1]))
    ends = np.arange(1, len(paired.steps) + 1)
    starts = np.maximum(0, ends - width)
    above = np.flatnonzero((sums[ends] - sums[starts]) / (ends - starts) > limit)
    first = int(above[-1]) + 1 if len(above) else 0
    if first == len(tokens):
        return None
    return float(tokens[first]) if first else 0.0


def _returned(comparison: Comparison, arm: str, limit: float) -> str:
    """Of the slowest seed."""
    baseline = comparison.results[0].arm.runs[0]
    found = [
        tokens_to_return(paired, baseline.at(paired.steps, "tokens"), smoothed_steps(baseline), limit)
        for paired in comparison.paired[arm]
    ]
    if any(tokens is None for tokens in found):
        return f"not in {baseline.axis('tokens')[-1] / 1e6:.1f}M"
    return f"{max(found) / 1e6:.2f}M" if max(found) else "at once"


def read_switched(folder: Path, arm: str, by: str = "_seed") -> dict[str, dict]:
    """{seed: the evaluation right after the switch}. by: what stands before the seed in a file's name."""
    paths = sorted(folder.glob(f"{SWITCHED}-{arm}{by}*.json"))
    return {path.stem.rpartition(by)[2]: read_json(path, {}) for path in paths}


def _read_runs(folder: Path, label: str, comparison: Comparison) -> list[Run]:
    """Those of the comparison's seeds."""
    seeds = map(seed_of, comparison.results[0].arm.runs)
    paths = [folder / f"{label}_seed{seed}.jsonl" for seed in seeds]
    return [read_run(f"{label}={path}")[0] for path in paths if path.exists()]


def _last_validation(runs: Sequence[Run]) -> float:
    return float(np.mean([last(run, VALIDATION_LOSS) for run in runs]))


def _switched_of_both(folder: Path, arm: str, comparison: Comparison) -> tuple[list[dict], list[dict]]:
    """(the arm's, dense's) evaluations right after the switch, of the comparison's seeds that both have."""
    own, dense = read_switched(folder, arm), read_switched(folder, BASELINE)
    seeds = [seed for seed in map(seed_of, comparison.results[0].arm.runs) if seed in own and seed in dense]
    return [own[seed] for seed in seeds], [dense[seed] for seed in seeds]


def _switched_cells(folder: Path, arm: str, comparison: Comparison) -> list[str]:
    """(the loss, that of the end of the context) right after the switch, both beside dense's of the same seeds."""
    both = _switched_of_both(folder, arm, comparison)
    if not both[0]:
        return ["-", "-"]
    means = [
        [float(np.mean([record[name] for record in records])) for records in both] for name in (TRAINING_LOSS, TRAILING)
    ]
    return [gap(*pair) for pair in means]


def section(start: Start, folder: Path, comparison: Comparison, picture: str) -> list[str]:
    """The lines of one scale. folder: of its results."""
    dense = comparison.results[0]
    before = _read_runs(folder, f"{START}-{BASELINE}", comparison)
    rows = []
    for result in comparison.results:
        name, own = result.arm.name, _last_validation(result.arm.runs)
        scratch = _read_runs(folder, f"{SCRATCH}-{name}", comparison)
        rows.append(
            [
                name,
                *_switched_cells(folder, name, comparison),
                *(["-"] * len(LIMITS) if result is dense else [_returned(comparison, name, each) for each in LIMITS]),
                gap(own, _last_validation(dense.arm.runs)),
                gap(_last_validation(scratch), own) if scratch else "-",
            ]
        )
    lines = []
    if before:
        tokens, length = before[0].axis("tokens")[-1], start.study.model.seq_length
        lines = [
            f"The dense model before the switch: {tokens / 1e6:.1f}M tokens at a length of {length:,}, validation loss "
            f"{_last_validation(before):.4f} there. Percentages in the table are against dense in the same column; "
            "from random weights, against the arm that went on.",
            "",
        ]
    columns = (
        "arm",
        "validation loss right after the switch",
        "the same, last 1/8 of the context",
        *(f"tokens until at most {100 * limit:g} % above dense" for limit in LIMITS),
        "validation loss at the end",
        "from random weights, at equal FLOPs",
    )
    alt = "Loss over tokens before and after the switch, over FLOPs, and the gap by position"
    return [*lines, *table(columns, rows), "", f"![{alt}]({picture})", ""]


def _positions(records: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
    """(first position of each bucket, mean loss)."""
    names = {int(match[1]): name for name in records[0] if (match := POSITION.fullmatch(name))}
    places = sorted(names)
    return np.array(places), np.array([np.mean([record[names[place]] for record in records]) for place in places])


def _last_positions(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    found = [position_losses(run, validation=True) for run in runs]
    return found[0][0], np.mean([losses for _, losses in found], axis=0)


def draw(folder: Path, comparison: Comparison, file: Path) -> None:
    """Three panels: training loss over tokens, the dense run first; over FLOPs, runs from random weights dashed;
    validation loss minus dense's by position, right after the switch (dashed) and at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    before = _read_runs(folder, f"{START}-{BASELINE}", comparison)
    offset = {axis: float(before[0].axis(axis)[-1]) if before else 0.0 for axis in ("tokens", "flops")}
    for panel, axis in zip(axes, ("tokens", "flops")):
        for which, run in enumerate(before):
            label = "dense, before" if which == 0 else None
            panel.plot(run.axis(axis), smoothed(run), color="#999999", linewidth=1.2, label=label)
        ends = []
        for colour, result in zip(COLOURS, comparison.results):
            for which, run in enumerate(result.arm.runs):
                label = result.arm.name if which == 0 else None
                ends.append(smoothed(run))
                panel.plot(offset[axis] + run.axis(axis), smoothed(run), color=colour, linewidth=1.2, label=label)
            if axis == "tokens":
                continue
            for which, run in enumerate(_read_runs(folder, f"{SCRATCH}-{result.arm.name}", comparison)):
                label = f"{result.arm.name}, from random weights" if which == 0 else None
                ends.append(smoothed(run)[-1:])
                panel.plot(run.axis(axis), smoothed(run), color=colour, linewidth=1.2, linestyle="--", label=label)
        low, high = min(curve.min() for curve in ends), max(curve.max() for curve in ends)
        panel.set_ylim(low - 0.05 * (high - low), high + (high - low))
        panel.set_title("training loss, smoothed")
        panel.set_xlabel(axis if axis == "tokens" else "FLOPs of attended pairs")
    _draw_gaps(axes[2], folder, comparison)
    for panel in axes:
        panel.grid(alpha=0.25, linewidth=0.5)
        panel.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _draw_gaps(panel, folder: Path, comparison: Comparison) -> None:
    dense = comparison.results[0]
    for colour, result in list(zip(COLOURS, comparison.results))[1:]:
        switched, dense_switched = _switched_of_both(folder, result.arm.name, comparison)
        if switched:
            places, own = _positions(switched)
            gap = own - _positions(dense_switched)[1]
            panel.plot(places, gap, color=colour, linestyle="--", label=f"{result.arm.name}, right after the switch")
        places, own = _last_positions(result.arm.runs)
        gap = own - _last_positions(dense.arm.runs)[1]
        panel.plot(places, gap, color=colour, marker="o", markersize=3, label=f"{result.arm.name}, at the end")
    panel.axhline(0, color="#333333", linewidth=0.8)
    panel.set_title("validation loss minus dense's, by position")
    panel.set_xlabel("first position of the bucket")
