"""What `sparse` would take on more ranks, from what was measured on fewer: for tables whose GPUs cannot be had. Marked "predicted" everywhere.

Measured are one GPU's time for the whole sequence, the step with and without its communication, and one exchange alone. Counted, from the
plans of both numbers of ranks, are (query, key) pairs, bytes that travel, and bytes of partial results. Then

work        one GPU's time times the busiest rank's share of the pairs, those with keys of its own and those with received ones alike
overhead    the second visit of the first heads (cp_plan.heads_beside: on more ranks more heads take it), by the bytes of their partial
            results; and what else the silent step took beyond its work, in proportion to the bytes that travel, which are packed and added
            (where that is negative: in proportion to the work)
exposed     what transfers take, at the rate of the exchange measured alone, beyond the attention that could be beside them if all heads went
            twice: K and V in the forward beside the own keys' part; K and V again beside the own part of dQ; returned gradients beside the
            received keys' part of dQ. And what was exposed when measured, in proportion to the bytes

Links between GPUs are taken to be as fast as the measured ones: true of GPUs of one host behind a switch, not across hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from s2_megatron.cp_plan import (
    LayerCosts,
    block_pairs,
    check_block_count,
    heads_beside,
    layer_costs,
    make_plan,
    rank_pairs,
    zigzag_blocks,
)
from s2_megatron.cp_sparse import FORWARD_PRODUCTS, QUERY_GRADIENT_PRODUCTS
from s2_megatron.cp_transport import COPY_RATE, LINK_RATE
from s2_megatron.patterns import Pattern

RATES = {"copies": COPY_RATE, "collective": LINK_RATE}  # by which heads are chosen, not by what is measured
SHARE_OF_DQ = 6 / 14  # of the FLOPs of a backward in two kernels, 6 D a pair of 14 D
SECOND_VISIT = 3.3e9  # bytes of partial results a ms, written and read: 128K on four H200s, --first-heads 32 against 13 and 9 (NOTES.md)


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
            self.pattern, ranks, self.tokens, exchange, head_dim=self.head_dim, itemsize=self.itemsize, keep_received=self.keep_received
        )

    def partial(self, ranks: int, transport: str) -> tuple[int, int]:
        """Bytes of partial results of the forward and of the backward, out and dQ of the first heads in fp32, written and read once; of the
        rank with the most of them."""
        n_blocks = check_block_count(self.tokens, ranks, self.pattern.block_size)
        plans = [make_plan(self.pattern, rank, ranks, n_blocks) for rank in range(ranks)]

        def moved(products: int) -> int:
            first = max(heads_beside(self.pattern, plan, self.head_dim, self.itemsize, products, RATES[transport]) for plan in plans)
            return 2 * 4 * first * self.pattern.num_heads // self.pattern.num_kv_heads * self.head_dim * self.tokens // ranks

        return moved(FORWARD_PRODUCTS), 0 if self.keep_received else moved(QUERY_GRADIENT_PRODUCTS)

    def own_share(self, ranks: int) -> float:
        """Of the pairs, those whose key the query's rank holds; of the rank with the smallest share. By whole blocks."""
        n_blocks = check_block_count(self.tokens, ranks, self.pattern.block_size)
        shares = []
        for rank in range(ranks):
            own, held = zigzag_blocks(rank, ranks, n_blocks), np.zeros(n_blocks, dtype=bool)
            held[own] = True
            shares.append(block_pairs(self.pattern, own, held).sum() / block_pairs(self.pattern, own, np.ones_like(held)).sum())
        return float(min(shares))


def predict(rows: list[dict], layer: Layer, ranks: int) -> dict:
    """The row of `sparse` on `ranks` ranks, from the measured rows of the same length. Raises ValueError where one is missing, and for lengths
    that cannot be cut."""
    rows = [row for row in rows if row["tokens"] == layer.tokens and not row.get("predicted")]
    base = next((row for row in rows if row["exchange"] == "sparse" and "one_gpu_step_ms" in row), None)
    if base is None:
        raise ValueError(f"no row of sparse at {layer.tokens} tokens beside one GPU's time; add it to --exchanges")
    if base.get("transfer_ms", 0) <= 0:
        raise ValueError("the rate of the exchange is not known: the row of sparse has no transfer_ms, or none above 0; measure it again")
    rate, transport = base["sent_forward"] / base["transfer_ms"], base["transport"]
    before, after = layer.costs(base["ranks"]), layer.costs(ranks)
    pairs = int(rank_pairs(layer.pattern, 1, layer.tokens // layer.pattern.block_size)[0])
    forward, backward = max(after.sent_forward), max(after.sent_backward)
    repeated = 0 if layer.keep_received else forward
    partial_before, partial = layer.partial(base["ranks"], transport), layer.partial(ranks, transport)
    traffic = (forward + backward) / (base["sent_forward"] + base["sent_backward"])
    own = layer.own_share(ranks)

    def part(kind: str, passes: int) -> tuple[float, float, float]:
        """(work, overhead, what was exposed) of `kind`, forward or step, in ms; the last two scaled. passes: 1 or both of `partial`."""
        # A step that sends cannot be the faster one: where it was, its time is the better estimate of both.
        alone, silent = base[f"one_gpu_{kind}_ms"], min(base[f"silent_{kind}_ms"], base[f"{kind}_ms"])
        overhead, exposed = silent - alone * max(before.pairs) / pairs, base[f"{kind}_ms"] - silent
        other = overhead - sum(partial_before[:passes]) / SECOND_VISIT
        other *= traffic if other > 0 else max(after.pairs) / max(before.pairs)  # negative: it took less than its share of one GPU
        return alone * max(after.pairs) / pairs, sum(partial[:passes]) / SECOND_VISIT + other, max(0.0, exposed) * traffic

    (forward_work, forward_overhead, forward_exposed), (work, overhead, exposed) = part("forward", 1), part("step", 2)
    backward_work = work - forward_work
    hidden = own * forward_work, own * backward_work * SHARE_OF_DQ, (1 - own) * backward_work * SHARE_OF_DQ
    transfers = [sent / rate for sent in (forward, repeated, backward - repeated)]
    waits = [max(0.0, transfer - beside) for transfer, beside in zip(transfers, hidden)]
    forward_exposed, exposed = forward_exposed + waits[0], exposed + sum(waits)
    step = work + overhead + exposed
    return dict(
        exchange="sparse", tokens=layer.tokens, ranks=ranks, predicted=True, measured_ranks=base["ranks"], sent_forward=forward,
        sent_backward=backward, planned_forward=forward, planned_backward=backward,
        all_gather_forward=max(layer.costs(ranks, "all_gather").sent_forward), forward_ms=forward_work + forward_overhead + forward_exposed,
        step_ms=step, silent_forward_ms=forward_work + forward_overhead, silent_step_ms=work + overhead, work=after.balance,
        transport=transport, work_ms=work, overhead_ms=overhead, transfers_ms=transfers, beside_ms=list(hidden),
        link_gb_per_s=rate / 1e6, own_share=own, one_gpu_forward_ms=base["one_gpu_forward_ms"], one_gpu_step_ms=base["one_gpu_step_ms"],
        speed_up=base["one_gpu_step_ms"] / step,
    )  # fmt: skip


def explained(row: dict) -> str:
    """A line below the row's, with what it was made of."""
    transfers = " + ".join(f"{time:.2f}" for time in row["transfers_ms"])
    beside = " + ".join(f"{time:.2f}" for time in row["beside_ms"])
    exposed = row["step_ms"] - row["silent_step_ms"]
    return (
        f"          from {row['measured_ranks']} ranks: "
        f"work {row['work_ms']:.2f} + overhead {row['overhead_ms']:.2f} + exposed {exposed:.2f} ms; "
        f"transfers {transfers} ms at {row['link_gb_per_s']:.3g} GB/s beside {beside} ms of attention"
    )
