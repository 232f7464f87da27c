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
    """Whether a graph has to hold more of an expert layer than its router, in a way that none has been seen with;
    graphs of the kind local and the dropless dispatch have refusals of their own."""
    if args.num_experts and whole_iterations(args):
        return bool(args.moe_expert_rank_capacity_factor)
    if not args.num_experts or not _graphs_of_engine(args):
        return False
    modules = module_names(args)
    return bool(modules & {"moe", "moe_preprocess"} if modules else is_padded(args))


def _graphs_of_stages(args: Namespace) -> bool:
    """Without virtual stages a graph of the whole iteration has a refusal of its own."""
    captured = graphs_with_attention(args) or (whole_iterations(args) and args.overlap_p2p_comm)
    return bool(captured and args.pipeline_model_parallel_size > 1)


def _graphs_of_other_exchanges(args: Namespace) -> bool:
    others = set(args.s2_cp_comm_type) - {"sparse"}
    return bool(_graphs(args) and not _graphs_of_engine(args) and args.context_parallel_size > 1 and others)


def _fsdp_flag(args: Namespace) -> str | None:
    flags = ("use_megatron_fsdp", "use_torch_fsdp2")
    return next((f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag, None)), None)


def _fsdp(args: Namespace) -> dict:
    return {"fsdp": _fsdp_flag(args)}


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
        "--cuda-graph-impl {args.cuda_graph_impl} with the dispatch of tokens to experts inside of the graph "
        "(--cuda-graph-modules moe or moe_preprocess, padded experts with Transformer Engine's graphs, or "
        "--moe-expert-rank-capacity-factor) has not been run on a GPU with S2 attention",
        "use --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router, or --cuda-graph-impl none",
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
        "cuda_graph_offload",
        lambda args: whole_iterations(args) and bool(args.cpu_offloading_num_layers),
        "--cuda-graph-impl full_iteration with --cpu-offloading-num-layers has not been run on a GPU with S2 attention",
        "use --cuda-graph-impl none, or --fine-grained-activation-offloading "
        "--fine-grained-offloading-max-inflight-offloads 2 instead of --cpu-offloading-num-layers",
    ),
    Refusal(
        "cuda_graph_stages",
        _graphs_of_stages,
        "--cuda-graph-impl {args.cuda_graph_impl} with --pipeline-model-parallel-size "
        "{args.pipeline_model_parallel_size} has not been run on GPUs with S2 attention",
        "use --cuda-graph-impl none, or --pipeline-model-parallel-size 1",
    ),
    Refusal(
        "cuda_graph_engine_cp",
        lambda args: _graphs_of_engine(args) and args.context_parallel_size > 1,
        "--cuda-graph-impl transformer_engine with --context-parallel-size {args.context_parallel_size} has not been "
        "run on GPUs with S2 attention",
        "use --cuda-graph-impl local, or full_iteration, with --s2-cp-comm-type sparse",
    ),
    Refusal(
        "cuda_graph_cp_comm_type",
        _graphs_of_other_exchanges,
        "--cuda-graph-impl {args.cuda_graph_impl} with --s2-cp-comm-type {comm_types} has not been run on GPUs",
        "use --s2-cp-comm-type sparse, or --cuda-graph-impl none",
        lambda args: {"comm_types": " ".join(args.s2_cp_comm_type)},
    ),
    Refusal(
        "cuda_graph_fsdp",
        lambda args: bool(_graphs(args) and _fsdp_flag(args)),
        "--cuda-graph-impl {args.cuda_graph_impl} with {fsdp} has not been run on GPUs with S2 attention",
        "use --cuda-graph-impl none, or remove {fsdp}",
        _fsdp,
    ),
    Refusal(
        "cuda_graph_overlapped_experts",
        lambda args: _graphs(args) and bool(args.overlap_moe_expert_parallel_comm),
        "--cuda-graph-impl {args.cuda_graph_impl} with --overlap-moe-expert-parallel-comm has not been run on GPUs "
        "with S2 attention",
        "use --cuda-graph-impl none, or remove --overlap-moe-expert-parallel-comm",
    ),
    Refusal(
        "overlapped_experts_fsdp",
        lambda args: bool(args.overlap_moe_expert_parallel_comm and _fsdp_flag(args)),
        "--overlap-moe-expert-parallel-comm with {fsdp} has not been run with S2 attention",
        "use --use-distributed-optimizer instead of {fsdp}, or remove --overlap-moe-expert-parallel-comm",
        _fsdp,
    ),
    Refusal(
        "megatron_fsdp_checkpoint",
        lambda args: bool(args.use_megatron_fsdp and (args.save or args.load)),
        "--use-megatron-fsdp with --save or --load: a resume from its checkpoints has not been run on GPUs with S2 "
        "attention, and without the optimizer's state Megatron cannot load them "
        "(core/optimizer/distrib_optimizer.py:3079)",
        "use --use-distributed-optimizer instead of --use-megatron-fsdp, or remove --save and --load",
    ),
)
