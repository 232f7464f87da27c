"""Features of Megatron around S2 attention on GPUs: CUDA graphs, both kinds of FSDP, overlapped MoE schedules, the
optimizer's state on the host. Each trains as the same run without it does.

    python -m pytest -m gpu tests/megatron/test_gpu_features.py -n 8

(-n of pytest-xdist; a test takes two runs at once, 20 to 50 s.) With one GPU the tests of two are skipped. What
s2_megatron/megatron/refusals/unproven.py refuses is tried here all the same: what fails in Megatron's own code is
expected to, strictly; a feature whose test passes leaves that table, and goes into docs/validation.md.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from tests.megatron.conftest import SCRIPTS
from tests.megatron.features import (
    ATTENTION_RECOMPUTE,
    FSDP_CLASSES,
    FULL_RECOMPUTE,
    MANY_CONNECTIONS,
    MEGATRON_FSDP,
    MOE,
    assert_same_training,
    watched,
    with_and_without,
)
from tests.megatron.lifted import LIFT_UNPROVEN

pytestmark = pytest.mark.gpu

# Head dim 128, whose kernels repeat every bit; 16 blocks of 64 tokens.
MODEL = """
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --kv-channels 128
    --group-query-attention --num-query-groups 2 --seq-length 1024 --max-position-embeddings 1024
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.05
    --make-vocab-size-divisible-by 32
"""
# --te-rng-tracker comes with graphs; here both runs have it, for equal weights at the start.
ENGINE = (
    "--transformer-impl transformer_engine --no-rope-fusion --no-gradient-accumulation-fusion --te-rng-tracker "
    "--s2-dense-core s2"
)
LOCAL = (
    "--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion "
    "--no-bias-swiglu-fusion --no-masked-softmax-fusion --s2-dense-core s2"
)
SPECS = {"engine": ENGINE, "local": LOCAL}
LAYERS, MICROBATCHES, ITERATIONS = 4, 4, 6
TRAIN = f"--bf16 --s2-backend auto --train-iters {ITERATIONS}"
# Sums in another order, in bf16: as in test_gpu.py.
CLOSE = dict(losses=5e-4, norms=1e-2)
# Gradients added in bf16 instead of fp32, or experts, whose choice turns on the last bit.
NEAR = dict(losses=1e-2, norms=5e-2)

CP2 = "--context-parallel-size 2"
CP2_A2A, CP2_ALL_GATHER = f"{CP2} --s2-cp-comm-type a2a", f"{CP2} --s2-cp-comm-type all_gather"
PP2 = "--pipeline-model-parallel-size 2"
PP2_VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
MTP = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
EXPERTS = f"{MOE} --moe-grouped-gemm"
PADDED = f"{EXPERTS} --moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity"
PARTS = "--cuda-graph-modules attn moe_router"
HELD = "--cuda-graph-modules attn moe"
PREPROCESS = f"{PARTS} moe_preprocess"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules core_attn --min-offloaded-tensor-size 1024"
WHOLE = "--cuda-graph-impl full_iteration"
UNCHECKED = "--no-check-for-nan-in-loss-and-grad"
PERIODIC = "--eval-iters 2 --eval-interval 2 --s2-position-loss 4"


@pytest.fixture(scope="module")
def gpu_lab(lab, count_gpus):
    if count_gpus == 0:
        pytest.skip("no NVIDIA GPU (nvidia-smi lists none)")
    folder = lab.folder / "gpu_features"
    folder.mkdir(exist_ok=True)
    sparsity = lab.sparsity.read_text().replace("block_size: 16", "block_size: 64") + "mtp_layers: S\n"
    (folder / "sparsity.yaml").write_text(sparsity)
    flags = f"--distributed-backend nccl --s2-config {folder / 'sparsity.yaml'}"
    return dataclasses.replace(lab, device_flags=flags, timeout=240, gpus=True)


@pytest.fixture(scope="module")
def has_engine() -> bool:
    return not subprocess.run(
        [sys.executable, "-c", "import transformer_engine.pytorch"], capture_output=True
    ).returncode


@pytest.fixture(autouse=True)
def unproven_is_tried(monkeypatch):
    monkeypatch.setenv(LIFT_UNPROVEN, "1")


@pytest.fixture
def compare(request, gpu_lab, has_engine, count_gpus):
    """Runs with and without a feature; (featured, plain)."""

    def run(common: str, feature: str, spec: str = "engine", processes: int = 1, **options):
        if spec == "engine" and not has_engine:
            pytest.skip("Transformer Engine is not installed")
        if processes > count_gpus:
            pytest.skip(f"needs {processes} GPUs")
        name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
        return with_and_without(
            gpu_lab,
            name,
            f"{TRAIN} {common}",
            feature,
            processes=processes,
            model=MODEL,
            spec=SPECS[spec],
            **options,
        )

    return run


def refused_for(reason: str) -> pytest.MarkDecorator:
    """A feature of unproven.py that failed: its run ends with an error, or trains otherwise."""
    return pytest.mark.xfail(strict=True, reason=reason, raises=AssertionError)


def calls(iterations: int = ITERATIONS, layers: int = LAYERS, microbatches: int = MICROBATCHES) -> int:
    return iterations * layers * microbatches


# Megatron records its own graphs in the first iteration and replays them from the second on; the others are captured
# after --cuda-graph-warmup-steps iterations, 3 by default.
EAGER = {"local": 1, "transformer_engine": 3, "full_iteration": 3}


def assert_graphs_change_nothing(found, implementation: str, layers: int = LAYERS, **bounds) -> None:
    graphed, plain = found
    eager = EAGER[implementation]
    assert_same_training(graphed, plain, **(CLOSE | bounds), s2_calls=calls(iterations=eager, layers=layers))
    assert plain.least("graph_replays") == 0
    replays = ITERATIONS - eager
    if implementation != "full_iteration":
        replays *= layers * MICROBATCHES * 2  # forward and backward
    assert graphed.least("graph_replays") >= replays, graphed.ranks


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "common", [f"{UNCHECKED} {PERIODIC}", f"{UNCHECKED} {FULL_RECOMPUTE}"], ids=["evaluated", "recomputed"]
)
def test_graphs_of_whole_iterations(compare, spec, common):
    assert_graphs_change_nothing(compare(common, WHOLE, spec), "full_iteration")


@pytest.mark.parametrize("common", [MTP, PADDED], ids=["mtp", "padded_experts"])
def test_graphs_of_whole_iterations_with_more(compare, common):
    found = compare(f"{UNCHECKED} {common}", WHOLE)
    assert_graphs_change_nothing(found, "full_iteration", **(NEAR if common == PADDED else {}))


@pytest.mark.parametrize(
    "common, modules, implementation",
    [
        pytest.param(ATTENTION_RECOMPUTE, "", "local", id="recomputed-local"),
        pytest.param(ATTENTION_RECOMPUTE, "", "transformer_engine", id="recomputed-transformer_engine"),
        pytest.param(
            *(EXPERTS, PARTS, "local"),
            id="experts-local",
            marks=refused_for("Megatron's token dispatcher waits for an event inside of the capture"),
        ),
        pytest.param(EXPERTS, PARTS, "transformer_engine", id="experts-transformer_engine"),
        pytest.param(MTP, "", "local", id="mtp-local"),
        pytest.param(MTP, "", "transformer_engine", id="mtp-transformer_engine"),
    ],
)
def test_graphs_of_layers(compare, common, modules, implementation):
    found = compare(common, f"--cuda-graph-impl {implementation} {modules}")
    assert_graphs_change_nothing(found, implementation, **(NEAR if common == EXPERTS else {}))


@pytest.mark.parametrize("modules", ["", HELD, PREPROCESS], ids=["layers", "attn_and_moe", "preprocess"])
def test_graphs_of_layers_hold_padded_experts(compare, modules):
    found = compare(PADDED, f"--cuda-graph-impl transformer_engine {modules}")
    assert_graphs_change_nothing(found, "transformer_engine", **NEAR)


def test_graphs_of_layers_count_dropless_tokens(compare):
    found = compare(EXPERTS, f"--cuda-graph-impl transformer_engine {PREPROCESS}")
    assert_graphs_change_nothing(found, "transformer_engine", **NEAR)


def test_graphs_of_whole_iterations_with_offloaded_layers(compare):
    found = compare(f"{UNCHECKED} --cpu-offloading-num-layers 2", WHOLE)
    assert_graphs_change_nothing(found, "full_iteration")


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("transformer_engine", marks=refused_for("the copies' stream is not joined to the capture")),
        "full_iteration",
    ],
)
def test_graphs_with_offloaded_activations(compare, implementation, monkeypatch):
    """Megatron itself refuses graphs of the kind "local" with the attention's activations offloaded."""
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")  # Megatron asks for it with Transformer Engine >= 2.10
    common, feature = OFFLOAD, f"--cuda-graph-impl {implementation}"
    if implementation == "full_iteration":
        common += f" {UNCHECKED} --fine-grained-offloading-max-inflight-offloads 2"
    assert_graphs_change_nothing(compare(common, feature), implementation)


@pytest.mark.parametrize("implementation", ["local", "transformer_engine", "full_iteration"])
@pytest.mark.parametrize("layout", [CP2, CP2_A2A, CP2_ALL_GATHER], ids=["cp2", "cp2_a2a", "cp2_all_gather"])
def test_graphs_under_context_parallelism(compare, implementation, layout):
    found = compare(f"{layout} {UNCHECKED}", f"--cuda-graph-impl {implementation}", processes=2)
    assert_graphs_change_nothing(found, implementation)


@pytest.mark.parametrize(
    "implementation, layout",
    [("transformer_engine", PP2), ("full_iteration", PP2_VPP2)],  # the others are refused
    ids=["transformer_engine", "full_iteration"],
)
def test_graphs_of_pipeline_stages(compare, implementation, layout):
    found = compare(f"{layout} {UNCHECKED}", f"--cuda-graph-impl {implementation}", processes=2)
    assert_graphs_change_nothing(found, implementation, layers=LAYERS // 2)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layout", ["", CP2, FULL_RECOMPUTE], ids=["dp2", "cp2", "dp2_recomputed"])
def test_torch_fsdp2(compare, spec, layout):
    found = compare(layout, "--use-torch-fsdp2", spec, processes=2, environment=MANY_CONNECTIONS)
    microbatches = MICROBATCHES if layout == CP2 else MICROBATCHES // 2
    assert_same_training(*found, **NEAR, s2_calls=calls(microbatches=microbatches))
    assert {rank["wrapper"] for rank in found[0].ranks} == {FSDP_CLASSES["--use-torch-fsdp2"]}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layout", ["", CP2, ATTENTION_RECOMPUTE], ids=["dp2", "cp2", "dp2_recomputed"])
def test_megatron_fsdp(compare, spec, layout):
    common = f"--use-distributed-optimizer {layout}"
    found = compare(common, MEGATRON_FSDP, spec, processes=2, environment=MANY_CONNECTIONS)
    microbatches = MICROBATCHES if layout == CP2 else MICROBATCHES // 2
    assert_same_training(*found, **NEAR, s2_calls=calls(microbatches=microbatches))
    assert {rank["wrapper"] for rank in found[0].ranks} == {FSDP_CLASSES["--use-megatron-fsdp"]}


def test_megatron_fsdp_resumes(gpu_lab, has_engine, count_gpus):
    """With Transformer Engine, whose optimizer has a state for every parameter; without it the resume is refused."""
    if not has_engine or count_gpus < 2:
        pytest.skip("needs Transformer Engine and two GPUs")
    folder = gpu_lab.folder / "megatron_fsdp"
    options = dict(processes=2, model=MODEL, spec=ENGINE, environment=MANY_CONNECTIONS)
    flags = f"{TRAIN} {MEGATRON_FSDP}"
    whole = watched(gpu_lab, "megatron_fsdp_saved", flags, f"--save {folder} --save-interval 3", **options)
    rest = watched(gpu_lab, "megatron_fsdp_resumed", flags, f"--load {folder} --ckpt-step 3", **options)
    assert sorted(rest.run.losses) == [4, 5, 6]
    for step, loss in rest.run.losses.items():
        assert abs(loss - whole.run.losses[step]) <= NEAR["losses"]


@pytest.mark.parametrize("more", ["", "--dataloader-inter-document-masking", ATTENTION_RECOMPUTE, MTP],
                         ids=["ep2", "packed", "recomputed", "mtp"])  # fmt: skip
def test_overlapped_experts(compare, more):
    found = compare(
        f"{EXPERTS} --expert-model-parallel-size 2 {more}",
        "--overlap-moe-expert-parallel-comm",
        processes=2,
        environment=MANY_CONNECTIONS,
    )
    assert_same_training(*found, **NEAR, s2_calls=calls(microbatches=MICROBATCHES // 2))
    assert found[0].least("schedule_plans") == ITERATIONS * MICROBATCHES // 2


@pytest.mark.parametrize(
    "experts, more",
    [
        (EXPERTS, f"--cuda-graph-impl transformer_engine {PARTS}"),
        (PADDED, f"{WHOLE} {UNCHECKED}"),
        (EXPERTS, MEGATRON_FSDP),
    ],
    ids=["graphs", "whole_iterations", "megatron_fsdp"],
)
def test_overlapped_experts_with_more(compare, experts, more):
    found = compare(
        f"{experts} --expert-model-parallel-size 2 --use-distributed-optimizer",
        f"--overlap-moe-expert-parallel-comm {more}",
        processes=2,
        environment=MANY_CONNECTIONS,
    )
    eager = EAGER["transformer_engine"] if "graph" in more else ITERATIONS
    assert_same_training(*found, **NEAR, s2_calls=calls(eager, microbatches=MICROBATCHES // 2))
    planned = eager + 1 if WHOLE in more else ITERATIONS  # a replayed iteration builds no plans; its capture does
    assert found[0].least("schedule_plans") == planned * MICROBATCHES // 2
    if "graph" in more:
        # Transformer Engine's graphs are a layer's, forward and backward
        per_iteration = 1 if WHOLE in more else LAYERS * MICROBATCHES // 2 * 2
        assert found[0].least("graph_replays") >= (ITERATIONS - eager) * per_iteration


def test_graphs_of_whole_iterations_with_megatron_fsdp(compare):
    found = compare(
        f"{UNCHECKED} --use-distributed-optimizer",
        f"{WHOLE} {MEGATRON_FSDP}",
        processes=2,
        environment=MANY_CONNECTIONS,
    )
    eager = EAGER["full_iteration"]
    assert_same_training(*found, **NEAR, s2_calls=calls(eager, microbatches=MICROBATCHES // 2))
    assert found[0].least("graph_replays") >= ITERATIONS - eager


@refused_for("Megatron's data parallelism collects the gradient of an expert's weight before it is computed")
def test_dispatch_overlapped_with_weight_gradients(compare):
    found = compare(
        f"{EXPERTS} --expert-model-parallel-size 2",
        "--overlap-dispatch-backward-with-experts-wgrad",
        processes=2,
        environment=MANY_CONNECTIONS,
    )
    assert_same_training(*found, **NEAR, s2_calls=calls(microbatches=MICROBATCHES // 2))


def test_optimizer_on_the_host(compare):
    """Torch's Adam on the CPU for Transformer Engine's on the GPU: the same formula, other roundings."""
    common = "--use-distributed-optimizer --use-precision-aware-optimizer"
    found = compare(common, "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d")
    assert_same_training(*found, **NEAR, s2_calls=calls())


# Head dims 192 of queries and keys, 128 of values.
LATENT = MODEL.replace("--group-query-attention --num-query-groups 2", "--multi-latent-attention --rope-type rope")


def test_tensor_parallel_ranks_of_multi_latent_attention(gpu_lab, has_engine, count_gpus, same_training):
    """Megatron's local layers train otherwise then (refusals/model.py); are Transformer Engine's right?"""
    if not has_engine or count_gpus < 2:
        pytest.skip("needs Transformer Engine and two GPUs")
    folder, options = gpu_lab.folder / "latent_start", dict(model=LATENT, spec=ENGINE)
    options.update(script=SCRIPTS / "watched_pretrain.py", environment={"NVIDIA_TF32_OVERRIDE": "0"})
    one = gpu_lab.run("latent_one", f"--train-iters 20 --save {folder} --save-interval 10", **options)
    flags = f"--train-iters 20 --load {folder} --ckpt-step 10 --tensor-model-parallel-size 2 --sequence-parallel"
    same_training(gpu_lab.run("latent_tp2", flags, processes=2, **options), one)
