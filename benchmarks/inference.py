"""Generation with S2-Attention beside the same model dense: time to first token, milliseconds a token, cache, largest
batch.

    python -m benchmarks.inference --output benchmarks/results/h200_inference.json     one GPU, under 8 minutes
    python -m benchmarks.inference --tiny                                              anywhere, checks that it runs

A model of 7B shape with random weights in bf16, 32 layers: dense, and with two dense layers and 30 of S2 (window 1024,
stride 16); 32 KV heads, and 8. Both sides share the weights and the process, keep their cache in tensors of fixed
size, and decode by replaying a CUDA graph. The dense side's cache is exactly as long as the text, so that
FlashAttention reads it without a mask: the best case for it. Decoding starts from caches filled with random numbers;
what is timed is checked first: attention against an fp64 softmax over the blocks that the pattern names, replays
against eager steps.

The S2 paper (arXiv 2407.17678 v7, abstract) reports kernels up to 25.3 times faster than FlashAttention-2 and a 7B
model 4.5 times faster in inference, with other hardware and another engine.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import refuse
from benchmarks.inference_checks import check_attention, check_replay
from benchmarks.report import provenance, write_json
from benchmarks.timing import milliseconds
from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.stored import stored_sparsity
from s2_megatron.huggingface import CACHE_ARGUMENT, S2Cache, S2GPTConfig, S2GPTForCausalLM
from s2_megatron.huggingface.attention import attend, rotated
from s2_megatron.huggingface.cache import S2CacheLayer, kept_tokens
from s2_megatron.huggingface.decoding import DECODE_BACKENDS
from s2_megatron.tools.commands import CommandParser

GIB = 2**30
RESERVE = 4 * GIB  # for activations, graphs and what the allocator loses


@dataclass(frozen=True)
class Shape:
    """The model and the texts of a run."""

    layers: int = 32
    dense_layers: int = 2
    hidden: int = 4096
    ffn: int = 11008
    heads: int = 32
    vocabulary: int = 32000
    block: int = 64
    window: int = 1024
    stride: int = 16
    kv_heads: tuple[int, ...] = (32, 8)
    contexts: tuple[int, ...] = (8192, 32768, 131072)
    batches: tuple[int, ...] = (1, 8, 32)
    replays: int = 20


TINY = Shape(
    layers=3, dense_layers=1, hidden=64, ffn=96, heads=4, vocabulary=97, block=16, window=32, stride=4, kv_heads=(4, 2),
    contexts=(256,), batches=(1, 2), replays=2,
)  # fmt: skip


class DenseCache(S2Cache):
    """All keys and values of texts of one length; a step overwrites the last token and attends everything."""

    def __init__(self, layers: int, length: int):
        self.length, self.seen, self.starts, self.position = length, 0, None, None
        self.layers = [S2CacheLayer(None, None) for _ in range(layers)]
        self.store: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.store for tensor in pair)

    def attend(self, layer_idx, query, key, value, starts, scale, pattern, offset, rotary):
        if rotary is not None:
            both = rotated(query.transpose(1, 2), key.transpose(1, 2), rotary)
            query, key = (tensor.transpose(1, 2) for tensor in both)
        if len(self.store) == layer_idx:
            shape = (*key.shape[:2], self.length, key.shape[3])
            self.store.append((key.new_empty(shape), key.new_empty(shape)))
        count = key.shape[2]
        for place, new in zip(self.store[layer_idx], (key, value)):
            place[:, :, self.length - count :] = new
        self.layers[layer_idx].seen = self.seen = self.length
        keys, values = (key, value) if count > 1 else self.store[layer_idx]
        return attend(query, keys, values, None, scale)


def sparsities(shape: Shape, kv_heads: int) -> dict:
    """{side: ResolvedSparsity}."""
    spec = {"local_tokens": shape.window, "stride": shape.stride}
    mixed = ["D"] * shape.dense_layers + ["S"] * (shape.layers - shape.dense_layers)
    sizes = dict(num_layers=shape.layers, num_heads=shape.heads, num_kv_heads=kv_heads, seq_length=max(shape.contexts))
    return {
        side: SparsityConfig.from_data({"block_size": shape.block, "layers": plan, "specs": specs}).resolve(**sizes)
        for side, plan, specs in (("dense", ["D"], {}), ("S2 mixed", mixed, {"S": spec}))
    }


def build_models(shape: Shape, kv_heads: int, device, dtype) -> dict:
    """{side: model}; the sides share their weights."""
    models: dict[str, S2GPTForCausalLM] = {}
    for side, sparsity in sparsities(shape, kv_heads).items():
        config = S2GPTConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=kv_heads,
            max_position_embeddings=max(shape.contexts) + 1024, dtype=dtype, s2_sparsity=stored_sparsity(sparsity),
        )  # fmt: skip
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta" if models else device):
                model = S2GPTForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
        if models:
            first = next(iter(models.values()))
            model.load_state_dict(first.state_dict(), assign=True)
            model.model.rotary_emb = first.model.rotary_emb
        models[side] = model.requires_grad_(False)
    return models


def sequence_bytes(sparsity, context: int, head_dim: int, itemsize: int) -> int:
    """Bytes of the cache of one text."""
    return 2 * head_dim * itemsize * sum(map(sum, kept_tokens(sparsity, context)))


def new_cache(
    side: str, model, shape: Shape, context: int, batch: int, filled: bool, decode_backend: str = "reference"
):
    """A cache for texts of `context` tokens; filled: all but the last are there, as random numbers. Every side but
    "dense" has an S2Cache, which decodes by decode_backend."""
    config = model.config
    if side == "dense":
        cache = DenseCache(shape.layers, context)
    else:
        cache = S2Cache(config, max_length=context, decode_backend=decode_backend)
    if not filled:
        return cache
    like = torch.empty(batch, config.num_key_value_heads, 1, config.head_dim, dtype=model.dtype, device=model.device)
    for layer in cache.layers:
        if side == "dense":
            size = (*like.shape[:2], context, like.shape[3])
            cache.store.append(tuple(torch.randn(size, dtype=like.dtype, device=like.device) for _ in range(2)))
        else:
            layer.lazy_initialization(like)
            for tensor in (*layer.keys, *layer.values):
                tensor.normal_()
        layer.seen = context - 1
    cache.seen = context - 1
    cache.position = torch.full((batch,), context - 2, device=model.device)
    return cache


class DecodeStep:
    """One decoding step of a batch at a context, replayed at the same position again and again."""

    def __init__(self, side: str, model, shape: Shape, context: int, batch: int, decode_backend: str = "reference"):
        self.model, self.cache = model, new_cache(side, model, shape, context, batch, True, decode_backend)
        self.ids = torch.randint(0, shape.vocabulary, (batch, 1), device=model.device)
        self.positions = torch.full((batch, 1), context - 1, device=model.device)
        self.context, self.graph, self.logits = context, None, None

    def eager(self) -> torch.Tensor:
        """Logits of the token at context - 1; the cache is as before, but for that token."""
        self._rewind()
        return self._forward()

    def _rewind(self) -> None:
        self.cache.seen = self.context - 1
        for layer in self.cache.layers:
            layer.seen = self.context - 1

    def _forward(self) -> torch.Tensor:
        self.cache.position.fill_(self.context - 2)
        with torch.no_grad():
            output = self.model(self.ids, position_ids=self.positions, **{CACHE_ARGUMENT: self.cache}, logits_to_keep=1)
        return output.logits

    def capture(self) -> None:
        """Into a CUDA graph. On a CPU a step stays eager."""
        if self.model.device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.eager()
        torch.cuda.current_stream().wait_stream(stream)
        self._rewind()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._forward()

    def replay(self) -> torch.Tensor:
        if self.graph is None:
            return self.eager()
        self.graph.replay()
        return self.logits


def measure(call: Callable[[], object], calls: int, device) -> float:
    """Milliseconds of one call, after one that is not counted."""
    call()
    if device.type == "cuda":
        return milliseconds(call, calls)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1000 / calls


class Run:
    """All measurements of one number of KV heads. rows: the list that takes what is measured."""

    def __init__(self, shape: Shape, kv_heads: int, device, deadline, console: Console, rows: list[dict], backend: str):
        self.shape, self.kv_heads, self.device, self.console = shape, kv_heads, device, console
        self.deadline, self.rows, self.backend = deadline, rows, backend
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.models = build_models(shape, kv_heads, device, self.dtype)
        self.head_dim = shape.hidden // shape.heads

    def add(self, what: str, context: int, side: str, **values) -> None:
        row = dict(what=what, kv_heads=self.kv_heads, context=context, side=side, **values)
        self.rows.append(row)
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in values.items()}
        text = ", ".join(f"{key} {value}" for key, value in shown.items())
        self.console.print(f"{self.kv_heads} KV heads, {context:,} tokens, {side}: {what}: {text}", highlight=False)

    def free(self) -> int:
        """Bytes that a cache may take."""
        gc.collect()
        if self.device.type != "cuda":
            return 8 * GIB // 1024
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] - RESERVE

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def prefill_attention(self, context: int) -> None:
        """One layer of each kind, one text."""
        sizes = (self.shape.heads, self.kv_heads, self.kv_heads)
        tensors = [
            torch.randn(1, context, count, self.head_dim, dtype=self.dtype, device=self.device).transpose(1, 2)
            for count in sizes
        ]
        pattern = self.models["S2 mixed"].config.sparsity.layers[-1].pattern
        for side, layer in (("dense", None), ("S2 layer", pattern)):
            took = measure(lambda layer=layer: attend(*tensors, layer, self.head_dim**-0.5), 3, self.device)
            self.add("prefill attention of a layer", context, side, ms=took)

    def first_token(self, context: int) -> None:
        """From the prompt to the first new token, one text."""
        ids = torch.randint(0, self.shape.vocabulary, (1, context), device=self.device)
        for side, model in self.models.items():

            def prefill(length, side=side, model=model):
                cache = new_cache(side, model, self.shape, length, 1, filled=False)
                with torch.no_grad():
                    model(ids[:, :length], **{CACHE_ARGUMENT: cache}, logits_to_keep=1).logits.argmax()
                return cache

            prefill(min(context, 4 * self.shape.window))  # loads kernels; a whole prompt twice would take long
            self.free()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            cache = prefill(context)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            took = (time.perf_counter() - start) * 1000
            self.add("first token", context, side, ms=took, cache_gib=cache.nbytes / GIB)
            del cache

    def decode(self, context: int) -> None:
        """Milliseconds a token at each batch that fits, and at the largest batch of either side."""
        sizes = {
            side: sequence_bytes(model.config.sparsity, context, self.head_dim, self.dtype.itemsize)
            for side, model in self.models.items()
        }
        largest = {side: int(self.free() // size) for side, size in sizes.items()}
        if self.device.type != "cuda":
            largest = dict.fromkeys(sizes, max(self.shape.batches))
        batches = sorted({*self.shape.batches, *largest.values()})
        for batch in batches:
            for side, model in self.models.items():
                if batch > largest[side] or batch < 1 or self.late():
                    continue
                took = self._decode_step(side, model, context, batch)
                if took is None and batch == largest[side]:  # the allocator lost more than was reserved
                    largest[side] = batch = max(1, batch * 9 // 10)
                    took = self._decode_step(side, model, context, batch)
                if took is None:
                    continue
                self.add(
                    "decode", context, side, batch=batch, ms=took, tokens_per_s=batch / took * 1000,
                    cache_gib=batch * sizes[side] / GIB, largest_batch=batch == largest[side],
                )  # fmt: skip

    def _decode_step(self, side: str, model, context: int, batch: int) -> float | None:
        self.free()
        try:
            step = DecodeStep(side, model, self.shape, context, batch, self.backend)
            step.capture()
            check_replay(step)
            return measure(step.replay, self.shape.replays, self.device)
        except torch.OutOfMemoryError:
            self.console.print(f"{side}: batch {batch} at {context:,} tokens does not fit", highlight=False)
            return None


def summary(rows: list[dict]) -> Table:
    """S2 beside dense: how many times faster, smaller, more."""
    table = Table(title="S2 mixed beside dense (times better)", title_justify="left")
    for name in ("KV heads", "context", "cache", "prefill attention", "first token", "largest batch"):
        table.add_column(name, justify="right")
    table.add_column("decode, by batch", justify="left")
    for kv_heads, context in dict.fromkeys((row["kv_heads"], row["context"]) for row in rows):
        here = [row for row in rows if (row["kv_heads"], row["context"]) == (kv_heads, context)]

        def of(what, side, here=here):
            return [row for row in here if row["what"] == what and row["side"] == side]

        def ratio(what, name, ours="S2 mixed"):
            pairs = list(zip(of(what, "dense"), of(what, ours)))
            return f"{pairs[0][0][name] / pairs[0][1][name]:.1f}" if pairs else "-"

        dense = {row["batch"]: row["ms"] for row in of("decode", "dense")}
        sparse = {row["batch"]: row["ms"] for row in of("decode", "S2 mixed")}
        both = ", ".join(f"{batch}: {dense[batch] / sparse[batch]:.1f}" for batch in dense if batch in sparse)
        more = f"{max(sparse)} / {max(dense)}" if dense and sparse else "-"
        table.add_row(
            str(kv_heads), f"{context:,}", ratio("first token", "cache_gib"),
            ratio("prefill attention of a layer", "ms", "S2 layer"), ratio("first token", "ms"), more, both,
        )  # fmt: skip
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="JSON file for all rows")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too: whether everything runs")
    parser.add_argument("--kv-heads", type=int, nargs="+", help="(default: 32 and 8)")
    parser.add_argument("--contexts", type=int, nargs="+", help="(default: 8192, 32768 and 131072)")
    own = "reference"
    parser.add_argument("--decode-backend", choices=DECODE_BACKENDS, default=own, help=f"of S2Cache (default: {own})")
    parser.add_argument("--seconds", type=float, default=420, help="no new measurement after this (default: 420)")
    args = parser.parse_args(arguments)
    shape = TINY if args.tiny else Shape()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        refuse("no GPU; expected one with 80 GB or more; use --tiny to see whether it runs")
    console = Console(width=140)
    deadline = time.monotonic() + args.seconds
    torch.manual_seed(0)
    rows, checks = [], []

    def write() -> None:
        given = sys.argv[1:] if arguments is None else arguments
        source = provenance("benchmarks.inference", given, launcher="python -m")
        write_json(args.output, {"provenance": source, "checks": checks, "rows": rows})

    for kv_heads in args.kv_heads or shape.kv_heads:
        run = Run(shape, kv_heads, device, deadline, console, rows, args.decode_backend)
        for number, context in enumerate(sorted(args.contexts or shape.contexts, reverse=True)):
            if number == 0:
                checked = check_attention(run.models["S2 mixed"], min(context, 16384))
                checks += checked
                console.print("\n".join(checked), highlight=False)
            for measurement in (run.prefill_attention, run.decode, run.first_token):
                if run.late():
                    console.print(f"{args.seconds:g} s are over: {measurement.__name__} at {context:,} is left out")
                else:
                    measurement(context)
            if args.output:
                write()  # after each context: what is measured is not lost
        del run
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    console.print(summary(rows))
    if args.output:
        console.print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
