"""Small calls of every kernel and variant, for compute-sanitizer: scripts/sanitize.sh runs them.

    python tests/kernels/sanitizer_cases.py --backend triton [--device cpu] [--only REGEX]

Prints the Hopper kernels that ran, and "cases done: N" at the end. Results are looked at only for NaN; what they should
be is the business of test_attention.py.
"""

import argparse
import importlib.util
import re
import sys
from functools import partial
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from s2_megatron.context_parallel.exchange import BlockExchange, slot_views
from s2_megatron.context_parallel.plan import make_plan
from s2_megatron.context_parallel.sparse import place
from s2_megatron.ops.api import BACKENDS, s2_attention
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import build_layout
from s2_megatron.ops.parts import (
    attention_backward,
    attention_backward_dkdv,
    attention_backward_dq,
    attention_delta,
    attention_forward,
    empty_lse,
    joins_keys,
)
from s2_megatron.testing.oracle import make_inputs, random_mask
from tests.calls import KINDS, computes, make_call, results
from tests.ops.test_attention import PAPER, pattern_of

BF16, F32 = torch.bfloat16, torch.float32
# name: (kind, length, block, head dim, dtype). Lengths end in the middle of tiles, so that a mask that is missing
# touches foreign memory.
CASES = {f"{kind}-64": (kind, 200, 64, 64, BF16) for kind in KINDS}
CASES |= {f"sbhd-{dim}": ("sbhd", 333, 64, dim, BF16) for dim in (96, 128, 256)}
CASES |= {f"padded-{dim}": ("padded", 199, 64, dim, BF16) for dim in (96, 128)}
CASES |= {
    "sbhd-64-fp32": ("sbhd", 150, 64, 64, F32),
    "block16": ("sbhd", 77, 16, 64, BF16),
    "block128": ("bhsd", 300, 128, 128, BF16),
}
CASES |= {"mask-128": ("mask", 250, 64, 128, BF16), "placed-128": ("placed", 260, 64, 128, BF16)}


# Calls on Hopper as with many KV heads, where dK and dV have another kernel.
UNDIVIDED = {f"undivided-{dim}": ("sbhd", 200, 64, dim, BF16) for dim in (64, 128)} | {
    "undivided-mask": ("mask", 200, 64, 128, BF16)
}


def run_case(kind, length, block, dim, dtype, device, backend):
    leaves, options = make_call(kind, device, length, block, dim, dtype)
    for deterministic in (False, True):
        out, _, *grads = results(partial(s2_attention, **options, backend=backend, deterministic=deterministic), leaves)
        assert all(torch.isfinite(tensor).all() for tensor in (out, *grads))


# name: (a block mask instead of ranges, head dim, dtype). What one of two context-parallel ranks computes.
PARTS = {
    "parts-64": (False, 64, BF16),
    "parts-128": (False, 128, BF16),
    "parts-mask-80": (True, 80, BF16),
    "parts-fp32": (False, 48, F32),
}


def run_parts(masked, dim, dtype, device, backend, block=64, n_blocks=12):
    """All kernels of context parallelism as it calls them, in one process: blocks packed for the other rank, the
    attention of the own keys continued over slots, or of both at once, the backward in parts, returned gradients
    added."""
    pattern = random_mask(block, 4, 2, 2, n_blocks) if masked else pattern_of(PAPER, block, 4, 2)
    layout, plan = build_layout(pattern, device), make_plan(pattern, 1, 2, n_blocks)
    own, remote, both = (
        AttentionCall(layout, 0.1, "sbhd", None, placed, backend, False) for placed in place(plan, pattern, device)
    )
    (query, key, value, grad_out), _ = make_inputs(
        pattern, len(plan.query_blocks) * block, dim, dtype, device, form="sbhd"
    )

    exchange = BlockExchange(plan, None, device)
    sent = torch.full((len(plan.send_heads), block, 2, 1, dim), torch.nan, dtype=dtype, device=device)
    exchange._pack(key, value, sent, backend)
    buffer = torch.randn(plan.received_slots, block, 2, 1, dim, device=device).to(dtype)
    gradients = torch.full_like(buffer, torch.nan)
    slots, grad_slots = slot_views(buffer, 2), slot_views(gradients, 2)

    partial = [torch.full(query.shape, torch.nan, dtype=F32, device=device) for _ in range(2)]
    early = attention_forward(query, key, value, own, into=(partial[0], empty_lse(query, "sbhd")))
    out, lse = attention_forward(query, *slots, remote, initial=early)
    row_sums = attention_delta(grad_out, out, lse, own)
    grad_query = attention_backward_dq(grad_out, query, key, value, lse, row_sums, own, into=partial[1])
    attention_backward_dkdv(grad_out, query, *slots, lse, row_sums, *grad_slots, remote)
    grad_query = attention_backward_dq(grad_out, query, *slots, lse, row_sums, remote, initial=grad_query)
    if joins_keys(query, key, value, slots, both):
        part = dict(kv_heads=(1, 2), more=slots)  # the first KV head's query heads keep what they have
        attention_forward(query, key, value, both, into=(out, lse), **part)
        attention_backward_dq(grad_out, query, key, value, lse, row_sums, both, into=grad_query, **part)
    grads, wide = (
        [torch.empty(tensor.shape, dtype=kind, device=device) for tensor in (key, value)] for kind in (dtype, F32)
    )
    attention_backward_dkdv(
        grad_out, query, key, value, lse, row_sums, *grads, own, exchange.returned(torch.ones_like(sent))
    )
    attention_backward_dkdv(grad_out, query, key, value, lse, row_sums, *wide, own)  # as with `all_gather`
    # A whole backward over placed keys, as with `all_gather`: on Hopper other kernels than those of the parts at small
    # head dims.
    more = attention_backward(grad_out, torch.ones_like(lse), query, key, value, out.to(dtype), lse, own)
    assert all(torch.isfinite(tensor).all() for tensor in (sent, out, lse, grad_query, gradients, *grads, *wide, *more))


# name: (head dims of keys and values, kept tokens, dtype). A decoding step over S2Cache, with RoPE and an offset.
DECODE = {
    "decode-128": ((128, 128), 1000, BF16),
    "decode-80": ((80, 72), 48, BF16),
    "decode-64-fp32": ((64, 64), 200, F32),
}


def run_decode(dims, kept, dtype, device):
    """Heads that keep `kept` tokens and, with a mask by query head, 16; the memory behind the kept ones is taken."""
    from s2_megatron.huggingface.decode_kernel import decode
    from tests.huggingface.test_decode_kernel import random_kept

    sizes = ((12, dims[0]), (3, dims[0]), (3, dims[1]))
    parts = [torch.randn(2, 1, *size, device=device).to(dtype).transpose(1, 2) for size in sizes]
    groups = [random_kept([1], kept, dims, dtype, device), random_kept([0, 2], 16, dims, dtype, device, 4)]
    angles = torch.rand(2, 1, dims[0] // 2, device=device).repeat(1, 1, 2)
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    for found in decode(*parts, groups, 0.1, rotary, torch.zeros(12, device=device)):
        assert torch.isfinite(found).all()


def hopper_kernels(device: int) -> tuple[set[str], set[str]]:
    """(names of all kernels that Hopper launches, those among them that this process has launched)."""
    from s2_megatron.kernels.hopper import launch as hopper

    kernels = {name: value for name, value in vars(hopper).items() if isinstance(value, JITFunction)}
    return set(kernels), {name for name, kernel in kernels.items() if len(kernel.device_caches[device][0])}


def case_names(backend: str) -> list[str]:
    """What --only chooses from."""
    names = [name for name, (kind, _, *shape) in CASES.items() if computes(backend, kind, *shape)]
    names += list(UNDIVIDED) if backend == "gluon" else []
    # Its package needs the extra hf.
    names += list(DECODE) if backend == "triton" and importlib.util.find_spec("transformers") else []
    return names + [name for name, (_, _, dtype) in PARTS.items() if backend != "gluon" or dtype.itemsize == 2]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=[name for name in BACKENDS if name != "auto"], required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="a regular expression that the cases' names contain")
    chosen = parser.parse_args(arguments)
    names = [name for name in case_names(chosen.backend) if re.search(chosen.only, name)]
    for name in names:
        if name in PARTS:
            run_parts(*PARTS[name], chosen.device, chosen.backend)
        elif name in DECODE:
            run_decode(*DECODE[name], chosen.device)
        elif name in UNDIVIDED:
            from s2_megatron.kernels.hopper import launch as hopper

            hopper.FEW_UNITS, few = 0, hopper.FEW_UNITS
            run_case(*UNDIVIDED[name], chosen.device, chosen.backend)
            hopper.FEW_UNITS = few
        else:
            run_case(*CASES[name], chosen.device, chosen.backend)
    if chosen.device == "cuda":
        torch.cuda.synchronize()
    if chosen.device == "cuda" and chosen.backend == "gluon":
        known, launched = hopper_kernels(torch.cuda.current_device())
        print("kernels launched:", *sorted(launched))
        print("kernels known:", *sorted(known))
    print(f"cases done: {len(names)}")


if __name__ == "__main__":
    main()
