"""An exchange by copies that does not arrive ends the process after the group's timeout, naming the ranks that did not
come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from s2_megatron.context_parallel import watch as cp_watch
from s2_megatron.context_parallel.copies import timeout_of
from s2_megatron.context_parallel.watch import ARRIVED, STARTED, STOPPED, TIMEOUT, Board, Lateness, Watch

ROOT = Path(__file__).resolve().parents[2]


def board_of(size: int) -> Board:
    board = Board(path := Board.create(size))
    os.unlink(path)
    return board


def test_a_board_is_shared_and_its_ranks_are_apart():
    path = Board.create(3)
    try:
        first, second = Board(path), Board(path)
    finally:
        os.unlink(path)
    assert len(first) == 3
    for rank in range(3):
        for word in (STARTED, ARRIVED, TIMEOUT):
            first.set(rank, word, 2**40 + 10 * rank + word)
    assert [second.get(rank, word) - 2**40 for rank in range(3) for word in (STARTED, ARRIVED, TIMEOUT)] == [
        0,
        1,
        2,
        10,
        11,
        12,
        20,
        21,
        22,
    ]
    assert first.address(2, ARRIVED) - first.address() == 2 * 64 + 8
    assert first.address() % 4096 == 0, "a GPU's driver locks pages"


@pytest.fixture
def looks(monkeypatch):
    """looks(late, seconds) looks once a second until then, and returns what the last look found."""
    monkeypatch.setattr(cp_watch, "PERIOD", 1.0)
    monkeypatch.setattr(cp_watch, "LONGEST_GAP", 5.0)
    now = [1e6]  # a machine that has been up for a while

    def looks(late, seconds):
        for _ in range(seconds):
            now[0] += 1
            found = late.look(now[0])
        return found

    looks.now = now
    return looks


def test_what_is_late(looks):
    board = board_of(4)
    late = Lateness(board, 1)
    assert looks(late, 100) == 0, "nothing was ever sent"
    board.set(1, STARTED, 2)
    assert looks(late, 100) == 0, "the timeout is not there yet"
    board.set(1, ARRIVED, 2)
    looks(late, 1)
    board.set(1, TIMEOUT, 20_000)
    board.set(1, STARTED, 4)
    assert [looks(late, 20), looks(late, 1), looks(late, 5)] == [0, 1, 6]
    board.set(1, ARRIVED, 3)
    assert [looks(late, 21), looks(late, 1)] == [0, 1], "since another one arrived"
    board.set(1, ARRIVED, 4)
    assert looks(late, 100) == 0, "all arrived"
    board.set(1, STARTED, 5)
    assert [looks(late, 20), looks(late, 3)] == [0, 3]
    board.set(1, TIMEOUT, 60_000)
    assert looks(late, 1) == 0


def test_the_first_look_may_find_an_exchange_under_way(looks):
    board = board_of(1)
    board.set(0, TIMEOUT, 20_000)
    board.set(0, STARTED, 1)
    late = Lateness(board, 0)
    assert [looks(late, 21), looks(late, 1)] == [0, 1]


def test_time_that_does_not_count(looks):
    board = board_of(2)
    late = Lateness(board, 0)
    board.set(0, TIMEOUT, 20_000)
    board.set(0, STARTED, 1)
    assert looks(late, 11) == 0
    board.set(1, STOPPED, 1)
    assert looks(late, 100) == 0, "the other rank is in a debugger"
    board.set(1, STOPPED, 0)
    looks.now[0] += 1000  # the machine was suspended
    assert [looks(late, 1), looks(late, 9), looks(late, 2)] == [0, 0, 2]
    looks.now[0] += 1000
    assert looks(late, 1) == 3, "also when it is late already"
    for _ in range(4):
        looks.now[0] += 10
        late.look(looks.now[0])
    assert late.look(looks.now[0]) == 7, "a machine on which every look comes late ends, too"


def test_a_stopped_process_is_seen():
    process = subprocess.Popen(["sleep", "100"])
    try:
        assert not cp_watch._is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not cp_watch._is_stopped(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert cp_watch._is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not cp_watch._is_stopped(process.pid)


def test_who_is_missing():
    board, names = board_of(3), (4, 6, 8)
    for rank, (started, arrived) in enumerate([(9, 7), (7, 7), (9, 7)]):
        board.set(rank, STARTED, started)
        board.set(rank, ARRIVED, arrived)
    late = Lateness(board, 0)
    late.look(0.0)
    assert late.who(names) == "did not come: rank 6", "it has not started number 8"
    board.set(1, STARTED, 8)
    assert late.who(names) == (
        "all ranks came, so a GPU is busy with something else (exchanges that arrived: rank 4 7 of 9, rank 6 7 of 8, rank 8 7 of 9)"
    )


def test_the_timeout_is_the_groups(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    try:
        cpu = torch.device("cpu")
        assert timeout_of(dist.group.WORLD, cpu) == 77
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=9), dist.group.WORLD)  # as Megatron does
        assert timeout_of(dist.group.WORLD, cpu) == 9
    finally:
        dist.destroy_process_group()


# A host that waits for a full queue with the interpreter's lock in its hands: `sleep` of a library that is not told to
# let go of it.
HANGING = """
import ctypes, os, sys
from s2_megatron.context_parallel import watch as cp_watch
board = cp_watch.Board(int(sys.argv[1]))
watch = cp_watch.Watch(board, 0, (3, 5), lambda: 0.5)
print(watch._process.pid, flush=True)
ctypes.c_uint64.from_address(watch.arrived_at).value = watch.issue()
board.set(1, cp_watch.STARTED, 1)
watch.issue()
ctypes.PyDLL(None).sleep(100)
"""


def run(script, board, **options):
    command = [sys.executable, "-c", script, str(board.descriptor)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, pass_fds=(board.descriptor,), **options
    )


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def hasty(tmp_path):
    """HANGING, with a watch that has little patience when it has found something."""
    short = tmp_path / "cp_watch.py"
    short.write_text((ROOT / "s2_megatron" / "cp_watch.py").read_text().replace("GRACE = 10.0", "GRACE = 2.0"))
    return HANGING.replace("board = ", f"cp_watch.__file__ = {str(short)!r}\nboard = ")


def test_it_ends_a_process_that_waits(hasty):
    start = time.monotonic()
    done = run(hasty, board_of(2))
    assert done.returncode == -6
    assert "rank 3: context-parallel exchange failed after 0 s; did not come: rank 5" in done.stderr
    assert 2.5 <= time.monotonic() - start < 30
    assert gone(int(done.stdout))


def test_a_process_that_does_not_mind_is_killed(hasty):
    done = run(
        hasty.replace("ctypes.PyDLL", "import signal; signal.signal(6, signal.SIG_IGN); ctypes.PyDLL"), board_of(2)
    )
    assert done.returncode == -9


def test_an_exchange_that_arrives_after_all(hasty):
    late = "import time; watch.wait_until_up(30); time.sleep(1.5); ctypes.c_uint64.from_address(watch.arrived_at).value = 2; time.sleep(4)"
    done = run(hasty.replace("ctypes.PyDLL(None).sleep(100)", late), board_of(2))
    assert done.returncode == 0
    assert "failed after 0 s; did not come: rank 5\nrank 3: the exchange has arrived after all\n" in done.stderr


@pytest.mark.parametrize("end", ["", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_it_ends_with_its_process(end):
    script = HANGING.replace("lambda: 0.5", "lambda: 50.0").replace(
        "ctypes.PyDLL(None).sleep(100)", f"watch.wait_until_up(30)\n{end}"
    )
    done = run(script, board_of(2))
    assert done.returncode == {"": 0, "os._exit(3)": 3}.get(end, -9)
    assert gone(int(done.stdout)) and "failed" not in done.stderr


def test_a_watch_that_is_closed_and_one_that_ends(capsys, monkeypatch):
    board = board_of(1)
    watch = Watch(board, 0, [6], lambda: 500.0)
    assert [watch.issue(), watch.issue(), board.get(0, STARTED), board.get(0, TIMEOUT)] == [1, 2, 2, 500_000]
    watch.wait_until_up(30)
    assert watch.arrived() == 0
    watch.close()
    assert watch._process.returncode == -9
    assert watch.issue() == 3 and watch._process.returncode == -9, (
        "one that ends at once is not started for every exchange"
    )
    monkeypatch.setattr(cp_watch, "RESTART_SECONDS", 0.0)
    assert watch.issue() == 4
    assert capsys.readouterr().out == "rank 6: the process that watches exchanges ended (-9); started again\n"
    watch.wait_until_up(30)
    watch.close()
    board.close()


def test_a_watch_that_does_not_come_up(monkeypatch, tmp_path):
    monkeypatch.setattr(cp_watch, "__file__", str(tmp_path / "nothing.py"))
    watch = Watch(board_of(1), 0, [0], lambda: 500.0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"did not come up: .*nothing\.py"):
        watch.wait_until_up(30)
    assert time.monotonic() - start < 20, "it has ended, so nobody waits for it"


def test_no_room_for_a_board(monkeypatch, tmp_path):
    monkeypatch.setattr(cp_watch, "LOCKED_MEMORY", str(tmp_path))
    monkeypatch.setattr(cp_watch.os, "posix_fallocate", Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"):
        Board.create(2)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(cp_watch, "LOCKED_MEMORY", str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match="nowhere"):
        Board.create(2)
