"""On a GPU --s2-config window-size trains what Transformer Engine's own windows train, in fp32 (`make test-gpu`)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from tests.megatron.test_gpu import MODEL, SPECS

pytestmark = pytest.mark.gpu

# A window that ends inside of a block; the third layer sees all. In fp32 Transformer Engine has its unfused attention.
FLAGS = """
    --window-size 199,0 --window-attn-skip-freq 3 --train-iters 10 --distributed-backend nccl
    --attention-backend unfused
"""


def test_losses_are_those_of_transformer_engines_windows(lab, count_gpus, same_training, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # Transformer Engine's products of fp32 are TF32
    if count_gpus == 0:
        pytest.skip("no NVIDIA GPU (nvidia-smi lists none)")
    if subprocess.run([sys.executable, "-c", "import transformer_engine.pytorch"], capture_output=True).returncode:
        pytest.skip("Transformer Engine is not installed")
    gpu_lab = dataclasses.replace(lab, device_flags="", timeout=120, gpus=True)
    options = dict(model=MODEL, spec=SPECS["transformer_engine"])
    own = gpu_lab.run("gpu_engine_windows", FLAGS, sparsity=False, **options)
    run = gpu_lab.run("gpu_windows", f"{FLAGS} --s2-config window-size", **options)
    assert "window 200" in run.output and "No GPU found" not in run.output
    same_training(run, own)
