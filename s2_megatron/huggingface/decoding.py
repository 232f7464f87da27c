"""Attention of one new token a row over the kept keys: which way, and the one without a kernel of ours (the reference),
one call of SDPA with a mask.

On Hopper torch uses cuDNN's kernel. With few rows it divides the keys of a head among several blocks, but only if the
head has one query row. So the query heads of a KV head are passed as heads (enable_gqa), not as rows of one matrix:
with four rows it read 0.2 TB/s of an H200's memory, with four heads 2.6 TB/s (benchmarks/NOTES.md).

B batch, H query heads, K KV heads, R = H / K, S kept tokens, D head dim.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from s2_megatron.printing import print_once

DECODE_BACKENDS = ("auto", "triton", "reference")
LARGEST_HEAD_DIM = 256  # of the kernel
OFFSET_ROOM = 8  # tokens behind the kept ones where the softmax has an offset: SDPA wants masks in 16 bytes


@cache
def takes_kernel(backend: str, device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether decode_kernel.py computes the steps of a cache with this decode_backend. Raises ValueError for "triton"
    where it cannot; where "auto" does not on a GPU, it says why."""
    if backend == "reference":
        return False
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    dtypes = (torch.float16, torch.float32) if device_type == "cpu" else (torch.float16, torch.bfloat16, torch.float32)
    wrong = None
    if device_type != "cuda" and not (device_type == "cpu" and interpreted):
        wrong = f"device {device_type}, expected a GPU"
    elif dtype not in dtypes:
        wrong = f"dtype {dtype}, expected one of {', '.join(map(str, dtypes))}"
    elif head_dim > LARGEST_HEAD_DIM:
        wrong = f"head dim {head_dim}, expected {LARGEST_HEAD_DIM} or less"
    if wrong and backend == "triton":
        raise ValueError(f"decode_backend=triton: {wrong}; use decode_backend=auto or reference")
    if wrong and device_type == "cuda":
        print_once(f"S2Cache decodes by SDPA, because of {wrong}")
    return wrong is None


def decode_mask(mask: torch.Tensor, kv_heads: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores, in the query's dtype, [B, H or 1, 1, S]: once for all layers, where SDPA would make
    it of a bool mask in each. mask: bool [B, K or 1, R or 1, S], True where attended; kv_heads: K; group: R. Before B
    there may be more dims."""
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    if bias.shape[-3] == bias.shape[-2] == 1:
        return bias
    return bias.expand(*bias.shape[:-3], kv_heads, group, -1).flatten(-3, -2).unsqueeze(-2)


def mask_with_offset(bias: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """decode_mask's result for keys and values with OFFSET_ROOM zeros behind them: the first of these has the score
    `offset`, [1, H], the others are not attended. [B, H, 1, S + OFFSET_ROOM]."""
    columns = bias.new_full((len(bias), offset.shape[1], 1, OFFSET_ROOM), float("-inf"))
    columns[..., 0] = offset[..., None].to(bias.dtype)
    return torch.cat([bias.expand(-1, offset.shape[1], -1, -1), columns], -1)


def decode_attention(query, keys, values, bias: torch.Tensor, scale: float) -> torch.Tensor:
    """query [B, H, 1, D]; keys, values [B, K, S, D]; bias: of decode_mask. Returns [B, H, 1, D]."""
    grouped = query.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale, enable_gqa=grouped)
