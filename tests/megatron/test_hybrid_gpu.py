"""HybridModels of Transformer Engine's layers on a GPU (`make test-gpu`): `*-` N times is the GPT of N layers, in fp32;
in bf16 the kernels train what the reference trains, beside experts and gated delta nets, too.

Refusals of refusals/hybrid.py are lifted here: what passes leaves its tables."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from tests.megatron.conftest import SCRIPTS
from tests.megatron.lifted import LIFT_UNPROVEN
from tests.megatron.test_gpu import MODEL, SPECS

pytestmark = pytest.mark.gpu

ENGINE = SPECS["transformer_engine"]
PLAN = "block_size: 64\nlayers: {}\nspecs:\n  S: {{window: 150, sink_tokens: 3}}\n"


def is_missing(module: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode != 0


@pytest.fixture
def gpu_lab(lab, count_gpus, monkeypatch):
    if count_gpus == 0:
        pytest.skip("no NVIDIA GPU (nvidia-smi lists none)")
    if is_missing("transformer_engine.pytorch"):
        pytest.skip("Transformer Engine is not installed")
    monkeypatch.setenv(LIFT_UNPROVEN, "1")
    return dataclasses.replace(lab, device_flags="--distributed-backend nccl", timeout=200, gpus=True)


@pytest.mark.parametrize("plan", ["SSSS", "SD"])
def test_equals_the_gpt_of_equal_weights(gpu_lab, plan, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # Transformer Engine's products of fp32 are TF32
    config = gpu_lab.folder / f"hybrid_gpu_{plan}.yaml"
    config.write_text(PLAN.format(plan))
    flags = f"--s2-config {config} --attention-backend unfused"
    output = gpu_lab.python("hybrid_equals_gpt.py", *gpu_lab.flags(flags, model=MODEL, spec=ENGINE))
    found = json.loads(output.split("RESULT ")[1].splitlines()[0])
    gpt, hybrid = found["gpt"], found["hybrid"]
    assert (gpt["model"], hybrid["model"]) == ("GPTModel", "HybridModel") and found["weights"] > 10
    assert hybrid["s2_layers"] == [2 * layer for layer in gpt["s2_layers"]] and gpt["s2_layers"]
    assert hybrid["losses"] == pytest.approx(gpt["losses"], rel=0, abs=1e-6)
    assert hybrid["norms"] == pytest.approx(gpt["norms"], rel=1e-6, abs=0)
    assert gpt["losses"][0] != gpt["losses"][1]


def train_in_bf16(gpu_lab, name: str, pattern: str, more: str) -> None:
    """The kernels, against the reference; with recompute and kept outputs as without."""
    config = gpu_lab.folder / f"hybrid_gpu_{name}.yaml"
    config.write_text(PLAN.format("SD"))
    flags = f"--hybrid-layer-pattern {pattern} --s2-config {config} --bf16 --train-iters 6 {more}"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    model = MODEL.replace("--num-layers 4", "")
    options = dict(model=model, spec=ENGINE, script=SCRIPTS / "watched_pretrain.py")
    runs = [
        gpu_lab.run(f"{name}_{kind}", f"{flags} {added}", **options)
        for kind, added in (
            ("reference", "--s2-backend reference"),
            ("kernels", "--s2-backend auto"),
            ("recomputed", f"{recompute} --s2-keep-attention-output"),
        )
    ]
    reference, kernels, recomputed = (run.losses for run in runs)
    assert list(kernels) == [1, 2, 3, 4, 5, 6]
    assert abs(kernels[6] - kernels[1]) > 0.01
    assert recomputed == pytest.approx(kernels, rel=0, abs=1e-5)
    assert kernels == pytest.approx(reference, rel=0, abs=1e-3)


def test_bf16(gpu_lab):
    train_in_bf16(gpu_lab, "mlp", "*-*-", "--use-distributed-optimizer")


@pytest.mark.xfail(strict=True, reason="1.6e-3 from the reference on an H200 (tests/NOTES.md); refused until it passes")
def test_bf16_experts(gpu_lab):
    experts = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
    train_in_bf16(gpu_lab, "experts", "*E*-", experts)


def test_gated_delta_nets_beside_s2_attention(gpu_lab):
    if is_missing("fla"):
        pytest.skip("flash-linear-attention is not installed")
    heads = "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 64 --linear-value-head-dim 64"
    train_in_bf16(gpu_lab, "delta", "G-*-G-*-", heads)
