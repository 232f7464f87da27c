"""Times one attention layer whose sequence lies on several GPUs, for every comm type, beside one GPU, and counts what
is sent.

    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 2 benchmarks/context_parallel.py --seq-lengths 131072 \\
        --repeats 11 --json benchmarks/results/h200_cp2.json

First every comm type is checked against fp64 on a short sequence (s2_megatron/testing/context_parallel_check.py); a
wrong one is not timed. Then, per length, one line for each:

sent       MiB that the busiest rank gives to its collectives in forward and backward, counted there; plan: what was
           planned; share: of what an all-gather of K and V sends forward
step       median over repeats of the slowest rank, forward alone and forward + backward, in ms on the GPU, behind 50 ms
           of the same steps (at most 50), so after warm-up. The CPU is ahead of it, also where it takes longer for a
           step than the GPU, which then waits in training. The GPUs start together. CPU: ms until a step is enqueued
exposed    the median step minus that of the same step with communication disabled, interleaved with it: communication
           that nothing hid, in ms and % of the step
work       largest over mean (query, key) pairs of the ranks
speed-up   one GPU computing the whole sequence (all of them do, the slowest counts), interleaved with it, over the step

--documents N packs N documents into the row; nothing is planned beforehand then, and Transformer Engine left out.

--two-pass-heads N: so many KV heads of sparse attend the rank's own keys first, while the blocks travel, and the others
in one pass afterwards; without it as many as are estimated to hide the exchange (plan.heads_beside).

The JSON's transfer_ms is one exchange of K and V that nothing runs beside, without packing. `te:p2p` and the like are
Transformer Engine's attention with that cp_comm_type, where it is installed (--te-exchanges): dense, and the same
window with --window W. Of its bytes, too, those to other ranks are counted, at torch's collectives. On a machine
without GPUs the script runs over gloo with the reference backend, for its own test.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import report
from benchmarks.one_layer import (
    add_layer_arguments,
    dense_heads,
    forward_of,
    line_of,
    pattern_of,
    step_of,
    tensors,
)
from benchmarks.timing import Call, InterleavedTimer
from s2_megatron.context_parallel.attention import CUTS, ContextParallel
from s2_megatron.context_parallel.documents import keep_borders
from s2_megatron.context_parallel.exchange import count_traffic
from s2_megatron.context_parallel.plan import COMM_TYPES, check_comm_type, layer_costs
from s2_megatron.context_parallel.sparse import SparseState
from s2_megatron.ops.api import resolve_backend, s2_attention
from s2_megatron.ops.layout import PackedSequence, build_layout
from s2_megatron.patterns.ranges import make_range_pattern
from s2_megatron.testing.context_parallel_cases import Case
from s2_megatron.testing.context_parallel_check import check_case, is_right
from s2_megatron.tools.commands import CommandParser


@contextmanager
def communication_disabled():
    """The collectives of the exchange return at once; what would have been received stays as it was."""
    with ExitStack() as stack:
        for name in ("all_to_all_single", "all_gather_into_tensor"):
            stack.enter_context(patch.object(dist, name, lambda *args, **kwargs: None))
        yield


@contextmanager
def count_collectives():
    """A list of the bytes that each collective of torch, called while the context is open, sends to other ranks."""
    sent = []

    def all_to_all(call):
        def counted(output, input, *args, group=None, **kwargs):
            size = dist.get_world_size(group)
            sent.append(input.nbytes * (size - 1) // size)
            return call(output, input, *args, group=group, **kwargs)

        return counted

    def each_to_all(call, whole):
        """Of a collective whose every rank gives a part to each other one: of the input's size, or the output's."""

        def counted(output, input, *args, group=None, **kwargs):
            sent.append((output if whole else input).nbytes * (dist.get_world_size(group) - 1))
            return call(output, input, *args, group=group, **kwargs)

        return counted

    wrapped = {
        "all_to_all_single": all_to_all,
        "all_gather_into_tensor": lambda call: each_to_all(call, whole=False),
        "reduce_scatter_tensor": lambda call: each_to_all(call, whole=True),
    }
    with ExitStack() as stack:
        for name, wrap in wrapped.items():
            stack.enter_context(patch.object(dist, name, wrap(getattr(dist, name))))
        yield sent


class Bench:
    def __init__(self, args, group, device):
        self.args, self.group, self.device = args, group, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.backend = args.backend if device.type == "cuda" else "reference"
        self.pattern = pattern_of(args)
        self.timer = InterleavedTimer(group, device, args.warmup, args.repeats)

    def tensors(self, tokens):
        parts, grad = tensors(self.args, tokens, self.device, self.dtype)
        if self.args.documents:
            return [part.detach().squeeze(1).requires_grad_() for part in parts], grad.squeeze(1)
        return parts, grad

    def packed(self, tokens) -> PackedSequence | None:
        """--documents of equal length in one row."""
        if not self.args.documents:
            return None
        longest = tokens // self.args.documents
        borders = torch.arange(self.args.documents + 1, dtype=torch.int32, device=self.device) * longest
        keep_borders(borders)
        return PackedSequence(borders, longest)

    def one_gpu(self, tokens):
        """(function, its arguments, gradient) of the whole sequence, which every GPU computes by itself; None where it
        lacks the memory."""
        layout, fits = build_layout(self.pattern, self.device), torch.ones(1, device=self.device)
        packed = self.packed(tokens)
        options = dict(backend=self.backend, packed=packed, tensor_format="thd" if packed else "sbhd")

        def function(*qkv):
            return s2_attention(*qkv, layout, **options)

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
            block_size=args.block,
            num_heads=args.heads,
            num_kv_heads=args.kv_heads,
            ranges=() if args.window else ((2, 1), (None, 4)),
            window=args.window and min(args.window, 3 * args.block + 5),
            sink_tokens=args.sink_tokens,
            layer_index=1,
            dense_heads=dense_heads(args),
        )
        case = Case(
            pattern,
            2 if self.device.type == "cuda" else 1,
            args.head_dim,
            keep_received=args.keep_received,
            documents=(0.3, 0.01, 0.6) if args.documents else (),
        )
        for deterministic in (False, True):
            (found,) = check_case(
                case, (comm_type,), self.dtype, self.group, self.device, self.backend, deterministic=deterministic
            ).values()
            if not is_right(found, bits=deterministic):
                raise SystemExit(f"{comm_type} is wrong, and not timed: {found}")

    def measure(self, comm_type, tokens, alone) -> dict:
        """One row of the table. alone: of one_gpu."""
        args, size = self.args, self.group.size()
        options = dict(keep_received=args.keep_received, cut=args.packed_cut)
        cp, packed = ContextParallel(self.pattern, self.group, comm_type, **options), self.packed(tokens)
        if packed is None:
            cp.prepare(tokens, self.device, args.head_dim, self.dtype, self.backend)
        parts, grad = self.tensors(tokens // size)

        def function(*qkv):
            return cp.attention(*qkv, packed=packed, backend=self.backend)

        with count_traffic() as sent_forward:
            out = function(*parts)
        with count_traffic() as sent_backward:
            torch.autograd.grad(out, parts, grad)
        del out
        sent = torch.tensor([sent_forward.bytes_sent, sent_backward.bytes_sent], device=self.device, dtype=torch.int64)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.group)
        row = dict(exchange=comm_type, tokens=tokens, ranks=size)
        row |= dict(sent_forward=int(sent[0]), sent_backward=int(sent[1]))
        if packed is None:
            settings = dict(head_dim=args.head_dim, itemsize=parts[0].itemsize, keep_received=args.keep_received)
            costs = layer_costs(self.pattern, size, tokens, comm_type, **settings)
            row |= dict(
                planned_forward=max(costs.sent_forward),
                planned_backward=max(costs.sent_backward),
                all_gather_forward=layer_costs(self.pattern, size, tokens, "all_gather", **settings).sent_forward[0],
                work=costs.balance,
            )
        ours = function, parts, grad
        kinds = {"": (ours, nullcontext), "no_comm_": (ours, communication_disabled)}
        if alone:
            kinds["one_gpu_"] = alone, nullcontext
        for name, make in (("forward", forward_of), ("step", step_of)):
            calls = [Call(make(*what), context) for what, context in kinds.values()]
            for kind, (elapsed, enqueued) in zip(kinds, self.timer.medians(calls)):
                row |= {f"{kind}{name}_ms": elapsed, f"{kind}{name}_cpu_ms": enqueued}
        if alone:
            row["speed_up"] = row["one_gpu_step_ms"] / row["step_ms"]
        if comm_type == "sparse" and packed is None:
            row["transfer_ms"] = self.transfer(cp.state(tokens, self.device).exchange, parts)
        return row

    def transfer(self, exchange, parts) -> float:
        """ms of one exchange of K and V alone, less what it takes with communication disabled."""
        _, key, value = (part.detach() for part in parts)

        def alone():
            exchange.start(key, value, resolve_backend(self.backend, self.device.type)).result()

        (sent, _), (disabled, _) = self.timer.medians([Call(alone), Call(alone, communication_disabled)])
        return sent - disabled

    def transformer_engine(self, cp_comm_type, tokens) -> dict:
        """Attention of Transformer Engine with its own context parallelism: the window of --window, or dense causal."""
        from transformer_engine.pytorch import DotProductAttention

        args, size = self.args, self.group.size()
        attention = DotProductAttention(
            args.heads,
            args.head_dim,
            num_gqa_groups=args.kv_heads,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="causal",
            window_size=(args.window - 1, 0) if args.window else None,
        )
        attention.set_context_parallel_group(self.group, list(range(size)), torch.cuda.Stream(), cp_comm_type)
        parts, grad = self.tensors(tokens // size)
        contiguous = [part.detach().contiguous().requires_grad_() for part in parts]
        what = attention, contiguous, grad.flatten(-2)
        times = self.timer.medians([Call(forward_of(*what))]) + self.timer.medians([Call(step_of(*what))])
        with count_collectives() as forward:
            out = attention(*contiguous)
        with count_collectives() as backward:
            torch.autograd.grad(out, contiguous, grad.flatten(-2))
        row = dict(exchange=f"te:{cp_comm_type}", tokens=tokens, ranks=size)
        if cp_comm_type != "p2p":  # which has no collectives
            row |= dict(sent_forward=sum(forward), sent_backward=sum(backward))
        for name, (elapsed, enqueued) in zip(("forward", "step"), times):
            row |= {f"{name}_ms": elapsed, f"{name}_cpu_ms": enqueued}
        return row


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n\n")[0])
    add_layer_arguments(parser)
    parser.add_argument("--exchanges", default=",".join(COMM_TYPES), help="comm types of S2-Attention")
    parser.add_argument(
        "--te-exchanges", default="", help="e.g. p2p,all_gather,a2a: also Transformer Engine's dense attention"
    )
    parser.add_argument("--documents", type=int, default=0, metavar="N", help="N packed documents of equal length")
    parser.add_argument("--packed-cut", choices=CUTS, default=CUTS[0], help="what is cut over the ranks")
    parser.add_argument("--two-pass-heads", type=int, metavar="N", help="KV heads of sparse computed in two passes")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args(arguments)
    if args.two_pass_heads is not None and args.two_pass_heads < 0:
        parser.error(f"--two-pass-heads {args.two_pass_heads}; expected 0 or more; leave it out for the estimate")
    if args.documents < 0:
        parser.error(f"--documents {args.documents}; expected 0 or more; leave it out for one sequence")
    if args.documents and args.te_exchanges:
        parser.error(f"--te-exchanges {args.te_exchanges} with --documents; expected one of them; leave one out")
    return args


def origin(args, dtype) -> dict:
    """All of a JSON but its rows."""
    launcher = f"torchrun --nproc-per-node {dist.get_world_size()}"
    if (connections := os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")) is not None:
        launcher = f"CUDA_DEVICE_MAX_CONNECTIONS={connections} {launcher}"
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    provenance = report.provenance("benchmarks/context_parallel.py", sys.argv[1:], launcher)
    return dict(**provenance, dtype=str(dtype)[6:], settings=settings)


def main() -> None:
    args = parse()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    if args.two_pass_heads is not None:
        SparseState.two_pass_heads = lambda state, *shape: min(args.two_pass_heads, state.layout.num_kv_heads)
    bench = Bench(args, dist.group.WORLD, device)
    first = dist.get_rank() == 0
    rows: list[dict] = []
    if first:
        content = origin(args, bench.dtype)
        print(
            f"{dist.get_world_size()} ranks, {torch.cuda.get_device_name() if on_gpu else 'CPU'}, "
            f"torch {torch.__version__}, {args.heads}/{args.kv_heads} heads of {args.head_dim}, "
            f"{bench.pattern.describe()}, blocks of {args.block}, {str(bench.dtype)[6:]}",
            flush=True,
        )
    comm_types = []
    for comm_type in args.exchanges.split(","):
        try:
            check_comm_type(comm_type, args.kv_heads, dist.get_world_size())
        except ValueError as error:
            if first:
                print(f"left out: {error}", flush=True)
            continue
        bench.check(comm_type)
        comm_types.append(comm_type)
    for tokens in map(int, args.seq_lengths.split(",")):
        alone = bench.one_gpu(tokens)
        for comm_type in (*comm_types, *(f"te:{name}" for name in args.te_exchanges.split(",") if name)):
            if comm_type in comm_types:
                rows.append(bench.measure(comm_type, tokens, alone))
            else:
                rows.append(bench.transformer_engine(comm_type.removeprefix("te:"), tokens))
            if first:
                print(line_of(rows[-1]), flush=True)
                if args.json:
                    report.write_json(args.json, {**content, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
