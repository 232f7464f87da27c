"""benchmarks/position_loss.py and benchmarks/run_offset.py without a GPU: their statistics on planted numbers, their
commands, and both at a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import position_loss, run_offset
from examples.quickstart.dataset import PreparedCorpus
from s2_megatron.tools.compare.statistics import SMALL_RUNS
from tests.megatron.without_gpt import require_gpt_model
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)


def block_times(extra: float) -> list[float]:
    """Milliseconds by block, of 8 rounds: noise of 0.1 %, a drift of 1 % by the block, more by `extra` where the loss
    by position is on."""
    noise = np.random.default_rng(0).normal(1, 0.001, size=4 * 9)
    on = position_loss.schedule(8)
    return [float(200 * (1 + 0.01 * i) * noise[i] * (1 + extra * on[i])) for i in range(len(on))]


@pytest.mark.parametrize("extra, met", [(0.0, True), (0.005, True), (0.02, False), (0.0099, False)])
def test_the_cost_of_the_loss_by_position(extra, met):
    found = position_loss.summary(block_times(extra))
    assert found["low"] < found["share"] < found["high"]
    assert abs(found["share"] - extra) < 0.001  # though the run gets slower by 1 % a block
    assert found["met"] is met


def test_the_first_round_warms_up():
    on = position_loss.schedule(2)
    assert len(on) == 12 and on[4:8] == [True, False, False, True]
    compiling = [9000.0, 300.0, 200.0, 200.0, *block_times(0.0)[4:]]
    assert abs(position_loss.summary(compiling)["share"]) < 0.001


@pytest.mark.parametrize("flags, message", [
    (("--row", "1p3b"), "error: row '1p3b'"), (("--row", "1p3b-8k-tp2-s2"), "is cut over ranks; expected one process"),
    (("--rounds", "1"), "--rounds 1: expected 2 or more"), (("--steps", "0"), "--steps 0: expected 1 or more"),
])  # fmt: skip
def test_wrong_measurements(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        position_loss.main(list(flags))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.slow
def test_the_loss_by_position_in_a_small_run(tmp_path):
    require_gpt_model()
    file = tmp_path / "cost.json"
    done = run("position_loss.py", "--row", "tiny-512-none-mixed", "--rounds", "2", "--steps", "1", "--json", file)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(file.read_text())
    assert len(found["block_ms"]) == 12 and min(found["block_ms"]) > 0
    assert found["command"].startswith("python benchmarks/position_loss.py") and found["settings"]["buckets"] == 16
    assert "of a step [" in done.stdout.splitlines()[-1]


def records(kind: str, offset: float, runs: int, seed: int) -> list[dict]:
    """Runs with the same batches whose losses differ by an offset of this standard deviation."""
    random = np.random.default_rng(seed)
    batches = 5 - np.arange(200) / 100 + random.normal(0, 0.05, size=200)
    found = []
    for index in range(runs):
        own = random.normal(0, offset)
        losses = batches + own + random.normal(0, 0.0003, size=200)
        found.append(dict(name=str(index), kind=kind if index else "", validation=3.0 + own, losses=losses.tolist()))
    return found


def test_the_interval_of_a_standard_deviation():
    draws = np.random.default_rng(0).normal(0, 0.002, size=(400, 9))
    held = [found["low"] < 0.002 < found["high"] for found in map(run_offset.spread, draws)]
    assert 0.92 < np.mean(held) < 0.98  # 95 %


def test_the_offset_of_runs():
    rounding, seeds = records("rounding", 0.001, 30, 1), records("seed", 0.01, 30, 2)
    found = run_offset.summary([*rounding, *seeds[1:]])
    for kind, offset in (("rounding", 0.001), ("seed", 0.01)):
        part = found[kind]
        assert part["runs"] == 30 and offset / 1.5 < part["validation"]["sd"] < offset * 1.5
    part = found["rounding"]
    assert part["training"]["sd"] == pytest.approx(np.std([r["validation"] for r in rounding], ddof=1), rel=0.1)
    assert "training" not in found["seed"]
    # Planted offsets of 0.001 are hardly ever a difference beside 0.0013, and nearly always beside 0.
    assert part["pairs"] == 435 and part["told_apart"]["0"] > 350 and part["told_apart"]["0.0013"] < 40
    assert part["told_apart"]["0.0037"] == 0
    text = run_offset.lines(found)
    assert len(text) == 4 and text[1].startswith("rounding") and text[2].rstrip().endswith("-")


def test_what_compare_assumes_of_small_runs_was_measured():
    content = json.loads((ROOT / "benchmarks" / "results" / "cpu_run_offset.json").read_text())
    assert run_offset.summary(content["runs"]) == content["summary"]
    rounding = content["summary"]["rounding"]
    assert SMALL_RUNS.nats == round(rounding["training"]["sd"], 4)
    assert rounding["told_apart"][f"{SMALL_RUNS.nats:g}"] <= 0.1 * rounding["pairs"]


def test_what_the_runs_differ_in(tmp_path):
    args = run_offset.parse(["--iterations", "40", "--runs", str(tmp_path)])
    variants = run_offset.variants(3, 2)
    assert [(v.seed, v.loss_scale) for v in variants] == [
        (1234, 1),
        (1234, 3),
        (1234, 5),
        (1234, 7),
        (1235, 1),
        (1236, 1),
    ]
    assert len({v.name for v in variants}) == len(variants)
    corpus = PreparedCorpus(tmp_path / "corpus", {})

    def last(command: list[str]) -> dict[str, str]:
        """What the parser would keep."""
        return dict(word.partition("=")[::2] for word in command if word.startswith("--"))

    first, rounded, *_, seeded = ([last(c) for c in run_offset.commands(v, args, corpus, False)] for v in variants)

    def differing(one, other):
        return {flag for flag in one.keys() | other.keys() if one.get(flag) != other.get(flag)}

    places = {"--save", "--load", "--tensorboard-dir", "--s2-loss-log"}
    assert differing(first[0], rounded[0]) - places == {"--loss-scale"}
    assert differing(first[0], seeded[0]) - places == {"--seed"}
    for one in (rounded[1], seeded[1]):  # the same weights' evaluation for all
        assert differing(first[1], one) <= places
        assert one["--seed"] == "1234" and {"--finetune", "--skip-train", "--bf16"} <= one.keys()


@pytest.mark.parametrize("flags, message", [
    (("--rounding", "0", "--seeds", "0"), "expected one run beside the first one"),
    (("--iterations", "1"), "--iterations 1: expected 2 or more"), (("--parallel", "0"), "--parallel 0: expected 1"),
])  # fmt: skip
def test_wrong_offset_runs(flags, message, capsys):
    with pytest.raises(SystemExit):
        run_offset.main(list(flags))
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_offset_runs_of_the_quickstart(tmp_path):
    file = tmp_path / "offset.json"
    flags = ("--iterations", "4", "--rounding", "1", "--seeds", "1", "--eval-batches", "2", "--parallel", "2")
    done = run("run_offset.py", *flags, "--runs", tmp_path / "runs", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    first, rounded, seeded = found["runs"]
    assert first["losses"][0] == rounded["losses"][0] != seeded["losses"][0]
    assert (
        first["losses"][1:] != rounded["losses"][1:]
    )  # the second step of the warm-up is the first with a step behind it
    assert (
        abs(first["validation"] - rounded["validation"]) < 0.01 * abs(first["validation"] - seeded["validation"]) + 0.01
    )
    assert set(found["summary"]) == {"rounding", "seed"}
