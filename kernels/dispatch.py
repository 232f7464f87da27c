"""The kernels behind `s2_attention`: which implementation computes a call. All tensors are views [B, heads, rows, D] with any strides.

backend "triton" is the portable kernels, "gluon" those for Hopper, "auto" Hopper's where they can compute the call; the choice is printed once.
"""
from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
import triton

from s2_megatron.kernels.triton import launch as portable
from s2_megatron.kernels.triton.packed_rows import s2_fill_between_kernel
from s2_megatron.printing import print_once

FILL_ROWS, FILL_HEADS = 1024, 8  # of a program that looks for rows between documents
GLUON = "3.6."  # Gluon changes from version to version of Triton


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
    if not triton.__version__.startswith(GLUON):
        return f"the kernels for Hopper are written for the Gluon of Triton {GLUON}, and this is Triton {triton.__version__}"
    return None


def _hopper(backend, query, key, value, layout, packed, placement=None, initial=None, more=()):
    """The module of the Hopper kernels when they compute this call, otherwise None. Raises ValueError when they must and cannot."""
    if backend == "triton":
        return None
    reason = _no_hopper(query.device)
    if reason is None:
        from s2_megatron.kernels.hopper import launch as hopper  # Gluon: only where it can run

        reason = hopper.refusal(query, key, value, layout, packed, placement, initial, more)
        if reason is None:
            print_once("S2 attention kernels: gluon (Hopper)")
            return hopper
    if backend == "gluon":
        raise ValueError(f"backend=gluon: {reason}; use backend=auto or triton")
    print_once(f"S2 attention kernels: triton (portable), because {reason}")
    return None


def prepare(layout, placement, rows, head_dim, dtype, backend):
    """Makes the step lists that calls with this placement will ask for, when the kernels for Hopper compute them. rows: of the queries."""
    if backend == "triton" or placement.steps is None or _no_hopper(placement.query_block_ids.device):
        return
    from s2_megatron.kernels.hopper import launch as hopper
    from s2_megatron.kernels.tiles import hopper_block_dim, hopper_tiles_for

    query, key = (torch.empty(1, heads, rows, head_dim, dtype=dtype, device="meta") for heads in (layout.num_heads, layout.num_kv_heads))
    if hopper.refusal(query, key, key, layout, None, placement, None) is None:
        tiles = hopper_tiles_for(hopper_block_dim(head_dim), rows, placement.n_blocks * hopper.BLOCK)
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
            HEADS=FILL_HEADS, ROWS=FILL_ROWS, STEP=max(16, min(FILL_ROWS, 8192 // width)), DIM=dim, BLOCK_D=width)


def joins_keys(query, key, value, more, layout, placement, backend) -> bool:
    """Whether forward and backward_dq take kv_heads and more with this placement: the kernels for Hopper do."""
    return _hopper(backend, query, key, value, layout, None, placement, more=more) is not None


def forward(query, key, value, out, lse, layout, scale, packed=None, placement=None, initial=None, backend="auto", **part):
    """Writes out [B, H, rows, D] and lse [B, H, rows] (fp32, contiguous, natural log). initial: (out, lse) that this call continues.
    part: where `joins_keys` says so, kv_heads and more as in attention_forward."""
    kernels = _hopper(backend, query, key, value, layout, packed, placement, initial, part.get("more", ())) or portable
    with on_device(query.device):
        if packed is not None:
            _fill_between(packed, 0.0, out)
            _fill_between(packed, float("-inf"), lse[..., None])
        kernels.forward(query, key, value, out, lse, layout, scale, packed, placement, initial, **part)


def backward(grad_out, grad_lse, query, key, value, out, lse, grad_query, grad_key, grad_value, layout, scale, packed=None, placement=None,
             backend="auto", deterministic=False):
    """Writes the three gradients. grad_lse: [B, H, rows] or None. deterministic: bitwise repeatable (the portable kernels always are)."""
    hopper = _hopper(backend, query, key, value, layout, packed, placement)
    tensors = (grad_out, grad_lse, query, key, value, out, lse.contiguous(), grad_query, grad_key, grad_value, layout, scale, packed, placement)
    with on_device(query.device):
        if packed is not None:
            _fill_between(packed, 0.0, grad_query, grad_key, grad_value)
        if hopper is None:
            portable.backward(*tensors)
        else:
            hopper.backward(*tensors, deterministic)


# The backward in parts: context parallelism sends and receives between them.
def delta(grad_out, grad_lse, out, lse, row_sums):
    """Writes row_sums [B, H, rows] (fp32): rowsum(out * grad_out) - grad_lse."""
    with on_device(out.device):
        portable.launch_delta(grad_out, grad_lse, out, lse.contiguous(), row_sums)


def backward_dkdv(grad_out, query, key, value, lse, row_sums, grad_key, grad_value, layout, scale, packed=None, placement=None, returned=None,
                  backend="auto"):
    """Writes dK and dV, from the final lse and the row sums of `delta`. returned: see attention_backward_dkdv."""
    kernels = _hopper(backend, query, key, value, layout, packed, placement) or portable
    with on_device(query.device):
        if packed is not None:
            _fill_between(packed, 0.0, grad_key, grad_value)
        kernels.backward_dkdv(grad_out, query, key, value, lse.contiguous(), row_sums, grad_key, grad_value, layout, scale, packed, placement,
                              returned)


def backward_dq(grad_out, query, key, value, lse, row_sums, grad_query, layout, scale, packed=None, placement=None, initial=None,
                backend="auto", **part):
    """Writes dQ. initial: dQ of the same queries over other keys (fp32), which is added. part: as in `forward`."""
    kernels = _hopper(backend, query, key, value, layout, packed, placement, initial, part.get("more", ())) or portable
    with on_device(query.device):
        if packed is not None:
            _fill_between(packed, 0.0, grad_query)
        kernels.backward_dq(grad_out, query, key, value, lse.contiguous(), row_sums, grad_query, layout, scale, packed, placement, initial,
                            **part)
