"""Which of Megatron's flags make a training fit into its GPUs, by the forecast of memory.

The forecast knows GPTs. With experts their weights, gradients and optimizer are counted here, and what a token meets of
them is taken for one MLP that is as wide: nobody has measured it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.tools.forecast.flags import REFUSED, read_flags, reasons
from s2_megatron.tools.forecast.memory import GIB, memory, rank_parameters
from s2_megatron.tools.forecast.run import TrainingRun, dense_sparsity, missing_sizes, require_sizes, training_run

SHARE = 0.9  # of a GPU's memory: PyTorch reserves up to a tenth more than it allocates
MOST_NODES = 64
# (tensor-parallel ranks, whether all layers are recomputed), the faster first: recomputation is a third more work, and
# the matmuls of many ranks are narrow. Ranks of one node only.
CHOICES = ((1, False), (2, False), (1, True), (4, False), (2, True), (4, True), (8, False), (8, True))
STAGES = (1, 2, 4, 8)  # of a pipeline
RECOMPUTED = ("--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1")
SHARDED = "--use-distributed-optimizer"
# Experts in some layers alone, or beside others, are not counted here.
UNCOUNTED = {"--moe-layer-freq", "--moe-shared-expert-intermediate-size", "--moe-latent-size"}
OVERLAPPED = ("--overlap-grad-reduce", "--overlap-param-gather")


class Layout(NamedTuple):
    """flags: to add to a launch line. gib: what the fullest GPU holds then. nodes: how many it takes."""

    flags: tuple[str, ...]
    gib: float
    nodes: int


def peak_gib(
    words: Sequence[str], gpus: int, vocabulary: int | None = None, sparsity: ResolvedSparsity | None = None
) -> float | None:
    """GiB that are allocated on the fullest GPU at the largest moment; None where it cannot be counted.

    words: a launch line's flags. gpus: of the run. vocabulary: padded; None: as the flags say. sparsity: None: dense.
    Raises ValueError for sizes that do not divide each other as Megatron demands.
    """
    given = argparse.Namespace() if vocabulary is None else argparse.Namespace(vocab_size=vocabulary)
    args = read_flags(words, given)
    refused = [reason for reason in reasons(words, REFUSED) if not reason.startswith("--num-experts")]
    names = {word.partition("=")[0].replace("_", "-") for word in words}
    refused += sorted(names & UNCOUNTED)
    hybrid_experts = args.hybrid_layer_pattern is not None and bool(set(args.hybrid_layer_pattern) - set("*-|"))
    if refused or hybrid_experts or missing_sizes(args):
        return None
    require_sizes(args)
    run = training_run(args, dense_sparsity(args) if sparsity is None else sparsity, gpus)
    bytes_needed = memory(run).total if args.num_experts is None else _with_experts(run, args)
    return bytes_needed / GIB


def _with_experts(run: TrainingRun, args: argparse.Namespace) -> float:
    """Bytes of the fullest GPU of a GPT with experts in every layer. Raises ValueError for experts that the GPUs cannot
    share."""
    width, top = args.moe_ffn_hidden_size or run.ffn, args.moe_router_topk
    ranks = args.expert_model_parallel_size or 1
    split = args.expert_tensor_parallel_size or run.tp
    copies, rest = divmod(run.gpus, ranks * split * run.pp)
    if rest or args.num_experts % ranks:
        raise ValueError(
            f"--expert-model-parallel-size {ranks}: {run.gpus} processes in {run.pp} pipeline stages and "
            f"{args.num_experts} experts; expected a number that divides both; use 1"
        )
    seen = replace(run, ffn=top * width)
    found = memory(seen)
    moved = 2 * run.itemsize * run.rank_tokens * top * run.hidden // (run.tp if run.sequence_parallel else 1)
    kept = 1 if run.recompute == "full" else run.depth // run.pp  # layers whose moved tokens are in memory
    others = sum(size for part, size in found.parts.items() if part not in ("weights", "gradients", "optimizer"))
    without = rank_parameters(replace(run, ffn=0), found.stage)
    own = run.depth // run.pp * args.num_experts // ranks * (3 if run.gated else 2) * run.hidden * width // split
    stays, sharded = run.itemsize + 4, 12 if run.itemsize == 2 else 8
    shards = (run.dp * run.cp, copies) if run.distributed_optimizer else (1, 1)
    state = sum(count * (stays + sharded / parts) for count, parts in zip((without, own), shards))
    return state + others + moved * kept


def fitting(
    words: Sequence[str], gpus: int, gib: float, vocabulary: int | None = None,
    sparsity: ResolvedSparsity | None = None, *, engine: bool, nodes: int = 1,
) -> Layout | None:  # fmt: skip
    """The first layout with which a launch line fits; None where none does, or nothing can be counted.

    words, vocabulary, sparsity: as of peak_gib. gpus: of a node. gib: of a GPU. engine: whether Transformer Engine is
    there; without it Megatron resumes no distributed optimizer, and has no norms for sequence parallelism. nodes: at
    least so many.
    """
    while nodes <= MOST_NODES:
        for flags in _layouts(words, gpus, nodes, engine):
            try:
                found = peak_gib([*words, *flags], gpus * nodes, vocabulary, sparsity)
            except ValueError:  # heads, layers or experts that so many ranks cannot share
                continue
            if found is None:
                return None
            if found <= SHARE * gib:
                return Layout(flags, found, nodes)
        nodes *= 2
    return None


def _layouts(words: Sequence[str], gpus: int, nodes: int, engine: bool) -> Iterator[tuple[str, ...]]:
    """Flags to add to a line, the faster layouts first."""
    args = read_flags(words)
    heads, groups = args.num_attention_heads, args.num_query_groups if args.group_query_attention else None
    context, own_stages = args.context_parallel_size, args.pipeline_model_parallel_size
    virtual = any(word.startswith(("--num-layers-per-virtual", "--num-virtual-stages")) for word in words)
    # What tensor-parallel ranks share beside the heads, and the tokens where they share those.
    shared = [args.padded_vocab_size or 0, args.ffn_hidden_size or 0]
    for stages in (own_stages,) if virtual or args.hybrid_layer_pattern is not None else STAGES:
        for tensor, recomputed in CHOICES:
            model = tensor * stages * context
            if gpus % tensor or (gpus * nodes) % model or (groups or heads) % tensor:
                continue
            if any(size % tensor for size in shared) or (engine and args.seq_length % (tensor * context)):
                continue
            if recomputed and args.recompute_granularity is not None:  # which Megatron does not take twice
                continue
            if tensor > 1 and args.num_experts is not None and not engine:  # which Megatron takes with SP alone
                continue
            flags = [f"--tensor-model-parallel-size={tensor}"] * (tensor != args.tensor_model_parallel_size)
            flags += ["--sequence-parallel"] * (tensor > 1 and engine and not args.sequence_parallel)
            flags += [f"--pipeline-model-parallel-size={stages}"] * (stages != args.pipeline_model_parallel_size)
            if args.num_experts is not None:
                ranks = math.gcd(gpus, args.num_experts)
                if ranks > 1:
                    flags += [f"--expert-model-parallel-size={ranks}"] * (ranks != args.expert_model_parallel_size)
                    flags += ["--expert-tensor-parallel-size=1"] * (tensor > 1)
                    flags += ["--moe-token-dispatcher-type=alltoall"]
            if engine and gpus * nodes > 1:
                flags += [SHARDED] * (not args.use_distributed_optimizer)
                flags += [each for each in OVERLAPPED if gpus * nodes > model]
            flags += RECOMPUTED if recomputed else ()
            yield tuple(flag for flag in flags if flag not in words)
