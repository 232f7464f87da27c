"""The kernels behind `s2_attention`: which implementation computes a call. The functions are those of ops.call.Backend,
which says what they take; `call` is an ops.call.AttentionCall.

backend "triton" is the portable kernels, "gluon" those for Hopper, "auto" Hopper's where they can compute the call; the
choice is printed once.
"""
from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
import triton

from s2_megatron.kernels import trial
from s2_megatron.kernels.compile_options import OPTIONS
from s2_megatron.kernels.triton import launch as portable
from s2_megatron.kernels.triton.packed_rows import s2_fill_between_kernel
from s2_megatron.printing import print_once

MOST_KINDS = 1024  # of calls that are remembered with their choice, a layout
FILL_ROWS, FILL_HEADS = 1024, 8  # of a program that looks for rows between documents


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def on_device(device: torch.device):
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _no_hopper(device: torch.device) -> str | None:
    """Why the kernels for Hopper do not run on a device, or None."""
    if not _is_hopper(device):
        return f"{device} is not a Hopper GPU (compute capability 9.0)"
    return trial.no_gluon()


def _hopper(query, key, value, call, initial=None, more=None):
    """The module of the Hopper kernels when they compute this call, otherwise None. Raises ValueError when they must
    and cannot."""
    if call.backend == "triton":
        return None
    if call.packed is not None or call.placement is not None or initial is not None:
        return _chosen(query, key, value, call, initial, more)
    # To look again at tensors of the same kind takes as long as a launch.
    chosen = call.layout.chosen_kernels
    kind = (call.backend, call.deterministic, *[(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16)
                                                for tensor in (query, key, value)])
    found = chosen.get(kind, chosen)  # one look: another thread may empty the table; None is a choice
    if found is chosen:
        if len(chosen) >= MOST_KINDS:  # every length is one, and decoding meets many of them
            chosen.clear()
        chosen[kind] = found = _chosen(query, key, value, call)
    return found


def _chosen(query, key, value, call, initial=None, more=None):
    reason = _no_hopper(query.device)
    if reason is None:
        from s2_megatron.kernels.hopper import launch as hopper  # Gluon: only where it can run

        reason = hopper.refusal(query, key, value, call, initial, more) or trial.refusal(query, call)
        if reason is None:
            print_once("S2 attention kernels: gluon (Hopper)")
            return hopper
    if call.backend == "gluon":
        raise ValueError(f"backend=gluon: {reason}; use backend=auto or triton")
    print_once(f"S2 attention kernels: triton (portable), because {reason}")
    return None


def prepare(call, rows, head_dim, dtype):
    """Makes the step lists that calls with this placement will ask for, when the kernels for Hopper compute them. rows:
    of the queries."""
    layout, placement = call.layout, call.placement
    if call.backend == "triton" or placement.steps is None or _no_hopper(placement.query_block_ids.device):
        return
    from s2_megatron.kernels.hopper import launch as hopper
    from s2_megatron.kernels.tiles import hopper_block_dim, hopper_tiles_for

    query, key = (torch.empty(1, heads, rows, head_dim, dtype=dtype, device="meta") for heads in (layout.num_heads, layout.num_kv_heads))
    if hopper.refusal(query, key, key, call) is None:
        tiles = hopper_tiles_for(hopper_block_dim(head_dim), rows, placement.n_blocks * layout.block_size)
        for tile in (tiles.forward, tiles.grad_query):
            placement.steps.query(bool(tile.pack and layout.heads_pair))
        if placement.own_slots == placement.n_slots:  # dK and dV of two tensors come from two calls
            placement.steps.key()


def _fill_between(packed, value, *tensors):
    """value in the rows between packed documents, which no kernel visits. tensors: [1, heads, rows, D]."""
    for tensor in tensors:
        _, heads, rows, dim = tensor.shape
        width = triton.next_power_of_2(dim)
        s2_fill_between_kernel[(triton.cdiv(rows, FILL_ROWS), triton.cdiv(heads, FILL_HEADS))](
            tensor, packed.starts, packed.cu_seqlens, value, len(packed.cu_seqlens) - 1, rows, heads, *tensor.stride()[1:],
            HEADS=FILL_HEADS, ROWS=FILL_ROWS, STEP=max(16, min(FILL_ROWS, 8192 // width)), DIM=dim, BLOCK_D=width,
            **OPTIONS)


def joins_keys(query, key, value, more, call) -> bool:
    """Whether forward and backward_dq take kv_heads and more with this placement: the kernels for Hopper do."""
    return _hopper(query, key, value, call, more=more) is not None


def forward(query, key, value, out, lse, call, initial=None, kv_heads=None, more=None):
    """Writes out and lse. Returns how to do it again, as far as the kernels for Hopper know."""
    kernels = _hopper(query, key, value, call, initial, more) or portable
    with on_device(query.device):
        if call.packed is not None:
            _fill_between(call.packed, 0.0, out)
            _fill_between(call.packed, float("-inf"), lse[..., None])
        return kernels.forward(query, key, value, out, lse, call, initial, kv_heads, more)


def backward(grad_out, grad_lse, query, key, value, out, lse, grad_query, grad_key, grad_value, call):
    """Writes the three gradients, with call.deterministic bitwise repeatable (the portable kernels always are). Returns
    how to do it again, as far as the kernels for Hopper know."""
    kernels = _hopper(query, key, value, call) or portable
    with on_device(query.device):
        if call.packed is not None:
            _fill_between(call.packed, 0.0, grad_query, grad_key, grad_value)
        contiguous = lse.contiguous()
        again = kernels.backward(grad_out, grad_lse, query, key, value, out, contiguous, grad_query, grad_key, grad_value, call)
        return again if contiguous is lse else None  # would take the strides of its copy


# The backward in parts: context parallelism sends and receives between them.
def delta(grad_out, grad_lse, out, lse, row_sums):
    """Writes row_sums."""
    with on_device(out.device):
        portable.launch_delta(grad_out, grad_lse, out, lse.contiguous(), row_sums)


def backward_dkdv(grad_out, query, key, value, lse, row_sums, grad_key, grad_value, call, returned=None):
    """Writes dK and dV."""
    kernels = _hopper(query, key, value, call) or portable
    with on_device(query.device):
        if call.packed is not None:
            _fill_between(call.packed, 0.0, grad_key, grad_value)
        kernels.backward_dkdv(grad_out, query, key, value, lse.contiguous(), row_sums, grad_key, grad_value, call, returned)


def backward_dq(grad_out, query, key, value, lse, row_sums, grad_query, call, initial=None, kv_heads=None, more=None):
    """Writes dQ."""
    kernels = _hopper(query, key, value, call, initial, more) or portable
    with on_device(query.device):
        if call.packed is not None:
            _fill_between(call.packed, 0.0, grad_query)
        kernels.backward_dq(grad_out, query, key, value, lse.contiguous(), row_sums, grad_query, call, initial, kv_heads, more)
