"""slurm/pretrain.sbatch, without SLURM: how a job starts, how it ends, and whether it is queued again."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from itertools import pairwise

import pytest

from examples.quickstart.launch import MODEL, model_flags
from s2_megatron.megatron.records.loss_log import read_loss_log
from s2_megatron.megatron.records.status import write_status
from s2_megatron.tools.hf.launch_text import MOCK, TRAINING, launch_script
from tests.processes import free_port
from tests.slurm_stand_ins import ROOT, SHOW, cluster, log, options, probe, shown, submit

__all__ = ["cluster"]  # a fixture
LAUNCHERS = sorted((ROOT / "examples").glob("pretrain_*.sh"))


def test_each_node_gets_its_variables(cluster):
    # What another job or the user's shell left behind does not get through.
    nodes = shown(cluster, NODE_RANK="7", NNODES="9", MASTER_ADDR="elsewhere")
    for rank, (environment, _) in enumerate(nodes):
        expected = dict(
            NNODES="4",
            NODE_RANK=str(rank),
            MASTER_ADDR="gpu07",
            MASTER_PORT=str(15000 + 123456 % 17000),
            GPUS_PER_NODE="8",
        )
        assert {name: environment[name] for name in expected} == expected
        assert environment["OUTPUT"] == str(cluster[0] / "a run") and environment["PYTHON"] == sys.executable
    assert options(cluster)["--ntasks"] == "4" and options(cluster)["--ntasks-per-node"] == "1"
    assert not any("container" in name for name in options(cluster))


def test_a_long_list_of_hosts(cluster):
    """More than a pipe holds, of which only the first line is wanted."""
    (environment, _), *_ = shown(cluster, STUB_HOSTS=" ".join(f"gpu{number:05}" for number in range(12000)))
    assert environment["MASTER_ADDR"] == "gpu00000"


def test_jobs_beside_each_other_meet_at_different_ports(cluster):
    port = {}
    for job in ("16999", "17000", "123456", "123457"):
        done = submit(cluster, "examples/pretrain_7b.sh", DRY_RUN="1", SLURM_JOB_ID=job)
        port[job] = {
            int(after)
            for line in done.stdout.splitlines()
            for flag, after in pairwise(shlex.split(line))
            if flag == "--master-port"
        }
    assert all(len(found) == 1 and 15000 <= min(found) < 32000 for found in port.values())
    assert port["123456"] != port["123457"] and port["16999"] != port["17000"]
    (environment, _), *_ = shown(cluster, MASTER_PORT="4242", GPUS_PER_NODE="2")
    assert environment["MASTER_PORT"] == "4242" and environment["GPUS_PER_NODE"] == "2"


def test_flags_arrive_as_they_were_given(cluster):
    extra = ["--title", "two words", "", "*", "a'b\"c", "$HOME", "--lr", "1e-4"]
    for _, arguments in shown(cluster, *extra):
        assert arguments[2:] == extra and arguments[0] == "--exit-duration-in-mins"
    # The launcher as the user names it: relative to the folder of sbatch.
    done = submit(cluster, "examples/pretrain_7b.sh", "--title", "two words", DRY_RUN="1")
    lines = [shlex.split(line) for line in done.stdout.splitlines() if "torch.distributed.run" in line]
    assert [line[-2:] for line in lines] == [["--title", "two words"]] * 4


RENDEZVOUS = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--nproc-per-node")


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: path.stem)
def test_every_node_starts_torchrun_with_its_rank(cluster, script):
    """What DRY_RUN=1 shows is what the nodes start: python stands for a program that prints its arguments."""
    size = script.stem.removeprefix("pretrain_").partition("_")[0]
    config = next(path for path in sorted((ROOT / "configs").glob("*.yaml")) if size in path.stem)
    python = cluster[0] / "bin" / "python"
    save = cluster[0] / "a run" / "checkpoints"
    finished = f"""mkdir -p "{save}"; echo ' "state": "finished",' > "{save}/run_status.json\""""
    python.write_text(f'#!/bin/bash\nprintf \'%s\\n\' "$0" "$@"\n{finished}\n')
    python.chmod(0o755)
    settings = dict(CONFIG=str(config), PYTHON=str(python))
    dry = submit(cluster, script, "--x", "y z", DRY_RUN="1", **settings)
    assert dry.returncode == 0 and not (cluster[0] / "srun.json").exists() and not (cluster[0] / "a run").exists()
    lines = dry.stdout.splitlines()
    assert shlex.split(lines[0])[0] == "srun" and lines[1::2] == [f"node {rank}:" for rank in range(4)]
    assert submit(cluster, script, "--x", "y z", **settings).returncode == 0
    for rank, line in enumerate(lines[2::2]):
        started = log(cluster, rank).read_text().splitlines()
        assert ["env", "CUDA_DEVICE_MAX_CONNECTIONS=1", *started] == shlex.split(line)
        value = dict(pairwise(started))
        assert [value[flag] for flag in RENDEZVOUS] == ["4", str(rank), "gpu07", str(15000 + 123456 % 17000), "8"]
        assert value["--x"] == "y z" and value["--s2-config"] == str(config)
        assert value["--exit-duration-in-mins"] == str(24 * 60 - 10) and value["--save"] == str(
            cluster[0] / "a run/checkpoints"
        )


@pytest.mark.parametrize("plan", [[], ["--s2-config", "configs/s2_7b_mixed.yaml"]], ids=["dense", "sparse"])
def test_the_script_of_an_imported_model(cluster, plan):
    """import-hf's train.sh starts on every node, as the launchers do; the logs lie beside the folder of --save."""
    folder, save = cluster[0] / "mcore", cluster[0] / "a run" / "run"
    folder.mkdir()
    own = [f"--load={folder}", "--finetune", f"--save={folder}-trained", MOCK]
    words = ["torchrun", "--nproc-per-node=4", TRAINING, *own, "--num-layers=2"]
    (folder / "train.sh").write_text(launch_script(folder, words, ["--sequence-parallel"]))
    python = cluster[0] / "bin" / "python"
    finished = f"""mkdir -p "{save}"; echo ' "state": "finished",' > "{save}/run_status.json\""""
    python.write_text(f'#!/bin/bash\nprintf \'%s\\n\' "$0" "$@"\n{finished}\n')
    python.chmod(0o755)
    given = (folder / "train.sh", *plan, "--data-path", "x", "--save", save)
    refused = submit(cluster, *given, DRY_RUN="1", PYTHON=str(python))
    assert refused.returncode == 2 and "is no setting of train.sh; expected Megatron's flags" in refused.stderr
    others = dict(without=("CONFIG", "OUTPUT", "MOCK_DATA", "MOCK_VOCAB_SIZE"))
    dry = submit(cluster, *given, DRY_RUN="1", PYTHON=str(python), **others)
    assert dry.returncode == 0 and not save.exists(), dry.stderr
    done = submit(cluster, *given, PYTHON=str(python), **others)
    assert done.returncode == 0 and "has finished" in done.stdout, done.stderr
    for rank, line in enumerate(dry.stdout.splitlines()[2::2]):
        started = log(cluster, rank).read_text().splitlines()
        assert ["env", "CUDA_DEVICE_MAX_CONNECTIONS=1", *started] == shlex.split(line)
        value = dict(pairwise(started))
        meeting = ["4", str(rank), "gpu07", str(15000 + 123456 % 17000)]
        assert [value[flag] for flag in RENDEZVOUS[:4]] == meeting and "--nproc-per-node=8" in started
        assert {f"{ROOT}/pretrain_gpt_s2.py", "--sequence-parallel", f"--load={folder}", "--finetune"} <= set(started)
        assert value["--exit-duration-in-mins"] == str(24 * 60 - 10) and started[-4:] == list(map(str, given[-4:]))


def test_a_dry_run_needs_no_slurm(cluster):
    none = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_GPUS_ON_NODE", "SLURM_JOB_END_TIME")
    done = submit(cluster, "examples/pretrain_7b.sh", without=none, DRY_RUN="1", NNODES="2", PATH="/usr/bin:/bin")
    nodes = [line for line in done.stdout.splitlines() if line.startswith("node ")]
    assert done.returncode == 0 and nodes == ["node 0:", "node 1:"]


def test_megatrons_windows_need_no_yaml(cluster):
    windows = ("--window-size", "1023,0")
    done = submit(cluster, "examples/pretrain_7b.sh", *windows, DRY_RUN="1", CONFIG="window-size")
    lines = [shlex.split(line) for line in done.stdout.splitlines() if "torch.distributed.run" in line]
    assert len(lines) == 4 and all(line[-2:] == [*windows] for line in lines)
    assert {dict(pairwise(line))["--s2-config"] for line in lines} == {"window-size"}


MISTAKES = [
    # (what is changed, what is left out, arguments, what the line says)
    ({}, ["SLURM_JOB_ID"], ["examples/pretrain_7b.sh"], ("SLURM_JOB_ID", "sbatch --nodes 4")),
    ({}, [], [], ("no launcher", "examples/pretrain_7b.sh")),
    ({}, [], ["examples/pretrain_8b.sh"], ("launcher=examples/pretrain_8b.sh", "no such file")),
    ({}, [], ["Makefile"], ("launcher=Makefile", "does not source examples/launch.sh")),
    ({"REQUEUE": "yes"}, [], ["examples/pretrain_7b.sh"], ("REQUEUE=yes", "0 or 1")),
    ({"DRY_RUN": "true"}, [], ["examples/pretrain_7b.sh"], ("DRY_RUN=true", "0 or 1")),
    ({"PREFLIGHT": "off"}, [], ["examples/pretrain_7b.sh"], ("PREFLIGHT=off", "0 or 1")),
    (
        {"SLURM_JOB_NODELIST": "nowhere", "STUB_HOSTS": ""},
        [],
        ["examples/pretrain_7b.sh"],
        ("SLURM_JOB_NODELIST=nowhere", "by hand"),
    ),
    ({}, ["SLURM_GPUS_ON_NODE"], ["examples/pretrain_7b.sh"], ("GPUS_PER_NODE=;", "--gpus-per-node 8")),
    ({"GPUS_PER_NODE": "h100:8"}, [], ["examples/pretrain_7b.sh"], ("GPUS_PER_NODE=h100:8", "--gpus-per-node 8")),
    ({"SLURM_JOB_NUM_NODES": "70000"}, [], ["examples/pretrain_7b.sh"], ("NNODES=70000", "1 to 65536 nodes")),
    ({"MASTER_PORT": "80"}, [], ["examples/pretrain_7b.sh"], ("MASTER_PORT=80", "1024 to 65535")),
    ({"MASTER_PORT": "70000"}, [], ["examples/pretrain_7b.sh"], ("MASTER_PORT=70000", "1024 to 65535")),
    ({"PYTHON": "/no/python"}, [], ["examples/pretrain_7b.sh"], ("PYTHON=/no/python", "virtual environment")),
    ({"CONTAINER": "image.sqsh"}, [], ["examples/pretrain_7b.sh"], ("CONTAINER=image.sqsh", "pyxis")),
    ({"CONTAINER_MOUNTS": "/d:/d"}, [], ["examples/pretrain_7b.sh"], ("CONTAINER_MOUNTS=/d:/d", "set CONTAINER")),
    ({"SAVE_MINUTES": "0"}, [], ["examples/pretrain_7b.sh"], ("SAVE_MINUTES=0", "1 or more")),
    ({"SAVE_MINUTES": "1500"}, [], ["examples/pretrain_7b.sh"], ("SAVE_MINUTES=1500", "1440 minutes", "--time")),
    ({"REQUEUE": "1"}, ["SLURM_JOB_END_TIME"], ["examples/pretrain_7b.sh"], ("REQUEUE=1", "--time")),
    ({}, [], ["examples/pretrain_7b.sh", "--exit-duration-in-mins=5"], ("--exit-duration-in-mins=5", "SAVE_MINUTES")),
    ({"CONFIG": "configs/none.yaml"}, [], ["examples/pretrain_7b.sh"], ("configs/none.yaml", "no such file")),
    ({"OUTPUT": "/tmp/100%"}, [], ["examples/pretrain_7b.sh"], ("OUTPUT=/tmp/100%", "without it")),
    # The launcher's own line
    ({}, ["MOCK_DATA"], ["examples/pretrain_7b.sh"], ("DATA_PATH is not set", "MOCK_DATA=1")),
    (
        {"TRANSFORMER_IMPL": "te"},
        [],
        ["examples/pretrain_7b.sh"],
        ("TRANSFORMER_IMPL=te", "expected transformer_engine or local"),
    ),
]


@pytest.mark.parametrize(
    "changes, without, arguments, words",
    MISTAKES,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_before_srun(cluster, changes, without, arguments, words):
    done = submit(cluster, *arguments, without=without, **changes)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout, (done.stderr, done.stdout)
    assert all(word in done.stderr for word in words), done.stderr
    assert not (cluster[0] / "srun.json").exists()


def test_a_launcher_that_launches_nothing(cluster):
    (cluster[0] / "empty.sh").write_text("source examples/launch.sh\n")
    done = submit(cluster, cluster[0] / "empty.sh")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "empty.sh" in done.stderr and "has to call launch" in done.stderr


def test_an_output_that_cannot_be_written(cluster):
    (cluster[0] / "file").touch()
    done = submit(cluster, "examples/pretrain_7b.sh", OUTPUT=str(cluster[0] / "file/run"))
    assert done.returncode == 2 and f"OUTPUT={cluster[0]}/file/run cannot be written" in done.stderr
    assert not (cluster[0] / "srun.json").exists()


def test_a_container_needs_no_python_here(cluster):
    pyxis = "  --container-image=IMAGE\n" + "more help\n" * 10000
    settings = dict(CONTAINER="nvcr.io#nvidia/pytorch", CONTAINER_MOUNTS="/data:/data:ro", PYTHON="/in/python")
    shown(cluster, **settings, STUB_HELP=pyxis)
    given, output = options(cluster), cluster[0] / "a run"
    assert given["--container-image"] == "nvcr.io#nvidia/pytorch" and given["--container-workdir"] == str(ROOT)
    own = cluster[0]  # of the launcher: a train.sh has its weights there
    assert given["--container-mounts"] == f"{ROOT}:{ROOT},{output}:{output},{own}:{own},/data:/data:ro"


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
