"""The part of a study's page on retrieval: accuracies by task, depth, residue and hops, from the recall files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from examples.quality.arms import BASELINE
from examples.quality.recall import BEYOND, LONGER
from examples.quality.results import read_json
from examples.quality.studies import Study
from examples.quality.tasks import TASKS

# Held to all needles, at every depth and residue.
HYBRIDS = (
    *("hybrid", "dense-fourth", "dense-heads"),
    *("chosen-heads", "chosen-few", "chosen-window", "own-window", "chosen-wide"),
)


def read_tests(study: Study, folder: Path) -> dict[str, list[dict]]:
    """{arm: [its tests, one a seed]} of the arms that have any."""
    files = {arm: sorted(folder.glob(f"{arm}_seed*.recall.json")) for arm in study.arm_names}
    found = {arm: [read_json(path, {}) for path in paths] for arm, paths in files.items()}
    return {arm: tests for arm, tests in found.items() if tests}


def mean_of(tests: Sequence[dict], task: str, name: str) -> list[float]:
    """Mean over the seeds of a list of shares; a group without questions is NaN."""
    values = np.array([test[task][name] for test in tests], dtype=float)
    known = ~np.isnan(values)
    counts = known.sum(axis=0)
    return np.where(counts > 0, np.where(known, values, 0).sum(axis=0) / np.maximum(counts, 1), np.nan).tolist()


def percent(value: float) -> str:
    return "-" if np.isnan(value) else f"{100 * value:.1f}"


def target_lines(tests: dict[str, list[dict]]) -> list[str]:
    """Whether the hybrids find every needle."""
    lines = []
    for arm in (arm for arm in HYBRIDS if arm in tests):
        groups = [
            share
            for test in tests[arm]
            for name in ("by_depth", "by_residue")
            for share in test["needle"][name]
            if share is not None
        ]
        verdict = "met" if min(groups) == 1.0 else "missed"
        lines.append(
            f"- {arm} finds every needle, at every depth and residue: **{verdict}** (worst group "
            f"{percent(min(groups))} %)."
        )
    return [*lines, ""] if lines else []


def section(study: Study, tests: dict[str, list[dict]], picture: str, table: Callable) -> list[str]:
    """The lines of one scale, of the tasks that all of its tests have. picture: what `draw` drew, from the page. table:
    (header, rows) to lines of Markdown."""
    seeds = sorted({len(each) for each in tests.values()})
    tasks = [task for task in TASKS if all(task in test for own in tests.values() for test in own)]
    rows = [
        [arm, *(percent(np.mean([test[task]["accuracy"] for test in own])) for task in tasks)]
        for arm, own in tests.items()
    ]
    lines = [
        f"Right answers in percent, of {study.tasks.tests} sequences a task; seeds an arm: "
        f"{' to '.join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1])))}.",
        "",
        *target_lines(tests),
        *table(["arm", *tasks], rows),
        "",
        f"![Right answers on recall by residue and by depth]({picture})",
        "",
        f"By the residue of the value's block modulo the stride of {study.stride} (needle, then recall):",
        "",
        *_by(tests, "by_residue", ("needle", "recall"), table),
        "",
        "By depth, from the start of the context to its end (needle, then recall):",
        "",
        *_by(tests, "by_depth", ("needle", "recall"), table),
        "",
    ]
    if "tracking" in tasks:
        lines += ["Variable tracking by hops:", "", *_by(tests, "by_hops", ("tracking",), table), ""]
    longer = {arm: [test for test in own if BEYOND in test] for arm, own in tests.items()}
    longer = {arm: own for arm, own in longer.items() if own}
    if longer:
        count = next(iter(longer.values()))[0][BEYOND]["questions"]
        length = f"{LONGER * study.model.seq_length:,}"
        lines += [f"{count} needles in sequences of {length} tokens, {LONGER} times the training's, by depth:", ""]
        lines += [*_by(longer, "by_depth", (BEYOND,), table), ""]
    return lines


def recall_shares(tests: dict[str, list[dict]]) -> tuple[list[str], dict[str, np.ndarray]]:
    """(the arms, dense first; {"by_residue", "by_depth": percent of right answers on `recall` [arms, groups], NaN for a
    group without questions})."""
    arms = sorted(tests, key=lambda arm: arm != BASELINE)
    groups = ("by_residue", "by_depth")
    return arms, {name: 100 * np.array([mean_of(tests[arm], "recall", name) for arm in arms]) for name in groups}


def draw(study: Study, tests: dict[str, list[dict]], file: Path) -> None:
    """What `recall_shares` gives, as shades of a colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms, found = recall_shares(tests)
    figure, panels = pyplot.subplots(
        1, 2, figsize=(11, 1.4 + 0.3 * len(arms)), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (name, title, first) in zip(
        panels[0],
        (
            ("by_residue", f"the value's block, modulo {study.stride}", 0),
            ("by_depth", "depth, in eighths of the context", 1),
        ),
    ):
        shares = found[name]
        panel.imshow(shares, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for (row, column), share in np.ndenumerate(shares):
            if not np.isnan(share):
                panel.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=8,
                           color="white" if share > 60 else "#333333")  # fmt: skip
        panel.set_xticks(range(shares.shape[1]), [str(first + group) for group in range(shares.shape[1])])
        panel.set_yticks(range(len(arms)), arms, fontsize=8)
        panel.set_title(title, fontsize=9)
    figure.suptitle("right answers on recall, percent", fontsize=9)
    figure.savefig(file, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _by(tests: dict[str, list[dict]], name: str, tasks: Sequence[str], table: Callable) -> list[str]:
    rows = [
        [f"{arm}, {task}", *(percent(share) for share in mean_of(own, task, name))]
        for task in tasks
        for arm, own in tests.items()
    ]
    first = 1 if name == "by_depth" else 0
    return table(["", *(str(first + group) for group in range(len(rows[0]) - 1))], rows)
