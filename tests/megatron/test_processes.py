"""No process of a training outlives it, and none keeps it from ending."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from s2_megatron.megatron.host import processes
from tests.processes import python_path
from tests.tiers import mostly_slow

# A trainer with every kind of process that Megatron's checkpoints start; it prints their ids and is killed.
CHILDREN = """
import multiprocessing, os, signal, sys, threading, time
from s2_megatron.megatron.host import processes

def main():
    processes.end_forks_with_this_process()
    manager = processes.start_manager(multiprocessing.get_context("spawn"))
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    arguments = ("time", "sleep", 600)
    server = multiprocessing.get_context("forkserver").Process(target=processes.call_with_parent, args=arguments)
    fork.start(), server.start()
    from multiprocessing import forkserver
    pids = [manager._process.pid, fork.pid, server.pid, forkserver._forkserver._forkserver_pid]
    print(*pids, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    main()
"""


def command(folder: Path, trainer: str) -> dict:
    """The arguments of subprocess for a trainer of this source."""
    script = folder / "trainer.py"
    script.write_text(trainer)
    return dict(args=[sys.executable, str(script)], text=True, env={**os.environ, "PYTHONPATH": python_path()})


def running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process is ended with its parent on Linux only")
def test_no_process_outlives_a_killed_trainer(tmp_path):
    trainer = subprocess.Popen(**command(tmp_path, CHILDREN), stdout=subprocess.PIPE)
    try:
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) == 4 and all(map(running, pids))
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    deadline = time.monotonic() + 300
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


# A trainer that fails once its persistent writer is at work, and a DataLoader.
FAILING = """
import multiprocessing, sys, time
from torch.utils.data import DataLoader
from s2_megatron.megatron.host import processes

def write(ready):
    processes.end_with_parent()
    ready.set()
    time.sleep(600)

def main():
    processes.end_daemons_with_this_process()
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    context.Process(target=write, args=(ready,), daemon=True).start()
    ready.wait()
    batches = iter(DataLoader(range(100), num_workers=2, multiprocessing_context="fork"))
    next(batches)
    raise IndexError("failed")

if __name__ == "__main__":
    START
"""
AS_A_CHILD = "child = multiprocessing.Process(target=main); child.start(); child.join(); sys.exit(child.exitcode)"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process is ended with its parent on Linux only")
@pytest.mark.parametrize("start", mostly_slow(["main()", AS_A_CHILD], "main()"), ids=["program", "child"])
def test_a_trainer_that_fails_ends(tmp_path, start):
    """multiprocessing waits for the writer, which does not listen to its SIGTERM."""
    done = subprocess.run(**command(tmp_path, FAILING.replace("START", start)), capture_output=True, timeout=300)
    assert done.returncode == 1 and "IndexError: failed" in done.stderr and "killed by signal" not in done.stderr


def ignores_sigterm(pid: int) -> bool:
    mask = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text()).group(1)
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_sigterm_to_every_process_leaves_those_that_a_save_needs(tmp_path):
    """As SLURM sends it; the trainer handles it and saves."""
    trainer = subprocess.Popen(**command(tmp_path, CHILDREN), stdout=subprocess.PIPE)
    try:
        manager, _, writer, _ = (int(word) for word in trainer.stdout.readline().split())
        deadline = time.monotonic() + 600
        while not (ignores_sigterm(manager) and ignores_sigterm(writer)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in (manager, writer):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
        assert running(manager) and running(writer)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()


def test_a_fork_of_another_thread_is_left_alone(monkeypatch):
    """Linux would end it with its thread."""
    signals = []
    monkeypatch.setattr(processes, "signal_when_parent_ends", lambda: signals.append(1))
    monkeypatch.setattr(processes, "_forking", {"parent": os.getppid(), "main": False})
    processes._in_child()
    assert signals == []
    processes._forking["main"] = True
    processes._in_child()
    assert signals == [1]


def test_only_torchruns_ranks_end_with_their_parent(monkeypatch):
    signals = []
    monkeypatch.setattr(processes, "signal_when_parent_ends", lambda: signals.append(1))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    processes.end_with_torchrun()
    assert signals == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    processes.end_with_torchrun()
    assert signals == [1]


def test_torchruns_report_ends_with_the_line(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    processes.tell_torchrun("error: nobody started this process")  # and nothing is written
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    processes.tell_torchrun('error: --lr: "x"; expected é')
    failures = {0: ProcessFailure(0, 1, 2, str(tmp_path / "error.json")), 1: ProcessFailure(1, 2, -15, "none")}
    lines = str(ChildFailedError("pretrain_gpt_s2.py", failures)).splitlines()
    assert lines[-2] == '  traceback : error: --lr: "x"; expected é' and not lines[-1].strip("=")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    processes.tell_torchrun("error: where nothing can be written")
