"""Tensors that outlive the call that makes them: index tensors of layouts, placements and plans, which stay for every
later call, in whatever context those stand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def lasting() -> Iterator[None]:
    """What is made inside is an ordinary tensor, although the caller is in torch.inference_mode, under a default
    device, in a function transform, or traced or watched by a mode (FakeTensorMode, torch.export). A decorator, too."""
    with (
        torch.inference_mode(False),
        torch._C.DisableTorchFunction(),  # a default device is a mode of torch functions
        torch._C._DisableFuncTorch(),
        _disable_current_modes(),
    ):
        yield


def on_device(device: torch.device, *arrays, dtype=np.int32) -> list[torch.Tensor]:
    """Lasting tensors of arrays or lists, of one integer type, on a device."""
    with lasting():
        return [torch.from_numpy(np.ascontiguousarray(array, dtype=dtype)).to(device) for array in arrays]
