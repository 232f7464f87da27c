"""What the op refuses: tensors that do not fit each other, the layout or the backend."""

from __future__ import annotations

import torch

from s2_megatron.ops.call import FORMATS, AttentionCall, canonical_view

HEAD_DIM_LIMIT = 256
LARGEST_TILE = 256  # rows or head dims
SMALLEST_KERNEL_BLOCK = 16  # the tensor cores' smallest tile


def addressable(view: torch.Tensor) -> bool:
    """Of a view [B, heads, rows, D]: whether its offsets inside a tile fit into the 32 bits that the kernels have for
    them."""
    return LARGEST_TILE * (view.stride(2) + view.stride(3)) < 2**31


def check_call(query, key, value, call: AttentionCall, more=None) -> None:
    """Raises ValueError for tensors that do not fit each other, the layout, the placement or the backend. more: the
    second key and value."""
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
            if not addressable(tensor):
                raise ValueError(
                    f"{name} has strides {tensor.stride(2)} and {tensor.stride(3)} between rows and head dims; make it contiguous"
                )
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
            raise ValueError(
                f"cu_seqlens has {len(call.packed.cu_seqlens)} entries; expected one more than documents, at least 2"
            )
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
            raise ValueError(
                "the placement was made for another pattern than the layout's; make it with pattern=layout.pattern"
            )
        expected = len(call.placement.query_block_ids) * layout.block_size
        if q.shape[2] != expected:
            raise ValueError(
                f"query has {q.shape[2]} rows; {len(call.placement.query_block_ids)} query blocks of {layout.block_size} are {expected}"
            )
        slot = call.placement.key_slot
        if slot is not None and slot.shape[0] != layout.num_kv_heads:
            raise ValueError(f"key_slot has {slot.shape[0]} KV heads; the layout has {layout.num_kv_heads}")
        blocks = k.shape[2] // layout.block_size if slot is not None else -(-k.shape[2] // layout.block_size)
        own, further = call.placement.own_slots, call.placement.n_slots - call.placement.own_slots
        if blocks < own or (slot is None and blocks > own):
            raise ValueError(
                f"key has {k.shape[2]} rows, {blocks} blocks of {layout.block_size}; the placement reads {own} of them"
            )
        there = 0 if more is None else more[0].shape[FORMATS[form][2]] // layout.block_size
        if there < further:
            raise ValueError(
                f"the second key has {there} blocks of {layout.block_size}; the placement reads {further} of them"
            )
        for tensor in more or ():
            view = canonical_view(tensor, form)
            like = (*k.shape[:2], view.shape[2], k.shape[3])
            if (
                view.shape != like
                or tensor.shape != more[0].shape
                or tensor.dtype != key.dtype
                or tensor.device != key.device
            ):
                raise ValueError(
                    f"the second key or value is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected {key.dtype} on {key.device}, "
                    f"of key's shape {list(key.shape)} but for its rows, and both of the same"
                )
            if view.stride(1) != 0 and view.shape[1] > 1:
                raise ValueError(
                    "the second key or value has heads with memory of their own; expected slots of one KV head each (stride 0)"
                )
        if call.placement.query_block_ids.device != query.device:
            raise ValueError(
                f"placement is on {call.placement.query_block_ids.device}, query on {query.device}; give Placement.make the device"
            )
        if limit is not None and call.placement.n_blocks > limit:
            raise ValueError(f"placement has {call.placement.n_blocks} blocks, the block mask only {limit}")
    elif q.shape[2] != k.shape[2]:
        raise ValueError(
            f"query has {q.shape[2]} rows and key {k.shape[2]}; a shorter query needs a placement, packed ones equal rows"
        )
