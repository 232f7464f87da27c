"""Results: what a file of them says about where it comes from; of those that are committed, that their verdicts are
those of their rows, and that what README and docs quote is in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import plots, report
from benchmarks.suites import s2_pattern, verdicts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = {path.name: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}


@pytest.mark.parametrize("name", [name for name, content in RESULTS.items() if "verdicts" in content])
def test_verdicts_follow_from_the_rows(name):
    content = RESULTS[name]
    assert content["verdicts"] == [
        verdict._asdict() | {"met": verdict.met} for verdict in verdicts(content["rows"], content["first_call"])
    ]


def test_only_interleaved_times_are_compared():
    """The case of group 128K is in group patterns, too, measured minutes later on a hotter card."""

    def row(group, case, entry, milliseconds):
        times = dict(total_ms_samples=[milliseconds], tflops=1000 / milliseconds)
        kind = dict(pattern=s2_pattern().describe(), block=64)
        return dict(group=group, case=case, entry=entry, **kind, **times, extra_bytes=1, memory_limit=2)

    case = "128K 32/32 D128"
    rows = [
        row("128K", case, "S2", 50.0),
        row("128K", case, "S2 deterministic", 80.0),
        row("128K", case, "FA-2 dense", 1000.0),
    ]
    rows += [row("patterns", case, "S2", 100.0), row("patterns", "128K 32/8 D128", "S2", 110.0)]
    for ordered in (rows, rows[::-1]):
        found = {verdict.text: verdict.value for verdict in verdicts(ordered)}
        assert found[f"{case}: times FlashAttention-2"] == 20.0
        assert found[f"{case}, deterministic: times FlashAttention-2"] == 12.5
        assert found[f"{case}: speed of deterministic over default"] == 50 / 80
        assert found["128K 32/8 D128: speed over 32/32"] == pytest.approx(100 / 110)
    others = [dict(found, block=128) for found in rows]  # of another pattern than the aims are for
    assert f"{case}: times FlashAttention-2" not in {verdict.text for verdict in verdicts(others)}
    apart = [row("128K", case, "S2", 50.0), row("other", case, "FA-2 dense", 1000.0)]
    assert [verdict.text.partition(",")[0] for verdict in verdicts(apart)] == ["memory limit over use"]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout in the place of this one: a function that runs git in it."""

    def git(*words):
        name = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

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


def test_the_version_of_triton_is_that_of_the_module(monkeypatch):
    """Not of the installed package, in front of which another release may lie."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="9.9.9", __spec__=object()))
    assert report.versions()["triton"] == "9.9.9"


def run_of(group: str, length: int, **milliseconds) -> list[dict]:
    """Rows of S2 ("S2") and of peers on one length, as a file has them."""
    kind = dict(
        heads=32,
        kv_heads=32,
        head_dim=128,
        dtype="bfloat16",
        tensor_format="sbhd",
        pattern="x",
        documents=None,
        batch=1,
    )
    times = {
        "FA-2 dense" if name == "FA2" else "FA-4 dense" if name == "FA4" else name: time
        for name, time in milliseconds.items()
    }
    return [
        dict(
            **kind,
            group=group,
            case=group,
            entry=entry,
            seq_length=length,
            total_ms={"median": time},
            attended_share=0.5,
            forward_tflops=1.0,
            backward_tflops=1.0,
            speed_over={other: times[other] / time for other in times if other != entry},
        )
        for entry, time in times.items()
    ]


def test_plots_of_several_files(tmp_path, monkeypatch, capsys):
    """Short lengths from one file, long ones from the other; one length that both have from the later one alone, all
    peers in one run."""
    files = {
        "crossover": [
            *run_of("1K", 1024, S2=2.0, FA2=1.0),
            *run_of("2K", 2048, S2=2.0, FA2=3.0),
            *run_of("8K", 8192, S2=2.0, FA2=8.0, FA4=4.0),
        ],
        "main": [*run_of("8K", 8192, S2=1.0, FA2=6.0), *run_of("128K", 131072, S2=1.0, FA2=20.0)],
    }
    for name, rows in files.items():
        content = dict(versions={"torch": "2", "triton": "3"}, hardware={"gpu": name}, rows=rows)
        report.write_json(tmp_path / f"{name}.json", content)
    drawn = {}
    monkeypatch.setattr(
        plots, "draw_speedup", lambda lengths, machine, path: drawn.update(lengths=lengths, machine=machine)
    )
    monkeypatch.setattr(plots, "draw_rates", lambda *arguments: None)
    plots.main([*(str(tmp_path / f"{name}.json") for name in files), "--out", str(tmp_path)])
    assert plots.speedups(drawn["lengths"], "S2") == [(1024, 0.5), (2048, 1.5), (8192, 6.0), (131072, 20.0)]
    assert (
        set(drawn["lengths"][8192]) == {"S2", "FA-2 dense"}
        and "crossover" in drawn["machine"]
        and "main" in drawn["machine"]
    )
    assert "S2 is faster than FA-2 dense from 1" in capsys.readouterr().out  # between 1K and 2K


def test_plots_refuse_the_file_of_another_benchmark(tmp_path, capsys):
    report.write_json(tmp_path / "x.json", dict(rows=[{"exchange": "sparse"}]))
    with pytest.raises(SystemExit, match="2"):
        plots.main([str(tmp_path / "x.json")])
    assert "another benchmark" in capsys.readouterr().err


def test_quoted_commands_are_those_of_the_results():
    """Whoever links a file of results quotes the command that made it, all of it; every file is linked somewhere."""
    pages = {
        path: path.read_text().replace(" \\\n    ", " ")
        for path in (ROOT / "README.md", ROOT / "benchmarks" / "NOTES.md", *sorted((ROOT / "docs").glob("*.md")))
    }
    linked = {(name, path) for name in RESULTS for path, text in pages.items() if f"results/{name})" in text}
    assert {name for name, _ in linked} == set(RESULTS)
    for name, path in linked:
        # Files of before `command` was written for all benchmarks have none.
        commands = RESULTS[name].get("command", [])  # a list where rows of several runs stand in one file
        for command in [commands] if isinstance(commands, str) else commands:
            assert f"\n{command}\n" in pages[path], f"{path.name} links {name}, whose command is: {command}"


def test_pictures_are_shown():
    text = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert [path.name for path in (ROOT / "docs").glob("*.png") if f"{path.name})" not in text] == []
