"""On a GPU, in fp32, these kernels train what Transformer Engine's own attention trains (`make test-gpu`)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from tests.megatron.conftest import SCRIPTS
from tests.megatron.test_gpu import IS_LATENT, LATENT, MODEL, SPECS

pytestmark = pytest.mark.gpu

# In fp32 Transformer Engine has its unfused attention.
FLAGS = "--train-iters 10 --distributed-backend nccl --attention-backend unfused"
DENSE = "block_size: 64\nlayers: DDDD\nspecs: {}\n"


@pytest.fixture
def gpu_lab(lab, count_gpus, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # Transformer Engine's products of fp32 are TF32
    if count_gpus == 0:
        pytest.skip("no NVIDIA GPU (nvidia-smi lists none)")
    if subprocess.run([sys.executable, "-c", "import transformer_engine.pytorch"], capture_output=True).returncode:
        pytest.skip("Transformer Engine is not installed")
    return dataclasses.replace(lab, device_flags="", timeout=150, gpus=True)


@pytest.fixture
def equal_training(gpu_lab, same_training, request):
    """Of a run of Megatron alone, and of the same flags with those of ours."""

    def compare(flags, ours, said, model=MODEL):
        name, options = request.node.name, dict(model=model, spec=SPECS["transformer_engine"])
        script = SCRIPTS / "watched_pretrain.py"
        own = gpu_lab.run(f"{name}_engine", f"{FLAGS} {flags}", sparsity=False, **options)
        run = gpu_lab.run(name, f"{FLAGS} {flags} {ours}", script=script, **options)
        assert said in run.output and "No GPU found" not in run.output
        assert all(bool(IS_LATENT.search(each.output)) == (model == LATENT) for each in (run, own))
        same_training(run, own)

    return compare


@pytest.fixture
def dense(lab) -> str:
    config = lab.folder / "dense_on_a_gpu.yaml"
    config.write_text(DENSE)
    return f"--s2-config {config} --s2-dense-core s2"


def test_windows(equal_training):
    """A window that ends inside of a block; the third layer sees all."""
    equal_training("--window-size 199,0 --window-attn-skip-freq 3", "--s2-config window-size", "window 200")


def test_learnable_softmax_offsets(equal_training, dense):
    equal_training("--softmax-type learnable", dense, "S2 attention kernels")


def test_learnable_softmax_offsets_of_a_mixed_plan_are_saved_and_loaded(gpu_lab, same_training):
    """Whose dense layers are Transformer Engine's, which stores more of a layer than an offset."""
    config, folder = gpu_lab.folder / "mixed_on_a_gpu.yaml", gpu_lab.folder / "mixed_offsets"
    config.write_text("block_size: 64\nlayers: SSSD\nspecs:\n  S: {window: 128}\n")
    options = dict(model=MODEL, spec=SPECS["transformer_engine"], sparsity=False)
    flags = f"{FLAGS} --softmax-type learnable --s2-config {config} --s2-dense-core stock"
    whole = gpu_lab.run("mixed_offsets", f"{flags} --save {folder} --save-interval 5", **options)
    same_training(gpu_lab.run("mixed_offsets_again", f"{flags} --load {folder} --ckpt-step 5", **options), whole)


def test_multi_latent_attention(equal_training, dense):
    """Whose values Megatron pads by itself."""
    equal_training("", dense, "S2 attention kernels", model=LATENT)
