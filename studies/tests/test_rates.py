"""The learning rates that short runs choose, and what a page says of them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from studies import scales
from studies.corpus import Corpus
from studies.rates_page import given_rate, rates_table
from studies.results import RATE_SEED, Place, header, timed_result, write_json
from studies.run import choose_rates, compare_runs, parse_arguments
from studies.targets import read_planned
from studies.workers import Budget
from studies.tests.rules_logs import TINY, write_rules_log

STUDY = replace(TINY, baseline="dense", own_rates=True)
CORPUS = Corpus(
    folder=Path("corpus"), description={"sha256": "ab" * 32, "tokens": 10**6, "split": "98,2,0", "vocabulary": 512}
)
LOSSES = {("dense", 2e-3): 4.0, ("dense", 4e-3): 4.1, ("s2", 2e-3): 4.3, ("s2", 4e-3): 4.2}


def make_place(folder):
    return Place(STUDY, CORPUS, 100 * 1024, folder / "runs", folder / "results")


def choose(folder, monkeypatch, *more):
    """(the chosen rates, what was said), of short runs that are made up."""

    def run_jobs(jobs, devices, command, budget, finished, tell):
        for job in jobs:
            if not job.losses.exists():  # as a run that ended under an earlier command, before its rate was kept
                job.folder.mkdir(parents=True, exist_ok=True)
                command(job)
            write_rules_log(job.losses, job.arm, job.seed, LOSSES[job.arm, job.rate])
        return {job.name: finished(job, None) for job in jobs}

    monkeypatch.setattr("studies.run.run_jobs", run_jobs)
    monkeypatch.setattr("studies.run.final_evaluation", lambda job: {"lm loss": LOSSES[job.arm, job.rate]})
    said = []
    parsed = parse_arguments(["rules-tiny", "--arms", "dense", "s2", *more])
    rates, failed = choose_rates(make_place(folder), parsed, [(None, "CPU")], Budget(), said.append)
    assert not failed
    return rates, said


def test_each_arm_takes_its_best_rate_and_all_are_shown(tmp_path, monkeypatch):
    rates, said = choose(tmp_path, monkeypatch)
    assert rates == {"dense": 2e-3, "s2": 4e-3}
    assert "learning rate of s2: 0.004 (validation losses 0.002: 4.3000, 0.004: 4.2000)" in said
    text = "\n".join(rates_table(STUDY, tmp_path / "results"))
    assert "| **4.0000** | 4.1000 |" in text and "| 4.3000 | **4.2000** |" in text


def test_short_runs_alone_on_their_gpus_give_the_times_of_others(tmp_path, monkeypatch):
    choose(tmp_path, monkeypatch, "--runs-per-gpu", "2")
    folder = tmp_path / "results" / STUDY.name
    assert [path.name for path in folder.iterdir()] == ["learning_rates.json"]
    (folder / "learning_rates.json").unlink()
    choose(tmp_path, monkeypatch)  # finds runs that shared a GPU
    assert [path.name for path in folder.iterdir()] == ["learning_rates.json"]
    (folder / "learning_rates.json").unlink()
    shutil.rmtree(tmp_path / "runs")
    choose(tmp_path, monkeypatch)
    kept = folder / "rates-0.02048M-abababab" / f"s2_seed{RATE_SEED}.jsonl"
    assert timed_result(folder, "s2", header(kept)["machine"]) == kept
    assert kept.with_name(f"dense_seed{RATE_SEED}.jsonl").exists()
    assert scales.read_scales(STUDY, tmp_path / "results") == []  # no results of their own


def test_an_arm_without_a_run_of_the_baseline_is_not_compared(tmp_path, monkeypatch):
    place = make_place(tmp_path)
    for arm, seed in (("dense", 1), ("s2", 1), ("hybrid", 2)):
        write_rules_log(place.result(arm, seed), arm, seed, 4.0)
    commands = []
    monkeypatch.setattr("studies.run.subprocess.run", lambda command, **more: commands.append(command))
    compare_runs(place, ["dense", "s2", "hybrid"], print)
    logs = [word.partition("=")[0] for word in commands[0] if word.endswith(".jsonl")]
    assert logs == ["dense", "s2"]


def test_a_rate_that_was_not_chosen_is_named(tmp_path):
    place = make_place(tmp_path)
    for arm in ("dense", "s2"):
        write_rules_log(place.result(arm, 1), arm, 1, 4.0)
    folder = place.result("dense", 1).parent
    scale = scales.read_scale(STUDY, folder)
    assert given_rate(scale) == " One learning rate for all, 0.004; none was chosen."
    losses = {arm: {"0.002": 4.0, "0.004": 4.1} for arm in ("dense", "s2")}
    write_json(folder.parent / "learning_rates.json", {"tokens": 1, "arms": losses})
    assert given_rate(scale) == " One learning rate for all, 0.004, given with `--rate`."
    write_json(
        folder.parent / "learning_rates.json",
        {"tokens": 1, "arms": {arm: {"0.002": 4.0, "0.004": 3.9} for arm in losses}},
    )
    assert given_rate(scale) == ""
    one_for_all = replace(scale, study=replace(STUDY, own_rates=False))
    write_json(folder.parent / "learning_rates.json", {"tokens": 1, "arms": {"dense": {"0.002": 4.0, "0.004": 3.9}}})
    assert given_rate(one_for_all) == ""


def test_a_short_run_is_no_dense_run_of_another_length(tmp_path):
    place = make_place(tmp_path)
    folder = place.result("dense", 1).parent
    write_rules_log(place.result("dense", 1), "dense", 1, 4.0)
    write_rules_log(folder.with_name(f"rates-{folder.name}") / "dense_seed1.jsonl", "dense", 1, 5.0)
    assert read_planned(folder, "dense") == []
    write_rules_log(folder.with_name(f"more-{folder.name}") / "dense_seed1.jsonl", "dense", 1, 3.0)
    assert [each.validation for each in read_planned(folder, "dense")] == [3.0]
