"""Attention of one new token a row over the kept keys: SDPA with a mask, in several parts where there are few rows.

With few rows and KV heads a GPU has too few thread blocks to read memory at full speed. The keys of a head are then cut
into parts, each computed like a head of its own, and the parts are put together by their LSE.

B batch, K KV heads, R query heads of a KV head, S kept tokens, P parts, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

SMALLEST_PART = 512  # tokens
THREAD_BLOCKS_PER_SM = 2


class DecodeMask(NamedTuple):
    """Which kept tokens are attended. parts: P. mask: for P = 1 bool [B, K or 1, R or 1, S]; else what is added to the
    scores, in the query's dtype, [B, K * P, R or 1, S / P]."""

    mask: torch.Tensor
    parts: int


def part_count(rows: int, n_slots: int, block_size: int, device: torch.device) -> int:
    """How many parts the keys of `rows` (batch times KV heads) are cut into: whole slots, equally long."""
    if device.type != "cuda":
        return 1
    wanted = -(-THREAD_BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count // rows)
    most = min(wanted, n_slots * block_size // SMALLEST_PART)
    return max((parts for parts in range(1, most + 1) if n_slots % parts == 0), default=1)


def decode_mask(mask: torch.Tensor, kv_heads: int, parts: int, dtype: torch.dtype) -> DecodeMask:
    """mask: bool [B, K or 1, R or 1, S], True where attended; kv_heads: K."""
    if parts == 1:
        return DecodeMask(mask, 1)
    # Finite, so that a part without any attended token has an LSE and no NaN.
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min / 2)
    bias = bias.unflatten(3, (parts, -1)).transpose(2, 3)  # [B, K or 1, P, R or 1, S / P]
    bias = bias.expand(-1, kv_heads, -1, -1, -1)
    return DecodeMask(bias.reshape(bias.shape[0], kv_heads * parts, *bias.shape[3:]), parts)


def decode_attention(query, keys, values, mask: DecodeMask, scale: float) -> torch.Tensor:
    """query [B, K, R, D]; keys, values [B, K, S, D], contiguous. Returns [B, K, R, D]."""
    if mask.parts == 1:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask.mask, scale=scale)
    batch, heads, rows, dim = query.shape
    query = query[:, :, None].expand(-1, -1, mask.parts, -1, -1).reshape(batch, heads * mask.parts, rows, dim)
    keys, values = (tensor.view(batch, heads * mask.parts, -1, dim) for tensor in (keys, values))
    out, lse = _attention_with_lse(query, keys, values, mask.mask, scale)
    weights = lse.unflatten(1, (heads, mask.parts)).softmax(2)[..., None]  # [B, K, P, R, 1]
    return (out.unflatten(1, (heads, mask.parts)).float() * weights).sum(2).to(query.dtype)


def _attention_with_lse(query, keys, values, bias, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, H, R, D], LSE [B, H, R] in fp32) of SDPA with something added to the scores."""
    if query.is_cuda:
        bias = bias.expand(-1, -1, query.shape[2], -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, bias, True, 0.0, False, scale=scale
        )
        return out, lse[..., : query.shape[2]]  # it is padded to whole tiles
    scores = (query @ keys.transpose(-1, -2) * scale + bias).float()
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(values.dtype) @ values, lse
