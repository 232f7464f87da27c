"""benchmarks/context_parallel.py without GPUs: what its gate checks, a run over gloo, and the prediction for more ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import context_parallel as benchmark
from tests.context_parallel.check import is_right

RIGHT = dict(out=1.0, dq=1.0, dk=1.9, dv=1.0, repeats=True, bytes=True)


@pytest.fixture
def bench():
    """As on four GPUs, for which nothing is computed."""
    args = benchmark.parse(["--head-dim", "64", "--keep-received", "--dense-heads", "2"])
    return benchmark.Bench(args, SimpleNamespace(size=lambda: 4, rank=lambda: 0), torch.device("cuda"))


def test_the_gate_checks_the_kernels_that_are_timed(bench, monkeypatch):
    checked, timed = [], []

    def check_case(case, comm_type, dtype, group, device, backend, deterministic):
        assert case.pattern.num_heads == 32 and case.dim == 64 and case.keep_received and any(head.is_dense for head in case.pattern.heads)
        checked.append((backend, dtype, deterministic))
        return RIGHT

    class Recorded(benchmark.ContextParallel):
        def attention(self, query, *rest, backend, deterministic=False):
            timed.append((backend, query.dtype, deterministic))
            raise InterruptedError

    monkeypatch.setattr(benchmark, "check_case", check_case)
    monkeypatch.setattr(benchmark, "ContextParallel", Recorded)
    monkeypatch.setattr(bench, "tensors", lambda tokens: ([torch.empty(0, dtype=bench.dtype)], None))
    bench.check("sparse")
    with pytest.raises(InterruptedError):
        bench.measure("sparse", 65536, None)
    assert timed == [("auto", torch.bfloat16, False)] and timed[0] in checked


@pytest.mark.parametrize("fault", [dict(dk=2.1), dict(dv=float("nan")), dict(bytes=False), dict(repeats=False)])
def test_the_gate_lets_nothing_wrong_pass(bench, monkeypatch, fault):
    assert is_right(RIGHT) and not is_right(RIGHT | fault)
    assert is_right(RIGHT | fault, bits=False) == ("repeats" in fault)
    monkeypatch.setattr(benchmark, "check_case", lambda *arguments: RIGHT | fault)
    with pytest.raises(SystemExit, match="not timed"):
        bench.check("a2a")
