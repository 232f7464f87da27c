"""slurm/pretrain.sbatch, without SLURM: how a job ends, and whether it is queued again."""

from __future__ import annotations

import json
import os
import shlex
import time

import pytest

from examples.quickstart.launch import MODEL, model_flags
from s2_megatron.megatron.records.loss_log import read_loss_log
from s2_megatron.megatron.records.status import write_status
from tests.processes import free_port
from tests.slurm_stand_ins import ROOT, SHOW, cluster, log, probe, shown, submit

__all__ = ["cluster"]  # a fixture


def test_the_first_nodes_exit_code_is_the_jobs(cluster):
    # Nobody waits for the other nodes: longer than `submit` has.
    action = "echo here; if [[ $NODE_RANK == 2 ]]; then exit 7; fi; sleep 1000; exit"
    done = submit(cluster, probe(cluster, action), REQUEUE="1")
    assert done.returncode == 7
    assert "node 2 (gpu12) failed first, with exit code 7" in done.stderr and str(log(cluster, 2)) in done.stderr
    assert not (cluster[0] / "scontrol").exists(), "a job that fails is not queued again"
    # Logs stay beside those of the next attempt; the failure is not, here of one that leaves none: killed from
    # outside.
    action = action.replace("here", "again").replace("exit 7", "kill -KILL $PPID; exit")
    done = submit(cluster, probe(cluster, action))
    assert done.returncode == 137 and not done.stderr
    assert log(cluster, 2).read_text() == "here\nagain\n"


def test_scancel_reaches_the_trainer(cluster):
    """SIGTERM, which SLURM sends to a task's first process, is passed on, and waited for."""
    action = "trap 'echo saved; exit 0' TERM; kill -TERM $PPID; for i in {1..3000}; do sleep 0.1; done; exit 9"
    done = submit(cluster, probe(cluster, action))
    assert done.returncode == 0 and {log(cluster, node).read_text() for node in range(4)} == {"saved\n"}


DURATION = "iteration 7 of 9, by --exit-duration-in-mins 70"
ENDS = [  # (state, line, exit code of the trainer; the job's, what it says, whether it is queued again with REQUEUE=1)
    ("finished", "iteration 9 of 9", 0, 0, "nothing is left to train (iteration 9 of 9)", False),
    ("stopped", DURATION, 0, 0, f"stopped for its time limit ({DURATION})", True),
    ("stopped", "iteration 7 of 9, by SIGTERM", 0, 0, "stopped (iteration 7 of 9, by SIGTERM); the same", False),
    ("refused", 'CONFIG="x": expected y', 2, 2, 'refused: CONFIG=\\"x\\": expected y', False),
    ("failed", "RuntimeError: z", 1, 1, "failed: RuntimeError: z", False),
    ("running", "started as process 1", 0, 1, "does not say how", False),
    (None, "", 0, 1, "does not say how", False),
]


@pytest.mark.parametrize("requeue", ["0", "1"])
@pytest.mark.parametrize("state, line, code, expected, words, again", ENDS)
def test_what_the_run_says_decides(cluster, requeue, state, line, code, expected, words, again):
    """The file beside the checkpoints; that of an earlier attempt counts for nothing."""
    save = cluster[0] / "a run" / "checkpoints"
    write_status(save, "stopped", DURATION)
    (cluster[0] / "ended").write_text("")
    if state is not None:
        write_status(cluster[0], state, line)
        (cluster[0] / "run_status.json").rename(cluster[0] / "ended")
    action = f'if [[ $NODE_RANK == 0 ]]; then ended "$(cat {cluster[0]}/ended)"; exit {code}; fi; exit 0'
    done = submit(cluster, probe(cluster, action), SLURM_JOB_END_TIME=str(int(time.time()) + 4800), REQUEUE=requeue)
    assert done.returncode == expected and words in done.stdout + done.stderr, (done.stdout, done.stderr)
    assert (cluster[0] / "scontrol").exists() == (again and requeue == "1")
    if again and requeue == "1":
        assert (cluster[0] / "scontrol").read_text() == "requeue 123456\n"


@pytest.mark.parametrize("pre_empted", ["None", "2026-03-01T12:00:00"])
@pytest.mark.parametrize("state", ["stopped", "finished", "refused"])
def test_told_to_stop(cluster, state, pre_empted):
    """Its trainer then ends with 1. Without a pre-emption it was scancel --signal=TERM."""
    write_status(cluster[0], state, "iteration 7 of 9, by SIGTERM")
    told = cluster[0] / "told"  # by rank 0 alone, as in a run, and before any node ends
    action = f"""if [[ $NODE_RANK == 0 ]]; then ended "$(cat {cluster[0]}/run_status.json)"; touch {told}; fi
        until [[ -e {told} ]]; do sleep 0.05; done
        trap "exit 1" TERM; kill -TERM $PPID; for i in {{1..3000}}; do sleep 0.1; done; exit 9"""
    done = submit(cluster, probe(cluster, action), STUB_PREEMPTED=pre_empted)
    again = state == "stopped" and pre_empted != "None"
    assert (done.returncode == 0) == (state == "stopped") and (cluster[0] / "scontrol").exists() == again, done.stderr


def test_a_time_limit_after_a_suspension_is_a_time_limit(cluster):
    """The job keeps its PreemptTime; it stopped by the clock, and REQUEUE=1 was not asked for."""
    write_status(cluster[0], "stopped", DURATION)
    action = f'if [[ $NODE_RANK == 0 ]]; then ended "$(cat {cluster[0]}/run_status.json)"; fi; exit 0'
    done = submit(cluster, probe(cluster, action), STUB_PREEMPTED="2026-03-01T12:00:00")
    assert done.returncode == 0 and f"stopped for its time limit ({DURATION})" in done.stdout
    assert not (cluster[0] / "scontrol").exists(), done.stdout


def test_a_failure_after_a_pre_emption_is_a_failure(cluster):
    """A job that was suspended and goes on keeps its PreemptTime; that it fails later is its own doing."""
    failed = cluster[0] / "failed"
    action = f"""if [[ $NODE_RANK == 0 ]]; then ended ' "state": "failed",' ' "line": "z",'; touch {failed}; fi
        until [[ -e {failed} ]]; do sleep 0.05; done
        if [[ $NODE_RANK == 2 ]]; then exit 7; fi; sleep 1000; exit"""
    done = submit(cluster, probe(cluster, action), REQUEUE="1", STUB_PREEMPTED="2026-03-01T12:00:00")
    assert done.returncode == 7 and "node 2 (gpu12) failed first, with exit code 7" in done.stderr
    assert not (cluster[0] / "scontrol").exists(), done.stdout


def test_without_a_time_limit_it_says_what_is_not_saved(cluster):
    done = submit(cluster, probe(cluster, SHOW), without=["SLURM_JOB_END_TIME"])
    assert done.returncode == 0 and "nothing is saved at its time limit" in done.stderr
    assert json.loads(log(cluster, 0).read_text())[1] == []


def test_a_requeued_job_continues_its_curve(cluster):
    (environment, _), *_ = shown(cluster, WANDB_PROJECT="s2")
    assert environment["WANDB_RUN_ID"] == "a run-123456" and environment["WANDB_RESUME"] == "allow"
    log(cluster, 0).unlink()
    done = submit(cluster, probe(cluster, SHOW))
    assert done.returncode == 0 and "WANDB_RUN_ID" not in json.loads(log(cluster, 0).read_text())[0]


@pytest.mark.slow
def test_two_nodes_train(cluster):
    """Megatron itself, one process a node: data parallel over the rendezvous that the script made."""
    launcher = cluster[0] / "small.sh"
    flags = [*model_flags(MODEL), "--micro-batch-size=1", "--global-batch-size=2", "--train-iters=3", "--lr=1e-3"]
    cpu = ["--distributed-backend=gloo", "--num-workers=0", "--eval-iters=1"]
    launcher.write_text(
        f'source {shlex.quote(str(ROOT / "examples/launch.sh"))}\nEXTRA_FLAGS=("$@")\nlaunch {shlex.join(flags)}\n'
    )
    losses = cluster[0] / "losses"
    done = submit(
        cluster,
        *(launcher, *cpu, "--s2-loss-log", losses),
        STUB_HOSTS="localhost localhost",
        SLURM_JOB_NUM_NODES="2",
        GPUS_PER_NODE="1",
        MASTER_PORT=str(free_port()),
        CONFIG="configs/quickstart.yaml",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        HOME=os.environ.get("HOME", "/tmp"),
    )
    printed = log(cluster, 0).read_text() + log(cluster, 1).read_text()
    assert done.returncode == 0, done.stderr + printed[-5000:]
    assert "world size: 2, data-parallel size: 2" in printed
    assert sorted(read_loss_log(losses)[0]) == [1, 2, 3]
    assert (cluster[0] / "a run/checkpoints/latest_checkpointed_iteration.txt").read_text() == "3"
