"""Multi-token prediction on machines on which Megatron cannot build it."""

from __future__ import annotations

import pytest


def builds_mtp() -> bool:
    """Whether Megatron can build layers of multi-token prediction here. Its development branch asks of each whether it
    is one of two layers of Transformer Engine (is_inference_column_parallel_linear in
    core/tensor_parallel/inference_layers.py), which are no types where Transformer Engine is not installed."""
    from megatron.core.tensor_parallel import inference_layers

    try:
        getattr(inference_layers, "is_inference_column_parallel_linear", bool)(None)
    except TypeError:
        return False
    return True


def require_mtp() -> None:
    """Skips a test of multi-token prediction where Megatron cannot build it."""
    if not builds_mtp():
        pytest.skip(
            "this Megatron builds no multi-token prediction without Transformer Engine "
            "(core/tensor_parallel/inference_layers.py: isinstance() with what is no type)"
        )
