"""Studies that go on from a dense model, every run a process of Megatron's: over text, and over tasks."""

from __future__ import annotations

import json

import pytest

from studies import page, scales
from studies.continuations import CONTINUATIONS
from studies.continued import run_continued
from studies.recall import BEYOND
from studies.run import COMPLETE, parse_arguments
from studies.tasks import TASKS
from studies.workers import Budget
from s2_megatron.megatron.loss_log import read_loss_log, read_records


@pytest.mark.long
@pytest.mark.parametrize("name", ["from-dense-tiny"])
def test_a_study_through_megatron(name, tmp_path):
    """About two minutes: every run is a process of Megatron's."""
    said = []
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    given = parse_arguments([name, "--arms", "dense", "s2", "--rate", "4e-3", *folders])
    assert run_continued(CONTINUATIONS[name], given, Budget(None), said.append) == COMPLETE, "\n".join(said)
    (folder,) = [path for path in (tmp_path / "results" / name).iterdir() if path.is_dir()]
    first = {arm: read_records(folder / f"{arm}_seed1.jsonl")[1]["lm loss"] for arm in ("start-dense", "dense", "s2")}
    assert first["dense"] < first["start-dense"] - 0.5, "the weights did not come along"
    assert abs(first["s2"] - first["dense"]) < 0.1
    (scale,) = scales.read_scales(CONTINUATIONS[name], tmp_path / "results")
    assert "right after the switch" in "\n".join(page.scale_section(scale, "x", pictures=False))


@pytest.mark.long
def test_tasks_after_text_through_megatron(tmp_path):
    """Two minutes. The dense model reads text, its heads are chosen on text, and what goes on reads tasks four times as
    long."""
    said = []
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    given = parse_arguments(["extend-recall-tiny", "--arms", "dense", "chosen-few", "--rate", "4e-3", *folders])
    study = CONTINUATIONS["extend-recall-tiny"]
    assert run_continued(study, given, Budget(None), said.append) == COMPLETE, "\n".join(said)
    (folder,) = [path for path in (tmp_path / "results" / study.name).iterdir() if path.is_dir()]
    first = {arm: read_records(folder / f"{arm}_seed1.jsonl")[1]["lm loss"] for arm in ("dense", "chosen-few")}
    assert abs(first["chosen-few"] - first["dense"]) < 0.1
    assert json.loads((folder / "chosen-few_seed1.json").read_text())["chosen"] == study.arm("chosen-few").chosen
    assert (
        "sequences of 256 tokens of more," in (folder / "chosen-few_seed1.yaml").read_text()
    )  # the text's second part
    read = {arm: read_records(folder / f"{arm}_seed1.jsonl")[0]["run"]["arguments"] for arm in ("start-dense", "dense")}
    assert read["start-dense"]["data_path"] != read["dense"]["data_path"]
    tested = json.loads((folder / "chosen-few_seed1.recall.json").read_text())
    assert tested.keys() == {*TASKS, BEYOND} and tested[BEYOND]["questions"] == study.tasks.tests // 4
    assert tested["recall"]["questions"] == study.tasks.tests * study.tasks.pairs
    # What counts for the loss are the answers, here of the one sequence to validate with, in each batch of it.
    (evaluation,) = read_loss_log(folder / "chosen-few_seed1.jsonl")[1].values()
    counted = {name: number for name, number in evaluation.items() if name.startswith("tokens by position/")}
    answers = study.eval_batches * study.tasks.chains
    assert counted == {f"tokens by position/{where}": answers for where in ("0768-1023", "trailing")}
    (scale,) = scales.read_scales(study, tmp_path / "results")
    text = "\n".join(page.scale_section(scale, "x", pictures=False))
    assert "| chosen-few, tracking |" in text and "right after the switch" not in text
