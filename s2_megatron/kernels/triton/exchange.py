"""The copy of context parallelism: blocks of K and V into a buffer of slots, in one pass over memory.

A slot is one block of one KV head; buffers are [slots, block, 2 (K, V), B, D], contiguous. key and value are
[S, B, G, D] with any strides.
"""
import torch
import triton
import triton.language as tl

from s2_megatron.kernels.compile_options import OPTIONS
from s2_megatron.kernels.dispatch import on_device


@triton.jit
def s2_pack_kernel(key_ptr, value_ptr, buffer_ptr, heads_ptr, blocks_ptr, n_batch,
                   stride_ks, stride_kb, stride_kh, stride_kd, stride_vs, stride_vb, stride_vh, stride_vd,
                   BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per slot and batch: both K and V."""
    slot = tl.program_id(0) // n_batch
    batch = (tl.program_id(0) % n_batch).to(tl.int64)
    head = tl.load(heads_ptr + slot)
    inside = tl.arange(0, BLOCK)
    rows = tl.load(blocks_ptr + slot) * BLOCK + inside
    dims = tl.arange(0, BLOCK_D)
    in_head = (inside >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    key = tl.load(key_ptr + batch * stride_kb + head * stride_kh + rows[:, None] * stride_ks + dims[None, :] * stride_kd, mask=in_head)
    value = tl.load(value_ptr + batch * stride_vb + head * stride_vh + rows[:, None] * stride_vs + dims[None, :] * stride_vd, mask=in_head)
    row = (slot.to(tl.int64) * BLOCK + inside) * 2 * n_batch + batch
    target = buffer_ptr + row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, key, mask=in_head)
    tl.store(target + n_batch * HEAD_DIM, value, mask=in_head)


def pack(key, value, buffer, heads, blocks):
    """Fills buffer with the blocks (positions among key's) of the KV heads. heads, blocks: int64 [slots]."""
    assert heads.dtype == blocks.dtype == torch.int64, "the kernel's offsets have the type of these"
    if len(heads):
        batch, head_dim = key.shape[1], key.shape[3]
        with on_device(key.device):
            s2_pack_kernel[(len(heads) * batch,)](
                key, value, buffer, heads, blocks, batch, *key.stride(), *value.stride(),
                BLOCK=buffer.shape[1], HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), **OPTIONS)
