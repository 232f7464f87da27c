"""Softmax offsets: one number a head, whose exponential is added to the sum under the softmax, like a key of that score
without a value (gpt-oss calls it a sink; Miller, "Attention is off by one", has 0).

No kernel knows of it. With LSE over the keys alone and g = sigmoid(LSE - offset), the output is out * g and its LSE is
logaddexp(LSE, offset). The backward of the kernels takes these two as they are, because P = exp(S - LSE) and
delta = rowsum(dO out) hold for them, too. The offset is a key with P = exp(offset - LSE) and the value 0: its gradient
is the sum of -P (delta - dLSE) over rows.

B batch, H query heads.
"""

from __future__ import annotations

import torch

from s2_megatron.ops.call import FORMATS
from s2_megatron.patterns.checks import shown


def check_offset(offset, query: torch.Tensor, tensor_format: str) -> None:
    """Raises ValueError unless offset is None, or one floating-point number for each head of query, on its device."""
    if offset is None:
        return
    heads = query.shape[FORMATS[tensor_format][1]]
    wanted = f"expected a floating-point tensor [{heads}], one number a query head, on {query.device}"
    if not isinstance(offset, torch.Tensor):
        raise ValueError(f"softmax_offset={shown(offset)}; {wanted}; use torch.zeros({heads}) for off-by-one")
    if offset.shape != (heads,) or not offset.is_floating_point() or offset.device != query.device:
        raise ValueError(
            f"softmax_offset has shape {list(offset.shape)} and is {offset.dtype} on {offset.device}; {wanted}; give "
            "the heads of this call"
        )


def _of_rows(lse: torch.Tensor, tensor_format: str) -> torch.Tensor:
    """A view of numbers [B, H, rows] that fits a tensor of the format, with 1 for the head dim."""
    batch, heads, rows, _ = FORMATS[tensor_format]
    if batch is None:
        return lse[0].T[..., None]
    places = (batch, heads, rows)
    return lse.permute(sorted(range(3), key=places.__getitem__))[..., None]


def add_offset_(out: torch.Tensor, lse: torch.Tensor, offset: torch.Tensor, tensor_format: str) -> None:
    """Changes out and lse [B, H, rows], of the keys alone, into those with offset [H]. A row without a key keeps out 0,
    and its LSE is the offset."""
    offset = offset.detach().to(lse.dtype)[:, None]
    out.mul_(_of_rows(torch.sigmoid(lse - offset), tensor_format))
    torch.logaddexp(lse, offset, out=lse)


def with_offset(out, lse, offset, tensor_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """add_offset_ by operators that autograd, torch.compile and function transforms know; it keeps both outputs for the
    backward."""
    offset = offset.to(lse.dtype)[:, None]
    gate = _of_rows(torch.sigmoid(lse - offset), tensor_format)
    return (out * gate).to(out.dtype), torch.logaddexp(lse, offset)


def offset_gradient(row_sums: torch.Tensor, lse: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """[H], in the offset's dtype. row_sums: rowsum(out * grad_out) - grad_lse, [B, H, rows]; lse: with the offset."""
    p = torch.exp(offset.detach().to(lse.dtype)[:, None] - lse)
    return -(p * row_sums).sum((0, 2)).to(offset.dtype)
