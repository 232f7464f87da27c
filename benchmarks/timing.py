"""Clocks and memory counters of one GPU: milliseconds of calls in a row, entries interleaved, bytes beyond the tensors
that every implementation needs."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

# Calls in a row make a sample about this long: as in training, the launches of one call hide behind the call before.
SAMPLE_MS = 100.0
MOST_CALLS = 64
MOST_ROUNDS = 25


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
