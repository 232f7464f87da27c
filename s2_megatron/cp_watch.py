"""Ends a process whose exchange by copies does not come to an end, and says which ranks did not come.

A collective has its library's watchdog. A stream that waits for a flag has none, and when the host then waits for that stream, or for room in
its queue, nothing would ever end the job. A thread of Python would not do: the host may hold the interpreter's lock while it waits. So every
rank has a second process, which sees how many exchanges each rank of the group has started, and how many have arrived, in memory that all of
them share: the host writes the first number, the stream the second, behind the arrival. It imports nothing but the standard library, and ends
when its rank does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

PERIOD = 0.2  # seconds between two looks
GRACE = 10.0  # seconds before the end, in which a watchdog that saw it too writes down what it knows
ABORT_SECONDS = 5.0  # for a process to end after SIGABRT

WORDS, WORD_BYTES = 8, 8  # of a rank on the board: a cache line
STARTED, ARRIVED, TIMEOUT, WATCHED = range(4)  # exchanges, exchanges, milliseconds, whether its second process runs
LOCKED_MEMORY = "/dev/shm"  # files there can be locked for a GPU


class Board:
    """What all ranks of a group on one host know of each other."""

    @staticmethod
    def create(size: int) -> str:
        """The path of one for so many ranks. To be unlinked when all have opened it. Raises OSError."""
        descriptor, path = tempfile.mkstemp(prefix="s2-exchange-", dir=LOCKED_MEMORY)
        with os.fdopen(descriptor, "wb") as file:
            file.truncate(size * WORDS * WORD_BYTES)
        return path

    def __init__(self, path: str | int):
        """path: or a descriptor. Raises OSError."""
        self.descriptor = path if isinstance(path, int) else os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(self.descriptor, 0)
        self._words = memoryview(self.memory).cast("Q")

    def __len__(self) -> int:
        return len(self._words) // WORDS

    def get(self, rank: int, word: int) -> int:
        return self._words[rank * WORDS + word]

    def set(self, rank: int, word: int, value: int) -> None:
        self._words[rank * WORDS + word] = value

    def address(self, rank: int = 0, word: int = 0) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + (rank * WORDS + word) * WORD_BYTES


class Watch:
    """One rank's exchanges under the eyes of a second process. rank: in the group; names: of all its ranks. timeout: seconds that an exchange
    may take, asked for with every one."""

    def __init__(self, board: Board, rank: int, names: Sequence[int], timeout: Callable[[], float]):
        self.board, self._rank, self._timeout = board, rank, timeout
        arguments = [os.getpid(), board.descriptor, rank, *names]
        # A session of its own: Ctrl-C is for the ranks.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, arguments)], pass_fds=(board.descriptor,), start_new_session=True
        )

    def issue(self) -> int:
        """The number of one more exchange, which is to be written to `arrived_at` once it has arrived. It is watched from now on."""
        number = self.board.get(self._rank, STARTED) + 1
        self.board.set(self._rank, TIMEOUT, int(self._timeout() * 1e3))
        self.board.set(self._rank, STARTED, number)
        return number

    @property
    def arrived_at(self) -> int:
        """The address of 64 bits."""
        return self.board.address(self._rank, ARRIVED)

    def arrived(self) -> int:
        return self.board.get(self._rank, ARRIVED)

    def watched(self) -> bool:
        """Whether the second process has come up."""
        return bool(self.board.get(self._rank, WATCHED))

    def close(self) -> None:
        """Nothing is watched any more."""
        self._process.kill()
        self._process.wait()


class Lateness:
    """Of one rank, by numbers that are looked at now and then."""

    def __init__(self, board: Board, rank: int):
        self._board, self._rank = board, rank
        self._arrived, self._since = 0, 0.0

    def look(self, now: float) -> bool:
        """Whether an exchange has been under way for longer than its timeout, and none arrived since. now: seconds."""
        arrived = self._board.get(self._rank, ARRIVED)
        if arrived != self._arrived or arrived >= self._board.get(self._rank, STARTED):
            self._arrived, self._since = arrived, now
        return now - self._since > self._board.get(self._rank, TIMEOUT) / 1e3

    def who(self, names: Sequence[int]) -> str:
        """names: of the ranks."""
        started = [self._board.get(rank, STARTED) for rank in range(len(self._board))]
        missing = [str(name) for name, number in zip(names, started) if number <= self._arrived]
        if missing:
            return f"did not come: rank {', '.join(missing)}"
        arrived = (self._board.get(rank, ARRIVED) for rank in range(len(self._board)))
        seen = ", ".join(f"rank {name} {done} of {number}" for name, done, number in zip(names, arrived, started))
        return f"all ranks came, so a GPU is busy with something else (exchanges that arrived: {seen})"


def watch(parent: int, descriptor: int, rank: int, *names: int) -> None:
    """What the second process does. names: of the group's ranks."""
    board = Board(descriptor)
    lateness, name = Lateness(board, rank), names[rank]
    board.set(rank, WATCHED, 1)
    while not lateness.look(time.monotonic()):
        time.sleep(PERIOD)
        if os.getppid() != parent:
            return
    seconds = board.get(rank, TIMEOUT) / 1e3
    print(f"rank {name}: context-parallel exchange failed after {seconds:.0f} s; {lateness.who(names)}", file=sys.stderr, flush=True)
    for number, patience in ((0, GRACE), (signal.SIGABRT, ABORT_SECONDS), (signal.SIGKILL, 0.0)):
        if os.getppid() != parent:
            return
        os.kill(parent, number)  # 0: nothing
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and os.getppid() == parent:
            time.sleep(PERIOD)


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:]))
