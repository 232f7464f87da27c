"""What a call of the op is, and what a backend of it offers: the modules ops/reference.py and kernels/dispatch.py.

B batch, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from s2_megatron.ops.layout import Layout, PackedSequence, Placement

# Where batch, heads, rows and head dim stand in each format; thd has no batch.
FORMATS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3), "thd": (None, 1, 0, 2)}


class AttentionCall(NamedTuple):
    """Everything about a call that is not a differentiable tensor, from the API down to the kernels."""

    layout: Layout
    softmax_scale: float
    tensor_format: str = "sbhd"  # one of FORMATS
    packed: PackedSequence | None = None
    placement: Placement | None = None
    backend: str = "reference"  # a resolved one, see resolve_backend
    deterministic: bool = False

    def on_device(self, device: torch.device) -> AttentionCall:
        """This call with its layout on a device."""
        layout = self.layout.to(device)
        return self if layout is self.layout else self._replace(layout=layout)


def canonical_view(tensor: torch.Tensor, tensor_format: str) -> torch.Tensor:
    """[B, heads, rows, D] view of a tensor in one of FORMATS; of a copy where the tensor is the negative of its memory,
    which kernels do not see."""
    batch, heads, rows, dim = FORMATS[tensor_format]
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if batch is None:
        return tensor.permute(heads, rows, dim).unsqueeze(0)
    return tensor.permute(batch, heads, rows, dim)


class Backend(Protocol):
    """A module with these functions computes the op. Tensors were checked (ops/checks.py) and are views [B, heads,
    rows, D] with any strides: query, out, grad_out and grad_query with H heads, key, value and their gradients with G.
    lse and row_sums are [B, H, rows], fp32 (fp64 for fp64), contiguous when they are written; LSE is in natural log.
    Results are written into tensors that the caller made.
    """

    def prepare(self, call: AttentionCall, rows: int, head_dim: int, dtype: torch.dtype) -> None:
        """Makes what later calls with this layout and placement will read. rows: of the query."""

    def joins_keys(self, query, key, value, more, call: AttentionCall) -> bool:
        """Whether `forward` and `backward_dq` take kv_heads and more for this call."""

    def forward(
        self, query, key, value, out, lse, call: AttentionCall, initial=None, kv_heads=None, more=None
    ) -> Callable[..., bool] | None:
        """Writes out (of any type) and lse. initial: (out, lse) of the same queries over earlier keys, continued.
        Returns None, or a quicker function of (query, key, value, out, lse) that repeats the call for other tensors of
        the same kinds (ops/repeated.py). That function returns True, or False when it can no longer do so.

        Where `joins_keys` says so: kv_heads, (first, end) of those whose query heads are computed; more, (key, value)
        of the placement's slots from own_slots on.
        """

    def backward(
        self,
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
        call: AttentionCall,
    ) -> Callable[..., bool] | None:
        """Writes the three gradients. grad_lse: [B, H, rows] or None. Returns a function of the ten tensors, as
        `forward`."""

    # The backward in parts: context parallelism sends and receives between them.
    def delta(self, grad_out, grad_lse, out, lse, row_sums) -> None:
        """Writes row_sums: rowsum(out * grad_out) - grad_lse, what both other parts read."""

    def backward_dkdv(
        self, grad_out, query, key, value, lse, row_sums, grad_key, grad_value, call: AttentionCall, returned=None
    ) -> None:
        """Writes dK and dV, from the final lse and the row sums of `delta`. With placed keys the heads of grad_key may
        share memory (stride 0 between heads): a slot belongs to one KV head. returned: see
        ops.parts.attention_backward_dkdv."""

    def backward_dq(
        self,
        grad_out,
        query,
        key,
        value,
        lse,
        row_sums,
        grad_query,
        call: AttentionCall,
        initial=None,
        kv_heads=None,
        more=None,
    ) -> None:
        """Writes dQ. initial: dQ of the same queries over other keys (fp32, fp64 for fp64), added before the result is
        rounded. kv_heads, more: as in `forward`."""
