"""Copies of context parallelism: blocks of K and V into a buffer of slots, and the sum of returned gradients. One pass over memory each.

A slot is one block of one KV head; buffers are [slots, block, 2 (K, V), B, D], contiguous. key and value are [S, B, G, D] with any strides.
"""
import triton
import triton.language as tl

from s2_megatron.kernels.launch import on_device


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
    keep = (inside >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    key = tl.load(key_ptr + batch * stride_kb + head * stride_kh + rows[:, None] * stride_ks + dims[None, :] * stride_kd, mask=keep)
    value = tl.load(value_ptr + batch * stride_vb + head * stride_vh + rows[:, None] * stride_vs + dims[None, :] * stride_vd, mask=keep)
    row = (slot.to(tl.int64) * BLOCK + inside) * 2 * n_batch + batch
    target = buffer_ptr + row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, key, mask=keep)
    tl.store(target + n_batch * HEAD_DIM, value, mask=keep)


@triton.jit
def s2_add_returned_kernel(own_ptr, returned_ptr, out_ptr, starts_ptr, entries_ptr, n_batch, n_heads, part,
                           stride_gs, stride_gb, stride_gh, stride_gd, stride_os, stride_ob, stride_oh, stride_od,
                           BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per block of this rank, KV head and batch: out = own + the returned slots of this block in the order of ranks, in the
    precision of own. part: 0 for K, 1 for V."""
    batch = (tl.program_id(0) % n_batch).to(tl.int64)
    place = tl.program_id(0) // n_batch  # block * n_heads + head
    head = (place % n_heads).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    rows = (place // n_heads).to(tl.int64) * BLOCK + inside
    dims = tl.arange(0, BLOCK_D)
    keep = (inside >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    total = tl.load(own_ptr + batch * stride_gb + head * stride_gh + rows[:, None] * stride_gs + dims[None, :] * stride_gd, mask=keep)
    for entry in range(tl.load(starts_ptr + place), tl.load(starts_ptr + place + 1)):
        slot = tl.load(entries_ptr + entry).to(tl.int64)
        row = ((slot * BLOCK + inside) * 2 + part) * n_batch + batch
        total += tl.load(returned_ptr + row[:, None] * HEAD_DIM + dims[None, :], mask=keep).to(total.dtype)
    target = out_ptr + batch * stride_ob + head * stride_oh + rows[:, None] * stride_os + dims[None, :] * stride_od
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=keep)


def pack(key, value, buffer, heads, blocks):
    """Fills buffer with the blocks (positions among key's) of the KV heads. heads, blocks: int64 [slots]."""
    if len(heads):
        batch, head_dim = key.shape[1], key.shape[3]
        with on_device(key.device):
            s2_pack_kernel[(len(heads) * batch,)](
                key, value, buffer, heads, blocks, batch, *key.stride(), *value.stride(),
                BLOCK=buffer.shape[1], HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim))


def add_returned(own, returned, out, starts, entries, part):
    """out = own + the returned slots. own [S, B, G, D] in fp32, out likewise in its own dtype. starts int32 [blocks * G + 1], entries int32:
    the slots of every block of every KV head, in the order of ranks."""
    blocks, batch, heads, head_dim = own.shape[0] // returned.shape[1], *own.shape[1:]
    with on_device(own.device):
        s2_add_returned_kernel[(blocks * heads * batch,)](
            own, returned, out, starts, entries, batch, heads, part, *own.stride(), *out.stride(),
            BLOCK=returned.shape[1], HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim))
