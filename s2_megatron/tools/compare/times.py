"""How long the steps of runs took, and whether their times say anything about the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from s2_megatron.tools.compare.runs import CPU, Run

# Of the middle half of a run's step times, as a share of their median: the widest with which times are compared.
WIDEST_SPREAD = 0.2


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: the median, and the ends of the middle half of the steps."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.median if self.median > 0 else 0.0


def step_times(runs: Sequence[Run]) -> StepTimes | None:
    """Of the steps of all these runs; None where a run has no times."""
    if any("hours" not in run.axes or len(run.steps) < 2 for run in runs):
        return None
    seconds = np.concatenate([3600 * np.diff(run.axes["hours"]) / np.diff(run.steps) for run in runs])
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return StepTimes(float(median), float(low), float(high))


def why_withheld(runs: Sequence[Run]) -> str:
    """Why the times of these runs are not compared, as the end of a sentence; "" where they are."""
    devices = sorted({device for run in runs for device in run.devices})
    if CPU in devices:
        return "a run was on a CPU, whose times depend on what else the machine does, and say nothing of a GPU"
    if len(devices) > 1:
        return f"the runs were on different devices ({', '.join(devices)})"
    sizes = sorted({str(run.arguments["world_size"]) for run in runs if "world_size" in (run.arguments or {})})
    if len(sizes) > 1:
        return f"the runs had different numbers of processes ({', '.join(sizes)})"
    uneven = [(run, times) for run in runs if (times := step_times([run])) and times.spread > WIDEST_SPREAD]
    if uneven:
        run, times = max(uneven, key=lambda each: each[1].spread)
        return (
            f"half of the steps of {run.name} took less than {times.low:.3g} s or more than {times.high:.3g} s: "
            "something else slowed the machine"
        )
    return ""
