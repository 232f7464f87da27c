"""A whole study in its size for a CPU: corpus, runs through pretrain_gpt_s2.py, results, comparison."""

from __future__ import annotations

import numpy as np
import pytest

from studies.data import CSV_COLUMNS, read_manifest, read_study
from studies.run import AGAIN, COMPLETE, parse_arguments, run
from studies.studies import STUDIES

TINY = STUDIES["lm-tiny"]
STEPS = 24


@pytest.fixture(scope="module")
def study(tmp_path_factory, new_runs):
    """(folder, what the command said): two arms, one seed."""
    folder, said = tmp_path_factory.mktemp("study"), []
    new_runs(folder)
    status = run(parse_arguments(arguments(folder)), said.append)
    assert status == COMPLETE, "\n".join(said)
    return folder, said


def arguments(folder, *more):
    tokens = str(STEPS * TINY.step_tokens)
    return ["lm-tiny", "--arms", "dense", "s2", "--rate", "4e-3", "--tokens", tokens, "--runs", str(folder / "runs"),
            "--results", str(folder / "results"), *more]  # fmt: skip


def runs(study):
    folder, _ = study
    return {run.arm: run for run in read_study("lm-tiny", folder / "results")}


def test_the_arms_train_on_the_same_batches(study):
    folder, _ = study
    assert sorted(path.name for path in (folder / "results").iterdir()) == ["lm-tiny.npz", "manifest.json", "runs.csv"]
    found = runs(study)
    assert list(found) == ["dense", "s2"] and all(
        {"copies", "needles"} == set(run.about["tests"]) for run in found.values()
    )
    assert found["dense"].about["flops_per_token"]["attended"] > found["s2"].about["flops_per_token"]["attended"]
    assert found["dense"].about["density"] == 1.0 and found["s2"].about["density"] == pytest.approx(0.392, abs=1e-3)
    for each in found.values():
        assert each.about["settings"]["data_path"] == [f"corpus/{each.about['corpus']['sha256'][:12]}"]
    losses = {arm: run.train["loss"] for arm, run in found.items()}
    assert len(losses["dense"]) == STEPS and losses["dense"][-1] < losses["dense"][0] - 0.5
    assert found["s2"].train["tokens"].tolist() == [TINY.step_tokens * step for step in range(1, STEPS + 1)]
    # The same weights and the same first batch: only the attention differs, at initialisation by little.
    assert losses["s2"][0] == pytest.approx(losses["dense"][0], abs=0.02) and not np.array_equal(*losses.values())
    assert not list((folder / "runs").rglob("checkpoints"))
    assert list((folder / "runs").rglob("compare.html")) and list((folder / "runs").rglob("logs/*/s2_seed1.jsonl"))


def test_what_is_kept_says_how_to_make_it_again(study):
    folder, _ = study
    (made,) = read_manifest(folder / "results")["lm-tiny"]["sets"]
    assert made["runs"] == 2 and made["commands"][0].startswith("python -m studies.run lm-tiny --arms dense s2 --rate")
    assert made["commits"] and made["machines"][0]["device"] == "CPU" and len(made["corpus"]) == 64
    header, dense, s2 = (folder / "results" / "runs.csv").read_text().splitlines()
    assert header == ",".join(CSV_COLUMNS) and dense.split(",")[3] == "dense" and s2.split(",")[3] == "s2"


def test_evaluations_have_losses_by_position(study):
    s2 = runs(study)["s2"]
    assert s2.validation["step"].tolist() == [13, STEPS]
    assert s2.validation["loss_by_position"].shape == (2, TINY.position_buckets)
    assert s2.about["position_starts"] == [0, 64, 128, 192]
    assert s2.by_position(0, 256) == pytest.approx(s2.last_loss, rel=1e-3)


def test_where_the_loss_lies_adds_up_to_the_loss(study):
    """The checkpoint's own reader, over the validation documents, finds the loss that Megatron logged."""
    s2 = runs(study)["s2"]
    found = s2.about["tests"]["copies"]
    assert found["near"] == TINY.local_tokens and sum(found["tokens"]) == found["sequences"] * TINY.model.seq_length
    mean = np.average([loss or 0 for loss in found["losses"]], weights=found["tokens"])
    assert mean == pytest.approx(s2.last_loss, rel=0.05)  # Megatron takes other cuts of these documents


def test_the_needles_of_a_study(study):
    """Of 16 tokens here, as its blocks have: eight answers each. This model is too small to look anything up."""
    s2 = runs(study)["s2"]
    found = s2.about["tests"]["needles"]
    assert found.keys() == {
        "questions", "accuracy", "whole", "near", "by_depth", "by_residue", "sequences", "corpus",
    }  # fmt: skip
    assert found["questions"] == 256 * 8 and found["sequences"] == 256
    assert found["corpus"] == s2.about["corpus"]["sha256"][:12]
    # The window is the last eighth of the context.
    assert found["by_depth"][-1] is None and None not in found["by_depth"][:-1] and len(found["by_depth"]) == 8
    shares = [found["accuracy"], found["near"], *found["by_depth"][:-1], *found["by_residue"]]
    assert len(found["by_residue"]) == TINY.stride and all(0 <= share < 0.2 for share in shares) and found["whole"] == 0


def test_the_same_command_goes_on_and_says_what_is_left(study):
    folder, _ = study
    said = []
    assert run(parse_arguments(arguments(folder, "--seeds", "1", "2", "--budget", "60")), said.append) == AGAIN
    assert not [line for line in said if "started" in line]  # too little time
    assert "2 of 4 runs are finished; the budget is spent; repeat the command to go on" in said


def test_arguments_are_refused(capsys):
    found = {
        "--tokens=-1": "a number above 0",
        "lm9k": "choose from lm8k",
        "sparse": "expected dense, hybrid",
        "0": "expected 1 or more",
        "1": "--seeds 1: expected each seed once",
        "-1": "--seeds -1: expected each seed once, 0 to",
        "--losses-only": "from-dense-recall8k is about its tests; expected a study of text",
    }
    for wrong in (
        ["lm8k", "--tokens=-1"],
        ["lm9k"],
        ["lm8k", "--arms", "sparse"],
        ["lm8k", "--runs-per-gpu", "0"],
        ["lm8k", "--seeds", "1", "2", "1"],
        ["lm8k", "--seeds", "-1"],
        ["from-dense-recall8k", "--losses-only"],
    ):
        with pytest.raises(SystemExit, match="2"):
            parse_arguments(wrong)
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and wrong[-1] in said, said
        assert found[wrong[-1]] in said.replace("'", "")
