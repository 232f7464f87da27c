"""What `s2-megatron compare` refuses: one line that names the file or the option, status 2, and nothing overwritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from s2_megatron.tools import commands, outputs
from s2_megatron.tools.compare import readers
from s2_megatron.tools.compare.readers import split_run
from tests.processes import python_path
from tests.tools.logged_runs import losses, s2_arguments, write_loss_log

HEADER = {"run": {"arguments": {}, "flops_per_token": None}, "iteration": 1, "time": 1.0}
RECORD = {"iteration": 1, "lm loss": 3.0, "time": 1.0}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder that the commands run in, with dense.jsonl and s2.jsonl."""
    monkeypatch.chdir(tmp_path)
    write_loss_log(tmp_path / "dense.jsonl", losses(1, 11))
    write_loss_log(tmp_path / "s2.jsonl", losses(1, 21), **s2_arguments())
    return tmp_path


def compare(*arguments: str) -> int:
    return commands.main(["compare", *arguments])


def refused(capsys, *arguments: str) -> str:
    """The one line of a refused comparison, which printed nothing else."""
    assert compare(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    "option, file, message",
    [
        ("--html", "dense.jsonl", "--html dense.jsonl: expected a file whose name ends in .html or .htm"),
        ("--html", "compare.png", "--html compare.png: expected a file whose name ends in .html"),
        ("--png", "compare.html", "--png compare.html: expected a file whose name ends in .png; give a path such as"),
        ("--png", "folder.png", "--png folder.png: expected a file whose name ends in .png"),
        ("--html", "log.html", "--html log.html: would overwrite the input log.html"),
        ("--png", "link.png", "--png link.png: would overwrite the input dense.jsonl"),
    ],
)
def test_an_output_overwrites_no_input(folder, capsys, option, file, message):
    write_loss_log(folder / "log.html", losses(1, 31), **s2_arguments())
    (folder / "folder.png").mkdir()
    (folder / "link.png").symlink_to("dense.jsonl")
    before = contents(folder)
    assert message in refused(capsys, "one=dense.jsonl", "two=s2.jsonl,log.html", option, file)
    assert contents(folder) == before


@pytest.mark.parametrize("option, name", [("--html", "a.html"), ("--png", "a.png")])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(folder, capsys, monkeypatch, option, name):
    monkeypatch.setattr(readers, "read_run", lambda *_: pytest.fail("the runs were read"))
    error = refused(capsys, "dense.jsonl", "s2.jsonl", option, f"s2.jsonl/missing/{name}")
    assert f"{option} s2.jsonl/missing/{name}: {folder}/s2.jsonl is a file; expected a folder; name another" in error


def test_the_folder_of_an_output_is_made(folder):
    assert compare("dense.jsonl", "s2.jsonl", "--html", "missing/folder/page.html") == 0
    assert (folder / "missing/folder/page.html").read_text().endswith("</html>\n")


def test_two_outputs_are_two_files(folder, capsys):
    (folder / "compare.png").symlink_to("compare.html")
    error = refused(capsys, "dense.jsonl", "s2.jsonl", "--html", "compare.html", "--png", "compare.png")
    assert "--png compare.png: would overwrite the file of --html" in error
    assert not (folder / "compare.html").exists()


def test_an_output_is_replaced_in_one_step(folder, monkeypatch):
    """A write that fails in between leaves the old file, and nothing beside it."""
    page = folder / "out" / "compare.html"
    outputs.write_file(page, b"old")

    def fails(source, target):
        assert source.read_bytes() == b"new" and target.read_bytes() == b"old"
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(outputs.os, "replace", fails)
        with pytest.raises(OSError, match="no space"):
            outputs.write_file(page, b"new")
    assert contents(page.parent) == {"compare.html": b"old"}
    outputs.write_file(page, b"new")
    assert contents(page.parent) == {"compare.html": b"new"}


@pytest.mark.parametrize("run", ["", " ", "b=", "s2.jsonl,", ",s2.jsonl", "b=s2.jsonl,,s2.jsonl"])
def test_an_empty_place_is_not_the_current_folder(folder, capsys, run):
    (folder / "s2.jsonl").rename(folder.parent / f"{folder.name}.jsonl")  # one log is left here, which would be read
    assert f"run {run!r}: an empty place; expected [NAME=]PLACE" in refused(capsys, "dense.jsonl", run)


@pytest.mark.parametrize(
    "text, name, places",
    [
        ("s2.jsonl", "", ["s2.jsonl"]),
        ("a=s2.jsonl", "a", ["s2.jsonl"]),
        ("a=b=c/log", "a", ["b=c/log"]),
        ("b=c/log", "", ["b=c/log"]),
        ("./b=c/log", "", ["./b=c/log"]),
        ("b=c/log,s2.jsonl", "", ["b=c/log", "s2.jsonl"]),
        ("a=b=c/log,s2.jsonl", "a", ["b=c/log", "s2.jsonl"]),
        ("lr=1=s2.jsonl", "lr=1", ["s2.jsonl"]),
        ("a=entity/project/run", "a", ["entity/project/run"]),
        ("a=none=1/log", "a", ["none=1/log"]),
        ("none/a=1", "", ["none/a=1"]),
        ("=s2.jsonl", "", ["=s2.jsonl"]),
    ],
)
def test_equals_signs_in_paths(folder, text, name, places):
    (folder / "b=c").mkdir()
    (folder / "b=c" / "log").touch()
    assert split_run(text) == (name, places)


@pytest.mark.parametrize("bad, count, first", [([299], 1, 300), ([149], 1, 150), (range(280, 300), 20, 281)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_losses_that_are_no_finite_number(folder, capsys, bad, count, first, value):
    values = losses(1, 21)
    values[list(bad)] = value
    write_loss_log(folder / "s2.jsonl", values, **s2_arguments())
    error = refused(capsys, "dense.jsonl", "s2.jsonl", "--json")
    assert f"run s2 (s2.jsonl): {count} of 300 values of 'lm loss' are no finite numbers" in error
    assert f"the first at iteration {first}; expected finite losses" in error


def test_losses_that_a_resume_took_back_may_be_infinite(folder, capsys):
    """They never reached the weights. Gradient norms of skipped iterations may be infinite, too."""
    values = losses(1, 21)
    diverged = np.concatenate([values[:200], np.full(50, np.nan)])
    write_loss_log(folder / "s2.jsonl", diverged, **s2_arguments())
    write_loss_log(folder / "s2.jsonl", values[200:], first=201, start=5000.0, append=True, **s2_arguments())
    text = (folder / "s2.jsonl").read_text()
    (folder / "s2.jsonl").write_text(text.replace('"grad_norm": 0.01,', '"grad_norm": Infinity,'))
    assert "Infinity" in (folder / "s2.jsonl").read_text()
    assert compare("dense.jsonl", "s2.jsonl", "--json", "--png", "compare.png") == 0
    assert "NaN" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "record, message",
    [
        (RECORD | {"iteration": "2"}, "with an integer of 0 or more as iteration"),
        (RECORD | {"iteration": 2.5}, "with an integer of 0 or more as iteration"),
        (RECORD | {"iteration": True}, "with an integer of 0 or more as iteration"),
        (RECORD | {"iteration": -1}, "with an integer of 0 or more as iteration"),
        (RECORD | {"iteration": 10**30}, "with an integer of 0 or more as iteration"),
        (RECORD | {"iteration": None}, "with an integer of 0 or more as iteration"),
        (RECORD | {"time": "now"}, "with a number of 0 or more as time"),
        (RECORD | {"time": -1.0}, "with a number of 0 or more as time"),
        (RECORD | {"time": float("nan")}, "with a number of 0 or more as time"),
        (RECORD | {"lm loss": True}, "with a number that a float holds as lm loss"),
        (RECORD | {"lm loss": "3.0"}, "with a number that a float holds as lm loss"),
        (RECORD | {"lm loss": 10**400}, "with a number that a float holds as lm loss"),
        (RECORD | {"validation": 3}, "with a text as validation"),
        ({"run": 3}, "with a JSON object as run"),
        ({"run": {}}, "a header without a JSON object as arguments"),
        (HEADER | {"run": {"arguments": [], "flops_per_token": None}}, "a header without a JSON object as arguments"),
        (HEADER | {"run": {"arguments": {}}}, "without numbers or null as flops_per_token"),
        (HEADER | {"run": {"arguments": {}, "flops_per_token": 3}}, "without numbers or null as flops_per_token"),
        (HEADER | {"run": {"arguments": {}, "flops_per_token": {"dense": "6"}}}, "without numbers or null"),
        (
            HEADER | {"run": {"arguments": {}, "flops_per_token": None, "machine": "H100"}},
            "something else than a JSON object as machine",
        ),
    ],
)
def test_records_of_other_types(folder, capsys, record, message):
    with (folder / "s2.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    error = refused(capsys, "dense.jsonl", "s2.jsonl")
    assert f"error: s2.jsonl, line {1 + 300 + 3 + 1}: " in error and message in error


@pytest.mark.parametrize("line", [b"\x80\xff\x00binary", b"[" * 100_000, b'{"iteration": ' + b"9" * 5000 + b"}"])
def test_lines_that_are_no_json(folder, capsys, line):
    with (folder / "s2.jsonl").open("ab") as file:
        file.write(line + b"\n")
    error = refused(capsys, "dense.jsonl", "s2.jsonl")
    assert "error: s2.jsonl, line 305: expected one JSON object of a loss log, got '" in error and len(error) < 500


@pytest.mark.parametrize(
    "name, content",
    [
        ("train.log", b" [2026-01-01 00:00:00] iteration        1/      60 | lm loss: 5.545177E+00 |\n"),
        ("train.log", b"one line without an end"),
        ("settings.json", b'{\n "seed": 1\n}\n'),
        ("page.png", b"\x89PNG\r\n\x1a\n\n"),
    ],
)
def test_a_file_that_is_no_loss_log(folder, capsys, name, content):
    """The whole file is the mistake, not one line of it."""
    (folder / name).write_bytes(content)
    error = refused(capsys, "dense.jsonl", name)
    begin = repr(content[:10].split(b"\n")[0].strip(b"\r").decode("utf-8", "backslashreplace"))[:-1]
    assert f"error: run {name}: not a loss log, because no line of it is a record of one" in error
    assert f"(it begins with {begin}" in error
    assert "expected a file of --s2-loss-log, a TensorBoard folder" in error and "remove the line" not in error
    assert "train with --s2-loss-log FILE, or give the folder of its --tensorboard-dir" in error


@pytest.mark.parametrize("option", ["--target-loss", "--at-most", "--run-offset"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_options_are_finite_numbers(capsys, option, value):
    error = refused(capsys, "dense.jsonl", "s2.jsonl", option, value)
    assert f"{option} {float(value)}: expected a finite number of 0 or more" in error


def test_a_closed_standard_output(folder):
    """The page is written, and nothing is printed."""
    command = f'"{sys.executable}" -m s2_megatron compare dense.jsonl s2.jsonl --html compare.html >&-'
    environment = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (folder / "compare.html").read_text().endswith("</html>\n")
