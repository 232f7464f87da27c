"""benchmarks/end_to_end.py without a GPU: tiny rows through torchrun, what it reads from a log, its names of rows and
its table."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import end_to_end
from benchmarks.end_to_end import Machine, add_ratios, chosen_rows, error_of, read_log, row_flags, run_logged, table
from benchmarks.end_to_end_rows import GROUPS, memory_flags, model_flags, parse_row, row_environment
from tests.megatron.arguments import parse_cases
from tests.megatron.without_gpt import require_gpt_model

ROOT = Path(__file__).resolve().parents[2]
GPUS = Machine(4, True, True)


def step_line(number, milliseconds, rate, loss, norm):
    return (
        f" [2026-01-01 10:00:00.000001] iteration        {number}/       4 | consumed samples:            {number} |"
        f" elapsed time per iteration (ms): {milliseconds} | throughput per GPU (TFLOP/s/GPU): {rate} |"
        f" learning rate: 3.000000E-04 | global batch size:     1 | lm loss: {loss} | loss scale: 1.0 |"
        f" grad norm: {norm} | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def dense_line(number, rate):
    return f" iteration        {number} | dense-equivalent throughput per GPU (TFLOP/s/GPU): {rate} |"


def memory_line(rank, number, allocated, largest, reserved, largest_reserved):
    return (
        f"[Rank {rank}] (after {number} iterations) memory (MB) | allocated: {allocated} | max allocated: {largest}"
        f" | reserved: {reserved} | max reserved: {largest_reserved}"
    )


LOG = "\n".join(
    [
        "S2 attention backend: gluon (chosen for cuda)",
        step_line(1, 9000.0, 10.0, "1.050000E+01", "9.000"),
        memory_line(0, 1, "1024.00", "9000.00", "9999.00", "9999.00"),
        dense_line(1, 20.0),
        step_line(2, 5000.0, 20.0, "1.040000E+01", "8.000"),
        step_line(3, 1000.0, 400.0, "1.030000E+01", "7.000"),
        dense_line(3, 800.0),
        memory_line(1, 3, "2048.00", "5120.00", "0.00", "7168.00"),
        memory_line(0, 3, "2048.00", "4096.00", "0.00", "6144.00"),
        step_line(4, 1200.0, 300.0, "1.020000E+01", "6.500"),
        dense_line(4, 600.0),
        memory_line(1, 4, "2048.00", "6144.00", "0.00", "7168.00"),
    ]
)


def test_log_of_a_run():
    assert read_log(LOG, 4) == dict(
        step_ms=1100.0,
        steps_ms=[1000.0, 1200.0],
        tflops=350.0,
        dense_equivalent_tflops=700.0,
        loss=10.2,
        grad_norm=6.5,
        peak_gib=6.0,
        resident_gib=2.0,
        reserved_gib=7.0,
        kernels="gluon",
    )
    assert read_log(LOG.partition("iteration        3/")[0], 4) == {}
    earlier = read_log(LOG, 3)  # the fourth step is the profiler's
    assert (earlier["steps_ms"], earlier["dense_equivalent_tflops"], earlier["loss"]) == ([1000.0], 800.0, 10.3)
    broken = read_log(LOG.replace("lm loss: 1.020000E+01 | ", "").replace("grad norm: 6.500", "grad norm: nan"), 4)
    assert broken["loss"] is None and math.isnan(broken["grad_norm"])
    infinite = read_log(LOG.replace("1.020000E+01", "INF").replace("grad norm: 6.500", "grad norm: -inf"), 4)
    assert (infinite["loss"], infinite["grad_norm"]) == (math.inf, -math.inf)


TORCHRUN = """\
W0101 torch/distributed/elastic/multiprocessing/api.py:1010] Sending process 12 closing signal SIGTERM
E0101 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 0 (pid: 11) of: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: pretrain_gpt_s2.py FAILED
"""


@pytest.mark.parametrize("output, expected", [
    ("[rank1]: ValueError: seq_length=100; expected 128\n", "ValueError: seq_length=100; expected 128"),
    ("usage: x\npretrain_gpt_s2.py: error: unrecognized arguments: --foo\n",
     "pretrain_gpt_s2.py: error: unrecognized arguments: --foo"),
    ("starting\nerror: --s2-config=x: no such file; name one\n", "error: --s2-config=x: no such file; name one"),
    ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB.\n[rank1]: RuntimeError: NCCL error\n",
     "out of memory: CUDA out of memory. Tried 2 GiB."),
    ("AssertionError: first\nduring which\n  megatron.core.SomeError: second\nthe end\n",
     "megatron.core.SomeError: second"),
    ("nothing known\nKilled\n", "Killed"),
    ("", "no output"),
])  # fmt: skip
def test_last_error_line(output, expected):
    assert error_of(output) == error_of(output + TORCHRUN) == expected


def test_large_rows_are_refused_without_a_gpu(capsys):
    end_to_end.refuse_on_cpu(chosen_rows("tiny"))
    with pytest.raises(SystemExit, match="2"):
        end_to_end.refuse_on_cpu(chosen_rows("tiny,1p3b-one-gpu"))
    assert capsys.readouterr().err.startswith("error: --rows 1p3b-8k-none-s2: no GPU here")


def test_names_of_rows():
    row = parse_row("7b-8layers-1m-tp2-cp4-pp2-full-keep-received-allgather-mixed")
    assert (row.layers, row.tokens, row.tp, row.cp, row.pp, row.exchange) == (8, 2**20, 2, 4, 2, "all_gather")
    flags = " ".join(row_flags(row, GPUS, 6, 1))
    for expected in (
        "--num-layers 8 --hidden-size 4096", "--seq-length 1048576", "--tensor-model-parallel-size 2",
        "--sequence-parallel", "--pipeline-model-parallel-size 2", "--context-parallel-size 4",
        "--recompute-granularity full", "--s2-keep-attention-output", "--s2-cp-keep-received",
        "--s2-cp-comm-type all_gather", "--s2-config configs/s2_7b_mixed.yaml", "--use-distributed-optimizer",
        "--bf16", "--seed 1234",
    ):  # fmt: skip
        assert expected in flags
    assert "--save" not in flags and "--no-gradient-accumulation-fusion" in flags
    assert "--no-gradient-accumulation-fusion" not in row_flags(row, Machine(4, True, True, fused_gradients=True), 6, 1)
    assert "--no-gradient-accumulation-fusion" in row_flags(
        row, Machine(4, True, False, fused_gradients=True), 6, 1
    )  # as launch.sh
    dense = row_flags(parse_row("1p3b-128k-cp4-full-a2a-dense"), GPUS, 6, 1)
    assert "--cp-comm-type a2a" in " ".join(dense) and not any(flag.startswith("--s2") for flag in dense)
    for name, unfused in (
        ("7b-8layers-1m-tp2-cp2-s2", True),
        ("7b-1m-tp2-cp4-dense", False),
        ("7b-1m-tp8-s2", False),
        ("1p3b-8k-s2", False),
    ):
        assert ("--no-rope-fusion" in row_flags(parse_row(name), GPUS, 6, 1)) == unfused, (
            "more than its kernel can address"
        )
    assert "--global-batch-size 12 " in " ".join(row_flags(parse_row("1p3b-32k-dense"), GPUS, 6, 3))
    assert row_environment(parse_row("1p3b-32k-offload-s2"))["NVTE_CPU_OFFLOAD_V1"] == "1"
    assert [row.name for row in chosen_rows("tiny,tiny-512-none-dense")] == list(GROUPS["tiny"])
    for name, expected in (
        ("8b-32k-s2", "1p3b, 7b, tiny"), ("1p3b-32g-s2", "'32g' is not known"), ("1p3b-cp4-s2", "128k or 1m"),
        ("1p3b-32k-cp-s2", "'cp' is not known"), ("1p3b-32k-none", "mixed"),
        ("tiny-512-s2", "densekernels"), ("1p3b-32k-full-keep-dense", "keep"), ("no_group", "1p3b-128k-cp4"),
        ("1p3b-32k-full-mlp-s2", "another one"), ("1p3b-32k-full-block3-s2", "recompute is given twice"),
        ("1p3b-32k-block25-s2", "block25 of a model of 24 layers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=expected):
            chosen_rows(name)


@pytest.mark.parametrize("name, expected", [
    ("block18-keep-s2", "--recompute-granularity full --recompute-method block --recompute-num-layers 18"),
    ("full-dense", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ("selective-dense", "--recompute-granularity selective --recompute-modules core_attn"),
    ("mlp-layernorm-dense", "--recompute-granularity selective --recompute-modules mlp layernorm"),
    ("selective-mlp-keep-s2", "--recompute-granularity selective --recompute-modules core_attn mlp"),
    ("none-hostoptimizer-s2",
     "--optimizer-cpu-offload --use-precision-aware-optimizer --overlap-cpu-optimizer-d2h-h2d"),
    ("none-fusedloss-dense", "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"),
])  # fmt: skip
def test_memory_flags_of_names(name, expected):
    assert " ".join(memory_flags(parse_row(f"1p3b-128k-{name}"))) == expected


def test_rows_of_one_gpu():
    """At each length the same memory flags for S2, mixed and dense; the best of each side is chosen from several."""
    rows = chosen_rows("1p3b-one-gpu")
    assert [row.name for row in rows] == [
        row.name for length in (8, 32, 128) for row in chosen_rows(f"1p3b-one-gpu-{length}k")
    ]
    for start in range(0, 9, 3):
        three = rows[start : start + 3]
        assert [row.attention for row in three] == ["s2", "mixed", "dense"]
        assert all(row.setting() == three[0].setting() for row in three)
        assert three[0].tp * three[0].cp * three[0].pp == 1
    best = chosen_rows("1p3b-128k-best")
    assert all(row.task() == rows[-1].task() for row in best)
    assert [row.attention for row in best] == ["s2", "dense"] * 2
    assert best[0].setting() == best[1].setting() and best[2].setting() != best[3].setting()


@pytest.mark.parametrize("name, processes, overlapped", [
    ("1p3b-8k-s2", 1, False), ("1p3b-8k-s2", 2, True), ("1p3b-8k-cp2-s2", 2, True), ("1p3b-8k-tp2-s2", 2, False),
    ("1p3b-8k-tp2-pp2-s2", 4, False), ("1p3b-8k-tp2-pp2-s2", 8, True),
])  # fmt: skip
def test_one_rank_of_data_overlaps_nothing(name, processes, overlapped):
    flags = row_flags(parse_row(name), Machine(processes, True, True, False), 6, 1)
    assert ("--overlap-grad-reduce" in flags, "--overlap-param-gather" in flags) == (overlapped, overlapped)


def test_rows_of_the_groups():
    """Dense peers with every exchange that may be their best, on two and on four GPUs; memory with every choice of
    recompute and offload."""
    for ranks, exchanges in ((2, ["p2p", "a2a"]), (4, ["p2p", "a2a", "all_gather"])):
        rows = chosen_rows(f"1p3b-128k-cp{ranks}")
        assert {(row.cp, row.tp * row.pp, row.tokens, row.recompute) for row in rows} == {(ranks, 1, 131072, "full")}
        assert [(row.attention, row.keep) for row in rows[:2]] == [("s2", True), ("s2", False)]
        assert [row.exchange for row in rows[2:]] == exchanges and all(row.stock for row in rows[2:])
    choices = {(row.recompute, row.keep, row.offload) for row in chosen_rows("memory")}
    recomputed = {("none", False), ("selective", False), ("selective", True), ("full", False), ("full", True)}
    assert choices == {(*choice, None) for choice in recomputed} | {("none", False, "modules"), ("none", False, 12)}


@pytest.mark.parametrize("size", ["1p3b", "7b"])
def test_models_are_those_of_the_launchers(size):
    settings = dict(MOCK_DATA="1", DRY_RUN="1", PREFLIGHT="0", TRANSFORMER_IMPL="local", SEQ_LENGTH="131072")
    environment = {**os.environ, **settings}
    done = subprocess.run(
        ["bash", f"examples/pretrain_{size}.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    launched = f"\n{done.stdout}".replace("\n", " ")
    row = parse_row(f"{size}-128k-s2")
    model, vocabulary = " ".join(model_flags(row)), f" --vocab-size {row.shape.vocabulary} "
    assert f" {model} " in launched and vocabulary in launched


@pytest.mark.slow
def test_megatron_and_s2_accept_every_row_of_the_groups():
    rows = chosen_rows(",".join(GROUPS) + ",1p3b-32k-cp4-full-densekernels,7b-1m-cp4-pp2-full-received-allgather-mixed")
    cases = []
    for row in rows:
        flags = [str(ROOT / flag) if flag.startswith("configs/") else flag for flag in row_flags(row, GPUS, 6, 1)]
        # Its kernel is Transformer Engine's, which Megatron looks for as soon as it makes a model config.
        flags.append("--no-rope-fusion")
        cases.append({"argv": flags, "world_size": row.tp * row.cp * row.pp, "device": "cuda"})
    for row, result in zip(rows, parse_cases(cases, **row_environment(parse_row("1p3b-32k-offload-s2")))):
        assert (result["error"], result["refused_by_megatron"]) == (None, None), (row.name, result)
        assert result["is_s2"] == (row.attention != "dense")


def fake(row, tokens_per_s, error=None):
    return dict(
        row=row.name,
        error=error,
        wall_s=50.0,
        log=f"{row.name}.log",
        step_ms=1000.0,
        tokens_per_s=tokens_per_s,
        peak_gib=80.0,
        gib_per_1k=2.5,
        activation_gib_per_1k=1.5,
        tflops=400.0,
        utilisation=0.404,
        loss=10.5,
        grad_norm=2.0,
    )


def test_ratios_and_table():
    names = ("full-keep-s2", "full-p2p-dense", "full-a2a-dense", "none-s2", "full-offload-s2", "none-dense")
    rows = chosen_rows(",".join(f"1p3b-128k-cp4-{name}" for name in names))
    results = [fake(row, speed) for row, speed in zip(rows, (3000.0, 1000.0, 1500.0, 5000.0, 4000.0))]
    results.append(dict(row=rows[5].name, error="out of memory: CUDA", wall_s=49.0, log="x.log"))
    add_ratios(rows, results)
    assert results[0]["over_dense"] == 2.0  # the faster of the dense rows, whose recomputation is the same
    assert "over_dense" not in results[1] and results[3]["over_dense"] is None and results[4]["over_dense"] is None
    assert results[3]["over_best_dense"] == pytest.approx(5000 / 1500)  # dense with other memory flags
    lines = table(results)
    assert lines[0].split()[:9] == ["row", "step", "ms", "tokens/s", "peak", "GiB", "MiB/token", "beside", "weights"]
    assert lines[1].split()[1:] == [
        "1000.0",
        "3,000",
        "80.00",
        "2.500",
        "1.500",
        "400.0",
        "40.4%",
        "2.00",
        "x",
        "2.00",
        "x",
        "10.5000",
        "2.000",
    ]
    assert lines[6].endswith("out of memory: CUDA (49 s; x.log)")


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_time_limit_ends_the_ranks_too(tmp_path, monkeypatch):
    """A launcher that is deaf to SIGTERM, with a rank in a session of its own."""
    monkeypatch.setattr(end_to_end.stop, "__defaults__", (0.2,))
    script = "trap '' TERM; setsid sleep 5000 & echo $!; wait"
    log = tmp_path / "logs" / "row.log"
    assert run_logged(["bash", "-c", script], log, 5, dict(os.environ)) is None
    rank = int(log.read_text())
    deadline = time.monotonic() + 300
    while is_alive(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    alive = is_alive(rank)
    if alive:
        os.kill(rank, signal.SIGKILL)
    assert not alive


@pytest.mark.slow
def test_tiny_rows(tmp_path, capsys, monkeypatch):
    """Two real runs, and in front of them one that fails: the others go on."""
    require_gpt_model()
    # A real refusal costs a start of Megatron; tests/megatron/test_refusals.py has it.
    refused = "tiny-512-none-keep-mixed"

    def run_or_fail(command, log, limit, environment):
        if log.stem != refused:
            return run_logged(command, log, limit, environment)
        log.parent.mkdir(parents=True)
        log.write_text(f"[rank0]: ValueError: --s2-config: --s2-keep-attention-output\n{TORCHRUN}")
        return 1

    monkeypatch.setattr(end_to_end, "run_logged", run_or_fail)
    monkeypatch.setenv("S2_COMMIT", "abc1234")
    path = tmp_path / "results" / "x.json"
    names = [refused, "tiny-512-full-keep-mixed", "tiny-512-full-dense"]
    arguments = ["--rows", ",".join(names), "--train-iters", "4", "--logs", str(tmp_path / "logs"), "--profile"]
    end_to_end.main([*arguments, "--json", str(path)])
    content = json.loads(path.read_text())
    assert content["command"].startswith("python benchmarks/end_to_end.py --rows tiny-512-none-keep-mixed,")
    assert all(content["versions"][name][0].isdigit() for name in ("megatron-core", "torch")) and content["ranks"] == 1
    assert content["commit"] == "abc1234" and content["hardware"]["gpu"]
    failed, sparse, dense = content["rows"]
    assert [row["row"] for row in content["rows"]] == names
    assert failed["error"].startswith("ValueError: --s2-config: --s2-keep-attention-output") and "step_ms" not in failed
    for row in (sparse, dense):
        assert row["error"] is None and len(row["steps_ms"]) == 2, row  # those of the profiler left out
        parts = row["profile"]["parts_ms"]
        assert sum(parts.values()) == pytest.approx(row["profile"]["step_ms"])
        assert all(parts[part] > 0 for part in ("linear", "attention", "norms/RoPE", "loss", "optimizer", "gaps"))
        finite = (
            "step_ms",
            "tokens_per_s",
            "peak_gib",
            "gib_per_1k",
            "activation_gib_per_1k",
            "tflops",
            "loss",
            "grad_norm",
        )
        assert all(math.isfinite(row[field]) for field in finite), row
        assert row["tokens_per_s"] == pytest.approx(512 / row["step_ms"] * 1e3) and row["step_ms"] > 0
    assert sparse["over_dense"] == pytest.approx(dense["step_ms"] / sparse["step_ms"])
    assert abs(sparse["loss"] - dense["loss"]) < 0.1 and sparse["kernels"] is not None and dense["kernels"] is None
    printed = capsys.readouterr().out
    assert (
        all(name in printed for name in names)
        and "beside weights" in printed
        and f"{sparse['over_dense']:.2f} x" in printed
    )
    assert "norms/RoPE" in printed


def test_a_spent_budget_starts_no_row(tmp_path, capsys, monkeypatch):
    """A row gets what is left of the budget, the time to end its ranks included."""
    limits = []

    def run(command, log, limit, environment):
        limits.append(limit)
        log.parent.mkdir(parents=True)
        log.write_text(LOG)
        monkeypatch.setattr(end_to_end.time, "monotonic", lambda: 1e9)
        return 0

    monkeypatch.setattr(end_to_end, "run_logged", run)
    path = tmp_path / "x.json"
    arguments = ["--rows", "tiny-512-none-mixed,tiny-512-none-dense", "--budget", "100", "--train-iters", "4"]
    end_to_end.main([*arguments, "--logs", str(tmp_path / "logs"), "--json", str(path)])
    first, second = json.loads(path.read_text())["rows"]
    assert len(limits) == 1 and 50 < limits[0] <= 60 and first["error"] is None
    assert second["error"] == "not started: the budget of 100 s is spent" and "step_ms" not in second
    assert capsys.readouterr().out.splitlines()[-1].endswith("not started: the budget of 100 s is spent")


@pytest.mark.parametrize("wrong", ["--train-iters 2", "--gpus 0", "--json /proc/x/y.json", "--rows tinny"])
def test_wrong_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        end_to_end.main(wrong.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith(f"error: {wrong.split()[0]}")


def test_status_1_without_a_measured_row(tmp_path):
    with pytest.raises(SystemExit) as ended:
        end_to_end.main(["--rows", "tiny-512-none-dense", "--budget", "1", "--logs", str(tmp_path)])
    assert ended.value.code == 1
