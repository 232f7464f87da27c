"""Accuracies beside the losses of the rules of thumb: of other seeds, of some arms alone, and what they decide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from studies import rules_page, scales
from studies.continuations import CONTINUATIONS
from studies.results import write_json
from studies.tests.rules_logs import write_rules_log

STUDY = replace(CONTINUATIONS["from-dense-rules-tiny"], recall="recalled")


@pytest.fixture
def results(tmp_path):
    """A folder with losses of three questions' arms, seeds 1 and 2."""
    folder = tmp_path / STUDY.name / "0.04096M+0.02048M-abababab"
    for arm in {arm for name in ("placement", "stride", "heads") for arm in STUDY.question(name).arms}:
        for seed in (1, 2):
            write_rules_log(folder / f"{arm}_seed{seed}.jsonl", arm, seed, 4.0)
    return tmp_path


def write_accuracy(results, arm, seed, accuracy, scale="100M+40M-cdcdcdcd"):
    path = results / STUDY.recall / scale / f"{arm}_seed{seed}.recall.json"
    write_json(path, {"recall": {"accuracy": accuracy}, "needle": {"accuracy": 0.5}})


def findings(results):
    (scale,) = scales.read_scales(STUDY, results)
    return rules_page.read_findings(STUDY, scale.comparison, rules_page.recall_folder(STUDY, results))


def section(results) -> str:
    return "\n".join(rules_page.section(findings(results), "pictures"))


def cells(results) -> dict[str, list[str] | None]:
    """{question: its column of recall, None without one}."""
    found = {}
    for part in section(results).split("### ")[1:]:
        header, _, *rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
        at = header.index("recall, %") + 1 if "recall, %" in header else None  # above the arms stands nothing
        found[part.partition("\n")[0]] = None if at is None else [row[at] for row in rows]
    return found


def summary(results) -> list[list[str]]:
    lines = rules_page.summary(findings(results), 1e6, "X")
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]


def test_accuracies_stand_beside_losses_of_other_seeds(results):
    assert set(cells(results).values()) == {None} and "ecall" not in section(results)
    for arm, seed, accuracy in (("s2", 7, 0.1), ("s2", 8, 0.5), ("stride-8", 7, 0.2), ("stride-16", 7, 0.3)):
        write_accuracy(results, arm, seed, accuracy)
    for arm in STUDY.arm_names:
        write_accuracy(results, arm, 7, 0.9, "100M+9M-efefefef")  # more tests, of fewer tokens
    write_accuracy(results, "s2", 7, 0.9, "100M+40M-efefefef")  # fewer tests, of as many
    assert cells(results) == {
        "Which layers are dense": ["10.0 (7), 50.0 (8)", *["-"] * 6],
        "Stride": ["-", "10.0 (7), 50.0 (8)", "20.0 (7)", "30.0 (7)"],
        "Dense heads instead of dense layers, at equal pairs": None,
    }
    text = section(results)
    assert "of the same arms in `recalled` (seeds 7, 8); the seed stands behind each." in text
    assert "By recall" not in text


def test_recall_says_who_won_where_all_arms_have_it_in_two_seeds(results):
    accuracies = {"stride-2": 0.95, "s2": 0.6, "stride-8": 0.3, "stride-16": 0.1}
    for arm, accuracy in accuracies.items():
        write_accuracy(results, arm, 7, accuracy)
    assert cells(results)["Stride"] == ["95.0", "60.0", "30.0", "10.0"]
    assert "of the same arms in `recalled` (seed 7)." in section(results)
    assert "By recall" not in section(results) and "by recall" not in summary(results)[0]
    for arm in ("s2", "stride-8", "stride-16"):
        write_accuracy(results, arm, 8, accuracies[arm] + 0.01)
    assert "By recall" not in section(results) and "by recall" not in summary(results)[0]
    write_accuracy(results, "stride-2", 8, 0.955)
    verdicts = [line for line in section(results).splitlines() if line.startswith("- By recall")]
    assert verdicts == ["- By recall: **stride 2** won."]
    header, *rows = summary(results)
    at = header.index("by recall")
    assert [row[at] for row in rows] == ["-", "**stride 2** won", "-"]
