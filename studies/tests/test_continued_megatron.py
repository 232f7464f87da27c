"""Studies that go on from a dense model, every run a process of Megatron's: over text, and over tasks."""

from __future__ import annotations

import numpy as np
import pytest

from studies.continuations import CONTINUATIONS
from studies.continued import run_continued
from studies.recall import BEYOND
from studies.run import COMPLETE, parse_arguments
from studies.tasks import TASKS
from studies.tests.test_continued import kept
from studies.workers import Budget


@pytest.mark.long
@pytest.mark.parametrize("name", ["from-dense-tiny"])
def test_a_study_through_megatron(name, tmp_path):
    """About two minutes: every run is a process of Megatron's."""
    said = []
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    given = parse_arguments([name, "--arms", "dense", "s2", "--rate", "4e-3", *folders])
    assert run_continued(CONTINUATIONS[name], given, Budget(None), said.append) == COMPLETE, "\n".join(said)
    found = kept(tmp_path, name)
    first = {label: found[label].train["loss"][0] for label in ("start-dense", "dense", "s2")}
    assert first["dense"] < first["start-dense"] - 0.5, "the weights did not come along"
    assert abs(first["s2"] - first["dense"]) < 0.1
    assert found["switched-s2"].validation["step"].tolist() == [0] and not found["switched-s2"].train


@pytest.mark.long
def test_tasks_after_text_through_megatron(tmp_path):
    """Two minutes. The dense model reads text, its heads are chosen on text, and what goes on reads tasks four times as
    long."""
    said = []
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    given = parse_arguments(["extend-recall-tiny", "--arms", "dense", "chosen-few", "--rate", "4e-3", *folders])
    study = CONTINUATIONS["extend-recall-tiny"]
    assert run_continued(study, given, Budget(None), said.append) == COMPLETE, "\n".join(said)
    found = kept(tmp_path, study.name)
    first = {arm: found[arm].train["loss"][0] for arm in ("dense", "chosen-few")}
    assert abs(first["chosen-few"] - first["dense"]) < 0.1
    few = found["chosen-few"]
    assert few.about["choice"]["ranking"]["chosen"] == study.arm("chosen-few").chosen
    assert "sequences of 256 tokens of more," in few.about["choice"]["yaml"]  # the text's second part
    read = [found[label].about["settings"]["data_path"] for label in ("start-dense", "dense")]
    assert read[0] != read[1]
    tested = few.about["tests"]["recall"]
    assert tested.keys() == {*TASKS, BEYOND} and tested[BEYOND]["questions"] == study.tasks.tests // 4
    assert tested["recall"]["questions"] == study.tasks.tests * study.tasks.pairs
    # What counts for the loss are the answers, which stand at the end.
    assert few.about["position_starts"] == [0, 256, 512, 768]
    assert np.isfinite(few.validation["loss_by_position"][-1]).tolist() == [False, False, False, True]
