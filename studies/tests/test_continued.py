"""Studies that go on from a dense model: which runs there are, what they read and wait for, what is reported."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from s2_megatron.tools.dataset.write import write_dataset
from studies import continued
from studies.continuations import ALL, CONTINUATIONS, token_flops
from studies.continued import make_jobs
from studies.corpus import Corpus
from studies.data import Run, read_study
from studies.launch import Job, chosen_yaml, command
from studies.parts import split_corpus
from studies.results import add_run, start_of, write_json, write_study
from studies.run import AGAIN, COMPLETE, parse_arguments, run
from studies.studies import density
from studies.workers import CUT, FINISHED, Budget

TINY = CONTINUATIONS["from-dense-tiny"]
LONGER = CONTINUATIONS["extend32k"]
DOCUMENTS, WIDTH = 60, 1000
STEPS = 60

# Stands in for pretrain_gpt_s2.py: the dense curve, and above it what the switch costs, which fades.
TRAINER = """
import json, os, sys
folder, arm, start, steps, tokens, evaluated, flops, rate = sys.argv[1:]
steps, tokens, flops = int(steps), int(tokens), float(flops)
if start:
    done = json.loads(open(f"{start}/losses.jsonl").read().splitlines()[-1])
    assert os.path.exists(f"{start}/checkpoints/weights") and "validation" in done, "started before its weights"
extra = 0.5 if arm == "s2" and start else 0.0
log = open(f"{folder}/losses.jsonl", "a")
def write(**record):
    log.write(json.dumps(record) + "\\n"); log.flush()
def evaluation(step, loss):
    write(**{"iteration": step, "validation": f"iteration {step} on validation set", "lm loss": loss,
             "lm loss by position/0-127": loss, "lm loss by position/128-255": loss + extra,
             "lm loss by position/trailing": loss + 2 * extra})
arguments = {"global_batch_size": 4, "seq_length": tokens // 4, "lr": float(rate), "seed": 1, "train_iters": steps,
             "pretrained_checkpoint": start or None, "finetune": bool(start), "data_path": ["/secret"]}
write(run={"arguments": arguments, "flops_per_token": {"attended": flops, "dense": 2.0}}, iteration=1, time=0.0)
base = 4.0 if start else 5.0
if evaluated == "1":
    evaluation(0, base + extra)
    sys.exit(0)
for step in range(1, steps + 1):
    loss = base - step / steps + extra * 0.8 ** step
    write(**{"iteration": step, "lm loss": loss, "grad_norm": 1.0, "learning_rate": 0.1, "samples": 4 * step,
             "time": float(step)})
os.makedirs(f"{folder}/checkpoints", exist_ok=True)
open(f"{folder}/checkpoints/weights", "w").write("x")
evaluation(steps, base - 1)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of WIDTH tokens, each of its own number alone."""
    folder = tmp_path_factory.mktemp("corpus")
    write_dataset(folder / "text", (np.full(WIDTH, number, np.uint16) for number in range(DOCUMENTS)))
    description = {"sha256": "ab" * 32, "vocabulary": 512, "tokens": DOCUMENTS * WIDTH, "split": "90,10,0"}
    return Corpus(folder, description)


def started(said: list[str]) -> list[str]:
    """The labels of the runs, in their order."""
    return [re.match(r"started (\S+),", line)[1] for line in said if line.startswith("started")]


def checkpoints_left(tmp_path: Path) -> list[str]:
    """The folders of runs that have some, without dense runs that others begin with."""
    found = sorted(path.parent for path in (tmp_path / "runs").rglob("checkpoints"))
    return [folder.name for folder in found if folder.parent.parent.name != "starts"]


@pytest.fixture
def study(tmp_path, corpus, monkeypatch):
    """run(more arguments) -> (status, what it said): the study with two devices and the trainer above."""
    monkeypatch.setattr(continued, "prepare_corpus", lambda runs, settings, tell: corpus)
    monkeypatch.setattr(continued, "devices", lambda: [("0", "two"), ("1", "of them")])
    monkeypatch.setattr("studies.workers.checkpoint_iteration", lambda folder: 0)

    def trainer(job: Job, part: Corpus, on_gpu: bool, choice: Corpus) -> list[str]:
        start = "" if job.start is None else str(job.start.folder)
        if job.study.arm(job.arm).chosen:
            chosen_yaml(job).parent.mkdir(exist_ok=True)
            chosen_yaml(job).write_text(f"# {job.arm}, {job.seed}")
            chosen_yaml(job).with_suffix(".json").write_text(f'["{job.arm}"]')
        flops = token_flops(job.study, job.arm, 512)
        return [sys.executable, "-c", TRAINER, str(job.folder), job.arm, start, str(job.iterations),
                str(job.study.step_tokens), str(int(job.evaluated)), str(flops),
                f"{job.rate:g}"]  # fmt: skip

    monkeypatch.setattr("studies.run.command", trainer)

    def measure(job: Job, corpus: Corpus, device: str | None, budget: Budget, tell) -> str:
        assert (job.checkpoints / "weights").exists() or all(job.test_file(test).exists() for test in TINY.text_tests)
        for test in TINY.text_tests:
            write_json(job.test_file(test), {"of": test})
        return FINISHED

    monkeypatch.setattr(continued, "measure_text", measure)

    def run_study(*more: str, rate: str = "4e-3", name: str = TINY.name):
        said = []
        size = ["--tokens", str(STEPS * TINY.step_tokens), "--start-tokens", str(STEPS * TINY.step_tokens)]
        folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
        given = [name, "--arms", "dense", "s2", "--rate", rate, *size, *folders, *more]
        return run(parse_arguments(given), said.append), said

    return run_study


def kept(tmp_path, name: str = TINY.name) -> dict[str, Run]:
    """{label: run} of a study's seed 1."""
    runs = read_study(name, tmp_path / "results")
    return {f"{run.about['role']}-{run.arm}".removeprefix("-"): run for run in runs}


def forget(tmp_path, *labels: str) -> list[Run]:
    """Take these runs out of the results, as another folder of results would be without them."""
    runs = kept(tmp_path)
    write_study(tmp_path / "results", TINY.name, [run for label, run in runs.items() if label not in labels])
    return [runs[label] for label in labels]


def test_a_study_from_the_dense_run_to_its_results(study, tmp_path):
    status, said = study()
    assert status == COMPLETE, "\n".join(said)
    # 20 of the 54 documents to train on are left to it.
    assert "note: 0.06144M tokens are 3.1 times the text that the dense model does not read" in said
    found = kept(tmp_path)
    assert sorted(found) == ["dense", "s2", "scratch-s2", "start-dense", "switched-dense", "switched-s2"]
    assert {label for label, run in found.items() if "tests" in run.about} == {"dense", "s2"}
    settings = found["s2"].about["settings"]
    assert settings["pretrained_checkpoint"] == "start-dense" and "finetune" not in settings
    assert "secret" not in json.dumps([run.about for run in found.values()])
    # What waits for nothing runs beside the dense model.
    assert started(said)[:2] == ["start-dense", "scratch-s2"] and len(started(said)) == 6
    assert checkpoints_left(tmp_path) == [], "all but the dense model's go"
    switched = found["switched-s2"]
    assert switched.train == {} and switched.last_loss == 4.5 and switched.validation["loss_trailing"].tolist() == [5.5]
    assert switched.by_position(128, 256) - switched.by_position(0, 128) == 0.5
    assert [found[label].last_loss for label in ("start-dense", "dense", "s2", "scratch-s2")] == [4.0, 3.0, 3.0, 4.0]
    (compared,) = (tmp_path / "runs").rglob("compare.html")
    assert (compared.parent / "logs").is_dir()
    status, said = study()
    assert status == COMPLETE and not [line for line in said if line.startswith(("started", "finished"))]
    with pytest.raises(ValueError, match=r"trained with the learning rate 0\.004; expected 0\.003"):
        study(rate="3e-3")


def test_runs_beside_each_other_have_no_times(study, tmp_path):
    status, said = study("--runs-per-gpu", "2")
    assert status == COMPLETE, "\n".join(said)
    assert not any("seconds" in run.train for run in kept(tmp_path).values())


def test_what_is_there_already_is_not_trained_again(study, tmp_path):
    status, said = study("--budget", "60")
    assert status == AGAIN and "0 of 6 runs are finished; the budget is spent; repeat the command to go on" in said
    status, _ = study("--arms", "dense", "--keep-checkpoints")
    assert status == COMPLETE
    assert checkpoints_left(tmp_path) == ["dense_0.00133333"]
    status, said = study()
    assert status == COMPLETE and sorted(started(said)) == ["s2", "scratch-s2", "switched-s2"]


def test_studies_share_a_dense_model(study, tmp_path, monkeypatch):
    """Another study of the same dense model, and one of other tokens, begin with the weights that are there."""
    assert study("--from-scratch")[0] == COMPLETE
    monkeypatch.setitem(ALL, "other-tiny", replace(TINY, name="other-tiny"))
    longer = ["--tokens", str((STEPS + 10) * TINY.step_tokens)]
    for more, name in ((["--losses-only"], "other-tiny"), (longer, TINY.name)):
        status, said = study("--from-scratch", *more, name=name)
        assert status == COMPLETE and sorted(started(said)) == ["dense", "s2", "switched-dense", "switched-s2"]
    runs = {name: read_study(name, tmp_path / "results") for name in (TINY.name, "other-tiny")}
    assert [len(each) for each in runs.values()] == [10, 5]
    assert len({start_of(run) for each in runs.values() for run in each if run.about["role"] == ""}) == 1
    assert not any("tests" in run.about for run in runs["other-tiny"]) and any(
        "tests" in run.about for run in runs[TINY.name]
    )


def test_a_dense_model_is_trained_by_one_command(study, tmp_path):
    assert study("--from-scratch")[0] == COMPLETE
    (folder,) = (tmp_path / "runs" / "starts").glob("*/*")
    with (folder / "lock").open("w") as file:  # as another command, which trains seed 2 there
        fcntl.flock(file, fcntl.LOCK_EX)
        assert study("--from-scratch", "--arms", "dense", "s2", "window")[0] == COMPLETE, "it is trained already"
        shutil.rmtree(folder / "checkpoints")
        (folder / "losses.jsonl").unlink()
        (tmp_path / "results" / f"{TINY.name}.npz").unlink()
        with pytest.raises(ValueError, match=r"seed1_0\.004: another command trains this dense model"):
            study("--from-scratch")


def test_arms_of_a_seed_begin_with_one_dense_run(study, tmp_path):
    """An arm more begins with the weights that are there; once these are gone it takes another seed, or all of it is
    trained again, but for what began with random weights."""
    assert study()[0] == COMPLETE
    status, said = study("--arms", "dense", "s2", "window")
    assert status == COMPLETE and sorted(started(said)) == ["switched-window", "window"]
    (weights,) = (tmp_path / "runs" / "starts").glob("*/*/checkpoints")
    shutil.rmtree(weights)
    with pytest.raises(
        ValueError, match=r"seed 1 has results of dense, s2, window that went on from other weights than those of "
    ):
        study("--arms", "dense", "s2", "window", "hybrid")
    assert (weights.parent / "losses.jsonl").exists(), "nothing is lost"
    assert not list(tmp_path.rglob("hybrid_*")) and "s2" in kept(tmp_path)
    *_, window = forget(tmp_path, *(f"{role}{arm}" for arm in ("dense", "s2", "window") for role in ("switched-", "")))
    status, said = study("--arms", "dense", "s2", "hybrid")
    assert status == COMPLETE and {"start-dense", "dense", "s2", "hybrid"} <= set(started(said))
    assert "scratch-s2" not in started(said)
    (aside,) = (line.rpartition(" ")[2] for line in said if "are gone: it is trained again" in line)
    assert (Path(aside) / "losses.jsonl").exists()
    assert len({start_of(kept(tmp_path)[arm]) for arm in ("dense", "s2")}) == 1
    # Of other weights than the others.
    window.about["settings"]["start_losses"] += "0"
    add_run(tmp_path / "results", TINY.name, window)
    with pytest.raises(ValueError, match=r"seed 1 has results of window that went on from other weights"):
        study("--arms", "dense", "s2", "one-offset")


def test_a_test_that_the_budget_cut_is_made_up_for(study, tmp_path, monkeypatch):
    """Nothing is trained again, even where the dense weights are gone by then."""
    measure = continued.measure_text
    monkeypatch.setattr(continued, "measure_text", lambda job, *rest: CUT if job.arm == "s2" else measure(job, *rest))
    status, said = study()
    assert status == AGAIN and said[-1].startswith("5 of 6 runs are finished")
    assert checkpoints_left(tmp_path) == ["s2_0.00133333"]
    (weights,) = (tmp_path / "runs" / "starts").glob("*/*/checkpoints")
    shutil.rmtree(weights)
    monkeypatch.setattr(continued, "measure_text", measure)
    monkeypatch.setattr("studies.run.checkpoint_iteration", lambda folder: STEPS)
    status, said = study()
    assert status == COMPLETE and not [line for line in said if line.startswith("started")]
    assert "copies" in kept(tmp_path)["s2"].about["tests"] and checkpoints_left(tmp_path) == []


def test_which_heads_were_chosen_is_kept(study, tmp_path):
    """While the folder of the runs may go."""
    assert study("--arms", "dense", "s2", "chosen-few", "--from-scratch")[0] == COMPLETE
    run = kept(tmp_path)["chosen-few"]
    assert run.about["choice"] == {"yaml": "# chosen-few, 1", "ranking": ["chosen-few"]}
    assert run.about["density"] == pytest.approx(density(TINY, "chosen-few"), abs=1e-5)


def test_runs_from_random_weights_can_be_left_out(study, tmp_path, capsys):
    assert study("--from-scratch")[0] == COMPLETE
    assert not [label for label in kept(tmp_path) if label.startswith("scratch")]
    assert [line.split()[0] for line in study("--from-scratch", "dense", "--stage", "estimate")[1][1:-1]] == [
        "start-dense", "switched-dense", "dense", "switched-s2", "s2", "scratch-dense"]  # fmt: skip
    for words, said in (
        (["lm8k", "--from-scratch"], "all runs of lm8k begin with random weights"),
        (["from-dense8k", "--arms", "dense", "s2", "--from-scratch", "window"], "expected some of dense, s2"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments(words)
        assert said in capsys.readouterr().err


def test_an_arm_alone_has_nothing_to_be_laid_by(study):
    with pytest.raises(ValueError, match="--arms s2: expected dense among them, the arm to compare with"):
        study("--arms", "s2")


def test_an_estimate_has_every_run(study):
    status, said = study("--stage", "estimate", "--seeds", "1", "2")
    assert status == COMPLETE
    labels = [line.split()[0] for line in said[1:-1]]
    assert labels == ["start-dense", "switched-dense", "dense", "switched-s2", "s2", "scratch-s2"]
    assert said[-1].startswith("12 runs: ")


def test_parts_share_the_validation_documents_alone(corpus):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    parts = split_corpus(corpus, 2 / 3)
    read = {}
    for name, part in parts.items():
        data = IndexedDataset(str(part.data_prefix))
        numbers = [int(data[at][0]) for at in range(len(data))]
        training = int(part.split.split(",")[0])
        read[name] = (numbers[:training], numbers[training:])
        assert part.description["tokens"] == len(numbers) * WIDTH and part.sha256 == corpus.sha256
    assert read["first"][0] == [*range(36)] and read["more"][0] == [*range(36, 54)]
    assert read["all"][0] == [*range(54)]
    assert all(validation == [*range(54, 60)] for _, validation in read.values())
    with pytest.raises(ValueError, match="54 training documents: none is left for the part 'more'"):
        split_corpus(corpus, 1.0)


@pytest.fixture
def flags(tmp_path, corpus):
    """{label: flags of a job of extend32k}."""
    corpora = {continued.START: corpus}
    place = continued.ContinuedPlace(LONGER, corpus, LONGER.tokens, tmp_path, tmp_path, LONGER.start.tokens, corpora)
    found = {}
    for job in make_jobs(place, ["dense", "s2"], [1], {"dense": 3e-3}):
        job.folder.mkdir(parents=True)
        found[job.label] = command(job, corpus, on_gpu=False)
    return found


def test_longer_context_scales_rope_after_the_switch_alone(flags):
    assert sorted(flags) == ["dense", "s2", "start-dense", "switched-dense", "switched-s2"]
    scaling = {"--use-rope-scaling", "--rope-scaling-factor=8"}
    for label, own in flags.items():
        begins = label == "start-dense"
        assert (scaling & set(own) == set()) == begins
        assert (f"--seq-length={8192 if begins else 32768}" in own) and ("--skip-train" in own) == ("switched" in label)
        assert any(flag.startswith("--save=") for flag in own) == ("switched" not in label)
    (weights,) = {flag for own in flags.values() for flag in own if flag.startswith("--pretrained-checkpoint=")}
    (saved,) = [flag for flag in flags["start-dense"] if flag.startswith("--save=")]
    assert weights.partition("=")[2] == saved.partition("=")[2]
    assert "--lr=0.001" in flags["s2"] and "--lr=0.003" in flags["start-dense"]


def test_arms_that_go_on_differ_in_their_sparsity_alone(flags):
    def without_paths(label):
        return [flag.replace(f"/{label}_", "/") for flag in flags[label] if "--s2-config" not in flag]

    assert without_paths("s2") == without_paths("dense")
