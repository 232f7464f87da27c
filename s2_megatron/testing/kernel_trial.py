"""The trial of the Hopper kernels on a version of Triton that they have not been measured on, in a process of its own:

    python -m s2_megatron.testing.kernel_trial

reads from its standard input what kernels/trial.py pickled, (device, kind, pattern), computes a small call of that
kind with the Hopper kernels and with the portable ones, and prints {"reason": why the Hopper kernels shall not be used,
or null} as its last line.
"""

from __future__ import annotations

import json
import pickle
import sys

import torch

from s2_megatron.context_parallel.exchange import slot_views
from s2_megatron.kernels import trial
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
from s2_megatron.ops.parts import (
    attention_backward,
    attention_backward_dkdv,
    attention_backward_dq,
    attention_delta,
    attention_forward,
    empty_lse,
)
from s2_megatron.patterns.block_mask import BlockMaskPattern

BLOCKS = 64  # of the small call: 4096 tokens
# Of the difference between the kernels, relative to the result, in every tile of 64 rows of a head. Both round P and dS
# to 16 bits, and differ by 0.2 to 0.5 % in bf16; a tile that is not computed, or computed twice, is wrong by 100 %.
TOLERANCE = 0.03


def attention_results(inputs, layout, kind, backend) -> dict[str, torch.Tensor]:
    """Forward and backward, by name. inputs: query, key, value and the gradient of out, sbhd with batch 1."""
    query, key, value, grad = inputs
    packed, form = None, "sbhd"
    if kind["packed"]:
        query, key, value, grad = (tensor.squeeze(1) for tensor in inputs)
        rows = len(query)
        ends = torch.tensor([0, rows // 3, rows // 3 + 1, rows], dtype=torch.int32, device=query.device)
        packed, form = PackedSequence(ends, rows), "thd"
    call = AttentionCall(layout, query.shape[-1] ** -0.5, form, packed, None, backend, kind["deterministic"])
    out, lse = attention_forward(query, key, value, call)
    grads = attention_backward(grad, None, query, key, value, out, lse, call)
    return dict(zip(("out", "lse", "dQ", "dK", "dV"), (out, lse, *grads)))


def placed_results(inputs, layout, kind, backend) -> dict[str, torch.Tensor]:
    """What context parallelism calls on one of two ranks, by name: the even blocks are its own, the others come in
    slots."""
    query, key, value, grad = inputs
    block, heads, device = layout.block_size, key.shape[2], query.device
    n_blocks = len(query) // block
    own_blocks, rest = torch.arange(0, n_blocks, 2), torch.arange(1, n_blocks, 2)
    by_block = [tensor.unflatten(0, (n_blocks, block)) for tensor in inputs]
    query, key, value, grad = (blocks[::2].flatten(0, 1) for blocks in by_block)
    received = torch.stack([blocks[1::2] for blocks in by_block[1:3]], 2)  # [blocks, rows, 2, 1, KV heads, D]
    buffer = received.permute(4, 0, 1, 2, 3, 5).flatten(0, 1).contiguous()  # [slots, rows, 2, 1, D]
    grad_buffer = torch.empty_like(buffer)
    slots, slot_grads = slot_views(buffer, heads), slot_views(grad_buffer, heads)
    own = torch.full((heads, n_blocks), -1)
    remote, joined = own.clone(), own.clone()
    own[:, own_blocks] = joined[:, own_blocks] = torch.arange(len(own_blocks))
    remote[:, rest] = torch.arange(heads * len(rest)).view(heads, -1)
    joined[:, rest] = remote[:, rest] + len(own_blocks)

    def call(key_slot, own_slots=None):
        placement = Placement.make(own_blocks.tolist(), n_blocks, key_slot, device, layout.pattern, own_slots)
        return AttentionCall(layout, query.shape[-1] ** -0.5, "sbhd", None, placement, backend, kind["deterministic"])

    own, remote, joined = call(own), call(remote), call(joined, len(own_blocks))
    early = torch.empty(query.shape, device=device), empty_lse(query, "sbhd")
    attention_forward(query, key, value, own, into=early)
    out, lse = attention_forward(query, *slots, remote, initial=early)
    sums = attention_delta(grad, out, lse, own)
    dq = attention_backward_dq(grad, query, key, value, lse, sums, own, into=early[0])
    attention_backward_dkdv(grad, query, *slots, lse, sums, *slot_grads, remote)
    dq = attention_backward_dq(grad, query, *slots, lse, sums, remote, initial=dq)
    found = {"out": out, "lse": lse, "dQ": dq, "dK and dV in slots": grad_buffer.flatten(0, 1)}
    starts = torch.arange(len(own_blocks) * heads + 1, dtype=torch.int32, device=device)
    grads = torch.empty_like(key), torch.empty_like(value)
    attention_backward_dkdv(grad, query, key, value, lse, sums, *grads, own, (buffer, starts, starts))
    found.update({"dK": grads[0], "dV": grads[1]})
    if backend == "gluon":  # own keys and slots at once, compared with one after the other
        both = dict(kv_heads=(0, heads), more=slots)
        found["out of joined keys"], _ = attention_forward(query, key, value, joined, **both)
        found["dQ of joined keys"] = attention_backward_dq(grad, query, key, value, lse, sums, joined, **both)
    else:
        found.update({"out of joined keys": out, "dQ of joined keys": dq})
    return found


def difference(one, other) -> float:
    """The largest relative difference of 64 rows of a head; NaN counts as infinite. Tensors are [rows, ..., D]."""
    found = [
        ((a - b).norm(dim=(0, -1)) / b.norm(dim=(0, -1)).clamp_min(1e-6)).nan_to_num(torch.inf).max().item()
        for a, b in zip(one.double().split(64), other.double().split(64))
    ]
    return max(found)


def differences(device, kind: dict, pattern, n_blocks: int) -> dict[str, float]:
    """The largest relative difference of a tile between both kinds of kernels, by the name of the result."""
    if not kind["n_ranges"]:
        pattern = BlockMaskPattern.from_function(
            64, *pattern, n_blocks, lambda head, query, key: (query - key) % 5 <= 1
        )
    layout = build_layout(pattern, device)
    rows = n_blocks * 64 - (0 if kind["placed"] else 17)
    generator = torch.Generator().manual_seed(0)
    heads = (pattern.num_heads, pattern.num_kv_heads, pattern.num_kv_heads, pattern.num_heads)
    shapes = [(rows, 1, number, kind["head_dim"]) for number in heads]
    inputs = [torch.randn(shape, generator=generator).to(device, getattr(torch, kind["dtype"])) for shape in shapes]
    compute = placed_results if kind["placed"] else attention_results
    compute(inputs, layout, kind, "gluon")  # the second launch of a kind goes another way than the first one
    hopper, portable = (compute(inputs, layout, kind, backend) for backend in ("gluon", "triton"))
    for found in (hopper, portable):
        found["lse"] = found["lse"].movedim(-1, 0)[..., None]  # [rows, B, H, 1]
    return {name: difference(hopper[name], portable[name]) for name in portable}


def reason(device, kind: dict, pattern) -> str | None:
    """Why the Hopper kernels shall not be used for calls of a kind, or None."""
    try:
        found = differences(device, kind, pattern, BLOCKS)
    except Exception as error:  # noqa: BLE001 (whatever it is, the portable kernels are there)
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else 'no message'}"
    worst = max(found, key=found.get)
    if found[worst] <= TOLERANCE:
        return None
    return f"{worst} differs from that of the portable kernels by {found[worst]:.2g} (relative, at most {TOLERANCE})"


if __name__ == "__main__":
    trial.MEASURED = (trial.release(),)  # this is the trial
    device, kind, pattern = pickle.load(sys.stdin.buffer)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    print(json.dumps({"reason": reason(device, kind, pattern)}))
