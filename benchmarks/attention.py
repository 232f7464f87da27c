"""Times S2 attention, forward and backward, beside dense FlashAttention-2 and cuDNN attention in one process.

    python benchmarks/attention.py --seq-lengths 8192,32768,131072
    python benchmarks/attention.py --seq-lengths 131072 --num-kv-heads 8 --tensor-format sbhd

Before anything is timed, out and the gradients of the pattern are compared once with the reference backend, on 2065 tokens; a wrong kernel is
not timed. Times are medians over samples of a few calls in a row, the competitors taking turns; TF/s counts the attended (query, key)
pairs only: 4 D a pair in the forward, 10 D in the backward. "x FA-2" is (forward + backward) of FlashAttention-2 over
ours. Results also go to --json. Sample:

    seq  131072  S2 (triton)     forward    24.73 ms  436 TF/s   backward    85.54 ms  315 TF/s   13.89 x FA-2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from functools import partial

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from s2_megatron.attention import FORMATS, canonical_view, s2_attention
from s2_megatron.layout import build_layout
from s2_megatron.patterns import make_range_pattern


def make_tensors(args, length):
    shape = {"sbhd": (length, args.batch), "bshd": (args.batch, length)}
    fused_heads = args.num_heads + 2 * args.num_kv_heads
    if args.tensor_format == "bhsd":
        parts = [
            torch.randn(args.batch, heads, length, args.head_dim, device="cuda", dtype=args.torch_dtype)
            for heads in (args.num_heads, args.num_kv_heads, args.num_kv_heads)
        ]
    else:  # as Megatron gives them: strided views of one fused projection
        fused = torch.randn(
            *shape[args.tensor_format], fused_heads, args.head_dim, device="cuda", dtype=args.torch_dtype
        )
        parts = list(fused.split([args.num_heads, args.num_kv_heads, args.num_kv_heads], 2))
    grad = torch.randn(parts[0].shape, device="cuda", dtype=args.torch_dtype)
    return [part.requires_grad_() for part in parts], grad


def check(args, pattern):
    """Refuses to time a wrong kernel: compares with the reference backend on 2048 + 17 tokens."""
    layout = build_layout(pattern, "cuda")
    tensors, grad = make_tensors(args, 2065)
    results = []
    for backend in ("triton", "reference"):
        out = s2_attention(*tensors, layout, tensor_format=args.tensor_format, backend=backend)
        results.append((out, *torch.autograd.grad(out, tensors, grad)))
    for name, mine, truth in zip(("out", "dq", "dk", "dv"), *results):
        error = ((mine.double() - truth.double()).norm() / truth.double().norm()).item()
        if not error < 8e-3:
            raise SystemExit(f"{name} differs from the reference by {error:.1e}; not timed")


def competitors(args, pattern, tensors, grad):
    layout = build_layout(pattern, "cuda")

    def ours(*inputs):
        return s2_attention(*inputs, layout, tensor_format=args.tensor_format, backend="triton")

    found = {"S2 (triton)": (ours, tensors, grad)}
    dense = [canonical_view(tensor.detach(), args.tensor_format).contiguous().requires_grad_() for tensor in tensors]
    dense_grad = canonical_view(grad, args.tensor_format).contiguous()
    for name, backend in (("FA-2 dense", SDPBackend.FLASH_ATTENTION), ("cuDNN dense", SDPBackend.CUDNN_ATTENTION)):
        if name.split()[0] not in args.peers:
            continue

        def call(*inputs, backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *inputs, is_causal=True, enable_gqa=args.num_heads != args.num_kv_heads
                )

        found[name] = (call, dense, dense_grad)
    return found


def timed(calls, function, *arguments):
    """(milliseconds a call, last result) of calls in a row, as a training step makes them: the launches of one hide behind the one before."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        result = function(*arguments)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls, result


def measure(found, repeats, calls):
    """name -> (median forward ms, median backward ms), the competitors taking turns."""
    times = {name: ([], []) for name in found}
    for turn in range(repeats + 2):
        for name, (call, inputs, grad) in found.items():
            forward, out = timed(calls, call, *inputs)
            backward, _ = timed(calls, partial(torch.autograd.grad, retain_graph=True), out, inputs, grad)
            if turn >= 2:
                times[name][0].append(forward)
                times[name][1].append(backward)
    return {name: tuple(statistics.median(part) for part in both) for name, both in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-lengths", default="8192,32768,131072")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--local-tokens", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=16)
    parser.add_argument("--slide", default="kv", choices=("kv", "query"))
    parser.add_argument("--tensor-format", default="sbhd", choices=[name for name in FORMATS if name != "thd"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--peers", default="FA-2,cuDNN", type=lambda text: text.split(","))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json")
    args = parser.parse_args()
    args.torch_dtype = getattr(torch, args.dtype)
    ranges = ((args.local_tokens // args.block_size, 1), (None, args.stride))
    pattern = make_range_pattern(
        block_size=args.block_size,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        ranges=ranges,
        slide=args.slide,
    )
    check(args, pattern)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(
        f"{machine}; batch {args.batch}, heads {args.num_heads}/{args.num_kv_heads}, head dim {args.head_dim}, {args.dtype}, "
        f"{args.tensor_format}, {pattern.describe()}, block {args.block_size}"
    )
    rows = []
    for length in map(int, args.seq_lengths.split(",")):
        tensors, grad = make_tensors(args, length)
        found = competitors(args, pattern, tensors, grad)
        times = measure(found, args.repeats if length < 65536 else max(3, args.repeats // 3), max(1, 65536 // length))
        baseline = sum(times["FA-2 dense"]) if "FA-2 dense" in times else None
        for name, (forward, backward) in times.items():
            dense_pairs = args.num_heads * length * (length + 1) // 2
            pairs = args.batch * (dense_pairs if "dense" in name else pattern.attended_pairs(length))
            rate = [
                scale * args.head_dim * pairs / milliseconds / 1e9
                for scale, milliseconds in ((4, forward), (10, backward))
            ]
            ratio = baseline / (forward + backward) if baseline else None
            rows.append(
                dict(
                    seq_length=length,
                    name=name,
                    forward_ms=forward,
                    backward_ms=backward,
                    forward_tflops=rate[0],
                    backward_tflops=rate[1],
                    over_fa2=ratio,
                )
            )
            print(
                f"seq {length:7d}  {name:14s}  forward {forward:8.2f} ms {rate[0]:4.0f} TF/s   backward {backward:8.2f} ms {rate[1]:4.0f} TF/s"
                + (f"   {ratio:5.2f} x FA-2" if ratio else ""),
                flush=True,
            )
        del tensors, grad, found
        torch.cuda.empty_cache()
    if args.json:
        temporary = args.json + ".tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            settings = {key: str(value) for key, value in vars(args).items() if key not in ("json", "torch_dtype")}
            json.dump(dict(machine=machine, arguments=settings, rows=rows), file, indent=1)
        os.replace(temporary, args.json)


if __name__ == "__main__":
    main()
