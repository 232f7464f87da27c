"""The norms that Megatron's local layer spec cannot build: PyTorch's under sequence parallelism, RMSNorm where Apex has
none."""

from __future__ import annotations

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


def sequence_parallel_norm(
    config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **ignored
) -> torch.nn.Module:
    """PyTorch's LayerNorm or RMSNorm (config.normalization) for --sequence-parallel, which Megatron's wrapper of them
    refuses.

    Under sequence parallelism every rank normalises its own tokens, so the weight gradients are partial sums; Megatron
    adds them up over the tensor-parallel group for parameters that say so.
    Raises ValueError for settings that PyTorch's norms do not have.
    """
    for name, flag in (
        ("layernorm_zero_centered_gamma", "drop --apply-layernorm-1p"),
        ("persist_layer_norm", "add --no-persist-layer-norm"),
        ("memory_efficient_layer_norm", "drop --memory-efficient-layer-norm"),
    ):
        if getattr(config, name):
            raise ValueError(
                f"{name}=True with PyTorch's {config.normalization}; expected False; {flag}, or install Transformer "
                "Engine"
            )
    norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    if config.normalization not in norms:
        raise ValueError(
            f"normalization={config.normalization!r}; expected one of {', '.join(norms)}; set --normalization"
        )
    norm = norms[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def stage_norm(stock, config: TransformerConfig):
    """The norm to build instead of `stock` (a class, a builder, or None)."""
    return sequence_parallel_norm if stock is WrappedTorchNorm and config.sequence_parallel else stock


def final_norm(stock, config: TransformerConfig):
    """The norm after the last layer, to build instead of `stock`."""
    # Apex's fused norm, which the local spec takes for the final norm when Apex is there, has no RMSNorm.
    if getattr(stock, "__name__", "") == "FusedLayerNorm" and config.normalization == "RMSNorm":
        stock = WrappedTorchNorm
    return stage_norm(stock, config)
