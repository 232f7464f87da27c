"""How far an arm is from dense, and how sure that is; NumPy alone.

A gap is paired: of two runs of one seed, which began with the same weights, read the same batches and were validated
over the same sequences. An interval is at 95 %, by Student's t, from the spread of the seeds' gaps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from studies.data import Run

CONFIDENCE = 0.95


@functools.cache
def t_quantile(share: float, freedom: int) -> float:
    """Of Student's t. With t = sqrt(freedom) tan(angle) its density is cos(angle) to the power of freedom - 1."""
    angles = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(share, below / below[-1], angles)))


@dataclass(frozen=True)
class Gap:
    """An arm's distance from dense. values: {seed: the distance}, in the measure's unit."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        return float(np.mean([*self.values.values()]))

    @property
    def half_width(self) -> float:
        """Of the interval; infinite with one seed."""
        count = len(self.values)
        if count < 2:
            return math.inf
        spread = float(np.std([*self.values.values()], ddof=1))
        return t_quantile((1 + CONFIDENCE) / 2, count - 1) * spread / math.sqrt(count)

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def loss(run: Run) -> float:
    """The measure of all pages: the last validation loss, in nats."""
    return run.last_loss


def first_512(run: Run) -> float:
    """The part of it where all arms attend the same pairs, those of the window."""
    return run.by_position(0, 512)


def beyond_4k(run: Run) -> float:
    return run.by_position(4096, 8192)


def far_less_near(run: Run) -> float:
    """What is left when both parts fell together."""
    return beyond_4k(run) - first_512(run)


def gap(
    runs: Sequence[Run], arm: str, measure: Callable[[Run], float] = loss, percent: bool = True, base: str = "dense"
) -> Gap:
    """The arm's distance from `base`, of the seeds that both have. runs: of one scale, each arm and seed once. percent:
    of the base's value, otherwise in nats."""
    found = {(run.arm, run.seed): measure(run) for run in runs}
    seeds = sorted(seed for own, seed in found if own == arm and (base, seed) in found)
    pairs = {seed: (found[arm, seed], found[base, seed]) for seed in seeds}
    return Gap({seed: 100 * (own / other - 1) if percent else own - other for seed, (own, other) in pairs.items()})


@dataclass(frozen=True)
class Fitted:
    """An arm's distance from dense in percent, and its 95 % interval. deviation: what arm and seed do not explain, in
    percent; freedom: its degrees. seeds: of the arm."""

    mean: float
    low: float
    high: float
    deviation: float
    freedom: int
    seeds: int


def fitted_gaps(runs: Sequence[Run], measure: Callable[[Run], float], base: str = "dense") -> dict[str, Fitted]:
    """{arm: its distance from `base`} by one fit of all runs: the measure's logarithm is the sum of an arm's part and a
    seed's, and what is left varies equally in all. Not every arm needs every seed. runs: of one scale. Raises
    ValueError where nothing is left to tell chance by, or an arm shares no seed with others."""
    arms = [base, *dict.fromkeys(run.arm for run in runs if run.arm != base)]
    seeds = sorted({run.seed for run in runs})
    rows = np.zeros((len(runs), len(arms) - 1 + len(seeds)))  # base has no column
    for row, run in zip(rows, runs):
        row[len(arms) - 1 + seeds.index(run.seed)] = 1
        if run.arm != base:
            row[arms.index(run.arm) - 1] = 1
    values = np.log([measure(run) for run in runs])
    freedom = len(runs) - rows.shape[1]
    if freedom < 1 or np.linalg.matrix_rank(rows) < rows.shape[1]:
        raise ValueError(
            f"{len(runs)} runs of {len(arms)} arms and {len(seeds)} seeds; expected more runs than arms and seeds "
            f"together, and {base} in every seed; train more seeds"
        )
    found, *_ = np.linalg.lstsq(rows, values, rcond=None)
    deviation = math.sqrt(float(((values - rows @ found) ** 2).sum()) / freedom)
    errors = deviation * np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)))
    quantile = t_quantile((1 + CONFIDENCE) / 2, freedom)
    gaps = {}
    for at, arm in enumerate(arms[1:]):
        percent = [100 * math.expm1(found[at] + side * quantile * errors[at]) for side in (0, -1, 1)]
        gaps[arm] = Fitted(*percent, 100 * deviation, freedom, sum(run.arm == arm for run in runs))
    return gaps


def scatter(
    runs: Sequence[Run], arms: Sequence[str], seeds: Sequence[int], measure: Callable[[Run], float] = loss
) -> tuple[float, int]:
    """(standard deviation of what arm and seed do not explain, its degrees of freedom); every arm has these seeds."""
    found = {(run.arm, run.seed): measure(run) for run in runs}
    values = np.array([[found[arm, seed] for seed in seeds] for arm in arms])
    rest = values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
    freedom = (len(arms) - 1) * (len(seeds) - 1)
    return float(np.sqrt((rest**2).sum() / freedom)), freedom


def joint_half_width(deviation: float, freedom: int, seeds: int, comparisons: int) -> float:
    """Of the intervals of so many differences together (Bonferroni), by the scatter of all runs."""
    share = 1 - (1 - CONFIDENCE) / (2 * comparisons)
    return t_quantile(share, freedom) * deviation * math.sqrt(2 / seeds)
