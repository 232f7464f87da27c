"""The queue of runs: several devices, a budget that cuts and a command that goes on, failures; what is kept of
them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from studies.corpus import Corpus
from studies.launch import ROOT, Job, command
from studies.results import LearningRates, Place, thinned, timed_result, training_seconds, write_run
from studies.run import parse_arguments, remove_stale_tests, train
from studies.studies import STUDIES, equal_window, pairs, sparsity
from studies.workers import CUT, FAILED, FINISHED, Budget, final_evaluation, run_jobs
from s2_megatron.config.load import SparsityConfig
from s2_megatron.megatron.loss_log import HEADER, read_loss_log, read_records

TINY, FULL = STUDIES["lm-tiny"], STUDIES["lm8k"]
CORPUS = Corpus(None, {"sha256": "ab" * 32, "vocabulary": 512, "tokens": 10**6, "split": "98,2,0"})

# Stands in for a training process: goes on from its checkpoint, saves one on SIGTERM.
TRAINER = """
import json, os, signal, sys, time
folder, steps, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
tracker = f"{folder}/checkpoints/latest_checkpointed_iteration.txt"
start = int(open(tracker).read()) if os.path.exists(tracker) else 0
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
log = open(f"{folder}/losses.jsonl", "a")
def write(record):
    log.write(json.dumps(record) + "\\n"); log.flush()
arguments = {"lr": 0.1, "seed": 1, "data_path": ["/secret/text"], "s2_config": "/secret/x.yaml", "save": "/secret"}
write({"run": {"arguments": arguments, "flops_per_token": {"attended": 1.0, "dense": 2.0}}, "iteration": start + 1,
       "time": 0.0})
for step in range(start + 1, steps + 1):
    time.sleep(seconds)
    write({"iteration": step, "lm loss": 5 - step / steps, "grad_norm": 1.0, "learning_rate": 0.1, "samples": 4 * step,
           "time": time.time(), "device": os.environ.get("CUDA_VISIBLE_DEVICES")})
    if told:
        os.makedirs(f"{folder}/checkpoints")
        open(tracker, "w").write(str(step))
        sys.exit(0)
if steps < 0:
    print("error: a refusal"); sys.exit(2)
write({"iteration": steps, "validation": f"iteration {steps} on validation set", "lm loss": 4.25})
"""


@pytest.fixture(autouse=True)
def checkpoints_are_trackers(monkeypatch):
    """The trainer writes no tensors."""

    def iteration(folder):
        tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    monkeypatch.setattr("studies.workers.checkpoint_iteration", iteration)


def make_job(folder, arm="s2", seed=1, steps=30):
    return Job(TINY, arm, seed, 0.1, steps * TINY.step_tokens, folder / f"{arm}_{seed}")


def trainer(seconds=0.0, steps=None):
    return lambda job: [sys.executable, "-c", TRAINER, str(job.folder), str(steps or job.iterations), str(seconds)]


def quiet(*arguments):
    pass


def ends_well(job, device):
    return FINISHED


def into(finished):
    """A callback that collects the jobs."""

    def on_finished(job, device):
        finished.append(job)
        return FINISHED

    return on_finished


def test_devices_work_at_once_and_every_job_runs_once(tmp_path):
    jobs, finished = [make_job(tmp_path, seed=seed) for seed in range(3)], []
    outcomes = run_jobs(jobs, ["4", "7"], trainer(), Budget(), into(finished), quiet)
    assert outcomes == {job.name: FINISHED for job in jobs} and sorted(job.seed for job in finished) == [0, 1, 2]
    used = [read_loss_log(job.losses)[0][1]["device"] for job in jobs]
    assert set(used) == {"4", "7"} and set(used[:2]) == {"4", "7"}
    before = [job.losses.read_text() for job in jobs]
    again = []
    assert run_jobs(jobs, ["4"], trainer(), Budget(), into(again), quiet) == outcomes
    assert [job.losses.read_text() for job in jobs] == before and again == jobs


def test_a_run_that_the_budget_cuts_goes_on(tmp_path, monkeypatch):
    """Not before the budget is spent: by a clock of ten steps a second, whatever else the machine does."""
    jobs, said = [make_job(tmp_path, seed=1), make_job(tmp_path, seed=2, steps=60)], []
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: max(read_loss_log(jobs[1].losses)[0], default=0) / 10)
    with monkeypatch.context() as patch:
        patch.setattr("studies.workers.time", clock)
        budget = Budget(10.0, save_seconds=9.75, start_seconds=0.0, began=0.0)  # 0.25 s until the run is told
        assert run_jobs(jobs[1:], [None], trainer(0.5), budget, ends_well, said.append) == {jobs[1].name: CUT}
    cut = max(read_loss_log(jobs[1].losses)[0])
    assert 3 <= cut < 60 and any(f"goes on from step {cut}" in line for line in said)
    finished = []
    run_jobs(jobs, [None], trainer(), Budget(), into(finished), quiet)
    assert [job.seed for job in finished] == [2, 1]  # the cut one first
    assert sorted(read_loss_log(jobs[1].losses)[0]) == list(range(1, 61))


def test_a_spent_budget_starts_nothing(tmp_path):
    assert run_jobs([make_job(tmp_path)], [None], trainer(), Budget(50.0), ends_well, quiet) == {}
    assert not list(tmp_path.iterdir())


def test_a_failure_is_shown_and_starts_no_other_run(tmp_path):
    jobs, said = [make_job(tmp_path, seed=seed) for seed in (1, 2)], []
    outcomes = run_jobs(jobs, [None], trainer(steps=-1), Budget(), ends_well, said.append)
    assert outcomes == {jobs[0].name: FAILED}
    assert "error: a refusal" in "\n".join(said) and "status 2" in said[-1]


def test_what_follows_a_run_may_fail_or_be_cut(tmp_path):
    jobs = [make_job(tmp_path, seed=seed) for seed in (1, 2)]
    assert run_jobs(jobs, [None], trainer(), Budget(), lambda job, device: FAILED, quiet) == {jobs[0].name: FAILED}
    # Of a run that had ended before, too.
    assert run_jobs(jobs, [None], trainer(), Budget(), lambda job, device: FAILED, quiet) == {jobs[0].name: FAILED}
    outcomes = run_jobs(jobs, [None], trainer(), Budget(), lambda job, device: CUT, quiet)
    assert outcomes == {job.name: CUT for job in jobs}


def test_what_follows_a_run_holds_up_its_device_alone(tmp_path):
    jobs, held = [make_job(tmp_path, seed=seed) for seed in range(4)], []

    def on_finished(job, device):
        deadline = time.monotonic() + 600
        while job is jobs[0] and not jobs[3].losses.exists():
            if time.monotonic() > deadline:
                return FAILED
            time.sleep(0.05)
        held.append(job)
        return FINISHED

    assert set(run_jobs(jobs, ["4", "7"], trainer(), Budget(), on_finished, quiet).values()) == {FINISHED}
    assert [read_loss_log(job.losses)[0][1]["device"] for job in jobs] == ["4", "7", "7", "7"]
    assert len(held) == 4


def test_an_error_behind_a_run_ends_no_other_run(tmp_path):
    jobs, said = [make_job(tmp_path, seed=seed) for seed in (1, 2)], []

    def on_finished(job, device):
        if job is jobs[0]:
            raise OSError("the disk is full")
        return FINISHED

    outcomes = run_jobs(jobs, ["4", "7"], trainer(), Budget(), on_finished, said.append)
    assert outcomes == {jobs[0].name: FAILED, jobs[1].name: FINISHED}
    assert any("what follows the run failed: OSError: the disk is full" in line for line in said)


def test_a_run_saves_when_the_command_is_killed(tmp_path):
    script = (
        "from pathlib import Path\nfrom studies.tests.test_workers import *\n"
        f"job = make_job(Path({str(tmp_path)!r}), steps=2000)\n"
        "run_jobs([job], [None], trainer(0.5), Budget(), ends_well, quiet)\n"
    )
    job, deadline = make_job(tmp_path), time.monotonic() + 600
    tracker = job.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    running = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        while not (job.losses.exists() and read_loss_log(job.losses)[0]) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        running.kill()
        running.wait()
    while not tracker.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert tracker.exists()


def test_seconds_are_those_of_training_steps():
    # An evaluation after the third step, a cut after the fourth.
    assert training_seconds([100, 101, 102, 109, 500, 501]).tolist() == [1, 2, 3, 4, 5, 6]
    assert training_seconds([5.0]).tolist() == [0.0]


def test_a_thinned_log_keeps_means_and_no_paths(tmp_path, monkeypatch):
    job = make_job(tmp_path, steps=31)
    run_jobs([job], [None], trainer(), Budget(), ends_well, quiet)
    monkeypatch.setattr("studies.results.MOST_RECORDS", 8)
    records = thinned(job, CORPUS, {"device": "CPU"})
    arguments = records[0][HEADER]["arguments"]
    assert arguments["data_path"] == ["corpus/abababababab"] and arguments["s2_config"] == "s2.yaml"
    assert "secret" not in json.dumps(records)
    steps = [record["iteration"] for record in records[1:-1]]
    assert steps == [3, 7, 11, 15, 19, 23, 27, 31]
    assert records[2]["lm loss"] == pytest.approx(5 - (4 + 5 + 6 + 7) / 4 / 31, abs=1e-5)
    assert records[1]["lm loss"] == pytest.approx(5 - (1 + 2 + 3) / 3 / 31, abs=1e-5)
    assert records[-1]["lm loss"] == 4.25


def test_a_run_beside_others_takes_the_times_of_one_that_was_alone(tmp_path, monkeypatch):
    alone, shared = (make_job(tmp_path / str(seed), steps=31) for seed in (1, 2))
    run_jobs([alone, shared], [None], trainer(), Budget(), ends_well, quiet)
    monkeypatch.setattr("studies.results.training_seconds", lambda times: 0.25 * np.arange(1, 32))
    folder = tmp_path / "100M"
    cpu = {"device": "CPU", "torch": "2.11.0"}
    write_run(folder / "s2_seed1.jsonl", alone, CORPUS, cpu)
    timed = timed_result(tmp_path, "s2", cpu)
    assert timed == folder / "s2_seed1.jsonl"
    assert timed_result(tmp_path, "dense", cpu) is None
    for other in (cpu | {"device": "GPU"}, cpu | {"torch": "2.12.0"}):
        assert timed_result(tmp_path, "s2", other) is None
    monkeypatch.undo()
    write_run(folder / "s2_seed2.jsonl", shared, CORPUS, cpu, timed)
    log, other = read_records(folder / "s2_seed2.jsonl"), read_records(timed)
    assert log[0][HEADER]["times_of"] == "100M/s2_seed1" and "times_of" not in other[0][HEADER]
    assert log[-2]["time"] == pytest.approx(31 * 0.25) and log[-2]["iteration"] == 31
    # Times that were taken from another run are no measure for a third.
    timed.unlink()
    assert timed_result(tmp_path, "s2", cpu) is None
    # Nor has a run beside others times of its own.
    shared.shared.touch()
    write_run(timed, shared, CORPUS, cpu)
    records = read_records(timed)
    assert records[0][HEADER]["untimed"] is True and not any("time" in record for record in records)
    assert [record["iteration"] for record in records] == [record["iteration"] for record in log]
    assert timed_result(tmp_path, "s2", cpu) is None


def test_a_run_that_began_beside_another_has_no_times_of_its_own(tmp_path, monkeypatch):
    """Also where the command that finishes it has the GPU for it alone."""
    pace = {"seconds": 0.0}
    monkeypatch.setattr("studies.run.command", lambda job, *_: trainer(**pace)(job))
    monkeypatch.setattr("studies.run.measure_text", lambda *arguments: FINISHED)
    place = Place(TINY, CORPUS, 31 * TINY.step_tokens, tmp_path / "runs", tmp_path / "results")

    def study(*more, seconds=None):
        parsed = parse_arguments(["lm-tiny", "--arms", "s2", *more])
        budget = Budget(seconds, save_seconds=0.0, start_seconds=0.0)
        return train(place, parsed, {"s2": 0.1}, [(None, "CPU")], budget, quiet)

    study("--seeds", "1")
    pace["seconds"] = 1.0  # never ends within the budget
    assert set(study("--seeds", "2", "3", "--runs-per-gpu", "2", seconds=0.5).values()) == {CUT}
    pace["seconds"] = 0.0
    assert set(study("--seeds", "2", "3").values()) == {FINISHED}
    records = [read_records(place.result("s2", seed))[0][HEADER] for seed in (1, 2, 3)]
    assert [record.get("times_of") for record in records] == [None, *[f"{place.scale}/s2_seed1"] * 2]
    place.result("s2", 1).unlink()
    with pytest.raises(ValueError, match="how long a step of s2 takes on a CPU alone"):
        study("--seeds", "4", "--runs-per-gpu", "2")


def test_rates_that_are_tried_at_once_are_all_kept(tmp_path):
    rates = LearningRates(tmp_path / "rates.json", 1000, 7, "ab" * 32)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda rate: rates.add("s2", rate, 5.0), range(1, 200)))
    again = LearningRates(tmp_path / "rates.json", 1000, 7, "ab" * 32)
    assert len(again.content["arms"]["s2"]) == 199


def test_a_rate_is_chosen_when_all_were_tried(tmp_path):
    rates = LearningRates(tmp_path / "rates.json", 1000, 7, "ab" * 32)
    rates.add("s2", 1e-3, 5.0)
    assert rates.choice("s2", (1e-3, 2e-3)) is None
    rates.add("s2", 2e-3, 4.5)
    again = LearningRates(tmp_path / "rates.json", 2000, 7, "ab" * 32)
    assert again.choice("s2", (1e-3, 2e-3)) == 2e-3 and again.choice("dense", (1e-3,)) is None
    with pytest.raises(ValueError, match=r"rates.json holds short runs with .*1000.*, expected .*2000"):
        again.add("dense", 1e-3, 4.0)


# The arms


@pytest.mark.parametrize("study", [TINY, FULL], ids=lambda study: study.name)
def test_the_controls_attend_as_many_pairs(study):
    counts = {arm: pairs(study, sparsity(study, arm)) for arm in ("dense", "hybrid", "s2", "window")}
    assert counts["dense"] > counts["hybrid"] > counts["s2"]
    block = pairs(study, sparsity(study, "window") | {"specs": {"S": {"local_tokens": equal_window(study)
                  + study.block_size}}}) - counts["window"]  # fmt: skip
    assert abs(counts["window"] - counts["s2"]) <= block / 2
    one = SparsityConfig.from_data(sparsity(study, "one-offset")).resolve(**study.model.shape)
    assert {head.offset for layer in one.layers for head in layer.pattern.heads} == {0}
    hybrid = SparsityConfig.from_data(sparsity(study, "hybrid")).resolve(**study.model.shape)
    kinds = [layer.kind for layer in hybrid.layers]
    assert kinds == ["dense"] * 2 + ["s2"] * (study.model.num_layers - 2)


def test_arms_of_a_seed_differ_in_their_sparsity_alone(tmp_path):
    """Hence the same weights and the same data in the same order."""
    corpus = replace(CORPUS, folder=tmp_path / "corpus")
    commands = []
    for arm in TINY.arm_names:
        job = make_job(tmp_path, arm)
        job.folder.mkdir()
        commands.append([flag.replace(str(job.folder), "") for flag in command(job, corpus, on_gpu=False)])
    assert all([flag for flag in each if "--s2-config" not in flag] ==
               [flag for flag in commands[0] if "--s2-config" not in flag] for each in commands)  # fmt: skip
    assert len({flag for each in commands for flag in each if "--s2-config" in flag}) == len(TINY.arm_names)


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="19 steps of 65536 tokens; expected 20 steps or more; use 1310720"):
        FULL.iterations(19.5 * 65536)


def test_the_test_of_an_earlier_model_goes(tmp_path):
    place = Place(TINY, CORPUS, 20 * 1024, tmp_path / "runs", tmp_path / "results")
    jobs = [place.job("dense", seed, 0.1) for seed in (1, 2)]
    tests = [(place.recall(*of), place.copies(*of), place.needles(*of)) for of in (("dense", 1), ("dense", 2))]
    for path in (*tests[0], *tests[1]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    jobs[1].folder.mkdir(parents=True)
    end = {"validation": f"iteration {jobs[1].iterations} on validation set", "lm loss": 4.0, "iteration": 1}
    jobs[1].losses.write_text(json.dumps(end) + "\n")
    assert final_evaluation(jobs[1]) is not None
    remove_stale_tests(place, jobs)
    assert [[path.exists() for path in each] for each in tests] == [[False] * 3, [True] * 3]
