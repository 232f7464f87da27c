"""Measures tile sizes for the kernels on the present GPU and prints the fastest entries for the table in kernels/tiles.py.

    python benchmarks/tune.py --head-dims 64,128 --seq-length 32768

Every candidate of the forward, dQ and dK/dV is timed on the paper's pattern (block 64, window 1024, stride 16) in Megatron's layout (strided
sbhd views of one fused tensor), whole operator calls with the other two kernels' tiles fixed, medians of interleaved calls. Candidates that
do not fit into registers or shared memory are left out with a line. Sample of the output:

    128 False  forward   Tile(rows=128, columns=64, warps=8, stages=3)     4.02 ms
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys

import torch
import triton

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from s2_megatron.attention import s2_attention
from s2_megatron.kernels import launch, tiles
from s2_megatron.layout import build_layout
from s2_megatron.patterns import make_range_pattern

ROLES = ("forward", "grad_query", "grad_key")
CANDIDATES = {
    "forward": list(itertools.product((64, 128), (64, 128), (4, 8), (2, 3))),
    "grad_query": list(itertools.product((128,), (32, 64), (4, 8), (2, 3))),
    "grad_key": list(itertools.product((64, 128), (32, 64), (4, 8), (2, 3))),
}


def times_of(role, key, tile, tensors, grad, layout, repeats):
    """Median milliseconds of the part of the operator that holds the role's kernel; None when the tile does not fit."""
    entry = tiles._TABLE[key]
    tiles._TABLE[key] = tuple(tile if name == role else other for name, other in zip(ROLES, entry))
    samples = []
    try:
        for _ in range(repeats + 2):
            start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            start.record()
            out = s2_attention(*tensors, layout, backend="triton")
            middle.record()
            if role != "forward":
                torch.autograd.grad(out, tensors, grad)
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(middle) if role == "forward" else middle.elapsed_time(end))
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as problem:
        print(f"{key} {role} {tile}: left out, {str(problem).splitlines()[0]}")
        return None
    finally:
        tiles._TABLE[key] = entry
    return statistics.median(samples[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--seq-length", type=int, default=32768)
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--roles", default=",".join(ROLES), type=lambda text: text.split(","))
    parser.add_argument("--together", default="", help="also compare these counts of heads that share L2, e.g. 1,2,4,8")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    pattern = make_range_pattern(
        block_size=64, num_heads=args.num_heads, num_kv_heads=args.num_heads, ranges=((16, 1), (None, 16))
    )
    layout = build_layout(pattern, "cuda")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, seq {args.seq_length}, {args.dtype}"
    )
    for dim in map(int, args.head_dims.split(",")):
        key = (max(32, triton.next_power_of_2(dim)), dtype == torch.float32)
        fused = torch.randn(args.seq_length, 1, 3 * args.num_heads, dim, device="cuda", dtype=dtype)
        tensors = [part.requires_grad_() for part in fused.chunk(3, 2)]
        grad = torch.randn(tensors[0].shape, device="cuda", dtype=dtype)
        for role in args.roles:
            measured = [
                (times_of(role, key, tiles.Tile(*c), tensors, grad, layout, args.repeats), tiles.Tile(*c))
                for c in CANDIDATES[role]
            ]
            for milliseconds, tile in sorted((item for item in measured if item[0]), key=lambda item: item[0])[:4]:
                print(f"{key[0]} {key[1]}  {role:10s} {tile!s:60s} {milliseconds:8.3f} ms", flush=True)
        for count in filter(None, args.together.split(",")):
            launch.HEADS_TOGETHER = int(count)
            present = tiles._TABLE[key]
            pair = [times_of(role, key, tile, tensors, grad, layout, 5) for role, tile in (("forward", present[0]), ("grad_key", present[2]))]
            print(f"{key[0]} {key[1]}  {count} heads together: forward {pair[0]:.3f} backward {pair[1]:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
