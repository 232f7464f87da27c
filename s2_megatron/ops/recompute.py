"""Attention under activation recomputation without a second forward pass of the attention.

Recomputation runs a layer twice: first without gradients, then again when its backward comes. The second pass needs
only the result of the first one, out and LSE. To store it takes 2 * hidden size + 4 * heads bytes a token and layer (in
bf16), and saves the most expensive part of the recomputation at long context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar

import torch

from s2_megatron.ops.api import attend
from s2_megatron.ops.autograd import first_derivative
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.offset import offset_gradient
from s2_megatron.ops.parts import attention_backward, attention_delta


class RecomputeOutputs:
    """What attention computed in the first pass of one checkpointed call, until its second pass takes it.

    It lives as long as the function that the call will run again: a call without a backward (no input with a gradient,
    a step that was abandoned) leaves nothing behind.
    """

    def __init__(self):
        # By the layer, and how many of its results in this call came before.
        self._results: dict[tuple[object, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._computed: Counter = Counter()

    def __len__(self) -> int:
        return len(self._results)

    def begin(self) -> None:
        """A pass begins."""
        self._computed.clear()

    def of(self, layer: object) -> LayerOutput:
        """The place of the layer's next result in this pass."""
        self._computed[layer] += 1
        return LayerOutput(self._results, (layer, self._computed[layer]))


class LayerOutput:
    """The (out, LSE) of one computation of attention in a checkpointed call."""

    def __init__(self, results: dict, key: tuple[object, int]):
        self._results, self._key = results, key

    def store(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """In a first pass (gradients off); otherwise nothing happens."""
        if not torch.is_grad_enabled():
            self._results[self._key] = out, lse

    def take(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The result that the first pass stored, for a second pass with this query. None in a first pass, or if nothing
        is stored (any more)."""
        known = self._results.pop(self._key, None) if torch.is_grad_enabled() else None
        assert known is None or (known[0].shape[:-1], known[0].dtype) == (query.shape[:-1], query.dtype), (
            f"a result of {known[0].shape} for a query of {query.shape}: the two passes of a call differ"
        )
        return known


_current: ContextVar[RecomputeOutputs | None] = ContextVar("checkpointed_call", default=None)


def keep_outputs(function: Callable) -> Callable:
    """`function` for one checkpointed call, which runs it twice: attention whose layer asks for `layer_output` keeps
    the results of the first pass for the second."""
    outputs = RecomputeOutputs()

    def run(*args, **kwargs):
        outputs.begin()
        outside = _current.set(outputs)
        try:
            return function(*args, **kwargs)
        finally:
            _current.reset(outside)

    return run


def layer_output(layer: object) -> LayerOutput | None:
    """The place of the next result of `layer` in the checkpointed call that runs; None outside of one."""
    outputs = _current.get()
    return None if outputs is None else outputs.of(layer)


class _KnownAttention(torch.autograd.Function):
    """Attention whose result is known: only the backward computes."""

    @staticmethod
    def forward(ctx, query, key, value, offset, call, known):
        ctx.save_for_backward(query, key, value, offset, *known)
        ctx.call = call
        return known[0]

    @staticmethod
    @first_derivative
    def backward(ctx, grad_out):
        query, key, value, offset, out, lse = ctx.saved_tensors
        grad_offset = None
        if ctx.needs_input_grad[3]:
            grad_offset = offset_gradient(attention_delta(grad_out, out, lse, ctx.call), lse, offset)
        return *attention_backward(grad_out, None, query, key, value, out, lse, ctx.call), grad_offset, None, None


def recompute_attention(
    query, key, value, call: AttentionCall, output: LayerOutput | None, offset: torch.Tensor | None = None
) -> torch.Tensor:
    """out of `attend`, whose result is stored in a first pass and taken in the second one. call: of make_call. output:
    None to do neither. offset: of the softmax, [H]."""
    known = None if output is None else output.take(query)
    if known is not None:
        return _KnownAttention.apply(query, key, value, offset, call.on_device(query.device), known)
    out, lse = attend(query, key, value, call, offset)
    if output is not None:
        output.store(out, lse)
    return out
