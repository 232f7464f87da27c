"""Measures tile sizes on the present GPU and prints the rows of the table in kernels/tiles.py with the fastest ones.

    python benchmarks/tune.py                                  # every row: head dims 32, 64, 128, 256 in bf16 and fp32
    python benchmarks/tune.py --head-dims 256 --dtypes bfloat16   # one row; fp32 takes shorter sequences (--seq-length)
    python benchmarks/tune.py --families forward --head-dims 128 --show 8   # one family, its eight fastest candidates
    python benchmarks/tune.py --together 1,2,4,8                            # also how many heads should share L2

The paper's pattern (block 64, window 1024, stride 16) in Megatron's layout (strided sbhd views of one fused tensor).
All candidates of a family are compiled first, then timed interleaved: medians of the operator's forward, or of its
whole backward, with the other kernels' tiles fixed. Candidates that do not fit into registers or shared memory are left
out with a line. Head dims 96 and 192 use the rows of 128 and 256. Sample of the output:

    128 bfloat16 forward     Tile(rows=64, columns=64, warps=4, stages=3)       2.410 ms (...)
    (128, False): (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),

A family of kernels is a Family: a name, a grid of candidates for (padded head dim, 32-bit inputs), a context manager
that puts a candidate into force, the backend that runs it and the direction that is timed. Add one to FAMILIES and it
is tuned like the others.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import triton

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks import refuse
from benchmarks.timing import SAMPLE_MS, milliseconds, quantile
from s2_megatron.kernels import tiles
from s2_megatron.kernels.tiles import Tile
from s2_megatron.kernels.triton import launch as portable
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.ranges import make_range_pattern
from s2_megatron.tools.commands import CommandParser

Key = tuple[int, bool]  # padded head dim, 32-bit inputs: the rows of the portable table
PORTABLE = ("forward", "grad_query", "grad_key")  # in the order of a row
LENGTHS = {False: 32768, True: 4096}


class Family(NamedTuple):
    candidates: Callable[[Key], Iterable]  # anything that `force` understands
    force: Callable[[Key, object], AbstractContextManager]
    backend: str  # of s2_attention
    backward: bool  # which direction is timed


def portable_candidates(role: str, key: Key) -> list[Tile]:
    """The grid of one portable kernel. Head dims above 128 and 32-bit inputs leave room for small tiles only."""
    dim, fp32 = key
    small = fp32 or dim > 128
    rows, columns = {
        "forward": ((32, 64, 128) if small else (64, 128), (16, 32, 64) if small else (32, 64, 128)),
        "grad_query": ((32, 64, 128) if small else (64, 128), (16, 32, 64) if small else (32, 64)),
        "grad_key": ((16, 32, 64) if small else (32, 64, 128), (16, 32, 64) if small else (32, 64)),
    }[role]
    stages = (1, 2) if fp32 else (2, 3)
    return [Tile(*entry) for entry in itertools.product(rows, columns, (4, 8), stages)]


@contextmanager
def portable_force(role: str, key: Key, tile: Tile):
    """Puts a tile into the tables of all cards for as long as the context lasts."""
    tables = (tiles._TABLE, tiles._AMPERE_TABLE, tiles._SMALL_TABLE)
    before = [table.get(key) for table in tables]
    row = tuple(tile if name == role else other for name, other in zip(PORTABLE, tiles._TABLE[key]))
    try:
        for table in tables:
            table[key] = row
        yield
    finally:
        for table, entry in zip(tables, before):
            if entry is None:
                del table[key]
            else:
                table[key] = entry


FAMILIES: dict[str, Family] = {
    role: Family(partial(portable_candidates, role), partial(portable_force, role), "triton", role != "forward")
    for role in PORTABLE
}


class Problem:
    """The tensors that candidates are timed on."""

    def __init__(self, dim: int, dtype: torch.dtype, length: int, heads: int):
        pattern = make_range_pattern(block_size=64, num_heads=heads, num_kv_heads=heads, ranges=((16, 1), (None, 16)))
        self.layout = build_layout(pattern, "cuda")
        fused = torch.randn(length, 1, 3 * heads, dim, device="cuda", dtype=dtype)
        self.tensors = [part.requires_grad_() for part in fused.chunk(3, 2)]
        self.grad = torch.randn(self.tensors[0].shape, device="cuda", dtype=dtype)
        self.outs: dict[str, torch.Tensor] = {}

    def forward(self, backend: str):
        return s2_attention(*self.tensors, self.layout, backend=backend)

    def time(self, family: Family, calls: int) -> float:
        """Milliseconds of a call in the family's direction."""
        if not family.backward:
            return milliseconds(lambda: self.forward(family.backend), calls)
        if family.backend not in self.outs:
            self.outs[family.backend] = self.forward(family.backend)
        out = self.outs[family.backend]
        return milliseconds(lambda: torch.autograd.grad(out, self.tensors, self.grad, retain_graph=True), calls)


def tune(name: str, key: Key, problem: Problem, rounds: int) -> list[tuple[float, list[float], object]]:
    """[(median milliseconds, samples, candidate)], the fastest first."""
    family = FAMILIES[name]
    estimates = {}
    for candidate in family.candidates(key):
        try:
            with family.force(key, candidate):
                problem.time(family, 1)
                estimates[candidate] = problem.time(family, 1)
        except (
            triton.runtime.errors.OutOfResources,
            triton.runtime.errors.PTXASError,
            triton.CompilationError,
        ) as error:
            print(f"{key} {name} {candidate}: left out, {(str(error).splitlines() or [''])[0]}", flush=True)
    best = min(estimates.values(), default=0.0)
    samples: dict = {candidate: [] for candidate, estimate in estimates.items() if estimate < 1.5 * best}
    for _ in range(rounds):
        for candidate, times in samples.items():
            with family.force(key, candidate):
                times.append(problem.time(family, max(1, round(SAMPLE_MS / estimates[candidate]))))
    return sorted((median(times), times, candidate) for candidate, times in samples.items())


def row_text(key: Key, chosen: dict[str, Tile]) -> str:
    """One row of the table in kernels/tiles.py; families that were not measured keep their present tiles."""
    row = [chosen.get(role, present) for role, present in zip(PORTABLE, tiles._TABLE[key])]
    return f"    {key}: ({', '.join('Tile(' + ', '.join(map(str, tile)) + ')' for tile in row)}),"


def names_of(flag: str, known) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        wrong = [name for name in text.split(",") if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{flag}: {wrong[0]!r} is not known; there are {', '.join(known)}")
        return text.split(",")

    return parse


def key_of(dim: int, dtype: str) -> Key:
    return max(32, triton.next_power_of_2(dim)), dtype == "float32"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The defaults name every row of the table."""
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--families", default=list(FAMILIES), type=names_of("--families", FAMILIES), help=", ".join(FAMILIES)
    )
    parser.add_argument(
        "--head-dims", default="32,64,128,256", type=lambda text: [int(part) for part in text.split(",")]
    )
    parser.add_argument(
        "--dtypes", default=["bfloat16", "float32"], type=names_of("--dtypes", ("bfloat16", "float16", "float32"))
    )
    parser.add_argument("--seq-length", type=int, help="default: 32768 tokens, 4096 in fp32")
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--show", type=int, default=4, help="how many of a family's fastest candidates to print")
    parser.add_argument("--together", default="", help="also compare these counts of heads that share L2, e.g. 1,2,4,8")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if not torch.cuda.is_available():
        refuse("no GPU; tiles are measured on the GPU that they are for")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    rows = []
    for dtype, dim in itertools.product(args.dtypes, args.head_dims):
        key = key_of(dim, dtype)
        problem = Problem(dim, getattr(torch, dtype), args.seq_length or LENGTHS[key[1]], args.num_heads)
        chosen = {}
        for name in args.families:
            found = tune(name, key, problem, args.rounds)
            for middle, samples, candidate in found[: args.show]:
                span = f"({quantile(samples, 0.2):.2f}-{quantile(samples, 0.8):.2f})"
                print(f"{dim} {dtype} {name:11s} {candidate!s:60s} {middle:8.3f} ms {span}", flush=True)
            if found:
                chosen[name] = found[0][2]
        rows.append(row_text(key, chosen))
        print(rows[-1], flush=True)
        for count in filter(None, args.together.split(",")):
            portable.HEADS_TOGETHER = int(count)
            times = [
                median(problem.time(FAMILIES[name], 4) for _ in range(args.rounds)) for name in ("forward", "grad_key")
            ]
            print(
                f"{dim} {dtype} {count} heads together: forward {times[0]:.3f} backward {times[1]:.3f} ms", flush=True
            )
        portable.HEADS_TOGETHER = tiles.HEADS_TOGETHER
    print("\nkernels/tiles.py, _TABLE:")
    print("\n".join(dict.fromkeys(rows)))


if __name__ == "__main__":
    main()
