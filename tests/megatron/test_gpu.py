"""Training on a GPU: the Triton kernels in bf16 are as good as the PyTorch reference in bf16, with the local spec and
with Transformer Engine's, and two GPUs compute what one does. Run by `make test-gpu`."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from functools import partial

import pytest

from tests.megatron.conftest import SCRIPTS, altered
from tests.megatron.rounding import (
    FP32,
    assert_as_good_as_the_reference,
    assert_given,
    at_once,
    distance,
    train_from_checkpoint,
)

pytestmark = pytest.mark.gpu

# Head dim 64, 16 blocks of 64 tokens.
MODEL = """
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 1024 --max-position-embeddings 1024
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.05
    --make-vocab-size-divisible-by 32
"""
LATENT = MODEL.replace("--group-query-attention --num-query-groups 2", "--multi-latent-attention --rope-type rope")
IS_LATENT = re.compile(r"multi_latent_attention \.+ True")  # among the arguments that Megatron prints
SPECS = {
    "local": "--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion "
    "--no-bias-swiglu-fusion --no-masked-softmax-fusion",
    "transformer_engine": "--transformer-impl transformer_engine --no-rope-fusion --no-gradient-accumulation-fusion",
}


@pytest.fixture(scope="module")
def gpus(count_gpus) -> int:
    if count_gpus == 0:
        pytest.skip("no NVIDIA GPU (nvidia-smi lists none)")
    return count_gpus


@pytest.fixture(scope="module")
def gpu_lab(lab, gpus):
    sparsity = lab.folder / "gpu" / "sparsity.yaml"
    sparsity.parent.mkdir(exist_ok=True)
    sparsity.write_text(lab.sparsity.read_text().replace("block_size: 16", "block_size: 64"))
    return dataclasses.replace(
        lab, device_flags=f"--distributed-backend nccl --s2-config {sparsity}", timeout=300, gpus=True
    )


@pytest.fixture(scope="module", params=SPECS)
def spec(request) -> str:
    if request.param == "transformer_engine":
        probe = "import transformer_engine.pytorch"
        if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode:
            pytest.skip("Transformer Engine is not installed")
    return request.param


@pytest.fixture(scope="module")
def trained(gpu_lab, spec):
    """(function that trains 10 iterations from one fp32 checkpoint of this spec, that of the reference in fp32)."""
    return train_from_checkpoint(gpu_lab, f"gpu_{spec}", model=MODEL, spec=SPECS[spec])


def test_bf16_kernels_are_as_good_as_the_reference(trained):
    run, exact = trained
    kernels, reference = run("triton", "--bf16 --s2-backend triton"), run("reference", "--bf16 --s2-backend reference")
    assert "S2 attention backend: triton" in kernels.output
    assert "No GPU found" not in kernels.output
    assert_as_good_as_the_reference(kernels, reference, exact)


def test_multi_latent_attention(gpu_lab, spec):
    """Against Transformer Engine's own: test_engine_gpu.py; tensor-parallel ranks: test_gpu_features.py."""
    options = dict(script=SCRIPTS / "watched_pretrain.py")
    run, exact = train_from_checkpoint(
        gpu_lab, f"latent_{spec}", "--s2-dense-core s2", model=LATENT, spec=SPECS[spec], **options
    )
    kernels, reference, whole = at_once(
        partial(run, "kernels", "--bf16"),
        partial(run, "reference", "--bf16 --s2-backend reference"),
        partial(run, "whole", ""),
    )
    assert all(IS_LATENT.search(each.output) for each in (kernels, whole))
    if spec == "local":  # with Transformer Engine's layers Megatron pads the values by itself
        assert "head dim 128 of value, 192 of query and key" in kernels.output
    assert_as_good_as_the_reference(kernels, reference, exact)
    assert distance(whole, exact) <= FP32


def test_fp32_kernels(trained):
    run, exact = trained
    assert distance(run("triton_fp32", "--s2-backend triton"), exact) <= FP32


def test_deterministic_mode_repeats_every_bit(trained, monkeypatch):
    run, _ = trained
    for name, value in (
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
        ("NCCL_ALGO", "Ring"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ):
        monkeypatch.setenv(name, value)
    first, second = (
        run(f"deterministic_{number}", "--bf16 --s2-backend triton --deterministic-mode") for number in range(2)
    )
    assert first.losses == second.losses
    assert first.grad_norms == second.grad_norms


@pytest.mark.parametrize(
    "layout", ["--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"]
)
def test_two_gpus_compute_what_one_does(gpus, trained, layout):
    if gpus < 2:
        pytest.skip("needs two GPUs")
    run, exact = trained
    name = "tp2" if "tensor" in layout else "pp2"
    two = run(name, f"--s2-backend triton {layout}", processes=2)
    assert distance(two, exact) <= FP32
    assert_given(two, layout)


@pytest.mark.parametrize(
    "flags", ["--dataloader-inter-document-masking", "--dataloader-inter-document-masking --micro-batch-size 2"]
)
def test_packed_documents(trained, flags):
    run, _ = trained
    name = "packed2" if "micro" in flags else "packed"
    exact = run(f"{name}_fp32", f"--s2-backend reference --s2-dense-core s2 {flags}")
    assert distance(run(name, f"--s2-backend triton --s2-dense-core s2 {flags}"), exact) <= FP32


def test_a_rank_that_hangs_is_found_by_the_flight_recorder(gpus, gpu_lab, tmp_path):
    """As docs/context_parallel.md says: after the timeout every rank has written what it waits for, and torch's tool
    says who is missing."""
    if gpus < 2:
        pytest.skip("needs two GPUs")
    flags = (
        "--train-iters 20 --context-parallel-size 2 --distributed-timeout-seconds-after-init 20 "
        f"--flight-recorder-dump-path {tmp_path}"
    )
    options = dict(
        model=MODEL,
        spec=SPECS["local"],
        **altered("dying", AT_EXCHANGE="80", HANGS="1"),
    )
    start = time.monotonic()
    gpu_lab.run("gpu_hanging", flags, processes=2, fails=True, torchrun=True, **options)
    assert time.monotonic() - start < 200
    tool = [
        sys.executable,
        "-m",
        "torch.distributed.flight_recorder.fr_trace",
        "--allow-incomplete-ranks",
        str(tmp_path),
    ]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert re.search(r"missing ranks: {1}", done.stdout + done.stderr), f"{done.stdout}\n{done.stderr}"


def test_a_run_with_the_flight_recorder_ends(gpu_lab, tmp_path):
    """With the dump that Megatron asks for at exit no process ends."""
    flags = f"--train-iters 2 --s2-backend reference --flight-recorder-dump-path {tmp_path}"
    gpu_lab.run("gpu_recorder", flags, model=MODEL, spec=SPECS["local"])


@pytest.fixture
def engine_only(spec):
    if spec != "transformer_engine":
        pytest.skip("Megatron has this with Transformer Engine only")


# Megatron records its own graphs in the first iteration and replays them from the second on; Transformer Engine's are
# captured after --cuda-graph-warmup-steps iterations, 3 by default.
@pytest.mark.parametrize("implementation, eager_iterations", [("local", 1), ("transformer_engine", 3)])
def test_cuda_graphs_change_no_loss(engine_only, trained, implementation, eager_iterations):
    """Every layer, S2 and dense, captured with its attention and replayed: each loss is that of the run without graphs,
    but for the backward of head dim 64, which adds in whatever order its parts come."""
    run, _ = trained
    flags = "--bf16 --train-iters 6"
    plain = run(f"without_{implementation}_graphs", flags)
    graphed = run(
        f"{implementation}_graphs",
        f"{flags} --cuda-graph-impl {implementation}",
        script=SCRIPTS / "watched_pretrain.py",
    )
    replays = int(re.search(r'"graph_replays": (\d+)', graphed.output)[1])
    assert replays >= (6 - eager_iterations) * 4 * 4 * 2, (
        "4 microbatches and 4 layers an iteration, forward and backward"
    )
    assert len(plain.losses) == len(graphed.losses) == 6
    assert max(abs(graphed.losses[step] - loss) for step, loss in plain.losses.items()) <= 5e-4


def test_fp8_linears(engine_only, trained):
    run, exact = trained
    plain, eighth = (
        run("bf16", "--bf16 --s2-backend triton"),
        run("fp8", "--bf16 --s2-backend triton --fp8-format hybrid"),
    )
    assert distance(eighth, plain) > 0, "the linear layers must have run in fp8"
    assert distance(eighth, exact) <= 0.02 * exact.losses[max(exact.losses)]


def test_offloaded_activations_come_back(engine_only, trained, monkeypatch):
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")  # Megatron asks for it with Transformer Engine >= 2.10
    run, _ = trained
    flags = (
        "--bf16 --s2-backend triton --fine-grained-activation-offloading --offload-modules core_attn "
        "--min-offloaded-tensor-size 1024"
    )
    assert distance(run("offloaded", flags), run("not_offloaded", "--bf16 --s2-backend triton")) <= 1e-4
