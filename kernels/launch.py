"""The kernels behind `s2_attention`: which implementation computes a call. All tensors are views [B, heads, rows, D] with any strides."""
from __future__ import annotations

from s2_megatron.kernels import portable


def forward(query, key, value, out, lse, layout, scale, packed=None, placement=None, initial=None):
    """Writes out [B, H, rows, D] and lse [B, H, rows] (fp32, contiguous, natural log). initial: (out, lse) that this call continues."""
    portable.forward(query, key, value, out, lse, layout, scale, packed, placement, initial)


def backward(grad_out, grad_lse, query, key, value, out, lse, grad_query, grad_key, grad_value, layout, scale, packed=None, placement=None):
    """Writes the three gradients. grad_lse: [B, H, rows] or None."""
    portable.backward(grad_out, grad_lse, query, key, value, out, lse, grad_query, grad_key, grad_value, layout, scale, packed, placement)
