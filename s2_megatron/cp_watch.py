"""Ends a process whose exchange by copies does not come to an end, and says which ranks did not come.

A collective has its library's watchdog. A stream that waits for a flag has none, and when the host then waits for that stream nothing would
ever end the job. So behind every arrival the stream writes the exchange's number to host memory, and a thread looks at it now and then. It
makes no CUDA call before something is wrong.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

PERIOD = 0.2  # seconds between two looks
PATIENCE = 5.0  # seconds for finding out who is missing: a call to a GPU that waits may wait itself
GRACE = 30.0  # seconds before the end, in which a watchdog that saw it too writes down what it knows


def timeout_of(group, device: torch.device) -> float:
    """Seconds until a collective of the group is given up, as it is now: Megatron shortens it after the first iteration. Infinite once the
    process groups are gone: the run is over."""
    if not dist.is_initialized():
        return math.inf
    return group._get_backend(device).options._timeout.total_seconds()


class Watch:
    """progress: int32 [1] in host memory, where streams write the numbers of exchanges that have arrived. timeout: seconds, asked for at every
    look. missing: the ranks that an exchange on a lane waits for. end: called with an exit code."""

    def __init__(
        self,
        progress: torch.Tensor,
        timeout: Callable[[], float],
        missing: Callable[[int], list[int]],
        end: Callable[[int], None] = os._exit,
    ):
        self.progress, self._timeout, self._missing, self._end = progress, timeout, missing, end
        self._issued: deque[tuple[int, int, float]] = deque()  # (number, lane, when)
        self._last, self._thread = 0, None

    def issue(self, lane: int) -> int:
        """The number of one more exchange, which is to be written to `progress` once it has arrived. It is watched from now on."""
        self._last += 1
        self._issued.append((self._last, lane, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="s2-exchange-watch", daemon=True)
            self._thread.start()
        return self._last

    def forget(self) -> None:
        """Of exchanges that were given up."""
        self._issued.clear()

    def _run(self) -> None:
        try:
            while (lane := self.late()) is None:
                time.sleep(PERIOD)
            seconds, rank = self._timeout(), dist.get_rank()
            print(f"rank {rank}: context-parallel exchange failed after {seconds:.0f} s; {self._who(lane)}", file=sys.stderr, flush=True)
            time.sleep(GRACE)
        finally:  # whatever went wrong here: nobody would notice that this thread is gone
            sys.stdout.flush()
            self._end(1)

    def late(self) -> int | None:
        """The lane of the oldest exchange, when it has not arrived in time."""
        arrived = int(self.progress[0])
        while self._issued and self._issued[0][0] <= arrived:
            self._issued.popleft()
        if not self._issued:
            return None
        _, lane, when = self._issued[0]
        return lane if time.monotonic() - when > self._timeout() else None

    def _who(self, lane: int) -> str:
        found: list[str] = []

        def ask():
            ranks = ", ".join(map(str, self._missing(lane)))
            found.append(f"did not come: rank {ranks}" if ranks else "all ranks came: it waits behind something else")

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        return found[0] if found else "who did not come is not known, the GPU does not answer"
