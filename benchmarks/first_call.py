"""Seconds from the first call of s2_attention to its first result, forward and backward, in a fresh process with an
empty and a filled compile cache. The second process takes another length: a new shape must not compile anew.

    python benchmarks/first_call.py

Sample of its output:

    {"cold_s": ..., "warm_s": ...}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
LENGTHS = (8192, 12345)  # cold, warm


def child(length: int, heads: int = 32, dim: int = 128) -> None:
    """Prints the seconds as the last line. CUDA itself is started before the clock."""
    import torch

    from s2_megatron.ops.api import s2_attention
    from s2_megatron.ops.layout import build_layout
    from s2_megatron.patterns.ranges import make_range_pattern

    pattern = make_range_pattern(block_size=64, num_heads=heads, num_kv_heads=heads, ranges=((16, 1), (None, 16)))
    fused = torch.randn(length, 1, 3 * heads, dim, device="cuda", dtype=torch.bfloat16)
    tensors = [part.requires_grad_() for part in fused.chunk(3, 2)]
    grad = torch.randn_like(tensors[0])
    (grad[0, 0] @ grad[0, 0].T).sum().item()
    start = time.perf_counter()
    out = s2_attention(*tensors, build_layout(pattern, "cuda"))
    torch.autograd.grad(out, tensors, grad)
    torch.cuda.synchronize()
    print(time.perf_counter() - start)


def measure() -> dict[str, float]:
    """{"cold_s": seconds, "warm_s": seconds}. Raises RuntimeError when a process fails."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for kind, length in zip(("cold", "warm"), LENGTHS):
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            command = [sys.executable, os.path.abspath(__file__), str(length)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                raise RuntimeError(f"the first call failed: {done.stderr.strip().splitlines()[-1:]}")
            found[f"{kind}_s"] = float(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    if len(sys.argv) == 2:
        child(int(sys.argv[1]))
    else:
        import torch

        from benchmarks import refuse

        if not torch.cuda.is_available():
            refuse("no GPU; this times the first call of the kernels on an NVIDIA GPU")
        print(json.dumps(measure()))
