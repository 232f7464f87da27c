"""Microseconds of the host for one forward + backward of the op, where a short sequence leaves the GPU waiting for it.

    python benchmarks/host_time.py                          # 1K, 2K and 4K tokens, S2 beside SDPA, on one GPU
    python benchmarks/host_time.py --json host.json
    python benchmarks/host_time.py --profile                # and the functions that take the time (cProfile)
    python benchmarks/host_time.py --stub hopper --profile  # without a GPU: kernels that do nothing (host_stub.py)

    1K  S2        forward   60.1 us  backward   98.7 us  both  159.0 (157.2-163.3)  in a row  171 us  1.60 x SDPA
    1K  SDPA      forward   21.0 us  backward   78.0 us  both   99.2 (98.1-101.0)   in a row  103 us

Enqueue times: calls in bursts that fit into the GPU's queue, timed one by one without waiting for the GPU, which is
waited for between bursts. Entries interleaved, medians, 20th to 80th percentile in brackets. "in a row": of 64 calls in
a row including the GPU; where it is hardly more than the host's time, the launch is the time. `SDPA` is PyTorch's
scaled_dot_product_attention on the same tensors, `function` an autograd function that computes nothing: what PyTorch
itself takes.

--profile counts in one thread and with cProfile's own time in every call: its shares say where to look, its sum is too
large.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import random
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from statistics import median

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from benchmarks import refuse, report
from benchmarks.suites import named, s2_pattern
from benchmarks.timing import milliseconds
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import build_layout
from s2_megatron.tools.commands import CommandParser

BURST = 12  # calls; all their launches fit into the GPU's queue of about 1000
BURSTS = 40
SHOWN = 25  # functions of a profile


class _Nothing(torch.autograd.Function):
    """Out and gradients without values: the least that a differentiable call of three tensors takes."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def entries(length: int, heads: int, head_dim: int, device: str, with_sdpa: bool) -> dict:
    """name -> (forward(), inputs, gradient of out), all on the strided sbhd views of one tensor."""
    fused = torch.empty(length, 1, 3 * heads, head_dim, device=device, dtype=torch.bfloat16)
    if device != "cpu":
        fused.normal_()
    inputs = [part.requires_grad_() for part in fused.chunk(3, 2)]
    grad = torch.zeros_like(inputs[0])
    layout = build_layout(s2_pattern(heads, heads), device)
    found = {
        "S2": (lambda: s2_attention(*inputs, layout), inputs, grad),
        "S2 triton": (lambda: s2_attention(*inputs, layout, backend="triton"), inputs, grad),
        "function": (lambda: _Nothing.apply(*inputs), inputs, grad),
    }
    if with_sdpa:
        moved = [tensor.detach().permute(1, 2, 0, 3).requires_grad_() for tensor in inputs]
        attend = torch.nn.functional.scaled_dot_product_attention
        found["SDPA"] = (lambda: attend(*moved, is_causal=True), moved, grad.permute(1, 2, 0, 3))
    return found


def _burst(forward, inputs, grad) -> list[tuple[float, float]]:
    """(microseconds of a forward, of its backward) of each call of a burst."""
    times = []
    for _ in range(BURST):
        start = time.perf_counter()
        out = forward()
        middle = time.perf_counter()
        torch.autograd.grad(out, inputs, grad)
        times.append(((middle - start) * 1e6, (time.perf_counter() - middle) * 1e6))
    return times


def measure(found: dict, bursts: int, wait) -> dict[str, list[tuple[float, float]]]:
    """name -> times of all calls. wait: for the device."""
    samples: dict[str, list] = {name: [] for name in found}
    order = random.Random(0)
    for burst in range(-1, bursts):  # the first one compiles
        for name in order.sample([*found], len(found)):
            wait()
            gc.collect()
            gc.disable()
            try:
                times = _burst(*found[name])
            finally:
                gc.enable()
            if burst >= 0:
                samples[name] += times
        wait()
    return samples


def make_row(length: int, name: str, times: list[tuple[float, float]], in_a_row_us: float | None) -> dict:
    forward, backward = zip(*times)
    return dict(
        seq_length=length,
        entry=name,
        forward_us=median(forward),
        backward_us=median(backward),
        both_us=report.spread([sum(pair) for pair in times]),
        in_a_row_us=in_a_row_us,
    )


def text_of(row: dict, rows: list[dict]) -> str:
    both = row["both_us"]
    line = f"{named(row['seq_length']):>4s}  {row['entry']:9s} forward {row['forward_us']:7.1f} us"
    line += f"  backward {row['backward_us']:7.1f} us  both {both['median']:7.1f} ({both['p20']:.1f}-{both['p80']:.1f})"
    if row["in_a_row_us"] is not None:
        line += f"  in a row {row['in_a_row_us']:7.1f} us"
    peers = [other for other in rows if other["seq_length"] == row["seq_length"] and other["entry"] == "SDPA"]
    if peers and row["entry"].startswith("S2"):
        line += f"  {both['median'] / peers[0]['both_us']['median']:.2f} x SDPA"
    return line


def profile(forward, inputs, grad, calls: int = 300) -> list[str]:
    """Lines: the functions with the most time of their own, per forward + backward."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # a GPU's backward has a thread of its own otherwise
        profiler.enable()
        for _ in range(calls):
            torch.autograd.grad(forward(), inputs, grad)
        profiler.disable()
    stats = pstats.Stats(profiler).stats
    total = sum(own for _, _, own, _, _ in stats.values())
    lines = [f"{'own us':>8s} {'with callees':>12s} {'calls':>6s} {'share':>6s}  function"]
    ordered = sorted(stats.items(), key=lambda item: -item[1][2])
    for (path, line, function), (_, count, own, cumulative, _) in ordered[:SHOWN]:
        place = function if path == "~" else f"{'/'.join(path.split(os.sep)[-2:])}:{line} {function}"
        times = f"{own / calls * 1e6:8.2f} {cumulative / calls * 1e6:12.2f}"
        lines.append(f"{times} {count / calls:6.1f} {own / total:6.1%}  {place}")
    return [*lines, f"{total / calls * 1e6:8.2f} us under the profiler"]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-lengths", help="tokens (default: 1024,2048,4096; with --stub 256, which takes as long)")
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--bursts", type=int, default=BURSTS, help=f"of {BURST} calls, of each entry and length")
    parser.add_argument("--stub", choices=("hopper", "portable"), help="no GPU: these kernels' launches do nothing")
    parser.add_argument("--profile", action="store_true", help="also cProfile's functions, at the first length")
    parser.add_argument("--json", metavar="FILE", help="write rows, command, versions, hardware, commit")
    args = parser.parse_args(arguments)
    lengths = (args.seq_lengths or ("1024,2048,4096" if args.stub is None else "256")).split(",")
    if not all(text.isdecimal() and int(text) > 0 for text in lengths):
        parser.error(f"--seq-lengths {args.seq_lengths}: expected numbers of tokens, such as 1024,4096")
    args.lengths = [int(text) for text in lengths]
    if args.bursts < 1:
        parser.error(f"--bursts {args.bursts}: expected 1 or more")
    return args


@contextmanager
def _refusing(context):
    """The context; where it cannot be entered, one line and the end."""
    with ExitStack() as stack:
        try:
            stack.enter_context(context)
        except RuntimeError as problem:
            refuse(str(problem))
        yield


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.stub is None and not torch.cuda.is_available():
        refuse("no GPU; --stub hopper or --stub portable times the host's part of a call without one")
    device, wait, context = ("cuda", torch.cuda.synchronize, nullcontext())
    if args.stub is not None:
        from benchmarks.host_stub import stubbed

        device, wait, context = "cpu", (lambda: None), stubbed(args.stub == "hopper")
    origin = report.provenance("benchmarks/host_time.py", sys.argv[1:] if arguments is None else arguments)
    machine = origin["hardware"]["gpu"] if args.stub is None else f"no GPU, {args.stub} kernels that do nothing"
    print(f"{machine}, torch {origin['versions']['torch']}, triton {origin['versions']['triton']}")
    rows: list[dict] = []
    with _refusing(context):
        for length in args.lengths:
            found = entries(length, args.num_heads, args.head_dim, device, with_sdpa=args.stub is None)
            if args.stub is not None:
                found.pop("S2 triton")  # the stub chooses the kernels
            samples = measure(found, args.bursts, wait)
            for name, times in samples.items():
                forward, inputs, grad = found[name]
                in_a_row = None
                if args.stub is None:
                    in_a_row = 1e3 * milliseconds(
                        lambda f=forward, i=inputs, g=grad: torch.autograd.grad(f(), i, g), 64
                    )
                rows.append(make_row(length, name, times, in_a_row))
            for row in rows[-len(samples) :]:
                print(text_of(row, rows), flush=True)
        if args.profile:
            found = entries(args.lengths[0], args.num_heads, args.head_dim, device, with_sdpa=False)
            measure({"S2": found["S2"]}, 1, wait)
            print(f"\nS2, {named(args.lengths[0])} tokens, forward + backward:")
            print("\n".join(profile(*found["S2"])))
    if args.json:
        report.write_json(args.json, {**origin, "settings": report.settings_of(args), "rows": rows})


if __name__ == "__main__":
    main()
