"""Attention without autograd: the forward, and the backward as a whole or in parts (delta, dK and dV, dQ), between
which context parallelism sends and receives. Each goes to the backend that the call names.

B batch, H query heads, G KV heads, D head dim. Inside, tensors are views [B, heads, rows, D].
"""

from __future__ import annotations

import torch

from s2_megatron.ops import reference
from s2_megatron.ops.call import AttentionCall, Backend, canonical_view
from s2_megatron.ops.checks import addressable, check_once, softmax_scale_of
from s2_megatron.ops.head_dims import differ, padded, widened
from s2_megatron.ops.layout import Layout, Placement
from s2_megatron.printing import print_once


def _implementation(backend: str) -> Backend:
    if backend == "reference":
        return reference
    from s2_megatron.kernels import dispatch

    return dispatch


def prepare_placement(
    layout: Layout, placement: Placement, rows: int, head_dim: int, dtype: torch.dtype, backend: str
) -> None:
    """Makes what the kernels will read of a placement, lest the first call waits for it. rows: of the queries. backend:
    a resolved one."""
    call = AttentionCall(layout, softmax_scale_of(None, head_dim), placement=placement, backend=backend)
    _implementation(backend).prepare(call, rows, head_dim, dtype)


def _leaves_rows(call) -> bool:
    """Whether the implementation leaves rows alone: the reference those outside of documents, and all of them empty
    slots."""
    return (call.packed is not None and call.backend == "reference") or (
        call.placement is not None and call.placement.key_slot is not None
    )


def _empty_like(tensor, call):
    """An output for a tensor's shape, contiguous in its format; zeros where the kernels may leave rows alone."""
    make = torch.zeros_like if _leaves_rows(call) else torch.empty_like
    return make(tensor, memory_format=torch.contiguous_format)


def _empty_for_queries(query, head_dim, call):
    """The same for query's rows: of placed queries every row is written. head_dim: value's for out."""
    leaves_rows = call.packed is not None and call.backend == "reference"
    make = torch.zeros if leaves_rows else torch.empty
    return make((*query.shape[:-1], head_dim), dtype=query.dtype, device=query.device)


def _is_padded(query, value, call) -> bool:
    """Whether the head dims of a call differ, and its backend has one: the reference computes with both."""
    return call.backend != "reference" and differ(query, value)


def _views(tensors, form):
    """[B, heads, rows, D] views of (key, value) or None."""
    return None if tensors is None else [canonical_view(tensor, form) for tensor in tensors]


def joins_keys(query, key, value, more, call: AttentionCall) -> bool:
    """Whether attention_forward and attention_backward_dq take kv_heads and more: the Gluon kernels do."""
    q, k, v, *further = _views((query, key, value, *more), call.tensor_format)
    return _implementation(call.backend).joins_keys(q, k, v, further, call)


def empty_lse(query, tensor_format: str) -> torch.Tensor:
    """An LSE for query: [B, H, rows], fp32 (fp64 for fp64)."""
    shape = canonical_view(query, tensor_format).shape[:3]
    return torch.empty(shape, dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)


def attention_forward(query, key, value, call: AttentionCall, initial=None, kv_heads=None, more=None, into=None):
    """(out, LSE) without autograd. initial: (out, LSE) of the same queries over earlier keys, continued by this call.

    out has query's rows and dtype and value's head dim; LSE is [B, H, rows], fp32 (fp64 for fp64), natural log, -inf
    for a query without a key. into: (out, LSE) to write instead of new ones: out of any type (fp32 for a part that is
    continued, so that it is rounded once) and strides, LSE perhaps the initial one.
    Where joins_keys says so: kv_heads, (first, end) of those whose query heads are computed, the others' rows are left
    alone; more, (key, value) of the placement's slots from own_slots on, like key, whose heads share memory. For
    kv_heads (0, end) the out of `into` and of `initial` needs no more heads than those.
    """
    return forward_and_again(query, key, value, call, initial, kv_heads, more, into)[:2]


def forward_and_again(query, key, value, call: AttentionCall, initial=None, kv_heads=None, more=None, into=None):
    """(out, LSE, how to write them again for the same kind of call or None)."""
    q, k, v = check_once(query, key, value, call, more)
    if _is_padded(query, value, call):
        assert initial is None and more is None and into is None, "context parallelism pads before"
        out, lse, _ = forward_and_again(*padded(query, key, value), call)
        return out[..., : value.shape[-1]].contiguous(), lse, None
    form, again = call.tensor_format, None
    out, lse = (_empty_for_queries(query, value.shape[-1], call), empty_lse(query, form)) if into is None else into
    if call.packed is not None and call.backend == "reference":
        lse.fill_(float("-inf"))
    if initial is not None:
        initial = (canonical_view(initial[0], form), initial[1])
    if q.numel():
        again = _implementation(call.backend).forward(
            q,
            k,
            v,
            canonical_view(out, form),
            lse,
            call,
            initial,
            kv_heads,
            _views(more, form),
        )
    return out, lse, again


def _gradient_view(grad_out, call: AttentionCall):
    """canonical_view of a gradient that autograd made, with strides that the kernels can address."""
    view = canonical_view(grad_out, call.tensor_format)
    if call.backend == "reference" or addressable(view):
        return view
    print_once(
        f"S2 attention copies the gradient of its output, whose strides {grad_out.stride()} do not fit into 32 bits "
        "inside a tile"
    )
    return view.contiguous()


def attention_backward(grad_out, grad_lse, query, key, value, out, lse, call: AttentionCall):
    """(grad_query, grad_key, grad_value) from the final out and LSE. grad_lse [B, H, rows] or None."""
    return backward_and_again(grad_out, grad_lse, query, key, value, out, lse, call)[0]


def backward_and_again(grad_out, grad_lse, query, key, value, out, lse, call: AttentionCall):
    """(the three gradients, how to write them again for the same kind of call or None)."""
    if _is_padded(query, value, call):
        wide = padded(query, key, value)
        of_out = widened(grad_out, out, width=wide[0].shape[-1])
        grads, _ = backward_and_again(of_out[0], grad_lse, *wide, of_out[1], lse, call)
        return [grad[..., : own.shape[-1]].contiguous() for grad, own in zip(grads, (query, key, value))], None
    again = None
    form = call.tensor_format
    grads = [_empty_like(tensor, call) for tensor in (query, key, value)]
    if query.numel():
        views = [canonical_view(tensor, form) for tensor in (query, key, value, out)]
        gradient = _gradient_view(grad_out, call)
        again = _implementation(call.backend).backward(
            gradient,
            grad_lse,
            *views,
            lse,
            *(canonical_view(g, form) for g in grads),
            call,
        )
        if gradient.data_ptr() != grad_out.data_ptr():  # a copy, of other strides
            again = None
    return grads, again


# The backward in parts, for context parallelism: between them it sends and receives.
def attention_delta(grad_out, out, lse, call: AttentionCall):
    """rowsum(out * grad_out) [B, H, rows], fp32 (fp64 for fp64), contiguous: what both other parts read."""
    row_sums = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    if out.numel():
        _implementation(call.backend).delta(
            _gradient_view(grad_out, call), None, canonical_view(out, call.tensor_format), lse, row_sums
        )
    return row_sums


def attention_backward_dkdv(
    grad_out, query, key, value, lse, row_sums, grad_key, grad_value, call: AttentionCall, returned=None
) -> None:
    """Writes the part of dK and dV that these queries give to these keys. Every row of a slot that the placement names
    is written, no other.

    lse: the final one, over all keys. row_sums: attention_delta's. grad_key, grad_value: like key, any dtype and
    strides; heads may share memory (stride 0) where their slots differ. returned: gradients of the same keys that other
    queries gave, added in fp32 before the result is rounded: (buffer [slots, block, 2 (K, V), B, D], starts int32
    [blocks * G + 1], entries int32), of which the slots of block b of KV head g are entries[starts[b * G + g]] and
    following, added in that order; for key in whole blocks, heads with memory of their own. Where the kernels compute
    blocks in parts, block stands for a part.
    """
    views = [
        _gradient_view(grad_out, call),
        *(canonical_view(tensor, call.tensor_format) for tensor in (query, key, value)),
    ]
    grads = [canonical_view(tensor, call.tensor_format) for tensor in (grad_key, grad_value)]
    assert not _is_padded(query, value, call), "context parallelism pads before"
    if query.numel():
        _implementation(call.backend).backward_dkdv(*views, lse, row_sums, *grads, call, returned)


def attention_backward_dq(
    grad_out, query, key, value, lse, row_sums, call: AttentionCall, initial=None, kv_heads=None, more=None, into=None
):
    """dQ over these keys. initial: dQ of the same queries over other keys (fp32, fp64 for fp64), added to it. kv_heads,
    more, into (dQ, of any type): as in attention_forward."""
    grad_query = _empty_for_queries(query, query.shape[-1], call) if into is None else into
    form = call.tensor_format
    assert not _is_padded(query, value, call), "context parallelism pads before"
    views = [_gradient_view(grad_out, call), *(canonical_view(tensor, form) for tensor in (query, key, value))]
    if query.numel():
        _implementation(call.backend).backward_dq(
            *views,
            lse,
            row_sums,
            canonical_view(grad_query, form),
            call,
            None if initial is None else canonical_view(initial, form),
            kv_heads,
            _views(more, form),
        )
    return grad_query
