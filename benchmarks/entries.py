"""Who takes part in a measurement: our backends and the peers that are installed, each in its best layout and at its
smallest block.

An entry is a function (case, tensors) -> Runner, registered under the name that tables show:

    @entry("my kernel")
    def my_kernel(case, tensors):
        import my_package                      # not installed: one printed line, and the entry is left out
        inputs, grad = tensors.contiguous("bshd")
        pattern = coarsen(case.pattern, 128, case.length)
        return Runner(lambda: my_package.attention(*inputs), inputs, grad, "bshd", case.pairs(pattern), pattern)

`python benchmarks/attention.py --plug my_file.py` reads such a file. The peers that ship with the benchmark are in
peers.py.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from s2_megatron.ops import api as attention
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.ranges import Pattern


class LeftOut(Exception):
    """This entry cannot compute this case; the text says why."""


@dataclass
class Runner:
    """One entry, ready to be timed on one case."""

    forward: Callable[[], torch.Tensor]  # computes out
    inputs: tuple[torch.Tensor, ...]  # query, key, value; the backward returns their gradients
    grad: torch.Tensor  # gradient of out
    tensor_format: str  # of inputs, out and grad
    pairs: int  # (query, key) pairs that it attends, all heads and sequences
    pattern: Pattern | None  # what it computes, for the check at full length; None: not checked
    note: str = ""

    def backward(self, out):
        return torch.autograd.grad(out, self.inputs, self.grad, retain_graph=True)


Builder = Callable[..., Runner]
ENTRIES: dict[str, Builder] = {}


def entry(name: str):
    """Registers a builder under a name."""

    def register(builder: Builder) -> Builder:
        ENTRIES[name] = builder
        return builder

    return register


def load_plug(path: str) -> None:
    """Runs a Python file that registers entries."""
    spec = importlib.util.spec_from_file_location("benchmark_plug", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--plug {path}: not a Python file; give the path of a .py that uses @entry")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up there
    spec.loader.exec_module(module)


def our_options() -> dict[str, dict]:
    """name -> options of s2_attention: the default choice, every backend of kernels by force, and the deterministic
    backward."""
    forced = [backend for backend in attention.BACKENDS if backend not in ("auto", "reference")]
    return {
        "S2": {"backend": "auto"},
        **{f"S2 {backend}": {"backend": backend} for backend in forced},
        "S2 deterministic": {"backend": "auto", "deterministic": True},
    }


def is_ours(name: str) -> bool:
    return name in our_options()


def _ours(case, tensors, options) -> Runner:
    layout = build_layout(case.pattern, tensors.device)

    def forward():
        return s2_attention(*tensors.inputs, layout, tensor_format=case.tensor_format, packed=tensors.packed, **options)

    return Runner(forward, tensors.inputs, tensors.grad, case.tensor_format, case.pairs(case.pattern), case.pattern)


for _name, _options in our_options().items():
    ENTRIES[_name] = partial(_ours, options=_options)
