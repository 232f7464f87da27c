"""The part of a study's page on retrieval: accuracies by task, depth, residue and hops, from the recall files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from studies.arms import BASELINE
from studies.cells import table
from studies.recall import BEYOND, LONGER
from studies.results import read_json
from studies.studies import Study
from studies.tasks import TASKS

# Held to all needles, at every depth and residue.
HYBRIDS = (
    *("hybrid", "dense-fourth", "dense-heads"),
    *("chosen-heads", "chosen-few", "chosen-window", "own-window", "chosen-wide"),
)


def read_tests(study: Study, folder: Path) -> dict[tuple[str, int], dict]:
    """{(arm, seed): its tests}, in the study's order."""
    found = {
        (arm, int(path.name.removeprefix(f"{arm}_seed").removesuffix(".recall.json"))): read_json(path, {})
        for arm in study.arm_names
        for path in folder.glob(f"{arm}_seed*.recall.json")
    }
    order = list(study.arm_names)
    return {run: found[run] for run in sorted(found, key=lambda run: (order.index(run[0]), run[1]))}


def run_names(runs: Collection[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """{(arm, seed): how it is called}: by its arm alone where all have one seed."""
    several = len({seed for _, seed in runs}) > 1
    return {(arm, seed): f"{arm}, seed {seed}" if several else arm for arm, seed in runs}


def shares(test: dict, task: str, name: str) -> np.ndarray:
    """A list of shares; a group without questions is NaN."""
    return np.array(test[task][name], dtype=float)


def percent(value: float) -> str:
    return "-" if np.isnan(value) else f"{100 * value:.1f}"


def target_lines(tests: dict[tuple[str, int], dict]) -> list[str]:
    """Whether the hybrids find every needle."""
    lines = []
    for run, name in run_names(tests).items():
        if run[0] not in HYBRIDS:
            continue
        groups = np.concatenate([shares(tests[run], "needle", kind) for kind in ("by_depth", "by_residue")])
        worst = np.nanmin(groups)
        verdict = "met" if worst == 1.0 else "missed"
        lines.append(
            f"- {name} finds every needle, at every depth and residue: **{verdict}** (worst group {percent(worst)} %)."
        )
    return [*lines, ""] if lines else []


def section(study: Study, tests: dict[tuple[str, int], dict], picture: str) -> list[str]:
    """The lines of one scale, of the tasks that all of its tests have. picture: what `draw` drew, from the page."""
    names = run_names(tests)
    tasks = [task for task in TASKS if all(task in test for test in tests.values())]
    rows = [[names[run], *(percent(test[task]["accuracy"]) for task in tasks)] for run, test in tests.items()]
    lines = [
        f"Right answers in percent, of {study.tasks.tests} sequences a task.",
        "",
        *target_lines(tests),
        *table(["arm", *tasks], rows),
        "",
        f"![Right answers on recall by residue and by depth]({picture})",
        "",
        f"By the residue of the value's block modulo the stride of {study.stride} (needle, then recall):",
        "",
        *_by(tests, names, "by_residue", ("needle", "recall")),
        "",
        "By depth, from the start of the context to its end (needle, then recall):",
        "",
        *_by(tests, names, "by_depth", ("needle", "recall")),
        "",
    ]
    if "tracking" in tasks:
        lines += ["Variable tracking by hops:", "", *_by(tests, names, "by_hops", ("tracking",)), ""]
    longer = {run: test for run, test in tests.items() if BEYOND in test}
    if longer:
        count = next(iter(longer.values()))[BEYOND]["questions"]
        length = f"{LONGER * study.model.seq_length:,}"
        lines += [f"{count} needles in sequences of {length} tokens, {LONGER} times the training's, by depth:", ""]
        lines += [*_by(longer, names, "by_depth", (BEYOND,)), ""]
    return lines


def recall_shares(tests: dict[tuple[str, int], dict]) -> tuple[list[str], dict[str, np.ndarray]]:
    """(the runs, dense first; {"by_residue", "by_depth": percent of right answers on `recall` [runs, groups], NaN for a
    group without questions})."""
    runs, names = sorted(tests, key=lambda run: run[0] != BASELINE), run_names(tests)
    groups = ("by_residue", "by_depth")
    found = {name: 100 * np.array([shares(tests[run], "recall", name) for run in runs]) for name in groups}
    return [names[run] for run in runs], found


def draw(study: Study, tests: dict[tuple[str, int], dict], file: Path) -> None:
    """What `recall_shares` gives, as shades of a colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, found = recall_shares(tests)
    figure, panels = pyplot.subplots(
        1, 2, figsize=(11, 1.4 + 0.3 * len(names)), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (name, title, first) in zip(
        panels[0],
        (
            ("by_residue", f"the value's block, modulo {study.stride}", 0),
            ("by_depth", "depth, in eighths of the context", 1),
        ),
    ):
        values = found[name]
        panel.imshow(values, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for (row, column), share in np.ndenumerate(values):
            if not np.isnan(share):
                panel.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=8,
                           color="white" if share > 60 else "#333333")  # fmt: skip
        panel.set_xticks(range(values.shape[1]), [str(first + group) for group in range(values.shape[1])])
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.set_title(title, fontsize=9)
    figure.suptitle("right answers on recall, percent", fontsize=9)
    figure.savefig(file, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _by(
    tests: dict[tuple[str, int], dict],
    names: dict[tuple[str, int], str],
    kind: str,
    tasks: Sequence[str],
) -> list[str]:
    rows = [
        [f"{names[run]}, {task}", *(percent(share) for share in shares(test, task, kind))]
        for task in tasks
        for run, test in tests.items()
    ]
    first = 1 if kind == "by_depth" else 0
    return table(["", *(str(first + group) for group in range(len(rows[0]) - 1))], rows)
