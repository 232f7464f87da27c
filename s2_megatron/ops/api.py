"""`s2_attention`: S2 block-sparse causal attention on strided tensors, with autograd, over a Triton and a PyTorch
backend.

The op computes through parts.py, which context parallelism calls by itself; ending.py pads the queries of a decoding
step. S sequence, B batch, H query heads, G KV heads (H a multiple of G), D head dim, T packed tokens.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from s2_megatron.ops.autograd import register_attention
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.checks import check_arguments, softmax_scale_of
from s2_megatron.ops.ending import Ending, is_ending
from s2_megatron.ops.layout import Layout, PackedSequence, Placement, layout_for
from s2_megatron.ops.offset import check_offset
from s2_megatron.ops.parts import (
    attention_backward,
    attention_delta,
    attention_forward,
    backward_and_again,
    forward_and_again,
)
from s2_megatron.ops.repeated import kind_of_call, remember
from s2_megatron.patterns.checks import shown
from s2_megatron.patterns.ranges import Pattern
from s2_megatron.printing import print_once

BACKENDS = ("auto", "gluon", "triton", "reference")
_resolved_on_cuda: set[str] = set()


def s2_attention(
    query,
    key,
    value,
    layout: Layout | Pattern,
    *,
    softmax_scale: float | None = None,
    tensor_format: str = "sbhd",
    packed: PackedSequence | None = None,
    placement: Placement | None = None,
    softmax_offset: torch.Tensor | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
):
    """S2 block-sparse causal attention, differentiable (once) in query, key, value, softmax_offset, and through LSE.

    query [S, B, H, D] (sbhd), [B, S, H, D] (bshd), [B, H, S, D] (bhsd) or [T, H, D] (thd, with `packed`); key and value
    likewise with G heads and any strides; fp16, bf16, fp32 (fp64 on the reference). value may have another head dim
    than query and key: out has it then, and kernels compute with zeros up to the larger one (head_dims.py). A key
    longer than the query means that the query is its end (static inference). layout: a Layout, or the pattern itself,
    whose layout is then built at the first call and stays with it. placement: whole query blocks and key slots of a
    longer sequence (see Placement). softmax_scale: 1e-6 to 1e6, default D ** -0.5. softmax_offset: [H], floating point;
    exp of it is added to the sum under each head's softmax, as of a key without a value (a learned sink; zeros:
    off-by-one). deterministic: the backward is bitwise repeatable (the portable kernels and the reference always are),
    also under torch.use_deterministic_algorithms. backend: see resolve_backend. torch.compile, torch.export and modes
    see one operator, torch.ops.s2_megatron.attention; an exported program holds the pattern. torch 2.11 compiles a call
    only with a layout, or with a pattern that another call has had. torch.vmap works; torch.func.grad and forward-mode
    derivatives raise PyTorch's errors.
    Returns out, of query's shape (with value's head dim) and dtype; with return_lse (out, LSE), LSE [B, H, S] ([H, T]
    for thd), fp32, natural log. Raises ValueError for arguments of another type or out of range, and for tensors that
    do not fit each other, the layout or the backend. Only the reference checks the numbers in cu_seqlens, because
    reading them waits for the GPU; with the environment variable S2_CHECK_VALUES=1 all backends do.
    """
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse={shown(return_lse)}; expected True or False; use one of them")
    call = make_call(
        query,
        key,
        value,
        layout,
        softmax_scale=softmax_scale,
        tensor_format=tensor_format,
        packed=packed,
        placement=placement,
        backend=backend,
        deterministic=deterministic,
    )
    check_offset(softmax_offset, query, tensor_format)
    out, lse = attend(query, key, value, call, softmax_offset)
    if tensor_format == "thd":
        lse = lse[0]
    return (out, lse) if return_lse else out


def make_call(
    query,
    key,
    value,
    layout: Layout | Pattern,
    *,
    softmax_scale: float | None = None,
    tensor_format: str = "sbhd",
    packed: PackedSequence | None = None,
    placement: Placement | None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> AttentionCall:
    """The checked call that these arguments of s2_attention are, for `attend` and ops/recompute.py. Raises ValueError
    for arguments of another type or out of range."""
    check_arguments(query, key, value, layout, tensor_format, packed, placement, deterministic)
    backend = resolve_backend(backend, query.device.type)
    scale = softmax_scale_of(softmax_scale, query.shape[-1])
    if not isinstance(layout, Layout):
        layout = layout_for(layout)
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        deterministic = True
    return AttentionCall(layout, scale, tensor_format, packed, placement, backend, deterministic)


@torch.compiler.assume_constant_result  # looked up, checked and printed while a graph is traced, not in it
def resolve_backend(name: str, device_type: str) -> str:
    """'auto', 'gluon', 'triton' or 'reference' for a backend setting; printed once. 'auto' is the reference on a CPU;
    on a GPU it stays, and each call takes the Gluon kernels for Hopper where they compute it and the portable Triton
    kernels elsewhere (kernels/dispatch.py).

    Raises ValueError for an unknown name, when Triton is not installed on a GPU machine, and for 'gluon' or 'triton' on
    a CPU (except 'triton' under Triton's interpreter, TRITON_INTERPRET=1).
    """
    if device_type == "cuda" and isinstance(name, str) and name in _resolved_on_cuda:
        return name
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"backend={shown(name)}; expected one of {', '.join(BACKENDS)}; use auto")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    chosen = "reference" if name == "auto" and device_type != "cuda" else name
    if chosen != "reference":
        if importlib.util.find_spec("triton") is None:
            raise ValueError(
                f"backend={name} needs Triton on {device_type}, and it is not installed; pip install triton, or set "
                "backend=reference to accept the slow PyTorch version"
            )
        if device_type != "cuda" and not (interpreted and chosen == "triton"):
            raise ValueError(
                f"backend={name} on device {device_type}: the kernels need a GPU; use backend=reference or auto"
            )
    if device_type == "cuda":
        _resolved_on_cuda.add(name)  # it is `chosen`; to look again takes as long as a launch
    print_once(f"S2 attention backend: {chosen} ({'set' if name != 'auto' else 'chosen'} for {device_type})")
    return chosen


def _op_forward(query, key, value, call):
    known, kind = call.layout.known_forwards, kind_of_call(call, query, key, value)
    again, lse_shape = known.get(kind, (None, None))  # one look: another thread may empty the table
    if again is not None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=query.device)
        if again(query, key, value, out, lse):
            return out, lse
    call = call.on_device(query.device)
    if not is_ending(query, key, call):
        out, lse, again = forward_and_again(query, key, value, call)
        remember(known, kind, again and (again, lse.shape))
        return out, lse
    ending = Ending(query, key, call)
    out, lse = attention_forward(ending.pad(query, ending.rows), key, value, ending.call)
    return ending.cut(out, ending.rows), ending.cut(lse, 2)


def _op_backward(grad_out, grad_lse, query, key, value, out, lse, call):
    known, tensors = call.layout.known_backwards, (grad_out, grad_lse, query, key, value, out, lse)
    kind = kind_of_call(call, *tensors)
    again = known.get(kind)
    if again is not None:
        grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
        if again(*tensors, *grads):
            return grads
    call = call.on_device(query.device)
    if not is_ending(query, key, call):
        grads, again = backward_and_again(*tensors, call)
        remember(known, kind, again)
        return grads
    ending = Ending(query, key, call)
    grad_out, query, out = (ending.pad(tensor, ending.rows) for tensor in (grad_out, query, out))
    grad_lse, lse = None if grad_lse is None else ending.pad(grad_lse, 2), ending.pad(lse, 2)
    grad_query, grad_key, grad_value = attention_backward(grad_out, grad_lse, query, key, value, out, lse, ending.call)
    return ending.cut(grad_query, ending.rows), grad_key, grad_value


# attend(query, key, value, call of make_call, softmax offset [H] or None) -> (out, LSE [B, H, rows]), with autograd.
attend = register_attention(_op_forward, _op_backward, attention_delta, resolve_backend)
