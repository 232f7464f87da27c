"""The queue of runs: several devices, a budget that cuts and a command that goes on, failures; what is kept of
them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from s2_megatron.config.load import SparsityConfig
from s2_megatron.megatron.records.loss_log import read_loss_log
from studies.corpus import Corpus
from studies.launch import ROOT, Job, command
from studies.results import Place, thinned, training_seconds
from studies.run import choose_rates, has_result, parse_arguments, train
from studies.studies import STUDIES, equal_window, pairs, sparsity
from studies.workers import CUT, FAILED, FINISHED, Budget, run_jobs

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
arguments = {"lr": float(sys.argv[4]), "seed": 1, "data_path": ["/secret/text"], "s2_config": "/secret/x.yaml",
             "save": "/secret"}
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
    return lambda job: [sys.executable, "-c", TRAINER, str(job.folder), str(steps or job.iterations), str(seconds),
                        f"{job.rate:g}"]  # fmt: skip


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


def test_a_failure_is_shown_and_the_second_starts_no_other_run(tmp_path):
    jobs, said = [make_job(tmp_path, seed=seed) for seed in (1, 2, 3)], []
    outcomes = run_jobs(jobs, [None], trainer(steps=-1), Budget(), ends_well, said.append)
    assert outcomes == {job.name: FAILED for job in jobs[:2]}
    assert "error: a refusal" in "\n".join(said) and "status 2" in said[-1]


def test_one_failure_ends_what_goes_on_from_it_and_nothing_else(tmp_path):
    first, other = (make_job(tmp_path, seed=seed) for seed in (1, 2))
    after = replace(make_job(tmp_path, seed=3), start=first)
    last = replace(make_job(tmp_path, seed=4), start=after)

    def command(job):
        return trainer(steps=-1 if job == first else None)(job)

    outcomes = run_jobs([first, after, last, other], [None], command, Budget(), ends_well, quiet)
    assert outcomes == {first.name: FAILED, other.name: FINISHED}


def test_what_follows_a_run_may_fail_or_be_cut(tmp_path):
    jobs = [make_job(tmp_path, seed=seed) for seed in (1, 2, 3)]
    failed = {job.name: FAILED for job in jobs[:2]}
    assert run_jobs(jobs, [None], trainer(), Budget(), lambda job, device: FAILED, quiet) == failed
    # Of runs that had ended before, too.
    assert run_jobs(jobs, [None], trainer(), Budget(), lambda job, device: FAILED, quiet) == failed
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


def test_what_is_kept_are_means_and_no_paths(tmp_path, monkeypatch):
    job = make_job(tmp_path, steps=31)
    run_jobs([job], [None], trainer(), Budget(), ends_well, quiet)
    monkeypatch.setattr("studies.results.MOST_RECORDS", 8)
    run = thinned(job, CORPUS, {"device": "CPU"})
    assert run.about["settings"]["data_path"] == ["corpus/abababababab"]
    assert run.about["settings"]["s2_config"] == "s2.yaml" and "secret" not in json.dumps(run.about)
    assert run.train["step"].tolist() == [3, 7, 11, 15, 19, 23, 27, 31]
    assert run.train["loss"][1] == pytest.approx(5 - (4 + 5 + 6 + 7) / 4 / 31, abs=1e-5)
    assert run.train["loss"][0] == pytest.approx(5 - (1 + 2 + 3) / 3 / 31, abs=1e-5)
    assert run.last_loss == 4.25 and (np.diff(run.train["seconds"]) > 0).all()
    job.shared.touch()  # it was beside another run
    assert "seconds" not in thinned(job, CORPUS, {"device": "CPU"}).train


def test_a_run_that_began_beside_another_has_no_times_of_its_own(tmp_path, monkeypatch):
    """Also where the command that finishes it has the GPU for it alone."""
    pace = {"seconds": 0.0}
    monkeypatch.setattr("studies.run.command", lambda job, *_: trainer(**pace)(job))
    monkeypatch.setattr("studies.run.measure_text", lambda *arguments: FINISHED)
    place = Place(TINY, CORPUS, 31 * TINY.step_tokens, tmp_path / "runs", tmp_path / "results")

    def study(*more):
        parsed = parse_arguments(["lm-tiny", "--arms", "s2", *more])
        budget = Budget(1.0, save_seconds=0.0, start_seconds=0.0, began=0.0)
        return train(place, parsed, {"s2": 0.1}, [(None, "CPU")], budget, quiet)

    # The budget is spent once both runs have begun, whatever else the machine does.
    both = [place.job("s2", seed, 0.1).losses for seed in (2, 3)]
    spent = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 2.0 * all(path.exists() for path in both))
    endless = SimpleNamespace(sleep=time.sleep, monotonic=lambda: 0.0)
    monkeypatch.setattr("studies.workers.time", endless)
    study("--seeds", "1")
    pace["seconds"] = 1.0
    with monkeypatch.context() as patch:
        patch.setattr("studies.workers.time", spent)
        assert set(study("--seeds", "2", "3", "--runs-per-gpu", "2").values()) == {CUT}
    pace["seconds"] = 0.0
    assert set(study("--seeds", "2", "3").values()) == {FINISHED}
    assert [(run.seed, "seconds" in run.train) for run in place.kept] == [(1, True), (2, False), (3, False)]
    with pytest.raises(
        ValueError, match=r"lm-tiny.npz has s2, seed 1, trained with the learning rate 0\.1; expected 0\.2"
    ):
        has_result(place, place.job("s2", 1, 0.2), losses_only=True)


def test_rates_are_chosen_when_all_were_tried(tmp_path, monkeypatch):
    """From the short runs that are kept; runs that end together are all kept."""
    monkeypatch.setattr("studies.run.command", lambda job, *_: trainer()(job))
    place = Place(TINY, CORPUS, 31 * TINY.step_tokens, tmp_path / "runs", tmp_path / "results")
    said = []

    def choose(*more, seconds=None):
        parsed = parse_arguments(["lm-tiny", "--arms", "dense", "s2", *more])
        budget = Budget(seconds, save_seconds=0.0, start_seconds=0.0)
        return choose_rates(place, parsed, [(None, "CPU")] * 4, budget, said.append)

    assert choose(seconds=1e-6) == ({}, False) and place.kept == []
    assert choose() == ({"dense": 2e-3, "s2": 2e-3}, False)  # all end at one loss: the first of the rates
    assert [(run.arm, run.about["role"]) for run in place.kept] == [
        ("dense", "rate-0.002"), ("s2", "rate-0.002"), ("dense", "rate-0.004"), ("s2", "rate-0.004")]  # fmt: skip
    assert "learning rate of s2: 0.002 (validation losses 0.002: 4.2500, 0.004: 4.2500)" in said
    told = len(said)
    assert choose(seconds=1e-6)[0] == {"dense": 2e-3, "s2": 2e-3} and len(said) == told + 2  # nothing is trained again
    assert choose("--rate-tokens", "30e3", seconds=1e-6)[0] == {}  # shorter runs are another choice


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
