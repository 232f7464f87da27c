"""Refused: combinations of Megatron's features with S2-Attention whose test on a GPU failed, or has not been run.

The tests of tests/megatron/test_gpu_features.py take this table away (tests/megatron/lifted.py): what passes there
leaves the table, and what has no test there needs one first. Files and lines are those of megatron-core 0.19.2.
"""

from __future__ import annotations

from argparse import Namespace

from s2_megatron.megatron.refusal import Refusal, is_set
from s2_megatron.megatron.refusals.execution import (
    graphs_with_attention,
    is_padded,
    module_names,
    whole_iterations,
)


def _graphs(args: Namespace) -> bool:
    """Whether S2's op is captured in a graph of Megatron's, of whichever kind."""
    return graphs_with_attention(args) or whole_iterations(args)


def _graphs_of_engine(args: Namespace) -> bool:
    return args.cuda_graph_impl == "transformer_engine" and graphs_with_attention(args)


def _graphs_hold_experts(args: Namespace) -> bool:
    """Whether a graph of Transformer Engine has to hold more of an expert layer than its router; the dropless dispatch
    has a refusal of its own."""
    if not args.num_experts or not _graphs_of_engine(args):
        return False
    modules = module_names(args)
    return bool(modules & {"moe", "moe_preprocess"} if modules else is_padded(args))


def _graphs_of_stages(args: Namespace) -> bool:
    return graphs_with_attention(args) and args.pipeline_model_parallel_size > 1


def _fsdp_flag(args: Namespace) -> str | None:
    flags = ("use_megatron_fsdp", "use_torch_fsdp2")
    return next((f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag, None)), None)


def _outcome_of_fsdp(args: Namespace) -> dict:
    failed = args.use_torch_fsdp2 or args.cuda_graph_impl == "local"
    return {"fsdp": _fsdp_flag(args), "outcome": "failed" if failed else "has not been run"}


def _outcome_of_overlap(args: Namespace) -> dict:
    return {"outcome": "failed" if args.cuda_graph_impl == "transformer_engine" else "has not been run"}


REFUSALS = (
    Refusal(
        "cuda_graph_local_experts",
        lambda args: args.cuda_graph_impl == "local" and bool(args.num_experts),
        "--cuda-graph-impl local with --num-experts failed on a GPU, most likely because Megatron captures the whole "
        "layer of a GPT even with --cuda-graph-modules attn moe_router (core/transformer/transformer_layer.py:560), "
        "and in it the dispatch of tokens, which waits for the device",
        "use --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router, or --cuda-graph-impl none",
    ),
    Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        is_set("overlap_dispatch_backward_with_experts_wgrad"),
        "--overlap-dispatch-backward-with-experts-wgrad failed on two GPUs, most likely because Megatron's data "
        "parallelism collects the gradient of an expert's weight before the delayed one is computed: "
        "core/distributed/distributed_data_parallel.py:365 asks for --delay-wgrad-compute alone",
        "remove --overlap-dispatch-backward-with-experts-wgrad, or use --overlap-moe-expert-parallel-comm",
    ),
    Refusal(
        "cuda_graph_held_experts",
        _graphs_hold_experts,
        "--cuda-graph-impl transformer_engine with the dispatch of tokens to experts inside of the graph "
        "(--cuda-graph-modules moe or moe_preprocess, or padded experts without modules) failed on a GPU with S2 "
        "attention",
        "use --cuda-graph-modules attn moe_router, or --cuda-graph-impl full_iteration with padded experts, or none",
    ),
    Refusal(
        "cuda_graph_rank_capacity",
        lambda args: whole_iterations(args) and bool(args.num_experts and args.moe_expert_rank_capacity_factor),
        "--cuda-graph-impl full_iteration with --moe-expert-rank-capacity-factor, which takes HybridEP or NCCL EP, has "
        "not been run with S2 attention",
        "use --moe-expert-capacity-factor with --moe-pad-expert-input-to-capacity, or --cuda-graph-impl none",
    ),
    Refusal(
        "cuda_graph_engine_offload",
        lambda args: _graphs_of_engine(args) and bool(args.fine_grained_activation_offloading),
        "--cuda-graph-impl transformer_engine with --fine-grained-activation-offloading failed on a GPU: the copies to "
        "the host run on a stream of their own, which has not joined when Transformer Engine ends the capture of a "
        "layer (cudaErrorStreamCaptureUnjoined)",
        "use --cuda-graph-impl none, or remove --fine-grained-activation-offloading; graphs of whole iterations work "
        "with it: --cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad "
        "--fine-grained-offloading-max-inflight-offloads 2, without --cuda-graph-modules",
    ),
    Refusal(
        "cuda_graph_stages",
        _graphs_of_stages,
        "--cuda-graph-impl {args.cuda_graph_impl} with --pipeline-model-parallel-size "
        "{args.pipeline_model_parallel_size} failed on two GPUs with S2 attention",
        "use --cuda-graph-impl none, or full_iteration with virtual stages "
        "(--num-layers-per-virtual-pipeline-stage), or --pipeline-model-parallel-size 1",
    ),
    Refusal(
        "cuda_graph_engine_cp",
        lambda args: _graphs_of_engine(args) and args.context_parallel_size > 1,
        "--cuda-graph-impl transformer_engine with --context-parallel-size {args.context_parallel_size} failed on two "
        "GPUs with S2 attention",
        "use --cuda-graph-impl local, or full_iteration",
    ),
    Refusal(
        "cuda_graph_fsdp",
        lambda args: bool(_graphs(args) and _fsdp_flag(args)),
        "--cuda-graph-impl {args.cuda_graph_impl} with {fsdp} {outcome} on two GPUs with S2 attention",
        "use --cuda-graph-impl none, or remove {fsdp}",
        _outcome_of_fsdp,
    ),
    Refusal(
        "cuda_graph_overlapped_experts",
        lambda args: _graphs(args) and bool(args.overlap_moe_expert_parallel_comm),
        "--cuda-graph-impl {args.cuda_graph_impl} with --overlap-moe-expert-parallel-comm {outcome} on two GPUs with "
        "S2 attention",
        "use --cuda-graph-impl none, or remove --overlap-moe-expert-parallel-comm",
        _outcome_of_overlap,
    ),
)
