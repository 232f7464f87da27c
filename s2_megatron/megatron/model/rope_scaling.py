"""RoPE scaling (Llama 3's): the factor of --rope-scaling-factor reaches the model, and a checkpoint says which one it
was computed with.

Megatron-core 0.19.2 makes a model config without the factor, so that every model computes 8, whatever the flag says.
"""

from __future__ import annotations

from argparse import Namespace

DEFAULT = 8.0  # what a model computes whose config was not told
RECORD = "s2_rope_scaling_factor"  # in the arguments that checkpoints hold: the factor that the model was given


def refuse_dropped(args: Namespace) -> None:
    """Raises ValueError for what a HybridModel would leave out in silence: RoPE scaling. args: Megatron's."""
    if args.hybrid_layer_pattern is not None and args.use_rope_scaling:
        raise ValueError(
            "--use-rope-scaling with --hybrid-layer-pattern: Megatron's HybridModel has none, and would be trained "
            "without; expected one of the two; leave --use-rope-scaling out"
        )


def set_rope_scaling(args: Namespace, model_config) -> None:
    """Writes the factor of `args` into Megatron's GPTModelConfig, and into `args` that it stands there."""
    if not args.use_rope_scaling:
        return
    model_config.rope_scaling_factor = args.rope_scaling_factor
    setattr(args, RECORD, args.rope_scaling_factor)


def computed_factor(args: Namespace) -> float | None:
    """The factor that the model of a checkpoint was computed with; None without RoPE scaling. args: those in it."""
    if not getattr(args, "use_rope_scaling", False):
        return None
    return float(getattr(args, RECORD, DEFAULT))


def check_rope_scaling(args: Namespace, model: list) -> None:
    """Raises ValueError for a built model that turns with another factor than --rope-scaling-factor.

    model: the chunks of this pipeline stage, as Megatron wraps them.
    """
    if not args.use_rope_scaling:
        return
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    expected = RotaryEmbedding(
        args.kv_channels, args.rotary_percent, rotary_base=args.rotary_base, rope_scaling=True,
        rope_scaling_factor=args.rope_scaling_factor, use_cpu_initialization=True,
    ).inv_freq  # fmt: skip
    for module in (module for chunk in model for module in chunk.modules()):
        if type(module) is RotaryEmbedding and not torch.allclose(module.inv_freq.cpu(), expected, rtol=1e-3, atol=0):
            raise ValueError(
                f"--rope-scaling-factor={args.rope_scaling_factor:g}, and the model was built with another factor; "
                "expected this one; give pretrain the model config of gpt_config_from_args, or build the model with "
                f"rope_scaling_factor={args.rope_scaling_factor:g}"
            )
