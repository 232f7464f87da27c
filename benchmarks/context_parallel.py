"""Times one attention layer whose sequence lies on several GPUs, for every exchange, beside one GPU; counts what is
sent.

    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 4 benchmarks/context_parallel.py --seq-lengths 32768,131072
    --json cp4.json
    python benchmarks/context_parallel.py --predict 8 --from benchmarks/results/h200_cp2.json      # no GPU needed

First every exchange is checked against fp64 on a short sequence (s2_megatron/testing/context_parallel_check.py); a wrong one is not
timed. Then, per length:

sent       MiB that the busiest rank gives to its collectives, or copies, in forward and backward, counted there; plan: what was planned;
           share: of what an all-gather of K and V sends forward
step       median over repeats of the slowest rank, forward alone and forward + backward, in ms on the GPU, behind 50 ms of the same steps
           (at most 50): it is as warm as in a row of them. The CPU is ahead of it, also where it takes longer for a
           step than the GPU, which then waits in training. The GPUs start together. CPU: ms until a step is enqueued
exposed    the median step minus that of the same step whose transfers do nothing, in turns with it: communication that nothing hid, in ms
           and % of the step. By copies, also what a step loses that sends 64 KB in place of each transfer, for which
           nobody waits: on cards at their power limit the clock is lower while links between GPUs are used, for so
           little, too
work       largest over mean (query, key) pairs of the ranks
speed-up   one GPU computing the whole sequence (all of them do, the slowest counts), in turns with it, over this step

--first-heads N: on Hopper, so many KV heads of sparse attend the rank's own keys first, beside the exchange, in which all blocks come at once;
without it as many as are estimated to hide it, or the part of it that comes first.

--transport: of sparse, as --s2-cp-transport; `copies` and `collective` name it, auto says which it took. The JSON's transfer_ms is one exchange
of K and V that nothing runs beside, without packing.

--predict N adds the row of `sparse` on N ranks that follows from the measured ones and from what each of N ranks computes (--each-rank, a
JSON of each_rank.py; predict.py says how), marked "predicted" in the table and the JSON; with --from FILE nothing is
measured, and the rows of a JSON are the measured ones. --link: as if a rank received so many GB/s.

`te:p2p` and the like are Transformer Engine's dense attention with that cp_comm_type, where it is installed. On a
machine without GPUs the script runs over gloo with the reference backend, for its own test.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import report
from benchmarks.group_timing import Call, InterleavedTimer
from benchmarks.predict import Layer, explained, predict
from s2_megatron.context_parallel import copies as cp_copies
from s2_megatron.context_parallel.attention import COMM_TYPES, ContextParallel, check_comm_type
from s2_megatron.context_parallel.plan import layer_costs
from s2_megatron.context_parallel.sparse import SparseState
from s2_megatron.context_parallel.transport import count_traffic
from s2_megatron.ops.api import resolve_backend, s2_attention
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.ranges import make_range_pattern
from s2_megatron.testing.context_parallel_cases import Case
from s2_megatron.testing.context_parallel_check import IN_PARTS, check_case, is_right

MIB = 2**20
LINK_BYTES = 2**16  # in place of an exchange
EACH_RANK = report.ROOT / "benchmarks" / "results" / "h200_each_rank.json"
LAYER = (
    "heads",
    "kv_heads",
    "head_dim",
    "block",
    "local_tokens",
    "stride",
    "dense_heads",
    "keep_received",
)  # arguments that make it


@contextmanager
def silent_collectives():
    """The collectives of the exchange return at once, and so do copies; what would have been received stays as it
    was."""
    silent = [(dist, "all_to_all_single"), (dist, "all_gather_into_tensor")]
    silent += [(cp_copies.Arena, name) for name in ("send", "arrive", "release")]
    with ExitStack() as stack:
        for owner, name in silent:
            stack.enter_context(patch.object(owner, name, lambda *args, **kwargs: None))
        yield


@contextmanager
def awake_links():
    """The same for exchanges by copies, but that each of them sends LINK_BYTES at most to the next rank, for which
    nobody waits."""

    def send(arena, lane, sent, route, early_rows=None):
        target, source = arena.lanes[lane][(route.rank + 1) % len(route.sent)], sent.view(-1).view(torch.uint8)
        length = min(LINK_BYTES, len(target), len(source))
        target[:length].copy_(source[:length], non_blocking=True)

    with silent_collectives(), patch.object(cp_copies.Arena, "send", send):
        yield


def pattern_of(args):
    """Of the layer that is timed. args: of parse(), or the settings of a JSON."""
    ranges = ((args.local_tokens // args.block, 1), (None, args.stride))
    return make_range_pattern(
        block_size=args.block,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        ranges=ranges,
        dense_heads=dense_heads(args),
    )


def dense_heads(args):
    return {"spread": args.dense_heads} if args.dense_heads else ()


def tensors(args, tokens, device, dtype):
    """[query, key, value] as strided pieces of one projection, and the gradient of out."""
    fused = torch.randn(tokens, 1, args.heads + 2 * args.kv_heads, args.head_dim, device=device, dtype=dtype)
    parts = [part.requires_grad_() for part in fused.split([args.heads, args.kv_heads, args.kv_heads], 2)]
    return parts, torch.randn(parts[0].shape, device=device, dtype=dtype)


class Bench:
    def __init__(self, args, group, device):
        self.args, self.group, self.device = args, group, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.backend = args.backend if device.type == "cuda" else "reference"
        self.pattern = pattern_of(args)
        self.turns = InterleavedTimer(group, device, args.warmup, args.repeats)

    def tensors(self, tokens):
        return tensors(self.args, tokens, self.device, self.dtype)

    def one_gpu(self, tokens):
        """(function, its arguments, gradient) of the whole sequence, which every GPU computes by itself; None where it
        lacks the memory."""
        layout, fits = build_layout(self.pattern, self.device), torch.ones(1, device=self.device)

        def function(*qkv):
            return s2_attention(*qkv, layout, backend=self.backend)

        try:
            parts, grad = self.tensors(tokens)
            torch.autograd.grad(function(*parts), parts, grad)
        except torch.OutOfMemoryError as error:
            print(f"one GPU: {error}", flush=True)
            fits.zero_()
        dist.all_reduce(fits, dist.ReduceOp.MIN, group=self.group)
        return (function, parts, grad) if fits else None

    def check(self, comm_type) -> None:
        """Of the backend that is timed, on a short sequence; bits in deterministic mode. Raises SystemExit when
        something is wrong."""
        args = self.args
        pattern = make_range_pattern(
            block_size=args.block, num_heads=args.heads, num_kv_heads=args.kv_heads, ranges=((2, 1), (None, 4)), layer_index=1,
            dense_heads=dense_heads(args),
        )  # fmt: skip
        case = Case(pattern, 2 if self.device.type == "cuda" else 1, args.head_dim, keep_received=args.keep_received)
        for deterministic in (False, True):
            settings = dict(deterministic=deterministic, transport=args.transport)
            in_parts = comm_type == "sparse" and args.transport != "collective" and self.device.type == "cuda"
            kinds = (comm_type, IN_PARTS) if in_parts else (comm_type,)
            for kind, found in check_case(
                case, kinds, self.dtype, self.group, self.device, self.backend, **settings
            ).items():
                if not is_right(found, bits=deterministic):
                    raise SystemExit(f"{kind} is wrong, and not timed: {found}")

    def measure(self, comm_type, tokens, alone) -> dict:
        """One row of the table."""
        args, size = self.args, self.group.size()
        cp = ContextParallel(
            self.pattern, self.group, comm_type, keep_received=args.keep_received, transport=args.transport
        )
        cp.prepare(tokens, self.device, args.head_dim, self.dtype, self.backend)
        parts, grad = self.tensors(tokens // size)

        def function(*qkv):
            return cp.attention(*qkv, backend=self.backend)

        with count_traffic() as sent_forward:
            out = function(*parts)
        with count_traffic() as sent_backward:
            torch.autograd.grad(out, parts, grad)
        del out
        sent = torch.tensor([sent_forward.bytes_sent, sent_backward.bytes_sent], device=self.device, dtype=torch.int64)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.group)
        settings = dict(head_dim=args.head_dim, itemsize=parts[0].itemsize, keep_received=args.keep_received)
        costs = layer_costs(self.pattern, size, tokens, comm_type, **settings)
        gathered = layer_costs(self.pattern, size, tokens, "all_gather", **settings).sent_forward[0]
        row = dict(
            exchange=comm_type, tokens=tokens, ranks=size, sent_forward=int(sent[0]), sent_backward=int(sent[1]),
            planned_forward=max(costs.sent_forward), planned_backward=max(costs.sent_backward), all_gather_forward=gathered, work=costs.balance,
        )  # fmt: skip
        exchange = cp.state(tokens, self.device).exchange if comm_type == "sparse" else None
        ours, contexts = (function, parts, grad), {"": nullcontext, "silent_": silent_collectives}
        if exchange is not None and exchange.copies is not None:
            contexts["awake_"] = awake_links
        kinds = {kind: (ours, context) for kind, context in contexts.items()} | (
            {"one_gpu_": (alone, nullcontext)} if alone else {}
        )
        for name, make in (("forward", forward_of), ("step", step_of)):
            calls = [Call(make(*what), context) for what, context in kinds.values()]
            for kind, (elapsed, enqueued) in zip(kinds, self.turns.medians(calls)):
                row |= {f"{kind}{name}_ms": elapsed, f"{kind}{name}_cpu_ms": enqueued}
        if alone:
            row["speed_up"] = row["one_gpu_step_ms"] / row["step_ms"]
        if exchange is not None:
            row["transport"] = "collective" if exchange.copies is None else "copies"
            row["transfer_ms"] = self.transfer(exchange, parts)
        return row

    def transfer(self, exchange, parts) -> float:
        """ms of one exchange of K and V alone, less what it takes in silence."""
        _, key, value = (part.detach() for part in parts)

        def alone():
            pending = exchange.start(key, value, resolve_backend(self.backend, self.device.type))
            pending.result()
            pending.release()

        (loud, _), (silent, _) = self.turns.medians([Call(alone), Call(alone, silent_collectives)])
        return loud - silent

    def transformer_engine(self, cp_comm_type, tokens) -> dict:
        """Dense causal attention of Transformer Engine with its own context parallelism."""
        from transformer_engine.pytorch import DotProductAttention

        args, size = self.args, self.group.size()
        attention = DotProductAttention(
            args.heads,
            args.head_dim,
            num_gqa_groups=args.kv_heads,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
        )
        attention.set_context_parallel_group(self.group, list(range(size)), torch.cuda.Stream(), cp_comm_type)
        parts, grad = self.tensors(tokens // size)
        contiguous = [part.detach().contiguous().requires_grad_() for part in parts]
        what = attention, contiguous, grad.flatten(-2)
        times = self.turns.medians([Call(forward_of(*what))]) + self.turns.medians([Call(step_of(*what))])
        row = dict(exchange=f"te:{cp_comm_type}", tokens=tokens, ranks=size)
        for name, (elapsed, enqueued) in zip(("forward", "step"), times):
            row |= {f"{name}_ms": elapsed, f"{name}_cpu_ms": enqueued}
        return row


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
    text = f"{row['tokens']:>8}  {row['exchange']:<11}"
    if "sent_forward" in row:
        text += f" sent {row['sent_forward'] / MIB:8.1f} + {row['sent_backward'] / MIB:8.1f} MiB"
        text += f" (plan {row['planned_forward'] / MIB:.1f} + {row['planned_backward'] / MIB:.1f},"
        text += f" {row['sent_forward'] / row['all_gather_forward']:.1%} of all-gather) "
    text += f" forward {row['forward_ms']:8.2f}  step {row['step_ms']:8.2f} ms"
    if "silent_step_ms" in row:
        exposed = row["step_ms"] - row["silent_step_ms"]
        text += f"  by {row['transport']}" if "transport" in row else ""
        text += f"  exposed {exposed:6.2f} ms ({exposed / row['step_ms']:.1%})"
        text += f", links alone {row['awake_step_ms'] - row['silent_step_ms']:.2f}" if "awake_step_ms" in row else ""
        text += f"  work {row['work']:.3f}"
    text += f"  {row['speed_up']:.2f} x one GPU ({row['one_gpu_step_ms']:.2f} ms)" if "speed_up" in row else ""
    text += f"  CPU {row['step_cpu_ms']:.1f} ms" if "step_cpu_ms" in row else ""
    return text + (f"  predicted for {row['ranks']} ranks" if row.get("predicted") else "")


def predictions(args, settings, rows: list[dict], itemsize: int, card: str) -> list[dict]:
    """The predicted row of every length of the rows, printed, or why there is none. settings: of the layer that the
    rows are of. card: that they were measured on. Raises ValueError where there is none at all."""
    each = json.loads(args.each_rank.read_text())
    if card != each["hardware"]["gpu"]:
        raise ValueError(
            f"the rows were measured on {card}, and {args.each_rank} on {each['hardware']['gpu']}; measure that there with "
            "benchmarks/each_rank.py, and name it with --each-rank"
        )
    for name in (*LAYER, "backend"):
        if getattr(settings, name) != each["settings"][name]:
            raise ValueError(
                f"{name} is {getattr(settings, name)} in the rows, and {each['settings'][name]} in {args.each_rank}; measure that "
                "with benchmarks/each_rank.py, and name it with --each-rank"
            )
    found, problems = [], []
    lengths = set(map(int, args.seq_lengths.split(",")))
    for tokens in dict.fromkeys(row["tokens"] for row in rows if row["tokens"] in lengths):
        layer = Layer(pattern_of(settings), tokens, settings.head_dim, itemsize, settings.keep_received)
        try:
            found.append(predict(rows, each["rows"], layer, args.predict, args.link))
        except ValueError as problem:
            problems.append(f"{tokens} tokens: {problem}")
            continue
        print(f"{line_of(found[-1])}\n{explained(found[-1])}", flush=True)
    if not found:
        raise ValueError("; ".join(problems) or f"no row has one of --seq-lengths {args.seq_lengths}")
    for problem in problems:
        print(f"not predicted: {problem}", flush=True)
    return found


def predict_from(args) -> None:
    """The predictions from the rows of a JSON; with --json in another one, which names both files."""
    content, each = (json.loads(path.read_text()) for path in (args.source, args.each_rank))
    settings = argparse.Namespace(**content["settings"])
    if getattr(settings, "first_heads", None) is not None:
        raise ValueError(
            "its rows were measured with --first-heads, which --predict takes as estimated; measure without it"
        )
    for path, measured in ((args.source, content), (args.each_rank, each)):
        print(f"from {os.path.relpath(path)}: {measured['hardware']['gpu']}, commit {measured['commit']}")
    rows = [row for row in content["rows"] if not row.get("predicted")]
    found = predictions(args, settings, rows, getattr(torch, content["dtype"]).itemsize, content["hardware"]["gpu"])
    if args.json:
        report.write_json(
            args.json, dict(sources=[os.path.relpath(path) for path in (args.source, args.each_rank)], rows=found)
        )


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """The layer and its lengths."""
    parser.add_argument("--seq-lengths", default="32768,131072")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--local-tokens", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=16)
    parser.add_argument("--dense-heads", type=int, default=0)
    parser.add_argument("--backend", default="auto", help="of s2_attention, on one GPU and on several")
    parser.add_argument("--keep-received", action="store_true")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_layer_arguments(parser)
    parser.add_argument("--exchanges", default=",".join(COMM_TYPES))
    parser.add_argument(
        "--te-exchanges", default="", help="e.g. p2p,all_gather,a2a: also Transformer Engine's dense attention"
    )
    parser.add_argument("--transport", choices=cp_copies.TRANSPORTS, default="auto", help="of sparse")
    parser.add_argument(
        "--first-heads", type=int, metavar="N", help="KV heads that visit their query tiles twice, of each rank"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--json", type=Path, help="write rows, command, versions, hardware, commit (S2_COMMIT without .git)"
    )
    parser.add_argument("--predict", type=int, metavar="RANKS", help="also predict the time of sparse on so many ranks")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="JSON",
        help="with --predict: measure nothing, take the rows of a JSON",
    )
    parser.add_argument(
        "--each-rank", type=Path, default=EACH_RANK, metavar="JSON", help="for --predict: what each_rank.py measured"
    )
    parser.add_argument(
        "--link", type=float, metavar="GB/S", help="for --predict: what a rank receives, instead of the measured rate"
    )
    args = parser.parse_args(arguments)
    if args.source and not args.predict:
        parser.error("--from is for --predict, which says for how many ranks")
    if args.first_heads is not None and (args.predict or args.first_heads < 0):
        parser.error(
            "--first-heads is 0 or more, and not for --predict: each_rank.py has measured as many as are estimated"
        )
    return args


def origin(args, dtype) -> dict:
    """All of a JSON but its rows."""
    launcher = f"torchrun --nproc-per-node {dist.get_world_size()}"
    if (connections := os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")) is not None:
        launcher = f"CUDA_DEVICE_MAX_CONNECTIONS={connections} {launcher}"
    settings = {
        name: value
        for name, value in vars(args).items()
        if name not in ("json", "predict", "source", "each_rank", "link")
    }
    return dict(
        **report.provenance("benchmarks/context_parallel.py", sys.argv[1:], launcher),
        dtype=str(dtype)[6:],
        settings=settings,
    )


def main() -> None:
    args = parse()
    if args.source:
        try:
            return predict_from(args)
        except (OSError, ValueError, KeyError) as problem:
            raise SystemExit(f"error: --from {args.source}: {problem}") from problem
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    if args.first_heads is not None:
        SparseState.heads = lambda state, *shape: (0, min(args.first_heads, state.layout.num_kv_heads))
    bench = Bench(args, dist.group.WORLD, device)
    first = dist.get_rank() == 0
    rows: list[dict] = []
    if first:
        card = torch.cuda.get_device_name() if on_gpu else "CPU"
        content = origin(args, bench.dtype)
        print(
            f"{dist.get_world_size()} ranks, {card}, torch {torch.__version__}, {args.heads}/{args.kv_heads} heads of {args.head_dim}, "
            f"{bench.pattern.describe()}, blocks of {args.block}, {str(bench.dtype)[6:]}",
            flush=True,
        )
    exchanges = []
    for comm_type in args.exchanges.split(","):
        try:
            exchanges.append(check_comm_type(comm_type, args.kv_heads, dist.get_world_size()))
        except ValueError as error:
            if first:
                print(f"left out: {error}", flush=True)
            continue
        bench.check(comm_type)
    for tokens in map(int, args.seq_lengths.split(",")):
        alone = bench.one_gpu(tokens)
        for comm_type in exchanges:
            rows.append(bench.measure(comm_type, tokens, alone))
            if first:
                print(line_of(rows[-1]), flush=True)
        for comm_type in filter(None, args.te_exchanges.split(",")):
            rows.append(bench.transformer_engine(comm_type, tokens))
            if first:
                print(line_of(rows[-1]), flush=True)
        if first and args.json:
            report.write_json(args.json, {**content, "rows": rows})
    if first and args.predict:
        try:
            rows += predictions(args, args, rows, bench.dtype.itemsize, content["hardware"]["gpu"])
        except (OSError, ValueError, KeyError) as problem:
            print(f"not predicted: {problem}", flush=True)
        if args.json:
            report.write_json(args.json, {**content, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
