"""A HybridModel in every layout computes what one process computes: losses, gradient norms, losses by position and the
logged loss of the experts' routers.

Attention stands in layers 0, 2, 3 and 5 of 7, so that an attention layer's number is another one among all layers, and
among those of its pipeline stage. Only one stage has experts.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from s2_megatron.megatron.records.loss_log import read_loss_log
from tests.megatron.conftest import MODEL, altered
from tests.megatron.features import (
    FSDP_CLASSES,
    MANY_CONNECTIONS,
    MEGATRON_FSDP,
    MOE,
    assert_same_training,
    with_and_without,
)
from tests.megatron.without_gpt import builds_mtp, require_mtp
from tests.tiers import mostly_slow

LAYERS = "*-**E*-"
STAGES, VIRTUAL_STAGES = "*-**E|*-", "*-|**|E*|-"
# Multi-token prediction, whose depths have the same layers with other attention.
DEPTHS = "/*E/*E"
WITHOUT_LAYERS = MODEL.replace("--num-layers 4", "")  # Megatron counts the pattern's
HYBRID = f"{WITHOUT_LAYERS} {MOE} --moe-router-pre-softmax"
FIRST, LAST = 2, 5  # iterations: of the checkpoint, and of a run
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
PP2, EP2 = "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"
CP2 = "--context-parallel-size 2 --s2-cp-comm-type"
FULL = "--recompute-granularity full --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
KEEP = "--s2-keep-attention-output"
PACKED = "--dataloader-inter-document-masking"
LAYOUTS = {
    "dp2_ep2": (2, LAYERS, f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {EP2}"),
    "tp2_sp_ep2": (2, LAYERS, f"{TP2} {EP2}"),
    "tp2_sp_cp2_ep2": (4, LAYERS, f"{TP2} {EP2} {CP2} all_gather"),
    "tp2_sp_pp2_vpp2": (4, VIRTUAL_STAGES, f"{TP2} {PP2} {FULL} uniform --recompute-num-layers 1"),
    "pp2": (2, STAGES, f"{PP2} {FULL} block --recompute-num-layers 2"),
    "cp2": (2, LAYERS, f"{CP2} all_gather sparse a2a sparse --s2-cp-keep-received {SELECTIVE} core_attn {KEEP}"),
    "cp2_pp2_vpp2": (4, VIRTUAL_STAGES, f"{CP2} sparse sparse all_gather a2a {PP2}"),
    "full_keep": (1, LAYERS, f"{FULL} uniform --recompute-num-layers 2 {KEEP}"),
    "selective": (1, LAYERS, f"{SELECTIVE} core_attn mlp"),
    "packed_tp2_sp": (2, LAYERS, f"{PACKED} {TP2}"),
    "packed_pp2_vpp2": (2, VIRTUAL_STAGES, f"{PACKED} {PP2} {FULL} uniform --recompute-num-layers 1 {KEEP}"),
    "packed_cp2": (2, LAYERS, f"{PACKED} {CP2} all_gather"),
    "packed_cp2_a2a": (2, LAYERS, f"{PACKED} {CP2} a2a {SELECTIVE} core_attn {KEEP}"),
}
# SGD: Adam makes a step of the rounding of gradients of 1e-8, here of what the depths hand down.
MTP = "--mtp-num-layers 2 --optimizer sgd --lr 0.05 --min-lr 0.05"
MTP_LAYOUTS = {
    "dp2_ep2": (2, LAYERS, f"--overlap-grad-reduce {SELECTIVE} core_attn mlp {EP2}"),
    "tp2_sp_pp2_vpp2": (4, VIRTUAL_STAGES, f"{TP2} {EP2} {PP2} {FULL} uniform --recompute-num-layers 1 {KEEP}"),
    "packed_tp2_sp": (2, LAYERS, f"{PACKED} {TP2}"),
}


class Trained(NamedTuple):
    """Of a run: what it printed, its records by iteration and by evaluation, the logged losses of the routers."""

    output: str
    records: dict
    evaluations: dict
    router_losses: list[float]


@pytest.fixture(scope="module")
def trained(lab):
    """Trains from FIRST to LAST in some processes. From weights alone: without Transformer Engine or Apex Megatron
    loads no optimizer into its distributed one, nor into one of another number of local experts."""
    config = lab.folder / "hybrid_mtp.yaml"
    config.write_text(lab.sparsity.read_text() + "mtp_layers: SD\n")
    models = {False: ("", ""), True: (DEPTHS, f"{MTP} --s2-config {config}")}

    @cache
    def start(mtp: bool) -> Path:
        (depths, more), folder = models[mtp], lab.folder / f"hybrid_layouts_{mtp}"
        given = f"--hybrid-layer-pattern {LAYERS}{depths} --train-iters {FIRST} --save {folder} {more}"
        lab.run(f"hybrid_start_{mtp}", f"{given} --save-interval {FIRST}", model=HYBRID)
        return folder

    def run(name: str, processes: int, layers: str, flags: str, mtp: bool = False, **options) -> Trained:
        depths, more = models[mtp]
        given = f"""--hybrid-layer-pattern {layers}{depths} --load {start(mtp)} --no-load-optim --no-load-rng {more}
            --override-opt-param-scheduler --train-iters {LAST} --s2-position-loss 4 --eval-iters 1
            --eval-interval {LAST - 1} {flags}"""
        output = lab.run(f"hybrid_{name}", given, processes=processes, model=HYBRID, **options).output
        logged = [float(value) for value in re.findall(r"load_balancing_loss: (\S+)", output)]
        return Trained(output, *read_loss_log(lab.folder / f"hybrid_{name}.jsonl"), logged)

    return run


@pytest.fixture(scope="module")
def alone(trained):
    """One process of whole samples, or of packed documents."""

    @cache
    def run(flags: str, mtp: bool = False) -> Trained:
        return trained(f"alone_{bool(flags)}_{mtp}", 1, LAYERS, flags, mtp)

    return run


def assert_equal(run: Trained, expected: Trained) -> None:
    assert sorted(run.records) == list(range(FIRST + 1, LAST + 1)) and run.evaluations
    for found, wanted in ((run.records, expected.records), (run.evaluations, expected.evaluations)):
        for when, record in found.items():
            positions = [key for key in wanted[when] if "by position/" in key]
            assert positions
            for key in ("lm loss", *(["grad_norm"] if "grad_norm" in wanted[when] else []), *positions):
                assert record[key] == pytest.approx(wanted[when][key], rel=0, abs=1e-5), (when, key)
    assert len(run.router_losses) == len(run.records)
    assert run.router_losses == pytest.approx(expected.router_losses, rel=2e-6)


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, "dp2_ep2", "tp2_sp_pp2_vpp2", "cp2"))
def test_layout_equals_one_process(trained, alone, name):
    processes, layers, flags = LAYOUTS[name]
    run = trained(name, processes, layers, flags)
    assert_equal(run, alone(PACKED if PACKED in flags else ""))
    # The plan, DSSS, and where its layers stand, those of other stages too.
    assert re.search(r"│ 0 +│ 0 +│ D +│ dense", run.output) and re.search(r"│ 2 +│ 3 +│ S +│ s2", run.output)
    for text in ("S2, all_gather", "S2, sparse", "S2, a2a") if name == "cp2" else ():
        assert text in run.output


@pytest.mark.slow
@pytest.mark.parametrize("name", MTP_LAYOUTS)
def test_multi_token_prediction(trained, alone, name):
    require_mtp()
    processes, layers, flags = MTP_LAYOUTS[name]
    run = trained(f"mtp_{name}", processes, layers, flags, mtp=True)
    assert_equal_depths(run, alone(PACKED if PACKED in flags else "", mtp=True))


@pytest.mark.slow
def test_multi_token_prediction_over_contexts(trained, alone):
    """Every exchange computes the same. Beside one process only the first loss does, because Megatron divides the loss
    of a depth by each rank's own number of targets, and the rank of the sequence's end has fewer."""
    require_mtp()
    gathered = trained("mtp_cp2_all_gather", 2, LAYERS, f"{CP2} all_gather", mtp=True)
    mixed = f"{CP2} all_gather a2a all_gather sparse {SELECTIVE} core_attn {KEEP}"
    assert_equal_depths(trained("mtp_cp2", 2, LAYERS, mixed, mtp=True), gathered)
    first, alone = gathered.records[FIRST + 1], alone("", mtp=True).records[FIRST + 1]
    assert first["lm loss"] == pytest.approx(alone["lm loss"], rel=0, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


def assert_equal_depths(run: Trained, expected: Trained) -> None:
    assert_equal(run, expected)
    for depth in (1, 2):
        assert len(losses_of(run, depth)) == len(run.records)
        assert losses_of(run, depth) == pytest.approx(losses_of(expected, depth), rel=2e-6)


def losses_of(run: Trained, depth: int) -> list[float]:
    """The loss of a depth of multi-token prediction, of each iteration."""
    return [float(value) for value in re.findall(rf"mtp_{depth} loss: (\S+)", run.output)]


@pytest.mark.slow
def test_packing_changes_the_attention(alone):
    """The control of the comparisons above: with one document a sample the losses are others."""
    assert abs(alone(PACKED).records[LAST]["lm loss"] - alone("").records[LAST]["lm loss"]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mutation, name", [("head_offset", "tp2_sp_ep2"), ("layer_number", "pp2")])
def test_a_mistake_would_show(trained, alone, mutation, name):
    """The comparisons fail when a rank takes another rank's heads, or a stage counts its attention layers from 0."""
    run = trained(f"mutated_{mutation}", *LAYOUTS[name], **altered(mutation))
    far = [abs(run.records[step]["lm loss"] - record["lm loss"]) for step, record in alone("").records.items()]
    assert max(far) > 1e-4, far


@pytest.mark.slow
def test_resumes_in_its_own_and_in_other_layouts(lab):
    """With the optimizer, from TP 2 to itself, bit for bit, to pipeline stages by `|`, and to those that Megatron
    cuts where the pattern has none. The last stage shares the embeddings of the first one."""
    folder, layers = lab.folder / "hybrid_resumed", "*-**-*--"
    tp2 = "--tensor-model-parallel-size 2"

    def run(name, pattern, flags):
        flags = f"--hybrid-layer-pattern {pattern} --train-iters 5 {flags}"
        tied = WITHOUT_LAYERS.replace("--untie-embeddings-and-output-weights", "")
        return lab.run(f"hybrid_{name}", flags, processes=2, model=tied)

    whole = run("tp2", layers, f"{tp2} --save {folder} --save-interval 3")
    load = f"--load {folder} --ckpt-step 3"
    again = run("tp2_again", layers, f"{tp2} {load}")
    assert again.losses == {step: whole.losses[step] for step in (4, 5)}
    assert again.grad_norms == {step: whole.grad_norms[step] for step in (4, 5)}
    for name, pattern in (("cut_in_two", layers), ("cut_in_four", "*-*|*-|*-|-")):
        other = run(name, pattern, f"{PP2} {load}")
        for step in (4, 5):
            assert other.losses[step] == pytest.approx(whole.losses[step], rel=0, abs=1e-5), name
            assert other.grad_norms[step] == pytest.approx(whole.grad_norms[step], rel=0, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("flag", FSDP_CLASSES)
def test_fully_sharded(lab, flag):
    """With multi-token prediction, where Megatron can build it."""
    if flag == "--use-megatron-fsdp" and find_spec("einops") is None:
        pytest.skip("einops, which Megatron-FSDP imports, is not installed")
    config = lab.folder / "hybrid_sharded.yaml"
    config.write_text(lab.sparsity.read_text() + "mtp_layers: SD\n")
    recompute = f"{FULL} uniform --recompute-num-layers 1 {KEEP}"
    depths, s2_layers = (f"{DEPTHS} --mtp-num-layers 2", 4) if builds_mtp() else ("", 3)
    # Without --calculate-per-token-loss Megatron-FSDP averages gradients by an operation that gloo does not have.
    both = "--calculate-per-token-loss --use-distributed-optimizer" if flag == "--use-megatron-fsdp" else ""
    sharded, plain = with_and_without(
        lab,
        f"hybrid_{flag.strip('-')}",
        f"--hybrid-layer-pattern {LAYERS}{depths} --s2-config {config} --train-iters 4 {both} {recompute}",
        MEGATRON_FSDP if both else flag,
        processes=2,
        model=HYBRID,
        environment=MANY_CONNECTIONS,
        at_once=False,
    )
    assert_same_training(sharded, plain, losses=1e-5, norms=1e-5, s2_calls=4 * 2 * s2_layers)
    assert {rank["wrapper"] for rank in sharded.ranks} == {FSDP_CLASSES[flag]}


@pytest.mark.slow
def test_conversations_that_are_cut_one_by_one(trained, conversations):
    """--sft under context parallelism, where every conversation is padded and cut by itself."""
    path, tokenizer, stand_in = conversations
    flags = f"""--sft --sft-tokenizer-prompt-format default --tokenizer-type SFTTokenizer --tokenizer-model {tokenizer}
        --data-path {path} --seq-length 256 --max-position-embeddings 256 --split 80,20,0"""
    options = dict(python_path=stand_in, **altered("padded"))
    one = trained("sft", 1, LAYERS, flags, **options)
    assert_equal(trained("sft_cp2", 2, LAYERS, f"{flags} {CP2} a2a", **options), one)
