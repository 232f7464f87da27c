"""benchmarks/host_time.py without a GPU: the host's part of calls whose kernels do nothing, and where its time goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import host_time

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, interpret=False) -> subprocess.CompletedProcess:
    """The command in a process of its own: in this one kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    command = [sys.executable, "benchmarks/host_time.py", "--bursts", "2", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("kernels, chosen, launch", [
    ("hopper", "gluon (Hopper)", "hopper/repeats.py"), ("portable", "triton (portable)", "triton/launch.py"),
])  # fmt: skip
def test_host_time_of_kernels_that_do_nothing(tmp_path, kernels, chosen, launch):
    path = tmp_path / "x.json"
    done = run("--stub", kernels, "--profile", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert f"S2 attention kernels: {chosen}" in done.stderr
    content = json.loads(path.read_text())
    rows = {row["entry"]: row for row in content["rows"]}
    assert set(rows) == {"S2", "function"} and content["command"].startswith("python benchmarks/host_time.py")
    for row in rows.values():
        assert 0 < row["forward_us"] < row["both_us"]["p80"] and row["in_a_row_us"] is None
    # The op does more than a function that does nothing.
    assert rows["S2"]["both_us"]["median"] > rows["function"]["both_us"]["median"]
    profile = done.stdout.partition("own us")[2]
    assert launch in profile and "run_backward" in profile  # the backward ran in the profiled thread
    assert profile.splitlines()[-1].endswith("us under the profiler")


@pytest.mark.slow
def test_what_cannot_be_timed_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, words in (([], "no GPU; --stub hopper"), (["--seq-lengths", "1K"], "--seq-lengths 1K: expected")):
        with pytest.raises(SystemExit, match="2"):
            host_time.main(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {words}")
    done = run("--stub", "hopper", interpret=True)
    assert done.returncode == 2
    assert done.stderr == "error: TRITON_INTERPRET=1 is set, and kernels are interpreted; unset it\n"


def test_text_of_rows():
    times = [(20.0, 80.0), (22.0, 78.0), (24.0, 86.0)]
    rows = [
        host_time.make_row(1024, "S2", [(2 * first, 2 * second) for first, second in times], 210.0),
        host_time.make_row(1024, "SDPA", times, 105.0),
    ]
    line = host_time.text_of(rows[0], rows)
    assert line.split()[:10] == ["1K", "S2", "forward", "44.0", "us", "backward", "160.0", "us", "both", "200.0"]
    assert line.endswith("in a row   210.0 us  2.00 x SDPA") and "x SDPA" not in host_time.text_of(rows[1], rows)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "x.json"
    host_time.main(["--seq-lengths", "1024", "--bursts", "3", "--profile", "--json", str(path)])
    rows = {row["entry"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {"S2", "S2 triton", "function", "SDPA"}
    assert all(row["in_a_row_us"] > 0 for row in rows.values())
