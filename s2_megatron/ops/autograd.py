"""`torch.ops.s2_megatron.attention`: S2 attention as an operator that torch.compile, torch.export and CUDA graphs can
carry.

An operator takes tensors, numbers and strings. What a call knows besides (`AttentionCall`) is taken apart into those
and put together again inside: index tensors go as tensors, so that a graph neither stores nor compares them; the layout
goes as a text that is its whole pattern (ops/stored_layouts.py). B batch, H query heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from s2_megatron.ops.call import FORMATS, AttentionCall, canonical_view
from s2_megatron.ops.layout import PackedSequence, Placement
from s2_megatron.ops.offset import add_offset_, offset_gradient, with_offset
from s2_megatron.ops.stored_layouts import keep, layout_of, text_of_layout

_CALL = (
    "Tensor? cu_seqlens, Tensor? cu_seqlens_padded, Tensor? query_block_ids, Tensor? query_rank, Tensor? key_slot, "
    "str layout, float softmax_scale, str tensor_format, str backend, bool deterministic, SymInt max_seqlen, "
    "SymInt n_blocks, SymInt n_slots, SymInt own_slots, int tile_blocks"
)

_library = torch.library.Library("s2_megatron", "DEF")


def _key_sets(keys: str) -> frozenset[int]:
    """The DispatchKeySets, as numbers, of alternatives such as "CPU AutocastCPU | CUDA AutocastCUDA"."""
    sets = []
    for alternative in keys.split("|"):
        found = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
        for key in alternative.split():
            found = found | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        sets.append(found.raw_repr())
    return frozenset(sets)


# What is known to be plain. Of a tensor: its class and its dispatch keys, which are a dense tensor's on a CPU or a CUDA
# device, made outside or inside of inference_mode. Of the thread: the keys that it adds to those of every tensor.
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_KEYS = _key_sets(
    "CPU AutogradCPU AutocastCPU ADInplaceOrView | CUDA AutogradCUDA AutocastCUDA ADInplaceOrView | "
    "CPU AutocastCPU | CUDA AutocastCUDA"
)
_PLAIN_THREAD_KEYS = _key_sets("BackendSelect ADInplaceOrView | BackendSelect")
_keys_of_tensor, _keys_of_thread = torch._C._dispatch_keys, torch._C._dispatch_tls_local_include_set
_torch_function_mode = torch._C._is_torch_function_mode_enabled
_hooks_of_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks


def first_derivative(backward: Callable) -> Callable:
    """A backward whose results raise RuntimeError when they are differentiated, instead of missing a term.

    Unlike torch's once_differentiable also where the incoming gradient is a constant, as that of out.sum() is.
    """

    @functools.wraps(backward)
    def run(ctx, *grads):
        if not torch.is_grad_enabled():  # the usual case: no create_graph
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        refuse = torch._C._functions.DelayedError(
            b"the backward of S2 attention has no derivative of its own; expected no second derivative (create_graph); "
            b"use dense attention in eager PyTorch for it",
            len(found),
        )
        return refuse(*(grad if grad is None else grad.detach().requires_grad_() for grad in found))

    return run


def _taken_apart(call: AttentionCall) -> tuple:
    packed, placement = call.packed, call.placement
    return (
        *((None, None) if packed is None else (packed.cu_seqlens, packed.cu_seqlens_padded)),
        *(
            (None, None, None)
            if placement is None
            else (placement.query_block_ids, placement.query_rank, placement.key_slot)
        ),
        text_of_layout(call.layout.handle),
        call.softmax_scale,
        call.tensor_format,
        call.backend,
        call.deterministic,
        0 if packed is None else packed.max_seqlen,
        *(
            (0,) * 4
            if placement is None
            else (placement.n_blocks, placement.n_slots, placement.own_slots, placement.tile_blocks)
        ),
    )


def _put_together(cu_seqlens, padded, ids, rank, slot, layout, scale, form, backend, deterministic, longest, *sizes):
    packed = None if cu_seqlens is None else PackedSequence(cu_seqlens, longest, padded)
    placement = None if ids is None else Placement(ids, rank, slot, *sizes)
    return AttentionCall(layout_of(layout), scale, form, packed, placement, backend, deterministic)


def _is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd alone sees the call, so that it may leave the dispatcher out. A list of what is known to need
    nothing else; everything else takes the operator, where PyTorch does for it what it does for all operators: tensor
    classes of others (DTensor, FakeTensor), lazily negated and zero tensors, meta and functional tensors, modes of
    functions and of dispatch, tracing, function transforms (vmap). Autocast, anomaly detection, the profiler, hooks of
    saved tensors and deterministic algorithms do not depend on the dispatcher."""
    if (
        torch.compiler.is_compiling()
        or _torch_function_mode()
        or _keys_of_thread().raw_repr() not in _PLAIN_THREAD_KEYS
    ):
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN_TYPES or _keys_of_tensor(tensor).raw_repr() not in _PLAIN_KEYS
        ):
            return False
    return True


def register_attention(forward: Callable, backward: Callable, delta: Callable, resolve_backend: Callable) -> Callable:
    """Defines the operators `attention` and `attention_backward`; returns attention as a function of (query, key,
    value, AttentionCall, softmax offset [H] or None).

    forward(query, key, value, call) -> (out, LSE), both contiguous, LSE [B, H, rows]; backward(grad_out, grad_lse or
    None, query, key, value, out, LSE, call) -> the three gradients, contiguous; delta(grad_out, out, LSE, call) ->
    rowsum(out * grad_out) [B, H, rows]. They run with real tensors only; a second derivative raises RuntimeError.
    resolve_backend(name, device type) -> name: a program may run on another device than it was traced on.
    """
    tags = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
    _library.define(
        f"attention(Tensor query, Tensor key, Tensor value, {_CALL}) -> (Tensor out, Tensor lse)", tags=tags
    )
    _library.define(
        "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
        f"Tensor lse, {_CALL}) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
        tags=tags,
    )
    attention_op, backward_op = (
        torch.ops.s2_megatron.attention.default,
        torch.ops.s2_megatron.attention_backward.default,
    )

    def here(call, device) -> AttentionCall:
        call = _put_together(*call)
        if (call.backend == "reference") != (device.type == "cuda"):
            return call
        return call._replace(backend=resolve_backend(call.backend, device.type))

    def run_forward(query, key, value, *call):
        return forward(query, key, value, here(call, query.device))

    def differentiate(grad_out, grad_lse, query, key, value, out, lse, call: AttentionCall):
        return tuple(
            backward(
                torch.zeros_like(out) if grad_out is None else grad_out, grad_lse, query, key, value, out, lse, call
            )
        )

    def run_backward(grad_out, grad_lse, query, key, value, out, lse, *call):
        return differentiate(grad_out, grad_lse, query, key, value, out, lse, here(call, query.device))

    def fake_forward(query, key, value, *call):
        text, form = call[5], call[7]
        keep(text)
        batch, heads, rows, _ = FORMATS[form]
        shape = [1 if batch is None else query.shape[batch], query.shape[heads], query.shape[rows]]
        return query.new_empty((*query.shape[:-1], value.shape[-1])), query.new_empty(
            shape, dtype=torch.promote_types(query.dtype, torch.float32)
        )

    def fake_backward(grad_out, grad_lse, query, key, value, out, lse, *call):
        return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))

    def delta_of_rows(grad_out, out, lse, call: AttentionCall, plain: bool):
        if grad_out is None:
            return torch.zeros_like(lse)
        if plain:
            return delta(grad_out, out, lse, call)
        products = (grad_out.to(lse.dtype) * out).sum(-1, keepdim=True)
        return canonical_view(products, call.tensor_format)[..., 0]

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx, query, key, value, offset, call
        ):  # AttentionCall, or what it was taken apart into (without offset): autograd works on each argument
            if isinstance(call, AttentionCall):
                out, lse = forward(query, key, value, call)
                if offset is not None:
                    add_offset_(out, lse, offset, call.tensor_format)
                ctx.as_saved = _hooks_of_saved_tensors(False) is None  # what is plain now will come back plain
            else:
                with torch._C._AutoDispatchBelowAutograd():
                    out, lse = attention_op(query, key, value, *call)
                ctx.layout = layout_of(call[5])  # whoever made it may have dropped it by the time of the backward
            ctx.save_for_backward(query, key, value, out, lse, offset)
            ctx.call = call
            ctx.set_materialize_grads(False)
            return out, lse

        @staticmethod
        @first_derivative
        def backward(ctx, grad_out, grad_lse):
            if grad_out is None and grad_lse is None:
                return None, None, None, None, None
            *saved, offset = ctx.saved_tensors
            call, grad_offset = ctx.call, None
            if isinstance(call, AttentionCall):
                plain = _is_plain(grad_out, grad_lse) and (ctx.as_saved or _is_plain(*saved, offset))
                if ctx.needs_input_grad[3]:
                    *_, out, lse = saved
                    row_sums = delta_of_rows(grad_out, out, lse, call, plain)
                    grad_offset = offset_gradient(row_sums if grad_lse is None else row_sums - grad_lse, lse, offset)
                if plain:
                    return *differentiate(grad_out, grad_lse, *saved, call), grad_offset, None
                call = _taken_apart(call)
            return *backward_op(grad_out, grad_lse, *saved, *call), grad_offset, None

    # Not torch.library.custom_op: its wrappers cost about 0.1 ms a call, these registrations half of it.
    _library.impl("attention", run_forward, "CompositeExplicitAutograd")
    _library.impl("attention_backward", run_backward, "CompositeExplicitAutograd")
    _library.impl(
        "attention", lambda query, key, value, *call: Attention.apply(query, key, value, None, call), "Autograd"
    )
    torch.library.register_fake("s2_megatron::attention", fake_forward, lib=_library)
    torch.library.register_fake("s2_megatron::attention_backward", fake_backward, lib=_library)

    def attention(query, key, value, call: AttentionCall, offset=None):
        # The ways through the dispatcher cost a third of a call's time on the CPU.
        if _is_plain(query, key, value, offset):
            return Attention.apply(query, key, value, offset, call)
        out, lse = attention_op(query, key, value, *_taken_apart(call))
        return (out, lse) if offset is None else with_offset(out, lse, offset, call.tensor_format)

    return attention
