"""Comm type `sparse`: what a rank computes before and after the blocks of other ranks come, with autograd.

A KV head is computed in two passes when its queries attend the rank's own keys first, while the blocks travel, and
continue the same softmax over the received keys afterwards. That hides the exchange, but visits every query tile twice.
Where the kernels take keys from two tensors (joins_keys), only as many KV heads as it takes to hide the exchange are
computed in two passes (plan.heads_beside): the first ones. The others attend own and received keys in one pass, when
the blocks have come.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from s2_megatron.context_parallel.exchange import BlockExchange, receive_rate, slot_views
from s2_megatron.context_parallel.plan import ExchangePlan, heads_beside
from s2_megatron.ops.autograd import first_derivative
from s2_megatron.ops.layout import Placement
from s2_megatron.ops.offset import add_offset_, offset_gradient
from s2_megatron.ops.parts import (
    attention_backward_dkdv,
    attention_backward_dq,
    attention_delta,
    attention_forward,
    empty_lse,
    joins_keys,
)
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
    known: dict  # what two_pass_heads() has found

    @classmethod
    def make(cls, layout, plan: ExchangePlan, group, device) -> SparseState:
        return cls(
            layout, BlockExchange(plan, group, device), receive_rate(group), *place(plan, layout.pattern, device), {}
        )

    def two_pass_heads(self, head_dim: int, itemsize: int, products: int) -> int:
        """KV heads that are computed in two passes where the kernels join keys. products: matmuls of a tile."""
        kind = head_dim, itemsize, products
        if kind not in self.known:
            self.known[kind] = heads_beside(self.layout.pattern, self.exchange.plan, *kind, self.rate)
        return self.known[kind]

    def read_by_kernels(self, head_dim: int, itemsize: int, keep_received: bool) -> list[Placement]:
        """Those whose lists calls will ask for, where the kernels join keys."""
        if self.received is None:
            return [self.own]
        fewest = min(
            self.two_pass_heads(head_dim, itemsize, products)
            for products in (FORWARD_PRODUCTS, QUERY_GRADIENT_PRODUCTS)
        )
        one_pass = keep_received or fewest < self.layout.num_kv_heads
        return [self.own, self.received, *([self.joined] if one_pass else [])]


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
    """How many KV heads of a call are computed in two passes, the first ones, and in one pass, the others. two_pass,
    one_pass: those heads as the op's kv_heads, (first, end), None for all of them."""

    def __init__(self, query, key, value, slots, joined, state: SparseState, two_pass: int):
        """two_pass: KV heads in two passes where the kernels join keys; elsewhere it is all of them."""
        self._groups, self._query = key.shape[2], query
        one_pass_possible = state.received is not None and joins_keys(query, key, value, slots, joined)
        self.n_two_pass = two_pass if one_pass_possible else self._groups
        self.n_one_pass = self._groups - self.n_two_pass
        self.two_pass = (0, self.n_two_pass) if self.n_one_pass else None
        self.one_pass = (self.n_two_pass, self._groups) if self.n_two_pass else None

    def partial(self) -> torch.Tensor:
        """For what the heads in two passes get from their own keys, which is rounded after the received ones."""
        query = self._query
        shape = *query.shape[:2], query.shape[2] // self._groups * self.n_two_pass, query.shape[3]
        return query.new_empty(shape, dtype=torch.promote_types(query.dtype, torch.float32))


class SparseAttention(torch.autograd.Function):
    """offset: of the softmax, [H] or None. call: an AttentionCall without a placement. state: a SparseState.
    keep_received: save what was received for the backward. known: (out, LSE) where they have been computed before;
    nothing is then sent or computed before the backward. Returns (out, LSE), LSE without a gradient.
    """

    @staticmethod
    def forward(ctx, query, key, value, offset, call, state, keep_received, known):
        ctx.call, ctx.state = call, state
        out, lse, *received = known if known is not None else compute(query, key, value, call, state, keep_received)
        if known is None and offset is not None:
            add_offset_(out, lse, offset, call.tensor_format)
        ctx.save_for_backward(query, key, value, out, lse, offset, *received)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_derivative
    def backward(ctx, grad_out, _):
        query, key, value, out, lse, offset, *received = ctx.saved_tensors  # once: a hook may fetch them from the host
        tensors = query, key, value, out, lse, *received
        *grads, row_sums = gradients(grad_out, *tensors, call=ctx.call, state=ctx.state)
        grad_offset = offset_gradient(row_sums, lse, offset) if ctx.needs_input_grad[3] else None
        return *grads, grad_offset, None, None, None, None


def compute(query, key, value, call, state, keep_received=False):
    """(out, LSE), and the received blocks where keep_received asks for them."""
    own, received, joined = (
        call._replace(placement=placement) for placement in (state.own, state.received, state.joined)
    )
    pending = state.exchange.start(key, value, call.backend)
    slots = slot_views(pending.received, key.shape[2])
    two_pass = state.two_pass_heads(query.shape[3], query.itemsize, FORWARD_PRODUCTS)
    heads = _Heads(query, key, value, slots, joined, state, two_pass)
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device), empty_lse(query, call.tensor_format)
    # Where nothing is received, the own keys' part is the result.
    partial = result if state.received is None else (heads.partial(), result[1])
    if heads.n_two_pass:
        attention_forward(query, key, value, own, kv_heads=heads.two_pass, into=partial)
    buffer = pending.result()
    if heads.n_two_pass and state.received is not None:
        attention_forward(query, *slots, received, initial=partial, kv_heads=heads.two_pass, into=result)
    if heads.n_one_pass:
        attention_forward(query, key, value, joined, kv_heads=heads.one_pass, more=slots, into=result)
    return *result, *((buffer,) if keep_received else ())


def gradients(grad_out, query, key, value, out, lse, *saved, call, state):
    """(dQ, dK, dV, rowsum(out * dO)). saved: the received blocks, where the forward saved them; then all heads are
    computed in one pass where the kernels join keys."""
    exchange, groups = state.exchange, key.shape[2]
    own, received, joined = (
        call._replace(placement=placement) for placement in (state.own, state.received, state.joined)
    )
    # Enqueued first: it comes while delta and parts of dQ are computed.
    pending = None if saved else exchange.start(key, value, call.backend)
    buffer = saved[0] if saved else pending.received
    slots, slot_gradients = slot_views(buffer, groups), torch.empty_like(buffer)
    two_pass = 0 if saved else state.two_pass_heads(query.shape[3], query.itemsize, QUERY_GRADIENT_PRODUCTS)
    heads = _Heads(query, key, value, slots, joined, state, two_pass)
    row_sums = attention_delta(grad_out, out, lse, own)
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    partial = grad_query if state.received is None else heads.partial()
    shared = (grad_out, query)
    if heads.n_two_pass:
        attention_backward_dq(*shared, key, value, lse, row_sums, own, kv_heads=heads.two_pass, into=partial)
    if pending is not None:
        pending.result()
    if state.received is not None:
        attention_backward_dkdv(*shared, *slots, lse, row_sums, *slot_views(slot_gradients, groups), received)
    # The gradients travel beside the rest of dQ.
    returning = exchange.start_return(slot_gradients)
    if heads.n_two_pass and state.received is not None:
        attention_backward_dq(
            *shared, *slots, lse, row_sums, received, initial=partial, kv_heads=heads.two_pass, into=grad_query
        )
    if heads.n_one_pass:
        attention_backward_dq(
            *shared, key, value, lse, row_sums, joined, kv_heads=heads.one_pass, more=slots, into=grad_query
        )
    grads = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (key, value))
    returned = exchange.returned(returning.result())
    attention_backward_dkdv(*shared, key, value, lse, row_sums, *grads, own, returned)
    return grad_query, *grads, row_sums
