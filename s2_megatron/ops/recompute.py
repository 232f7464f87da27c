"""Attention under activation recomputation without a second forward pass of the attention.

Recomputation runs a layer twice: first without gradients, then again when its backward comes. The result of the first
pass, out and LSE, is all that the second one needs of the forward: kept between the two, it costs 2 * hidden size + 4 *
heads bytes a token and layer (in bf16) and saves the most expensive part of the recomputation at long context.
"""

from __future__ import annotations

from collections import deque

import torch
from torch.autograd.function import once_differentiable

from s2_megatron.ops.api import AttentionCall, attention_backward, resolve_backend, s2_attention


class KeptOutputs:
    """Results of one layer's first passes, oldest first: backward passes come in the order of their forward passes."""

    def __init__(self):
        self._results: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._results)

    def keep(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """In a first pass (gradients off); otherwise nothing happens."""
        if not torch.is_grad_enabled():
            self._results.append((out, lse))

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The oldest result when gradients are on; None in a first pass, and for a layer that is not recomputed."""
        return self._results.popleft() if self._results and torch.is_grad_enabled() else None


class _KnownAttention(torch.autograd.Function):
    """s2_attention whose result is known: only the backward computes."""

    @staticmethod
    def forward(ctx, query, key, value, call, known):
        ctx.save_for_backward(query, key, value, *known)
        ctx.call = call
        return known[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        return *attention_backward(grad_out, None, query, key, value, out, lse, ctx.call), None, None


def kept_attention(
    query, key, value, layout, *, kept: KeptOutputs | None, softmax_scale, tensor_format, packed, backend, deterministic
):
    """s2_attention, which in a first pass keeps its result and in the second takes it. kept: None to do neither.
    Returns out."""
    known = None if kept is None else kept.take()
    if known is not None:
        scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        chosen = resolve_backend(backend, query.device.type)
        call = AttentionCall(layout.to(query.device), float(scale), tensor_format, packed, None, chosen, deterministic)
        return _KnownAttention.apply(query, key, value, call, known)
    options = dict(
        softmax_scale=softmax_scale,
        tensor_format=tensor_format,
        packed=packed,
        backend=backend,
        deterministic=deterministic,
    )
    out, lse = s2_attention(query, key, value, layout, return_lse=True, **options)
    if kept is not None:
        kept.keep(out, lse[None] if tensor_format == "thd" else lse)
    return out
