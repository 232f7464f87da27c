"""The benchmark's steps without a GPU: the gates, the interleaved rounds, who is left out, rows, verdicts, files and
plots."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention as benchmark
from benchmarks import gate as gate_module
from benchmarks import plots, report, timing
from benchmarks.cases import Case, Tensors, coarsen
from benchmarks.entries import ENTRIES, LeftOut, Runner, is_ours
from benchmarks.gate import WrongResult, check_full, gate
from benchmarks.suites import SUITES, Group, s2_pattern, verdicts
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from s2_megatron.testing import oracle


def flags(*arguments):
    return benchmark.parse_arguments(list(arguments))


def small_pattern():
    return make_range_pattern(block_size=16, num_heads=4, num_kv_heads=2, ranges=((2, 1), (None, 4)))


def thd_case():
    return Case(
        "packed", small_pattern(), 100, head_dim=32, dtype="float32", tensor_format="thd", documents=(100, 37, 5)
    )


@pytest.fixture
def fresh_gate(monkeypatch):
    monkeypatch.setattr(gate_module, "_known", {})


@pytest.mark.parametrize("form", ["sbhd", "bshd", "bhsd", "thd"])
def test_gate_passes_what_is_right(fresh_gate, form):
    case = thd_case() if form == "thd" else Case("x", small_pattern(), 150, 1, 32, "float32", form)
    assert gate(case, {"S2": {"backend": "reference"}}, "cpu", 150) == {}
    assert list(gate_module._known.values()) == [None]


@pytest.mark.parametrize("wrong", range(5), ids=["out", "lse", "dq", "dk", "dv"])
def test_gate_fails_on_wrong_numbers(fresh_gate, monkeypatch, wrong):
    real = oracle.run_op

    def skewed(*arguments, **options):
        result = real(*arguments, **options)
        return result._replace(**{result._fields[wrong]: result[wrong] * 1.001})

    monkeypatch.setattr(oracle, "run_op", skewed)
    case = Case("x", small_pattern(), 150, 1, 32, "float32", "sbhd")
    with pytest.raises(WrongResult, match=oracle.Result._fields[wrong]):
        gate(case, {"S2": {"backend": "reference"}}, "cpu", 150)


def test_gate_reports_a_forced_backend_that_refuses(fresh_gate, monkeypatch):
    def refusing(*arguments, **options):
        raise ValueError("head dim 40; expected a multiple of 16")

    monkeypatch.setattr(oracle, "run_op", refusing)
    case = Case("x", small_pattern(), 64, 1, 32, "float32", "sbhd")
    for _ in range(2):
        assert "multiple of 16" in gate(case, {"S2 triton": {"backend": "triton"}}, "cpu", 64)["S2 triton"]
    with pytest.raises(ValueError, match="multiple of 16"):
        gate(case, {"S2": {"backend": "auto"}}, "cpu", 64)


def reference_runner(case, pattern=None):
    tensors = Tensors(case, "cpu")
    pattern = pattern or case.pattern
    layout = build_layout(pattern)
    if pattern is case.pattern:
        inputs, grad, form = tensors.inputs, tensors.grad, case.tensor_format
    else:
        (inputs, grad), form = tensors.contiguous("bshd"), "bshd"

    def forward():
        return s2_attention(*inputs, layout, tensor_format=form, backend="reference", packed=tensors.packed)

    return Runner(forward, inputs, grad, form, case.pairs(pattern), pattern)


def sampled_cases():
    return [
        Case("x", small_pattern(), 150, 2, 32, "float32", "sbhd"),
        Case("y", small_pattern(), 128, 1, 32, "float32", "bhsd"),
        thd_case(),
    ]


@pytest.mark.parametrize("case", sampled_cases(), ids=lambda case: case.tensor_format)
def test_full_check_passes_and_catches(case):
    runner = reference_runner(case)
    check_full(case, "S2", runner)
    forward, backward = runner.forward, runner.backward
    runner.forward = lambda: forward() * 1.01
    with pytest.raises(WrongResult, match="out"):
        check_full(case, "S2", runner)
    runner.forward = forward
    for index, name in ((0, "dQ"), (2, "dV")):
        runner.backward = lambda out, index=index: [
            grad * (1.01 if place == index else 1) for place, grad in enumerate(backward(out))
        ]
        with pytest.raises(WrongResult, match=name):
            check_full(case, "S2", runner)


def test_full_check_of_a_peers_pattern():
    case = Case("x", small_pattern(), 150, 1, 32, "float32", "sbhd")
    peer = reference_runner(case, coarsen(case.pattern, 32, 150))
    check_full(case, "peer", peer)
    peer.pattern = case.pattern
    with pytest.raises(WrongResult):
        check_full(case, "peer", peer)


def test_rounds_are_spread_evenly_over_the_sweeps():
    assert [sweep for sweep in range(12) if timing.takes_part(sweep, 12, 3)] == [3, 7, 11]
    for rounds in (1, 3, 5, 7):
        assert sum(timing.takes_part(sweep, 7, rounds) for sweep in range(7)) == rounds
    assert timing.plan_rounds(1500, 1.5) == (1, 3)
    assert timing.plan_rounds(1500, 1.5, fewest=1) == (1, 1)
    calls, rounds = timing.plan_rounds(2.0, 3.0)
    assert calls == 50 and rounds == timing.MOST_ROUNDS
    assert timing.plan_rounds(16.0, 1.0)[0] >= 6, "a launch must hide behind the call before"
    assert timing.quantile([1, 2, 3, 4, 5, 6], 0.2) == 2 and timing.quantile([7], 0.8) == 7


def fake_row(group, case, name, forward, backward, pattern=None, extra=0):
    pattern = pattern or case.pattern
    runner = SimpleNamespace(pattern=pattern, pairs=case.pairs(pattern), note="")
    samples = timing.Measured(
        1.0, extra, (forward, backward), [forward, forward * 1.1, forward], [backward, backward, backward * 1.2]
    )
    return report.make_row(group, case, name, runner, samples, 700.0)


def fake_rows():
    rows = []
    for length, ours, dense in (
        (1024, (0.2, 0.4), (0.1, 0.2)),
        (4096, (0.4, 0.8), (0.8, 1.6)),
        (131072, (20.0, 56.0), (440.0, 1090.0)),
    ):
        case = Case(f"{length // 1024}K 32/32 D128", s2_pattern(), length)
        dense_pattern = RangePattern.dense(64, 32, 32)
        rows += [fake_row(case.name, case, "S2", *ours), fake_row(case.name, case, "FA-2 dense", *dense, dense_pattern)]
    report.add_ratios(rows)
    return rows


def test_rows_and_verdicts():
    rows = fake_rows()
    last = rows[-2]
    assert last["forward_tflops"] == pytest.approx(4 * 128 * s2_pattern().attended_pairs(131072) / 20e-3 / 1e12)
    assert last["speed_over"] == {"FA-2 dense": pytest.approx(1574 / 78)}
    assert last["forward_ms"]["p80"] > last["forward_ms"]["median"] == 20.0
    found = {verdict.text: verdict for verdict in verdicts(rows, {"cold_s": 30.0, "warm_s": 10.0})}
    assert found["128K 32/32 D128: times FlashAttention-2"].met
    assert not found["first call, warm compile cache: 5 s over time"].met
    assert found["first call, cold compile cache: 60 s over time"].value == 2.0
    assert "8K 32/32 D128: times FlashAttention-2" not in found  # not measured
    heavy = Case("x", s2_pattern(), 8192)
    over = [fake_row("x", heavy, "S2", 1.0, 2.0, extra=2 * heavy.memory_limit())]
    assert not verdicts(over)[-1].met
    assert "20.18 x FA-2" in report.text_of(last)


def test_every_verdict_of_the_suite_has_its_rows():
    """A renamed case would silently drop its verdict."""
    rows = []
    for group in SUITES["hopper"](False):
        rows += [fake_row(group.name, case, name, 1.0, 2.0) for case, names in group.cases for name in names]
    report.add_ratios(rows)
    assert len(verdicts(rows, {"cold_s": 1.0, "warm_s": 1.0})) == 20
    known = set(ENTRIES) | {"S2 gluon"}
    assert all(set(names) <= known for suite in SUITES.values() for group in suite(False) for _, names in group.cases)


def test_json_and_plots(tmp_path, capsys):
    path = tmp_path / "results" / "x.json"
    rows = [{**row, "matmul_tflops": 700.0} for row in fake_rows()]
    content = dict(versions=report.versions(), hardware={"gpu": "NVIDIA H200"}, rows=rows)
    report.write_json(str(path), content)
    assert json.loads(path.read_text())["rows"][0]["case"] == "1K 32/32 D128" and [
        file.name for file in path.parent.iterdir()
    ] == ["x.json"]
    plots.main([str(path), "--out", str(tmp_path / "docs")])
    assert all((tmp_path / "docs" / name).stat().st_size > 5000 for name in ("speedup.png", "rates.png"))
    assert "S2 is faster than FA-2 dense from 2048 tokens on" in capsys.readouterr().out  # halfway, by logarithms
    path.write_text("[]")
    with pytest.raises(SystemExit, match="2"):
        plots.main([str(path)])
    assert "measure anew" in capsys.readouterr().err


@pytest.mark.parametrize("points, expected", [
    ([(1024, 0.5), (4096, 2.0)], 2048),
    ([(1024, 1.5), (4096, 2.0)], 1024),
    ([(1024, 0.5), (4096, 0.9)], None),
    ([(1024, 1.5), (2048, 0.5), (8192, 2.0)], 4096),
    ([], None),
])  # fmt: skip
def test_crossover(points, expected):
    assert plots.crossover(points) == expected


@pytest.fixture
def cpu_clock(monkeypatch, fresh_gate):
    """The benchmark's own steps on the CPU: a wall clock for events, no memory counters, the reference backend."""

    def clock(call, calls):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) * 1000 / calls

    monkeypatch.setattr(timing, "milliseconds", clock)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)  # asks every GPU, the first time
    monkeypatch.setattr(report, "hardware", lambda: {"gpu": "none"})
    monkeypatch.setattr(benchmark, "matmul_ceiling", lambda: (lambda: None, 10**9))
    monkeypatch.setattr(benchmark, "Tensors", lambda case: Tensors(case, "cpu"))
    monkeypatch.setattr(benchmark, "gate", lambda case, options: gate(case, options, "cpu", 100))


def test_a_group_from_end_to_end(cpu_clock, monkeypatch, capsys):
    case = Case("tiny", small_pattern(), 150, 1, 32, "float32", "sbhd")

    def missing(case, tensors):
        import a_package_that_is_not_installed  # noqa: F401

    def unfit(case, tensors):
        raise LeftOut("takes no such thing")

    def wrong(case, tensors):
        runner = reference_runner(case)
        forward = runner.forward
        runner.forward = lambda: forward() * 1.5
        return runner

    def crashing(case, tensors):
        raise RuntimeError("first line\nsecond line")

    added = {
        "missing": missing,
        "unfit": unfit,
        "wrong": wrong,
        "crashing": crashing,
        "peer": lambda case, tensors: reference_runner(case),
    }
    monkeypatch.setattr(benchmark, "ENTRIES", {"S2": ENTRIES["S2"], **added})
    rows = benchmark.measure_group(
        Group("tiny", ((case, ("S2", *added)),)), flags("--seconds", "0.05"), (lambda: None, 10**9)
    )
    assert [row["entry"] for row in rows] == ["S2", "peer"]
    assert rows[0]["speed_over"].keys() == {"peer"} and rows[0]["rounds"] >= 3
    printed = capsys.readouterr().out
    assert "missing left out: ModuleNotFoundError" in printed and "unfit left out: takes no such thing" in printed
    assert "wrong left out: WrongResult" in printed and "crashing left out: RuntimeError: first line" in printed
    assert "second line" not in printed


def test_every_sweep_has_an_order_of_its_own(monkeypatch):
    monkeypatch.setattr(timing, "milliseconds", lambda call, calls: call() or 1.0)
    order = []
    runners = {
        name: SimpleNamespace(forward=lambda name=name: order.append(name), backward=lambda out: None)
        for name in "abcd"
    }
    measured = {name: timing.Measured(0.0, 0, (200.0, 300.0)) for name in runners}
    timing.time_interleaved(runners, measured, None, 0.1, 6)
    sweeps = ["".join(order[start : start + 4]) for start in range(0, 24, 4)]
    assert len(order) == 24 and all(sorted(sweep) == [*"abcd"] for sweep in sweeps) and len(set(sweeps)) > 3
    assert timing.time_interleaved({}, {}, None, 0.1) == []


def test_a_wrong_result_of_ours_ends_the_run(cpu_clock, monkeypatch):
    case = Case("tiny", small_pattern(), 150, 1, 32, "float32", "sbhd")

    def skewed(case, tensors):
        runner = reference_runner(case)
        backward = runner.backward
        runner.backward = lambda out: [grad * 1.01 for grad in backward(out)]
        return runner

    monkeypatch.setitem(ENTRIES, "S2", skewed)
    with pytest.raises(WrongResult):
        benchmark.measure_group(Group("tiny", ((case, ("S2",)),)), flags("--seconds", "0.05"), (lambda: None, 10**9))
    with pytest.raises(SystemExit, match="WRONG RESULT"):
        benchmark.main(MAIN)


def test_every_gate_comes_before_any_clock(cpu_clock, monkeypatch):
    """A kernel that is wrong in the last case only: nothing is timed."""
    real = oracle.run_op

    def skewed(inputs, *arguments, **options):
        result = real(inputs, *arguments, **options)
        return result._replace(grad_key=result.grad_key * 1.01) if inputs[0].shape[0] == 64 else result

    monkeypatch.setattr(oracle, "run_op", skewed)
    monkeypatch.setattr(timing, "milliseconds", lambda call, calls: pytest.fail("timed"))
    with pytest.raises(SystemExit, match=r"WRONG RESULT.*grad_key"):
        benchmark.main(MAIN)


MAIN = [
    "--seq-lengths", "150,64", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "32", "--dtype", "float32",
    "--entries", "S2", "--block-size", "16", "--local-tokens", "32", "--stride", "4", "--no-first-call",
    "--seconds", "0.05",
]  # fmt: skip


def test_the_file_of_a_run(cpu_clock, tmp_path, capsys, monkeypatch):
    path = tmp_path / "x.json"
    monkeypatch.setenv("S2_COMMIT", "abc1234")
    benchmark.main([*MAIN, "--json", str(path)])
    content = json.loads(path.read_text())
    assert [row["seq_length"] for row in content["rows"]] == [150, 64] and content["format"] == 1
    assert content["command"].startswith("python benchmarks/attention.py --seq-lengths 150,64")
    assert content["versions"]["torch"] == torch.__version__ and content["commit"] == "abc1234"
    assert content["hardware"] == {"gpu": "none"} and content["rows"][0]["matmul_tflops"] > 0
    assert content["verdicts"][0]["met"] and "met    memory limit" in capsys.readouterr().out


def test_plug_and_lists(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "ENTRIES", ENTRIES)
    plug = tmp_path / "plug.py"
    plug.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom benchmarks.entries import entry\n"
        "@dataclass\nclass Shape:\n    block: int\n\n@entry('my kernel')\ndef mine(case, tensors): pass\n"
    )
    try:
        groups = benchmark.chosen_groups(flags("--plug", str(plug), "--entries", "S2,my kernel"))
        assert "my kernel" in groups[0].cases[0][1] and not is_ours("my kernel")
    finally:
        ENTRIES.pop("my kernel", None)
    assert not any("," in name for name in ENTRIES)  # --entries is split there
    with pytest.raises(ValueError, match="FA-2 dense"):
        benchmark.chosen_groups(flags("--entries", "FA2"))
    with pytest.raises(ValueError, match="128K"):
        benchmark.chosen_groups(flags("--suite", "hopper", "--groups", "64K"))
    benchmark.main(["--list"])
    assert "suite hopper: 8K, 32K, 128K, patterns" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        benchmark.main([])
    assert capsys.readouterr().err.startswith("error: no GPU")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "x.json"
    benchmark.main(
        ["--seq-lengths", "4096", "--num-heads", "8", "--num-kv-heads", "4", "--seconds", "0.1", "--json", str(path)]
    )
    content = json.loads(path.read_text())
    entries = {row["entry"]: row for row in content["rows"]}
    assert {"S2", "S2 deterministic", "FA-2 dense"} <= set(entries)
    assert entries["S2"]["extra_bytes"] <= entries["S2"]["memory_limit"]
    assert content["first_call"]["warm_s"] < content["first_call"]["cold_s"]
    plots.main([str(path), "--out", str(tmp_path)])
