"""What surrounds compute-sanitizer: the cases run, a missing tool fails, reports are read and compared, every part
says how it went. On a GPU: scripts/sanitize.sh."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import check_kernels, sanitizer_cases
from tests.kernels.check_kernels import EXPLAINED, complete, kind_of, reports, unexplained

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sanitize.sh"
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at s2_forward_kernel+0x1b0 in walk.py:12
=========     and Read access at s2_forward_kernel+0x2a0 in walk.py:13 [16 hazards]
=========
========= Warning: Race reported between Write access at s2_forward_hopper+0x10 in hopper.py:1
=========     and Write access at s2_forward_hopper+0x20 in hopper.py:2 [4 hazards]
=========
cases done: 15
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
CLEAN = "========= COMPUTE-SANITIZER\ncases done: 15\n========= ERROR SUMMARY: 0 errors\n"
INVALID = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at s2_forward_kernel+0x60
=========     by thread (32,0,0) in block (0,0,0)
=========     Address 0x7f is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
cases done: 15
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.op
def test_cases_run(device, capsys):
    on_gpu = device == "cuda"
    backend = "triton" if on_gpu else "reference"
    sanitizer_cases.main(["--backend", backend, "--device", device])
    count = len(sanitizer_cases.CASES) + len(sanitizer_cases.PARTS) + (len(sanitizer_cases.DECODE) if on_gpu else 0)
    assert len(sanitizer_cases.case_names(backend)) == count
    assert capsys.readouterr().out.endswith(f"cases done: {count}\n")


def test_reports_are_found():
    first, second = reports(RACE)
    assert first.startswith("Error: Race reported between Write access at s2_forward_kernel") and "walk.py:13" in first
    assert "s2_forward_hopper" in second
    assert reports(CLEAN) == [] and len(reports(INVALID)) == 1
    assert complete(CLEAN) and not complete(CLEAN.replace("cases done", "")) and not complete("cases done: 15\n")


def test_only_what_is_explained_may_be_reported():
    entry = {
        "tool": "racecheck",
        "backend": "gluon",
        "report": r"s2_forward_hopper.*hopper\.py:2",
        "why": "an mbarrier orders them",
    }
    assert [report.split()[0] for report in unexplained(reports(RACE), "racecheck", "gluon", [entry])] == ["Error:"]
    assert len(unexplained(reports(RACE), "racecheck", "triton", [entry])) == 2, "explained for another backend"
    assert unexplained(reports(INVALID), "memcheck", "triton", [entry])


HAZARD = """\
========= Error: Potential {kind} hazard detected at __shared__ {address} in block ({block},0,0) :
=========     Read Thread ({reader},0,0) at s2_hopper_backward_kernel+0xa7e0 in hopper_backward.py:147
=========     Write Thread ({writer},0,0) at s2_hopper_backward_kernel+0x7fb0 in hopper_backward_loads.py:51
=========     Current Value : 236, Incoming Value : 238
=========
"""


@pytest.mark.parametrize("kind, reader, writer, explained", [
    ("RAW", 94, 450, True), ("WAR", 94, 450, True), ("WAR", 250, 260, True), ("WAR", 94, 40, False),
    ("RAW", 384, 400, False), ("WAW", 94, 450, False),
])  # fmt: skip
def test_barriers_explain_what_two_warp_groups_do(kind, reader, writer, explained):
    log = HAZARD.format(kind=kind, address="0x24660", block=1, reader=reader, writer=writer)
    assert bool(unexplained(reports(log), "racecheck", "gluon", json.loads(EXPLAINED.read_text()))) != explained
    assert unexplained(reports(log), "racecheck", "triton", json.loads(EXPLAINED.read_text()))


def test_equal_reports_are_of_one_kind():
    texts = [
        HAZARD.format(kind="WAR", address=address, block=block, reader=reader, writer=450)
        for address, block, reader in (("0x24660", 1, 94), ("0x1", 2, 95), ("0x1", 2, 96))
    ]
    kinds = [kind_of(report) for text in texts for report in reports(text)]
    assert kinds[0] == kinds[1] != kinds[2]


def test_plain_triton_has_nothing_to_explain():
    for entry in json.loads(EXPLAINED.read_text()):
        assert entry["backend"] != "triton" and entry["tool"] == "racecheck"
        assert len(entry["why"]) > 20


def test_a_missing_tool_fails_with_the_reason():
    environment = {**os.environ, "COMPUTE_SANITIZER": "/nowhere/compute-sanitizer"}
    done = subprocess.run([str(SCRIPT)], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "compute-sanitizer not found (/nowhere/compute-sanitizer)" in done.stderr


FAKE_TOOL = """\
#!/usr/bin/env bash
# Options in pairs up to the command, which is Python.
while [ "${1##*/}" != "$PYTHON_NAME" ]; do shift; done
echo "========= COMPUTE-SANITIZER"
"$@"
printf '%s' "$FAKE_REPORT"
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """(arguments) -> exit status of check_kernels with a stand-in for the tool, on the CPU."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE_TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PYTHON_NAME", Path(sys.executable).name)
    monkeypatch.setenv("FAKE_REPORT", "")
    fixed = ["--sanitizer", str(tool), "--device", "cpu", "--backends", "reference", "--shares", "2", "--jobs", "2"]
    fixed += ["--seconds", "900"]
    return lambda *arguments: check_kernels.main([*fixed, *arguments])


@pytest.mark.slow
def test_a_part_has_its_line(check, capsys):
    assert check("--parts", "memcheck", "--only", "^block16$") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == ["memcheck", "reference", "ok"]
    assert line.endswith("1 cases, 0 reports, 0 of them explained")


@pytest.mark.parametrize("part, text, wrong, done", [
    ("repeats", "sbhd: forward, dK and dV: 0 of 9 repeats differ {}\nmask: forward: 2 of 9 repeats differ {}\n", 0,
     "2 kinds of call, 1 of them differ"),
    ("compile", "kernels launched: s2_one\nkernels known: s2_one s2_two\ncases done: 3\n", 1,
     "3 cases, 1 of 2 kernels"),
    ("compile", "kernels launched: s2_one\nkernels known: s2_one\ncases done: 3\n", 0, "3 cases, 1 of 1 kernels"),
    ("graphs", "....\n==== 4 passed in 3.2s ====\n", 0, "4 passed in 3.2s"),
    ("graphs", "ssss\n==== 4 skipped in 3.2s ====\n", 1, "4 skipped in 3.2s"),
    ("repeats", "", 1, "0 kinds of call, 0 of them differ"),
])  # fmt: skip
def test_what_the_other_parts_say(tmp_path, part, text, wrong, done):
    log = tmp_path / "log"
    log.write_text(text)
    ended = subprocess.Popen(["true"])
    ended.wait()
    job = check_kernels.Job(part, "gluon", [], log, process=ended)
    said = check_kernels.judged(part, "gluon", [job])
    assert (len(said[0]), said[1]) == (wrong, done)


def test_a_choice_of_no_case_is_refused(check, capsys):
    with pytest.raises(SystemExit):
        check("--parts", "memcheck", "--only", "no such case")
    assert "--only no such case: it is in no case's name" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_found_and_what_is_late_fail(check, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_REPORT", "========= Invalid __global__ write of size 4 bytes\n=========\n")
    assert check("--parts", "memcheck", "--only", "^block16$") == 1
    found = capsys.readouterr().out
    assert "FAILED" in found and "1 x Invalid __global__ write" in found
    assert check("--parts", "repeats", "--seconds", "0.5") == 1
    assert "1 of 1 processes were not done in time" in capsys.readouterr().out


def test_shares_are_all_cases_once():
    names = sanitizer_cases.case_names("gluon")
    assert len(names) == len(set(names)) > 10
    parts = check_kernels.shares(names, 4)
    assert all(sum(bool(re.search(part, name)) for part in parts) == 1 for name in names)
