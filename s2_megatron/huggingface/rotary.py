"""RoPE of queries and keys together, as transformers' Llama computes it.

B batch, H query heads, G KV heads, T tokens, D head dim.
"""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import rotate_half

Rotary = tuple[torch.Tensor, torch.Tensor]  # (cos, sin), [B or 1, T, D]


def rotated(query, key, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """query [B, T, H, D] and key [B, T, G, D] after RoPE."""
    cos, sin = (tensor.unsqueeze(2) for tensor in rotary)
    both = torch.cat((query, key), 2)  # half the kernels
    return (both * cos + rotate_half(both) * sin).split((query.shape[2], key.shape[2]), 2)
