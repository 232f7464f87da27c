"""`s2_attention`: S2 block-sparse causal attention on strided tensors, with autograd, over a Triton and a PyTorch backend.

S sequence, B batch, H query heads, G KV heads (H a multiple of G), D head dim, T packed tokens. Inside, tensors are views [B, heads, rows, D].
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch

from s2_megatron import reference
from s2_megatron.attention_op import FORMATS, AttentionCall, register_attention
from s2_megatron.layout import Layout, PackedSequence, Placement
from s2_megatron.printing import print_once

BACKENDS = ("auto", "gluon", "triton", "reference")
HEAD_DIM_LIMIT = 256
LARGEST_TILE = 256  # rows or head dims
SMALLEST_KERNEL_BLOCK = 16  # the tensor cores' smallest tile


@torch.compiler.assume_constant_result  # looked up, checked and printed while a graph is traced, not in it
def resolve_backend(name: str, device_type: str) -> str:
    """'auto', 'gluon', 'triton' or 'reference' for a backend setting; printed once. 'auto' is the reference on a CPU; on a GPU it stays,
    and each call takes the Gluon kernels for Hopper where they compute it and the portable Triton kernels elsewhere (kernels/launch.py).

    Raises ValueError for an unknown name, when Triton is not installed on a GPU machine, and for 'gluon' or 'triton' on a CPU (except 'triton'
    under Triton's interpreter, TRITON_INTERPRET=1).
    """
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r}; expected one of {', '.join(BACKENDS)}")
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
    print_once(f"S2 attention backend: {chosen} ({'set' if name != 'auto' else 'chosen'} for {device_type})")
    return chosen


def _implementation(backend):
    if backend == "reference":
        return reference
    from s2_megatron.kernels import launch

    return launch


def prepare_placement(layout: Layout, placement: Placement, rows: int, head_dim: int, dtype: torch.dtype, backend: str) -> None:
    """Makes what the kernels will read of a placement, lest the first call waits for it. rows: of the queries. backend: a resolved one."""
    if backend != "reference":
        _implementation(backend).prepare(layout, placement, rows, head_dim, dtype, backend)


def _settings(call, **more):
    """What the kernels take beside the arguments that they share with the reference."""
    return {} if call.backend == "reference" else dict(backend=call.backend, **more)


def canonical_view(tensor: torch.Tensor, tensor_format: str) -> torch.Tensor:
    """[B, heads, rows, D] view of a tensor in one of FORMATS."""
    batch, heads, rows, dim = FORMATS[tensor_format]
    if batch is None:
        return tensor.permute(heads, rows, dim).unsqueeze(0)
    return tensor.permute(batch, heads, rows, dim)


def _leaves_rows(call) -> bool:
    """Whether the implementation leaves rows alone: the reference those outside of documents, and all of them empty slots."""
    return (call.packed is not None and call.backend == "reference") or (call.placement is not None and call.placement.key_slot is not None)


def _empty_like(tensor, call):
    """An output for a tensor's shape, contiguous in its format; zeros where the kernels may leave rows alone."""
    return (torch.zeros if _leaves_rows(call) else torch.empty)(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _empty_for_queries(query, call, dtype):
    """The same for query's shape: of placed queries every row is written."""
    leaves_rows = call.packed is not None and call.backend == "reference"
    return (torch.zeros if leaves_rows else torch.empty)(query.shape, dtype=dtype or query.dtype, device=query.device)


def _check(query, key, value, call: AttentionCall):
    layout, form = call.layout, call.tensor_format
    if form not in FORMATS:
        raise ValueError(f"tensor_format={form!r}; expected one of {', '.join(FORMATS)}")
    dims = 3 if form == "thd" else 4
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != dims:
            raise ValueError(f"{name} has {tensor.ndim} dimensions; tensor_format={form} has {dims}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, query {query.dtype} on {query.device}; expected the same"
            )
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"query has dtype {query.dtype}; expected float16, bfloat16 or float32")
    if call.backend != "reference" and query.dtype == torch.float64:
        raise ValueError("query has dtype float64, which the Triton kernels do not compute; use backend=reference")
    if call.backend != "reference" and layout.block_size < SMALLEST_KERNEL_BLOCK:
        raise ValueError(
            f"block_size={layout.block_size}: the Triton kernels compute blocks of {SMALLEST_KERNEL_BLOCK} tokens or more; "
            "use a larger block_size, or backend=reference"
        )
    q, k, v = (canonical_view(tensor, form) for tensor in (query, key, value))
    if call.backend != "reference":
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            # The kernels' offsets inside a tile are 32-bit.
            if LARGEST_TILE * (tensor.stride(2) + tensor.stride(3)) >= 2**31:
                raise ValueError(f"{name} has strides {tensor.stride(2)} and {tensor.stride(3)} between rows and head dims; make it contiguous")
    if q.shape[1] != layout.num_heads or k.shape[1] != layout.num_kv_heads:
        raise ValueError(
            f"query has {q.shape[1]} heads and key {k.shape[1]}; the layout has {layout.num_heads} and {layout.num_kv_heads}"
        )
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"shapes do not fit: query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}; expected the same "
            "batch and head dim, and key like value"
        )
    if q.shape[3] > HEAD_DIM_LIMIT:
        raise ValueError(f"head dim {q.shape[3]}; expected at most {HEAD_DIM_LIMIT}")
    if (form == "thd") != (call.packed is not None):
        raise ValueError(
            f"tensor_format={form} with packed={'set' if call.packed else None}; thd needs packed=PackedSequence(...), the others none"
        )
    limit = getattr(layout.pattern, "num_blocks", None)
    longest = call.packed.max_seqlen if call.packed else k.shape[2]
    if call.placement is None and limit is not None:
        layout.pattern.check_length(longest)
    if call.packed is not None:
        if len(call.packed.cu_seqlens) < 2:
            raise ValueError(f"cu_seqlens has {len(call.packed.cu_seqlens)} entries; expected one more than documents, at least 2")
        for tensor in (call.packed.cu_seqlens, call.packed.starts):
            if tensor.dtype != torch.int32 or tensor.device != query.device or not tensor.is_contiguous():
                raise ValueError(
                    f"cu_seqlens is {tensor.dtype} on {tensor.device}; expected contiguous int32 on {query.device}"
                )
        if call.packed.cu_seqlens.shape != call.packed.starts.shape:
            raise ValueError(
                f"cu_seqlens has {len(call.packed.cu_seqlens)} entries, cu_seqlens_padded {len(call.packed.starts)}; expected the same"
            )
    if call.placement is not None:
        if call.packed is not None:
            raise ValueError(
                "placement together with packed: whole-block placement is for one sequence; pack after gathering the sequence"
            )
        steps = call.placement.steps
        if steps is not None and steps.pattern is not layout.pattern and steps.pattern != layout.pattern:
            raise ValueError("the placement was made for another pattern than the layout's; make it with pattern=layout.pattern")
        expected = len(call.placement.query_block_ids) * layout.block_size
        if q.shape[2] != expected:
            raise ValueError(
                f"query has {q.shape[2]} rows; {len(call.placement.query_block_ids)} query blocks of {layout.block_size} are {expected}"
            )
        slot = call.placement.key_slot
        if slot is not None and slot.shape[0] != layout.num_kv_heads:
            raise ValueError(f"key_slot has {slot.shape[0]} KV heads; the layout has {layout.num_kv_heads}")
        blocks = k.shape[2] // layout.block_size if slot is not None else -(-k.shape[2] // layout.block_size)
        if blocks < call.placement.n_slots or (slot is None and blocks > call.placement.n_slots):
            raise ValueError(
                f"key has {k.shape[2]} rows, {blocks} blocks of {layout.block_size}; the placement reads {call.placement.n_slots} of them"
            )
        if call.placement.query_block_ids.device != query.device:
            raise ValueError(
                f"placement is on {call.placement.query_block_ids.device}, query on {query.device}; give Placement.make the device"
            )
        if limit is not None and call.placement.n_blocks > limit:
            raise ValueError(f"placement has {call.placement.n_blocks} blocks, the block mask only {limit}")
    elif q.shape[2] != k.shape[2]:
        raise ValueError(f"query has {q.shape[2]} rows and key {k.shape[2]}; a shorter query needs a placement, packed ones equal rows")


def attention_forward(query, key, value, call: AttentionCall, initial=None, out_dtype=None):
    """(out, LSE) without autograd. initial: (out, LSE) of the same queries over earlier keys, continued by this call.

    out has query's shape and out_dtype (default query's dtype; fp32 for a part that is continued, so that it is rounded once); LSE is
    [B, H, rows], fp32 (fp64 for fp64), natural log, -inf for a query without a key.
    """
    _check(query, key, value, call)
    form = call.tensor_format
    q, k, v = (canonical_view(tensor, form) for tensor in (query, key, value))
    out = _empty_for_queries(query, call, out_dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    if call.packed is not None and call.backend == "reference":
        lse.fill_(float("-inf"))
    if initial is not None:
        initial = (canonical_view(initial[0], form), initial[1])
    if q.numel():
        _implementation(call.backend).forward(
            q,
            k,
            v,
            canonical_view(out, form),
            lse,
            call.layout,
            call.softmax_scale,
            call.packed,
            call.placement,
            initial,
            **_settings(call),
        )
    return out, lse


def attention_backward(grad_out, grad_lse, query, key, value, out, lse, call: AttentionCall):
    """(grad_query, grad_key, grad_value) from the final out and LSE. grad_lse [B, H, rows] or None."""
    form = call.tensor_format
    grads = [_empty_like(tensor, call) for tensor in (query, key, value)]
    if query.numel():
        views = [canonical_view(tensor, form) for tensor in (query, key, value, out)]
        _implementation(call.backend).backward(
            canonical_view(grad_out, form),
            grad_lse,
            *views,
            lse,
            *(canonical_view(g, form) for g in grads),
            call.layout,
            call.softmax_scale,
            call.packed,
            call.placement,
            **_settings(call, deterministic=call.deterministic),
        )
    return grads


# The backward in parts, for context parallelism: between them it sends and receives.
def attention_delta(grad_out, out, lse, call: AttentionCall):
    """rowsum(out * grad_out) [B, H, rows], fp32 (fp64 for fp64), contiguous: what both other parts read."""
    row_sums = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    if out.numel():
        _implementation(call.backend).delta(
            canonical_view(grad_out, call.tensor_format), None, canonical_view(out, call.tensor_format), lse, row_sums
        )
    return row_sums


def attention_backward_dkdv(grad_out, query, key, value, lse, row_sums, grad_key, grad_value, call: AttentionCall, returned=None) -> None:
    """Writes the part of dK and dV that these queries give to these keys. Every row of a slot that the placement names is written, no other.

    lse: the final one, over all keys. row_sums: attention_delta's. grad_key, grad_value: like key, any dtype and strides; heads may share
    memory (stride 0) where their slots differ. returned: gradients of the same keys that other queries gave, added in fp32 before the result
    is rounded: (buffer [slots, block, 2 (K, V), B, D], starts int32 [blocks * G + 1], entries int32), of which the slots of block b of KV
    head g are entries[starts[b * G + g]] and following, added in that order; for key in whole blocks, heads with memory of their own.
    """
    views = [canonical_view(tensor, call.tensor_format) for tensor in (grad_out, query, key, value)]
    grads = [canonical_view(tensor, call.tensor_format) for tensor in (grad_key, grad_value)]
    if query.numel():
        _implementation(call.backend).backward_dkdv(
            *views, lse, row_sums, *grads, call.layout, call.softmax_scale, call.packed, call.placement, returned, **_settings(call)
        )


def attention_backward_dq(grad_out, query, key, value, lse, row_sums, call: AttentionCall, initial=None, dtype=None):
    """dQ over these keys, in `dtype` (default query's). initial: dQ of the same queries over other keys (fp32, fp64 for fp64), added to it."""
    grad_query = _empty_for_queries(query, call, dtype)
    form = call.tensor_format
    views = [canonical_view(tensor, form) for tensor in (grad_out, query, key, value)]
    if query.numel():
        _implementation(call.backend).backward_dq(
            *views,
            lse,
            row_sums,
            canonical_view(grad_query, form),
            call.layout,
            call.softmax_scale,
            call.packed,
            call.placement,
            None if initial is None else canonical_view(initial, form),
            **_settings(call),
        )
    return grad_query


@lru_cache(maxsize=256)
def _placement_of_end(first_block: int, n_blocks: int, device: torch.device) -> Placement:
    """The last query blocks of a sequence, from first_block on; kept, for every layer of every decoding step of a block asks for the same."""
    return Placement.make(range(first_block, n_blocks), n_blocks, device=device)


class _Ending:
    """A query that is the end of a longer sequence (static inference), padded to whole blocks. rows: the dimension of its rows."""

    def __init__(self, query, key, call: AttentionCall):
        self.rows = FORMATS[call.tensor_format][2]
        self.length, block = query.shape[self.rows], call.layout.block_size
        start = key.shape[self.rows] - self.length
        n_blocks = -(-key.shape[self.rows] // block)
        self.before, self.padded_length = start % block, (n_blocks - start // block) * block
        self.call = call._replace(placement=_placement_of_end(start // block, n_blocks, query.device))

    def pad(self, tensor, rows: int):
        shape = list(tensor.shape)
        shape[rows] = self.padded_length
        padded = tensor.new_zeros(shape)
        padded.narrow(rows, self.before, self.length).copy_(tensor)
        return padded

    def cut(self, tensor, rows: int):
        return tensor.narrow(rows, self.before, self.length).clone(memory_format=torch.contiguous_format)


def _is_ending(query, key, call) -> bool:
    rows = FORMATS.get(call.tensor_format, (None,) * 4)[2]
    return call.placement is None and call.packed is None and query.ndim == key.ndim == 4 and query.shape[rows] < key.shape[rows]


def _op_forward(query, key, value, call):
    call = call._replace(layout=call.layout.to(query.device))
    if not _is_ending(query, key, call):
        return attention_forward(query, key, value, call)
    ending = _Ending(query, key, call)
    out, lse = attention_forward(ending.pad(query, ending.rows), key, value, ending.call)
    return ending.cut(out, ending.rows), ending.cut(lse, 2)


def _op_backward(grad_out, grad_lse, query, key, value, out, lse, call):
    call = call._replace(layout=call.layout.to(query.device))
    if not _is_ending(query, key, call):
        return attention_backward(grad_out, grad_lse, query, key, value, out, lse, call)
    ending = _Ending(query, key, call)
    grad_out, query, out = (ending.pad(tensor, ending.rows) for tensor in (grad_out, query, out))
    grad_lse, lse = None if grad_lse is None else ending.pad(grad_lse, 2), ending.pad(lse, 2)
    grad_query, grad_key, grad_value = attention_backward(grad_out, grad_lse, query, key, value, out, lse, ending.call)
    return ending.cut(grad_query, ending.rows), grad_key, grad_value


_attention = register_attention(_op_forward, _op_backward)


def s2_attention(
    query,
    key,
    value,
    layout: Layout,
    *,
    softmax_scale: float | None = None,
    tensor_format: str = "sbhd",
    packed: PackedSequence | None = None,
    placement: Placement | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
):
    """S2 block-sparse causal attention, differentiable (once) in query, key, value, and through LSE.

    query [S, B, H, D] (sbhd), [B, S, H, D] (bshd), [B, H, S, D] (bhsd) or [T, H, D] (thd, with `packed`); key and value likewise with G heads
    and any strides; fp16, bf16, fp32 (fp64 on the reference). A key longer than the query means that the query is its end (static inference).
    placement: whole query blocks and key slots of a longer sequence (see Placement). softmax_scale: default D ** -0.5. deterministic: the
    backward is bitwise repeatable (the portable kernels and the reference always are). backend: see resolve_backend.
    Returns out, of query's shape and dtype; with return_lse (out, LSE), LSE [B, H, S] ([H, T] for thd), fp32, natural log.
    Raises ValueError for tensors that do not fit each other, the layout or the backend.
    """
    backend = resolve_backend(backend, query.device.type)
    if softmax_scale is None:
        softmax_scale = query.shape[-1] ** -0.5
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale={softmax_scale}; expected a positive number, e.g. head_dim ** -0.5")
    if tensor_format not in FORMATS:
        raise ValueError(f"tensor_format={tensor_format!r}; expected one of {', '.join(FORMATS)}")
    call = AttentionCall(layout, float(softmax_scale), tensor_format, packed, placement, backend, deterministic)
    out, lse = _attention(query, key, value, call)
    if tensor_format == "thd":
        lse = lse[0]
    return (out, lse) if return_lse else out
