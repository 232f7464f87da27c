"""Refused: CUDA graphs, recomputation, inference paths and checkpoints that S2-Attention, or Megatron itself, cannot
honour. Files are those of megatron-core 0.19.2."""

from __future__ import annotations

import importlib.util
from argparse import Namespace

from s2_megatron.megatron.refusals.refusal import ATTENTION_MASK_SEQ_LENGTH, Refusal, is_set
from s2_megatron.megatron.settings import is_packed


def module_names(args: Namespace) -> set[str]:
    """Which parts of a layer --cuda-graph-modules names; empty for whole layers."""
    return {getattr(module, "name", module) for module in args.cuda_graph_modules or ()}


def graphs_with_attention(args: Namespace) -> bool:
    """Whether CUDA graphs hold the attention: always with Megatron's own graphs, with Transformer Engine's unless the
    modules leave it out."""
    names = module_names(args)
    return args.cuda_graph_impl == "local" or (
        args.cuda_graph_impl == "transformer_engine" and (not names or "attn" in names)
    )


def whole_iterations(args: Namespace) -> bool:
    return args.cuda_graph_impl == "full_iteration"


def is_padded(args: Namespace) -> bool:
    """Whether every expert gets the same number of rows, whatever the router chooses."""
    return bool(args.moe_pad_expert_input_to_capacity or args.moe_expert_rank_capacity_factor)


def graphs_hold_experts(args: Namespace) -> bool:
    """Whether a graph of Transformer Engine holds a whole layer of experts. Those of the kind local are refused with
    any experts."""
    names = module_names(args)
    return bool(args.num_experts and args.cuda_graph_impl == "transformer_engine" and (not names or "moe" in names))


def _graphs_of_dropless_experts(args: Namespace) -> bool:
    """Whether graphs hold the dispatch of tokens to experts, with as many rows as the router happens to choose."""
    whole = bool(args.num_experts and whole_iterations(args))
    return not is_padded(args) and (whole or graphs_hold_experts(args))


# What both kinds of FSDP do to Transformer Engine's graphs.
_HOOKED = (
    "it puts hooks on every module, and Transformer Engine captures none that has hooks (its graph.py in 2.20.2), "
    "unless it is told of them, which Megatron does not"
)
# By the kind of FSDP and of graphs: why Megatron cannot train so.
_NO_GRAPHS_WITH_FSDP = {
    ("use_torch_fsdp2", "local"): "while the backward of a layer is captured (core/transformer/cuda_graphs.py), "
    "FSDP2 gathers the weights on a stream of its own and allocates memory for them, which CUDA does not permit then",
    ("use_torch_fsdp2", "transformer_engine"): _HOOKED,
    ("use_torch_fsdp2", "full_iteration"): "gradient norms were 0 from the second replay on: "
    "Megatron clears .grad after a step (core/optimizer/optimizer.py), and FSDP2 sets it in Python, which a "
    "replayed graph does not run",
    ("use_megatron_fsdp", "local"): "Megatron captures the graphs when finish_grad_sync "
    "(core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py) has put the sharded weights into the modules, "
    "which the hook that gathers a layer's weights does not know (KeyError in param_and_grad_buffer.py)",
    ("use_megatron_fsdp", "transformer_engine"): _HOOKED,
}
_FSDP_FIXES = {
    "use_torch_fsdp2": "use --cuda-graph-impl none, or --use-distributed-optimizer instead of --use-torch-fsdp2",
    "use_megatron_fsdp": "use --cuda-graph-impl none, or full_iteration with --no-check-for-nan-in-loss-and-grad and "
    "without --cuda-graph-modules",
}


def _graphs_with_fsdp(args: Namespace) -> tuple[str, str] | None:
    """The key of _NO_GRAPHS_WITH_FSDP for these arguments, or None where graphs train."""
    asked = ((name, args.cuda_graph_impl) for name in _FSDP_FIXES if getattr(args, name))
    return next((key for key in asked if key in _NO_GRAPHS_WITH_FSDP), None)


def _words_about_fsdp(args: Namespace) -> dict:
    key = _graphs_with_fsdp(args)
    flag = f"--{key[0].replace('_', '-')}"
    return {"fsdp": flag, "why": _NO_GRAPHS_WITH_FSDP[key], "remedy": _FSDP_FIXES[key[0]]}


def _resumes_optimizer(args: Namespace) -> bool:
    """Whether the optimizer's state is to be written for a resume, or read."""
    saves = args.save is not None and not args.no_save_optim
    loads = args.load is not None and not args.no_load_optim and not args.finetune
    return saves or loads


def _async_strategy_is_missing(args: Namespace) -> bool:
    wanted = args.async_save and args.async_strategy == "nvrx"
    return wanted and importlib.util.find_spec("nvidia_resiliency_ext") is None


def _fsdp2_cannot_resume(args: Namespace) -> bool:
    return args.use_torch_fsdp2 and _resumes_optimizer(args)


def _megatron_fsdp_cannot_load(args: Namespace) -> bool:
    """Whether weights are loaded without the optimizer's state, or saved so that they would have to be."""
    saves = args.save is not None and args.no_save_optim
    loads = args.load is not None and (args.no_load_optim or args.finetune)
    return bool(args.use_megatron_fsdp and (saves or loads or args.pretrained_checkpoint))


def _distributed_optimizer_cannot_resume(args: Namespace) -> bool:
    if not args.use_distributed_optimizer or not _resumes_optimizer(args):
        return False
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    return not HAVE_APEX_OR_TE


REFUSALS = (
    Refusal(
        "cuda_graph_local_layers",
        lambda args: graphs_with_attention(args) and args.transformer_impl == "local",
        "--cuda-graph-impl {args.cuda_graph_impl} with --transformer-impl local: Megatron keeps a layer's input until "
        "the backward only where Python saves it (core/transformer/cuda_graphs.py), and the norms of its local "
        "layers save it in C++; such graphs computed other gradients than the same run without graphs",
        "use --transformer-impl transformer_engine, or --cuda-graph-impl full_iteration or none",
    ),
    Refusal(
        "cuda_graph_experts",
        _graphs_of_dropless_experts,
        "--cuda-graph-impl {args.cuda_graph_impl} with --num-experts: the graph would hold the dispatch of tokens, "
        "whose sizes Megatron copies to the host (core/transformer/moe/token_dispatcher.py) and which change with "
        "every batch",
        "use --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router, or --cuda-graph-impl none",
    ),
    Refusal(
        "cuda_graph_packed",
        lambda args: (graphs_with_attention(args) or whole_iterations(args)) and is_packed(args),
        "--cuda-graph-impl {args.cuda_graph_impl} with packed documents (--sft, --dataloader-inter-document-masking): "
        "a graph repeats the number of documents that it was captured with, and every batch has another one",
        "use --cuda-graph-impl none",
    ),
    Refusal(
        "cuda_graph_pipeline",
        lambda args: whole_iterations(args) and args.pipeline_model_parallel_size > 1 and not args.overlap_p2p_comm,
        "--cuda-graph-impl full_iteration with --pipeline-model-parallel-size {args.pipeline_model_parallel_size}: "
        "Megatron waits for the device after every transfer between stages "
        "(core/pipeline_parallel/p2p_communication.py), which a graph cannot hold",
        "use --cuda-graph-impl none, or virtual stages (--num-layers-per-virtual-pipeline-stage), or "
        "--pipeline-model-parallel-size 1",
    ),
    Refusal(
        "cuda_graph_stages",
        lambda args: args.cuda_graph_impl == "local" and args.pipeline_model_parallel_size > 1,
        "--cuda-graph-impl local with --pipeline-model-parallel-size {args.pipeline_model_parallel_size}: Megatron "
        "frees what a stage has sent (core/pipeline_parallel/schedules.py), and what comes from such graphs is a "
        "view, which it cannot free",
        "use --cuda-graph-impl transformer_engine or none, or full_iteration with virtual stages "
        "(--num-layers-per-virtual-pipeline-stage), or --pipeline-model-parallel-size 1",
    ),
    Refusal(
        "cuda_graph_fsdp",
        lambda args: _graphs_with_fsdp(args) is not None,
        "--cuda-graph-impl {args.cuda_graph_impl} with {fsdp}: {why}",
        "{remedy}",
        _words_about_fsdp,
    ),
    Refusal(
        "cuda_graph_overlapped_experts",
        lambda args: args.overlap_moe_expert_parallel_comm and graphs_hold_experts(args),
        "--cuda-graph-impl transformer_engine with --overlap-moe-expert-parallel-comm: Megatron runs the parts of a "
        "layer of experts by turns, which it cannot where one graph holds the whole layer "
        "(core/transformer/transformer_layer.py)",
        "use --cuda-graph-modules attn moe_router, or --cuda-graph-impl full_iteration with padded experts, or none",
    ),
    Refusal(
        "cuda_graph_spiky_loss",
        lambda args: whole_iterations(args) and args.check_for_spiky_loss,
        "--cuda-graph-impl full_iteration with --check-for-spiky-loss: the check reads the loss on the host, inside of "
        "the graph",
        "remove --check-for-spiky-loss",
    ),
    Refusal(
        "cuda_graph_attention_mask",
        lambda args: (
            args.cuda_graph_impl == "transformer_engine"
            and graphs_with_attention(args)
            and args.seq_length > ATTENTION_MASK_SEQ_LENGTH
        ),
        "--cuda-graph-impl transformer_engine: its graphs hold a [{args.micro_batch_size}, 1, {args.seq_length}, "
        "{args.seq_length}] mask for every layer, which causal attention does not need",
        "use --cuda-graph-impl local, full_iteration or none",
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
        "ckpt_format",
        lambda args: args.ckpt_format == "torch_dcp" and bool(args.save or args.load),
        "--ckpt-format torch_dcp: Megatron cannot load such a checkpoint: it asks its optimizer for "
        "state_dict(is_loading=True) (training/checkpointing.py), which core/optimizer/optimizer.py does not "
        "have",
        "use --ckpt-format torch_dist",
    ),
    Refusal(
        "use_torch_fsdp2",
        _fsdp2_cannot_resume,
        "--use-torch-fsdp2 with an optimizer that is saved or loaded: Megatron loads such checkpoints without giving "
        "the optimizer its step count (training/checkpointing.py), so Adam would start again at step 1",
        "add --no-save-optim and --no-load-optim, or use --use-distributed-optimizer",
    ),
    Refusal(
        "use_megatron_fsdp",
        _megatron_fsdp_cannot_load,
        "--use-megatron-fsdp with weights that are loaded without the optimizer's state (--no-load-optim, --finetune, "
        "--pretrained-checkpoint, a checkpoint of --no-save-optim): Megatron cannot copy them to the optimizer's "
        "parameters (core/optimizer/distrib_optimizer.py)",
        "remove that flag, or use --use-distributed-optimizer instead of --use-megatron-fsdp",
    ),
    Refusal(
        "async_strategy",
        _async_strategy_is_missing,
        "--async-save with --async-strategy nvrx, Megatron's default: nvidia-resiliency-ext is not installed",
        "use --async-strategy mcore, or pip install 'nvidia-resiliency-ext>=0.6'",
        of_machine=True,
    ),
    Refusal(
        "use_distributed_optimizer",
        _distributed_optimizer_cannot_resume,
        "--use-distributed-optimizer, which --use-megatron-fsdp brings, with --save or --load: Megatron cannot resume "
        "this optimizer's checkpoints when neither Transformer Engine nor NVIDIA Apex is installed",
        "install Transformer Engine or Apex, or remove --use-distributed-optimizer, or add --no-save-optim and "
        "--no-load-optim",
        of_machine=True,
    ),
)
