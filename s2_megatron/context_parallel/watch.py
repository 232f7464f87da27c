"""Ends a process whose exchange by copies does not come to an end, and says which ranks did not come.

A collective has its library's watchdog. A stream that waits for a flag has none, and when the host then waits for that
stream, or for room in its queue, nothing would ever end the job. A thread of Python would not do: the host may hold the
interpreter's lock while it waits. So every rank has a second process, which sees how many exchanges each rank of the
group has started, and how many have arrived, in memory that all of them share: the host writes the first number, the
stream the second, behind the arrival. It imports nothing but the standard library, and ends when its rank does.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

PERIOD = 0.2  # seconds between two looks
LONGEST_GAP = 5 * PERIOD  # on a busy machine
GRACE = 10.0  # seconds of lateness before the end, in which a watchdog that saw it too writes down what it knows
ABORT_SECONDS = 5.0  # for a process to end after SIGABRT
RESTART_SECONDS = 10.0

WORDS, WORD_BYTES = 8, 8  # of a rank on the board: a cache line
# Exchanges (one in two parts is two), likewise, milliseconds, whether its second process runs, whether it is stopped.
STARTED, ARRIVED, TIMEOUT, WATCHED, STOPPED = range(5)
LOCKED_MEMORY = "/dev/shm"  # files there can be locked for a GPU


class Board:
    """What all ranks of a group on one host know of each other."""

    @staticmethod
    def create(size: int) -> str:
        """The path of one for so many ranks. To be unlinked when all have opened it. Raises OSError."""
        descriptor, path = tempfile.mkstemp(prefix="s2-exchange-", dir=LOCKED_MEMORY)
        try:
            os.posix_fallocate(descriptor, 0, size * WORDS * WORD_BYTES)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        return path

    def __init__(self, path: str | int):
        """path: or a descriptor. Raises OSError."""
        with open(path, "r+b", buffering=0, closefd=not isinstance(path, int)) as file:
            self.memory = mmap.mmap(file.fileno(), 0)
            self.descriptor = os.dup(file.fileno())
        self._words = memoryview(self.memory).cast("Q")

    def __len__(self) -> int:
        return len(self._words) // WORDS

    def get(self, rank: int, word: int) -> int:
        return self._words[rank * WORDS + word]

    def set(self, rank: int, word: int, value: int) -> None:
        self._words[rank * WORDS + word] = value

    def address(self, rank: int = 0, word: int = 0) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + (rank * WORDS + word) * WORD_BYTES

    def close(self) -> None:
        self._words.release()
        try:
            self.memory.close()
        finally:
            os.close(self.descriptor)


class Watch:
    """One rank's exchanges under the eyes of a second process. rank: in the group; names: of all its ranks. timeout:
    seconds that an exchange may take, asked for with every one. Raises OSError.

    A second process that ended is started again with the next exchange, if it had lived for a while; until then nobody
    watches this rank.
    """

    def __init__(self, board: Board, rank: int, names: Sequence[int], timeout: Callable[[], float]):
        self.board, self._rank, self._name, self._timeout = board, rank, names[rank], timeout
        self.arrived_at = board.address(rank, ARRIVED)
        arguments = [os.getpid(), board.descriptor, rank, *names]
        self._command = [sys.executable, "-I", "-S", __file__, *map(str, arguments)]
        self._start()

    def _start(self) -> None:
        self.board.set(self._rank, WATCHED, 0)
        # A session of its own: Ctrl-C is for the ranks.
        self._process = subprocess.Popen(self._command, pass_fds=(self.board.descriptor,), start_new_session=True)
        self._started = time.monotonic()

    def wait_until_up(self, seconds: float) -> None:
        """Raises RuntimeError when it does not come up."""
        deadline = time.monotonic() + seconds
        while not self.board.get(self._rank, WATCHED):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the process that watches exchanges did not come up: {' '.join(self._command)}")
            time.sleep(1e-3)

    def issue(self) -> int:
        """The number of one more exchange, to be written to the 64 bits at `arrived_at` when it has arrived. It is
        watched from now on."""
        if self._process.poll() is not None and time.monotonic() - self._started > RESTART_SECONDS:
            print(
                f"rank {self._name}: the process that watches exchanges ended ({self._process.returncode}); started again",
                flush=True,
            )
            self._start()
        number = self.board.get(self._rank, STARTED) + 1
        self.board.set(self._rank, TIMEOUT, int(self._timeout() * 1e3))
        self.board.set(self._rank, STARTED, number)
        return number

    def arrived(self) -> int:
        return self.board.get(self._rank, ARRIVED)

    def close(self) -> None:
        """Nothing is watched any more."""
        self._process.kill()
        self._process.wait()


class Lateness:
    """Of one rank, by numbers that are looked at now and then."""

    def __init__(self, board: Board, rank: int):
        self._board, self._rank = board, rank
        self._arrived, self._since, self._looked = 0, None, None

    def look(self, now: float) -> float:
        """Seconds by which an exchange that is under way has exceeded its timeout, with none arriving since; 0 when it
        has not. now: seconds.

        Time in which a rank of the group was stopped, by a signal or a debugger, does not count, nor that in which
        nobody looked: the machine may have been suspended.
        """
        arrived, timeout = self._board.get(self._rank, ARRIVED), self._board.get(self._rank, TIMEOUT) / 1e3
        gap = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if self._since is None or arrived != self._arrived or arrived >= self._board.get(self._rank, STARTED):
            self._arrived, self._since = arrived, now
        elif any(self._board.get(rank, STOPPED) for rank in range(len(self._board))):
            self._since += gap
        elif gap > LONGEST_GAP:
            self._since += gap - PERIOD
        return max(0.0, now - self._since - timeout) if timeout else 0.0

    def who(self, names: Sequence[int]) -> str:
        """names: of the ranks."""
        started = [self._board.get(rank, STARTED) for rank in range(len(self._board))]
        missing = [str(name) for name, number in zip(names, started) if number <= self._arrived]
        if missing:
            return f"did not come: rank {', '.join(missing)}"
        arrived = (self._board.get(rank, ARRIVED) for rank in range(len(self._board)))
        seen = ", ".join(f"rank {name} {done} of {number}" for name, done, number in zip(names, arrived, started))
        return f"all ranks came, so a GPU is busy with something else (exchanges that arrived: {seen})"


def _is_stopped(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _say(text: str) -> None:
    """In a thread: a pipe that nobody reads must not keep the end from coming."""

    def write():
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)


def _end(process: int) -> None:
    """Of the parent."""
    for number, patience in ((signal.SIGABRT, ABORT_SECONDS), (signal.SIGKILL, 0.0)):
        if os.getppid() == process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and os.getppid() == process:
            time.sleep(PERIOD)


def watch(parent: int, descriptor: int, rank: int, *names: int) -> None:
    """What the second process does. names: of the group's ranks."""
    board = Board(descriptor)
    lateness, said = Lateness(board, rank), False
    while os.getppid() == parent:
        board.set(rank, STOPPED, _is_stopped(parent))
        late = lateness.look(time.monotonic())
        board.set(rank, WATCHED, 1)
        if late > GRACE:
            _end(parent)
            break
        if late and not said:
            seconds = board.get(rank, TIMEOUT) / 1e3
            _say(f"rank {names[rank]}: context-parallel exchange failed after {seconds:.0f} s; {lateness.who(names)}")
        elif said and not late:
            _say(f"rank {names[rank]}: the exchange has arrived after all")
        said = late > 0
        time.sleep(PERIOD)


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:]))
