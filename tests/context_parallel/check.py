"""Context parallelism on GPUs over NCCL: errors against fp64 beside those of one GPU, bits repeated, bytes counted.

    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 4 -m tests.context_parallel.check

    ranks 4, NCCL, NVIDIA H200: 30 combinations, error at most twice that of one GPU
    case          dtype     exchange    out           dq            dk            dv            repeats  bytes
    paper         bfloat16  sparse      1.01          1.02          1.00          1.00          yes      plan
    ...
    all right

The numbers are the error (norm-wise, against fp64) over that of one GPU. On a machine without GPUs it runs over gloo with small cases.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from s2_megatron.attention import s2_attention
from s2_megatron.context_parallel import COMM_TYPES, ContextParallel
from s2_megatron.cp_exchange import count_traffic
from s2_megatron.cp_plan import make_plan
from s2_megatron.layout import build_layout
from s2_megatron.patterns import RangePattern
from tests.context_parallel.cases import Case, block_mask, ranges
from tests.context_parallel.worker import NAMES, differentiate, inputs, own_rows, tokens_of

FACTOR = 2.0


def cases(on_gpu: bool) -> dict[str, Case]:
    if not on_gpu:
        return {"paper": Case(ranges(((1, 1), (None, 4)), 16, 4, 2, layer_index=1), 1, 16), "mask": Case(block_mask(16, 2, 2, 2), 1, 16)}
    return {
        "paper": Case(ranges(((4, 1), (None, 8)), 64, 16, 8, layer_index=1, base_offset=1), 8, 128, 2),
        "uneven": Case(ranges(((2, 1), (9, 3), (None, 8)), 64, 8, 8), 4, 64, keep_received=True),
        "dense-heads": Case(ranges(((4, 1), (None, 8)), 128, 16, 8, dense_heads={"spread": 2}), 2, 96),
        "dense": Case(RangePattern.dense(64, 8, 8), 3, 128),
        "mask": Case(block_mask(64, 16, 8, 8), 48 // (2 * 8), 64),
    }


def relative_errors(mine, truth, group, exact_rows):
    """Norm-wise error of tensors that lie on the ranks, against whole ones."""
    sums = torch.stack([torch.stack([(a.double() - exact_rows(b)).square().sum(), exact_rows(b).square().sum()]) for a, b in zip(mine, truth)])
    dist.all_reduce(sums, group=group)
    return (sums[:, 0] / sums[:, 1]).sqrt().tolist()


def check_case(case: Case, comm_type: str, dtype, group, device, backend: str, deterministic: bool = True) -> dict:
    """{name: error over one GPU's own}, whether a second run repeats every bit, and whether the sent bytes are the plan's.

    backend, deterministic: of s2_attention, on one GPU and on several."""
    rank, size = group.rank(), group.size()
    whole = [tensor.to(device) for tensor in inputs(case.pattern, tokens_of(case, size), case.dim, case.batch, dtype)]
    layout = build_layout(case.pattern, device)
    options = dict(softmax_scale=2 * case.dim**-0.5, deterministic=deterministic)
    truth = differentiate([tensor.double() for tensor in whole], s2_attention, layout, backend="reference", **options)
    alone = differentiate(whole, s2_attention, layout, backend=backend, **options)
    cp = ContextParallel(case.pattern, group, comm_type, keep_received=case.keep_received)
    mine = [own_rows(tensor, rank, size) for tensor in whole]
    with count_traffic() as traffic:
        got = differentiate(mine, cp.attention, backend=backend, **options)
    again = differentiate(mine, cp.attention, backend=backend, **options)

    def rows(tensor):
        return own_rows(tensor, rank, size)

    errors, own = (relative_errors(results, truth, group, rows) for results in (got, [rows(tensor) for tensor in alone]))
    # A result that is exact to a unit of roundoff or better has nothing to be compared with.
    roundoff = torch.finfo(dtype).eps
    result = {name: error / max(other, roundoff / 4) for name, error, other in zip(NAMES, errors, own)}
    flags = torch.tensor([all(torch.equal(a, b) for a, b in zip(got, again)), True], dtype=torch.int32, device=device)
    if comm_type == "sparse":
        plan = make_plan(case.pattern, rank, size, tokens_of(case, size) // case.pattern.block_size)
        expected = plan.sent_slots[rank] * (1 if case.keep_received else 2) + plan.needed_slots[rank]
        flags[1] = traffic.bytes_sent == expected * plan.slot_bytes(case.dim, got[0].itemsize, case.batch)
    dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)
    return {**result, "repeats": bool(flags[0]), "bytes": bool(flags[1])}


def is_right(found: dict, bits: bool = True) -> bool:
    """Of check_case's result; a NaN is wrong. bits: whether the second run must have repeated them."""
    return all(found[name] <= FACTOR for name in NAMES) and found["bytes"] and (found["repeats"] or not bits)


def main() -> int:
    on_gpu = torch.cuda.is_available()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    group = dist.group.WORLD
    backend = "triton" if not on_gpu and os.environ.get("TRITON_INTERPRET") == "1" else "auto"
    wrong, lines = 0, []
    for name, case in cases(on_gpu).items():
        for dtype in (torch.bfloat16, torch.float32) if on_gpu else (torch.float32,):
            for comm_type in COMM_TYPES:
                if comm_type == "a2a" and case.pattern.num_kv_heads % group.size():
                    continue
                found = check_case(case, comm_type, dtype, group, device, backend)
                bad = not is_right(found)
                wrong += bad
                texts = [f"{found[part]:.2f}".ljust(14) for part in NAMES]
                words = f"{'yes' if found['repeats'] else 'NO':<9}{'plan' if found['bytes'] else 'WRONG':<6}{'  WRONG' if bad else ''}"
                lines.append(f"{name:<14}{str(dtype)[6:]:<10}{comm_type:<12}{''.join(texts)}{words}")
    if rank == 0:
        card = torch.cuda.get_device_name() if on_gpu else "CPU"
        library = "NCCL" if on_gpu else "gloo"
        print(f"ranks {group.size()}, {library}, {card}: {len(lines)} combinations, error at most twice that of one GPU")
        print("case          dtype     exchange    out           dq            dk            dv            repeats  bytes")
        print("\n".join(lines))
        print(f"{wrong} WRONG" if wrong else "all right", flush=True)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
