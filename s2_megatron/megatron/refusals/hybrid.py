"""Refused: layers of a HybridModel that S2-Attention cannot train beside its own, and what has not been run with it."""

from __future__ import annotations

from argparse import Namespace

from s2_megatron.megatron.refusals.refusal import Refusal, is_set
from s2_megatron.megatron.settings import is_packed

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


def _in_quantized_training(args: Namespace) -> bool:
    return bool(args.fp8 or getattr(args, "fp4", None))


def _lacks_mtp_layers(args: Namespace) -> bool:
    """Megatron then builds none."""
    return bool(args.mtp_num_layers) and "/" not in args.hybrid_layer_pattern


# What has been run with a HybridModel is one process that computes the layers of a single stage once.
NOT_RUN = {
    "--transformer-impl {args.transformer_impl}": lambda args: args.transformer_impl != "local",
    "{args.world_size} processes": lambda args: args.world_size > 1,
    "pipeline stages (|)": lambda args: "|" in args.hybrid_layer_pattern,
    "--mtp-num-layers {args.mtp_num_layers} without its layers (/)": _lacks_mtp_layers,
    "multi-token-prediction layers (/) in {args.world_size} processes": lambda args: (
        "/" in args.hybrid_layer_pattern and args.world_size > 1
    ),
    "multi-token-prediction layers (/) with recompute or packed documents": lambda args: (
        "/" in args.hybrid_layer_pattern and (bool(args.recompute_granularity) or is_packed(args))
    ),
    "--recompute-granularity {args.recompute_granularity}": is_set("recompute_granularity"),
    "packed documents (--sft, --dataloader-inter-document-masking)": is_packed,
    "--cuda-graph-impl {args.cuda_graph_impl}": lambda args: args.cuda_graph_impl != "none",
    "--fp8-format or --fp4-format": _in_quantized_training,
    "--use-megatron-fsdp": is_set("use_megatron_fsdp"),
    "--use-torch-fsdp2": is_set("use_torch_fsdp2"),
    "--cpu-offloading-num-layers": is_set("cpu_offloading_num_layers"),
    "--fine-grained-activation-offloading": is_set("fine_grained_activation_offloading"),
}


def _not_run(args: Namespace) -> list[str]:
    if getattr(args, "hybrid_layer_pattern", None) is None:
        return []
    return [text.format(args=args) for text, given in NOT_RUN.items() if given(args)]


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
        "--hybrid-layer-pattern {args.hybrid_layer_pattern} has not been run with S2 attention and {found}; it has "
        "with --transformer-impl local in one process",
        "leave these out, or train a GPT, without --hybrid-layer-pattern",
        lambda args: {"found": ", ".join(_not_run(args))},
    ),
)
