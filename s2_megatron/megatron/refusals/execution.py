"""Refused: CUDA graphs, recomputation, inference paths and checkpoints that S2-Attention does not honour, or was not
tested with."""

from __future__ import annotations

from argparse import Namespace

from s2_megatron.megatron.refusals.refusal import ATTENTION_MASK_SEQ_LENGTH, Refusal, is_set
from s2_megatron.megatron.settings import is_packed


def _graphs_with_attention(args: Namespace) -> bool:
    """Whether CUDA graphs hold the attention: always with Megatron's own graphs, with Transformer Engine's unless the
    modules leave it out."""
    names = {getattr(module, "name", module) for module in args.cuda_graph_modules or ()}
    return args.cuda_graph_impl == "local" or (
        args.cuda_graph_impl == "transformer_engine" and (not names or "attn" in names)
    )


def _untested_with_graphs(args: Namespace) -> bool:
    """Settings that change when, or how often, the op runs; TP and DP do not."""
    return bool(
        args.pipeline_model_parallel_size > 1
        or args.num_experts
        or args.mtp_num_layers
        or args.recompute_granularity
        or args.fine_grained_activation_offloading
        or args.cpu_offloading_num_layers
    )


def _attention_is_recomputed(args: Namespace) -> bool:
    # Left out, the modules are still None here: TransformerConfig fills in its default, core_attn, when the model
    # config is made.
    modules = ["core_attn"] if args.recompute_modules is None else args.recompute_modules
    selected = args.recompute_granularity == "selective" and "core_attn" in modules
    return (args.recompute_granularity == "full" or selected) and not args.mtp_use_repeated_layer


def _resumes_optimizer(args: Namespace) -> bool:
    """Whether the optimizer's state is to be written for a resume, or read."""
    saves = args.save is not None and not args.no_save_optim
    loads = args.load is not None and not args.no_load_optim and not args.finetune
    return saves or loads


def _distributed_optimizer_cannot_resume(args: Namespace) -> bool:
    if not args.use_distributed_optimizer or not _resumes_optimizer(args):
        return False
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    return not HAVE_APEX_OR_TE


REFUSALS = (
    Refusal(
        "s2_keep_attention_output",
        lambda args: args.s2_keep_attention_output and not _attention_is_recomputed(args),
        "--s2-keep-attention-output stores the attention's output for a recomputation, and this run recomputes no "
        "attention or runs a multi-token-prediction layer several times (--mtp-use-repeated-layer)",
        "remove --s2-keep-attention-output, or add --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    Refusal(
        "cuda_graph_impl",
        lambda args: (
            args.cuda_graph_impl == "full_iteration"
            or (_graphs_with_attention(args) and args.context_parallel_size > 1)
        ),
        "--cuda-graph-impl {args.cuda_graph_impl} with --context-parallel-size {args.context_parallel_size}: tested "
        "are the graphs of layers (local, transformer_engine) without context parallelism",
        "use --cuda-graph-impl none, or local with --context-parallel-size 1",
    ),
    # The likely cause, from reading Megatron 0.19.2: its graphs keep a layer's input until the backward only where a
    # Python autograd function saves it, as in Transformer Engine's layers; PyTorch's norms, which the local layers
    # have, save it in C++.
    Refusal(
        "cuda_graph_local_layers",
        lambda args: _graphs_with_attention(args) and args.transformer_impl == "local",
        "--cuda-graph-impl {args.cuda_graph_impl} with --transformer-impl local: in a test, graphs of Megatron's local "
        "layers computed other gradients than the same run without graphs; with Transformer Engine's layers they did "
        "not",
        "use --transformer-impl transformer_engine, or --cuda-graph-impl none",
    ),
    Refusal(
        "cuda_graph_untested",
        lambda args: _graphs_with_attention(args) and _untested_with_graphs(args),
        "--cuda-graph-impl {args.cuda_graph_impl} is not tested with S2 attention under pipeline parallelism, experts, "
        "MTP layers, recompute or activation offload",
        "use --cuda-graph-impl none, or run without these",
    ),
    Refusal(
        "cuda_graph_packed",
        lambda args: _graphs_with_attention(args) and is_packed(args),
        "--cuda-graph-impl {args.cuda_graph_impl} with packed documents (--sft, --dataloader-inter-document-masking): "
        "a graph repeats the number of documents that it was captured with, and every batch has another one",
        "use --cuda-graph-impl none",
    ),
    Refusal(
        "cuda_graph_attention_mask",
        lambda args: (
            args.cuda_graph_impl == "transformer_engine"
            and _graphs_with_attention(args)
            and args.seq_length > ATTENTION_MASK_SEQ_LENGTH
        ),
        "--cuda-graph-impl transformer_engine: its graphs hold a [{args.micro_batch_size}, 1, {args.seq_length}, "
        "{args.seq_length}] mask for every layer, which causal attention does not need",
        "use --cuda-graph-impl local",
    ),
    Refusal(
        "flash_decode",
        is_set("flash_decode"),
        "--flash-decode goes around the core attention and would decode dense",
        "remove --flash-decode",
    ),
    Refusal(
        "inference_dynamic_batching",
        is_set("inference_dynamic_batching"),
        "--inference-dynamic-batching goes around the core attention and would run dense",
        "remove --inference-dynamic-batching and add --use-legacy-static-engine",
    ),
    Refusal(
        "perform_rl_step",
        is_set("perform_rl_step"),
        "--perform-rl-step generates with the dynamic inference engine, which goes around the core attention and would "
        "run dense",
        "remove --perform-rl-step",
    ),
    Refusal(
        "non_persistent_ckpt_type",
        lambda args: args.non_persistent_ckpt_type == "local",
        "--non-persistent-ckpt-type local: the sparsity stored in a local checkpoint cannot be compared before the "
        "model is built",
        "use --non-persistent-ckpt-type global",
    ),
    Refusal(
        "use_distributed_optimizer",
        _distributed_optimizer_cannot_resume,
        "--use-distributed-optimizer with --save or --load: Megatron cannot resume this optimizer's checkpoints when "
        "neither Transformer Engine nor NVIDIA Apex is installed",
        "install Transformer Engine or Apex, or remove --use-distributed-optimizer",
    ),
)
