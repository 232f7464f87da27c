"""The attention layer that context_parallel.py times: its arguments, its pattern, its tensors, its calls, and
the line of a row."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from s2_megatron.patterns.ranges import RangePattern, make_range_pattern

MIB = 2**20


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """The layer, its lengths, and where the rows go."""
    parser.add_argument("--seq-lengths", default="32768,131072")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--local-tokens", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=16)
    parser.add_argument(
        "--window", type=int, metavar="W", help="a window of W tokens, instead of --local-tokens and --stride"
    )
    parser.add_argument("--sink-tokens", type=int, default=0)
    parser.add_argument("--dense-heads", type=int, default=0)
    parser.add_argument("--backend", default="auto", help="of s2_attention, on one GPU and on several")
    parser.add_argument("--keep-received", action="store_true")
    parser.add_argument(
        "--json", type=Path, help="write rows, command, versions, hardware, commit (S2_COMMIT without .git)"
    )


def dense_heads(args):
    return {"spread": args.dense_heads} if args.dense_heads else ()


def pattern_of(args) -> RangePattern:
    """args: of add_layer_arguments."""
    return make_range_pattern(
        block_size=args.block,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        ranges=() if args.window else ((args.local_tokens // args.block, 1), (None, args.stride)),
        window=args.window,
        sink_tokens=args.sink_tokens,
        dense_heads=dense_heads(args),
    )


def tensors(args, tokens: int, device: torch.device, dtype: torch.dtype):
    """([query, key, value] as strided pieces of one projection, the gradient of out), random: [tokens, 1, heads, D]."""
    fused = torch.randn(tokens, 1, args.heads + 2 * args.kv_heads, args.head_dim, device=device, dtype=dtype)
    parts = [part.requires_grad_() for part in fused.split([args.heads, args.kv_heads, args.kv_heads], 2)]
    return parts, torch.randn(parts[0].shape, device=device, dtype=dtype)


def forward_of(function, parts, grad):
    """What computes function(*parts)."""

    def forward():
        with torch.no_grad():
            function(*parts)

    return forward


def step_of(function, parts, grad):
    """What computes that, and its gradients."""
    return lambda: torch.autograd.grad(function(*parts), parts, grad)


def line_of(row: dict) -> str:
    """Of a row."""
    text = f"{row['tokens']:>8}  {row['exchange']:<11}"
    if "sent_forward" in row:
        text += f" sent {row['sent_forward'] / MIB:8.1f} + {row['sent_backward'] / MIB:8.1f} MiB"
    if "planned_forward" in row:
        text += f" (plan {row['planned_forward'] / MIB:.1f} + {row['planned_backward'] / MIB:.1f},"
        text += f" {row['sent_forward'] / row['all_gather_forward']:.1%} of all-gather) "
    text += f" forward {row['forward_ms']:8.2f}  step {row['step_ms']:8.2f} ms"
    if "no_comm_step_ms" in row:
        exposed = row["step_ms"] - row["no_comm_step_ms"]
        text += f"  exposed {exposed:6.2f} ms ({exposed / row['step_ms']:.1%})"
    text += f"  work {row['work']:.3f}" if "work" in row else ""
    text += f"  {row['speed_up']:.2f} x one GPU ({row['one_gpu_step_ms']:.2f} ms)" if "speed_up" in row else ""
    return text + (f"  CPU {row['step_cpu_ms']:.1f} ms" if "step_cpu_ms" in row else "")
