"""Clocks and memory counters of one GPU: milliseconds of calls in a row, entries interleaved, bytes beyond the tensors
that every implementation needs. And of calls that several GPUs make together: of the slowest of them, the calls
interleaved, each one timed behind untimed calls of its own kind."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

# Calls in a row make a sample about this long: as in training, the launches of one call hide behind the call before.
SAMPLE_MS = 100.0
MOST_CALLS = 64
MOST_ROUNDS = 25
# Untimed calls in front of a timed one, at most: the cards are then as hot as in a row of such calls.
LEAD_MS, LEAD_CALLS = 50.0, 50
START_MS = 10.0  # by which the CPU is ahead at least when the GPU comes to the timed call
CYCLES_A_MS = 2_000_000  # of a GPU, at most


def milliseconds(call: Callable[[], object], calls: int) -> float:
    """Milliseconds of one of `calls` calls in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def quantile(samples: list[float], share: float) -> float:
    """Between the two nearest samples, linearly."""
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass
class Measured:
    """What is known of one runner. Milliseconds a call, one sample a round."""

    first_call_s: float  # set-up, compilation and first result, in this process
    extra_bytes: int  # peak beyond inputs, out, LSE, the gradient of out and the gradients
    estimate_ms: tuple[float, float]
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    @property
    def total(self) -> list[float]:
        return [first + second for first, second in zip(self.forward, self.backward)]


def first_calls(runner, lse_bytes: int, set_up_s: float = 0.0) -> Measured:
    """Compiles (first call), measures memory (second) and a first time (third)."""
    start = time.perf_counter()
    runner.backward(runner.forward())
    torch.cuda.synchronize()
    first = time.perf_counter() - start + set_up_s
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = runner.forward()
    torch.cuda.synchronize()
    out_bytes = out.numel() * out.element_size()
    extra = torch.cuda.max_memory_allocated() - before - out_bytes - lse_bytes
    torch.cuda.reset_peak_memory_stats()
    grads = runner.backward(out)
    torch.cuda.synchronize()
    grad_bytes = sum(grad.numel() * grad.element_size() for grad in grads)
    extra = max(0, extra, torch.cuda.max_memory_allocated() - before - out_bytes - lse_bytes - grad_bytes)
    del grads
    forward = milliseconds(runner.forward, 1)
    backward = milliseconds(lambda: runner.backward(out), 1)
    return Measured(first, extra, (forward, backward))


def plan_rounds(estimate_ms: float, seconds: float, fewest: int = 3) -> tuple[int, int]:
    """(calls in a row, rounds) that take about `seconds`."""
    calls = max(1, min(MOST_CALLS, round(SAMPLE_MS / max(estimate_ms, 1e-3))))
    rounds = int(seconds * 1000 / (max(estimate_ms, 1e-3) * calls))
    return calls, max(fewest, min(MOST_ROUNDS, rounds))


def takes_part(sweep: int, sweeps: int, rounds: int) -> bool:
    """Whether an entry of `rounds` rounds runs in this sweep of `sweeps`. Its rounds are spread evenly, so that all
    entries are timed on an equally hot card."""
    return (sweep + 1) * rounds // sweeps > sweep * rounds // sweeps


def time_interleaved(
    runners: dict, measured: dict, ceiling: Callable[[], object] | None, seconds: float, fewest: int = 3
) -> list[float]:
    """Fills measured[key].forward and .backward, interleaved: a sweep times each entry once at most. Returns the
    milliseconds of `ceiling`, a matmul timed in every sweep."""
    plans = {key: plan_rounds(sum(measured[key].estimate_ms), seconds, fewest) for key in runners}
    sweeps = max((rounds for _, rounds in plans.values()), default=0)
    ceilings: list[float] = []
    order = random.Random(0)
    for sweep in range(-1, sweeps):  # the first sweep warms up
        if ceiling is not None:
            sample = milliseconds(ceiling, 8)
            if sweep >= 0:
                ceilings.append(sample)
        # In another order every sweep: not always the same entry shall come after the hottest one, or after a pause.
        for key, runner in order.sample([*runners.items()], len(runners)):
            calls, rounds = plans[key]
            if sweep < 0:
                if sum(measured[key].estimate_ms) < 100:
                    runner.backward(runner.forward())
                continue
            if not takes_part(sweep, sweeps, rounds):
                continue
            outs = []

            def forward(runner=runner, outs=outs):
                outs[:] = [runner.forward()]

            measured[key].forward.append(milliseconds(forward, calls))
            measured[key].backward.append(
                milliseconds(lambda runner=runner, outs=outs: runner.backward(outs[0]), calls)
            )
    return ceilings


def matmul_ceiling(size: int = 8192) -> tuple[Callable[[], object], int]:
    """(a bf16 matmul of size^3, its FLOP)."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result), 2 * size**3


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
