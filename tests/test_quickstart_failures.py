"""`make pretrain` where something is wrong: one line that names it and what to do, and status 2 where the user can."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from examples.quickstart import failures, launch, run, summary
from tests.checkpoints import write_checkpoint

ROOT = Path(__file__).resolve().parents[1]
REPORT = "E1121 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: 1)\nTraceback\nChildFailedError"


def tracker(run_folder: Path, content: bytes) -> Path:
    path = run_folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content, problem", [
    (b"", "is empty"), (b"what\n", "holds 'what', expected"), (b"225", "names iteration 225, and iter_0000225 has no"),
])  # fmt: skip
def test_a_wrong_tracker_has_a_remedy(tmp_path, content, problem):
    """Iterations 75 and 150 are complete, 225 was cut off; the remedy, done, lets the run go on."""
    for iteration in (75, 150):
        write_checkpoint(tmp_path / "checkpoints", iteration)
    (write_checkpoint(tmp_path / "checkpoints", 225) / ".metadata").unlink()
    path = tracker(tmp_path, content)
    with pytest.raises(run.QuickstartError) as caught:
        failures.checkpoint_iteration(tmp_path)
    text = str(caught.value)
    assert problem in text and "the newest complete checkpoint is of iteration 150" in text and "\n" not in text
    assert caught.value.status == 2
    subprocess.run(text.partition("do: ")[2], shell=True, check=True)
    assert failures.checkpoint_iteration(tmp_path) == 150 and path.exists()


@pytest.mark.parametrize("flag, value, most", [
    *(("--iterations", value, 10**12) for value in ("abc", "0", "-1", "3 4", "", "9" * 30)),
    ("--save-interval", "1.5", 10**12), ("--seed", "0", 2**31 - 1), ("--seed", str(2**31), 2**31 - 1),
])  # fmt: skip
def test_a_wrong_argument_is_one_line(flag, value, most, capsys):
    with pytest.raises(SystemExit) as ended:
        run.parse_arguments([f"{flag}={value}"])
    line = f"error: argument {flag}: {value!r}; expected a whole number of 1 to {most}, such as 300; see make help\n"
    assert ended.value.code == 2 and capsys.readouterr().err == line


def test_runs_of_an_unset_variable_are_not_written_here(capsys):
    with pytest.raises(SystemExit) as ended:
        run.parse_arguments(["--runs="])
    assert ended.value.code == 2 and "--runs: empty (an unset variable?); expected a folder" in capsys.readouterr().err


@pytest.mark.parametrize("setting, words", [
    ("ITERATIONS=3 4", "error: argument --iterations: '3 4'; expected a whole number"),
    ("RUNS={file}", "error: {file}/quickstart{dense}: Not a directory; make it usable, or give another RUNS="),
])  # fmt: skip
@pytest.mark.parametrize("target", ["pretrain", "compare"])
def test_a_wrong_setting_of_make_is_one_line(tmp_path, setting, words, target):
    (file := tmp_path / "file").touch()
    words = words.format(file=file, dense="_dense" * (target == "compare"))
    command = ["make", "-s", target, "VENV=", f"PYTHON={sys.executable}", f"RUNS={tmp_path}", setting.format(file=file)]
    # `make test` hands its level and its flags on.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=600)
    first, last = done.stderr.splitlines()  # the last one is make's own
    assert done.returncode == 2 and first.startswith(words) and last.startswith("make: ***") and not done.stdout


def test_a_right_tracker_is_followed(tmp_path):
    assert failures.checkpoint_iteration(tmp_path) == 0
    write_checkpoint(tmp_path / "checkpoints", 75, tracker=True)
    assert failures.checkpoint_iteration(tmp_path) == 75


def attempt(tmp_path, monkeypatch, script: str):
    """One attempt of run.train whose training process is this Python script; what it raises, and what it printed."""
    monkeypatch.setattr(launch, "training_command", lambda *arguments, **settings: [sys.executable, "-c", script])
    parsed = SimpleNamespace(config=Path("x.yaml"), iterations=4, seed=1, save_interval=2, runs=tmp_path)
    console = Console(record=True, width=140, file=open(os.devnull, "w"))  # noqa: SIM115 - the console's, to its end
    sparsity = SimpleNamespace(summary=lambda: "one line")
    with (tmp_path / "lock").open("a+") as lock, pytest.raises(run.QuickstartError) as caught:
        run.train(tmp_path, None, sparsity, parsed, 0, False, lock, console)
    return caught.value, console.export_text()


def fails_with(*lines: str) -> str:
    return f"import sys; print({chr(10).join(lines)!r}); sys.exit(1)"


def test_the_error_of_the_present_attempt_is_shown(tmp_path, monkeypatch):
    """The log of all attempts is one file; each of them ends with torchrun's report."""
    error, printed = attempt(tmp_path, monkeypatch, fails_with("noise", "ValueError: the first reason", REPORT))
    assert "the first reason" in printed and "ChildFailedError" not in printed
    assert error.status == 1 and str(tmp_path / "train.log") in str(error)
    error, printed = attempt(tmp_path, monkeypatch, fails_with("noise", "ValueError: the second reason", REPORT))
    assert "the second reason" in printed and "the first reason" not in printed
    assert (tmp_path / "train.log").read_text().count("the first reason") == 1
    # An attempt that dies without a word shows nothing of the others'.
    error, printed = attempt(tmp_path, monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert printed.split() == ["starting", "Megatron"] and "status -9" in str(error)


def test_a_long_output_is_cut():
    assert failures.last_lines("\n".join(map(str, range(30)))).split() == [str(number) for number in range(10, 30)]


def test_the_trainings_own_refusal_is_the_line(tmp_path, monkeypatch):
    refusal = "error: --seq-length=500: expected a multiple of 32; use 512"
    error, _ = attempt(tmp_path, monkeypatch, fails_with("noise", refusal, REPORT))
    assert f"error: {error}" == refusal and error.status == 2


@pytest.mark.parametrize("line", [
    "OSError: [Errno 28] No space left on device: 'x'", "RuntimeError: write failed: No space left on device",
    "OSError: [Errno 122] Disk quota exceeded",
])  # fmt: skip
def test_a_disk_that_fills_up_in_training_is_named(tmp_path, monkeypatch, line):
    error, printed = attempt(tmp_path, monkeypatch, fails_with("noise", line, REPORT))
    assert str(error).startswith(f"disk full: RUNS={tmp_path} has ") and error.status == 2
    assert "RUNS=/a/larger/disk" in str(error) and line in printed


def test_a_disk_too_full_for_the_error_itself_is_named(tmp_path, monkeypatch):
    """torch's own message for it says `unexpected pos`, and the log may lack even that."""
    monkeypatch.setattr(failures, "free_bytes", lambda folder: 3 * 10**6)
    error, _ = attempt(tmp_path, monkeypatch, fails_with("RuntimeError: unexpected pos 64 vs 0"))
    assert "has 3 MB free, expected 100 MB" in str(error)


def main(tmp_path, *extra: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "examples.quickstart.run", "--iterations=4", *extra]
    if not any(word.startswith("--runs") for word in extra):
        command.append(f"--runs={tmp_path}")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


def call_main(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    """(status, the last line of stderr) of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        run.main()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return caught.value.code, lines[0]


def test_a_full_disk_is_noticed_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(failures, "free_bytes", lambda folder: 10**6)
    monkeypatch.setattr(run, "prepare_corpus", lambda *arguments, **settings: pytest.fail("started"))
    status, line = call_main(monkeypatch, capsys, f"--runs={tmp_path}")
    assert status == 2 and line.startswith("error: disk full: RUNS=")


def test_a_disk_that_fills_up_under_the_corpus_is_named(tmp_path, monkeypatch, capsys):
    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "text.bin")

    monkeypatch.setattr(run, "prepare_corpus", full)
    status, line = call_main(monkeypatch, capsys, f"--runs={tmp_path}")
    assert status == 2 and line.startswith(f"error: disk full: RUNS={tmp_path} has ")


@pytest.mark.parametrize("name", ["summary.json", "run.json"])
@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_file_of_the_run_is_named(tmp_path, monkeypatch, capsys, name, content):
    folder = tmp_path / "quickstart"
    folder.mkdir()
    (folder / name).write_text(content)
    monkeypatch.setattr(run, "prepare_corpus", lambda *_, **__: SimpleNamespace(description={"sha256": "x"}))
    status, line = call_main(monkeypatch, capsys, f"--runs={tmp_path}")
    assert status == 2 and str(folder / name) in line and "move its folder away" in line


def test_a_damaged_tracker_stops_the_command_at_once(tmp_path, monkeypatch, capsys):
    tracker(tmp_path / "quickstart", b"nonsense")
    monkeypatch.setattr(run, "prepare_corpus", lambda *_, **__: pytest.fail("started"))
    status, line = call_main(monkeypatch, capsys, f"--runs={tmp_path}")
    assert status == 2 and line.startswith("error: ") and "holds 'nonsense'" in line


def test_what_the_user_can_mend_ends_with_status_2(tmp_path):
    """In the real command: one line on stderr, no traceback."""
    (tmp_path / "config.yaml").write_text("block_size: 32\nlayers: DSS\nspecs: {S: {local_blocks: 2, stride: 4}}")
    (tmp_path / "file").write_text("")
    for expected, arguments in (
        ("DSS", ("--config", str(tmp_path / "config.yaml"))),
        ("no such file", ("--config", str(tmp_path / "none.yaml"))),
        (str(tmp_path / "file"), (f"--runs={tmp_path / 'file'}",)),
    ):
        result = main(tmp_path, *arguments)
        assert result.returncode == 2, result.stderr
        assert expected in result.stderr and result.stderr.startswith("error: ")
        assert len(result.stderr.splitlines()) == 1


def test_other_settings_do_not_continue_a_run(tmp_path):
    run.check_settings(tmp_path, {"seed": 1, "corpus": "a"})
    run.check_settings(tmp_path, {"seed": 1, "corpus": "a"})
    with pytest.raises(run.QuickstartError, match="seed 1 -> 2") as caught:
        run.check_settings(tmp_path, {"seed": 2, "corpus": "a"})
    assert caught.value.status == 2


def test_json_is_read_back(tmp_path):
    summary.write_atomically(tmp_path / "x.json", {"a": 1})
    assert summary.read_json(tmp_path / "x.json") == {"a": 1} == json.loads((tmp_path / "x.json").read_text())
