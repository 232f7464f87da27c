"""The attention function in PyTorch, block row by block row, on any device: the CPU backend, and what a reader checks
the kernels against. Its functions are those of ops.call.Backend, which says what they take.

All tensors are views [B, heads, rows, D]: B batch, H query heads, G KV heads, D head dim, for value and out that of
value. Arithmetic is fp32 (fp64 for fp64 inputs). The backward recomputes the probabilities from LSE: P = exp(scale QK^T
- LSE), dS = P (dO V^T - delta) with delta = rowsum(dO O) - dLSE (Dao et al., FlashAttention-2, arXiv 2307.08691,
section 3.1).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from s2_megatron.ops.call import AttentionCall
from s2_megatron.patterns.tokens import attends_whole


class _Row(NamedTuple):
    """One query block of heads that attend the same key rows."""

    heads: torch.Tensor  # int64 [n] query heads
    kv_heads: torch.Tensor  # int64 [n] their KV heads
    queries: slice  # query rows
    keys: torch.Tensor  # int64 [m] key rows
    mask: torch.Tensor | None  # bool [queries, m]: attended; None when all are


def _documents(query, key, packed):
    """[(first query row, query rows, first key row, key rows)]"""
    if packed is None:
        return [(0, query.shape[2], 0, key.shape[2])]
    lengths = packed.cu_seqlens.diff().tolist()
    return [(start, length, start, length) for start, length in zip(packed.starts.tolist(), lengths) if length]


def _rows(query, key, call: AttentionCall):
    layout, packed, placement = call.layout, call.packed, call.placement
    pattern, block = layout.pattern, layout.block_size
    device = query.device
    ratio = layout.num_heads // layout.num_kv_heads
    slots = None if placement is None or placement.key_slot is None else placement.key_slot.tolist()
    groups: dict[tuple, list[int]] = {}
    for head in range(layout.num_heads):
        same = pattern.heads[head] if hasattr(pattern, "heads") else pattern.table_of(head)
        groups.setdefault((same, head // ratio if slots else None), []).append(head)
    inside = torch.arange(block, device=device)
    for query_start, query_length, key_start, key_length in _documents(query, key, packed):
        ids = range(-(-query_length // block)) if placement is None else placement.query_block_ids.tolist()
        for (_, kv_head), heads in groups.items():
            head_index = torch.tensor(heads, device=device)
            for position, query_block in enumerate(ids):
                first, last = position * block, min((position + 1) * block, query_length)
                key_blocks = torch.from_numpy(pattern.key_blocks(heads[0], query_block)).to(device)
                slot_of = key_blocks
                if slots:
                    slot_of = placement.key_slot[kv_head].long()[key_blocks]
                    key_blocks, slot_of = key_blocks[slot_of >= 0], slot_of[slot_of >= 0]
                if not len(key_blocks):
                    continue
                key_rows = (slot_of[:, None] * block + inside).reshape(-1)
                mask = None
                rule = pattern.heads[heads[0]] if hasattr(pattern, "heads") else None
                by_token = rule is not None and rule.by_token
                if by_token or key_blocks[-1] == query_block:
                    positions = (key_blocks[:, None] * block + inside).reshape(-1)
                    valid = key_rows < key_length
                    own = torch.arange(query_block * block, query_block * block + last - first, device=device)
                    mask = own[:, None] >= positions
                    if by_token:
                        whole = torch.from_numpy(attends_whole(rule, query_block, key_blocks.cpu().numpy())).to(device)
                        seen = whole.repeat_interleave(block) | (positions < rule.sink_tokens)
                        mask &= seen | (own[:, None] - positions < (rule.window or 0))
                    key_rows, mask = key_rows[valid], mask[:, valid]
                yield _Row(
                    head_index,
                    head_index // ratio,
                    slice(query_start + first, query_start + last),
                    key_rows + key_start,
                    mask,
                )


def _without_autocast(function):
    """The function computes in the precision of its working type, whatever autocast is set to."""

    @functools.wraps(function)
    def run(first, *arguments, **options):
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *arguments, **options)

    return run


def _scores(row, q, k, scale):
    scores = (q @ k.transpose(-1, -2)) * scale
    return scores if row.mask is None else scores.masked_fill(~row.mask, float("-inf"))


def _probabilities(scores, log_sum):
    """Zeros in rows that see no key: their scores and their LSE are -inf."""
    return torch.exp(scores - torch.where(log_sum == float("-inf"), 0.0, log_sum)[..., None])


def prepare(call, rows, head_dim, dtype):
    """Nothing: every call makes what it reads."""


def joins_keys(query, key, value, more, call) -> bool:
    """Never: nothing is gained by it here."""
    return False


@_without_autocast
def forward(query, key, value, out, lse, call, initial=None, kv_heads=None, more=None):
    """Writes out and lse, continuing `initial`."""
    assert kv_heads is None and more is None, "joins_keys says no"
    work = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros((*query.shape[:3], value.shape[3]), dtype=work, device=query.device)
    log_sum = torch.full(query.shape[:3], float("-inf"), dtype=work, device=query.device)
    q_all, k_all, v_all = query.to(work), key.to(work), value.to(work)
    for row in _rows(query, key, call):
        q = q_all[:, row.heads, row.queries]
        k, v = (tensor[:, row.kv_heads[:, None], row.keys] for tensor in (k_all, v_all))
        scores = _scores(row, q, k, call.softmax_scale)
        log = torch.logsumexp(scores, dim=-1)
        total[:, row.heads, row.queries] = _probabilities(scores, log) @ v
        log_sum[:, row.heads, row.queries] = log
    if initial is not None:
        first_out, first_log = initial[0].to(work), initial[1].to(work)
        both = torch.logaddexp(log_sum, first_log)
        # NaN: neither part has a key
        own, first = (torch.exp(log - both).nan_to_num_(0.0)[..., None] for log in (log_sum, first_log))
        total = total * own + first_out * first
        log_sum = both
    out.copy_(total)
    lse.copy_(log_sum)


@_without_autocast
def backward(
    grad_out,
    grad_lse,
    query,
    key,
    value,
    out,
    lse,
    grad_query,
    grad_key,
    grad_value,
    call,
):
    """Writes dQ, dK and dV."""
    row_sums = torch.empty(lse.shape, dtype=torch.promote_types(query.dtype, torch.float32), device=lse.device)
    delta(grad_out, grad_lse, out, lse, row_sums)
    dq, dk, dv = _gradients(grad_out, query, key, value, lse, row_sums, call)
    grad_query.copy_(dq)
    grad_key.copy_(dk)
    grad_value.copy_(dv)


def delta(grad_out, grad_lse, out, lse, row_sums):
    """Writes row_sums."""
    work = row_sums.dtype
    row_sums.copy_((grad_out.to(work) * out.to(work)).sum(-1))
    if grad_lse is not None:
        row_sums -= torch.where(torch.isinf(lse), 0.0, grad_lse.to(work))


@_without_autocast
def backward_dkdv(grad_out, query, key, value, lse, row_sums, grad_key, grad_value, call, returned=None):
    """Writes dK and dV."""
    _, dk, dv = _gradients(grad_out, query, key, value, lse, row_sums, call, of_query=False)
    if returned is not None:
        _add_returned((dk, dv), *returned)
    for grad, total in ((grad_key, dk), (grad_value, dv)):
        if grad.shape[1] > 1 and grad.stride(1) == 0:
            grad[:, 0].copy_(total.sum(1))  # all heads but one are zero in a slot
        else:
            grad.copy_(total)


def _add_returned(grads, slots, starts, entries):
    """To each of dK and dV [B, G, rows, D] the slots of its blocks: their first entries, then their second ones, and so
    on."""
    heads = grads[0].shape[1]
    counts = starts.diff()
    for nth in range(int(counts.max())):
        places = torch.nonzero(counts > nth)[:, 0]  # block * heads + head
        slot = entries[starts[places] + nth]
        for part, grad in enumerate(grads):
            blocks = grad.unflatten(2, (-1, slots.shape[1]))
            blocks[:, places % heads, places // heads] += slots[slot, :, part].movedim(2, 0).to(grad.dtype)


@_without_autocast
def backward_dq(grad_out, query, key, value, lse, row_sums, grad_query, call, initial=None, kv_heads=None, more=None):
    """Writes dQ, added to `initial`."""
    assert kv_heads is None and more is None, "joins_keys says no"
    dq, _, _ = _gradients(grad_out, query, key, value, lse, row_sums, call, of_key=False)
    grad_query.copy_(dq if initial is None else dq + initial)


def _gradients(grad_out, query, key, value, lse, row_sums, call, of_query=True, of_key=True):
    """(dQ, dK, dV) in the working precision; those that are not asked for stay zero."""
    work = torch.promote_types(query.dtype, torch.float32)
    q_all, k_all, v_all, do_all = (tensor.to(work) for tensor in (query, key, value, grad_out))
    log_sum, scale = lse.to(work), call.softmax_scale
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=work, device=query.device) for tensor in (query, key, value))
    for row in _rows(query, key, call):
        q, do = q_all[:, row.heads, row.queries], do_all[:, row.heads, row.queries]
        k, v = (tensor[:, row.kv_heads[:, None], row.keys] for tensor in (k_all, v_all))
        p = _probabilities(_scores(row, q, k, scale), log_sum[:, row.heads, row.queries])
        ds = p * (do @ v.transpose(-1, -2) - row_sums[:, row.heads, row.queries, None]) * scale
        if of_query:
            dq[:, row.heads, row.queries] = ds @ k
        if of_key:
            for head, kv_head in enumerate(row.kv_heads.tolist()):
                dk[:, kv_head].index_add_(1, row.keys, ds[:, head].transpose(-1, -2) @ q[:, head])
                dv[:, kv_head].index_add_(1, row.keys, p[:, head].transpose(-1, -2) @ do[:, head])
    return dq, dk, dv
