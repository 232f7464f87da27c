"""Attention of one new token a row over the kept keys, in Triton: RoPE, the write of the new key and value, and the
attention are one kernel, and another one joins its splits.

The places of a KV head are cut into splits, each a program that takes all query heads of the KV head as the rows of a
tile. How many is decided by sizes that a captured graph cannot change, the room of the cache and the card's SMs. Which
places are attended is read from the device. A place belongs to one program, which writes the new token there before it
reads: no program waits for another.

B batch, H query heads, G KV heads, K of them in a group, R = H / G, S kept tokens, W places that a token is written to,
D and V the head dims of keys and values.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from s2_megatron.kernels.compile_options import OPTIONS
from s2_megatron.kernels.dispatch import on_device
from s2_megatron.kernels.triton.walk import LN2, LOG2E, softmax_step

MOST_SPLITS = 128  # which one program joins
JOINED_COLUMNS = 32  # of a program that joins splits
SCANNED = 512  # places that are looked at together for the first and the last one that is attended
TILE_BYTES = 2**14  # of the keys of a step


class DecodePlan(NamedTuple):
    """tile: keys of a step; stages: of its loads; warps: of a program; programs: on an SM."""

    tile: int
    stages: int
    warps: int
    programs: int


def plan_for(block_dim: int, itemsize: int, rows: int) -> DecodePlan:
    """block_dim: the larger head dim, up to a power of two; rows: query heads of a KV head, likewise."""
    return DecodePlan(min(128, max(16, TILE_BYTES // (block_dim * itemsize))), 3 if rows < 64 else 2, 4, 4)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def split_sizes(kept: int, heads: int, plan: DecodePlan, multiprocessors: int) -> tuple[int, int]:
    """(tokens of a split, splits) of S kept tokens; heads: B * K."""
    tiles = triton.cdiv(kept, plan.tile)
    wanted = max(1, min(tiles, triton.cdiv(plan.programs * multiprocessors, heads), MOST_SPLITS))
    of_split = triton.cdiv(tiles, wanted)
    return of_split * plan.tile, triton.cdiv(tiles, of_split)


@triton.jit
def load_rotated(ptr, row_offsets, cos_ptr, sin_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, keep,
                 ROTARY: tl.constexpr):
    """Rows of queries or keys, [rows, BLOCK_D] in fp32, after RoPE: rounded where transformers' Llama rounds."""
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    keep = keep[:, None] & inside[None, :]
    x = tl.load(ptr + row_offsets[:, None] + dims[None, :], mask=keep, other=0.0).to(tl.float32)
    if ROTARY:
        half: tl.constexpr = HEAD_DIM // 2
        other = tl.where(dims < half, dims + half, dims - half)
        partner = tl.load(ptr + row_offsets[:, None] + other[None, :], mask=keep, other=0.0).to(tl.float32)
        partner = tl.where(dims[None, :] < half, -partner, partner)
        cos = tl.load(cos_ptr + dims, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + dims, mask=inside, other=0.0)
        one = (x * cos.to(tl.float32)[None, :]).to(cos.dtype).to(tl.float32)
        two = (partner * sin.to(tl.float32)[None, :]).to(sin.dtype).to(tl.float32)
        x = (one + two).to(cos.dtype).to(tl.float32)
    return x


@triton.jit
def load_shown(ptr, rows, tokens, stop, stride_r, GROUP: tl.constexpr, BY_QUERY_HEAD: tl.constexpr):
    """Which tokens are attended, uint8 [rows or 1, tokens]."""
    if BY_QUERY_HEAD:
        keep = (rows < GROUP)[:, None] & (tokens < stop)[None, :]
        return tl.load(ptr + rows[:, None] * stride_r + tokens[None, :], mask=keep, other=0)
    else:
        return tl.load(ptr + tokens[None, :], mask=(tokens < stop)[None, :], other=0)


@triton.jit
def add_offset(out, lse, offset):
    """out [rows, V] and lse [rows] of the keys alone, with a softmax offset (ops/offset.py)."""
    out = out * (1.0 / (1.0 + tl.exp(offset - lse)))[:, None]
    return out, tl.maximum(lse, offset) + tl.log(1.0 + tl.exp(-tl.abs(lse - offset)))


@triton.jit(do_not_specialize=["n_kept", "split_tokens", "n_splits", "n_kv_heads", "n_heads"])
def s2_decode_kernel(
        query_ptr, key_ptr, value_ptr, keys_ptr, values_ptr, shown_ptr, place_ptr, heads_ptr, cos_ptr, sin_ptr,
        offset_ptr, out_ptr, lse_ptr, scale, n_kept, split_tokens, n_splits, n_kv_heads, n_heads,
        stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
        stride_ksb, stride_ksh, stride_kss, stride_vsb, stride_vsh, stride_vss,
        stride_sb, stride_sk, stride_sr, stride_pb, stride_pk, stride_cb,
        GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, PLACES: tl.constexpr, BLOCK_P: tl.constexpr,
        TILE: tl.constexpr, SCAN: tl.constexpr, STAGES: tl.constexpr, BY_QUERY_HEAD: tl.constexpr,
        ROTARY: tl.constexpr, OFFSET: tl.constexpr, WHOLE: tl.constexpr, IEEE: tl.constexpr):
    """out and LSE of one split of one KV head of the group: rows [(B * K * R), splits]. WHOLE: there is one split, and
    rows are those of the model's heads, [B * H]."""
    split = tl.program_id(0) % n_splits
    index = tl.program_id(0) // n_splits % n_kv_heads
    batch = (tl.program_id(0) // n_splits // n_kv_heads).to(tl.int64)
    kv_head = tl.load(heads_ptr + index)
    start = split * split_tokens
    stop = tl.minimum(start + split_tokens, n_kept)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    cos_ptr += batch * stride_cb
    sin_ptr += batch * stride_cb
    keys_ptr += batch * stride_ksb + index.to(tl.int64) * stride_ksh
    values_ptr += batch * stride_vsb + index.to(tl.int64) * stride_vsh
    shown_ptr += batch * stride_sb + index.to(tl.int64) * stride_sk
    place_ptr += batch * stride_pb + index.to(tl.int64) * stride_pk
    # What does not depend on one another is asked for before any of it is awaited.
    numbers = tl.arange(0, BLOCK_P)
    places = tl.load(place_ptr + numbers, mask=numbers < PLACES, other=-1)
    rows = tl.arange(0, ROWS)
    head = kv_head * GROUP + rows
    query = load_rotated(query_ptr + batch * stride_qb, head * stride_qh, cos_ptr, sin_ptr, HEAD_DIM, BLOCK_D,
                         rows < GROUP, ROTARY).to(keys_ptr.dtype.element_ty)
    # From the first to the last place that is attended: a cache with room for a longer text is not read to its end.
    first = stop
    end = start
    for begin in range(start, stop, SCAN):
        tokens = begin + tl.arange(0, SCAN)
        shown = tl.max(load_shown(shown_ptr, rows, tokens, stop, stride_sr, GROUP, BY_QUERY_HEAD).to(tl.int32), 0)
        first = tl.minimum(first, tl.min(tl.where(shown != 0, tokens, stop), 0))
        end = tl.maximum(end, tl.max(tl.where(shown != 0, tokens + 1, start), 0))
    first = start + (first - start) // TILE * TILE
    # The new token goes to its places among those of this split.
    if tl.max(((places >= start) & (places < stop)).to(tl.int32), 0) != 0:
        one_row = tl.arange(0, 1)
        new_key = load_rotated(key_ptr + batch * stride_kb + kv_head * stride_kh, one_row, cos_ptr, sin_ptr,
                               HEAD_DIM, BLOCK_D, one_row == 0, ROTARY).to(keys_ptr.dtype.element_ty)
        new_value = tl.load(value_ptr + batch * stride_vb + kv_head * stride_vh + value_dims,
                            mask=value_dims < VALUE_DIM, other=0.0)
        for number in range(PLACES):
            place = tl.load(place_ptr + number)
            # Two widths, not `& here`: a number that is a mask has the wrong type in Triton 3.9's interpreter.
            here = (place >= start) & (place < stop)
            tl.store(keys_ptr + place * stride_kss + one_row[:, None] + dims[None, :], new_key,
                     mask=(dims < tl.where(here, HEAD_DIM, 0))[None, :])
            tl.store(values_ptr + place * stride_vss + value_dims, new_value,
                     mask=value_dims < tl.where(here, VALUE_DIM, 0))
    tl.debug_barrier()
    accumulator = tl.zeros([ROWS, BLOCK_V], tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    running_max = tl.full([ROWS], float("-inf"), tl.float32)  # base 2
    for begin in tl.range(first, end, TILE, num_stages=STAGES):
        tokens = begin + tl.arange(0, TILE)
        inside = (tokens < end)[:, None]
        key = tl.load(keys_ptr + tokens[:, None] * stride_kss + dims[None, :],
                      mask=inside & (dims < HEAD_DIM)[None, :], other=0.0)
        value = tl.load(values_ptr + tokens[:, None] * stride_vss + value_dims[None, :],
                        mask=inside & (value_dims < VALUE_DIM)[None, :], other=0.0)
        shown = load_shown(shown_ptr, rows, tokens, end, stride_sr, GROUP, BY_QUERY_HEAD)
        accumulator, running_sum, running_max = softmax_step(
            accumulator, running_sum, running_max, query, key, value, shown != 0, scale * LOG2E, MASK=True, IEEE=IEEE)
    total = tl.where(running_sum == 0.0, 1.0, running_sum)  # of a row without a key: out 0, LSE -inf
    lse = running_max * LN2 + tl.log(total)
    out = accumulator / total[:, None]
    if WHOLE:
        if OFFSET:
            offset = tl.load(offset_ptr + head, mask=rows < GROUP, other=0.0).to(tl.float32)
            out, lse = add_offset(out, lse, offset)
        row = batch * n_heads + head
    else:
        row = ((batch * n_kv_heads + index) * GROUP + rows) * n_splits + split
    tl.store(lse_ptr + row, lse, mask=rows < GROUP)
    tl.store(out_ptr + row[:, None] * VALUE_DIM + value_dims[None, :], out.to(out_ptr.dtype.element_ty),
             mask=(rows < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["n_splits", "n_kv_heads", "n_heads"])
def s2_decode_join_kernel(
        part_ptr, part_lse_ptr, heads_ptr, offset_ptr, out_ptr, lse_ptr, n_splits, n_kv_heads, n_heads,
        GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
        OFFSET: tl.constexpr):
    """out and LSE of one query head from those of its splits, in one order: equal calls give equal bits."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.load(heads_ptr + row // GROUP % n_kv_heads)
    head = kv_head * GROUP + row % GROUP
    splits = tl.arange(0, SPLITS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = row * n_splits + splits
    part_lse = tl.load(part_lse_ptr + here, mask=splits < n_splits, other=float("-inf"))
    parts = tl.load(part_ptr + here[:, None] * VALUE_DIM + columns[None, :],
                    mask=(splits < n_splits)[:, None] & (columns < VALUE_DIM)[None, :], other=0.0)
    highest = tl.max(part_lse, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(part_lse - base)
    total = tl.maximum(tl.sum(weights, 0), 1.0)  # the highest one counts 1; without a key out 0, LSE -inf
    out = (tl.sum(parts * weights[:, None], 0) / total)[None, :]
    lse = highest + tl.log(total) + tl.zeros([1], tl.float32)
    if OFFSET:
        out, lse = add_offset(out, lse, tl.load(offset_ptr + head).to(tl.float32))
    row = row // GROUP // n_kv_heads * n_heads + head
    tl.store(out_ptr + row * VALUE_DIM + columns[None, :], out.to(out_ptr.dtype.element_ty),
             mask=(columns < VALUE_DIM)[None, :])
    one = tl.arange(0, 1)
    tl.store(lse_ptr + row + one, lse, mask=one + tl.program_id(1) == 0)


class Kept(NamedTuple):
    """What a group of KV heads keeps, and what the newest token does with it.

    keys [B, K, S or more, D], values [B, K, S or more, V]: the last dim contiguous. shown: bool [B, K or 1, R or 1, S],
    True where attended, the last dim contiguous. place: int64 [B, K or 1, W], contiguous in W. heads: int64 [K], the
    group's KV heads among the model's.
    """

    keys: torch.Tensor
    values: torch.Tensor
    shown: torch.Tensor
    place: torch.Tensor
    heads: torch.Tensor


def decode(query, key, value, groups: list[Kept], scale: float, rotary=None, offset=None,
           plan: DecodePlan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes the newest token of every row to its places and computes its attention.

    query [B, H, 1, D], key [B, G, 1, D], value [B, G, 1, V]: any strides but in the last dim. rotary: (cos, sin) of
    RoPE, [B or 1, 1, D], for a query and a key that have not been through it. offset: of the softmax, [H]. Returns out
    [B, H, 1, V] in value's dtype, and its LSE, fp32 [B, H, 1]; the LSE counts the offset.
    """
    batch, heads, _, dim = query.shape
    value_dim = value.shape[3]
    query, key, value = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (query, key, value))
    group = heads // key.shape[1]
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    block_rows = max(16, triton.next_power_of_2(group))
    plan = plan or plan_for(max(block_d, block_v), value.itemsize, block_rows)
    out = torch.empty(batch, heads, 1, value_dim, dtype=value.dtype, device=value.device)
    lse = torch.empty(batch, heads, 1, dtype=torch.float32, device=value.device)
    cos, sin = (query, query) if rotary is None else (
        tensor.to(torch.promote_types(tensor.dtype, query.dtype)).contiguous() for tensor in rotary)
    common = dict(GROUP=group, VALUE_DIM=value_dim, OFFSET=offset is not None, **OPTIONS)
    sums = query if offset is None else offset.contiguous()  # without one nobody reads it
    with on_device(query.device):
        for kept in groups:
            n_kv_heads, n_kept = len(kept.heads), kept.shown.shape[3]
            split_tokens, n_splits = split_sizes(n_kept, batch * n_kv_heads, plan, multiprocessors(query.device))
            rows, parts = batch * n_kv_heads * group, (out, lse)
            if n_splits > 1:
                parts = [torch.empty(rows, n_splits, *size, dtype=torch.float32, device=out.device)
                         for size in ((value_dim,), ())]
            s2_decode_kernel[(batch * n_kv_heads * n_splits,)](
                query, key, value, kept.keys, kept.values, kept.shown.view(torch.uint8), kept.place, kept.heads,
                cos, sin, sums, *parts, scale, n_kept, split_tokens, n_splits, n_kv_heads, heads,
                *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *kept.keys.stride()[:3],
                *kept.values.stride()[:3], *broadcast(kept.shown, 3), *broadcast(kept.place, 2), broadcast(cos, 1)[0],
                ROWS=block_rows, HEAD_DIM=dim, BLOCK_D=block_d, BLOCK_V=block_v,
                PLACES=kept.place.shape[2], BLOCK_P=triton.next_power_of_2(kept.place.shape[2]), TILE=plan.tile,
                SCAN=SCANNED, STAGES=plan.stages, BY_QUERY_HEAD=kept.shown.shape[2] > 1, ROTARY=rotary is not None,
                WHOLE=n_splits == 1, IEEE=value.dtype == torch.float32, num_warps=plan.warps, num_stages=plan.stages,
                **common)
            if n_splits > 1:
                s2_decode_join_kernel[(rows, triton.cdiv(value_dim, JOINED_COLUMNS))](
                    *parts, kept.heads, sums, out, lse, n_splits, n_kv_heads, heads, COLUMNS=JOINED_COLUMNS,
                    SPLITS=triton.next_power_of_2(n_splits), num_warps=4, **common)
    return out, lse


def broadcast(tensor: torch.Tensor, dims: int) -> list[int]:
    """The strides of the first dims; 0 where there is one entry for all."""
    return [0 if tensor.shape[axis] == 1 else tensor.stride(axis) for axis in range(dims)]
