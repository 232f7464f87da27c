"""Context parallelism on GPUs over NCCL: errors against fp64 beside those of one GPU, bits repeated, bytes counted, no
waiting for the GPU.

    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 2 -m s2_megatron.testing.context_parallel_check \\
        --dtypes bf16

    ranks 2, NCCL, NVIDIA H200
    case           dtype     exchange    out      dq       dk       dv       repeats  bytes  waits
    paper          bfloat16  sparse      1.01     1.02     1.00     1.00     yes      plan   no
    ...
    18 combinations in ... s: all right

The numbers are the error (norm-wise, against fp64) over that of one GPU; at most 2 is right. --dtypes, --cases and
--comm-types choose: most of the time goes into compiling. On a machine without GPUs it runs over gloo with small cases,
and nothing can wait.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from s2_megatron.context_parallel.attention import ContextParallel
from s2_megatron.context_parallel.document_plan import plan_documents, reaches, slot_bytes
from s2_megatron.context_parallel.documents import keep_borders, read_borders
from s2_megatron.context_parallel.exchange import count_traffic
from s2_megatron.context_parallel.plan import COMM_TYPES, make_plan
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.testing.context_parallel_cases import (
    NAMES,
    Case,
    block_mask,
    differentiate,
    documents_of,
    inputs,
    own_rows,
    ranges,
    tokens_of,
)

FACTOR = 2.0


def cases(on_gpu: bool, dim: int) -> dict[str, Case]:
    """dim: one head dim for all, because every other one is compiled anew. Those in EXTRA compile more and run where
    they are named."""
    if not on_gpu:
        return {
            "paper": Case(ranges(((1, 1), (None, 4)), 16, 4, 2, layer_index=1), 3, 16),
            "mask": Case(block_mask(16, 2, 2, 2), 1, 16),
            "latent": Case(ranges(((1, 1), (None, 4)), 16, 2, 2), 3, 24, value_dim=16),
            "packed": Case(ranges((), 16, 4, 2, window=21, sink_tokens=3), 3, 16, documents=(0.3, 0.01, 0.6)),
        }
    return {
        "paper": Case(ranges(((4, 1), (None, 8)), 64, 16, 8, layer_index=1, base_offset=1), 8, dim, 2),
        "uneven": Case(ranges(((2, 1), (9, 3), (None, 8)), 64, 8, 8), 4, dim, keep_received=True),
        "dense-heads": Case(ranges(((4, 1), (None, 8)), 64, 16, 8, dense_heads={"spread": 2}), 2, dim),
        "dense": Case(RangePattern.dense(64, 8, 8), 3, dim),
        "mask": Case(block_mask(64, 16, 8, 8), 48 // (2 * 8), dim),
        "blocks-of-128": Case(ranges(((4, 1), (None, 8)), 128, 16, 8), 2, 96),
        "latent": Case(ranges(((4, 1), (None, 8)), 64, 8, 8), 4, 192, value_dim=128),
        "packed": Case(ranges((), 64, 16, 8, window=1000, sink_tokens=4), 32, dim, documents=(0.3, 0.01, 0.6)),
    }


EXTRA = ("blocks-of-128", "latent")


def relative_errors(mine, truth, group, exact_rows):
    """Norm-wise error of tensors that lie on the ranks, against whole ones."""
    sums = torch.stack(
        [
            torch.stack([(a.double() - exact_rows(b)).square().sum(), exact_rows(b).square().sum()])
            for a, b in zip(mine, truth)
        ]
    )
    dist.all_reduce(sums, group=group)
    return (sums[:, 0] / sums[:, 1]).sqrt().tolist()


def waits(function, device) -> str:
    """What a call that waits for the GPU says; nothing when it does not wait, and on a CPU."""
    if device.type != "cuda":
        return ""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def check_case(
    case: Case, comm_types, dtype, group, device, backend: str, deterministic: bool = True
) -> dict[str, dict]:
    """{comm type: {name: error over one GPU's own}, whether a second run repeats every bit, whether the sent bytes are
    the plan's, and what a third run said that waited for the GPU}. backend, deterministic: of s2_attention, on one GPU
    and on several."""
    rank, size = group.rank(), group.size()
    tokens, documents = tokens_of(case, size), documents_of(case, size, device)
    if documents is not None:
        keep_borders(documents.starts)  # as pretrain_gpt_s2.py does; else each call would wait for the GPU
    whole = inputs(case.pattern, tokens, case.dim, case.batch, dtype, documents is not None, case.value_dim)
    whole = [tensor.to(device) for tensor in whole]
    layout = build_layout(case.pattern, device)
    options = dict(softmax_scale=2 * case.dim**-0.5, deterministic=deterministic, packed=documents)
    one = partial(s2_attention, layout=layout, tensor_format="sbhd" if documents is None else "thd", **options)
    truth = differentiate([tensor.double() for tensor in whole], one, backend="reference")
    alone = differentiate(whole, one, backend=backend)
    mine = [own_rows(tensor, rank, size) for tensor in whole]

    def rows(tensor):
        return own_rows(tensor, rank, size)

    own = relative_errors([rows(tensor) for tensor in alone], truth, group, rows)
    found = {}
    for comm_type in comm_types:
        cp = ContextParallel(case.pattern, group, comm_type, keep_received=case.keep_received)

        def step(cp=cp):
            return differentiate(mine, cp.attention, backend=backend, **options)

        if documents is None:
            cp.prepare(tokens, device, case.width, dtype, backend)  # as a layer does
        with count_traffic() as traffic:
            got = step()
        again, waited = step(), waits(step, device)
        errors = relative_errors(got, truth, group, rows)
        # A result that is exact to a unit of roundoff or better has nothing to be compared with.
        roundoff = torch.finfo(dtype).eps
        result = {name: error / max(other, roundoff / 4) for name, error, other in zip(NAMES, errors, own)}
        flags = torch.tensor(
            [all(torch.equal(a, b) for a, b in zip(got, again)), True], dtype=torch.int32, device=device
        )
        if comm_type == "sparse":
            counts, n_bytes = _planned(case, documents, rank, size, got[0].itemsize)
            expected = counts[rank].sum() * (1 if case.keep_received else 2) + counts[:, rank].sum()
            flags[1] = bool(traffic.bytes_sent == expected * n_bytes)
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)
        found[comm_type] = {**result, "repeats": bool(flags[0]), "bytes": bool(flags[1]), "waited": waited}
    return found


def _planned(case: Case, documents, rank: int, size: int, itemsize: int):
    """(slots from each rank to each, bytes of a slot) of `sparse`"""
    tokens = tokens_of(case, size)
    if documents is None:
        plan = make_plan(case.pattern, rank, size, tokens // case.pattern.block_size)
        return plan.counts, plan.slot_bytes(case.width, itemsize, case.batch)
    borders = read_borders(documents.starts)
    row = np.array([0, tokens])
    plan = plan_documents(reaches(case.pattern), borders[:-1], np.diff(borders), row, tokens, rank, size)
    return plan.counts, slot_bytes(case.width, itemsize)


def is_right(found: dict, bits: bool = True) -> bool:
    """Of check_case's result; a NaN is wrong. bits: whether the second run must have repeated them."""
    return (
        all(found[name] <= FACTOR for name in NAMES)
        and found["bytes"]
        and not found["waited"]
        and (found["repeats"] or not bits)
    )


def line_of(name, dtype, comm_type, found) -> tuple[str, bool]:
    """(a line of the table, whether everything in it is right)"""
    right = is_right(found)
    texts = "".join(f"{found[part]:.2f}".ljust(8) + " " for part in NAMES)
    repeats, n_bytes = "yes" if found["repeats"] else "NO", "plan" if found["bytes"] else "WRONG"
    words = f"{repeats:<9}{n_bytes:<7}{'YES' if found['waited'] else 'no':<7}"
    end = "" if right else f"WRONG {found['waited']}"
    return f"{name:<15}{str(dtype)[6:]:<10}{comm_type:<12}{texts}{words}{end}".rstrip(), right


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--cases", nargs="+", choices=cases(on_gpu, 64), help=f"default: all but {', '.join(EXTRA)}")
    parser.add_argument("--comm-types", nargs="+", choices=COMM_TYPES, default=COMM_TYPES)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    group = dist.group.WORLD
    backend = "triton" if not on_gpu and os.environ.get("TRITON_INTERPRET") == "1" else "auto"
    say = print if rank == 0 else lambda *_, **__: None
    say(f"ranks {group.size()}, {'NCCL' if on_gpu else 'gloo'}, {torch.cuda.get_device_name() if on_gpu else 'CPU'}")
    say("case           dtype     exchange    out      dq       dk       dv       repeats  bytes  waits", flush=True)
    wrong = lines = 0
    start = time.monotonic()
    for dtype in args.dtypes:
        known = cases(on_gpu, 128 if dtype == "bf16" else 64)
        for name in args.cases or [name for name in known if name not in EXTRA]:
            case = known[name]
            comm_types = [
                kind for kind in args.comm_types if kind != "a2a" or case.pattern.num_kv_heads % group.size() == 0
            ]
            torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
            for comm_type, found in check_case(case, comm_types, torch_dtype, group, device, backend).items():
                line, right = line_of(name, torch_dtype, comm_type, found)
                wrong, lines = wrong + (not right), lines + 1
                say(line, flush=True)
    say(
        f"{lines} combinations in {time.monotonic() - start:.0f} s: {f'{wrong} WRONG' if wrong else 'all right'}",
        flush=True,
    )
    dist.destroy_process_group()
    return 1 if wrong or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
