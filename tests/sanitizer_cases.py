"""Small calls of every kernel and variant, for compute-sanitizer: scripts/sanitize.sh runs them.

    python tests/sanitizer_cases.py --backend triton [--device cpu] [--only REGEX]

Prints "cases done: N" at the end. Results are looked at only for NaN; what they should be is the business of test_attention.py.
"""

import argparse
import re
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from s2_megatron.attention import BACKENDS, AttentionCall, attention_backward, attention_forward, s2_attention
from s2_megatron.layout import Placement, build_layout
from tests.calls import KINDS, computes, make_call, results
from tests.oracle import make_inputs
from tests.test_attention import PAPER, pattern_of

BF16, F32 = torch.bfloat16, torch.float32
# name: (kind, length, block, head dim, dtype). Lengths end in the middle of tiles, so that a mask that is missing touches foreign memory.
CASES = {f"{kind}-64": (kind, 200, 64, 64, BF16) for kind in KINDS}
CASES |= {f"sbhd-{dim}": ("sbhd", 333, 64, dim, BF16) for dim in (96, 128, 256)}
CASES |= {f"padded-{dim}": ("padded", 199, 64, dim, BF16) for dim in (96, 128)}
CASES |= {"sbhd-64-fp32": ("sbhd", 150, 64, 64, F32), "block16": ("sbhd", 77, 16, 64, BF16), "block128": ("bhsd", 300, 128, 128, BF16)}
CASES |= {"mask-128": ("mask", 250, 64, 128, BF16), "placed-128": ("placed", 260, 64, 128, BF16)}


def run_case(kind, length, block, dim, dtype, device, backend):
    leaves, options = make_call(kind, device, length, block, dim, dtype)
    for deterministic in (False, True):
        out, _, *grads = results(partial(s2_attention, **options, backend=backend, deterministic=deterministic), leaves)
        assert all(torch.isfinite(tensor).all() for tensor in (out, *grads))


def run_continued(device, backend, block=64, dim=128, n_blocks=4):
    """A forward that continues another one, from a flat buffer of slots, as context parallelism calls it; and its backward."""
    pattern = pattern_of(PAPER, block, 4, 2)
    (query, key, value, grad_out), grad_lse = make_inputs(pattern, block * n_blocks, dim, BF16, device, form="sbhd")
    slots = torch.arange(n_blocks).expand(2, n_blocks).clone()
    calls = []
    for half in (slots >= n_blocks // 2, slots < n_blocks // 2):
        placement = Placement.make(range(n_blocks), n_blocks, torch.where(half, slots, -1), device, pattern)
        calls.append(AttentionCall(build_layout(pattern, device), 0.1, "sbhd", None, placement, backend, False))
    first = attention_forward(query, key, value, calls[0])
    out, lse = attention_forward(query, key, value, calls[1], initial=first)
    for call in calls:
        grads = attention_backward(grad_out, grad_lse, query, key, value, out, lse, call)
        assert all(torch.isfinite(grad).all() for grad in grads)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=[name for name in BACKENDS if name != "auto"], required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="a regular expression that the cases' names contain")
    chosen = parser.parse_args(arguments)
    done = 0
    for name, case in CASES.items():
        kind, _, *shape = case
        if re.search(chosen.only, name) and computes(chosen.backend, kind, *shape):
            run_case(*case, chosen.device, chosen.backend)
            done += 1
    if re.search(chosen.only, "continued"):
        run_continued(chosen.device, chosen.backend)
        done += 1
    if chosen.device == "cuda":
        torch.cuda.synchronize()
    print(f"cases done: {done}")


if __name__ == "__main__":
    main()
