"""HybridModels of Transformer Engine's layers on a GPU (`make test-gpu`): `*-` N times is the GPT of N layers, in fp32;
in bf16 the kernels are as good as the reference, beside experts and gated delta nets, too; two GPUs compute what one
does.

Refusals of refusals/hybrid.py are lifted here: what passes leaves its tables."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from functools import cache, partial

import pytest

from tests.megatron.conftest import SCRIPTS
from tests.megatron.lifted import LIFT_UNPROVEN
from tests.megatron.rounding import (
    FP32,
    assert_as_good_as_the_reference,
    assert_given,
    at_once,
    distance,
    train_from_checkpoint,
)
from tests.megatron.test_gpu import MODEL, SPECS

pytestmark = pytest.mark.gpu

ENGINE = SPECS["transformer_engine"]
WITHOUT_LAYERS = MODEL.replace("--num-layers 4", "")  # Megatron counts the pattern's
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
DELTA = "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 64 --linear-value-head-dim 64"
MODELS = {"mlp": ("*-*-", ""), "experts": ("*E*-", EXPERTS), "delta_nets": ("G-*-G-*-", DELTA)}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2, CP2 = "--pipeline-model-parallel-size 2", "--context-parallel-size 2 --s2-cp-comm-type"
EP2 = "--expert-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "tp2_sp": ("mlp", TP2),
    "pp2": ("mlp", f"{PP2} --hybrid-layer-pattern *-|*-"),
    "pp2_vpp2": ("mlp", f"{PP2} --hybrid-layer-pattern *|-|*|-"),
    "cp2_sparse": ("mlp", f"{CP2} sparse"),
    "cp2_all_gather": ("mlp", f"{CP2} all_gather"),
    "cp2_a2a": ("mlp", f"{CP2} a2a {FULL} --s2-keep-attention-output"),
    "dp2": ("mlp", DISTRIBUTED),
    "ep2": ("experts", f"{EP2} {DISTRIBUTED}"),
    "tp2_sp_ep2": ("experts", f"{TP2} {EP2} --expert-tensor-parallel-size 1"),
    "cp2_ep2": ("experts", f"{CP2} sparse {EP2}"),
}
PLAN = "block_size: 64\nlayers: {}\nspecs:\n  S: {{window: 150, sink_tokens: 3}}\n"


def is_missing(module: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode != 0


@pytest.fixture(scope="module")
def gpu_lab(lab, count_gpus):
    if count_gpus == 0:
        pytest.skip("no NVIDIA GPU (nvidia-smi lists none)")
    if is_missing("transformer_engine.pytorch"):
        pytest.skip("Transformer Engine is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIFT_UNPROVEN, "1")
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # Transformer Engine's products of fp32 are TF32
        yield dataclasses.replace(lab, device_flags="--distributed-backend nccl", timeout=200, gpus=True)


@pytest.fixture(scope="module")
def trained(gpu_lab):
    """Of a kind of model in MODELS: (function that trains it from one checkpoint, that of the reference in fp32, that
    of the reference in bf16)."""
    config = gpu_lab.folder / "hybrid_gpu.yaml"
    config.write_text(PLAN.format("SD"))

    @cache
    def train(kind: str):
        options = dict(model=WITHOUT_LAYERS, spec=ENGINE, script=SCRIPTS / "watched_pretrain.py")
        flags = f"--hybrid-layer-pattern {MODELS[kind][0]} --s2-config {config} {MODELS[kind][1]}"
        run, exact = train_from_checkpoint(gpu_lab, f"hybrid_gpu_{kind}", flags, **options)
        return run, exact, run("reference", "--bf16 --s2-backend reference")

    return train


@pytest.mark.parametrize("plan", ["SSSS", "SD"])
def test_equals_the_gpt_of_equal_weights(gpu_lab, plan):
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


@pytest.mark.parametrize("kind", MODELS)
def test_bf16_kernels_are_as_good_as_the_reference(trained, kind):
    """With recompute and kept outputs they compute the same as without."""
    if kind == "delta_nets" and is_missing("fla"):
        pytest.skip("flash-linear-attention is not installed")
    run, exact, reference = trained(kind)
    kernels, recomputed, whole = at_once(
        partial(run, "kernels", "--bf16"),
        partial(run, "recomputed", f"--bf16 {FULL} --s2-keep-attention-output"),
        partial(run, "whole", ""),
    )
    assert "S2 attention kernels" in kernels.output and "No GPU found" not in kernels.output
    assert_as_good_as_the_reference(kernels, reference, exact)
    assert recomputed.losses == pytest.approx(kernels.losses, rel=0, abs=1e-5)
    assert distance(whole, exact) <= FP32


def test_fused_rope(trained):
    run, exact, reference = trained("mlp")
    fused = run("fused_rope", "--bf16", spec=ENGINE.replace("--no-rope-fusion", ""))
    assert re.search(r"apply_rope_fusion \.+ True", fused.output)
    assert_as_good_as_the_reference(fused, reference, exact)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_gpus_compute_what_one_does(trained, count_gpus, name):
    """In fp32, and in bf16 as well as one GPU, there with Transformer Engine's dense attention."""
    if count_gpus < 2:
        pytest.skip("needs two GPUs")
    kind, flags = LAYOUTS[name]
    run, exact, reference = trained(kind)
    rounded, whole = at_once(
        partial(run, f"{name}_bf16", f"--bf16 {flags}", processes=2),
        partial(run, name, f"{flags} --s2-dense-core s2", processes=2),
    )
    assert_as_good_as_the_reference(rounded, reference, exact)
    assert distance(whole, exact) <= FP32
    for each in (rounded, whole):
        assert_given(each, flags)
