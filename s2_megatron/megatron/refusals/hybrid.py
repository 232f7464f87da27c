"""Refused with a HybridModel: layers that S2-Attention cannot train beside its own, and settings of the model that have
not been run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping

from s2_megatron.megatron.refusals.model import MISSING, ModelArgument, hybrid_arguments, is_one_of
from s2_megatron.megatron.refusals.refusal import Refusal

# Symbols of --hybrid-layer-pattern, and why they are refused. `*` is attention, `-` a dense MLP, `E` an MoE layer.
SYMBOLS = {
    "D": "DSA chooses its keys by itself, token by token",
    "+": "multi-latent attention has not been run in a HybridModel with S2 attention",
    "M": "Mamba takes Transformer Engine's layers and mamba-ssm, and has not been run beside S2 attention",
    "G": "gated delta nets take Transformer Engine's layers and flash-linear-attention, and have not been run beside "
    "S2 attention",
}


def _refused_symbols(args: Namespace) -> list[str]:
    return [symbol for symbol in SYMBOLS if symbol in (getattr(args, "hybrid_layer_pattern", None) or "")]


# Arguments of a HybridModel that tests/megatron/test_hybrid.py and test_hybrid_layouts.py have run with S2 attention.
# Looked at are those that Megatron makes a TransformerConfig or a HybridModelConfig of, and model.MODEL_ARGUMENTS: what
# is not in these tables, and not Megatron's default, is refused.
RUN = frozenset(
    (
        *("hybrid_layer_pattern", "hybrid_override_pattern"),  # its old name
        *("seq_length", "vocab_size", "make_vocab_size_divisible_by", "rotary_percent", "rotary_base"),
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
        *("init_method_std", "bf16", "hidden_dropout", "attention_dropout", "add_bias_linear", "add_qkv_bias"),
        *("layernorm_epsilon", "normalization", "qk_layernorm", "qk_l2_norm", "attention_output_gate", "softmax_type"),
        *("window_size", "window_attn_skip_freq", "attention_softmax_in_fp32", "use_mup", "mup_base_hidden_size"),
        *("mup_width_mult", "apply_residual_connection_post_layernorm", "swiglu", "squared_relu"),
        *("deterministic_mode", "cross_entropy_loss_fusion", "calculate_per_token_loss"),
        # Fusions, which were off: Megatron says by itself what they miss on its local layers.
        *("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion"),
        *("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "recompute_granularity", "recompute_method", "recompute_num_layers"),
        *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_dtype", "moe_router_score_function"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_enable_expert_bias"),
        *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_router_pre_softmax", "moe_z_loss_coeff", "moe_aux_loss_coeff"),
        *("mtp_num_layers", "mtp_use_repeated_layer", "mtp_loss_scaling_factor"),
        *("untie_embeddings_and_output_weights", "bias_swiglu_fusion", "rotary_seq_len_interpolation_factor"),
    )
)
# Those that have been run with these values, beside the default.
RUN_VALUES = {
    "transformer_impl": ("local",),
    "expert_tensor_parallel_size": (1,),
    "moe_token_dispatcher_type": ("alltoall",),
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "position_embedding_type": ("rope", "learned_absolute"),
    "recompute_modules": (["core_attn"], ["core_attn", "mlp"]),
}
NO_DEFAULT = ("transformer_impl",)  # whose default has not been run
# The same on Transformer Engine's layers, by tests/megatron/test_hybrid_gpu.py: with any value, and with these alone.
RUN_ON_ENGINE = frozenset(
    (
        *("hybrid_layer_pattern", "hybrid_override_pattern", "num_layers", "hidden_size", "ffn_hidden_size"),
        *("num_attention_heads", "num_query_groups", "kv_channels"),
        *("seq_length", "vocab_size", "make_vocab_size_divisible_by"),
        *("init_method_std", "bf16", "apply_rope_fusion", "recompute_num_layers"),
        *("tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size"),
    )
)
VALUES_ON_ENGINE = {
    "transformer_impl": ("transformer_engine",),
    "position_embedding_type": ("rope",),
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "untie_embeddings_and_output_weights": (True,),
    "hidden_dropout": (0.0,),
    "attention_dropout": (0.0,),
    "gradient_accumulation_fusion": (False,),
    "recompute_granularity": (None, "full"),
    "recompute_method": (None, "uniform"),
    "attention_backend": ("auto", "unfused"),
    "overlap_p2p_comm": (True, False),  # Megatron turns it off without virtual stages
}
OF_EXPERTS = ("expert_tensor_parallel_size",)  # without them it does nothing
# Megatron's validation gives these the value of the other one.
DERIVED = {
    "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
    "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
    "add_qkv_bias": "add_bias_linear",
}

# Of the multi-token-prediction layers.
MTP_NOT_RUN = {
    "--mtp-num-layers {args.mtp_num_layers} without its layers (/), of which Megatron then builds none": lambda args: (
        bool(args.mtp_num_layers) and "/" not in args.hybrid_layer_pattern
    ),
    "experts behind the / and --mtp-use-repeated-layer, of which Megatron adds the routers' losses once a depth": (
        lambda args: bool(args.mtp_use_repeated_layer) and "E" in args.hybrid_layer_pattern.partition("/")[2]
    ),
    "--mtp-use-repeated-layer in {args.world_size} processes": lambda args: (
        bool(args.mtp_use_repeated_layer) and args.world_size > 1
    ),
    "multi-token prediction (/) with --sft and context parallelism": lambda args: (
        bool(args.mtp_num_layers) and bool(args.sft) and args.context_parallel_size > 1
    ),
}
OF_LAYERS = (("E", "moe_"), ("E", "expert_"), ("E", "num_experts"), ("/", "mtp_"))  # what their arguments begin with
# On Transformer Engine's layers.
ENGINE_NOT_RUN = {
    "experts (E)": lambda args: "E" in args.hybrid_layer_pattern,
    "multi-token prediction (/)": lambda args: "/" in args.hybrid_layer_pattern,
    "virtual pipeline stages (more parts between | than --pipeline-model-parallel-size "
    "{args.pipeline_model_parallel_size})": lambda args: (
        args.hybrid_layer_pattern.count("|") >= args.pipeline_model_parallel_size > 1
    ),
    "packed documents": lambda args: bool(args.dataloader_inter_document_masking or args.sft),
    "--use-megatron-fsdp": lambda args: bool(args.use_megatron_fsdp),
    "--use-torch-fsdp2": lambda args: bool(args.use_torch_fsdp2),
}


def _not_run(args: Namespace) -> list[str]:
    """What of args has not been run, as it would be written on the command line."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is None or _refused_symbols(args):
        return []
    on_engine = args.transformer_impl == "transformer_engine"
    run, values, no_default = RUN, RUN_VALUES, NO_DEFAULT
    if on_engine:
        run, values, no_default = RUN_ON_ENGINE, VALUES_ON_ENGINE, VALUES_ON_ENGINE
    conditions = MTP_NOT_RUN | (ENGINE_NOT_RUN if on_engine else {})
    found = [text.format(args=args) for text, given in conditions.items() if given(args)]
    # Of layers that are told already; Megatron's validation fills some of them in.
    told = tuple(prefix for symbol, prefix in OF_LAYERS if on_engine and symbol in pattern)
    arguments = {name: argument for name, argument in hybrid_arguments().items() if not name.startswith(told)}
    return found + outside(args, arguments, run, values, no_default)


def outside(
    args: Namespace,
    arguments: Mapping[str, ModelArgument],
    run: Collection[str],
    values: Mapping[str, tuple],
    no_default: Collection[str],
) -> list[str]:
    """Those of the arguments that are neither in `run`, nor have one of `values` or, unless they are in no_default, the
    default, as they would be written on the command line. On Transformer Engine's layers the command line's default
    counts alone."""
    found = []
    for name, argument in arguments.items():
        value = getattr(args, name, None)
        if name in run or (name in OF_EXPERTS and not args.num_experts):
            continue
        allowed = list(values.get(name, ()))
        if name not in no_default:
            on_engine = args.transformer_impl == "transformer_engine"
            allowed += [argument.action.default] if on_engine else argument.defaults
        if name in DERIVED:
            allowed.append(getattr(args, DERIVED[name]))
        if not is_one_of(value, allowed):
            found.append(argument.written(value))
    return found


def _remedy(args: Namespace) -> str:
    """What would make it a model that has been run."""
    found = _not_run(args)
    missing = [text.removeprefix(MISSING) for text in found if text.startswith(MISSING)]
    ways = [f"add {', '.join(missing)}"] if missing else []
    if len(found) > len(missing):
        ways.append("leave out or change " + ("the rest" if missing else "what stands there"))
    local = "use --transformer-impl local, or " if args.transformer_impl == "transformer_engine" else ""
    return f"{' and '.join(ways)}, or {local}train a GPT, without --hybrid-layer-pattern"


def _layers(args: Namespace) -> str:
    return "Transformer Engine's" if args.transformer_impl == "transformer_engine" else "Megatron's local"


REFUSALS = (
    Refusal(
        "hybrid_layer_pattern",
        lambda args: bool(_refused_symbols(args)),
        "--hybrid-layer-pattern {args.hybrid_layer_pattern} has layers {reasons}",
        "use *, - and E, or leave --s2-config out",
        lambda args: {"reasons": "; ".join(f"{symbol} ({SYMBOLS[symbol]})" for symbol in _refused_symbols(args))},
    ),
    Refusal(
        "hybrid_not_run",
        lambda args: bool(_not_run(args)),
        "--hybrid-layer-pattern {args.hybrid_layer_pattern} has not been run with S2 attention, {layers} layers and "
        "{found}; docs/validation.md has what has",
        "{remedy}",
        lambda args: {"found": ", ".join(_not_run(args)), "layers": _layers(args), "remedy": _remedy(args)},
    ),
)
