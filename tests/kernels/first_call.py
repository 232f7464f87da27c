"""Seconds from the first call of a new shape to its result, forward and backward, in a fresh process.

    TRITON_CACHE_DIR=$(mktemp -d) python tests/kernels/first_call.py; the same folder again: with a warm cache

prints JSON: {shape: seconds}. Not counted: importing, starting CUDA, making the inputs.
"""

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from s2_megatron.ops.api import s2_attention
from tests.calls import make_call

# (kind, length, head dim)
SHAPES = {
    "8K, head dim 128": ("sbhd", 8192, 128),
    "head dim 64": ("sbhd", 4096, 64),
    "packed": ("padded", 5000, 128),
    "mask": ("mask", 1000, 128),
}


def first_call(kind, length, dim, device) -> float:
    leaves, options = make_call(kind, device, length, 64, dim, torch.bfloat16)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    out, _ = s2_attention(*leaves, **options)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    wait()
    return time.perf_counter() - start


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(json.dumps({name: first_call(*shape, device) for name, shape in SHAPES.items()}))
