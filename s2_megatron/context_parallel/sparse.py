"""The attention of comm type `sparse`: what a rank computes before and after the blocks of other ranks come, with
autograd.

To attend the rank's own keys first and to continue with what came hides the exchange, but visits every query tile
twice. Where the kernels take keys from two tensors (joins_keys), only so many KV heads do that as it takes
(cp_plan.heads_beside): the first ones. The others attend all keys at once afterwards, from where they lie. Blocks that
are copied come in two parts: those of a few early heads, the last ones, come first, and their attention hides what the
others wait for (cp_plan.early_heads). Fewer heads then go twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from s2_megatron.context_parallel.copies import peer_copies
from s2_megatron.context_parallel.exchange import BlockExchange, slot_views
from s2_megatron.context_parallel.plan import ExchangePlan, early_heads, heads_beside
from s2_megatron.context_parallel.transport import COPY_RATE, LINK_RATE, NETWORK_RATE, one_host
from s2_megatron.ops.api import (
    attention_backward_dkdv,
    attention_backward_dq,
    attention_delta,
    attention_forward,
    empty_lse,
    joins_keys,
)
from s2_megatron.ops.layout import Placement
from s2_megatron.patterns.ranges import Pattern

FORWARD_PRODUCTS, QUERY_GRADIENT_PRODUCTS = 2, 3  # matmuls of a tile


class SparseState(NamedTuple):
    """What the calls of one length and device share."""

    layout: object
    exchange: BlockExchange
    rate: float  # bytes a second that a rank receives
    own: Placement  # this rank's queries and keys
    received: Placement | None  # its queries, and where received blocks lie; None when there are none
    joined: Placement | None  # its queries, its keys, and from own_slots on the received blocks
    chosen: dict  # what heads() has found

    @classmethod
    def make(cls, layout, plan: ExchangePlan, group, device, transport: str = "auto") -> SparseState:
        copies = peer_copies(group, device, transport)
        rate = COPY_RATE if copies is not None else LINK_RATE if one_host(group) else NETWORK_RATE
        return cls(layout, BlockExchange(plan, group, device, copies), rate, *place(plan, layout.pattern, device), {})

    def heads(self, head_dim: int, itemsize: int, products: int) -> tuple[int, int]:
        """(KV heads whose blocks come early, KV heads that attend own keys while those are on their way). products:
        matmuls of a tile.

        The first number is the same on all ranks, so it does not depend on what kernels make of it; the second is for
        those that join keys.
        """
        kind = head_dim, itemsize, products
        if kind not in self.chosen:
            call = self.layout.pattern, self.exchange.plan, *kind, self.rate
            early = early_heads(*call) if self.exchange.copies is not None else 0
            self.chosen[kind] = early, heads_beside(*call, early)
        return self.chosen[kind]

    def read_by_kernels(self, head_dim: int, itemsize: int, keep_received: bool) -> list[Placement]:
        """Those whose lists calls will ask for, where the kernels join keys."""
        if self.received is None:
            return [self.own]
        twice = [
            self.heads(head_dim, itemsize, products)[1] for products in (FORWARD_PRODUCTS, QUERY_GRADIENT_PRODUCTS)
        ]
        rest = keep_received or min(twice) < self.layout.num_kv_heads
        return [self.own, self.received, *([self.joined] if rest else [])]


def place(plan: ExchangePlan, pattern: Pattern, device) -> tuple[Placement, Placement | None, Placement | None]:
    """(own, received, joined) of a SparseState."""

    def placed(slots, own_slots=None):
        return Placement.make(plan.query_blocks, plan.n_blocks, slots, device, pattern, own_slots=own_slots)

    own, n_own = placed(plan.local_slot), len(plan.query_blocks)
    if not plan.received_slots:
        return own, None, None
    return (
        own,
        placed(plan.remote_slot),
        placed(np.where(plan.remote_slot < 0, plan.local_slot, plan.remote_slot + n_own), n_own),
    )


class _Heads:
    """The KV heads by how they attend: `twice` visit their query tiles for own keys and again for received ones;
    `early` attend all keys when their blocks have come, the `rest` when all have. Falsy: none; `ends` is what kernels
    take of them."""

    def __init__(self, query, key, early: int, twice: int):
        groups = key.shape[2]
        assert early + twice <= groups, "a head is one or the other"
        self.twice, self.rest, self.early = range(twice), range(twice, groups - early), range(groups - early, groups)
        self._groups, self._query = groups, query

    def ends(self, heads: range) -> tuple[int, int] | None:
        """None: all of them, which is all that other kernels compute."""
        return None if len(heads) == self._groups else (heads.start, heads.stop)

    def partial(self) -> torch.Tensor:
        """For what the heads that go twice get from their own keys, which is rounded after the received ones."""
        query = self._query
        shape = *query.shape[:2], query.shape[2] // self._groups * len(self.twice), query.shape[3]
        return query.new_empty(shape, dtype=torch.promote_types(query.dtype, torch.float32))


def _heads(query, key, value, slots, joined, state: SparseState, chosen: tuple[int, int]) -> _Heads:
    """chosen: early heads, and those that go twice where the kernels join keys."""
    if state.received is None or not joins_keys(query, key, value, slots, joined):
        return _Heads(query, key, 0, key.shape[2])
    return _Heads(query, key, *chosen)


class SparseAttention(torch.autograd.Function):
    """call: an AttentionCall without a placement. state: a SparseState. keep_received: save what was received for the
    backward. known: (out, LSE) where they have been computed before; nothing is then sent or computed before the
    backward. Returns (out, LSE), LSE without a gradient.
    """

    @staticmethod
    def forward(ctx, query, key, value, call, state, keep_received, known):
        ctx.call, ctx.state = call, state
        out, lse, *received = known if known is not None else compute(query, key, value, call, state, keep_received)
        ctx.save_for_backward(query, key, value, out, lse, *received)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, _):
        return *gradients(grad_out, *ctx.saved_tensors, call=ctx.call, state=ctx.state), None, None, None, None


def compute(query, key, value, call, state, keep_received=False):
    """(out, LSE), and the received blocks where they are to be kept."""
    own, received, joined = (
        call._replace(placement=placement) for placement in (state.own, state.received, state.joined)
    )
    chosen = state.heads(query.shape[3], query.itemsize, FORWARD_PRODUCTS)
    pending = state.exchange.start(key, value, call.backend, chosen[0])
    slots = slot_views(pending.received, key.shape[2])
    heads = _heads(query, key, value, slots, joined, state, chosen)
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device), empty_lse(query, call.tensor_format)
    # Where nothing is received, the own keys' part is the result.
    partial = result if state.received is None else (heads.partial(), result[1])

    def attend_all(some):
        if some:
            attention_forward(query, key, value, joined, kv_heads=heads.ends(some), more=slots, into=result)

    if heads.twice:
        attention_forward(query, key, value, own, kv_heads=heads.ends(heads.twice), into=partial)
    pending.early()
    attend_all(heads.early)
    pending.result()
    if heads.twice and state.received is not None:
        attention_forward(query, *slots, received, initial=partial, kv_heads=heads.ends(heads.twice), into=result)
    attend_all(heads.rest)
    kept = (pending.kept(),) if keep_received else ()
    pending.release()
    return *result, *kept


def gradients(grad_out, query, key, value, out, lse, *kept, call, state):
    """(dQ, dK, dV). kept: the received blocks, where they were saved; then no head goes twice where the kernels join
    keys."""
    exchange, groups = state.exchange, key.shape[2]
    own, received, joined = (
        call._replace(placement=placement) for placement in (state.own, state.received, state.joined)
    )
    chosen = (0, 0) if kept else state.heads(query.shape[3], query.itemsize, QUERY_GRADIENT_PRODUCTS)
    # Enqueued first: it comes while delta and parts of dQ are computed.
    pending = None if kept else exchange.start(key, value, call.backend, chosen[0])
    buffer = kept[0] if kept else pending.received
    slots, slot_gradients = slot_views(buffer, groups), torch.empty_like(buffer)
    heads = _heads(query, key, value, slots, joined, state, chosen)
    row_sums = attention_delta(grad_out, out, lse, own)
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    partial = grad_query if state.received is None else heads.partial()
    shared = (grad_out, query)

    def attend_all(some):
        if some:
            attention_backward_dq(
                *shared, key, value, lse, row_sums, joined, kv_heads=heads.ends(some), more=slots, into=grad_query
            )

    if heads.twice:
        attention_backward_dq(*shared, key, value, lse, row_sums, own, kv_heads=heads.ends(heads.twice), into=partial)
    if pending is not None:
        pending.early()
        attend_all(heads.early)
        pending.result()
    if state.received is not None:
        attention_backward_dkdv(*shared, *slots, lse, row_sums, *slot_views(slot_gradients, groups), received)
    returning = exchange.start_return(slot_gradients)
    if heads.twice and state.received is not None:
        attention_backward_dq(
            *shared, *slots, lse, row_sums, received, initial=partial, kv_heads=heads.ends(heads.twice), into=grad_query
        )
    attend_all(heads.rest)
    if pending is not None:
        pending.release()
    grads = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (key, value))
    returned = exchange.returned(returning.result())
    attention_backward_dkdv(*shared, key, value, lse, row_sums, *grads, own, returned)
    returning.release()
    return grad_query, *grads
