"""Repeats of one seed: how far apart equal runs end, and what a comparison takes from it."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from studies.launch import ROOT
from studies.repeats import gaps, read_repeats, run_offset, section
from s2_megatron.tools.compare.measure import compare
from s2_megatron.tools.compare.readers import read_run
from s2_megatron.tools.compare.settings import make_arms
from s2_megatron.tools.compare.statistics import GOING_ON, MIDDLE_RUNS

QUALITY = ROOT / "docs" / "quality"
REPEATS = QUALITY / "repeats" / "bfee4945"
TOKENS = 4 * 1024  # of a step


def write(folder, name: str, losses, **arguments) -> None:
    header = {"global_batch_size": 4, "seq_length": 1024, "seed": 1, "train_iters": len(losses), **arguments}
    run = {"arguments": header, "flops_per_token": {"attended": 1.0, "dense": 1.0}, "machine": {"device": "X"}}
    records = [{"run": run, "iteration": 1, "time": 0.0}]
    for step, loss in enumerate(losses, 1):
        records.append({"iteration": step, "lm loss": float(loss), "samples": 4 * step, "time": float(step)})
    records.append({"iteration": step, "validation": f"iteration {step} on validation set", "lm loss": float(loss)})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def compared(*words: str):
    runs = [read_run(word)[0] for word in words]
    return compare(make_arms(runs, (), [True] * len(runs)))


def test_the_spread_is_that_of_the_last_quarter_pooled_over_the_labels(tmp_path):
    falling = np.linspace(5, 3, 100)
    for repeat, offset in enumerate((-0.1, 0.0, 0.1)):  # a standard deviation of 0.1
        write(tmp_path, f"one_repeat{repeat}", falling + np.where(np.arange(100) < 75, 1.0 * repeat, offset))
    for repeat, offset in enumerate((-0.3, 0.0, 0.3)):
        write(tmp_path, f"other_repeat{repeat}", falling + offset)
    write(tmp_path, "alone_repeat0", falling)
    write(tmp_path, "s2_repeat0", falling + 9, pretrained_checkpoint="start-dense")
    found = run_offset(read_repeats(tmp_path))
    assert found.nats == pytest.approx(np.sqrt((2 * 0.1**2 + 2 * 0.3**2) / 4))
    # Chi-squared with four degrees of freedom: 0.4844 and 11.143.
    assert (found.low, found.high) == pytest.approx(
        (found.nats * np.sqrt(4 / 11.143), found.nats * np.sqrt(4 / 0.4844)), 1e-3
    )
    text = "\n".join(section(tmp_path))
    assert "`one`" in text and "`alone`" not in text and "`s2`" not in text


def test_gaps_are_of_equal_parts_of_the_steps_that_both_have(tmp_path):
    dense = np.full(100, 4.0)
    write(tmp_path, "dense_repeat1", dense, pretrained_checkpoint="start-dense")
    write(tmp_path, "s2_repeat1", np.repeat([4.4, 4.2, 4.1, 4.0], 20), pretrained_checkpoint="start-dense")
    runs = read_repeats(tmp_path)
    assert gaps(runs["s2"]["1"], runs["dense"]["1"], last_step=80) == [
        (20, pytest.approx(0.4), pytest.approx(0.1)), (40, pytest.approx(0.2), pytest.approx(0.05)),
        (60, pytest.approx(0.1), pytest.approx(0.025)), (80, pytest.approx(0), pytest.approx(0))]  # fmt: skip
    # One that was cut has the parts that it went through.
    write(tmp_path, "dense_repeat2", dense[:30], pretrained_checkpoint="start-dense")
    write(tmp_path, "s2_repeat2", dense[:30] + 0.2, pretrained_checkpoint="start-dense")
    text = "\n".join(section(tmp_path))
    assert "from 0 to 0.1M tokens" in text and "| repeat 1 | +0.4000 (+10.00 %)" in text
    assert "| repeat 2 | +0.2000 (+5.00 %) | - | - | - |" in text


def test_a_comparison_takes_what_the_repeats_gave():
    assert round(run_offset(read_repeats(REPEATS)).nats, 3) == MIDDLE_RUNS.nats


def test_one_pair_is_told_apart_only_where_both_go_on_from_one_checkpoint():
    going_on = compared(*(f"{arm}={REPEATS}/{arm}_repeat1.jsonl" for arm in ("dense", "s2")))
    assert going_on.run_offset is GOING_ON
    assert going_on.results[1].difference.verdict == "worse"
    two_dense_runs = compared(f"dense={REPEATS}/dense_repeat1.jsonl", f"again={REPEATS}/dense_repeat2.jsonl")
    assert two_dense_runs.run_offset is MIDDLE_RUNS
    assert two_dense_runs.results[1].difference.verdict == "not told apart"
    from_scratch = compared(*(f"{arm}={QUALITY}/lm8k/150M-bfee4945/{arm}_seed1.jsonl" for arm in ("dense", "s2")))
    assert from_scratch.run_offset is MIDDLE_RUNS
    assert from_scratch.results[1].difference.verdict == "not told apart"


@pytest.mark.parametrize("unset", [None, "", "None"])  # "None": TensorBoard keeps arguments as text
def test_a_checkpoint_that_was_not_given_is_none(unset):
    runs = [read_run(f"{arm}={QUALITY}/lm8k/150M-bfee4945/{arm}_seed1.jsonl")[0] for arm in ("dense", "s2")]
    runs = [replace(run, arguments=run.arguments | {"pretrained_checkpoint": unset}) for run in runs]
    assert compare(make_arms(runs, (), [True, True])).run_offset is MIDDLE_RUNS


def test_a_folder_without_repeats_is_one_line(tmp_path):
    words = [sys.executable, "-m", "studies.repeats", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "expected thinned losses of repeated runs" in done.stderr
    assert "Traceback" not in done.stderr
