"""Which flags make a model fit, and what `check` says of one that does not: sizes of public models, on 80 GB GPUs."""

import math
import shutil
from argparse import Namespace

import pytest
import torch

from s2_megatron.megatron.host import cuda_on_cpu
from s2_megatron.tools import room
from s2_megatron.tools.forecast import fit
from s2_megatron.tools.forecast.memory import GIB
from s2_megatron.tools.hf import checkpoint_model, launch_text, logit_check
from s2_megatron.tools.hf.weights import Shape
from s2_megatron.tools.launch_line import parse_launch_line

H100 = 79.1
SHARED = (
    "--group-query-attention --swiglu --normalization=RMSNorm --disable-bias-linear --position-embedding-type=rope "
    "--hidden-dropout=0 --bf16 --micro-batch-size=1 --global-batch-size=64 --untie-embeddings-and-output-weights "
    "--kv-channels=128 "
)
LLAMA_8B = SHARED + (
    "--num-layers=32 --hidden-size=4096 --ffn-hidden-size=14336 --num-attention-heads=32 --num-query-groups=8 "
    "--vocab-size=128256"
)
QWEN_32B = SHARED + (
    "--num-layers=64 --hidden-size=5120 --ffn-hidden-size=25600 --num-attention-heads=64 --num-query-groups=8 "
    "--vocab-size=151936"
)
QWEN_30B_A3B = SHARED + (
    "--num-layers=48 --hidden-size=2048 --ffn-hidden-size=6144 --num-attention-heads=32 --num-query-groups=4 "
    "--vocab-size=151936 --num-experts=128 --moe-ffn-hidden-size=768 --moe-router-topk=8"
)
SP = "--sequence-parallel"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1"
EP, ALL_TO_ALL = "--expert-model-parallel-size=8", "--moe-token-dispatcher-type=alltoall"
EXPERTS = f"{EP} --expert-tensor-parallel-size=1 {ALL_TO_ALL}"


@pytest.mark.parametrize("model, length, engine, nodes, flags", [
    (LLAMA_8B, 8192, True, 1, f"--tensor-model-parallel-size=2 {SP} {OVERLAPPED}"),
    (LLAMA_8B, 8192, False, 1, "--tensor-model-parallel-size=4"),
    (QWEN_30B_A3B, 8192, False, 2, f"--pipeline-model-parallel-size=2 {EP} {ALL_TO_ALL} {FULL}"),
    (LLAMA_8B, 32768, True, 1, f"--tensor-model-parallel-size=4 {SP} {OVERLAPPED}"),
    (QWEN_32B, 8192, True, 1, f"--tensor-model-parallel-size=8 {SP} --use-distributed-optimizer {FULL}"),
    (QWEN_32B, 32768, True, 2, f"--tensor-model-parallel-size=8 {SP} {OVERLAPPED} {FULL}"),
    (QWEN_30B_A3B, 8192, True, 1, f"--tensor-model-parallel-size=4 {SP} {EXPERTS} {OVERLAPPED} {FULL}"),
    (QWEN_30B_A3B, 32768, True, 2, f"--tensor-model-parallel-size=2 {SP} {EXPERTS} {OVERLAPPED} {FULL}"),
])  # fmt: skip
def test_the_first_layout_that_fits(model, length, engine, nodes, flags):
    words = [*model.split(), f"--seq-length={length}"]
    found = fit.fitting(words, 8, H100, engine=engine)
    assert " ".join(found.flags) == flags and found.nodes == nodes
    assert found.gib <= fit.SHARE * H100 and found.gib == fit.peak_gib([*words, *flags.split()], 8 * nodes)
    assert fit.fitting([*words, *flags.split()], 8, H100, engine=engine, nodes=nodes).flags == ()


@pytest.mark.parametrize("layout, gpus", [
    ("", 1), ("--use-distributed-optimizer", 8),
    ("--tensor-model-parallel-size=2 --sequence-parallel --pipeline-model-parallel-size=2", 8),
    ("--expert-model-parallel-size=8 --use-distributed-optimizer", 16),
    ("--tensor-model-parallel-size=2 --expert-model-parallel-size=4 --expert-tensor-parallel-size=1", 8),
])  # fmt: skip
def test_weights_and_optimizer_of_experts_are_megatrons_count(layout, gpus):
    """Of what stays on the fullest GPU; what a step adds, is little on a short sequence."""
    from s2_megatron.tools.hf.checkpoint_model import quiet

    with quiet():
        from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    words = [*QWEN_30B_A3B.split(), "--seq-length=64", *layout.split()]
    args = fit.read_flags(words)
    unset = dict.fromkeys(("moe_shared_expert_intermediate_size", "mtp_num_layers", "moe_latent_size"))
    more = dict(
        moe_layer_freq=1, normalization="RMSNorm", multi_latent_attention=False, add_bias_linear=False,
        padded_vocab_size=151936, world_size=gpus, expert_tensor_parallel_size=args.expert_tensor_parallel_size
        or args.tensor_model_parallel_size,
        data_parallel_size=gpus // args.tensor_model_parallel_size // args.pipeline_model_parallel_size,
    )  # fmt: skip
    expected = compute_weight_and_optimizer_memory(Namespace(**vars(args) | unset | more))
    assert math.isclose(fit.peak_gib(words, gpus, 151936) * GIB, expected, rel_tol=0.02)


def test_what_cannot_be_counted_is_not_guessed():
    words = [*LLAMA_8B.split(), "--seq-length=8192"]
    assert fit.peak_gib([*words, "--use-megatron-fsdp"], 8) is None
    assert fit.fitting([*words, "--multi-latent-attention"], 8, H100, engine=True) is None
    assert fit.peak_gib([word for word in words if not word.startswith("--vocab")], 8) is None
    assert fit.peak_gib([*words, "--hybrid-layer-pattern=*E*E"], 8) is None


def notes(model, launch="torchrun --nproc-per-node 8", gib=H100, length=8192, **args):
    line = parse_launch_line([f"{launch} pretrain_gpt_s2.py {model} --seq-length {length}"])
    given = dict(world_size=line.world_size(), padded_vocab_size=None, transformer_impl="transformer_engine") | args
    return room.memory_notes(line, Namespace(**given), None, gib)


def test_a_warning_names_the_flags():
    (note,) = notes(LLAMA_8B)
    assert note == (
        "WARNING: the fullest GPU needs about 175 GiB and has 79: the run runs out of memory; add "
        f"--tensor-model-parallel-size=2 {SP} {OVERLAPPED} (then about 54 GiB)"
    )
    assert notes(f"{LLAMA_8B} --tensor-model-parallel-size=2 {SP} --use-distributed-optimizer") == []
    assert notes(LLAMA_8B, gib=200) == [] and notes(LLAMA_8B, gib=None) == []  # no GPU here
    assert notes(f"{LLAMA_8B} --tensor-model-parallel-size 3") == []  # of which nothing is known
    (note,) = notes(LLAMA_8B, gib=180)
    assert "the run may run out of memory, for PyTorch reserves more; add" in note
    (note,) = notes(QWEN_32B, "torchrun --nproc-per-node 1")
    assert " on 16 nodes (then about " in note
    (note,) = notes(QWEN_32B, gib=1)
    assert note.endswith("no layout that fits is known; take shorter sequences, or larger GPUs")


@pytest.mark.parametrize("flags, length", [
    ("--padded-vocab-size=128257", 8192), ("--ffn-hidden-size=14331", 8192), ("", 8191),
    ("--recompute-activations", 8192),
])  # fmt: skip
def test_no_rank_gets_a_part_of_a_row(flags, length):
    """Nor are layers recomputed twice: tensor-parallel ranks, or recomputation of its own, are left as they are."""
    (note,) = notes(f"{LLAMA_8B} {flags}", length=length)
    assert "tensor-model-parallel" not in note or flags == "--recompute-activations"
    assert "recompute-granularity" not in note or flags != "--recompute-activations"


def test_virtual_stages_keep_their_number_of_stages():
    line = f"{LLAMA_8B} --pipeline-model-parallel-size=4 --num-layers-per-virtual-pipeline-stage=1"
    (note,) = notes(line, length=65536)
    assert "--tensor-model-parallel-size=" in note and "--pipeline-model-parallel-size" not in note


def test_experts_in_some_layers_are_not_counted():
    for flag in ("--moe-layer-freq=4", "--moe-shared-expert-intermediate-size=512", "--moe-latent-size=64"):
        line = f"{LLAMA_8B} --num-experts=8 {flag} --seq-length=8192"
        assert notes(line) == []
        layout, said = launch_text.layout_of(line.split(), 128256, launch_text.Gpus(8, H100))
        assert layout == [] and "the memory of this model is not forecast" in said


def test_the_gpus_of_this_machine(monkeypatch):
    assert room.gpus_here() == (0, None) or torch.cuda.is_available()
    monkeypatch.setattr(cuda_on_cpu, "compute_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Namespace(total_memory=H100 * GIB))
    assert launch_text.gpus_of(None) == (8, H100, "")
    assert launch_text.gpus_of("4xA100 40GB") == (4, 39.4, "A100 40GB") and launch_text.gpus_of("4xH100").engine


def test_a_disk_for_all_checkpoints(monkeypatch, tmp_path):
    from s2_megatron.tools.hf.checkpoint_model import quiet

    with quiet():
        from megatron.training import theoretical_memory_usage as usage

    monkeypatch.setattr(usage, "compute_weight_and_optimizer_memory", lambda args: 18 * 8e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Namespace(free=1e12))
    args = Namespace(
        save=str(tmp_path), padded_vocab_size=1, bf16=True, fp16=False, no_save_optim=False, save_interval=100,
        train_iters=1050, save_retain_interval=None,
    )  # fmt: skip
    (note,) = room.disk_notes(args)
    assert (
        "takes about 112.00 GB, and it keeps up to 11; add --save-retain-interval 1100 to keep the newest alone, which "
        "takes room for two, or give a larger --save-interval" in note
    )
    (note,) = room.disk_notes(Namespace(**vars(args) | dict(save_retain_interval=100)))
    assert "it keeps up to 11; give a larger --save-interval" in note
    for changed in (dict(save_retain_interval=1100), dict(save_interval=200), dict(no_save_optim=True)):
        assert room.disk_notes(Namespace(**vars(args) | changed)) == []
    for iteration in range(3):
        (tmp_path / f"iter_{iteration:07}").mkdir()
    assert room.disk_notes(args) == []  # eight are to come


def test_a_model_for_which_one_gpu_is_too_small(monkeypatch, tmp_path):
    """choose-dense and generate are one process; import-hf compares as many layers as the GPU holds, too."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (80 * GIB, 81 * GIB))
    assert checkpoint_model.free_bytes(torch.device("cuda")) == 80 * GIB
    assert 0 < checkpoint_model.free_bytes(torch.device("cpu")) != 80 * GIB
    sizes = dict(head_dim=128, num_kv_heads=8, qkv_bias=False, qk_norm=True, tied=False)
    qwen = Shape(64, 5120, 25600, 64, vocab_size=151936, padded_vocab_size=151936, **sizes)
    llama = Shape(80, 8192, 28672, 64, vocab_size=128256, padded_vocab_size=128256, **sizes)
    monkeypatch.setattr(cuda_on_cpu, "compute_device", lambda: torch.device("cuda"))
    checkpoint_model._require_room(tmp_path, qwen, torch.bfloat16)
    with pytest.raises(ValueError, match=r"take 131\.4 GiB in bfloat16, and its GPU has 80\.0 free; .*403 GiB in"):
        checkpoint_model._require_room(tmp_path, llama, torch.bfloat16)
    monkeypatch.setattr(checkpoint_model, "free_bytes", lambda device: (4 if device.type == "cuda" else 999) * GIB)
    said = logit_check.compare_logits(tmp_path, {}, tmp_path, qwen, [], None)
    assert said == "not compared with transformers: one layer of the model takes too much (memory) here"
    monkeypatch.setattr(cuda_on_cpu, "compute_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(checkpoint_model, "free_bytes", lambda device: 100 * GIB)
    said = r"184\.\d GiB in float32 with 62\.\d while they are loaded, and this machine has 100\.0 free; expected room"
    with pytest.raises(ValueError, match=said):
        checkpoint_model._require_room(tmp_path, qwen, torch.float32)
