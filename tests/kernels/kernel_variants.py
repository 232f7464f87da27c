"""How many variants of each kernel a run compiles while its batches change: lengths, documents, placements; also of a
block mask, "mask".

    TRITON_INTERPRET=0 python tests/kernels/kernel_variants.py triton    (or gluon, or gluon 192: a head dim)

prints JSON: {kind of batch: {kernel: [variants after the first batch, after all]}}. Without a GPU nothing is compiled
or run: what Triton would choose a variant by is taken down at every launch. With one the kernels run, and their caches
are counted.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.cases import as_table
from s2_megatron.context_parallel.exchange import slot_views
from s2_megatron.kernels.triton.key_kernels import s2_backward_dkdv_kernel
from s2_megatron.kernels.triton.query_kernels import s2_delta_kernel, s2_forward_kernel, s2_grad_query_kernel
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
from s2_megatron.ops.parts import (
    attention_backward,
    attention_backward_dkdv,
    attention_backward_dq,
    attention_forward,
    empty_lse,
    joins_keys,
)
from s2_megatron.patterns.ranges import make_range_pattern
from tests.kernels.record_launches import believe_in_hopper, record_launches

KERNELS = {
    "portable_forward": s2_forward_kernel,
    "portable_grad_query": s2_grad_query_kernel,
    "delta": s2_delta_kernel,
    "dkdv": s2_backward_dkdv_kernel,
}
KINDS = ("packed", "placed even", "placed odd", "parts even", "parts odd", "sbhd", "bhsd", "mask")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BLOCK, HEADS, GROUPS = 64, 8, 4
DIM = int(sys.argv[2]) if len(sys.argv) > 2 else 64
DOCUMENTS = ([200], [64, 64], [100, 28, 1], [16] * 16, [7] * 33, [300, 20, 500, 63, 65])
LENGTHS = (1, 16, 63, 64, 65, 100, 1000, 1024)
PATTERN = make_range_pattern(block_size=BLOCK, num_heads=HEADS, num_kv_heads=GROUPS, ranges=((2, 1), (None, 4)))
RECORDED = [] if HAS_GPU else record_launches()


def take_hopper_kernels():
    """Count the kernels for Hopper too, and believe in a Hopper GPU where there is none."""
    from s2_megatron.kernels.hopper import launch as hopper

    KERNELS.update(
        forward=hopper.s2_hopper_forward_kernel, backward=hopper.s2_hopper_backward_kernel, scale=hopper.s2_scale_kernel
    )
    KERNELS.update(
        d256_forward=hopper.s2_hopper_d256_forward_kernel, d256_backward=hopper.s2_hopper_d256_backward_kernel
    )
    KERNELS.update(d256_grad_query=hopper.s2_hopper_d256_grad_query_kernel)
    KERNELS.update(grad_query=hopper.s2_hopper_grad_query_kernel, documents=hopper.s2_document_tiles_kernel)
    hopper.PART_STEPS = 4  # columns of dK and dV are divided in the longer ones of these sequences
    if not HAS_GPU:
        believe_in_hopper()


def variants() -> dict[str, int]:
    if HAS_GPU:
        return {name: len(kernel.device_caches[torch.cuda.current_device()][0]) for name, kernel in KERNELS.items()}
    return {
        name: len({launch.variant for launch in RECORDED if launch.kernel is kernel})
        for name, kernel in KERNELS.items()
    }


def batches(kind: str):
    """(rows, tensor format, options of AttentionCall) of batches as a run may bring them one after the other."""
    if kind == "packed":
        for lengths in DOCUMENTS:
            ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
            yield sum(lengths), "thd", dict(packed=PackedSequence(ends, max(lengths)))
    elif kind.endswith(("even", "odd")):  # an even number of blocks may share tiles, an odd one not: two sizes of tiles
        for n_blocks in (2, 4, 16, 34) if kind.endswith("even") else (3, 5, 15, 33):
            slots = torch.arange(n_blocks).expand(GROUPS, n_blocks).clone()
            slots[:, 0] = -1
            options = dict(placement=Placement.make(range(n_blocks), n_blocks, slots, DEVICE, PATTERN))
            if kind.startswith("parts"):  # what is absent comes in slots of one KV head
                slots = torch.full((GROUPS, n_blocks), -1)
                slots[:, 0] = torch.arange(GROUPS)
                options["remote"] = Placement.make(range(n_blocks), n_blocks, slots, DEVICE, PATTERN)
                slots = torch.arange(n_blocks).expand(GROUPS, n_blocks).clone()
                slots[:, 0] = n_blocks + torch.arange(GROUPS)
                options["joined"] = Placement.make(
                    range(n_blocks), n_blocks, slots, DEVICE, PATTERN, own_slots=n_blocks
                )
            yield n_blocks * BLOCK, "sbhd", options
    else:
        for length in LENGTHS:
            yield length, "sbhd" if kind == "mask" else kind, {}


def run_batch(layout, backend: str, rows: int, form: str, options: dict):
    """Forward and backward, with a gradient of LSE too, on q, k and v that are slices of one projection's output."""
    fused = torch.randn(rows, HEADS + 2 * GROUPS, DIM, dtype=torch.float16, device=DEVICE)
    query, key, value = fused.split([HEADS, GROUPS, GROUPS], 1)
    if form == "sbhd":
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
    if form == "bhsd":
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0).contiguous() for tensor in (query, key, value))
    if "remote" in options:
        calls = [
            AttentionCall(layout, 0.1, form, None, options[name], backend, False)
            for name in ("placement", "remote", "joined")
        ]
        return run_parts(query, key, value, *calls)
    for deterministic in (False, True):
        call = AttentionCall(layout, 0.1, form, options.get("packed"), options.get("placement"), backend, deterministic)
        out, lse = attention_forward(query, key, value, call)
        attention_backward(torch.ones_like(out), torch.ones_like(lse), query, key, value, out, lse, call)


def run_parts(query, key, value, own: AttentionCall, remote: AttentionCall, joined: AttentionCall):
    """The calls of context parallelism: own keys, then keys in slots that continue the softmax and dQ; both at once;
    gradients of own keys with returned ones. Every block of every KV head has one that was returned."""
    buffer = torch.randn(GROUPS, BLOCK, 2, 1, DIM, dtype=query.dtype, device=DEVICE)
    slots, slot_grads = slot_views(buffer, GROUPS), slot_views(torch.empty_like(buffer), GROUPS)
    early = torch.empty(query.shape, device=query.device), empty_lse(query, "sbhd")
    attention_forward(query, key, value, own, into=early)
    _, lse = attention_forward(query, *slots, remote, initial=early)
    grad, sums = torch.ones_like(query), torch.zeros_like(lse)
    grad_query = attention_backward_dq(grad, query, key, value, lse, sums, own, into=early[0])
    attention_backward_dkdv(grad, query, *slots, lse, sums, *slot_grads, remote)
    attention_backward_dq(grad, query, *slots, lse, sums, remote, initial=grad_query)
    if joins_keys(query, key, value, slots, joined):
        part = dict(kv_heads=(len(key) // BLOCK % 3 + 1, GROUPS), more=slots)
        attention_forward(query, key, value, joined, into=(torch.empty_like(query), lse), **part)
        attention_backward_dq(grad, query, key, value, lse, sums, joined, **part)
    places = len(key) // BLOCK * GROUPS
    returned = torch.zeros(places, BLOCK, 2, 1, DIM, dtype=query.dtype, device=DEVICE)
    order = torch.arange(places + 1, dtype=torch.int32, device=DEVICE)
    grads = (torch.empty(tensor.shape, dtype=query.dtype, device=DEVICE) for tensor in (key, value))
    attention_backward_dkdv(grad, query, key, value, lse, sums, *grads, own, (returned, order, order))


def count(backend: str) -> dict[str, dict[str, list[int]]]:
    layouts = {False: build_layout(PATTERN, DEVICE), True: build_layout(as_table(PATTERN, max(LENGTHS)), DEVICE)}
    found = {}
    for kind in KINDS:
        before, first = variants(), None
        for batch in batches(kind):
            run_batch(layouts[kind == "mask"], backend, *batch)
            if first is None:
                first = variants()
        found[kind] = {name: [first[name] - before[name], now - before[name]] for name, now in variants().items()}
    return found


if __name__ == "__main__":
    if sys.argv[1] == "gluon":
        take_hopper_kernels()
    print(json.dumps(count(sys.argv[1])))
