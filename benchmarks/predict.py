"""What `sparse` would take on more ranks, from what was measured on fewer: for tables whose GPUs cannot be had. Marked
"predicted" everywhere. No GPU needed.

    python benchmarks/predict.py --ranks 8 --rows cp4.json --each-rank each_rank.json

Measured are, on fewer ranks, one GPU's time for the whole sequence, the step with its communication and with
communication disabled, and one exchange alone (the rows of context_parallel.py); and what each rank of both numbers
computes, one after another on one GPU beside the whole sequence (the rows of each_rank.py). Then

no comm    what the slowest rank computes, as a share of one GPU's time, times what the measured ranks took together
           with communication disabled over their slowest rank's by itself: GPUs that wait for each other, and are not
           equally fast (and, where the rows are of different code, what that changed)
exposed    what transfers take, at the rate of the exchange measured alone, beyond the attention that could be beside
           them if all heads were computed in two passes: K and V in the forward beside the own keys' part; K and V
           again beside the own part of dQ; returned gradients beside the received keys' part of dQ. And what was
           exposed when measured, in proportion to the bytes, but no more than transfers take

The interconnect is taken to be as fast as the measured one: true of GPUs of one host behind a switch, not across hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import report
from benchmarks.one_layer import LAYER, line_of, pattern_of
from s2_megatron.context_parallel.plan import (
    LayerCosts,
    block_pairs,
    check_block_count,
    layer_costs,
    rank_pairs,
    zigzag_blocks,
)
from s2_megatron.patterns.ranges import Pattern
from s2_megatron.tools.commands import CommandParser

SHARE_OF_DQ = 6 / 14  # of the FLOPs of a backward in two kernels, 6 D a pair of 14 D


@dataclass(frozen=True)
class Layer:
    """One attention layer and its sequence. keep_received, head_dim, itemsize: as in plan.layer_costs."""

    pattern: Pattern
    tokens: int
    head_dim: int
    itemsize: int
    keep_received: bool = False

    def costs(self, ranks: int, exchange: str = "sparse") -> LayerCosts:
        return layer_costs(
            self.pattern,
            ranks,
            self.tokens,
            exchange,
            head_dim=self.head_dim,
            itemsize=self.itemsize,
            keep_received=self.keep_received,
        )

    def own_share(self, ranks: int) -> float:
        """Of the pairs, those whose key the query's rank holds; of the rank with the smallest share. By whole
        blocks."""
        n_blocks = check_block_count(self.tokens, ranks, self.pattern.block_size)
        shares = []
        for rank in range(ranks):
            own, held = zigzag_blocks(rank, ranks, n_blocks), np.zeros(n_blocks, dtype=bool)
            held[own] = True
            shares.append(
                block_pairs(self.pattern, own, held).sum() / block_pairs(self.pattern, own, np.ones_like(held)).sum()
            )
        return float(min(shares))


def slowest_share(each: list[dict], tokens: int, ranks: int, kind: str) -> float:
    """Of one GPU's time for the whole sequence, what the slowest of the ranks computes. kind: forward or step. Raises
    ValueError."""
    found = {
        row["rank"]: row[f"{kind}_ms"] / row[f"one_gpu_{kind}_ms"]
        for row in each
        if (row["tokens"], row["ranks"]) == (tokens, ranks)
    }
    if sorted(found) != list(range(ranks)):
        raise ValueError(
            f"what each of {ranks} ranks computes of {tokens} tokens is not known; measure it with "
            "benchmarks/each_rank.py"
        )
    return max(found.values())


def predict(rows: list[dict], each: list[dict], layer: Layer, ranks: int, rate_gb: float | None = None) -> dict:
    """The row of `sparse` on `ranks` ranks, from the measured rows of the same length and from what each rank computes
    (rows of each_rank.py). rate_gb: GB a second that a rank receives, None for as many as were measured. Raises
    ValueError where what it takes is missing, and for lengths that cannot be cut."""
    rows = [row for row in rows if row["tokens"] == layer.tokens]
    base = next((row for row in rows if row["exchange"] == "sparse" and "one_gpu_step_ms" in row), None)
    if base is None:
        raise ValueError(f"no row of sparse at {layer.tokens} tokens beside one GPU's time; add it to --exchanges")
    if rate_gb is None and base.get("transfer_ms", 0) <= 0:
        raise ValueError(
            "the rate of the exchange is not known: the row of sparse has no transfer_ms above 0; measure again, or "
            "give --rate"
        )
    rate = base["sent_forward"] / base["transfer_ms"] if rate_gb is None else rate_gb * 1e6  # bytes a ms
    before, after = layer.costs(base["ranks"]), layer.costs(ranks)
    pairs = int(rank_pairs(layer.pattern, 1, layer.tokens // layer.pattern.block_size)[0])
    repeated = 0 if layer.keep_received else 1

    def transfers(costs: LayerCosts) -> list[float]:
        """ms of K and V, of K and V once more, of what is returned."""
        there, back = max(costs.sent_forward), max(costs.sent_backward)
        return [there / rate, there * repeated / rate, (back - there * repeated) / rate]

    def part(kind: str, passes: int) -> tuple[float, float]:
        """(with communication disabled, what was exposed beside that) of `kind`, in ms, for so many ranks. passes: of
        `transfers`, how many it has."""
        # A step that sends more cannot be the faster one: where it was, its time is the better estimate of both.
        no_comm = min(base[f"no_comm_{kind}_ms"], base[f"{kind}_ms"])
        shares = [slowest_share(each, layer.tokens, number, kind) for number in (base["ranks"], ranks)]
        taken = [sum(transfers(costs)[:passes]) for costs in (before, after)]
        return no_comm * shares[1] / shares[0], min(base[f"{kind}_ms"] - no_comm, taken[0]) / taken[0] * taken[1]

    (forward_no_comm, forward_exposed), (no_comm, exposed) = part("forward", 1), part("step", 3)
    share, own = max(after.pairs) / pairs, layer.own_share(ranks)
    forward_work, work = (base[f"one_gpu_{kind}_ms"] * share for kind in ("forward", "step"))
    backward_work = work - forward_work
    hidden = own * forward_work, own * backward_work * SHARE_OF_DQ, (1 - own) * backward_work * SHARE_OF_DQ
    waits = [max(0.0, transfer - beside) for transfer, beside in zip(transfers(after), hidden)]
    forward_exposed, exposed = forward_exposed + waits[0], exposed + sum(waits)
    forward, backward = max(after.sent_forward), max(after.sent_backward)
    return dict(
        exchange="sparse",
        tokens=layer.tokens,
        ranks=ranks,
        predicted=True,
        measured_ranks=base["ranks"],
        sent_forward=forward,
        sent_backward=backward,
        planned_forward=forward,
        planned_backward=backward,
        all_gather_forward=max(layer.costs(ranks, "all_gather").sent_forward),
        forward_ms=forward_no_comm + forward_exposed,
        step_ms=no_comm + exposed,
        no_comm_forward_ms=forward_no_comm,
        no_comm_step_ms=no_comm,
        work=after.balance,
        work_ms=work,
        overhead_ms=no_comm - work,
        transfers_ms=transfers(after),
        beside_ms=list(hidden),
        rate_gb_per_s=rate / 1e6,
        own_share=own,
        one_gpu_forward_ms=base["one_gpu_forward_ms"],
        one_gpu_step_ms=base["one_gpu_step_ms"],
        speed_up=base["one_gpu_step_ms"] / (no_comm + exposed),
    )


def explained(row: dict) -> str:
    """A line below the row's, with what it was made of."""
    transfers = " + ".join(f"{time:.2f}" for time in row["transfers_ms"])
    beside = " + ".join(f"{time:.2f}" for time in row["beside_ms"])
    return (
        f"          from {row['measured_ranks']} ranks: work {row['work_ms']:.2f} + overhead {row['overhead_ms']:.2f} "
        f"+ exposed {row['step_ms'] - row['no_comm_step_ms']:.2f} ms; transfers {transfers} ms at "
        f"{row['rate_gb_per_s']:.3g} GB/s beside {beside} ms of attention"
    )


def predictions(measured: dict, each: dict, ranks: int, lengths: list[int] | None, rate_gb: float | None) -> list[dict]:
    """The predicted row of every length of the rows, printed, or why there is none. measured, each: JSONs of
    context_parallel.py and each_rank.py. lengths: None for all. Raises ValueError where there is none at all."""
    settings, beside = (dict(window=None, sink_tokens=0) | rows["settings"] for rows in (measured, each))
    if settings["two_pass_heads"] is not None:
        raise ValueError("the rows were measured with --two-pass-heads, and each rank's without; measure without it")
    if settings.get("documents"):
        raise ValueError("the rows were measured with --documents, for which nothing is predicted; measure without it")
    named = [("GPU", measured["hardware"]["gpu"], each["hardware"]["gpu"])]
    named += [(name, settings[name], beside[name]) for name in (*LAYER, "backend")]
    for name, ours, theirs in named:
        if ours != theirs:
            raise ValueError(
                f"{name} is {ours} in the rows, and {theirs} in those of each rank; expected the same; measure that "
                "with benchmarks/each_rank.py, and name it with --each-rank"
            )
    itemsize, found, problems = getattr(torch, measured["dtype"]).itemsize, [], []
    for tokens in dict.fromkeys(row["tokens"] for row in measured["rows"]):
        if lengths is not None and tokens not in lengths:
            continue
        pattern = pattern_of(argparse.Namespace(**settings))
        layer = Layer(pattern, tokens, settings["head_dim"], itemsize, settings["keep_received"])
        try:
            found.append(predict(measured["rows"], each["rows"], layer, ranks, rate_gb))
        except ValueError as problem:
            problems.append(f"{tokens} tokens: {problem}")
            continue
        print(f"{line_of(found[-1])}\n{explained(found[-1])}", flush=True)
    if not found:
        raise ValueError("; ".join(problems) or f"no row has one of the lengths {lengths}")
    for problem in problems:
        print(f"not predicted: {problem}", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, required=True, help="to predict for")
    parser.add_argument("--rows", type=Path, required=True, metavar="JSON", help="of context_parallel.py")
    parser.add_argument("--each-rank", type=Path, required=True, metavar="JSON", help="of each_rank.py")
    parser.add_argument("--seq-lengths", help="default: those of the rows")
    parser.add_argument("--rate", type=float, metavar="GB/S", help="what a rank receives, instead of the measured rate")
    parser.add_argument("--json", type=Path, help="write the rows, and the files that they are from")
    args = parser.parse_args(arguments)
    lengths = None if args.seq_lengths is None else [int(length) for length in args.seq_lengths.split(",")]
    sources = [os.path.relpath(path) for path in (args.rows, args.each_rank)]
    try:
        measured, each = (json.loads(path.read_text()) for path in (args.rows, args.each_rank))
        for path, content in zip(sources, (measured, each)):
            print(f"from {path}: {content['hardware']['gpu']}, commit {content['commit']}")
        rows = predictions(measured, each, args.ranks, lengths, args.rate)
    except (OSError, ValueError) as problem:
        parser.exit(2, f"error: {problem}\n")
    except KeyError as problem:
        parser.exit(
            2,
            f"error: {' or '.join(sources)} lacks {problem}; expected rows of the present scripts; measure again with "
            "benchmarks/context_parallel.py and benchmarks/each_rank.py\n",
        )
    if args.json:
        report.write_json(args.json, dict(sources=sources, rows=rows))


if __name__ == "__main__":
    main()
