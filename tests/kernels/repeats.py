"""Equal calls give equal bits while other work disturbs their timing: forward, dK and dV, and with --deterministic dQ
too.

    python tests/kernels/repeats.py --count 1000

prints, for each kind of call: sbhd forward, dK, dV, deterministic: 0 of 1000 repeats differ
"""

import argparse
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from s2_megatron.ops.api import s2_attention
from tests.calls import computes, make_call

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")
KINDS = ("sbhd", "padded", "mask", "uneven")


class Load:
    """Matmuls of random sizes on a stream of their own, and NaN in memory that the next call will take; nothing on a
    CPU.

    Without the NaN a call finds the sums of the one before, which are equal, where it reads before it has written.
    """

    def __init__(self, device, seed=0):
        self.random, self.device = random.Random(seed), torch.device(device)
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream()
            self.matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def __call__(self):
        if self.device.type != "cuda":
            return
        with torch.cuda.stream(self.stream):
            for _ in range(self.random.randrange(4)):
                rows, inner, columns = (self.random.randrange(64, 4097) for _ in range(3))
                self.matrix[:rows, :inner] @ self.matrix[:inner, :columns]
        for size in (2**16, 2**20, 2**21 + 2**18, 2**23):
            torch.full((size // 4,), float("nan"), device=self.device)


def count_differences(step, count: int, disturb) -> dict[str, int]:
    """step() -> {name: tensor}, `count` times after the first, each after disturb(); how many of them differ from the
    first, by name.

    Compared bit by bit and without waiting for the device until the end.
    """
    first = {name: tensor.detach().clone() for name, tensor in step().items()}
    different = {name: torch.zeros((), dtype=torch.int64, device=tensor.device) for name, tensor in first.items()}
    for _ in range(count):
        disturb()
        for name, tensor in step().items():
            different[name] += (tensor.view(torch.uint8) != first[name].view(torch.uint8)).any()
    return {name: number.item() for name, number in different.items()}


def repeat(
    kind: str,
    count: int,
    device,
    backend="auto",
    deterministic=False,
    length=4096,
    block=64,
    dim=128,
    dtype=torch.bfloat16,
):
    """Differences by name of one kind of call. Without `deterministic` dQ is left out: its sums may be in any order."""
    leaves, options = make_call(kind, device, length, block, dim, dtype)
    if kind == "mask":  # it covers 16 blocks
        leaves, options = make_call(kind, device, min(length, 16 * block), block, dim, dtype)

    def step():
        out, lse = s2_attention(*leaves, **options, backend=backend, deterministic=deterministic)
        seen = torch.where(torch.isfinite(lse), lse, 0.0)
        grads = torch.autograd.grad((out, seen), leaves, (out.detach(), seen.detach()))
        found = dict(
            zip(NAMES, (out.detach().contiguous(), lse.detach().contiguous(), *(grad.contiguous() for grad in grads)))
        )
        if not deterministic:
            del found["grad_query"]
        return found

    return count_differences(step, count, Load(device))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    wrong = 0
    for kind in filter(lambda kind: computes(arguments.backend, kind), KINDS):
        for deterministic in (False, True):
            found = repeat(kind, arguments.count, arguments.device, arguments.backend, deterministic)
            what = "forward and whole backward, deterministic mode" if deterministic else "forward, dK and dV"
            print(f"{kind}: {what}: {max(found.values())} of {arguments.count} repeats differ {found}", flush=True)
            wrong += sum(found.values())
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
