"""The attention of comm type `sparse`: what a rank computes before and after the blocks of other ranks come, with autograd.

To attend the rank's own keys first and to continue with what came hides the exchange, but visits every query tile twice. Where the kernels take
keys from two tensors (joins_keys), only so many KV heads do that as it takes (cp_plan.heads_beside): the first ones. The others attend all keys
at once afterwards, from where they lie.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from s2_megatron.attention import (
    attention_backward_dkdv,
    attention_backward_dq,
    attention_delta,
    attention_forward,
    empty_lse,
    joins_keys,
)
from s2_megatron.cp_copies import peer_copies
from s2_megatron.cp_exchange import BlockExchange, slot_views
from s2_megatron.cp_plan import ExchangePlan, heads_beside
from s2_megatron.cp_transport import COPY_RATE, LINK_RATE, NETWORK_RATE, one_host
from s2_megatron.layout import Placement
from s2_megatron.patterns import Pattern

FORWARD_PRODUCTS, QUERY_GRADIENT_PRODUCTS = 2, 3  # matmuls of a tile


class SparseState(NamedTuple):
    """What the calls of one length and device share."""

    layout: object
    exchange: BlockExchange
    rate: float  # bytes a second that a rank receives
    own: Placement  # this rank's queries and keys
    received: Placement | None  # its queries, and where received blocks lie; None when there are none
    joined: Placement | None  # its queries, its keys, and from own_slots on the received blocks

    @classmethod
    def make(cls, layout, plan: ExchangePlan, group, device, transport: str = "auto") -> SparseState:
        copies = peer_copies(group, device, transport)
        rate = COPY_RATE if copies is not None else LINK_RATE if one_host(group) else NETWORK_RATE
        return cls(layout, BlockExchange(plan, group, device, copies), rate, *place(plan, layout.pattern, device))

    def heads_first(self, head_dim: int, itemsize: int, products: int) -> int:
        """KV heads that attend own keys while the blocks are on their way, if the kernels join keys. products: matmuls of a tile."""
        return heads_beside(self.layout.pattern, self.exchange.plan, head_dim, itemsize, products, self.rate)

    def read_by_kernels(self, head_dim: int, itemsize: int, keep_received: bool) -> list[Placement]:
        """Those whose lists calls will ask for, where the kernels join keys."""
        if self.received is None:
            return [self.own]
        first = (self.heads_first(head_dim, itemsize, products) for products in (FORWARD_PRODUCTS, QUERY_GRADIENT_PRODUCTS))
        rest = keep_received or min(first) < self.layout.num_kv_heads
        return [self.own, self.received, *([self.joined] if rest else [])]


def place(plan: ExchangePlan, pattern: Pattern, device) -> tuple[Placement, Placement | None, Placement | None]:
    """(own, received, joined) of a SparseState."""

    def placed(slots, own_slots=None):
        return Placement.make(plan.query_blocks, plan.n_blocks, slots, device, pattern, own_slots=own_slots)

    own, n_own = placed(plan.local_slot), len(plan.query_blocks)
    if not plan.received_slots:
        return own, None, None
    return own, placed(plan.remote_slot), placed(np.where(plan.remote_slot < 0, plan.local_slot, plan.remote_slot + n_own), n_own)


class _Heads:
    """The KV heads that visit their tiles twice, the first ones, and the others. first: how many those are."""

    def __init__(self, query, key, first: int):
        groups = key.shape[2]
        self.first, self.rest = first > 0, first < groups
        # None: all of them, which is all that other kernels compute.
        self.first_heads, self.rest_heads = ((0, first), (first, groups)) if 0 < first < groups else (None, None)
        self._shape = (*query.shape[:2], query.shape[2] // groups * first, query.shape[3])
        self._query = query

    def partial(self) -> torch.Tensor:
        """For what the first heads get from their own keys, which is rounded after the received ones."""
        return self._query.new_empty(self._shape, dtype=torch.promote_types(self._query.dtype, torch.float32))


def _heads(query, key, value, slots, joined, state: SparseState, products: int) -> _Heads:
    """products: matmuls of a tile that run beside an exchange, 0 where there is none."""
    if state.received is None or not joins_keys(query, key, value, slots, joined):
        return _Heads(query, key, key.shape[2])
    return _Heads(query, key, state.heads_first(query.shape[3], query.itemsize, products) if products else 0)


class SparseAttention(torch.autograd.Function):
    """call: an AttentionCall without a placement. state: a SparseState. keep_received: save what was received for the backward. known: (out,
    LSE) where they have been computed before; nothing is then sent or computed before the backward. Returns (out, LSE), LSE without a gradient.
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
    own, received, joined = (call._replace(placement=placement) for placement in (state.own, state.received, state.joined))
    pending = state.exchange.start(key, value, call.backend)
    slots = slot_views(pending.received, key.shape[2])
    heads = _heads(query, key, value, slots, joined, state, FORWARD_PRODUCTS)
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device), empty_lse(query, call.tensor_format)
    # Where nothing is received, the own keys' part is the result.
    early = result if state.received is None else (heads.partial(), result[1])
    if heads.first:
        attention_forward(query, key, value, own, kv_heads=heads.first_heads, into=early)
    pending.result()
    if heads.first and state.received is not None:
        attention_forward(query, *slots, received, initial=early, kv_heads=heads.first_heads, into=result)
    if heads.rest:
        attention_forward(query, key, value, joined, kv_heads=heads.rest_heads, more=slots, into=result)
    kept = (pending.kept(),) if keep_received else ()
    pending.release()
    return *result, *kept


def gradients(grad_out, query, key, value, out, lse, *kept, call, state):
    """(dQ, dK, dV). kept: the received blocks, where they were saved; then no head goes twice where the kernels join keys."""
    exchange, groups = state.exchange, key.shape[2]
    own, received, joined = (call._replace(placement=placement) for placement in (state.own, state.received, state.joined))
    # Enqueued first: it comes while delta and the first heads' part of dQ are computed.
    pending = None if kept else exchange.start(key, value, call.backend)
    buffer = kept[0] if kept else pending.received
    slots, slot_gradients = slot_views(buffer, groups), torch.empty_like(buffer)
    heads = _heads(query, key, value, slots, joined, state, 0 if kept else QUERY_GRADIENT_PRODUCTS)
    row_sums = attention_delta(grad_out, out, lse, own)
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    early = grad_query if state.received is None else heads.partial()
    shared = (grad_out, query)
    if heads.first:
        attention_backward_dq(*shared, key, value, lse, row_sums, own, kv_heads=heads.first_heads, into=early)
    if pending is not None:
        pending.result()
    if state.received is not None:
        attention_backward_dkdv(*shared, *slots, lse, row_sums, *slot_views(slot_gradients, groups), received)
    returning = exchange.start_return(slot_gradients)
    if heads.first and state.received is not None:
        attention_backward_dq(*shared, *slots, lse, row_sums, received, initial=early, kv_heads=heads.first_heads, into=grad_query)
    if heads.rest:
        attention_backward_dq(*shared, key, value, lse, row_sums, joined, kv_heads=heads.rest_heads, more=slots, into=grad_query)
    if pending is not None:
        pending.release()
    grads = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (key, value))
    returned = exchange.returned(returning.result())
    attention_backward_dkdv(*shared, key, value, lse, row_sums, *grads, own, returned)
    returning.release()
    return grad_query, *grads
