"""What `sparse` would take on more ranks, from what was measured on fewer: for tables whose GPUs cannot be had. Marked
"predicted" everywhere.

Measured are, on fewer ranks, one GPU's time for the whole sequence, the step with its communication, without it, and
with links that carry next to nothing, and one exchange alone; and what each rank of both numbers computes, one after
another on one GPU beside the whole sequence (each_rank.py). Then

silent      what the slowest rank computes, as a share of one GPU's time, times what the measured ranks took together without communication over
            their slowest rank's by itself: cards that wait for each other, and are not equally fast (and, where the
            rows are of different code, what that changed)
links       what a step loses when links between GPUs are used for next to nothing, as a share of it: the clock's loss, which does not grow with
            the bytes. Unknown in rows of older code, where it counts as exposed
exposed     what transfers take, at the rate of the exchange measured alone, beyond the attention that could be beside them if all heads went
            twice: K and V in the forward beside the own keys' part; K and V again beside the own part of dQ; returned
            gradients beside the received keys' part of dQ. And what was exposed when measured, beyond what links cost,
            in proportion to the bytes, but no more than transfers take

Links between GPUs are taken to be as fast as the measured ones: true of GPUs of one host behind a switch, not across
hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from s2_megatron.context_parallel.plan import (
    LayerCosts,
    block_pairs,
    check_block_count,
    layer_costs,
    rank_pairs,
    zigzag_blocks,
)
from s2_megatron.patterns.ranges import Pattern

SHARE_OF_DQ = 6 / 14  # of the FLOPs of a backward in two kernels, 6 D a pair of 14 D


@dataclass(frozen=True)
class Layer:
    """One attention layer and its sequence. keep_received, head_dim, itemsize: as in cp_plan.layer_costs."""

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
            f"what each of {ranks} ranks computes of {tokens} tokens is not known; measure it with benchmarks/each_rank.py"
        )
    return max(found.values())


def predict(rows: list[dict], each: list[dict], layer: Layer, ranks: int, link: float | None = None) -> dict:
    """The row of `sparse` on `ranks` ranks, from the measured rows of the same length and from what each rank computes
    (rows of each_rank.py). link: GB a second that a rank receives, None for as many as were measured. Raises ValueError
    where what it takes is missing, and for lengths that cannot be cut."""
    rows = [row for row in rows if row["tokens"] == layer.tokens and not row.get("predicted")]
    base = next((row for row in rows if row["exchange"] == "sparse" and "one_gpu_step_ms" in row), None)
    if base is None:
        raise ValueError(f"no row of sparse at {layer.tokens} tokens beside one GPU's time; add it to --exchanges")
    if base["transport"] != "copies":
        raise ValueError(
            "the row of sparse is by a collective, and each_rank.py times what ranks compute beside copies; take rows by copies"
        )
    if link is None and base.get("transfer_ms", 0) <= 0:
        raise ValueError(
            "the rate of the exchange is not known: the row of sparse has no transfer_ms above 0; measure again, or give --link"
        )
    rate = base["sent_forward"] / base["transfer_ms"] if link is None else link * 1e6
    before, after = layer.costs(base["ranks"]), layer.costs(ranks)
    pairs = int(rank_pairs(layer.pattern, 1, layer.tokens // layer.pattern.block_size)[0])
    repeated = 0 if layer.keep_received else 1

    def transfers(costs: LayerCosts) -> list[float]:
        """ms of K and V, of K and V once more, of what is returned."""
        there, back = max(costs.sent_forward), max(costs.sent_backward)
        return [there / rate, there * repeated / rate, (back - there * repeated) / rate]

    def part(kind: str, passes: int) -> tuple[float, float, float]:
        """(silent, with links that are used, what was exposed beside that) of `kind`, in ms, for so many ranks. passes:
        of `transfers`, how many it has."""
        # A step that sends more cannot be the faster one: where it was, its time is the better estimate of both.
        awake = min(base.get(f"awake_{kind}_ms", base[f"silent_{kind}_ms"]), base[f"{kind}_ms"])
        silent = min(base[f"silent_{kind}_ms"], awake)
        shares = [slowest_share(each, layer.tokens, number, kind) for number in (base["ranks"], ranks)]
        taken = [sum(transfers(costs)[:passes]) for costs in (before, after)]
        grown = shares[1] / shares[0]
        return silent * grown, awake * grown, min(base[f"{kind}_ms"] - awake, taken[0]) / taken[0] * taken[1]

    (forward_silent, forward_awake, forward_exposed), (silent, awake, exposed) = part("forward", 1), part("step", 3)
    share, own = max(after.pairs) / pairs, layer.own_share(ranks)
    forward_work, work = (base[f"one_gpu_{kind}_ms"] * share for kind in ("forward", "step"))
    backward_work = work - forward_work
    hidden = own * forward_work, own * backward_work * SHARE_OF_DQ, (1 - own) * backward_work * SHARE_OF_DQ
    waits = [max(0.0, transfer - beside) for transfer, beside in zip(transfers(after), hidden)]
    forward_exposed, exposed = forward_exposed + waits[0], exposed + sum(waits)
    forward, backward = max(after.sent_forward), max(after.sent_backward)
    known = dict(awake_forward_ms=forward_awake, awake_step_ms=awake) if "awake_step_ms" in base else {}
    return known | dict(
        exchange="sparse", tokens=layer.tokens, ranks=ranks, predicted=True, measured_ranks=base["ranks"], sent_forward=forward,
        sent_backward=backward, planned_forward=forward, planned_backward=backward,
        all_gather_forward=max(layer.costs(ranks, "all_gather").sent_forward), forward_ms=forward_awake + forward_exposed,
        step_ms=awake + exposed, silent_forward_ms=forward_silent, silent_step_ms=silent, work=after.balance,
        transport=base["transport"], work_ms=work, overhead_ms=silent - work, transfers_ms=transfers(after), beside_ms=list(hidden),
        link_gb_per_s=rate / 1e6, own_share=own, one_gpu_forward_ms=base["one_gpu_forward_ms"], one_gpu_step_ms=base["one_gpu_step_ms"],
        speed_up=base["one_gpu_step_ms"] / (awake + exposed),
    )  # fmt: skip


def explained(row: dict) -> str:
    """A line below the row's, with what it was made of."""
    transfers = " + ".join(f"{time:.2f}" for time in row["transfers_ms"])
    beside = " + ".join(f"{time:.2f}" for time in row["beside_ms"])
    silent, awake = row["silent_step_ms"], row.get("awake_step_ms")
    exposed = f"exposed {row['step_ms'] - silent:.2f}"
    if awake is not None:
        exposed = f"links {awake - silent:.2f} + waiting {row['step_ms'] - awake:.2f}"
    return (
        f"          from {row['measured_ranks']} ranks: work {row['work_ms']:.2f} + overhead {row['overhead_ms']:.2f} + {exposed} ms; "
        f"transfers {transfers} ms at {row['link_gb_per_s']:.3g} GB/s beside {beside} ms of attention"
    )
