"""A decoding step by the kernel over S2Cache, beside SDPA over it and beside FlashAttention over a dense cache.

    python -m benchmarks.decode --seconds 75 --output decode.json      one GPU, about 90 seconds
    python -m benchmarks.decode --part layer --plans                   the kernel's tiles
    TRITON_INTERPRET=1 python -m benchmarks.decode --tiny              anywhere, checks that it runs

"layer": attention of one layer alone, bf16, head dim 128: RoPE, the write and the attention; as many copies of the
cache in one CUDA graph as L2 cannot hold. TB/s are of kept keys and values. "model": a token of the model of
benchmarks.inference; all sides share its weights, and their replayed graphs are timed interleaved. Both sides of a
ratio replay graphs. What is timed is checked first: the kernel against SDPA, replays against eager steps.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from statistics import median

import torch
from rich.console import Console

from benchmarks import refuse
from benchmarks.inference import GIB, RESERVE, TINY, DecodeStep, Shape, build_models, measure, sequence_bytes
from benchmarks.inference_checks import check_replay
from benchmarks.report import provenance, write_json
from benchmarks.timing import quantile
from s2_megatron.huggingface.attention import rotated
from s2_megatron.huggingface.decode_kernel import DecodePlan, Kept, decode
from s2_megatron.huggingface.decoding import decode_attention, decode_mask
from s2_megatron.tools.commands import CommandParser

# side: (model of benchmarks.inference, how its cache decodes)
SIDES = {
    "dense, FlashAttention": ("dense", None),
    "S2, SDPA": ("S2 mixed", "reference"),
    "S2, kernel": ("S2 mixed", "triton"),
    "dense, kernel": ("dense", "triton"),  # the last one: where memory is short it is left out
}
# (texts, KV heads, query heads of each, kept tokens)
LAYERS = [
    (1, 8, 4, 1536), (1, 8, 4, 3072), (1, 8, 4, 9216), (1, 8, 4, 131072), (1, 32, 1, 9216), (8, 8, 4, 9216),
    (32, 8, 4, 3072),
]  # fmt: skip
PLANS = [
    DecodePlan(64, 3, 4, 2), DecodePlan(64, 3, 4, 3), DecodePlan(64, 3, 4, 6), DecodePlan(64, 2, 4, 4),
    DecodePlan(64, 4, 4, 2), DecodePlan(32, 4, 4, 6), DecodePlan(128, 2, 8, 2), DecodePlan(64, 3, 8, 3),
]  # fmt: skip
LEAST_BYTES = 2**28  # of the copies of a layer's cache: several times an H200's L2
MOST_COPIES = 32


class Layer:
    """The attention of one decoding step of a layer, over several copies of its cache."""

    def __init__(self, texts: int, kv_heads: int, group: int, kept: int, dim: int, dtype, device):
        size = 2 * texts * kv_heads * kept * dim * dtype.itemsize
        self.bytes = size
        copies = 1 if device.type == "cpu" else max(2, min(MOST_COPIES, LEAST_BYTES // size))
        shape = (texts, 1, kv_heads * (group + 2), dim)
        self.parts = torch.randn(shape, device=device, dtype=dtype).split((kv_heads * group, kv_heads, kv_heads), 2)
        angles = torch.rand(1, 1, dim // 2, device=device).repeat(1, 1, 2)
        self.rotary = angles.cos().to(dtype), angles.sin().to(dtype)
        shown = torch.ones(texts, 1, 1, kept, dtype=torch.bool, device=device)
        place = torch.tensor([kept // 3, kept - 1], device=device).expand(texts, kv_heads, 2).contiguous()
        heads, stores = torch.arange(kv_heads, device=device), (texts, kv_heads, kept, dim)
        self.kept = [
            Kept(*(torch.randn(stores, device=device, dtype=dtype) for _ in range(2)), shown, place, heads)
            for _ in range(copies)
        ]
        self.bias = decode_mask(shown, kv_heads, group, dtype)
        self.scale = dim**-0.5

    def by_kernel(self, kept: Kept, plan: DecodePlan | None = None) -> torch.Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.parts)
        return decode(query, key, value, [kept], self.scale, self.rotary, None, plan)[0]

    def by_sdpa(self, kept: Kept) -> torch.Tensor:
        query, key = (part.transpose(1, 2) for part in rotated(*self.parts[:2], self.rotary))
        for store, new in ((kept.keys, key), (kept.values, self.parts[2].transpose(1, 2))):
            places = kept.place[..., None].expand(-1, -1, -1, new.shape[3])
            store.scatter_(2, places, new.expand(-1, -1, places.shape[2], -1))
        return decode_attention(query, kept.keys, kept.values, self.bias, self.scale)

    def replayed(self, call) -> tuple[object, torch.Tensor]:
        """(a replay over all copies, the first one's output)."""
        out = [call(self.kept[0])]
        if out[0].device.type == "cpu":
            return lambda: [call(kept) for kept in self.kept], out[0]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(self.kept[0])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = [call(kept) for kept in self.kept]
        return graph.replay, out[0]


def in_turns(calls: dict, rounds: int, count: int, device) -> dict[str, list[float]]:
    """{name: milliseconds of a call, a sample a round}; the order changes from round to round."""
    found, order = {name: [] for name in calls}, random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            found[name].append(measure(calls[name], count, device))
    return found


def time_layer(shape: tuple, plans: list[DecodePlan], dtype, dim: int, device) -> list[dict]:
    layer = Layer(*shape, dim, dtype, device)
    ways = {"SDPA": layer.by_sdpa, "kernel": layer.by_kernel}
    ways |= {f"kernel {tuple(plan)}": lambda kept, plan=plan: layer.by_kernel(kept, plan) for plan in plans}
    calls, outputs = {}, {}
    for name, way in ways.items():
        calls[name], outputs[name] = layer.replayed(way)
    for call in calls.values():
        call()
    expected = outputs["SDPA"].float()
    for name, out in outputs.items():
        error = float((out.float() - expected).abs().max() / expected.abs().max())
        assert error < 4 * torch.finfo(dtype).eps, f"{shape}, {name}: {error:.2e} of SDPA's largest output"
    rows = []
    for name, samples in in_turns(calls, 7 if device.type == "cuda" else 1, 2, device).items():
        us = median(samples) * 1000 / len(layer.kept)
        sizes = dict(zip(("texts", "kv_heads", "group", "kept"), shape))
        rows.append(dict(part="layer", way=name, **sizes, us=us, tb_per_s=layer.bytes / us / 1e6))
    return rows


def time_model(models: dict, shape: Shape, context: int, batch: int, device) -> list[dict]:
    """A token of every side."""
    steps, dtype = {}, next(iter(models.values())).dtype
    for side, (name, backend) in SIDES.items():
        model = models[name]
        size = batch * sequence_bytes(model.config.sparsity, context, shape.hidden // shape.heads, dtype.itemsize)
        if device.type == "cuda" and size > torch.cuda.mem_get_info()[0] - RESERVE:
            continue
        kind = side if backend else "dense"
        torch.manual_seed(0)  # equal caches, equal tokens
        step = DecodeStep(kind, model, shape, context, batch, backend or "auto")
        step.capture()
        check_replay(step)
        steps[side] = step
    one, two = (steps[side].replay().float().clone() for side in ("S2, SDPA", "S2, kernel"))
    difference = float((one - two).square().mean().sqrt() / one.square().mean().sqrt())
    bound = 4 * torch.finfo(dtype).eps * shape.layers**0.5  # roundings of all layers, as in check_replay
    assert difference < bound, (
        f"the kernel's logits differ from SDPA's by {difference:.2e} of their RMS; bound {bound:.2e}"
    )
    count, rounds = (5, 9) if device.type == "cuda" else (1, 2)
    rows = []
    for side, samples in in_turns({side: step.replay for side, step in steps.items()}, rounds, count, device).items():
        low, high = (quantile(samples, share) for share in (0.25, 0.75))
        rows.append(
            dict(
                part="model", side=side, context=context, batch=batch, ms=median(samples), quartiles=[low, high],
                cache_gib=steps[side].cache.nbytes / GIB, logits_differ=difference if side == "S2, kernel" else None,
            )
        )  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="JSON file for all rows")
    parser.add_argument("--part", choices=("layer", "model"), help="(default: both)")
    parser.add_argument("--plans", action="store_true", help="layer: other tiles, too")
    parser.add_argument("--kv-heads", type=int, default=8, help="model: (default: 8)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 131072], help="model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="model: (default: 1)")
    parser.add_argument("--seconds", type=float, default=300, help="no new measurement after this (default: 300)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU too: whether everything runs")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        refuse("no GPU; expected one with 80 GB or more; use --tiny to see whether it runs")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        refuse("no GPU; expected Triton's interpreter for --tiny; set TRITON_INTERPRET=1")
    deadline, console, rows = time.monotonic() + args.seconds, Console(width=140), []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)

    def add(found: list[dict]) -> None:
        rows.extend(found)
        for row in found:
            shown = (f"{key} {value:.4g}" if type(value) is float else f"{key} {value}" for key, value in row.items())
            console.print(", ".join(shown), highlight=False)
        if args.output:
            source = provenance("benchmarks.decode", sys.argv[1:] if arguments is None else arguments, "python -m")
            write_json(args.output, {"provenance": source, "rows": rows})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def late(what) -> bool:
        over = time.monotonic() > deadline
        if over:
            console.print(f"{args.seconds:g} s are over: {what} is left out", highlight=False)
        return over

    if args.part != "model":
        plans, dim = (PLANS if args.plans else []), 16 if args.tiny else 128
        for shape in [(2, 2, 2, 64)] if args.tiny else LAYERS:
            if not late(f"a layer of {shape}"):
                add(time_layer(shape, plans, dtype, dim, device))
    if args.part != "layer":
        shape = TINY if args.tiny else Shape()
        models = build_models(shape, 2 if args.tiny else args.kv_heads, device, dtype)
        for batch in args.batches:
            for context in shape.contexts if args.tiny else args.contexts:
                if not late(f"batch {batch} at {context:,}"):
                    add(time_model(models, shape, context, batch, device))
    for row in rows:
        if row["part"] == "model" and row["side"] == "S2, kernel":
            same = {other["side"]: other["ms"] for other in rows if other["part"] == "model"
                    and (other["context"], other["batch"]) == (row["context"], row["batch"])}  # fmt: skip
            times = ", ".join(f"{ms / row['ms']:.2f} x {side}" for side, ms in same.items() if side != "S2, kernel")
            console.print(
                f"{row['context']:,} tokens, batch {row['batch']}: S2 by the kernel is {times}", highlight=False
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
