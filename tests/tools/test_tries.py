"""Whatever an impatient user tries ends soon: with status 0 and a result, or with error lines and status 2; without a
traceback, and without a file that looks complete and is not.

The tries are drawn from the commands' own parsers and the files of their good lines (tries.py), and run in forks of a
process that has imported everything (scripts/tried.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from s2_megatron.megatron.errors import FAULT
from s2_megatron.tools import commands
from tests.megatron.without_gpt import require_gpt_model
from tests.processes import found_by, python_path
from tests.tools import tries

pytest.importorskip("transformers", reason="transformers is an optional extra: pip install 's2-megatron[hf]'")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "tried.py"
QUICK = 100  # more than any option has values: one of each


def run(folder: Path, lines: str, share: int, seconds: float) -> dict:
    """What tried.py found."""
    require_gpt_model()
    environment = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    return found_by(SCRIPT, folder / "lab", lines, share, seconds=seconds, **environment)


def check(found: dict, least: int) -> None:
    assert found["tries"] >= least and {"0", "2"} <= set(found["statuses"]), found["statuses"]
    shown = [f"{each['case']}: {each['mistake']}\n{each['err'] or each['out']}" for each in found["broken"][:10]]
    assert not shown, f"{len(found['broken'])} of {found['tries']} tries break the rule:\n" + "\n".join(shown)


def test_every_command_has_a_line():
    assert {line.tool for line in tries.LINES.values()} == {*commands.COMMANDS, "quickstart", "pretrain"}


@pytest.mark.slow
def test_some_tries_end_well(tmp_path):
    """One value of every option, one change of every input file."""
    check(run(tmp_path, "all", QUICK, 1800), 200)


@pytest.mark.long
@pytest.mark.parametrize("name", tries.LINES)
def test_every_try_ends_well(name, tmp_path):
    found = run(tmp_path, name, 1, 3600)
    check(found, 10)


def result(status=0, out="text", err="", left=(), **more) -> dict:
    usual = {"killed": None, "incomplete": None, "should write": False}
    return {"status": status, "out": out, "err": err, "left": list(left), **usual, **more}


GOOD = {
    "a result": result(),
    "an error": result(2, "", "error: --load x: no such folder; expected one\n"),
    "several mistakes": result(2, "", "error: a: 2 problems\n  one; use 1\n  two\nerror: b; use 2\n"),
    "a note": result(err="note: at most 5\n"),
}
BAD = {
    "a traceback": result(1, "", "Traceback (most recent call last):\n"),
    "killed": result(None, "", killed="SIGXCPU"),
    "no memory": result(2, "", "error: not enough memory; give less\n"),
    "no error line": result(2, "", ""),
    "another status": result(1, "", "error: a; use 1\n"),
    "a line beside the error": result(2, "", "error: a; use 1\nb\n"),
    "a fault": result(2, "", f"error: {FAULT} a.py:1: KeyError: 'x'; expected to train or to refuse; report it\n"),
    "no remedy": result(2, "", "error: [Errno 28]\n"),
    "a page": result(2, "", f"error: {'x' * 5000}; use 1\n"),
    "a half": result(2, "", "error: a; use 1\n", ["a.json"]),
    "an error and status 0": result(0, "text", "error: a; use 1\n"),
    "nothing said": result(0, ""),
    "nothing written": result(**{"should write": True}),
    "not complete": result(incomplete="a.json is not complete"),
}


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_the_rule_itself(name):
    case = tries.Case("a case", "export-pattern", [])
    assert (tries.mistake(case, (GOOD | BAD)[name]) is None) == (name in GOOD)


def test_what_is_not_complete(tmp_path):
    for name, content in (("a.json", "{"), ("a.png", "PNG"), ("a.html", "<html>")):
        (tmp_path / name).write_text(content)
        assert tries.incomplete([tmp_path / name]) == f"{name} is not complete"
    (tmp_path / "a.json").write_text("{}")
    assert tries.incomplete([tmp_path / "a.json"]) is None
