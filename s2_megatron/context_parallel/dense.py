"""Comm types `all_gather` and `a2a`: every rank receives the whole sequence, of all heads or of some, with autograd.

all_gather  every rank receives all keys and values: the plain reference, no communication is hidden
a2a         every rank receives the whole sequence of some heads (Ulysses, arXiv 2309.14509); the number of KV heads
            must be a multiple of the ranks

S sequence, c ranks, B batch, H query heads, G KV heads (of one tensor-parallel rank), D head dim, t = S * B packed
tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from s2_megatron.context_parallel.exchange import all_gather, all_to_all
from s2_megatron.ops.autograd import first_derivative
from s2_megatron.ops.lasting import lasting
from s2_megatron.ops.layout import PackedSequence, Placement
from s2_megatron.ops.offset import add_offset_, offset_gradient
from s2_megatron.ops.parts import attention_backward_dkdv, attention_backward_dq, attention_delta, attention_forward


@lru_cache(maxsize=16)
@lasting()
def sequence_order(tokens: int, size: int, device: torch.device) -> torch.Tensor:
    """int64 [tokens]: where each token lies after the ranks' rows are joined, when one sequence was cut in zigzag.
    Raises ValueError for one that cannot be."""
    if tokens % (2 * size):
        raise ValueError(
            f"a sequence of {tokens} tokens cannot be cut into 2 * {size} equal chunks; expected a multiple of "
            f"{2 * size}; pad it"
        )
    return cut_order(torch.tensor([0, tokens], dtype=torch.int32), tokens, size).to(device)


def cut_order(borders: torch.Tensor, tokens: int, size: int) -> torch.Tensor:
    """int64 [tokens]: where each token lies after the ranks' rows are joined, when every document was cut in zigzag by
    itself.

    borders: int32 [documents + 1], the documents with their padding, all lengths multiples of 2 * size. Computed on the
    device of `borders`, without waiting for it. Tokens after the last border count as one more document.
    """
    position = torch.arange(tokens, device=borders.device)
    ends = torch.cat([borders[1:].long(), torch.full((1,), tokens, device=borders.device)])
    document = torch.searchsorted(ends, position, right=True).clamp(max=len(ends) - 1)
    start = torch.cat([borders.long(), ends[-1:]])[document]
    length = ends[document] - start
    chunk_length = (length // (2 * size)).clamp(min=1)
    inside = position - start
    chunk = inside // chunk_length
    second = chunk >= size
    rank = torch.where(second, 2 * size - 1 - chunk, chunk)
    local = start // size + torch.where(second, chunk_length, 0) + inside % chunk_length
    return rank * (tokens // size) + local


def documents_of_rank(packed: PackedSequence, rank: int, size: int, tokens: int) -> PackedSequence:
    """The part of packed documents that a rank's queries need, when the whole row was cut in zigzag as one sequence:
    documents without a query of this rank are empty, the others end with its last query. Without waiting for the
    device."""
    starts, lengths = packed.starts[:-1].long(), packed.cu_seqlens.diff().long()
    chunk = tokens // (2 * size)
    needed = torch.zeros_like(lengths)
    for number in (rank, 2 * size - 1 - rank):
        first, end = number * chunk, (number + 1) * chunk
        last = torch.minimum(starts + lengths, torch.full_like(starts, end))
        needed = torch.where((starts < end) & (starts + lengths > first), torch.maximum(needed, last - starts), needed)
    ends = torch.cat([needed.new_zeros(1), needed.cumsum(0)]).to(torch.int32)
    return PackedSequence(ends, packed.max_seqlen, packed.starts)


def _gather(tensors, order, group):
    """All ranks' rows of tensors of one shape [S/c, ...] in natural order: [len(tensors), S, ...]."""
    by_rank = all_gather(torch.stack(tuple(tensors)), group)  # [c, tensors, S/c, ...]
    return torch.stack([by_rank[:, index].flatten(0, 1).index_select(0, order) for index in range(len(tensors))])


def _scatter_sum(grad: torch.Tensor, order: torch.Tensor, group) -> torch.Tensor:
    """This rank's rows of the sum over ranks of grad [S, ...], in fp32 (or wider) and in the order of ranks: a
    reduce-scatter whose result does not depend on how the library reduces. order: see cut_order."""
    size = group.size()
    by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format)
    by_rank[order] = grad
    parts = torch.empty_like(by_rank)
    counts = [len(grad) // size] * size
    all_to_all(parts, by_rank, counts, counts, group)
    parts = parts.unflatten(0, (size, -1))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class GatheredState(NamedTuple):
    """What the calls of one length and device share."""

    layout: object
    group: object
    placement: Placement  # this rank's queries
    order: torch.Tensor  # int64 [S], see cut_order


class GatheredAttention(torch.autograd.Function):
    """Attention of this rank's queries to all keys and values, which every rank receives; arguments and results as of
    SparseAttention, state: a GatheredState."""

    @staticmethod
    def forward(ctx, query, key, value, offset, call, state, keep_received, known):
        ctx.call, ctx.state, saved = call._replace(placement=state.placement), state, []
        if known is None:
            whole = _gather((key, value), state.order, state.group)
            known = attention_forward(query, *whole, ctx.call)
            saved = [whole] if keep_received else []
            if offset is not None:
                add_offset_(*known, offset, call.tensor_format)
        out, lse = known
        ctx.save_for_backward(query, key, value, offset, out, lse, *saved)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_derivative
    def backward(ctx, grad_out, _):
        query, key, value, offset, out, lse, *saved = ctx.saved_tensors
        whole = saved[0] if saved else _gather((key, value), ctx.state.order, ctx.state.group)
        row_sums = attention_delta(grad_out, out, lse, ctx.call)
        sum_dtype = torch.promote_types(query.dtype, torch.float32)
        grads = torch.empty(whole.shape, dtype=sum_dtype, device=whole.device)
        attention_backward_dkdv(grad_out, query, *whole, lse, row_sums, *grads, ctx.call)
        grad_query = attention_backward_dq(grad_out, query, *whole, lse, row_sums, ctx.call)
        grad_key, grad_value = (_scatter_sum(grad, ctx.state.order, ctx.state.group).to(key.dtype) for grad in grads)
        grad_offset = offset_gradient(row_sums, lse, offset) if ctx.needs_input_grad[3] else None
        return grad_query, grad_key, grad_value, grad_offset, None, None, None, None


class GatherRows(torch.autograd.Function):
    """key and value [t/c, G, D] -> [t, G, D] of all ranks in natural order; the gradients are summed over ranks in
    fp32. order: see cut_order."""

    @staticmethod
    def forward(ctx, key, value, order, group):
        ctx.save_for_backward(order)
        ctx.group, ctx.dtype = group, key.dtype
        return tuple(_gather((key, value), order, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_key, grad_value):
        (order,) = ctx.saved_tensors
        sum_dtype = torch.promote_types(ctx.dtype, torch.float32)
        grads = (_scatter_sum(grad.to(sum_dtype), order, ctx.group).to(ctx.dtype) for grad in (grad_key, grad_value))
        return *grads, None, None


def _rows_to_heads(tensors, order, group):
    """Tensors [S/c, ..., heads, D] of all heads -> [S, ..., heads/c, D] in natural order: one collective for all of
    them."""
    size = group.size()
    shares = [tensor.unflatten(-2, (size, -1)).movedim(-3, 0) for tensor in tensors]  # [c, S/c, ..., heads/c, D]
    sent = torch.cat(shares, dim=-2)
    received = torch.empty_like(sent)
    all_to_all(received, sent, [1] * size, [1] * size, group)
    natural = received.flatten(0, 1).index_select(0, order)
    return natural.split([share.shape[-2] for share in shares], dim=-2)


def _heads_to_rows(tensors, order, group):
    """The inverse of _rows_to_heads."""
    size = group.size()
    heads = [tensor.shape[-2] for tensor in tensors]
    natural = torch.cat(tensors, dim=-2)
    sent = torch.empty_like(natural, memory_format=torch.contiguous_format)
    sent[order] = natural
    sent = sent.unflatten(0, (size, -1))
    received = torch.empty_like(sent)
    all_to_all(received, sent, [1] * size, [1] * size, group)
    return [share.movedim(0, -3).flatten(-3, -2) for share in received.split(heads, dim=-2)]


class RowsToHeads(torch.autograd.Function):
    """query, key and value: this rank's rows of all heads -> all rows, in natural order, of this rank's heads."""

    @staticmethod
    def forward(ctx, query, key, value, order, group):
        ctx.save_for_backward(order)
        ctx.group = group
        return tuple(_rows_to_heads((query, key, value), order, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return *_heads_to_rows(grads, ctx.saved_tensors[0], ctx.group), None, None


class HeadsToRows(torch.autograd.Function):
    """out: all rows of this rank's heads -> this rank's rows of all heads."""

    @staticmethod
    def forward(ctx, out, order, group):
        ctx.save_for_backward(order)
        ctx.group = group
        return _heads_to_rows((out,), order, group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _rows_to_heads((grad,), ctx.saved_tensors[0], ctx.group)[0], None, None
