"""Arenas of s2_megatron.context_parallel.copies in memory that processes on a CPU share, for tests: flags are written
and waited for at once."""

from __future__ import annotations

import ctypes
import random
import tempfile
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

from s2_megatron.context_parallel.copies import FLAG_BYTES, FULL, LANES, WAIT, Arena, free_flags

PATIENCE = 60.0  # seconds
POISON = 0xFF  # a NaN of every dtype


def enqueued(operations):
    """What runs operations on flags, with now and then a pause before one, so that ranks get apart."""

    def run():
        for kind, address, value in operations:
            flag = ctypes.c_uint32.from_address(address)
            if random.random() < 0.1:
                time.sleep(random.random() * 3e-3)
            if kind != WAIT:
                flag.value = value
                continue
            deadline = time.monotonic() + PATIENCE
            while flag.value != value:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a flag is {flag.value} and was to become {value}")
                time.sleep(1e-5)

    return run


class Watched(Arena):
    """Between arrival and release a buffer must not change, and afterwards nobody may read it: it is poisoned."""

    def __init__(self, rank, views, lane_bytes, broken):
        super().__init__(rank, views, lane_bytes, enqueued)
        self._mine, self._seen, self._broken = [views[rank] for views in self.lanes], [None] * LANES, broken

    def arrive(self, lane, kind):
        super().arrive(lane, kind)
        if kind == FULL:
            self._seen[lane] = self._mine[lane].clone()

    def release(self, lane):
        if not torch.equal(self._seen[lane], self._mine[lane]):
            self._broken.append(lane)
        self._mine[lane].fill_(POISON)
        super().release(lane)


class SharedArenas:
    """make: for PeerCopies, called by all ranks of a group on one host. made: lane_bytes of every arena; broken: lanes
    written to too early."""

    def __init__(self, group):
        self.group, self.made, self.broken = group, [], []
        name = [f"s2-arena-{uuid.uuid4()}"]
        dist.broadcast_object_list(name, 0, group)
        self._stem = name[0]

    def _path(self, rank):
        return Path(tempfile.gettempdir(), f"{self._stem}-{len(self.made)}-{rank}")

    def _view(self, rank, n_bytes):
        return torch.from_file(str(self._path(rank)), shared=True, size=n_bytes, dtype=torch.uint8)

    def make(self, lane_bytes):
        rank, size, n_bytes = self.group.rank(), self.group.size(), FLAG_BYTES + sum(lane_bytes)
        mine = self._view(rank, n_bytes)
        mine[:FLAG_BYTES].view(torch.int32)[free_flags(rank, size)] = 1
        dist.barrier(self.group)
        views = [mine if peer == rank else self._view(peer, n_bytes) for peer in range(size)]
        dist.barrier(self.group)
        self._path(rank).unlink()  # all have mapped it
        self.made.append(list(lane_bytes))
        return Watched(rank, views, lane_bytes, self.broken)
