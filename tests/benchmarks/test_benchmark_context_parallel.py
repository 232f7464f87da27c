"""benchmarks/context_parallel.py without GPUs: what its gate checks, a run over gloo, and the prediction for more
ranks."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import context_parallel as benchmark
from benchmarks.group_timing import InterleavedTimer
from benchmarks.predict import Layer, explained, predict
from s2_megatron.context_parallel.copies import Arena
from s2_megatron.context_parallel.plan import zigzag_blocks
from s2_megatron.context_parallel.transport import Route
from s2_megatron.testing.context_parallel_check import is_right

RIGHT = dict(out=1.0, dq=1.0, dk=1.9, dv=1.0, repeats=True, bytes=True, waited="")


@pytest.fixture
def bench():
    """As on four GPUs, for which nothing is computed."""
    args = benchmark.parse(["--head-dim", "64", "--keep-received", "--dense-heads", "2", "--transport", "collective"])
    return benchmark.Bench(args, SimpleNamespace(size=lambda: 4, rank=lambda: 0), torch.device("cuda"))


def test_turns_without_a_lead_are_refused():
    for warmup, repeats in ((1, 5), (2, 0)):
        with pytest.raises(ValueError, match=f"--warmup {warmup} --repeats {repeats}; expected at least --warmup 2"):
            InterleavedTimer(None, torch.device("cuda"), warmup, repeats)


def test_the_gate_checks_the_kernels_that_are_timed(bench, monkeypatch):
    checked, timed = [], []

    def check_case(case, comm_types, dtype, group, device, backend, deterministic, transport):
        assert transport == "collective"
        assert (
            case.pattern.num_heads == 32
            and case.dim == 64
            and case.keep_received
            and any(head.is_dense for head in case.pattern.heads)
        )
        checked.append((backend, dtype, deterministic))
        return dict.fromkeys(comm_types, RIGHT)

    class Recorded(benchmark.ContextParallel):
        def __init__(self, *arguments, transport, **settings):
            assert transport == "collective"
            super().__init__(*arguments, transport=transport, **settings)

        def prepare(self, *arguments):
            """There is no GPU to prepare anything on."""

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


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
MEASURED = RESULTS / "h200_cp4_te.json"
EACH = json.loads((RESULTS / "h200_each_rank.json").read_text())["rows"]
LINK = 260.0


@pytest.fixture
def measured():
    content = json.loads(MEASURED.read_text())
    pattern = benchmark.pattern_of(argparse.Namespace(**content["settings"]))
    rows = [row for row in content["rows"] if row["tokens"] == 131072 and not row.get("predicted")]
    return rows, Layer(pattern, 131072, 128, 2)


def test_the_prediction_for_as_many_ranks_is_what_was_measured(measured):
    rows, layer = measured
    found = predict(rows, EACH, layer, 4, LINK)
    for field in ("tokens", "ranks", "sent_forward", "sent_backward", "planned_backward", "all_gather_forward"):
        assert found[field] == rows[0][field]
    for field in ("forward_ms", "step_ms", "speed_up", "work"):
        assert found[field] == pytest.approx(rows[0][field])


def test_the_prediction_follows_from_its_parts(measured):
    (sparse, *others), layer = measured
    rows = [
        sparse | {f"{kind}_ms": sparse[f"silent_{kind}_ms"] for kind in ("forward", "step")},
        *others,
    ]  # as if nothing had been exposed
    costs, found = layer.costs(8), predict(rows, EACH, layer, 8, LINK)
    assert found["predicted"] and (found["ranks"], found["measured_ranks"]) == (8, 4)
    assert (found["sent_forward"], found["sent_backward"]) == (max(costs.sent_forward), max(costs.sent_backward))
    pairs = layer.pattern.attended_pairs(131072)
    assert sum(costs.pairs) == pairs and found["work_ms"] == pytest.approx(
        rows[0]["one_gpu_step_ms"] * max(costs.pairs) / pairs
    )
    slowest = {
        ranks: max(row["step_ms"] / row["one_gpu_step_ms"] for row in EACH if row["ranks"] == ranks) for ranks in (4, 8)
    }
    assert found["step_ms"] == pytest.approx(
        rows[0]["step_ms"] * slowest[8] / slowest[4]
    )  # every transfer is hidden ...
    assert found["step_ms"] == pytest.approx(found["work_ms"] + found["overhead_ms"])
    assert all(transfer < beside for transfer, beside in zip(found["transfers_ms"], found["beside_ms"]))
    later = predict(rows, EACH, layer, 8, LINK / 10)  # ... but not over links of a tenth of the rate
    assert later["link_gb_per_s"] == pytest.approx(LINK / 10)
    waits = [transfer - beside for transfer, beside in zip(later["transfers_ms"], later["beside_ms"])]
    assert min(waits) > 0 and later["step_ms"] - found["step_ms"] == pytest.approx(sum(waits))
    late = [
        rows[0] | dict(step_ms=rows[0]["silent_step_ms"] + 0.5),
        *rows[1:],
    ]  # 0.5 ms that were exposed grow with the bytes
    exposed = predict(late, EACH, layer, 8, LINK)
    grown = sum(found[f"sent_{way}"] for way in ("forward", "backward")) / sum(
        rows[0][f"sent_{way}"] for way in ("forward", "backward")
    )
    assert exposed["step_ms"] - exposed["silent_step_ms"] == pytest.approx(0.5 * grown)
    late = [rows[0] | dict(step_ms=rows[0]["silent_step_ms"] + 50.0), *rows[1:]]
    exposed = predict(late, EACH, layer, 8, LINK)
    assert exposed["step_ms"] - exposed["silent_step_ms"] == pytest.approx(sum(exposed["transfers_ms"])), (
        "no more than transfers take"
    )


def test_what_links_cost_does_not_grow_with_the_bytes(measured):
    (sparse, *others), layer = measured
    base = {kind: sparse[f"silent_{kind}_ms"] for kind in ("forward", "step")}
    times = {
        f"{name}{kind}_ms": base[kind] * factor
        for kind in base
        for name, factor in (("", 1.03), ("silent_", 1), ("awake_", 1.02))
    }
    found = predict([sparse | times, *others], EACH, layer, 8, LINK)
    grown = sum(found[f"sent_{way}"] for way in ("forward", "backward")) / sum(
        sparse[f"sent_{way}"] for way in ("forward", "backward")
    )
    grown_there = found["sent_forward"] / sparse["sent_forward"]
    for kind, growth in (("step", grown), ("forward", grown_there)):
        assert found[f"awake_{kind}_ms"] == pytest.approx(found[f"silent_{kind}_ms"] * 1.02)
        assert found[f"{kind}_ms"] == pytest.approx(found[f"awake_{kind}_ms"] + 0.01 * base[kind] * growth)
    assert "links 0.20 + waiting 0.23" in explained(found) and "links alone 0.20" in benchmark.line_of(found)
    unknown = predict([sparse, *others], EACH, layer, 8, LINK)
    assert "awake_step_ms" not in unknown and "links" not in explained(unknown) + benchmark.line_of(unknown)
    quick = predict(
        [sparse | times | dict(step_ms=base["step"] * 0.99), *others], EACH, layer, 8, LINK
    )  # noise: the quickest of the three
    assert (
        quick["step_ms"]
        == quick["awake_step_ms"]
        == quick["silent_step_ms"]
        == pytest.approx(found["silent_step_ms"] * 0.99)
    )


def test_links_are_kept_awake_by_little():
    """What stands for an exchange by copies then: no flags, and a piece for the next rank."""
    route = Route.of(np.array([[0, 3], [2, 0]]), 0)
    lanes = [[torch.zeros(size, dtype=torch.uint8) for _ in range(2)] for size in (100, 2 * benchmark.LINK_BYTES)]
    arena = SimpleNamespace(lanes=lanes)
    with benchmark.awake_links():
        for lane, rows in enumerate((3, benchmark.LINK_BYTES)):
            Arena.send(arena, lane, torch.ones(rows, 20, dtype=torch.bfloat16).view(torch.uint8) | 1, route, None)
            Arena.arrive(arena, lane, 0), Arena.release(arena, lane)
    assert [[int((buffer > 0).sum()) for buffer in lane] for lane in lanes] == [[0, 100], [0, benchmark.LINK_BYTES]]


@pytest.mark.parametrize("copies", [True, False])
def test_what_is_timed_in_which_silence(bench, monkeypatch, copies):
    """By name: the step, in silence, by copies with little on the links, and one GPU."""
    contexts = []

    class Layer(benchmark.ContextParallel):
        prepare = attention = lambda *_, **__: torch.zeros(1, requires_grad=True)

        def state(self, *_):
            return SimpleNamespace(exchange=SimpleNamespace(copies=object() if copies else None))

    def medians(calls):
        contexts.append([call.context for call in calls])
        return [(float(number), 0.0) for number in range(1, 1 + len(calls))]

    monkeypatch.setattr(benchmark, "ContextParallel", Layer)
    monkeypatch.setattr(bench, "device", torch.device("cpu"))
    monkeypatch.setattr(
        bench, "tensors", lambda tokens: ([torch.zeros(1, dtype=bench.dtype, requires_grad=True)], torch.ones(1))
    )
    monkeypatch.setattr(bench, "turns", SimpleNamespace(medians=medians))
    monkeypatch.setattr(bench, "transfer", lambda *_: 1.0)
    monkeypatch.setattr(benchmark.torch.autograd, "grad", lambda *_: None)
    monkeypatch.setattr(benchmark.dist, "all_reduce", lambda *_, **__: None)
    row = bench.measure("sparse", 65536, (lambda *_: None, [], None))
    names = ["", "silent_", *(["awake_"] if copies else []), "one_gpu_"]
    kinds = [nullcontext, benchmark.silent_collectives, *([benchmark.awake_links] if copies else []), nullcontext]
    assert contexts == [kinds, kinds]
    for kind in ("forward", "step"):
        assert [row[f"{name}{kind}_ms"] for name in names] == [float(number) for number in range(1, 1 + len(names))]
    assert row["transport"] == ("copies" if copies else "collective") and ("awake_step_ms" in row) == copies


def test_own_share_by_counting():
    pattern = benchmark.pattern_of(
        argparse.Namespace(local_tokens=32, block=16, stride=4, heads=4, kv_heads=2, dense_heads=1)
    )
    layer, n_blocks, shares = Layer(pattern, 16 * 32, 16, 2), 32, []
    for rank in range(4):
        own = set(zigzag_blocks(rank, 4, n_blocks).tolist())
        keys = [key for head in range(4) for query in own for key in pattern.key_blocks(head, query).tolist()]
        shares.append(sum(key in own for key in keys) / len(keys))
    assert layer.own_share(4) == pytest.approx(min(shares))


def test_what_a_prediction_needs(measured):
    rows, layer = measured
    with pytest.raises(ValueError, match="transfer_ms above 0; measure again, or give --link"):
        predict([{name: value for name, value in rows[0].items() if name != "transfer_ms"}], EACH, layer, 8)
    with pytest.raises(ValueError, match="no row of sparse at 131072"):
        predict(rows[1:], EACH, layer, 8)
    with pytest.raises(ValueError, match="by a collective"):
        predict([rows[0] | dict(transport="collective")], EACH, layer, 8)
    for known in (EACH[:-1], EACH[2:]):  # without the last of 8 ranks, without those of 2
        with pytest.raises(
            ValueError, match=r"what each of [28] ranks computes of 131072 tokens is not known; measure it with"
        ):
            predict([rows[0] | dict(ranks=2)], known, layer, 8, LINK)
    for wrong in (["--from", str(MEASURED)], ["--first-heads", "2", "--predict", "8"], ["--first-heads", "-1"]):
        with pytest.raises(SystemExit):
            benchmark.parse(wrong)


@pytest.mark.parametrize("setting, message", [(dict(first_heads=32), "--first-heads"), (dict(stride=8), "stride is 8 in the rows, and 16 in"),
                                              (dict(backend="triton"), "backend is triton in the rows, and auto")])  # fmt: skip
def test_rows_that_are_not_predicted_from(tmp_path, setting, message):
    content = json.loads(MEASURED.read_text())
    content["settings"] |= setting
    (path := tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        benchmark.predict_from(benchmark.parse(["--predict", "8", "--from", str(path)]))


def test_rows_of_another_card_are_not_predicted_from(tmp_path):
    each = json.loads((RESULTS / "h200_each_rank.json").read_text())
    each["hardware"]["gpu"] = "none"
    (path := tmp_path / "x.json").write_text(json.dumps(each))
    with pytest.raises(
        ValueError, match=r"the rows were measured on NVIDIA H200, and .*x\.json on none; measure that there"
    ):
        benchmark.predict_from(
            benchmark.parse(["--predict", "8", "--from", str(MEASURED), "--link", "260", "--each-rank", str(path)])
        )


def test_lengths_that_are_not_predicted(tmp_path, capsys):
    """One of two lengths is said and passed by; none at all is an error."""
    path = tmp_path / "x.json"
    lacking = ["--predict", "8", "--from", str(MEASURED), "--link", "260", "--json", str(path)]
    benchmark.predict_from(benchmark.parse(lacking))
    assert (
        "not predicted: 32768 tokens: what each of 4 ranks computes of 32768 tokens is not known"
        in capsys.readouterr().out
    )
    assert [row["tokens"] for row in json.loads(path.read_text())["rows"]] == [131072]
    for lengths, message in (
        ("32768", "32768 tokens: what each of"),
        ("65536", "no row has one of --seq-lengths 65536"),
    ):
        with pytest.raises(ValueError, match=message):
            benchmark.predict_from(benchmark.parse([*lacking, "--seq-lengths", lengths]))


@pytest.mark.parametrize("command", [
    "--predict 8 --from benchmarks/results/h200_cp4_te.json --link 260 --seq-lengths 131072",
    "--predict 8 --from benchmarks/results/h200_cp2.json",
    "--predict 4 --from benchmarks/results/h200_cp2.json",
])  # fmt: skip
def test_the_documented_predictions(command, tmp_path, capsys, monkeypatch):
    """The commands and their output as docs/context_parallel.md has them; neither GPUs nor torchrun are needed."""
    root = RESULTS.parents[1]
    text = (root / "docs" / "context_parallel.md").read_text()
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["context_parallel.py", *command.split(), "--json", str(tmp_path / "x.json")])
    benchmark.main()
    printed = capsys.readouterr().out
    assert f"python benchmarks/context_parallel.py {command}\n{printed}" in text
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["sources"] == [command.split()[3], "benchmarks/results/h200_each_rank.json"]
    assert [(row["exchange"], row["tokens"], row["predicted"]) for row in content["rows"]] == [("sparse", 131072, True)]


def test_each_rank_without_a_gpu(tmp_path):
    path = tmp_path / "x.json"
    shape = "--heads 4 --kv-heads 4 --head-dim 16 --block 16 --local-tokens 32 --stride 4 --repeats 1 --warmup 0"
    command = [
        sys.executable,
        "benchmarks/each_rank.py",
        *shape.split(),
        "--ranks",
        "1,3",
        "--seq-lengths",
        "192,288",
        "--json",
        str(path),
    ]
    done = subprocess.run(command, cwd=RESULTS.parents[1], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
                          timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(path.read_text())
    rows = [(row["tokens"], row["ranks"], row["rank"]) for row in content["rows"]]
    assert rows == [(tokens, *rank) for tokens in (192, 288) for rank in ((1, 0), (3, 0), (3, 1), (3, 2))]
    assert all(
        row[f"{kind}_ms"] > 0 and row[f"one_gpu_{kind}_ms"] > 0
        for row in content["rows"]
        for kind in ("forward", "step")
    )
    assert content["settings"]["stride"] == 4 and len(done.stdout.splitlines()) >= 8


def test_a_run_over_gloo(tmp_path):
    path = tmp_path / "x.json"
    shape = "--seq-lengths 256 --heads 4 --kv-heads 4 --head-dim 16 --block 16 --local-tokens 32 --stride 4 --repeats 1 --warmup 0 --predict 4"
    script = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "benchmarks/context_parallel.py"]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "S2_COMMIT": "abc1234", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *script, *shape.split(), "--json", str(path)], cwd=RESULTS.parents[1], env=environment,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(path.read_text())
    assert content["command"].startswith(
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 2 benchmarks/context_parallel.py {shape}"
    )
    assert (
        content["commit"] == "abc1234"
        and content["versions"]["torch"] == torch.__version__
        and content["dtype"] == "float32"
    )
    assert content["hardware"] == {"gpu": "none", "gpus": []} and content["settings"]["seq_lengths"] == "256"
    measured = [row for row in content["rows"] if not row.get("predicted")]
    assert [row["exchange"] for row in measured] == ["sparse", "all_gather", "a2a"]
    assert all(
        row["sent_forward"] == row["planned_forward"] and row["sent_backward"] == row["planned_backward"]
        for row in measured
    )
    assert measured[0]["transport"] == "collective" and "awake_step_ms" not in measured[0]
    assert "not predicted: the rows were measured on none, and " in done.stdout and len(content["rows"]) == 3
