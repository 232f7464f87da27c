"""The check of context parallelism, which is for GPUs: over NCCL, and over gloo too; it says so when something is
wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from s2_megatron.testing.context_parallel_check import line_of
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
RIGHT = {"out": 1.0, "dq": 1.0, "dk": 2.0, "dv": 0.9, "repeats": True, "bytes": True, "waited": ""}


@pytest.fixture
def checked():
    """checked(flags) -> (exit code, what two processes printed)"""
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)

    def run(flags):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*launch, "-m", "s2_megatron.testing.context_parallel_check", *flags.split()]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout + done.stderr[-3000:]

    return run


@pytest.mark.slow
def test_two_processes(checked):
    code, output = checked("")
    assert code == 0, output
    assert "ranks 2, gloo, CPU" in output
    assert "18 combinations in" in output and "all right" in output


@pytest.mark.parametrize(
    "change", [{"dk": 2.01}, {"repeats": False}, {"bytes": False}, {"waited": "called a synchronizing CUDA operation"}]
)
def test_a_line_that_is_wrong(change):
    line, right = line_of("paper", torch.float32, "sparse", RIGHT)
    assert right and "WRONG" not in line
    line, right = line_of("paper", torch.float32, "sparse", {**RIGHT, **change})
    assert not right and "WRONG" in line and change.get("waited", "") in line


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_errors_are_those_of_one_gpu(ranks, dtype, monkeypatch):
    """Errors against fp64, repeats, bytes, no waiting for the GPU."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("PYTHONPATH", python_path())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, "-m", "s2_megatron.testing.context_parallel_check", "--dtypes", dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert "all right" in done.stdout
