"""Kills, damaged checkpoints and full disks, in real runs: nothing that was trained before the last complete checkpoint
is lost, and nothing is trained or logged twice.

`make test-long` kills by the dozen (kill_trial.py); the first test here is the part of it that CI has time for.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys

import pytest

from s2_megatron.megatron.records.loss_log import read_loss_log
from s2_megatron.megatron.records.status import read_status
from tests.megatron.arguments import ROOT
from tests.megatron.kill_trial import Trial, check_one_run

ASYNC = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"


@pytest.mark.slow
def test_killed_runs_go_on(lab, baseline):
    """torchrun killed in an asynchronous save, then its rank in training; the run of 20 iterations is finished."""
    trial, choice = Trial(lab, "killed", 20, processes=1), random.Random(1)
    first = trial.kill_once("launcher", "save", choice, *ASYNC.split())
    assert first is not None and trial.trained() >= 4, first
    assert trial.kill_once("rank", "training", choice) is not None
    trial.finish()
    check_one_run(trial, baseline.losses)


@pytest.mark.long
def test_killed_by_the_dozen():
    command = [sys.executable, "-m", "tests.megatron.kill_trial", "--kills", "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * 3600)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture
def copied(lab, baseline, start, request):
    """A copy of the checkpoints of iterations 10 and 20, and the flags of a run that goes on with them to 22."""
    folder = lab.folder / re.sub(r"\W", "_", request.node.name)
    shutil.copytree(start, folder / "checkpoints")
    place = folder / "checkpoints"
    return place, f"--train-iters 22 --override-opt-param-scheduler --save {place} --load {place} --save-interval 10"


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_a_flipped_byte_is_noticed_and_the_remedy_helps(lab, copied):
    """One line with a command, of two ranks, with which torchrun's report ends, too; after it the run goes on from the
    checkpoint before, and the damaged one stays."""
    folder, flags = copied
    flip(folder / "iter_0000020" / "__0_0.distcp")
    damaged = (folder / "iter_0000020" / "__0_0.distcp").read_bytes()
    output = lab.run("flipped", flags, processes=2, torchrun=True, fails=True).output
    (line,) = re.findall(r"^error: .*$", output, flags=re.M)
    assert re.match(r"error: --load=\S*: iter_0000020 is not what was saved", line)
    assert output.count("is not what was saved") == 2 and "CheckpointError" not in output
    assert "__0_0.distcp has changed" in line and "newest complete checkpoint is of iteration 10" in line
    status = read_status(folder)
    assert (status["state"], status["line"], status["exit_status"]) == ("refused", line.removeprefix("error: "), 2)
    subprocess.run(line.partition("do: ")[2], shell=True, check=True)
    run = lab.run("flipped", flags)
    assert "files of" in run.output and "verified by their checksums" in run.output
    assert sorted(run.losses) == list(range(11, 23))
    assert (folder / "replaced_iter_0000020_1" / "__0_0.distcp").read_bytes() == damaged
    assert (folder / "iter_0000020" / "metadata.json").exists()


@pytest.mark.slow
def test_checksums_can_be_left_out(lab, copied):
    folder, flags = copied
    for path in folder.glob("*/rank_0.sha256"):
        path.write_text("0" * 64 + "  __0_0.distcp\n")
    run = lab.run("unchecked", flags, "--s2-no-checksums")
    assert sorted(run.losses) == [21, 22] and "verified" not in run.output


def test_lost_iterations_are_counted(lab, copied):
    """The loss log of a run that was killed at 27, back at its checkpoint of 20."""
    _, flags = copied
    (lab.folder / "lost.jsonl").write_text('{"iteration": 27, "lm loss": 1.0, "grad_norm": 1.0}\n')
    run = lab.run("lost", flags)
    assert "goes on after iteration 20" in run.output and "7 iterations were lost" in run.output
    assert sorted(run.losses) == [21, 22]


def small_disk(folder, megabytes: int) -> None:
    """Mounts a disk of that size at the folder; skips the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small disk")


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", pytest.param(ASYNC, marks=pytest.mark.long)], ids=["sync", "async"])
def test_a_disk_that_fills_up_in_a_checkpoint(lab, extra, request, baseline):
    """One line; the checkpoint before stays, and when there is room the same command goes on from it."""
    name = f"full_{request.node.callspec.id}"
    folder = lab.folder / name
    small_disk(folder, 7)  # a checkpoint takes 2 MB
    try:
        flags = f"--train-iters 20 --save {folder / 'c'} --load {folder / 'c'} --save-interval 4 --lr-decay-iters 20"
        output = lab.run(name, flags, extra, fails=True).output
        (line,) = re.findall(r"^error: (--save=.*: the disk is full .no space left .*)$", output, flags=re.M)
        assert "goes on from the last complete" in line and "Traceback" not in output
        status = read_status(folder / "c")
        assert (status["state"], status["line"], status["exit_status"]) == ("failed", line, 1)
        tracker = int((folder / "c" / "latest_checkpointed_iteration.txt").read_text())
        assert tracker in (4, 8, 12)
        assert subprocess.run(["mount", "-o", "remount,size=100m", str(folder)]).returncode == 0
        run = lab.run(name, flags, extra)
        assert f"at iteration {tracker}" in run.output
        assert read_loss_log(lab.folder / f"{name}.jsonl")[0].keys() == set(range(1, 21))
        assert run.losses == baseline.losses
    finally:
        subprocess.run(["umount", "-l", str(folder)])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a folder read-only")
def test_a_read_only_output_is_refused(lab, request, baseline):
    folder = lab.folder / "read_only"
    small_disk(folder, 7)
    try:
        flags = f"--train-iters 20 --save {folder} --load {folder} --save-interval 4"
        assert subprocess.run(["mount", "-o", "remount,ro", str(folder)]).returncode == 0
        output = lab.run("read_only", flags, fails=True).output
        assert re.search(r"--save=.* cannot be written .Read-only file system", output), output[-2000:]
    finally:
        subprocess.run(["umount", "-l", str(folder)])
