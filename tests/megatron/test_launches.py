"""`s2-megatron check` and the training agree: what the check accepts trains, and what it refuses is one error line for
each mistake.

`make test-long` draws launches by the hundred (launch_trial.py); the first test here is the part of it that CI has time
for.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.megatron.arguments import ROOT
from tests.megatron.launch_draws import GROUPS, read_changes
from tests.megatron.launch_trial import FAILED, HUNG, IDLE, REFUSED, TRAINED, Trial, judged, raised, run
from tests.megatron.without_gpt import require_gpt_model


@pytest.fixture
def trial(tmp_path, count_gpus):
    require_gpt_model()
    if count_gpus:
        pytest.skip("the runs of the trial are forked from a process that has no GPU")
    return Trial(tmp_path)


@pytest.mark.slow
def test_drawn_launches(trial):
    found = run(trial, 5, seed=4, only="learning rate") + run(trial, 2, seed=1, only="batches")
    assert not found
    assert trial.counted[TRAINED] >= 3 and trial.counted[REFUSED] >= 3, trial.counted


@pytest.mark.long
def test_launches_by_the_hundred():
    command = [sys.executable, "-m", "tests.megatron.launch_trial", "--draws", "300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * 3600)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-5000:]


def test_a_failure_is_told_from_a_training(tmp_path):
    log = tmp_path / "losses.jsonl"
    trace = '  File "/x/scheduler.py", line 7, in __init__\n    assert warmup < decay\nAssertionError: too long\n'
    assert judged(1, trace, [], log).where == "scheduler.py:7 AssertionError: too long"
    assert raised(trace)[0] == "AssertionError: too long (scheduler.py:7: assert warmup < decay)"
    assert judged(2, "error: --x: expected 3\n", [], log).kind == FAILED
    assert judged(9, "no word", [], log).kind == HUNG
    assert judged(0, "", ["--train-iters", "3"], log).kind == IDLE
    log.write_text('{"iteration": 2, "lm loss": 1.0}\n')
    assert judged(0, "", ["--train-iters", "3"], log).kind == IDLE
    assert judged(0, "", ["--train-iters", "2"], log).kind == TRAINED
    assert judged(0, "", ["--train-iters", "3", "--exit-interval", "2"], log).kind == TRAINED


def test_how_draws_are_written():
    given = read_changes("--lr 0|1e-3 ; -swiglu + --x a b ;\n --skip-train")
    assert given == [
        [{"--lr": ["0"]}, {"--lr": ["1e-3"]}],
        [{"--swiglu": None, "--x": ["a", "b"]}],
        [{"--skip-train": []}],
    ]
    assert all(change for text in GROUPS.values() for changes in read_changes(text) for change in changes)
