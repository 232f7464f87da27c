"""Times one attention layer whose sequence lies on several GPUs, for every exchange, beside one GPU; counts what is sent.

    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 4 benchmarks/context_parallel.py --seq-lengths 32768,131072 --json cp4.json

First every exchange is checked against fp64 on a short sequence (tests/context_parallel/check.py); a wrong one is not timed. Then, per length:

sent       MiB that the busiest rank gives to its collectives in forward and backward, counted at the collectives; plan: what was planned;
           share: of what an all-gather of K and V sends forward
step       median over repeats of the slowest rank, forward alone and forward + backward, in ms
exposed    the median step minus that of the same step whose collectives do nothing: communication that nothing hid, in ms and % of the step
work       largest over mean (query, key) pairs of the ranks
speed-up   one GPU computing the whole sequence over this step

`te:p2p` and the like are Transformer Engine's dense attention with that cp_comm_type, where it is installed. On a machine without GPUs the
script runs over gloo with the reference backend, for its own test.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from s2_megatron.attention import s2_attention
from s2_megatron.context_parallel import COMM_TYPES, ContextParallel, check_comm_type
from s2_megatron.cp_exchange import count_traffic
from s2_megatron.cp_plan import layer_costs
from s2_megatron.layout import build_layout
from s2_megatron.patterns import make_range_pattern
from tests.context_parallel.cases import Case
from tests.context_parallel.check import FACTOR, check_case
from tests.context_parallel.worker import NAMES

MIB = 2**20


@contextmanager
def silent_collectives():
    """The collectives of the exchange return at once; what they would have received stays as it was."""
    kept = dist.all_to_all_single, dist.all_gather_into_tensor
    dist.all_to_all_single = dist.all_gather_into_tensor = lambda *args, **kwargs: None
    try:
        yield
    finally:
        dist.all_to_all_single, dist.all_gather_into_tensor = kept


class Bench:
    def __init__(self, args, group, device):
        self.args, self.group, self.device = args, group, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.backend = args.backend if device.type == "cuda" else "reference"
        ranges = ((args.local_tokens // args.block, 1), (None, args.stride))
        dense = {"spread": args.dense_heads} if args.dense_heads else ()
        self.pattern = make_range_pattern(
            block_size=args.block, num_heads=args.heads, num_kv_heads=args.kv_heads, ranges=ranges, dense_heads=dense
        )

    def tensors(self, tokens):
        """[query, key, value] as strided pieces of one projection, and the gradient of out."""
        args = self.args
        fused = torch.randn(tokens, 1, args.heads + 2 * args.kv_heads, args.head_dim, device=self.device, dtype=self.dtype)
        parts = [part.requires_grad_() for part in fused.split([args.heads, args.kv_heads, args.kv_heads], 2)]
        return parts, torch.randn(parts[0].shape, device=self.device, dtype=self.dtype)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def times(self, function, parts, grad, backward: bool, together=True) -> list[float]:
        """ms of each repeat, of the slowest rank when all take part."""
        found = []
        for repeat in range(self.args.warmup + self.args.repeats):
            if together:
                dist.barrier(self.group)
            start = self.now()
            out = function(*parts)
            if backward:
                torch.autograd.grad(out, parts, grad)
            elapsed = (self.now() - start) * 1e3
            if repeat >= self.args.warmup:
                found.append(elapsed)
        if not together:
            return found
        slowest = torch.tensor(found, device=self.device, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        return slowest.tolist()

    def medians(self, function, parts, grad, together=True) -> tuple[float, float]:
        with torch.no_grad():
            forward = statistics.median(self.times(function, parts, grad, False, together))
        return forward, statistics.median(self.times(function, parts, grad, True, together))

    def one_gpu(self, tokens):
        """(forward, forward + backward) of the whole sequence on rank 0 alone, known to all ranks; None where the memory does not suffice."""
        result = torch.full((2,), float("nan"), device=self.device, dtype=torch.float64)
        if self.group.rank() == 0:
            layout = build_layout(self.pattern, self.device)
            try:
                parts, grad = self.tensors(tokens)
                result[:] = torch.tensor(
                    self.medians(lambda *qkv: s2_attention(*qkv, layout, backend=self.backend), parts, grad, False), dtype=torch.float64
                )
            except torch.OutOfMemoryError as error:
                print(f"one GPU: {error}", flush=True)
        dist.broadcast(result, 0, self.group)
        return None if result.isnan().any() else result.tolist()

    def check(self, comm_type) -> None:
        heads, kv_heads = self.args.heads, self.args.kv_heads
        case = Case(
            make_range_pattern(block_size=self.args.block, num_heads=heads, num_kv_heads=kv_heads, ranges=((2, 1), (None, 4)), layer_index=1),
            2 if self.device.type == "cuda" else 1,
            self.args.head_dim,
        )
        backend = "triton" if self.backend == "auto" else self.backend  # the same kernels on one GPU and on several
        found = check_case(case, (comm_type,), self.dtype, self.group, self.device, backend)[comm_type]
        if max(found[name] for name in NAMES) > FACTOR or not found["repeats"] or not found["bytes"] or found["waited"]:
            raise SystemExit(f"{comm_type} is wrong, and not timed: {found}")

    def measure(self, comm_type, tokens, alone) -> dict:
        """One row of the table."""
        args, size = self.args, self.group.size()
        cp = ContextParallel(self.pattern, self.group, comm_type, keep_received=args.keep_received)
        cp.prepare(tokens)
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
        forward, step = self.medians(function, parts, grad)
        with silent_collectives():
            silent_forward, silent_step = self.medians(function, parts, grad)
        row = dict(
            exchange=comm_type, tokens=tokens, ranks=size, sent_forward=int(sent[0]), sent_backward=int(sent[1]),
            planned_forward=max(costs.sent_forward), planned_backward=max(costs.sent_backward), all_gather_forward=gathered,
            forward_ms=forward, step_ms=step, silent_forward_ms=silent_forward, silent_step_ms=silent_step, work=costs.balance,
        )  # fmt: skip
        if alone is not None:
            row.update(one_gpu_forward_ms=alone[0], one_gpu_step_ms=alone[1], speed_up=alone[1] / step)
        return row

    def transformer_engine(self, cp_comm_type, tokens) -> dict:
        """Dense causal attention of Transformer Engine with its own context parallelism."""
        from transformer_engine.pytorch import DotProductAttention

        args, size = self.args, self.group.size()
        attention = DotProductAttention(
            args.heads, args.head_dim, num_gqa_groups=args.kv_heads, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal"
        )
        attention.set_context_parallel_group(self.group, list(range(size)), torch.cuda.Stream(), cp_comm_type)
        parts, grad = self.tensors(tokens // size)
        contiguous = [part.detach().contiguous().requires_grad_() for part in parts]
        forward, step = self.medians(attention, contiguous, grad.flatten(-2))
        return dict(exchange=f"te:{cp_comm_type}", tokens=tokens, ranks=size, forward_ms=forward, step_ms=step)


def line_of(row: dict) -> str:
    text = f"{row['tokens']:>8}  {row['exchange']:<11}"
    if "sent_forward" in row:
        text += f" sent {row['sent_forward'] / MIB:8.1f} + {row['sent_backward'] / MIB:8.1f} MiB"
        text += f" (plan {row['planned_forward'] / MIB:.1f} + {row['planned_backward'] / MIB:.1f},"
        text += f" {row['sent_forward'] / row['all_gather_forward']:.1%} of all-gather) "
    text += f" forward {row['forward_ms']:8.2f}  step {row['step_ms']:8.2f} ms"
    if "silent_step_ms" in row:
        exposed = row["step_ms"] - row["silent_step_ms"]
        text += f"  exposed {exposed:6.2f} ms ({exposed / row['step_ms']:.1%})  work {row['work']:.3f}"
    return text + (f"  {row['speed_up']:.2f} x one GPU" if "speed_up" in row else "")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seq-lengths", default="32768,131072")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--local-tokens", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=16)
    parser.add_argument("--dense-heads", type=int, default=0)
    parser.add_argument("--exchanges", default=",".join(COMM_TYPES))
    parser.add_argument("--te-exchanges", default="", help="e.g. p2p,all_gather,a2a: also Transformer Engine's dense attention")
    parser.add_argument("--backend", default="auto", help="auto: the fastest kernels for each call, which one GPU may have and several not")
    parser.add_argument("--keep-received", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    bench = Bench(args, dist.group.WORLD, device)
    first = dist.get_rank() == 0
    rows = []
    if first:
        card = torch.cuda.get_device_name() if on_gpu else "CPU"
        print(f"{dist.get_world_size()} ranks, {card}, torch {torch.__version__}, {args.heads}/{args.kv_heads} heads of {args.head_dim}, "
              f"{bench.pattern.describe()}, blocks of {args.block}, {str(bench.dtype)[6:]}", flush=True)
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
        if first and alone:
            print(f"{tokens:>8}  one GPU     forward {alone[0]:8.2f}  step {alone[1]:8.2f} ms", flush=True)
        for comm_type in exchanges:
            rows.append(bench.measure(comm_type, tokens, alone))
            if first:
                print(line_of(rows[-1]), flush=True)
        for comm_type in filter(None, args.te_exchanges.split(",")):
            rows.append(bench.transformer_engine(comm_type, tokens))
            if first:
                print(line_of(rows[-1]), flush=True)
    if first and args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(json.dumps(dict(device=card, torch=torch.__version__, settings=settings, rows=rows), indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
