"""benchmarks/context_parallel.py without GPUs: what the gate checks, what is timed, a run over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from benchmarks import context_parallel as benchmark
from benchmarks.one_layer import line_of
from benchmarks.timing import InterleavedTimer
from s2_megatron.context_parallel import exchange as cp_exchange
from s2_megatron.testing.context_parallel_check import is_right

ROOT = Path(__file__).resolve().parents[2]
RIGHT = dict(out=1.0, dq=1.0, dk=1.9, dv=1.0, repeats=True, bytes=True, waited="")
SHAPE = "--heads 4 --kv-heads 4 --head-dim 16 --block 16 --local-tokens 32 --stride 4 --repeats 1 --warmup 0"


@pytest.fixture
def bench():
    """As on four GPUs, for which nothing is computed."""
    args = benchmark.parse(["--head-dim", "64", "--keep-received", "--dense-heads", "2"])
    return benchmark.Bench(args, SimpleNamespace(size=lambda: 4, rank=lambda: 0), torch.device("cuda"))


def test_too_few_repeats_are_refused():
    for warmup, repeats in ((1, 5), (2, 0)):
        with pytest.raises(ValueError, match=f"--warmup {warmup} --repeats {repeats}; expected at least --warmup 2"):
            InterleavedTimer(None, torch.device("cuda"), warmup, repeats)


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--two-pass-heads", "-1"), "--two-pass-heads -1; expected 0 or more; leave it out"),
        (("--documents", "-1"), "--documents -1; expected 0 or more; leave it out"),
        (("--documents", "2", "--te-exchanges", "a2a"), "--te-exchanges a2a with --documents; expected one of them"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, flags, words):
    with pytest.raises(SystemExit) as end:
        benchmark.parse([*flags])
    assert end.value.code == 2 and f"error: {words}" in capsys.readouterr().err


def test_the_gate_checks_the_kernels_that_are_timed(bench, monkeypatch):
    checked, timed = [], []

    def check_case(case, comm_types, dtype, group, device, backend, deterministic):
        assert case.pattern.num_heads == 32 and case.dim == 64 and case.keep_received
        assert any(head.is_dense for head in case.pattern.heads)
        checked.append((backend, dtype, deterministic))
        return dict.fromkeys(comm_types, RIGHT)

    class Recorded(benchmark.ContextParallel):
        def prepare(self, *arguments):
            """There is no GPU to prepare anything on."""

        def attention(self, query, *rest, packed, backend, deterministic=False):
            timed.append((backend, query.dtype, deterministic))
            raise InterruptedError

    monkeypatch.setattr(benchmark, "check_case", check_case)
    monkeypatch.setattr(benchmark, "ContextParallel", Recorded)
    monkeypatch.setattr(bench, "tensors", lambda tokens: ([torch.empty(0, dtype=bench.dtype)], None))
    bench.check("sparse")
    with pytest.raises(InterruptedError):
        bench.measure("sparse", 65536, None)
    assert timed == [("auto", torch.bfloat16, False)] and timed[0] in checked


@pytest.mark.parametrize(
    "fault", [dict(dk=2.1), dict(dv=float("nan")), dict(bytes=False), dict(repeats=False), dict(waited="a copy")]
)
def test_the_gate_lets_nothing_wrong_pass(bench, monkeypatch, fault):
    assert is_right(RIGHT) and not is_right(RIGHT | fault)
    assert is_right(RIGHT | fault, bits=False) == ("repeats" in fault)
    monkeypatch.setattr(
        benchmark, "check_case", lambda case, comm_types, *_, **__: dict.fromkeys(comm_types, RIGHT | fault)
    )
    with pytest.raises(SystemExit, match="not timed"):
        bench.check("a2a")


@pytest.mark.parametrize("comm_type", ["sparse", "a2a"])
def test_what_is_timed_with_communication_disabled(bench, monkeypatch, comm_type):
    """By name: the step, the same with communication disabled, and one GPU, all of them interleaved."""
    contexts = []

    class Layer(benchmark.ContextParallel):
        prepare = attention = lambda *_, **__: torch.zeros(1, requires_grad=True)
        state = lambda self, *_: SimpleNamespace(exchange=None)  # noqa: E731

    def medians(calls):
        contexts.append([call.context for call in calls])
        return [(float(number), 0.0) for number in range(1, 1 + len(calls))]

    monkeypatch.setattr(benchmark, "ContextParallel", Layer)
    monkeypatch.setattr(bench, "device", torch.device("cpu"))
    monkeypatch.setattr(
        bench, "tensors", lambda tokens: ([torch.zeros(1, dtype=bench.dtype, requires_grad=True)], torch.ones(1))
    )
    monkeypatch.setattr(bench, "timer", SimpleNamespace(medians=medians))
    monkeypatch.setattr(bench, "transfer", lambda *_: 1.0)
    monkeypatch.setattr(benchmark.torch.autograd, "grad", lambda *_: None)
    monkeypatch.setattr(benchmark.dist, "all_reduce", lambda *_, **__: None)
    row = bench.measure(comm_type, 65536, (lambda *_: None, [], None))
    assert contexts == [[nullcontext, benchmark.communication_disabled, nullcontext]] * 2
    for kind in ("forward", "step"):
        assert [row[f"{name}{kind}_ms"] for name in ("", "no_comm_", "one_gpu_")] == [1.0, 2.0, 3.0]
    assert row["speed_up"] == 3.0
    assert ("transfer_ms" in row) == (comm_type == "sparse")


def test_communication_disabled_reaches_the_exchange(monkeypatch):
    """No collective of the exchange is called, and what would have been received stays as it was; afterwards it is."""
    called = []
    for name in ("all_to_all_single", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, lambda *args, group, name=name: called.append(name))
    group, received = SimpleNamespace(size=lambda: 2, rank=lambda: 0), torch.full((2, 3), 7.0)

    def both():
        cp_exchange.all_to_all(received, torch.zeros(2, 3), [1, 1], [1, 1], group)
        cp_exchange.all_gather(torch.zeros(3), group)

    with benchmark.communication_disabled():
        both()
    assert called == [] and (received == 7.0).all()
    both()
    assert called == ["all_to_all_single", "all_gather_into_tensor"]


def test_the_line_of_a_row():
    row = dict(
        exchange="sparse",
        tokens=131072,
        ranks=2,
        sent_forward=78 * 2**20,
        sent_backward=124 * 2**20,
        planned_forward=78 * 2**20,
        planned_backward=124 * 2**20,
        all_gather_forward=1024 * 2**20,
        forward_ms=9.0,
        step_ms=40.0,
        no_comm_step_ms=39.0,
        work=1.001,
        speed_up=1.85,
        one_gpu_step_ms=74.0,
        step_cpu_ms=3.6,
    )
    line = line_of(row)
    for part in (
        "sent     78.0 +    124.0 MiB (plan 78.0 + 124.0, 7.6% of all-gather)",
        "step    40.00 ms",
        "exposed   1.00 ms (2.5%)",
        "1.85 x one GPU (74.00 ms)",
    ):
        assert part in line, line


@pytest.mark.slow
def test_a_run_over_gloo(tmp_path):
    path = tmp_path / "x.json"
    script = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "benchmarks/context_parallel.py"]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "S2_COMMIT": "abc1234", "CUDA_VISIBLE_DEVICES": ""}
    arguments = f"--seq-lengths 256 {SHAPE}"
    done = subprocess.run(
        [sys.executable, *script, *arguments.split(), "--json", str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(path.read_text())
    assert content["command"].startswith(
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 2 benchmarks/context_parallel.py {arguments}"
    )
    assert content["commit"] == "abc1234" and content["dtype"] == "float32"
    assert content["versions"]["torch"] == torch.__version__
    assert content["hardware"] == {"gpu": "none", "gpus": []} and content["settings"]["seq_lengths"] == "256"
    assert [row["exchange"] for row in content["rows"]] == ["sparse", "all_gather", "a2a"]
    for row in content["rows"]:
        assert row["sent_forward"] == row["planned_forward"] and row["sent_backward"] == row["planned_backward"]
        assert row["no_comm_step_ms"] > 0 and row["one_gpu_step_ms"] > 0
    assert done.stdout.count("exposed") == 3 and done.stdout.count("x one GPU") == 3
