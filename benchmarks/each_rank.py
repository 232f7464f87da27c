"""Times what every rank of context parallelism `sparse` computes, one rank after another on one GPU, beside that GPU
with the whole sequence.

    python benchmarks/each_rank.py --ranks 2,4,8 --seq-lengths 131072 --json benchmarks/results/h200_each_rank.json

Nothing is sent: received blocks are random numbers that lie there. So this is what is left of a step when all
communication is hidden, of any number of ranks: predict.py needs it for tables whose GPUs cannot be had. Each step
comes behind 50 ms of its like, in turns with the one GPU's (group_timing.py). Columns: forward, and forward + backward,
in ms; their share of one GPU's, times the ranks (1: nothing is lost); KV heads whose blocks would come first, and that
visit their query tiles twice, in forward and backward: as where blocks are copied.
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
from benchmarks import report
from benchmarks.context_parallel import add_layer_arguments, forward_of, pattern_of, step_of, tensors
from benchmarks.group_timing import Call, InterleavedTimer
from s2_megatron.context_parallel import sparse as cp_sparse
from s2_megatron.context_parallel.attention import ContextParallel
from s2_megatron.context_parallel.transport import Pending
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import build_layout


@contextmanager
def one_of(size: int, rank: int):
    """A process group of `size` ranks, of which there is this one; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Standing:
    """Stands for the copies between ranks (cp_copies.PeerCopies). What an exchange receives lies there already, and is
    random."""

    def __init__(self):
        self._buffers: dict = {}

    def reserve(self, row_bytes, routes):
        """There is nothing to reserve."""

    def start(self, lane, sent, routes, held, prepare, early_rows=None):
        shape = (sum(routes[lane].received), *sent.shape[1:])
        if (lane, shape) not in self._buffers:
            self._buffers[lane, shape] = torch.randn(shape, device=sent.device, dtype=sent.dtype)
        return Pending(
            self._buffers[lane, shape], (sent, *held), prepare, free=lambda: None
        )  # lent: to be kept it is copied


def measure(args, size: int, rank: int, tokens: int, device: torch.device) -> dict:
    """One row."""
    pattern, dtype = pattern_of(args), torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = args.backend if device.type == "cuda" else "reference"
    layout = build_layout(pattern, device)
    with one_of(size, rank) as group, patch.object(cp_sparse, "peer_copies", lambda *_: Standing()):
        turns = InterleavedTimer(group, device, args.warmup, args.repeats)
        cp = ContextParallel(pattern, group, "sparse", keep_received=args.keep_received)
        cp.prepare(tokens, device, args.head_dim, dtype, backend)
        state = cp.state(tokens, device)
        products = [cp_sparse.FORWARD_PRODUCTS, *([] if args.keep_received else [cp_sparse.QUERY_GRADIENT_PRODUCTS])]
        heads = [state.heads(args.head_dim, dtype.itemsize, number) for number in products]
        row = dict(
            ranks=size,
            rank=rank,
            tokens=tokens,
            early_heads=[early for early, _ in heads],
            first_heads=[first for _, first in heads],
        )
        part, whole = ((*tensors(args, length, device, dtype),) for length in (tokens // size, tokens))
        for name, make in (("forward", forward_of), ("step", step_of)):
            calls = [
                Call(make(lambda *qkv: cp.attention(*qkv, backend=backend), *part)),
                Call(make(lambda *qkv: s2_attention(*qkv, layout, backend=backend), *whole)),
            ]
            (row[f"{name}_ms"], row[f"{name}_cpu_ms"]), (row[f"one_gpu_{name}_ms"], _) = turns.medians(calls)
    return row


def line_of(row: dict) -> str:
    text = f"{row['tokens']:>8}  rank {row['rank']} of {row['ranks']}"
    for name in ("forward", "step"):
        share = row[f"{name}_ms"] / row[f"one_gpu_{name}_ms"] * row["ranks"]
        text += f"  {name} {row[f'{name}_ms']:7.2f} of {row[f'one_gpu_{name}_ms']:7.2f} ms ({share:.3f})"
    early, first = (" + ".join(map(str, row[f"{kind}_heads"])) for kind in ("early", "first"))
    return f"{text}  early heads {early}, twice {first}  CPU {row['step_cpu_ms']:.1f} ms"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_layer_arguments(parser)
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks; all ranks of each are timed")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--json", type=Path, help="write rows, command, versions, hardware, commit (S2_COMMIT without .git)"
    )
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
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
