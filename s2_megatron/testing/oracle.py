"""The dense masked computation that every other implementation is compared with, its error measures, and the gradient
check."""

from __future__ import annotations

from typing import NamedTuple

import torch

from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.call import canonical_view
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.block_mask import BlockMaskPattern


class Result(NamedTuple):
    out: torch.Tensor  # [B, H, S, D]
    lse: torch.Tensor  # [B, H, S]
    grad_query: torch.Tensor
    grad_key: torch.Tensor
    grad_value: torch.Tensor


def token_mask(pattern, length: int, device="cpu") -> torch.Tensor:
    """bool [H, length, length] of a sequence, from the definition: blocks by the rule of their ranges or by the mask's
    lists, a window and a sink by token."""
    block, n_blocks = pattern.block_size, -(-length // pattern.block_size)
    blocks = torch.zeros(pattern.num_heads, n_blocks, n_blocks, dtype=torch.bool)
    tokens = torch.zeros(pattern.num_heads, length, length, dtype=torch.bool)
    token = torch.arange(length)
    for head in range(pattern.num_heads):
        if isinstance(pattern, BlockMaskPattern):
            for query in range(n_blocks):
                blocks[head, query, torch.from_numpy(pattern.key_blocks(head, query))] = True
            continue
        rule = pattern.heads[head]
        place = torch.arange(n_blocks)
        distance, start = place[:, None] - place, 0
        for end, stride in rule.ranges:
            here = (distance >= start) & (distance < (n_blocks if end is None else end))
            blocks[head] |= here & ((place + rule.offset) % stride == 0)
            start = end
        tokens[head] = (token < rule.sink_tokens)[None, :].expand(length, length)
        if rule.window is not None:
            tokens[head] |= token[:, None] - token < rule.window
    tokens |= blocks.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :length, :length]
    return (tokens & torch.ones(length, length, dtype=torch.bool).tril()).to(device)


def packed_mask(pattern, starts, lengths, total: int, device="cpu") -> torch.Tensor:
    """bool [H, total, total] of documents packed into one token dimension."""
    mask = torch.zeros(pattern.num_heads, total, total, dtype=torch.bool, device=device)
    for start, length in zip(starts, lengths):
        span = slice(start, start + length)
        mask[:, span, span] = token_mask(pattern, length, device)
    return mask


def eager(query, key, value, mask, scale, grad_out, grad_lse) -> Result:
    """Plain masked attention in the inputs' dtype, differentiated by autograd. All [B, heads, S, D]; mask [H, S, S]."""
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in (query, key, value))
    ratio = query.shape[1] // key.shape[1]
    k, v = key.repeat_interleave(ratio, 1), value.repeat_interleave(ratio, 1)
    scores = (query @ k.mT) * scale
    scores = scores.masked_fill(~mask, float("-inf")).to(torch.promote_types(query.dtype, torch.float32))
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    out = p.to(query.dtype) @ v
    lse = torch.logsumexp(scores.masked_fill(~mask.any(-1, keepdim=True), 0.0), -1)
    loss = (out.to(scores.dtype) * grad_out.to(scores.dtype)).sum() + (
        lse * grad_lse.to(scores.dtype) * mask.any(-1)
    ).sum()
    return Result(out.detach(), lse.detach(), *torch.autograd.grad(loss, (query, key, value)))


def errors(result: Result, truth: Result, rows_seen=None) -> dict[str, tuple[float, float]]:
    """name -> (norm-wise error of the tensor, largest norm-wise error of 64 rows relative to the tensor's mean row
    block)."""
    found = {}
    for name, got, expected in zip(Result._fields, result, truth):
        difference, expected = (got.double() - expected.double()), expected.double()
        if name == "lse":
            difference, expected = difference[..., None], expected[..., None]
        if rows_seen is not None and name in ("out", "lse"):
            difference, expected = difference[:, :, rows_seen], expected[:, :, rows_seen]
        norm = expected.norm()
        if norm == 0:
            found[name] = (difference.norm().item(), difference.norm().item())
            continue
        pad = -difference.shape[2] % 64
        blocks = (
            torch.nn.functional.pad(difference, (0, 0, 0, pad)).unflatten(2, (-1, 64)).square().sum((-1, -2)).sqrt()
        )
        mean = (norm.square() / blocks.numel()).sqrt()
        found[name] = ((difference.norm() / norm).item(), (blocks.max() / mean).item())
    return found


def make_inputs(pattern, length, dim, dtype, device, batch=1, seed=0, form="bhsd", spread=1.0):
    """query, key, value, grad_out as non-contiguous views in a tensor format, and grad_lse [B, H, S]; reproducible on
    any device."""
    generator = torch.Generator().manual_seed(seed)
    heads, groups = pattern.num_heads, pattern.num_kv_heads
    fused = torch.randn(batch, length, heads + 2 * groups, dim + 8, generator=generator) * spread
    fused = torch.nn.functional.pad(fused, (4, 4))  # pieces on 16 bytes, as TMA wants them
    fused = fused.to(dtype).to(device)
    pieces = [piece[..., 8 : dim + 8] for piece in fused.split([heads, groups, groups], 2)]
    grad_out = torch.randn(batch, length, heads, dim, generator=generator).to(dtype).to(device)
    grad_lse = torch.randn(batch, heads, length, generator=generator).to(device)
    order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
    if form == "thd":
        return [tensor[0] for tensor in (*pieces, grad_out)], grad_lse
    return [tensor.permute(order[form]) for tensor in (*pieces, grad_out)], grad_lse


def run_op(inputs, grad_lse, pattern, form, scale, **options) -> Result:
    """The op's results as [B, heads, S, D]."""
    query, key, value, grad_out = inputs
    query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
    out, lse = s2_attention(
        query, key, value, build_layout(pattern), tensor_format=form, softmax_scale=scale, return_lse=True, **options
    )
    upstream = grad_lse[0] if form == "thd" else grad_lse
    seen = torch.isfinite(lse)
    loss_terms = [(out, grad_out), (lse, torch.where(seen, upstream, torch.zeros_like(upstream)).to(lse.dtype))]
    grads = torch.autograd.grad(
        [term for term, _ in loss_terms], (query, key, value), [grad.to(term.dtype) for term, grad in loss_terms]
    )
    if form == "thd":
        lse = lse[None]
    return Result(canonical_view(out.detach(), form), lse.detach(), *(canonical_view(grad, form) for grad in grads))


def check_against_eager(inputs, grad_lse, pattern, form, mask, scale, factor=2.0, **options):
    """Asserts that the op's error against fp64 is at most `factor` times that of eager in the inputs' dtype, per tensor
    and per 64 rows."""
    views = [canonical_view(tensor, form) for tensor in inputs]
    truth = eager(*(tensor.double() for tensor in views[:3]), mask, scale, views[3].double(), grad_lse.double())
    plain = eager(*views[:3], mask, scale, views[3], grad_lse)
    got = run_op(inputs, grad_lse, pattern, form, scale, **options)
    seen = mask.any(0).any(-1)
    own, other = errors(got, truth, seen), errors(plain, truth, seen)
    roundoff = torch.finfo(inputs[0].dtype).eps
    for name in Result._fields:
        for kind, mine, reference in zip(("norm", "64 rows"), own[name], other[name]):
            # Units of roundoff that are always allowed: one in 16 bits; in 32 bits eight, less than twice eager's usual
            # error; sixteen where eager is exact, as with a single key, for dP and delta cancel in ours. LSE is a
            # 32-bit result in either case.
            long = name == "lse" or inputs[0].itemsize >= 4
            unit = torch.finfo(torch.float32).eps if name == "lse" else roundoff
            exact = reference < (unit if long else unit / 2)
            limit = max(factor * reference, (16 if exact else 8 if long else 1) * unit)
            assert mine <= limit, (
                f"{name} ({kind}): error {mine:.3e} > {limit:.3e} = {factor} x eager's {reference:.3e}"
            )
    return got, truth


def random_mask(block, heads, groups, tables, n_blocks=16, seed=0, diagonal=True, density=0.4):
    """Patterns of a block mask: `tables` of them; diagonal: every block attends itself."""
    generator = torch.Generator().manual_seed(seed)
    indptr, indices = [], []
    for _ in range(tables):
        rows = []
        for query in range(n_blocks):
            chosen = torch.rand(query + 1, generator=generator) < density
            chosen[query if diagonal or query < 2 else query // 2] = True
            rows.append(chosen.nonzero()[:, 0].numpy())
        indptr.append([0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()])
        indices.append(torch.cat([torch.from_numpy(row) for row in rows]).numpy())
    return BlockMaskPattern.from_csr(block, heads, groups, indptr, indices)
