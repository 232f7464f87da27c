"""Attention under activation recomputation without a second forward pass of the attention.

Recomputation runs a layer twice: first without gradients, then again when its backward comes. The result of the first
pass, out and LSE, is all that the second one needs of the forward: stored between the two, it costs 2 * hidden size + 4
* heads bytes a token and layer (in bf16) and saves the most expensive part of the recomputation at long context.
"""

from __future__ import annotations

from collections import deque

import torch

from s2_megatron.ops.api import attend, attention_backward
from s2_megatron.ops.autograd import first_derivative
from s2_megatron.ops.call import AttentionCall


class RecomputeOutputs:
    """(out, LSE) of one layer's first passes, oldest first: backward passes come in the order of their forward
    passes."""

    def __init__(self):
        self._results: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._results)

    def store(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """In a first pass (gradients off); otherwise nothing happens."""
        if not torch.is_grad_enabled():
            self._results.append((out, lse))

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The oldest result when gradients are on; None in a first pass, and for a layer that is not recomputed."""
        return self._results.popleft() if self._results and torch.is_grad_enabled() else None


class _KnownAttention(torch.autograd.Function):
    """Attention whose result is known: only the backward computes."""

    @staticmethod
    def forward(ctx, query, key, value, call, known):
        ctx.save_for_backward(query, key, value, *known)
        ctx.call = call
        return known[0]

    @staticmethod
    @first_derivative
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        return *attention_backward(grad_out, None, query, key, value, out, lse, ctx.call), None, None


def recompute_attention(query, key, value, call: AttentionCall, outputs: RecomputeOutputs | None) -> torch.Tensor:
    """out of `attend`, whose result is stored in a first pass and taken in the second one. call: of make_call. outputs:
    None to do neither."""
    known = None if outputs is None else outputs.take()
    if known is not None:
        return _KnownAttention.apply(query, key, value, call.on_device(query.device), known)
    out, lse = attend(query, key, value, call)
    if outputs is not None:
        outputs.store(out, lse)
    return out
