"""Branches from a trunk of short sequences: which runs there are, what they begin with, their learning rates, the
gate."""

from __future__ import annotations

import numpy as np
import pytest

from studies import continued
from studies.continued import make_jobs, run_continued, with_starts
from studies.data import Run
from studies.launch import BEFORE, command
from studies.run import COMPLETE, parse_arguments
from studies.studies import density
from studies.tests.test_continued import corpus, kept, started, study  # noqa: F401
from studies.trunk import TRUNKS, gate
from studies.workers import Budget

LARGE, TINY = TRUNKS["branch8k"], TRUNKS["branch-tiny"]
ARMS = ["dense", "fourth-w-sink", "w-then-dense"]


def test_windows_and_strides_attend_as_many_pairs():
    for one, other in (("w-sink", "s2"), ("fourth-w-sink", "fourth-s2")):
        assert density(LARGE, one) == pytest.approx(density(LARGE, other), rel=0.005)
        assert density(TINY, one) == pytest.approx(density(TINY, other), rel=0.01)


def test_in_the_trunk_all_arms_attend_the_same():
    assert LARGE.start.study.model.seq_length <= min(512, LARGE.local_tokens)
    assert LARGE.step_tokens == LARGE.start.study.step_tokens


@pytest.fixture
def jobs(tmp_path, corpus):  # noqa: F811
    place = continued.ContinuedPlace(TINY, corpus, 120 * 1024, tmp_path, tmp_path, 40 * 1024, {continued.START: corpus})
    return make_jobs(place, ARMS, [1, 2], {"dense": 4e-3})


def test_a_branch_that_changes_its_attention_goes_on_from_its_own_first_part(jobs):
    assert [job.label for job in jobs[2:]] == [
        *("dense", "dense", "fourth-w-sink", "fourth-w-sink"),
        *("before-w-sink", "w-then-dense", "before-w-sink", "w-then-dense"),
    ]
    trunk, (before, after) = jobs[0], jobs[6:8]
    assert after.start == before and before.start == trunk and before.seed == after.seed == 1
    assert (before.tokens, after.tokens) == (96 * 1024, 24 * 1024)
    assert with_starts([after], jobs) == [trunk, before, after]
    assert with_starts([jobs[3]], jobs) == [jobs[1], jobs[3]]


def test_learning_rates(jobs, corpus):  # noqa: F811
    """Constant in the trunk, a linear decay in the last fifth of a branch, in one run or in two."""
    flags = {}
    for job in jobs[:1] + jobs[2:3] + jobs[6:8]:
        job.folder.mkdir(parents=True)
        flags[job.label] = command(job, corpus, on_gpu=False)
    assert all("--qk-layernorm" in own and "--lr=0.004" in own for own in flags.values())
    styles = {"start-dense": "constant", "before-w-sink": "constant", "w-then-dense": "linear", "dense": "WSD"}
    for label, style in styles.items():
        assert f"--lr-decay-style={style}" in flags[label]
        assert [flag for flag in flags[label] if "wsd" in flag] == (
            ["--lr-wsd-decay-style=linear", "--lr-wsd-decay-iters=24"] if style == "WSD" else []
        )
    assert "--seq-length=64" in flags["start-dense"] and "--seq-length=256" in flags["before-w-sink"]


def test_the_runs_of_a_seed(study, tmp_path):  # noqa: F811
    given = ["--arms", *ARMS, "--tokens", str(120 * 1024)]
    status, said = study(*given, name=TINY.name)
    assert status == COMPLETE, "\n".join(said)
    assert started(said)[0] == "start-dense" and set(started(said)[1:3]) == {"dense", "fourth-w-sink"}
    found = kept(tmp_path, TINY.name)
    assert sorted(found) == sorted(["start-dense", f"{BEFORE}-w-sink", *ARMS])
    assert {label for label, run in found.items() if "tests" in run.about} == set(ARMS)
    status, said = study(*given, name=TINY.name)
    assert status == COMPLETE and not started(said)
    status, said = study(*given, "--arms", *ARMS, "w-sink", name=TINY.name)
    assert status == COMPLETE and started(said) == ["w-sink"]


def trunk(loss: float, falls: float) -> Run:
    tokens = np.arange(1, 201) * 1e6
    late = np.clip(tokens / 1e6 - 150, 0, None)
    losses = loss + falls * (50 - late) + np.where(np.arange(200) % 2, 0.001, -0.001)
    return Run({"arm": "dense", "seed": 1, "role": "start"}, {"tokens": tokens, "loss": losses})


@pytest.mark.parametrize("loss, falls, is_open", [(2.25, 0.001, True), (2.35, 0.001, False), (2.25, 0.003, False)])
def test_the_gate(loss, falls, is_open):
    (line,) = gate([trunk(loss, falls)])
    assert line.endswith(": open" if is_open else ": closed")
    assert f"{loss:.3f} nats" in line and f"by {falls:.4f} nats" in line


@pytest.mark.long
def test_through_megatron(tmp_path):
    """Two minutes: four processes of Megatron's."""
    said = []
    folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    given = parse_arguments([TINY.name, "--arms", "dense", "w-then-dense", "--rate", "4e-3", *folders])
    assert run_continued(TINY, given, Budget(None), said.append) == COMPLETE, "\n".join(said)
    found = kept(tmp_path, TINY.name)
    rates = {label: run.train["learning_rate"] for label, run in found.items()}
    assert rates["before-w-sink"][-1] == rates["start-dense"][-1] == pytest.approx(4e-3)
    assert rates["dense"][80] == pytest.approx(4e-3) and rates["dense"][-1] == pytest.approx(4e-4)
    assert rates["w-then-dense"][-1] == pytest.approx(4e-4)
    before, after = (found[label].train["loss"] for label in ("before-w-sink", "w-then-dense"))
    assert after[:5].mean() < before[:20].mean() - 0.3, "the weights did not come along"
    assert "loss" in found["w-then-dense"].about["tests"]["passages"]
