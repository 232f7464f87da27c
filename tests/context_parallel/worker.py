"""Runs every case on several ranks over gloo, in one process each, and writes what was found as JSON.

    python tests/context_parallel/worker.py RANKS FILE [PART ...]    (those in PARTS)

The ranks are forked from one process that has imported everything: eight of them start in a second on two cores.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from s2_megatron.context_parallel import attention as context_parallel
from s2_megatron.context_parallel import plan as cp_plan
from s2_megatron.context_parallel.attention import ContextParallel
from s2_megatron.context_parallel.dense import sequence_order
from s2_megatron.context_parallel.exchange import BlockExchange, all_gather, count_traffic
from s2_megatron.context_parallel.plan import COMM_TYPES
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import PackedSequence, build_layout
from s2_megatron.ops.recompute import keep_outputs, layer_output
from s2_megatron.testing.context_parallel_cases import (
    CASES,
    NAMES,
    Case,
    differentiate,
    inputs,
    own_rows,
    ranges,
    tokens_of,
)
from tests.context_parallel.packed_worker import packed, packed_kernels
from tests.context_parallel.watching import arrives_late, difference, handed_over
from tests.interpreter import patch_language_once


def inputs_of(case: Case, tokens: int, dtype) -> list[torch.Tensor]:
    return inputs(case.pattern, tokens, case.dim, case.batch, dtype, value_dim=case.value_dim)


def truths(cases: list[Case], group, dtype=torch.float64) -> list[list[torch.Tensor]]:
    """What one process computes for every case, in fp64: the ranks share the work."""
    results = []
    for index, case in enumerate(cases):
        whole = [a.double() for a in inputs_of(case, tokens_of(case, group.size()), dtype)]
        if index % group.size() == group.rank():
            layout = build_layout(case.pattern)
            results.append(differentiate(whole, s2_attention, layout, softmax_scale=0.4, backend="reference"))
        else:
            results.append([torch.empty(a.shape, dtype=a.dtype) for a in (whole[3], *whole[:3])])
    for index, tensors in enumerate(results):
        for number, tensor in enumerate(tensors):
            tensors[number] = tensor.contiguous()
            dist.broadcast(tensors[number], index % group.size(), group)
    return results


def run_case(case: Case, comm_type, group, truth, dtype=torch.float64, backend="reference"):
    """Largest difference of each result over this rank's rows, whether a second run, whose blocks arrive late, repeats
    every bit, bytes sent, bytes the plan says."""
    rank, size = group.rank(), group.size()
    n_blocks, block = tokens_of(case, size) // case.pattern.block_size, case.pattern.block_size
    whole = inputs_of(case, n_blocks * block, dtype)
    cp = ContextParallel(case.pattern, group, comm_type, keep_received=case.keep_received)
    cp.prepare(n_blocks * block, whole[0].device, case.width, dtype, backend)
    mine = [own_rows(tensor, rank, size) for tensor in whole]
    leaves = [tensor.detach().requires_grad_() for tensor in mine[:3]]
    with count_traffic() as forward, handed_over() as handed_forward:
        out = cp.attention(*leaves, softmax_scale=0.4, backend=backend)
    with count_traffic() as backward, handed_over() as handed_backward:
        grads = torch.autograd.grad(out, leaves, mine[3])
    with arrives_late():
        again = differentiate(mine, cp.attention, softmax_scale=0.4, backend=backend)
    results = [out.detach(), *grads]
    assert all(a.dtype == dtype for a in results)
    found = {name: difference(a, own_rows(b, rank, size), b) for name, a, b in zip(NAMES, results, truth)}
    found["repeats"] = all(torch.equal(a, b) for a, b in zip(results, again))
    found["forward bytes"], found["backward bytes"] = forward.bytes_sent, backward.bytes_sent
    found["handed over"] = [handed_forward, handed_backward]
    if comm_type == "sparse":
        plan = cp_plan.make_plan(case.pattern, rank, size, n_blocks)
        one_way = plan.sent_slots[rank] * plan.slot_bytes(case.width, out.itemsize, case.batch)
        returned = plan.needed_slots[rank] * plan.slot_bytes(case.width, out.itemsize, case.batch)
        found["plan"] = [one_way, returned + (0 if case.keep_received else one_way)]
        found["calls"] = [forward.calls, backward.calls]
    return found


def gradients(group):
    results = {}
    for (name, case), truth in zip(CASES.items(), truths(list(CASES.values()), group)):
        for comm_type in COMM_TYPES:
            if comm_type != "a2a" or case.pattern.num_kv_heads % group.size() == 0:
                results[f"{name}/{comm_type}"] = run_case(case, comm_type, group, truth)
    return results


def triton(group):
    """The kernels through Triton's interpreter, in fp32."""
    cases = {
        "paper-gqa": Case(ranges(((1, 1), (None, 4)), 16, 4, 2, layer_index=1), 2, 16),
        "uneven": Case(ranges(((2, 1), (5, 3), (None, 4)), 16, 2, 2), 2, 16, keep_received=True),
    }
    if group.size() == 2:
        cases["tokens"] = Case(ranges(((None, 4),), 16, 4, 2, window=[37, 9], sink_tokens=20), 2, 16)
        mask = CASES["mask-kv-heads"].pattern
        cases["mask"] = Case(mask.from_csr(16, 2, 2, *zip(*mask.tables[:2])), 2, 16, batch=2)
    return {
        f"{name}/{comm_type}": run_case(case, comm_type, group, truth, torch.float32, "triton")
        for (name, case), truth in zip(cases.items(), truths(list(cases.values()), group, torch.float32))
        for comm_type in (COMM_TYPES if name == "paper-gqa" and group.size() == 2 else ("sparse",))
    }


def wrong(group):
    """What a mistake in a position or in an offset does to the results: name -> differences."""
    case = CASES["layer-offset"]
    (truth,) = truths([case], group)
    results = {}
    plain_slice = type(case.pattern).tensor_parallel_slice

    def moved(pattern, by):
        heads = tuple(type(head)(head.ranges, head.offset + by) for head in pattern.heads)
        return type(pattern)(pattern.block_size, pattern.num_kv_heads, heads)

    def mistaken_make(pattern, *rest):
        plan = cp_plan.make_plan(pattern, *rest)
        swapped = plan.remote_slot.copy()
        slots = swapped[swapped >= 0]
        swapped[swapped >= 0] = slots[::-1]
        return type(plan)(**{**vars(plan), "remote_slot": swapped})

    def both(name, comm_type, *patches):
        with ExitStack() as stack:
            for owner, attribute, replacement in patches:
                stack.enter_context(patch.object(owner, attribute, replacement))
            results[name] = run_case(case, comm_type, group, truth)

    both("remote blocks in other slots", "sparse", (context_parallel, "make_plan", mistaken_make))
    contiguous = staticmethod(lambda rank, size, n: cp_plan.np.arange(rank * n // size, (rank + 1) * n // size))
    both("contiguous chunks", "all_gather", (context_parallel, "zigzag_blocks", contiguous))
    if case.pattern.num_kv_heads % group.size() == 0:
        local = lambda self, rank, size: plain_slice(self, 0, size)  # noqa: E731
        both("head offsets of rank 0", "a2a", (type(case.pattern), "tensor_parallel_slice", local))
    build = context_parallel.build_layout
    both(
        "another layer's offset", "sparse", (context_parallel, "build_layout", lambda pattern: build(moved(pattern, 3)))
    )
    return results


def volume(group):
    """The exchange of a layer with 32 heads at 128K tokens, window 1024, stride 16, in blocks of 64, with a head dim of
    2: bytes of the tensors that torch is given, beside those of an all-gather of the same K and V, and whether every
    block came from its place."""
    rank, size, n_blocks, block, heads, dim = group.rank(), group.size(), 2048, 64, 32, 2
    plan = cp_plan.make_plan(ranges(((16, 1), (None, 16)), block, heads, heads), rank, size, n_blocks)
    # Every element of a block is its number among all blocks and heads; V's are negative.
    number = torch.from_numpy(plan.query_blocks)[:, None] * heads + torch.arange(heads)
    key = number.float().repeat_interleave(block, 0)[:, None, :, None].expand(-1, 1, -1, dim)
    with count_traffic() as traffic, handed_over() as handed:
        received = BlockExchange(plan, group, torch.device("cpu")).start(key, -key, "reference").result()
    with handed_over() as gathered:
        all_gather(torch.stack([key, -key]), group)
    place = torch.from_numpy(plan.remote_slot)
    slots = place[place >= 0].long()
    kv_heads, blocks = (place >= 0).nonzero(as_tuple=True)
    expected = (blocks * heads + kv_heads).float()[:, None, None, None] * torch.tensor([1.0, -1.0])[:, None, None]
    return {
        "right": len(slots) == len(received) and torch.equal(received[slots], expected[:, None].expand_as(received)),
        "handed over": handed,
        "counted": traffic.bytes_sent,
        "plan": [
            slots_of[rank] * plan.slot_bytes(dim, key.itemsize) for slots_of in (plan.sent_slots, plan.needed_slots)
        ],
        "all-gather": [(size - 1) * sent for sent, _ in gathered],
    }


def fetches(given, attend, **options) -> list[int]:
    """How often a backward fetches each tensor that was saved for it."""
    counts = []

    def pack(tensor):
        counts.append(0)
        return len(counts) - 1, tensor

    def unpack(packed):
        counts[packed[0]] += 1
        return packed[1]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        differentiate(given, attend, **options)
    return counts


def contexts(group):
    """Whether every bit is that of a plain first call: of training after a call in another context, which filled the
    caches, and with lazily negated tensors, which kernels read as their negatives. And whether the backward fetches
    once what the forward saved, which may lie on the host."""
    rank, size = group.rank(), group.size()
    stripes, results = ranges(((2, 1), (None, 4)), 4, 16, 8, layer_index=1), {}
    windows = ranges((), 4, 16, 8, window=9, sink_tokens=2)
    whole = inputs(stripes, 16 * size, 8, 1, torch.float64)
    mine = [own_rows(tensor, rank, size) for tensor in whole]
    packed = PackedSequence(torch.tensor([0, 9, 16 * size], dtype=torch.int32), 16 * size)
    before = {"inference": torch.inference_mode, "device": lambda: torch.device("meta")}
    for name in (*COMM_TYPES, *(f"{comm_type} packed" for comm_type in COMM_TYPES)):
        pattern = windows if name == "sparse packed" else stripes
        comm_type, options = name.split()[0], dict(softmax_scale=0.4, backend="reference")
        given = mine
        if name.endswith("packed"):
            given, options["packed"] = [tensor[:, 0] for tensor in mine], packed
        sequence_order.cache_clear()
        plain = differentiate(given, ContextParallel(pattern, group, comm_type).attention, **options)
        fetched = fetches(given, ContextParallel(pattern, group, comm_type).attention, **options)
        results[f"{name}/fetched once"] = len(fetched) > 0 and set(fetched) == {1}
        for context in before:
            sequence_order.cache_clear()
            cp = ContextParallel(pattern, group, comm_type)
            with before[context]():
                cp.attention(*given[:3], **options)
            again = differentiate(given, cp.attention, **options)
            results[f"{name}/{context}"] = all(map(torch.equal, plain, again))
    pattern = ranges(((1, 1), (None, 2)), 16, 2 * size, size)
    mine = [own_rows(a, rank, size) for a in inputs(pattern, 32 * size, 16, 1, torch.float32)]
    for comm_type in COMM_TYPES:
        attend = ContextParallel(pattern, group, comm_type).attention
        plain, again = (
            differentiate(given, attend, backend="triton") for given in (mine, [torch._neg_view(-a) for a in mine])
        )
        results[f"{comm_type}/negated"] = all(map(torch.equal, plain, again))
    return results


def offsets(group):
    """Softmax offsets, whose gradient is the ranks' sum; a second pass takes what the first kept. Kernels in fp32."""
    rank, size, results = group.rank(), group.size(), {}
    stripes = ranges(((2, 1), (None, 4)), 16, 8, 4, layer_index=1)
    cases = {
        "stripes": (stripes, torch.float64, "reference", None),
        "kernels": (ranges(((None, 4),), 16, 4, 2, window=37, sink_tokens=3), torch.float32, "triton", None),
        "packed": (stripes, torch.float64, "reference", [37, 1, 50, 24, 16]),
    }
    for name, (pattern, dtype, backend, lengths) in cases.items():
        tokens = 32 * size if lengths is None else sum(lengths)
        packed = lengths and PackedSequence(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), tokens)
        whole = inputs(pattern, tokens, 16, 1, dtype, packed=packed is not None)
        offset = torch.linspace(-2, 3, pattern.num_heads, dtype=torch.float64)
        options = dict(softmax_scale=0.4, packed=packed)

        def run(attend, tensors, offset, **options):
            leaves = [tensor.detach().requires_grad_() for tensor in (*tensors[:3], offset)]
            out = attend(*leaves[:3], softmax_offset=leaves[3], **options)
            return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]

        form = dict(layout=build_layout(pattern), tensor_format="sbhd" if packed is None else "thd")
        truth = run(s2_attention, [a.double() for a in whole], offset, backend="reference", **form, **options)
        for comm_type in COMM_TYPES if packed is None else COMM_TYPES[1:]:
            cp = ContextParallel(pattern, group, comm_type, keep_received=name == "kernels")
            mine = [own_rows(tensor, rank, size) for tensor in whole]
            got = run(cp.attention, mine, offset.to(dtype), backend=backend, **options)
            dist.all_reduce(got[4])

            def attend(*tensors, cp=cp, options=options, backend=backend, **more):
                return cp.attention(*tensors, output=layer_output("layer"), backend=backend, **options, **more)

            kept = keep_outputs(attend)
            with torch.no_grad():
                kept(*mine[:3], softmax_offset=offset.to(dtype))
            again = run(kept, mine, offset.to(dtype))
            dist.all_reduce(again[4])
            expected = [*(own_rows(tensor, rank, size) for tensor in truth[:4]), truth[4]]
            results[f"{name}/{comm_type}"] = {
                **{part: difference(a, b) for part, a, b in zip((*NAMES, "d offset"), got, expected)},
                "kept": max(difference(a, b) for a, b in zip(again, got)),
            }
    return results


PARTS = {
    "contexts": contexts,
    "gradients": gradients,
    "offsets": offsets,
    "triton": triton,
    "packed": packed,
    "packed_kernels": packed_kernels,
    "wrong": wrong,
    "volume": volume,
}


def rank_main(rank, size, file, parts):
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{file}.store", rank=rank, world_size=size)
    try:
        results = {part: PARTS[part](dist.group.WORLD) for part in parts}
        gathered = [None] * size
        dist.all_gather_object(gathered, results)
        if rank == 0:
            file.write_text(json.dumps(gathered))
    except BaseException:  # noqa: BLE001 - a forked rank must end here, whatever happened
        traceback.print_exc()
        os._exit(1)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # without the interpreter's shutdown, which a fork shares with its parent


def main(size: int, file: Path, parts: list[str]) -> int:
    patch_language_once()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            rank_main(rank, size, file, parts)
        children.append(child)
    failed = 0
    for _ in children:
        _, status = os.wait()
        if status and not failed:
            failed = 1
            for child in children:
                try:
                    os.kill(child, 9)
                except ProcessLookupError:
                    continue
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
