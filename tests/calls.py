"""Calls of s2_attention of every kind, small, for the tests and scripts that look at how the op behaves rather than at
what it computes."""

import torch

from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
from s2_megatron.testing.oracle import make_inputs, random_mask
from tests.ops.test_attention import PAPER, UNEVEN, pattern_of

FORMS = ("sbhd", "bshd", "bhsd", "thd")
KINDS = (*FORMS, "padded", "mask", "uneven", "placed", "ending")


def make_call(kind: str, device, length: int = 80, block: int = 16, dim: int = 32, dtype=torch.float32):
    """([query, key, value] as strided leaves, arguments of s2_attention): 4 query heads, 2 KV heads.

    kind: a format; "padded" documents with gaps; "mask", an index table; "uneven" ranges, not KV-cache efficient;
    "placed", whole query blocks and key slots, one of them absent; "ending", a query that is the end of the sequence.
    """
    pattern = (
        random_mask(block, 4, 2, 2)
        if kind == "mask"
        else pattern_of(UNEVEN if kind == "uneven" else PAPER, block, 4, 2)
    )
    form = kind if kind in FORMS else "thd" if kind == "padded" else "sbhd"
    (query, key, value, _), _ = make_inputs(pattern, length, dim, dtype, device, form=form)
    options = {}
    if form == "thd":
        ends = torch.tensor([0, 30, 31, length - 9], dtype=torch.int32, device=device)
        starts = torch.tensor([0, 31, 35, length], dtype=torch.int32, device=device) if kind == "padded" else None
        options["packed"] = PackedSequence(ends, length, starts)
    if kind == "placed":
        blocks = length // block
        slots = torch.arange(blocks).flip(0).expand(2, blocks).clone()
        slots[1, 1] = -1
        options["placement"] = Placement.make(range(blocks - 2, blocks), blocks, slots, device)
        query, key, value = query[-2 * block :], key[: blocks * block], value[: blocks * block]
    if kind == "ending":
        query = query[-block - 3 :]
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    return leaves, dict(layout=build_layout(pattern, device), tensor_format=form, return_lse=True, **options)


def computes(backend: str, kind: str, block: int = 64, dim: int = 64, dtype=torch.bfloat16) -> bool:
    """Whether a backend's kernels compute such a call: those for Hopper refuse what the portable ones are for."""
    return backend != "gluon" or (
        kind in (*FORMS, "padded", "mask", "uneven") and block == 64 and dim <= 256 and dtype.itemsize == 2
    )


def results(function, leaves):
    """(out, LSE, the gradients of a loss over both) of function(query, key, value) -> (out, LSE)."""
    out, lse = function(*leaves)
    seen = torch.where(torch.isfinite(lse), lse, 0.0)
    return out, lse, *torch.autograd.grad(out.float().sin().sum() + seen.cos().sum(), leaves)


def equal(one, two):
    assert len(one) == len(two) == 5
    return [torch.equal(a, b) for a, b in zip(one, two)] == [True] * 5
