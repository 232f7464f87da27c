"""slurm/pretrain.sbatch, without SLURM: how a job starts."""

from __future__ import annotations

import shlex
import sys
from itertools import pairwise

import pytest

from tests.slurm_stand_ins import ROOT, cluster, log, options, shown, submit

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
    assert given["--container-mounts"] == f"{ROOT}:{ROOT},{output}:{output},/data:/data:ro"
