"""Refused: combinations of Megatron's features with S2-Attention whose test on a GPU failed, or has not been run.

The tests of tests/megatron/test_gpu_features.py take this table away (tests/megatron/lifted.py): what failed there is
expected to fail, strictly, and what passes leaves the table. What is known to be a limit of others moves to
execution.py and loses its test; what has no test there needs one first. Files are those of megatron-core 0.19.2.
"""

from __future__ import annotations

from argparse import Namespace

from s2_megatron.megatron.refusals.execution import (
    graphs_hold_experts,
    graphs_with_attention,
    module_names,
    whole_iterations,
)
from s2_megatron.megatron.refusals.hybrid import RUN_ON_ENGINE, VALUES_ON_ENGINE, outside
from s2_megatron.megatron.refusals.model import model_arguments
from s2_megatron.megatron.refusals.refusal import Refusal, is_set


def _graphs_of_engine(args: Namespace) -> bool:
    return args.cuda_graph_impl == "transformer_engine" and graphs_with_attention(args)


def _graphs_of_preprocess(args: Namespace) -> bool:
    """Whether a graph holds the counting of the tokens that each expert gets, without the experts."""
    return bool(args.num_experts and _graphs_of_engine(args) and "moe_preprocess" in module_names(args))


def _graphs_of_rank_capacity(args: Namespace) -> bool:
    given = args.num_experts and args.moe_expert_rank_capacity_factor
    return bool(given and (whole_iterations(args) or graphs_hold_experts(args) or _graphs_of_preprocess(args)))


# Of multi-latent attention on Transformer Engine's layers tests/megatron/test_gpu.py has run one GPU, and
# test_gpu_features.py tensor with sequence parallelism: with any value, and with these alone.
RUN_LATENT = (RUN_ON_ENGINE - {"pipeline_model_parallel_size", "apply_rope_fusion"}) | {
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
}
LATENT_VALUES = VALUES_ON_ENGINE | {
    "rope_type": ("rope",),
    "apply_rope_fusion": (False,),
    "recompute_granularity": (None,),
    "recompute_method": (None,),
}


def _latent_on_engine(args: Namespace) -> list[str]:
    """What of args has not been run with multi-latent attention on Transformer Engine's layers, as it would be written
    on the command line."""
    if not args.multi_latent_attention or args.transformer_impl != "transformer_engine":
        return []
    others = {
        "packed documents": args.dataloader_inter_document_masking or args.sft,
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
    }
    found = [what for what, is_asked in others.items() if is_asked]
    no_choice = ("inference_", *(("moe_", "expert_") if args.num_experts else ()))  # experts are told as --num-experts
    arguments = {name: each for name, each in model_arguments().items() if not name.startswith(no_choice)}
    return found + outside(args, arguments, RUN_LATENT, LATENT_VALUES, LATENT_VALUES)


REFUSALS = (
    Refusal(
        "mla_transformer_engine",
        lambda args: bool(_latent_on_engine(args)),
        "--multi-latent-attention with --transformer-impl transformer_engine has not been run with S2 attention and "
        "{found}; docs/validation.md has what has",
        "give --rope-type rope --no-rope-fusion, leave out or change the rest, or use --transformer-impl local",
        values=lambda args: dict(found=", ".join(_latent_on_engine(args))),
    ),
    Refusal(
        "cuda_graph_local_experts",
        lambda args: args.cuda_graph_impl == "local" and bool(args.num_experts),
        "--cuda-graph-impl local with --num-experts failed on a GPU, most likely because Megatron captures the whole "
        "layer of a GPT even with --cuda-graph-modules attn moe_router (core/transformer/transformer_layer.py), "
        "and in it the dispatch of tokens, which waits for the device",
        "use --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router, or --cuda-graph-impl none",
    ),
    Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        is_set("overlap_dispatch_backward_with_experts_wgrad"),
        "--overlap-dispatch-backward-with-experts-wgrad failed on two GPUs, most likely because Megatron's data "
        "parallelism collects the gradient of an expert's weight before the delayed one is computed: "
        "core/distributed/distributed_data_parallel.py asks for --delay-wgrad-compute alone",
        "remove --overlap-dispatch-backward-with-experts-wgrad, or use --overlap-moe-expert-parallel-comm",
    ),
    Refusal(
        "cuda_graph_moe_preprocess",
        lambda args: _graphs_of_preprocess(args) and bool(args.overlap_moe_expert_parallel_comm),
        "--cuda-graph-modules moe_preprocess with --overlap-moe-expert-parallel-comm has not been run with S2 "
        "attention",
        "use --cuda-graph-modules attn moe_router",
    ),
    Refusal(
        "cuda_graph_rank_capacity",
        _graphs_of_rank_capacity,
        "--cuda-graph-impl {args.cuda_graph_impl} with --moe-expert-rank-capacity-factor, which takes HybridEP or NCCL "
        "EP, has not been run with S2 attention",
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
)
