"""What the op refuses: tensors that do not fit each other, the layout or the backend."""

from __future__ import annotations

import os
from itertools import pairwise
from numbers import Real

import torch

from s2_megatron.ops.call import FORMATS, AttentionCall, canonical_view
from s2_megatron.ops.layout import Layout, PackedSequence, Placement
from s2_megatron.patterns.checks import (
    HEAD_DIM_LIMIT,
    LARGEST_SCALE,
    MOST_TOKENS,
    SMALLEST_SCALE,
    check_integer,
    shown,
)
from s2_megatron.patterns.ranges import Pattern

LARGEST_TILE = 256  # rows or head dims
SMALLEST_KERNEL_BLOCK = 16  # the tensor cores' smallest tile
MOST_KINDS = 1024  # of calls that are remembered to have passed, a layout
_LAYOUTS = (Layout, Pattern)  # made once: a union in each call takes 0.1 us


def addressable(view: torch.Tensor) -> bool:
    """Of a view [B, heads, rows, D]: whether its offsets inside a tile fit into the 32 bits that the kernels have for
    them."""
    return LARGEST_TILE * (view.stride(2) + view.stride(3)) < 2**31


def softmax_scale_of(softmax_scale, head_dim: int) -> float:
    """The scale of a call: softmax_scale, or head_dim ** -0.5 for None. Raises ValueError unless it is a number from
    SMALLEST_SCALE to LARGEST_SCALE."""
    if softmax_scale is None:
        return head_dim**-0.5
    # A float needs no further look; booleans are integers to Python.
    number = type(softmax_scale) is float or (isinstance(softmax_scale, Real) and not isinstance(softmax_scale, bool))
    if not number or not SMALLEST_SCALE <= softmax_scale <= LARGEST_SCALE:
        raise ValueError(
            f"softmax_scale={shown(softmax_scale)}; expected a number, {SMALLEST_SCALE:g} to {LARGEST_SCALE:g}; use "
            "None for head_dim ** -0.5"
        )
    return float(softmax_scale)


def check_arguments(query, key, value, layout, tensor_format, packed, placement, deterministic) -> None:
    """Raises ValueError for arguments of s2_attention that are of another type or empty. Reads no values of tensors."""
    if not isinstance(tensor_format, str) or tensor_format not in FORMATS:
        raise ValueError(f"tensor_format={shown(tensor_format)}; expected one of {', '.join(FORMATS)}; use sbhd")
    dims = 3 if tensor_format == "thd" else 4
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise ValueError(f"{name} is {shown(tensor)}; expected a dense tensor; use a torch.Tensor")
        if tensor.ndim != dims:
            raise ValueError(f"{name} has {tensor.ndim} dimensions; expected {dims}, tensor_format={tensor_format}")
    _check_alike(query, key, value)  # here, too: with one of them on meta, PyTorch calls none of the op's own code
    if not query.shape[FORMATS[tensor_format][2]] or not query.shape[-1]:
        raise ValueError(
            f"query has shape {list(query.shape)}; expected at least one row and one element of the head dim; leave a "
            "call without rows out"
        )
    if not value.shape[-1]:
        raise ValueError(f"value has shape {list(value.shape)}; expected a head dim of 1 or more; use key's")
    if not isinstance(layout, _LAYOUTS):
        raise ValueError(
            f"layout={shown(layout)}; expected a Layout or a pattern; use build_layout(pattern), or the pattern of "
            "make_range_pattern"
        )
    if packed is not None:
        _check_packed(packed, query.device)
    if placement is not None and not isinstance(placement, Placement):
        raise ValueError(f"placement={shown(placement)}; expected a Placement or None; use Placement.make(...)")
    if not isinstance(deterministic, bool):
        raise ValueError(f"deterministic={shown(deterministic)}; expected True or False; use one of them")


def _check_alike(query, key, value) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, query {query.dtype} on {query.device}; expected the "
                f"same; use {name}.to(query)"
            )


def _check_packed(packed, device) -> None:
    """What can be said of packed documents without waiting for a GPU."""
    if not isinstance(packed, PackedSequence):
        raise ValueError(
            f"packed={shown(packed)}; expected a PackedSequence; use PackedSequence(cu_seqlens, max_seqlen)"
        )
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        borders = getattr(packed, name)
        if borders is None and name == "cu_seqlens_padded":
            continue
        fix = f"use torch.tensor([0, ...], dtype=torch.int32, device={str(device)!r})"
        if not isinstance(borders, torch.Tensor):
            raise ValueError(f"{name}={shown(borders)}; expected an int32 tensor [documents + 1] on {device}; {fix}")
        if borders.ndim != 1 or len(borders) < 2:
            raise ValueError(
                f"{name} has shape {list(borders.shape)}; expected one more entry than documents, at least 2; {fix}"
            )
        if borders.dtype != torch.int32 or borders.device != device or not borders.is_contiguous():
            contiguous = "" if borders.is_contiguous() else ", not contiguous"
            raise ValueError(
                f"{name} is {borders.dtype} on {borders.device}{contiguous}; expected contiguous int32 on {device}; "
                f"{fix}"
            )
    if packed.cu_seqlens.shape != packed.starts.shape:
        raise ValueError(
            f"cu_seqlens has {len(packed.cu_seqlens)} entries, cu_seqlens_padded {len(packed.starts)}; expected the "
            "same; both have one more than documents"
        )
    if not isinstance(packed.max_seqlen, torch.SymInt):
        check_integer("max_seqlen", packed.max_seqlen, 0, MOST_TOKENS, "use the tokens of the longest document")


def checks_values() -> bool:
    """Whether S2_CHECK_VALUES=1 asks for checks that wait for the GPU. Not while a CUDA graph is captured, which cannot
    wait."""
    return os.environ.get("S2_CHECK_VALUES") == "1" and not (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


def check_packed_values(packed: PackedSequence, rows: int) -> None:
    """Raises ValueError for borders of documents that decrease, do not begin with 0 or go beyond the tokens, and for a
    max_seqlen that is too small. Waits for the GPU. rows: tokens of the query."""
    ends, starts = packed.cu_seqlens.tolist(), packed.starts.tolist()
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens[0]={ends[0]}; expected 0; use the cumulative lengths, beginning with 0")
    for index, (first, end) in enumerate(pairwise(ends)):
        if end < first:
            raise ValueError(
                f"cu_seqlens[{index + 1}]={end} is less than cu_seqlens[{index}]={first}; expected borders that do not "
                "decrease; use the cumulative lengths"
            )
    lengths = [end - first for first, end in pairwise(ends)]
    name = "cu_seqlens" if packed.cu_seqlens_padded is None else "cu_seqlens_padded"
    behind = 0
    for index, (start, length) in enumerate(zip(starts, lengths)):
        if start < behind:
            raise ValueError(
                f"{name}[{index}]={start}; expected {behind} or more, where the document before it ends; use the "
                "cumulative padded lengths"
            )
        behind = start + length
        if behind > rows:
            raise ValueError(
                f"{name}[{index}]={start} and {length} tokens end behind the {rows} tokens of query; expected an end "
                f"of {rows} at most; use the borders of these tokens"
            )
    longest = max(lengths)
    if longest > packed.max_seqlen:
        raise ValueError(
            f"max_seqlen={packed.max_seqlen}; expected {longest} or more, the tokens of the longest document; use "
            f"{longest}"
        )


def check_dtype(backend: str, dtype: torch.dtype, device_type: str) -> None:
    """Raises ValueError for a type that a backend does not compute on a device. backend: a resolved one."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"query has dtype {dtype}; expected float16, bfloat16 or float32")
    if backend != "reference" and dtype == torch.float64:
        raise ValueError("query has dtype float64, which the Triton kernels do not compute; use backend=reference")
    if backend == "triton" and dtype == torch.bfloat16 and device_type == "cpu":
        raise ValueError(
            "query has dtype bfloat16, which Triton's interpreter (TRITON_INTERPRET=1) computes wrongly; expected "
            "float16 or float32; use backend=reference, or another type"
        )


def check_call(query, key, value, call: AttentionCall, more=None) -> list[torch.Tensor]:
    """The views [B, heads, rows, D] of query, key and value. more: the second key and value. Raises ValueError for
    tensors that do not fit each other, the layout, the placement or the backend."""
    layout, form = call.layout, call.tensor_format
    _check_alike(query, key, value)
    check_dtype(call.backend, query.dtype, query.device.type)
    if call.backend != "reference" and layout.block_size < SMALLEST_KERNEL_BLOCK:
        raise ValueError(
            f"block_size={layout.block_size}: the Triton kernels compute blocks of {SMALLEST_KERNEL_BLOCK} tokens or "
            "more; use a larger block_size, or backend=reference"
        )
    q, k, v = (canonical_view(tensor, form) for tensor in (query, key, value))
    if call.backend != "reference":
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            if not addressable(tensor):
                raise ValueError(
                    f"{name} has strides {tensor.stride(2)} and {tensor.stride(3)} between rows and head dims; "
                    "expected offsets of 32 bits inside a tile; make it contiguous"
                )
    if q.shape[1] != layout.num_heads or k.shape[1] != layout.num_kv_heads:
        raise ValueError(
            f"query has {q.shape[1]} heads and key {k.shape[1]}; the layout has {layout.num_heads} and "
            f"{layout.num_kv_heads}; use the pattern of these heads (tensor_parallel_slice), and tensor_format={form} "
            "with the heads where it says"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"shapes do not fit: query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}; expected "
            "the same batch, one head dim of query and key, and key like value but for its head dim"
        )
    if max(q.shape[3], v.shape[3]) > HEAD_DIM_LIMIT:
        raise ValueError(f"head dim {max(q.shape[3], v.shape[3])}; expected at most {HEAD_DIM_LIMIT}")
    if (form == "thd") != (call.packed is not None):
        raise ValueError(
            f"tensor_format={form} with packed={'set' if call.packed else None}; thd needs packed=PackedSequence(...), "
            "the others none"
        )
    limit = getattr(layout.pattern, "num_blocks", None)
    longest = call.packed.max_seqlen if call.packed else k.shape[2]
    if call.placement is None and limit is not None and longest:
        layout.pattern.check_length(longest)
    if call.packed is not None and (call.backend == "reference" or checks_values()):
        check_packed_values(call.packed, q.shape[2])
    if call.placement is not None:
        if call.packed is not None:
            raise ValueError(
                "placement together with packed: whole-block placement is for one sequence; pack after gathering the "
                "sequence"
            )
        steps = call.placement.steps
        if steps is not None and steps.pattern is not layout.pattern and steps.pattern != layout.pattern:
            raise ValueError(
                "the placement was made for another pattern than the layout's; make it with pattern=layout.pattern"
            )
        expected = len(call.placement.query_block_ids) * layout.block_size
        if q.shape[2] != expected:
            raise ValueError(
                f"query has {q.shape[2]} rows; {len(call.placement.query_block_ids)} query blocks of "
                f"{layout.block_size} are {expected}; give whole blocks"
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
                    f"the second key or value is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected "
                    f"{key.dtype} on {key.device}, of key's shape {list(key.shape)} but for its rows, and both "
                    "of the same"
                )
            if view.stride(1) != 0 and view.shape[1] > 1:
                raise ValueError(
                    "the second key or value has heads with memory of their own; expected slots of one KV head each "
                    "(stride 0)"
                )
        if call.placement.query_block_ids.device != query.device:
            raise ValueError(
                f"placement is on {call.placement.query_block_ids.device}, query on {query.device}; give "
                "Placement.make the device"
            )
        if limit is not None and call.placement.n_blocks > limit:
            raise ValueError(f"placement has {call.placement.n_blocks} blocks, the block mask only {limit}")
    elif q.shape[2] != k.shape[2]:
        raise ValueError(
            f"query has {q.shape[2]} rows and key {k.shape[2]}; a shorter query needs a placement, packed ones equal "
            "rows"
        )
    return [q, k, v]


def check_once(query, key, value, call: AttentionCall, more=None) -> list[torch.Tensor]:
    """check_call, but not again for what has passed it: the same shapes, strides, types and settings with the same
    layout. To check takes as long as a launch. Calls with index tensors of their own (packed, placement) are always
    checked."""
    if call.packed is not None or call.placement is not None:
        return check_call(query, key, value, call, more)
    passed, form = call.layout.passed_checks, call.tensor_format
    kind = (
        form,
        call.backend,
        *[(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in (query, key, value)],
    )
    if kind in passed:
        return [canonical_view(tensor, form) for tensor in (query, key, value)]
    views = check_call(query, key, value, call, more)
    if len(passed) >= MOST_KINDS:  # every length is one, and decoding meets many of them
        passed.clear()
    passed.add(kind)
    return views
