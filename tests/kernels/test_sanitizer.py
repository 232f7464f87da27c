"""What surrounds compute-sanitizer: the cases run, a missing tool fails, reports are read and compared. The tool:
scripts/sanitize.sh."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.kernels import sanitizer_cases
from tests.kernels.sanitizer_reports import EXPLAINED, complete, kind_of, reports, unexplained

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sanitize.sh"
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at s2_query_kernel+0x1b0 in walk.py:12
=========     and Read access at s2_query_kernel+0x2a0 in walk.py:13 [16 hazards]
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
=========     at s2_query_kernel+0x60
=========     by thread (32,0,0) in block (0,0,0)
=========     Address 0x7f is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
cases done: 15
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.op
def test_cases_run(device, capsys):
    on_gpu = device == "cuda"
    sanitizer_cases.main(["--backend", "triton" if on_gpu else "reference", "--device", device])
    assert capsys.readouterr().out.endswith(f"cases done: {len(sanitizer_cases.CASES) + len(sanitizer_cases.PARTS)}\n")


def test_reports_are_found():
    first, second = reports(RACE)
    assert first.startswith("Error: Race reported between Write access at s2_query_kernel") and "walk.py:13" in first
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
    assert [report.split()[0] for report in unexplained(RACE, "racecheck", "gluon", [entry])] == ["Error:"]
    assert len(unexplained(RACE, "racecheck", "triton", [entry])) == 2, "explained for another backend"
    assert unexplained(INVALID, "memcheck", "triton", [entry])


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
    assert bool(unexplained(log, "racecheck", "gluon", json.loads(EXPLAINED.read_text()))) != explained
    assert unexplained(log, "racecheck", "triton", json.loads(EXPLAINED.read_text()))


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
