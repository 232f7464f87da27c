"""The file that says how a run ended, and the exit status: real runs, and the ends that a test cannot bring about."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from s2_megatron.megatron.checkpoints.folder import CheckpointError
from s2_megatron.megatron.errors import RunError
from s2_megatron.megatron.records import status as run_status
from s2_megatron.megatron.records.status import FILE, STATES, read_status, recorded_run, write_status
from tests.megatron.conftest import ENTRY, ROOT, altered
from tests.processes import free_port, python_path


def words(save) -> tuple[str, str, int, int]:
    found = read_status(save)
    return found["state"], found["line"], found["iteration"], found["exit_status"]


@pytest.mark.slow
def test_stopped_finished_and_nothing_left(lab, tmp_path):
    """Three starts of one command that is to do four iterations, two at a time."""
    flags = f"--train-iters 4 --exit-interval 2 --save {tmp_path} --load {tmp_path} --save-interval 100"
    lab.run("status_one", flags, processes=2)
    assert words(tmp_path) == ("stopped", "iteration 2 of 4, by --exit-interval 2", 2, 0)
    assert read_status(tmp_path)["rank"] == 0
    flags = flags.replace("--exit-interval 2", "")
    lab.run("status_two", flags, processes=2)
    assert words(tmp_path) == ("finished", "iteration 4 of 4", 4, 0)
    again = lab.run("status_three", flags, processes=2)
    line = "iteration 4 of 4 was done before; nothing was left to train"
    assert words(tmp_path) == ("finished", line, 4, 0) and not again.losses
    assert again.output.count(f"S2: finished: {line}; for more, raise --train-iters") == 1


def test_a_full_disk_still_takes_the_end(tmp_path, monkeypatch, capsys):
    """Over the running file; a file without room in it stays, and the end is printed."""
    write_status(tmp_path, "running", "started")
    opened = type(tmp_path).open

    def full(path, mode="r", **kwargs):
        if mode == "wb":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, mode, **kwargs)

    monkeypatch.setattr(type(tmp_path), "open", full)
    write_status(tmp_path, "failed", "the disk is full: " + 5000 * "x", iteration=3, status=1)
    assert (read_status(tmp_path)["state"], read_status(tmp_path)["iteration"]) == ("failed", 3)
    assert [path.name for path in tmp_path.iterdir()] == [FILE] and not capsys.readouterr().err
    (tmp_path / FILE).write_text("{}")
    write_status(tmp_path, "failed", "no room")
    assert "it would say: failed: no room" in capsys.readouterr().err and (tmp_path / FILE).read_text() == "{}"


@pytest.mark.slow
def test_a_signal_stops_and_a_kill_leaves_it_running(lab, tmp_path):
    flags = lab.flags(f"--train-iters 100000 --save {tmp_path} --save-interval 100000 --exit-signal-handler")
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    for number, state in ((signal.SIGTERM, "stopped"), (signal.SIGKILL, "running")):
        log = tmp_path / f"{state}.jsonl"
        environment["MASTER_PORT"] = str(free_port())
        command = [sys.executable, str(ENTRY), *flags, "--s2-loss-log", str(log)]
        with (tmp_path / f"{state}.log").open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=ROOT)
        deadline = time.monotonic() + 600
        while process.poll() is None and not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        status = process.wait(600)
        assert status == (0 if state == "stopped" else -9), (tmp_path / f"{state}.log").read_text()[-3000:]
        found = read_status(tmp_path)
        assert found["state"] == state
        if state == "stopped":
            assert re.fullmatch(r"iteration \d+ of 100000, by SIGTERM", found["line"])


def test_an_error_is_kept(lab, tmp_path):
    flags = f"--train-iters 3 --save {tmp_path} --save-interval 2"
    lab.run("status_failed", flags, processes=2, fails=True, **altered("failing"))
    state, line, iteration, status = words(tmp_path)
    assert (state, iteration, status) == ("failed", 2, 1) and "IndexError" in line and "\n" not in line


def test_what_the_start_refuses_is_recorded(lab, tmp_path):
    flags = f"--train-iters 2 --save {tmp_path} --save-interval 2 --data-path {tmp_path / 'none'}"
    run = lab.run("status_refused", flags, fails=True)
    state, line, iteration, status = words(tmp_path)
    assert (state, iteration, status) == ("refused", None, 2)
    assert line.startswith(f"--data-path={tmp_path / 'none'}: .idx is missing; expected")
    assert run.output.splitlines()[-1] == f"error: {line}" and "arguments ---" not in run.output


def arguments(save, **changes):
    defaults = dict(save=str(save), train_iters=10, iteration=0, skip_train=False)
    return SimpleNamespace(**defaults | changes)


@pytest.mark.parametrize("code", [None, 0, 3, "a text"])
def test_megatrons_bare_exit_is_a_failure(tmp_path, code, capsys):
    with pytest.raises(SystemExit) as caught, recorded_run(arguments(tmp_path)):
        sys.exit(code)
    assert caught.value.code == ({None: 1, 0: 1}.get(code, code))
    state, line, iteration, status = words(tmp_path)
    assert (state, iteration) == ("failed", 0) and f"sys.exit({code!r})" in line
    assert status == (code if code == 3 else 1)
    assert capsys.readouterr().err == (f"error: {line}\n" if code in (None, 0) else "")


def test_a_run_without_a_step_is_a_failure(tmp_path):
    with pytest.raises(SystemExit) as caught, recorded_run(arguments(tmp_path)):
        pass
    assert caught.value.code == 2 and words(tmp_path)[0] == "refused" and "without a step" in words(tmp_path)[1]
    with recorded_run(arguments(tmp_path, skip_train=True)):
        pass
    assert words(tmp_path)[:2] == ("finished", "evaluated at iteration 0; --skip-train trains nothing")


def test_an_error_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="two"), recorded_run(arguments(tmp_path, curr_iteration=4)):
        raise ValueError("one\n  two \x1b[31m" + "x" * 9999)
    state, line, iteration, status = words(tmp_path)
    assert (state, iteration, status) == ("failed", 5, 1)
    assert line.startswith("ValueError: one two \\x1b[31mxxx") and len(line) == 2000


def test_a_checkpoint_that_is_refused_while_it_is_loaded(tmp_path, capsys, monkeypatch):
    """Each rank that has the error ends with 2; the first of the node does not wait, the others let it be the first."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as caught, recorded_run(arguments(tmp_path)):
            raise CheckpointError(f"--load=x: rank {rank}\n  does not read it")
        assert caught.value.code == 2 and len(waited) == int(rank)
        assert capsys.readouterr().err == f"error: --load=x: rank {rank}\n  does not read it\n"
        assert words(tmp_path) == ("refused", f"--load=x: rank {rank} does not read it", None, 2)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_s2.py", "--s2-traceback"])
    with pytest.raises(CheckpointError), recorded_run(arguments(tmp_path)):
        raise CheckpointError("--load=x")


@pytest.mark.parametrize("error, status", [(CheckpointError, 2), (RunError, 1)])
def test_what_the_first_rank_has_said_is_not_said_again(tmp_path, capsys, monkeypatch, error, status):
    """torchrun ends the other ranks when the first has ended, but not in time on a busy machine."""

    def the_first_rank_says_it(seconds):
        monkeypatch.setenv("RANK", "0")
        write_status(tmp_path, "refused", "--load=x: it is not there", status=2)
        os.utime(tmp_path / FILE, (time.time() + 1,) * 2)
        monkeypatch.setenv("RANK", "1")

    monkeypatch.setattr(time, "sleep", the_first_rank_says_it)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    for text in ("--load=x:\n  it is not there", "another"):
        (tmp_path / FILE).unlink(missing_ok=True)
        with pytest.raises(SystemExit) as caught, recorded_run(arguments(tmp_path)):
            raise error(text)
        assert caught.value.code == status
        assert capsys.readouterr().err == ("error: another\n" if text == "another" else "")


@pytest.mark.parametrize("cause", [OSError(5, "Input/output error"), MemoryError(), RuntimeError("Connection reset")])
def test_a_checkpoint_that_the_machine_could_not_read_is_a_failure(tmp_path, cause):
    """The next start may read it: a pre-empted job is queued again after a failure, not after a refusal."""
    with pytest.raises(CheckpointError), recorded_run(arguments(tmp_path)):
        raise CheckpointError("--load=x cannot be read") from cause
    assert words(tmp_path)[0] == "failed"


@pytest.mark.parametrize("begun", [None, 4, 5])
def test_an_error_before_the_second_iteration_is_a_refusal(tmp_path, begun, capsys, monkeypatch):
    """begun: the last iteration that began, of a run that goes on from iteration 4; None: it had none."""

    def run(error):
        args = (
            arguments(tmp_path, iteration=4)
            if begun is None
            else arguments(tmp_path, iteration=4, curr_iteration=begun)
        )
        with pytest.raises(BaseException) as caught, recorded_run(args):
            raise error
        return caught.value, words(tmp_path)[0], capsys.readouterr().err

    error, state, printed = run(TypeError("no number"))
    if begun == 5:
        assert isinstance(error, TypeError) and state == "failed" and not printed
    else:
        assert error.code == 2 and state == "refused" and printed.count("error: ") == printed.count("\n") == 1
        assert "no number" in printed and "TypeError in test_run_status.py" in printed
    error, state, _ = run(RuntimeError("NCCL error: a network"))
    assert isinstance(error, RuntimeError)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_s2.py", "--s2-traceback"])
    assert isinstance(run(TypeError("no number"))[0], TypeError)


def test_the_stragglers_log_has_no_traceback():
    """Megatron's detector logs the error that it raises on."""
    record = logging.makeLogRecord({"msg": "no\n['Traceback (most recent call last):\\n']"})
    other = logging.makeLogRecord({"msg": "straggler"})
    assert not run_status._without_traceback(record) and run_status._without_traceback(other)


def test_an_earlier_attempts_error_is_replaced(tmp_path):
    write_status(tmp_path, "failed", "before")
    os.utime(tmp_path / FILE, (1, 1))
    with pytest.raises(ValueError, match="now"), recorded_run(arguments(tmp_path, curr_iteration=4)):
        raise ValueError("now")
    assert words(tmp_path)[1] == "ValueError: now"


def test_a_shell_reads_the_state(tmp_path):
    for state in STATES:
        write_status(tmp_path, state, 'a "quoted" line', iteration=3, status=2)
        shell = ["sed", "-n", 's/^ "state": "\\([a-z]*\\)",$/\\1/p', str(tmp_path / FILE)]
        assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == f"{state}\n"
        assert json.loads((tmp_path / FILE).read_text())["line"] == 'a "quoted" line'
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    write_status(tmp_path / "file", "finished", "done")
    assert "could not be written" in capsys.readouterr().err
    write_status(None, "finished", "done")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", '{"state": "else"}'])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match="expected a run's status; remove it"):
        read_status(tmp_path)
    assert read_status(tmp_path / "none") is None
    with pytest.raises(ValueError, match="now"), recorded_run(arguments(tmp_path, curr_iteration=4)):
        raise ValueError("now")
    assert read_status(tmp_path)["state"] == "failed"
