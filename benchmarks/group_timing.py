"""Milliseconds of calls that several GPUs make together: of the slowest of them, the calls interleaved, each one timed
behind untimed calls of its own kind."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

# Untimed calls in front of a timed one, at most: the cards are then as hot as in a row of such calls.
LEAD_MS, LEAD_CALLS = 50.0, 50
START_MS = 10.0  # by which the CPU is ahead at least when the GPU comes to the timed call
CYCLES_A_MS = 2_000_000  # of a GPU, at most


class Call(NamedTuple):
    """function: enqueues one call. context: makes what is entered around it."""

    function: Callable[[], object]
    context: Callable = nullcontext


class InterleavedTimer:
    """group: of the ranks, all of which time the same calls. warmup: repeats that are not counted; they tell how many
    untimed calls go in front of a timed one. Raises ValueError."""

    def __init__(self, group, device: torch.device, warmup: int, repeats: int):
        if repeats < 1 or (
            warmup < 2 and device.type == "cuda"
        ):  # the first repeat compiles, the second tells how many untimed calls go in front
            raise ValueError(
                f"--warmup {warmup} --repeats {repeats}; expected at least --warmup 2 (on a CPU 0) and --repeats 1"
            )
        self._group, self._device, self._warmup, self._repeats = group, device, warmup, repeats

    def medians(self, calls: Sequence[Call]) -> list[tuple[float, float]]:
        """(ms of the GPU, ms of the CPU until all is enqueued) of every call; on a CPU both are the same."""
        leads, enqueued = [0] * len(calls), [0.0] * len(calls)
        found: list[list] = [[] for _ in calls]
        order = random.Random(0)  # the same on all ranks
        for repeat in range(self._warmup + self._repeats):
            for number in order.sample(range(len(calls)), len(calls)):
                call = calls[number]
                with call.context():
                    times = self._time(call.function, leads[number], leads[number] * enqueued[number])
                slowest = torch.tensor(times, device=self._device, dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
                elapsed, enqueued[number] = slowest.tolist()
                if repeat >= self._warmup:
                    found[number].append((elapsed, enqueued[number]))
                elif self._device.type == "cuda":
                    leads[number] = min(math.ceil(LEAD_MS / elapsed), LEAD_CALLS)
        return [tuple(map(statistics.median, zip(*times))) for times in found]

    def _time(self, function, lead: int, lead_ms: float) -> tuple[float, float]:
        """lead: calls in front, which take lead_ms of the CPU."""
        dist.barrier(self._group)
        if self._device.type != "cuda":
            start = time.perf_counter()
            function()
            return ((time.perf_counter() - start) * 1e3,) * 2
        torch.cuda.synchronize()
        torch.cuda._sleep(int((START_MS + lead_ms) * CYCLES_A_MS))
        for _ in range(lead):
            function()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)  # they start together
        begin.record()
        start = time.perf_counter()
        function()
        enqueued = (time.perf_counter() - start) * 1e3
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), enqueued
