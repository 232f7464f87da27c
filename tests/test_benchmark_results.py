"""Results: what a file of them says about where it comes from; of those that are committed, that their verdicts are those of their rows, and
that what README and docs quote is in them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.suites import verdicts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = {path.name: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}


@pytest.mark.parametrize("name", [name for name, content in RESULTS.items() if "verdicts" in content])
def test_verdicts_follow_from_the_rows(name):
    content = RESULTS[name]
    assert content["verdicts"] == [verdict._asdict() | {"met": verdict.met} for verdict in verdicts(content["rows"], content["first_call"])]


def test_only_what_was_timed_in_turns_is_compared():
    """The case of group 128K is in group patterns, too, measured minutes later on a hotter card."""

    def row(group, case, entry, milliseconds):
        times = dict(total_ms_samples=[milliseconds], tflops=1000 / milliseconds)
        return dict(group=group, case=case, entry=entry, **times, extra_bytes=1, memory_limit=2)

    case = "128K 32/32 D128"
    rows = [row("128K", case, "S2", 50.0), row("128K", case, "S2 deterministic", 80.0), row("128K", case, "FA-2 dense", 1000.0)]
    rows += [row("patterns", case, "S2", 100.0), row("patterns", "128K 32/8 D128", "S2", 110.0)]
    for ordered in (rows, rows[::-1]):
        found = {verdict.text: verdict.value for verdict in verdicts(ordered)}
        assert found[f"{case}: times FlashAttention-2"] == 20.0
        assert found[f"{case}, deterministic: times FlashAttention-2"] == 12.5
        assert found[f"{case}: speed of deterministic over default"] == 50 / 80
        assert found["128K 32/8 D128: speed over 32/32"] == pytest.approx(100 / 110)
    apart = [row("128K", case, "S2", 50.0), row("other", case, "FA-2 dense", 1000.0)]
    assert [verdict.text.partition(",")[0] for verdict in verdicts(apart)] == ["memory limit over use"]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout in the place of this one: a function that runs git in it."""

    def git(*words):
        name = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    for name in ("kernel.py", "benchmarks/results/x.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    monkeypatch.setattr(report, "ROOT", tmp_path.resolve())
    monkeypatch.delenv("S2_COMMIT", raising=False)
    return git


def test_the_commit_of_a_result(checkout, tmp_path, monkeypatch):
    head = checkout("rev-parse", "--short", "HEAD")
    assert report.commit() == head
    (tmp_path / "benchmarks" / "results" / "x.json").write_text("2")  # the result of the run before
    (tmp_path / "untracked.log").write_text("2")
    assert report.commit() == head
    (tmp_path / "kernel.py").write_text("2")
    assert report.commit() == f"{head}-dirty"
    monkeypatch.setenv("S2_COMMIT", "abc1234")
    assert report.commit() == "abc1234"
    monkeypatch.setenv("S2_COMMIT", "")
    monkeypatch.setattr(report, "ROOT", (tmp_path / "benchmarks").resolve())  # a copy inside of somebody's checkout
    assert report.commit() is None
    monkeypatch.setattr(report, "ROOT", tmp_path.resolve())
    monkeypatch.setenv("PATH", "")
    assert report.commit() is None


def test_provenance(monkeypatch):
    monkeypatch.setenv("S2_COMMIT", "abc1234")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    found = report.provenance("benchmarks/x.py", ["--entries", "S2,FA-2 dense"], "torchrun --nproc-per-node 4")
    assert list(found) == ["command", "versions", "hardware", "environment", "commit"] and found["commit"] == "abc1234"
    assert found["command"] == "torchrun --nproc-per-node 4 benchmarks/x.py --entries 'S2,FA-2 dense'"
    assert {"python", "torch", "cudnn", "triton", "megatron-core"} <= found["versions"].keys()
    assert found["environment"]["NCCL_NVLS_ENABLE"] == "0" and "TRITON_CACHE_DIR" not in found["environment"]
