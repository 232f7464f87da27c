"""Times what every rank of context parallelism `sparse` computes, one rank after another on one GPU, beside that GPU
with the whole sequence.

    python benchmarks/each_rank.py --ranks 2,4,8 --seq-lengths 131072 --json benchmarks/results/h200_each_rank.json

Nothing is sent: received blocks are random numbers that lie there already. So this is what is left of a step when all
communication is hidden, for any number of ranks of one host; predict.py needs it. Each step comes behind 50 ms of its
like, interleaved with the one GPU's (group_timing.py). Columns: forward, and forward + backward, in ms; their share of
one GPU's, times the ranks (1: nothing is lost); KV heads that are computed in two passes, in forward and dQ.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import refuse, report
from benchmarks.group_timing import Call, InterleavedTimer
from benchmarks.one_layer import add_layer_arguments, forward_of, pattern_of, step_of, tensors
from s2_megatron.context_parallel import exchange as cp_exchange
from s2_megatron.context_parallel.attention import ContextParallel
from s2_megatron.context_parallel.sparse import FORWARD_PRODUCTS, QUERY_GRADIENT_PRODUCTS
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import build_layout
from s2_megatron.tools.commands import CommandParser


@contextmanager
def one_of(size: int, rank: int):
    """A process group of `size` ranks of one host, of which there is this one; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with patch.object(cp_exchange, "one_host", lambda group: True):
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextmanager
def nothing_travels():
    """What an exchange receives lies there already, and is random."""
    buffers: dict = {}

    def travel(exchange, counts, sent, held, prepare):
        shape = (int(counts[:, exchange.plan.rank].sum()), *sent.shape[1:])
        if shape not in buffers:
            buffers[shape] = torch.randn(shape, device=sent.device, dtype=sent.dtype)
        return cp_exchange.Pending(buffers[shape], (sent, *held), prepare)

    with patch.object(cp_exchange.BlockExchange, "_travel", travel):
        yield


CPU_TOKENS = 4096  # of the longest sequence without a GPU


def measure(args, size: int, rank: int, tokens: int, device: torch.device) -> dict:
    """One row."""
    pattern, dtype = pattern_of(args), torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = args.backend if device.type == "cuda" else "reference"
    layout = build_layout(pattern, device)
    with one_of(size, rank) as group, nothing_travels():
        timer = InterleavedTimer(group, device, args.warmup, args.repeats)
        cp = ContextParallel(pattern, group, "sparse", keep_received=args.keep_received)
        cp.prepare(tokens, device, args.head_dim, dtype, backend)
        products = [FORWARD_PRODUCTS, *([] if args.keep_received else [QUERY_GRADIENT_PRODUCTS])]
        state = cp.state(tokens, device)
        two_pass_heads = [state.two_pass_heads(args.head_dim, dtype.itemsize, number) for number in products]
        row = dict(ranks=size, rank=rank, tokens=tokens, two_pass_heads=two_pass_heads)
        part, whole = ((*tensors(args, length, device, dtype),) for length in (tokens // size, tokens))
        for name, make in (("forward", forward_of), ("step", step_of)):
            calls = [
                Call(make(lambda *qkv: cp.attention(*qkv, backend=backend), *part)),
                Call(make(lambda *qkv: s2_attention(*qkv, layout, backend=backend), *whole)),
            ]
            (row[f"{name}_ms"], row[f"{name}_cpu_ms"]), (row[f"one_gpu_{name}_ms"], _) = timer.medians(calls)
    return row


def line_of(row: dict) -> str:
    text = f"{row['tokens']:>8}  rank {row['rank']} of {row['ranks']}"
    for name in ("forward", "step"):
        share = row[f"{name}_ms"] / row[f"one_gpu_{name}_ms"] * row["ranks"]
        text += f"  {name} {row[f'{name}_ms']:7.2f} of {row[f'one_gpu_{name}_ms']:7.2f} ms ({share:.3f})"
    return f"{text}  two passes {' + '.join(map(str, row['two_pass_heads']))} heads  CPU {row['step_cpu_ms']:.1f} ms"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n\n")[0])
    add_layer_arguments(parser)
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks; all ranks of each are timed")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    longest = max(map(int, args.seq_lengths.split(",")))
    if not torch.cuda.is_available() and longest > CPU_TOKENS:
        refuse(f"--seq-lengths {longest}: no GPU, which it takes; without one {CPU_TOKENS} or fewer")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    content = dict(**report.provenance("benchmarks/each_rank.py", sys.argv[1:]), settings=settings)
    rows: list[dict] = []
    for tokens in map(int, args.seq_lengths.split(",")):
        for size in map(int, args.ranks.split(",")):
            for rank in range(size):
                rows.append(measure(args, size, rank, tokens, device))
                print(line_of(rows[-1]), flush=True)
            if args.json:
                report.write_json(args.json, {**content, "rows": rows})


if __name__ == "__main__":
    main()
