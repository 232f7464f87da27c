"""Arms whose dense heads are chosen on the dense checkpoint of their seed: how many, on what data, and once an arm."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from s2_megatron.config.load import SparsityConfig
from s2_megatron.tools.choose_dense.plan import count_dense
from studies import chosen
from studies.arms import BASELINE, SHARDED, WINDOW
from studies.continuations import CONTINUATIONS
from studies.continued import START, ContinuedPlace, make_jobs
from studies.corpus import Corpus
from studies.launch import choice_split, command
from studies.run import parse_arguments
from studies.studies import density, equal_window, plan_before_choice, sparsity

STUDIES = [study for study in CONTINUATIONS.values() if "chosen-heads" in study.arm_names]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_as_many_heads_as_without_a_choice_and_a_quarter(study):
    def dense(arm: str) -> int:
        return count_dense(SparsityConfig.from_data(sparsity(study, arm)).resolve(**study.model.shape))

    count = study.arm("chosen-heads").chosen
    assert dense("chosen-heads") == count and dense("chosen-few") == study.arm("chosen-few").chosen == max(
        1, count // 4
    )
    assert dense("chosen-window") == dense("own-window") == dense("chosen-wide") == dense("chosen-few")
    plans = {arm.name: plan_before_choice(study, arm.name)["specs"]["S"] for arm in study.arms if arm.chosen}
    assert plans["chosen-heads"] == plans["chosen-few"] == dict(local_tokens=study.local_tokens, stride=study.stride)
    assert plans["chosen-window"] == plans["own-window"] == dict(local_tokens=equal_window(study))
    assert plans["chosen-wide"] == dict(local_tokens=2 * study.local_tokens, stride=2 * study.stride)
    if "dense-heads" in study.arm_names:
        assert count == dense("dense-heads")
        assert density(study, "chosen-heads") == pytest.approx(density(study, "dense-heads"), rel=0.01)


def test_studies_that_go_on_from_a_language_model_have_them():
    assert list(CONTINUATIONS.values()) == STUDIES


def test_the_evaluation_and_the_training_of_an_arm_have_one_yaml(tmp_path):
    study = CONTINUATIONS["from-dense-tiny"]
    corpus = Corpus(tmp_path / "corpus", {"sha256": "ab" * 32, "vocabulary": 512, "split": "40,12,0"})
    text = Corpus(tmp_path / "unseen", corpus.description)
    place = ContinuedPlace(study, corpus, study.tokens, tmp_path, tmp_path, study.start.tokens, {START: corpus})
    words = {}
    arms = ("chosen-heads", "chosen-few", "chosen-window", "own-window")
    for seed in (1, 2):
        for job in make_jobs(place, [BASELINE, *arms], [seed], {BASELINE: 3e-3, "s2": 3e-3}):
            job.folder.mkdir(parents=True)
            words[job.label, seed] = command(job, corpus, False, text)
    yamls = set()
    for arm in arms:
        for seed in (1, 2):
            made = set()
            for label in (f"switched-{arm}", arm):
                own = words[label, seed]
                at = own.index("--")
                assert own[1:3] == ["-m", "studies.chosen"] and own[at + 1].endswith("pretrain_gpt_s2.py")
                options = dict(word[2:].split("=", 1) for word in own[3:at])
                assert options["data-path"] == str(text.data_prefix) and f"--data-path={corpus.data_prefix}" in own
                assert options["split"] == "36,4,12" and options["heads"] == str(study.arm(arm).chosen)
                assert f"--pretrained-checkpoint={options['load']}" in own and f"--s2-config={options['write']}" in own
                trains = yaml.safe_load(Path(options["s2-config"]).read_text())
                measured = yaml.safe_load(Path(options.get("beside", options["s2-config"])).read_text())
                assert ("beside" in options) == (arm == "chosen-window")
                assert trains == sparsity(study, WINDOW.name if "window" in arm else SHARDED)
                assert measured == sparsity(study, WINDOW.name if arm == "own-window" else SHARDED)
                made.add(options["write"])
            assert len(made) == 1 and Path(*made).stem == arm
            yamls |= made
    assert len(yamls) == 8 and not any(Path(file).exists() for file in yamls)
    assert words[BASELINE, 1][1].endswith("pretrain_gpt_s2.py")


@pytest.mark.parametrize("split, expected", [("90,10,0", "81,9,10"), ("5,2,0", "4,1,2"), ("100,0,3", "90,10,3")])
def test_heads_are_chosen_on_text_that_no_result_is_about(split, expected):
    assert choice_split(split) == expected


def test_runs_that_start_at_once_make_one_yaml(tmp_path, monkeypatch):
    made = []

    def choose(words, **options):
        made.append(words)
        time.sleep(0.5)
        (tmp_path / "new" / "chosen.yaml").write_text("layers: S")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(chosen.subprocess, "run", choose)
    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(lambda _: chosen.make_yaml(tmp_path / "new" / "chosen.yaml", ["--heads=3"]), range(4)))
    assert states == [0] * 4 and len(made) == 1
    assert made[0][1:4] == ["-m", "s2_megatron", "choose-dense"] and "--heads=3" in made[0]


def test_what_goes_wrong_in_the_choice_starts_no_training(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "train.py").write_text(f"open({str(ran)!r}, 'w')")
    words = ["-m", "studies.chosen", "--write", str(tmp_path / "new.yaml"), "--load", str(tmp_path / "none")]
    words += ["--s2-config", str(tmp_path / "none.yaml"), "--data-path", "none", "--", str(tmp_path / "train.py")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and not ran.exists()
    (tmp_path / "new.yaml").touch()
    assert subprocess.run([sys.executable, *words]).returncode == 0 and ran.exists()


def test_chosen_heads_need_a_dense_model(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["from-dense-tiny", "--from-scratch", "chosen-heads"])
    assert "--from-scratch chosen-heads: expected some of dense, hybrid, s2," in capsys.readouterr().err
