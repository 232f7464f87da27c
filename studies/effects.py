"""Which arms of a question differ by more than seeds do.

Runs of one seed share weights and data, so a value (a loss, an accuracy) is taken as arm + seed + noise, fitted by
least squares over all arms of a study: a randomised block design whose blocks are the seeds. The noise is estimated
from all arms together, so that two seeds an arm are enough; one seed says nothing about it. Two arms differ when the
interval of their difference, at 95 % for all comparisons of a question together (Bonferroni), leaves out zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Effects:
    """arms: the order of the columns. means: of each, as if every seed had trained it. inverse: (X'X)^+ of the arms'
    columns. noise: standard deviation of one run, NaN without degrees of freedom."""

    arms: tuple[str, ...]
    means: np.ndarray
    inverse: np.ndarray
    noise: float
    freedom: int

    def mean(self, arm: str) -> float:
        return float(self.means[self.arms.index(arm)])

    def difference(self, arm: str, other: str) -> float:
        return self.mean(arm) - self.mean(other)

    def half_width(self, arm: str, other: str, comparisons: int = 1) -> float:
        """Of the interval of a difference, when so many of them are looked at; infinite with one seed."""
        if self.freedom == 0:
            return math.inf
        contrast = np.zeros(len(self.arms))
        contrast[self.arms.index(arm)] += 1
        contrast[self.arms.index(other)] -= 1
        error = self.noise * math.sqrt(max(0.0, float(contrast @ self.inverse @ contrast)))
        return float(stats.t.ppf(1 - (1 - CONFIDENCE) / (2 * comparisons), self.freedom)) * error

    def seeds_for(self, half_width: float) -> int | None:
        """How many seeds of every arm would make the interval of one difference this narrow, were the noise as it is
        estimated here; None with one seed, of which no noise is known. half_width: above 0, in units of the values."""
        if self.freedom == 0:
            return None
        seeds = 2
        while self._half_width_of(seeds) > half_width:
            seeds += 1
        return seeds

    def _half_width_of(self, seeds: int) -> float:
        """Of the interval of one difference, with as many seeds of every arm."""
        quantile = stats.t.ppf((1 + CONFIDENCE) / 2, (seeds - 1) * (len(self.arms) - 1))
        return float(quantile) * self.noise * math.sqrt(2 / seeds)


def deviation_interval(deviation: float, freedom: int) -> tuple[float, float]:
    """Of a standard deviation with so many degrees of freedom, at 95 %, for values that are normally distributed."""
    shares = ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)
    low, high = (deviation * math.sqrt(freedom / float(stats.chi2.ppf(share, freedom))) for share in shares)
    return low, high


def fit(values: Mapping[tuple[str, str], float]) -> Effects:
    """values: {(arm, seed): value of its run}. Every arm shares a seed with another one, directly or over others."""
    arms = tuple(dict.fromkeys(arm for arm, _ in values))
    seeds = tuple(dict.fromkeys(seed for _, seed in values))
    design = np.zeros((len(values), len(arms) + len(seeds)))
    for row, (arm, seed) in enumerate(values):
        design[row, arms.index(arm)] = design[row, len(arms) + seeds.index(seed)] = 1
    observed = np.array(list(values.values()))
    inverse = np.linalg.pinv(design.T @ design)
    solution = inverse @ design.T @ observed
    freedom = len(values) - int(np.linalg.matrix_rank(design))
    residual = observed - design @ solution
    noise = math.sqrt(float(residual @ residual) / freedom) if freedom else math.nan
    own = len(arms)
    means = solution[:own] + solution[own:].mean()  # of the seeds
    return Effects(arms, means, inverse[:own, :own], noise, freedom)


@dataclass(frozen=True)
class Verdict:
    """best: the arm with the best value. level: the arms that are not told apart from it, best first, itself among
    them. decided: False with one seed."""

    best: str
    level: tuple[str, ...]
    decided: bool


def judge(effects: Effects, arms: Sequence[str], larger_is_better: bool = False) -> Verdict:
    """The verdict among these arms, at least two of them."""
    sign = -1 if larger_is_better else 1
    ordered = sorted(arms, key=lambda arm: sign * effects.mean(arm))
    best, comparisons = ordered[0], math.comb(len(ordered), 2)
    level = [
        arm
        for arm in ordered
        if arm == best or abs(effects.difference(arm, best)) <= effects.half_width(arm, best, comparisons)
    ]
    return Verdict(best, tuple(level), effects.freedom > 0)
