"""An exchange by copies that does not arrive ends the process after the group's timeout, naming the ranks that did not come."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from s2_megatron import cp_watch
from s2_megatron.cp_copies import FLAG_BYTES, FREE, FULL, LANES, Arena, flag_index, free_flags
from s2_megatron.cp_watch import Watch, timeout_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clock(monkeypatch):
    """now[0] is the time; no thread is started."""
    now = [100.0]
    monkeypatch.setattr(cp_watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cp_watch.threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(cp_watch.dist, "get_rank", lambda: 3)
    return now


def test_what_is_late(clock):
    ended, timeout = [], [20.0]
    watch = Watch(torch.zeros(1, dtype=torch.int32), lambda: timeout[0], lambda lane: [lane, 5], ended.append)
    assert watch.late() is None, "nothing has been sent"
    assert [watch.issue(0), watch.issue(1), watch.issue(0)] == [1, 2, 3]
    clock[0] += 19
    watch.progress[0] = 1
    assert watch.issue(0) == 4 and watch.late() is None
    clock[0] += 2
    watch.progress[0] = 3  # by the time it is looked at again
    assert watch.late() is None, "the fourth one is young"
    clock[0] += 17
    assert watch.late() is None
    timeout[0] = 15.0  # Megatron shortens it
    assert watch.late() == 0
    watch.forget()
    assert watch.late() is None and watch.issue(1) == 5
    clock[0] += 16
    assert watch.late() == 1


@pytest.mark.parametrize(
    "missing, words",
    [
        (lambda lane: [lane, 5], "did not come: rank 1, 5"),
        (lambda lane: [], "all ranks came: it waits behind something else"),
        (lambda lane: time.sleep(1) or [], "who did not come is not known, the GPU does not answer"),
        (lambda lane: 1 / 0, "who did not come is not known, the GPU does not answer"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_process_ends_whatever_is_found(missing, words, monkeypatch, capsys):
    monkeypatch.setattr(cp_watch.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(cp_watch, "PATIENCE", 0.1)
    monkeypatch.setattr(cp_watch, "GRACE", 0.0)
    ended = []
    watch = Watch(torch.zeros(1, dtype=torch.int32), lambda: 0.01, missing, ended.append)
    watch.issue(1)
    watch._thread.join(10)
    assert ended == [1]
    assert capsys.readouterr().err.startswith(f"rank 3: context-parallel exchange failed after 0 s; {words}\n")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_ends_the_process_when_it_fails_itself(monkeypatch):
    ended = []
    watch = Watch(torch.zeros(1, dtype=torch.int32), lambda: 1 / 0, lambda lane: [], ended.append)
    watch.issue(0)
    watch._thread.join(10)
    assert ended == [1]


def test_whose_flags_are_missing():
    rank, size = 1, 4
    views = [torch.zeros(FLAG_BYTES, dtype=torch.uint8) for _ in range(size)]
    views[rank].view(torch.int32)[free_flags(rank, size)] = 1
    arena = Arena(rank, views, (0,) * LANES, lambda operations: lambda: None)
    assert arena.missing(0) == arena.missing(1) == [0, 2, 3]
    views[rank].view(torch.int32)[flag_index(FULL, 1, 2, size)] = 1
    assert arena.missing(0) == [0, 2, 3] and arena.missing(1) == [0, 3]
    views[rank].view(torch.int32)[flag_index(FREE, 1, 2, size)] = 0  # it keeps all of them from sending
    assert arena.missing(1) == [2] and arena.missing(0) == [0, 2, 3]
    views[rank].view(torch.int32)[[flag_index(FREE, 1, peer, size) for peer in (0, 3)]] = 0  # taken: now it is about who has sent
    assert arena.missing(1) == [0, 3]


def test_the_timeout_is_the_groups(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        cpu = torch.device("cpu")
        assert timeout_of(dist.group.WORLD, cpu) == 77
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=9), dist.group.WORLD)  # as Megatron does
        assert timeout_of(group := dist.group.WORLD, cpu) == 9
    finally:
        dist.destroy_process_group()
    assert timeout_of(group, cpu) == float("inf"), "a run that is over is not late"


HANGING = """
import time, torch
from s2_megatron import cp_watch
cp_watch.dist.get_rank = lambda: 0
cp_watch.GRACE = 0.5
watch = cp_watch.Watch(torch.zeros(1, dtype=torch.int32), lambda: 0.5, lambda lane: [1])
watch.issue(0)
watch.progress[0] = 1
watch.issue(0)
time.sleep(100)
"""


def test_the_thread_ends_a_process_that_waits():
    done = subprocess.run([sys.executable, "-c", HANGING], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "context-parallel exchange failed after 0 s; did not come: rank 1" in done.stderr
