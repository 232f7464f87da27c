"""Context parallelism end to end: every layout trains as one process does, from one checkpoint, alone and mixed with
TP, SP, PP, DP and EP."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.megatron.records.report import report_context_parallel
from s2_megatron.megatron.settings import S2Run, S2Settings
from s2_megatron.patterns.ranges import make_range_pattern
from tests.megatron.conftest import altered
from tests.tiers import mostly_slow

CP2 = "--context-parallel-size 2"
LAYOUTS = {
    "types": (2, f"{CP2} --s2-cp-comm-type all_gather sparse a2a sparse --s2-cp-keep-received"),
    "recompute": (
        2,
        f"{CP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --micro-batch-size 2",
    ),
    "cp4": (4, "--context-parallel-size 4"),
    "tp2_sp": (4, f"{CP2} --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2_vpp2": (4, f"{CP2} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall"
WEIGHTS_ONLY = "--no-load-optim --no-load-rng"
PACKED = "--dataloader-inter-document-masking --s2-cp-comm-type"
SPARSE = "all_gather sparse sparse sparse"  # the first layer is dense, with keys all over a document


@pytest.fixture(scope="session")
def resumed(lab, start, baseline):
    def run(name, processes, flags, **options):
        return lab.run(
            f"context_{name}", f"--train-iters 20 --load {start} --ckpt-step 10 {flags}", processes=processes, **options
        )

    return run


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, "types"))
def test_layout_equals_one_process(resumed, baseline, same_training, name):
    run = resumed(name, *LAYOUTS[name], torchrun=name == "recompute")
    same_training(run, baseline)
    if name == "types":
        for text in ("S2, all_gather", "S2, sparse", "S2, a2a", "S2: attention work of 2 context-parallel ranks"):
            assert text in run.output


@pytest.mark.slow
def test_experts_and_data_parallel(lab, same_training):
    """CP 2 x DP 2 with the experts spread over two ranks."""
    folder = lab.folder / "context_moe"
    lab.run("context_moe_start", f"{MOE} --train-iters 2 --save {folder} --save-interval 2")
    flags = f"{MOE} --train-iters 12 --lr-decay-iters 12 --load {folder} {WEIGHTS_ONLY} --override-opt-param-scheduler"
    one_process = lab.run("context_moe", flags)
    same_training(lab.run("context_moe_ep2", f"{flags} {CP2} --expert-model-parallel-size 2", processes=4), one_process)


def test_a_mistake_would_show(resumed, baseline, same_training):
    """The comparison fails when a rank takes received blocks for one another."""
    run = resumed("mutated", 2, f"{CP2} --exit-interval 12", **altered("received_slots"))
    assert sorted(run.losses) == [11, 12]
    with pytest.raises(AssertionError, match="differ by"):
        same_training(run, baseline, steps=2)


@pytest.mark.slow
def test_deterministic_mode_repeats_every_bit(resumed):
    """Two runs over all three exchanges with Megatron's flag, under which torch refuses what it knows to be
    unrepeatable."""
    flags = f"{CP2} --s2-cp-comm-type all_gather sparse a2a sparse --deterministic-mode"
    first, second = (resumed(f"deterministic_{number}", 2, flags) for number in range(2))
    assert sorted(first.losses) == list(
        range(11, 21)
    )  # a difference of a bit in one gradient shows after some steps only
    assert first.losses == second.losses
    assert first.grad_norms == second.grad_norms


def run_with_a_bad_rank(lab, name, flags, **how):
    """The output of a job of two ranks under torchrun that must fail, and be over long before Megatron's ten
    minutes."""
    options = dict(processes=2, fails=True, torchrun=True, **altered("dying", **how))
    start = time.monotonic()
    output = lab.run(f"context_{name}", f"--train-iters 20 {CP2} {flags}", **options).output
    seconds = time.monotonic() - start
    assert seconds < 400, f"{seconds:.0f} s"
    return output


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_and_is_named(lab):
    output = run_with_a_bad_rank(lab, "dying", "", AT_EXCHANGE="30")
    assert re.search(r"rank +: 1 ", output)
    assert re.search(r"exitcode +: 13 ", output)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_and_is_named(lab):
    """After the time that the user allows, which Megatron applies from the second iteration on (an iteration has 48
    exchanges)."""
    flags = "--distributed-timeout-seconds-after-init 8"
    output = run_with_a_bad_rank(lab, "hanging", flags, AT_EXCHANGE="80", HANGS="1")
    assert "rank 0: context-parallel exchange failed; did not come: rank 1" in output
    assert "rank 1: context-parallel exchange failed" not in output


@pytest.fixture(scope="session")
def packed_in_one_process(resumed):
    return resumed("packed", 1, "--dataloader-inter-document-masking")


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["all_gather", "a2a --micro-batch-size 2"])
def test_rows_cut_as_one_sequence(resumed, packed_in_one_process, baseline, same_training, flags):
    """Inter-document masking: documents of any length lie across the ranks; RoPE, loss and attention are those of one
    process."""
    run = resumed(f"packed_{flags.split()[0]}", 2, f"{CP2} {PACKED} {flags}")
    same_training(run, packed_in_one_process)
    assert abs(packed_in_one_process.losses[11] - baseline.losses[11]) > 1e-3, "packing must change the attention"


@pytest.mark.slow
def test_documents_cut_by_themselves(lab, conversations, windows, same_training):
    """Supervised fine-tuning, whose conversations Megatron pads for the cut (and labels then differ, so one process
    gets the same pads)."""
    path, tokenizer, stand_in = conversations
    sft = f"""--sft --sft-tokenizer-prompt-format default --tokenizer-type SFTTokenizer
        --tokenizer-model {tokenizer} --data-path {path} --split 80,20,0 --train-iters 4 --seq-length 256
        --max-position-embeddings 256 --eval-iters 1 --eval-interval 4"""
    options = dict(python_path=stand_in, **altered("padded"))
    for name, flags, comm_types in (("", sft, ("a2a", "all_gather")), ("_windows", f"{sft} {windows}", (SPARSE,))):
        one_process = lab.run(f"context_sft{name}", flags, **options)
        for comm_type in comm_types:
            flags_of_run = f"{flags} {CP2} --s2-cp-comm-type {comm_type}"
            run = lab.run(f"context_sft{name}_{comm_type.replace(' ', '_')}", flags_of_run, processes=2, **options)
            same_training(run, one_process, steps=4)
            assert run.grad_norms == pytest.approx(one_process.grad_norms, rel=1e-5)
            assert run.evaluations == pytest.approx(one_process.evaluations, abs=1e-5) and run.evaluations


RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
WINDOWS = """block_size: 16
layers: DSTT
specs:
  S: {window: 21, sink_tokens: 3}
  T: {window: [5, 40], sink_tokens: 18}
"""


@pytest.fixture(scope="session")
def windows(lab):
    """The flag for a model of windows and sinks."""
    path = lab.folder / "windows.yaml"
    path.write_text(WINDOWS)
    return f"--s2-config {path}"


@pytest.fixture(scope="session")
def packed_windows(lab, windows):
    """windows(name, flags, processes) -> a run with packed documents and learnable softmax offsets."""
    common = f"{windows} --dataloader-inter-document-masking --softmax-type learnable --train-iters 8"
    return lambda name, processes, flags: lab.run(f"windows_{name}", f"{common} {flags}", processes=processes)


@pytest.mark.parametrize(
    "name, flags",
    [("sparse", ""), pytest.param("kept", f"{RECOMPUTE} --s2-keep-attention-output", marks=pytest.mark.slow)],
)
def test_windows_of_packed_documents_by_sparse(packed_windows, same_training, name, flags):
    """A plan for each microbatch; both chunks of a rank hold pieces of documents, and a document goes over several
    chunks."""
    one_process = packed_windows(f"alone_{name}", 1, flags)
    run = packed_windows(name, 2, f"{CP2} --s2-cp-comm-type {SPARSE} {flags} --micro-batch-size 2")
    same_training(run, one_process, steps=8)
    assert "a rank receives at most" in run.output


def test_what_is_said_of_packed_documents_by_sparse(capsys):
    """The most that a rank receives; a dense layer that these kernels compute is refused when the run starts."""
    window = make_range_pattern(block_size=16, num_heads=4, num_kv_heads=2, ranges=(), window=21, sink_tokens=3)
    layers = LayerSparsity("D", None), LayerSparsity("S", window)
    sparsity = ResolvedSparsity(layers, (), None, block_size=16, num_heads=4, num_kv_heads=2, seq_length=256)
    transformer = SimpleNamespace(
        tensor_model_parallel_size=2, context_parallel_size=2, bf16=True, fp16=False, multi_latent_attention=False,
        kv_channels=16 * 1024,
    )  # fmt: skip
    settings = S2Settings(cp_comm_types=("all_gather", "sparse"), packed=True, packed_cut="sequence")
    report_context_parallel(S2Run(sparsity, settings), [True, True], transformer)
    # Two chunks, 20 tokens before and 3 first ones, K and V of a KV head of 16 Ki numbers in bf16.
    assert f"at most {2 * 23 * 2 * 16 * 1024 * 2 / 2**20:.1f} MiB in the forward" in capsys.readouterr().err
    run = S2Run(sparsity, replace(settings, cp_comm_types=("sparse",), packed_cut="document"))
    report_context_parallel(run, [False, True], transformer)
    assert "MiB of each document" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"layer 0 .*is dense.*--s2-cp-comm-type all_gather"):
        report_context_parallel(run, [True, True], transformer)


# name: (processes, flags, launches of the attention in one forward pass of the layers that a rank holds, how many of
# them are `sparse`, which launches twice with the reference: for the own keys and for the received ones)
STORED = {
    "selective": (1, "--recompute-granularity selective --recompute-modules core_attn", 4, 0),
    "types": (
        2,
        f"{CP2} {RECOMPUTE} --s2-cp-comm-type all_gather sparse a2a sparse --s2-cp-keep-received",
        1 + 2 + 1 + 2,
        2,
    ),
    "pp2_vpp2": (4, f"{LAYOUTS['pp2_vpp2'][1]} {RECOMPUTE}", 2 * 2, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_a_stored_result_saves_the_second_forward(resumed, name):
    """Every rank launches one forward an attention where plain recomputation launches two; every bit of the losses;
    nothing left over."""
    processes, flags, launches, sparse = STORED[name]
    flags += " --exit-interval 13 --eval-iters 1 --eval-interval 12 --s2-dense-core s2"
    runs = [
        resumed(f"stored_{name}_{number}", processes, f"{flags} {more}", **altered("counted"))
        for number, more in enumerate(("", "--s2-keep-attention-output"))
    ]
    assert sorted(runs[0].losses) == [11, 12, 13]
    assert runs[0].losses == runs[1].losses
    assert runs[0].grad_norms == runs[1].grad_norms
    # Passes of a rank: three steps and one evaluation of four micro-batches each.
    steps, evaluation = 3 * 4, 4
    # A backward needs the received blocks: those of the second forward, where --s2-cp-keep-received stored them, or an
    # exchange of its own.
    plain_backward = 0 if "keep-received" in flags else 1
    for run, forwards, exchanges in zip(runs, (2, 1), (2 + plain_backward, 2)):
        expected = (launches * (steps * forwards + evaluation), sparse * (steps * exchanges + evaluation), 0)
        found = re.findall(r"attention forwards: (\d+), exchanges: (\d+), results left over: (\d+)", run.output)
        assert [tuple(map(int, rank)) for rank in found] == [expected] * processes
