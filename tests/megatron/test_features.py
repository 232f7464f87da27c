"""FSDP, both kinds, and overlapped MoE schedules with S2 attention, over gloo: losses and gradient norms as in the
same run without them. On GPUs: test_gpu_features.py."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

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

pytestmark = pytest.mark.slow
ITERATIONS, MICROBATCHES, S2_LAYERS = 6, 4, 3
TRAIN = f"--train-iters {ITERATIONS}"
CP2 = "--context-parallel-size 2"
# Losses and gradient norms are sums in another order.
FP32 = dict(losses=1e-5, norms=1e-5)
BF16 = "--bf16 --no-masked-softmax-fusion"


def s2_calls(ranks_of_data: int) -> int:
    """Of a rank that has every layer and its share of the microbatches."""
    return ITERATIONS * MICROBATCHES // ranks_of_data * S2_LAYERS


@pytest.mark.parametrize(
    "name, processes, layout, ranks_of_data",
    [
        ("dp2_recompute", 2, FULL_RECOMPUTE, 2),
        ("cp2", 2, CP2, 1),
        pytest.param("dp2_offsets", 2, "--softmax-type learnable", 2, marks=pytest.mark.slow),
        pytest.param("dp2_moe", 2, MOE, 2, marks=pytest.mark.long),
        pytest.param("tp2_dp2", 4, "--tensor-model-parallel-size 2 --sequence-parallel", 2, marks=pytest.mark.long),
    ],
)
def test_torch_fsdp2(lab, name, processes, layout, ranks_of_data):
    sharded, plain = with_and_without(
        lab,
        f"fsdp2_{name}",
        f"{TRAIN} {layout}",
        "--use-torch-fsdp2",
        processes=processes,
        environment=MANY_CONNECTIONS,
        at_once=False,
    )
    assert_same_training(sharded, plain, **FP32, s2_calls=s2_calls(ranks_of_data))
    assert {rank["wrapper"] for rank in sharded.ranks} == {FSDP_CLASSES["--use-torch-fsdp2"]}


def test_weights_of_torch_fsdp2_are_saved_and_loaded(lab):
    """The optimizer is not: refused, as Megatron would forget its step count."""
    folder = lab.folder / "fsdp2_saved"
    options = dict(processes=2, environment=MANY_CONNECTIONS)
    flags = "--use-torch-fsdp2 --train-iters 3"
    trained = watched(lab, "fsdp2_saving", flags, f"--save {folder} --save-interval 2 --no-save-optim", **options)
    loaded = watched(lab, "fsdp2_loading", flags, f"--load {folder} --ckpt-step 2 --no-load-optim", **options)
    assert loaded.run.losses == {3: trained.run.losses[3]}
    refused = lab.run("fsdp2_refused", flags, f"--save {folder} --save-interval 2", fails=True, **options)
    assert "add --no-save-optim" in refused.output


@pytest.mark.skipif(find_spec("einops") is None, reason="einops, which Megatron-FSDP imports, is not installed")
@pytest.mark.parametrize(
    "name, layout, ranks_of_data",
    [
        ("dp2", "", 2),
        ("cp2", f"{CP2} {ATTENTION_RECOMPUTE}", 1),
        pytest.param("offsets", "--softmax-type learnable", 2, marks=pytest.mark.slow),
    ],
)
def test_megatron_fsdp(lab, name, layout, ranks_of_data):
    # Without --calculate-per-token-loss it averages gradients by an operation that gloo does not have.
    sharded, plain = with_and_without(
        lab,
        f"megatron_fsdp_{name}",
        f"{TRAIN} --calculate-per-token-loss --use-distributed-optimizer {layout}",
        MEGATRON_FSDP,
        processes=2,
        environment=MANY_CONNECTIONS,
        at_once=False,
    )
    assert_same_training(sharded, plain, **FP32, s2_calls=s2_calls(ranks_of_data))
    assert {rank["wrapper"] for rank in sharded.ranks} == {FSDP_CLASSES["--use-megatron-fsdp"]}


@pytest.mark.parametrize(
    "name, processes, more, ranks_of_data",
    [
        ("ep2_packed_recompute", 2, f"--dataloader-inter-document-masking {ATTENTION_RECOMPUTE}", 2),
        pytest.param("ep2_cp2", 2, CP2, 1, marks=pytest.mark.long),
        pytest.param("ep2_pp2", 4, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2,
                     marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_overlapped_experts(lab, name, processes, more, ranks_of_data):
    """Megatron runs the layers of one microbatch's forward and of another's backward by turns: every bit stays."""
    overlapped, plain = with_and_without(
        lab,
        f"overlapped_{name}",
        f"{TRAIN} {MOE} {BF16} --expert-model-parallel-size 2 {more}",
        "--overlap-moe-expert-parallel-comm",
        processes=processes,
        environment=MANY_CONNECTIONS,
        at_once=False,
    )
    # A rank of the pipeline test has two of the four layers, one of them dense or none.
    calls = s2_calls(ranks_of_data) // (3 if "pp2" in name else 1)
    assert_same_training(overlapped, plain, losses=1e-7, norms=1e-6, s2_calls=calls)
    assert overlapped.least("schedule_plans") == s2_calls(ranks_of_data) // S2_LAYERS * (2 if "pp2" in name else 1)
    assert all(rank["schedule_plans"] == 0 for rank in plain.ranks)


@pytest.mark.long
def test_overlapped_experts_with_mtp(lab):
    """Not every bit stays, with Megatron's dense attention either: the first gradient norms differ by 2e-6."""
    config = lab.folder / "overlapped_mtp.yaml"
    config.write_text(lab.sparsity.read_text() + "mtp_layers: S\n")
    overlapped, plain = with_and_without(
        lab,
        "overlapped_ep2_mtp",
        f"{TRAIN} {MOE} {BF16} --expert-model-parallel-size 2 --mtp-num-layers 1 --s2-config {config}",
        "--overlap-moe-expert-parallel-comm",
        processes=2,
        environment=MANY_CONNECTIONS,
        at_once=False,
    )
    assert_same_training(overlapped, plain, losses=5e-3, norms=1e-2, s2_calls=s2_calls(2) // S2_LAYERS * 4)
    assert overlapped.run.losses[1] == plain.run.losses[1]
    assert overlapped.run.grad_norms[1] == pytest.approx(plain.run.grad_norms[1], rel=1e-5)
