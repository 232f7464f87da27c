"""Launches of the portable Triton kernels. The arguments are those of ops.call.Backend: views [B, heads, rows, D] with
any strides, and an AttentionCall."""
from __future__ import annotations

from functools import cache

import torch
import triton

from s2_megatron.kernels.compile_options import OPTIONS
from s2_megatron.kernels.tiles import HEADS_TOGETHER, tiles_for
from s2_megatron.kernels.triton.key_kernels import s2_add_returned_kernel, s2_backward_dkdv_kernel
from s2_megatron.kernels.triton.query_kernels import s2_delta_kernel, s2_forward_kernel, s2_grad_query_kernel

DELTA_ROWS = 64  # of a program that makes row sums
DELTA_ROWS_32BIT = 16  # of 32-bit numbers, whose tiles stand in shared memory


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


class _Geometry:
    """What all kernels of one call share: sizes, index tensors, flags."""

    def __init__(self, query, key, call):
        layout, packed, placement = call.layout, call.packed, call.placement
        self.head_dim = query.shape[3]
        self.block_dim = max(16, triton.next_power_of_2(self.head_dim))
        self.is_table = is_table = not hasattr(layout, "ranges")
        nothing = layout.tensors[0]  # stands for the pointers that a variant of the kernel does not read
        slots = None if placement is None else placement.key_slot
        tile_blocks = layout.tile_blocks if placement is None else min(layout.tile_blocks, placement.tile_blocks)
        self.tiles = tiles_for(self.block_dim, query.dtype == torch.float32, layout.block_size, tile_blocks, _capability(query.device))
        self.packed, self.placement, self.block = packed, placement, layout.block_size
        self.documents = 0 if packed is None else len(packed.cu_seqlens) - 1
        tokens = None if is_table else layout.tokens
        self.by_row = dict(ranges_ptr=nothing if is_table else layout.ranges, row_starts_ptr=layout.row_starts if is_table else nothing,
                           key_blocks_ptr=layout.key_blocks if is_table else nothing,
                           **_run_tensors(None if placement is None else placement.runs, nothing))
        self.by_column = dict(ranges_ptr=self.by_row["ranges_ptr"], column_starts_ptr=layout.column_starts if is_table else nothing,
                              query_blocks_ptr=layout.query_blocks if is_table else nothing,
                              query_rank_ptr=nothing if placement is None else placement.query_rank)
        self.common = dict(
            starts_ptr=nothing if packed is None else packed.starts, lengths_ptr=nothing if packed is None else packed.cu_seqlens,
            query_ids_ptr=nothing if placement is None else placement.query_block_ids, slot_ptr=nothing if slots is None else slots,
            n_docs=self.documents, query_rows=query.shape[2], kv_rows=key.shape[2], n_heads=query.shape[1], n_kv_heads=key.shape[1],
            n_tables=layout.row_starts.shape[0] if is_table else 1, table_rows=layout.row_starts.shape[1] if is_table else 0,
            n_blocks=0 if placement is None else placement.n_blocks,
            BLOCK=self.block, HEAD_DIM=self.head_dim, BLOCK_D=self.block_dim, N_RANGES=1 if is_table else layout.ranges.shape[1],
            TABLE=is_table, TOKENS=tokens is not None, tokens_ptr=nothing if tokens is None else tokens,
            PACKED=packed is not None, QUERY_IDS=placement is not None, KEY_SLOT=slots is not None,
            IEEE=query.dtype == torch.float32)

    def count(self, rows, tile):
        """Tiles of `rows` rows; for packed documents the upper bound that find_document counts with."""
        return rows // tile + self.documents if self.packed is not None else triton.cdiv(rows, tile)


def _run_tensors(runs, nothing):
    index, prefix, slots = (nothing, nothing, nothing) if runs is None else runs
    return dict(run_index_ptr=index, run_prefix_ptr=prefix, run_slots_ptr=slots, RUNS=runs is not None)


def _strides(**tensors):
    names = {f"stride_{prefix}{axis}": stride for prefix, tensor in tensors.items() for axis, stride in zip("bhsd", tensor.stride())}
    return names


def _together(heads: int) -> int:
    return next(size for size in range(min(HEADS_TOGETHER, heads), 0, -1) if heads % size == 0)


def _launch_by_query(kernel, geometry, tile, query, key, value, call, proceed, **more):
    """A kernel with one program per query tile. more: the arguments that it alone has."""
    heads = query.shape[0] * query.shape[1]
    n_tiles = geometry.count(query.shape[2], tile.rows)
    kernel[(n_tiles * heads,)](
        query_ptr=query, key_ptr=key, value_ptr=value, **more, **geometry.by_row, **geometry.common,
        **_strides(q=query, k=key, v=value), scale=call.softmax_scale, n_tiles=n_tiles, TILE_M=tile.rows,
        TILE_N=tile.columns, CONTINUE=proceed, HEAD_GROUP=_together(heads), STAGES=tile.stages,
        num_warps=tile.warps, num_stages=tile.stages, **OPTIONS)


def forward(query, key, value, out, lse, call, initial=None, kv_heads=None, more=None):
    """Writes out and lse."""
    assert kv_heads is None and more is None, "joins_keys says no"
    geometry = _Geometry(query, key, call)
    initial_out, initial_lse = (out, lse) if initial is None else initial
    _launch_by_query(
        s2_forward_kernel, geometry, geometry.tiles[0], query, key, value, call, initial is not None,
        out_ptr=out, lse_ptr=lse, initial_out_ptr=initial_out, initial_lse_ptr=initial_lse.contiguous(),
        **_strides(o=out, i=initial_out))


def launch_delta(grad_out, grad_lse, out, lse, delta, clear=None):
    """delta = rowsum(out * grad_out) - grad_lse [B, H, rows], fp32; zeros into clear, fp32 [B, H, rows, D] contiguous,
    when it is given."""
    batch, heads, rows, head_dim = out.shape
    log_grad = lse if grad_lse is None else grad_lse
    tile_rows = DELTA_ROWS_32BIT if grad_out.dtype == torch.float32 else DELTA_ROWS
    s2_delta_kernel[(triton.cdiv(rows, tile_rows) * batch * heads,)](
        out, grad_out, log_grad, lse, delta, delta if clear is None else clear, delta, 0, rows, heads,
        *out.stride(), *grad_out.stride(), *log_grad.stride(), ROWS=tile_rows, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        GRAD_LSE=grad_lse is not None, CLEAR=clear is not None, COUNTERS=False, **OPTIONS)


def backward(grad_out, grad_lse, query, key, value, out, lse, grad_query, grad_key, grad_value, call):
    """Writes the three gradients. Bitwise repeatable: no atomics, sums in a fixed order."""
    delta = torch.empty_like(lse)
    launch_delta(grad_out, grad_lse, out, lse, delta)
    backward_dkdv(grad_out, query, key, value, lse, delta, grad_key, grad_value, call)
    backward_dq(grad_out, query, key, value, lse, delta, grad_query, call)


def _add_returned(own, returned, out, part):
    """out = own + the returned slots (see attention_backward_dkdv); own [B, G, rows, D] in fp32. part: 0 for K, 1 for
    V."""
    slots, starts, entries = returned
    batch, heads, rows, head_dim = own.shape
    s2_add_returned_kernel[(rows // slots.shape[1] * heads * batch,)](
        own, slots, out, starts, entries, batch, heads, part, *own.stride(), *out.stride(),
        BLOCK=slots.shape[1], HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), **OPTIONS)


def backward_dkdv(grad_out, query, key, value, lse, delta, grad_key, grad_value, call, returned=None):
    """Writes dK and dV."""
    if returned is not None:
        own = [torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device) for tensor in (key, value)]
        backward_dkdv(grad_out, query, key, value, lse, delta, *own, call)
        for part, (wide, grad) in enumerate(zip(own, (grad_key, grad_value))):
            _add_returned(wide, returned, grad, part)
        return
    geometry, placement = _Geometry(query, key, call), call.placement
    tile = geometry.tiles[2]
    batch, heads = query.shape[:2]
    kv_heads = batch * key.shape[1]
    key_rows = key.shape[2] if placement is None or placement.key_slot is None else placement.n_blocks * geometry.block
    n_tiles = geometry.count(key_rows, tile.columns)
    parts = geometry.block // tile.columns
    if call.packed is None:
        n_tiles = triton.cdiv(n_tiles, parts) * parts  # whole blocks, so that they can be taken in another order
    s2_backward_dkdv_kernel[(n_tiles * kv_heads,)](
        query_ptr=query, key_ptr=key, value_ptr=value, grad_out_ptr=grad_out, lse_ptr=lse, delta_ptr=delta, grad_key_ptr=grad_key,
        grad_value_ptr=grad_value, **geometry.by_column, **geometry.common, scale=call.softmax_scale, n_tiles=n_tiles,
        **_strides(q=query, k=key, v=value, g=grad_out, dk=grad_key, dv=grad_value), TILE_M=tile.rows, TILE_N=tile.columns,
        EFFICIENT=not geometry.is_table and call.layout.pattern.is_kv_efficient, RATIO=heads // key.shape[1],
        HEAD_GROUP=_together(kv_heads), STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages, **OPTIONS)


def backward_dq(grad_out, query, key, value, lse, delta, grad_query, call, initial=None, kv_heads=None, more=None):
    """Writes dQ."""
    assert kv_heads is None and more is None, "joins_keys says no"
    geometry = _Geometry(query, key, call)
    first = grad_query if initial is None else initial
    _launch_by_query(
        s2_grad_query_kernel, geometry, geometry.tiles[1], query, key, value, call, initial is not None,
        grad_out_ptr=grad_out, lse_ptr=lse, delta_ptr=delta, grad_query_ptr=grad_query, initial_grad_query_ptr=first,
        **_strides(g=grad_out, dq=grad_query, i=first))
