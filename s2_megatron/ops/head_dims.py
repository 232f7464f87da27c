"""Values with another head dim than queries and keys, such as 128 and 192 in multi-latent attention. Kernels and the
exchanges of context parallelism have one head dim, so the narrower side gets zeros at its end: they add nothing to a
score, and columns of zeros to out. The scale of the softmax stays that of the true head dim (AttentionCall has it).
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from s2_megatron.printing import print_once


def differ(query: torch.Tensor, value: torch.Tensor) -> bool:
    return query.shape[-1] != value.shape[-1]


def widened(*tensors: torch.Tensor, width: int) -> list[torch.Tensor]:
    """The tensors with zeros up to the head dim `width`; those that have it as they are. Differentiable."""
    return [t if t.shape[-1] == width else pad(t, (0, width - t.shape[-1])) for t in tensors]


def padded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """query, key and value with the larger of their head dims; says so once."""
    width = max(query.shape[-1], value.shape[-1])
    narrow, least = ("value gets", value.shape[-1]) if value.shape[-1] < width else ("both get", query.shape[-1])
    print_once(
        f"S2 attention: head dim {value.shape[-1]} of value, {query.shape[-1]} of query and key: kernels and exchanges "
        f"take one, so {narrow} zeros from {least} to {width}; the time is "
        f"at least that of {width} for all three, and so are memory and bytes sent under context parallelism"
    )
    return widened(query, key, value, width=width)
