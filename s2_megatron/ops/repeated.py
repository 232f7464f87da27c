"""What is known of a call from an earlier one of the same kind, so that a short call does not wait for the host.

Two calls are of one kind when everything is equal that checks, the choice of kernels and launches depend on: the layout
(what is known is stored with it), the settings, and of every tensor its shape, strides, type, device and whether it
lies on 16 bytes. Then nothing has to be looked at again, and only addresses differ. Calls with index tensors of their
own (packed documents, placed blocks) are never known.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from s2_megatron.ops.call import AttentionCall

MOST_KINDS = 1024  # of calls that are remembered, a layout: every length is one, and decoding meets many of them


def kind_of(tensor: torch.Tensor | None) -> tuple | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


def kind_of_call(call: AttentionCall, *tensors: torch.Tensor | None) -> tuple | None:
    """Hashable; None for a call with index tensors."""
    if call.packed is not None or call.placement is not None:
        return None
    return (call.softmax_scale, call.tensor_format, call.backend, call.deterministic, *map(kind_of, tensors))


def remember(known: dict, kind: tuple | None, again: Callable | None) -> None:
    """Stores how a call is made again, as far as it is known."""
    if kind is None or again is None:
        return
    if len(known) >= MOST_KINDS:
        known.clear()
    known[kind] = again
