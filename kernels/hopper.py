"""Launches of the Hopper kernels, and which calls they compute. All tensors are views [B, heads, rows, D]."""
from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from s2_megatron.kernels import portable
from s2_megatron.kernels.hopper_backward import s2_hopper_backward_kernel
from s2_megatron.kernels.hopper_forward import s2_hopper_forward_kernel
from s2_megatron.kernels.hopper_grad_query import s2_hopper_grad_query_kernel
from s2_megatron.kernels.hopper_rows import s2_scale_kernel
from s2_megatron.kernels.packed_rows import s2_document_tiles_kernel
from s2_megatron.kernels.tiles import hopper_tiles_for
from s2_megatron.printing import print_once

BLOCK = 64  # tokens of a block, and of half a tile
TILE = 2 * BLOCK
MOST_RANGES = 12  # for the marks of a tile
MOST_BLOCKS = 2**19  # for the quotients of hopper_schedule.py
_MATRIX = gl.NVMMASharedLayout(128, 16, rank=4)
_WIDE = gl.NVMMASharedLayout(128, 32, rank=4)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _loadable(tensor) -> bool:
    """Whether the copy engine can address a [B, heads, rows, D] view: contiguous head dims, all else on 16 bytes."""
    unit = 16 // tensor.element_size()
    return (tensor.stride(3) == 1 and tensor.data_ptr() % 16 == 0
            and all(size == 1 or (0 < stride < 2**36 and stride % unit == 0) for size, stride in zip(tensor.shape[:3], tensor.stride()[:3])))


def refusal(query, key, value, layout, placement, initial) -> str | None:
    """Why these kernels do not compute a call on a Hopper GPU, or None."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"{query.dtype} is not a 16-bit type"
    if query.shape[3] > 128 or query.shape[3] % 8:
        return f"head dim {query.shape[3]} is not a multiple of 8 up to 128"
    if layout.block_size != BLOCK:
        return f"block_size={layout.block_size} is not {BLOCK}"
    if placement is not None or initial is not None:
        return "keys or queries are placed by blocks"
    if not hasattr(layout, "ranges"):
        return "the pattern is a block mask"
    if max(query.shape[2], layout.largest_stride * BLOCK) >= MOST_BLOCKS * BLOCK:
        return f"the sequence or a stride has {MOST_BLOCKS} blocks or more"
    if layout.ranges.shape[1] > MOST_RANGES:
        return f"the pattern has more than {MOST_RANGES} ranges"
    if not layout.pattern.is_kv_efficient:
        return "the strides of the pattern do not divide each other"
    if not all(_loadable(tensor) for tensor in (query, key, value)):
        return "query, key or value are not aligned to 16 bytes, or not contiguous in the head dim"
    return None


def _descriptor(tensor, columns, layout=_MATRIX):
    """Boxes of 64 rows and `columns` columns; what lies outside reads as 0 and is not written."""
    shape = list(tensor.shape)
    strides = [stride if size > 1 else BLOCK for size, stride in zip(shape, tensor.stride())]
    return TensorDescriptor(tensor, shape, [*strides[:3], 1], [1, 1, BLOCK, columns], layout)


def _documents(packed, rows, per_document, tile):
    """(table of the tiles of packed documents, its length): `tile` tokens a tile, and room for per_document - 1 more a document."""
    documents = len(packed.cu_seqlens) - 1
    n_tiles = rows // tile + documents * per_document
    tiles = torch.empty(n_tiles, 4, dtype=torch.int32, device=packed.cu_seqlens.device)
    s2_document_tiles_kernel[(triton.cdiv(n_tiles, 256),)](packed.starts, packed.cu_seqlens, tiles, documents, n_tiles, per_document,
                                                           TILE=tile, TILES=256)
    return tiles, n_tiles


def _group(units: int, wanted: int) -> int:
    return next(size for size in range(min(wanted, units), 0, -1) if units % size == 0)


class _Call:
    """What the kernels of one call share."""

    def __init__(self, query, key, layout, packed):
        self.batch, self.heads, self.rows, self.head_dim = query.shape
        self.kv_heads = key.shape[1]
        self.block_dim = 64 if self.head_dim <= 64 else 128
        self.tiles = hopper_tiles_for(self.block_dim, self.rows)
        self.layout, self.packed = layout, packed
        self.nothing = layout.ranges
        self.common = dict(ranges_ptr=layout.ranges, rows=self.rows, heads=self.heads, batches=self.batch, HEAD_DIM=self.head_dim,
                           N_RANGES=layout.ranges.shape[1], RATIO=self.heads // self.kv_heads, PACKED=packed is not None,
                           BLOCK_D=self.block_dim)

    def query_tiles(self, tile):
        """Arguments of a kernel with a program per query tile, and its grid."""
        pack = int(tile.pack and self.layout.heads_pair)
        units = self.batch * self.heads // (1 + pack)
        rows_of_tile = BLOCK if pack else TILE
        documents = self.nothing
        if self.packed is None:
            n_tiles = triton.cdiv(self.rows, rows_of_tile)
        else:
            documents, n_tiles = _documents(self.packed, self.rows, 1, rows_of_tile)
        order = self.layout.head_order(1 + pack)
        programs = n_tiles * units
        persistent = tile.persistent and order is None  # with heads of different work no multiprocessor shall wait for another
        grid = min(programs, _multiprocessors(self.nothing.device)) if persistent else programs
        return (grid,), dict(self.common, order_ptr=self.nothing if order is None else order, documents_ptr=documents, n_tiles=n_tiles,
                             n_programs=programs, HEAD_GROUP=_group(units, tile.heads if persistent else 2), ORDERED=order is not None,
                             PACK=pack, STAGES=tile.stages, num_warps=4)


def forward(query, key, value, out, lse, layout, scale, packed):
    """Writes out [B, H, rows, D] and lse [B, H, rows]."""
    call = _Call(query, key, layout, packed)
    grid, arguments = call.query_tiles(call.tiles.forward)
    s2_hopper_forward_kernel[grid](
        _descriptor(query, call.block_dim), _descriptor(key, 64), _descriptor(value, 64), _descriptor(out, call.block_dim), out, lse,
        scale=scale, stride_ob=out.stride(0), stride_oh=out.stride(1), stride_os=out.stride(2), **arguments)


def backward(grad_out, grad_lse, query, key, value, out, lse, grad_query, grad_key, grad_value, layout, scale, packed, deterministic):
    """Writes the three gradients. Unless deterministic, dQ may be added up in fp32 in whatever order its parts come."""
    call = _Call(query, key, layout, packed)
    tile = call.tiles.backward
    one_pass = tile.one_pass and not deterministic
    if not _loadable(grad_out):
        print_once(f"S2 attention copies the gradient of its output, whose strides {grad_out.stride()} the copy engine cannot read")
        grad_out = grad_out.contiguous()
    delta = torch.empty_like(lse)
    sums = torch.empty(query.shape, dtype=torch.float32, device=query.device) if one_pass else None
    counter = torch.empty(1, dtype=torch.int32, device=query.device)  # of the key tiles that are taken
    portable.launch_delta(grad_out, grad_lse, out, lse, delta, sums, counter)
    units = call.batch * call.kv_heads
    distances = layout.pair_distances
    n_long, n_rest, documents = 1, 1, call.nothing
    if packed is None:
        n_long, n_rest = layout.key_columns(triton.cdiv(call.rows, BLOCK))
        programs = (n_long + n_rest) * units
    else:
        documents, n_tiles = _documents(packed, call.rows, 1 + layout.spare_columns, TILE)
        programs = n_tiles * units
    order = layout.head_order(call.heads // call.kv_heads)
    boxes = [_descriptor(tensor, call.block_dim) for tensor in (query, key, value, grad_out, grad_key, grad_value)]
    s2_hopper_backward_kernel[(min(programs, _multiprocessors(query.device)),)](
        *boxes[:4], lse, delta, _descriptor(sums, 64, _WIDE) if one_pass else boxes[0], *boxes[4:], grad_key, grad_value,
        order_ptr=call.nothing if order is None else order, documents_ptr=documents,
        distance_ptr=call.nothing if distances is None else distances, scale=scale, n_long=n_long, n_rest=max(n_rest, 1), n_programs=programs,
        units=units, counter_ptr=counter, stride_dkb=grad_key.stride(0), stride_dkh=grad_key.stride(1), stride_dks=grad_key.stride(2),
        stride_dvb=grad_value.stride(0), stride_dvh=grad_value.stride(1), stride_dvs=grad_value.stride(2), **call.common,
        HEAD_GROUP=_group(units, tile.heads), ORDERED=order is not None, MIXED=distances is not None, Q_STAGES=tile.stages,
        GRAD_STAGES=tile.grad_stages, DS_STAGES=tile.ds_stages, DQ=one_pass, num_warps=4)
    if one_pass:
        s2_scale_kernel[(triton.cdiv(call.rows, 64) * call.batch * call.heads,)](
            sums, grad_query, scale, call.rows, call.heads, grad_query.stride(0), grad_query.stride(1), grad_query.stride(2), ROWS=64,
            HEAD_DIM=call.head_dim, BLOCK_D=call.block_dim)
        return
    grid, arguments = call.query_tiles(call.tiles.grad_query)
    s2_hopper_grad_query_kernel[grid](
        _descriptor(query, call.block_dim), _descriptor(key, 64), _descriptor(value, 64), boxes[3], _descriptor(grad_query, call.block_dim),
        grad_query, lse, delta, scale=scale, stride_ob=grad_query.stride(0), stride_oh=grad_query.stride(1), stride_os=grad_query.stride(2),
        **arguments)
