"""Whether two arms differ: the paired difference of their losses, step by step, and how sure it is.

Two runs of one seed read the same batches in the same order, so that most of the noise of a training loss cancels in
their difference. What is left is correlated from step to step, hence a bootstrap over blocks of steps. A bootstrap over
steps does not see that two runs which differ in nothing but rounding or seed end at slightly different losses: that
offset enters the interval beside it (from a setting for one or two pairs, from the pairs themselves for three or more).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
DRAWS = 2000
BLOCK_FACTOR, DRIFT_FACTOR = 3, 1.5
DRIFT_GROUPS = 32
# Pairs from which on their own spread says how much seeds differ.
SPREAD_PAIRS = 3
# Steps that each of fewer pairs needs for a verdict: fewer show too little of how they are correlated.
MIN_STEPS = 40
# Standard deviations of the steps' differences that a slow drift keeps from zero over the last quarter of a run in at
# most 5 % of all runs, even where it is a random walk. Gaps beyond are decided however the steps are correlated.
CERTAIN = 12


class RunOffset(NamedTuple):
    """Standard deviation of the final loss of runs that differ in nothing but rounding (and seed). nats: of it. source:
    whose runs."""

    nats: float
    source: str


# Training loss over the last quarter, rounding alone: benchmarks/results/cpu_run_offset.json.
SMALL_RUNS = RunOffset(0.0037, "nine quickstarts of this project that differ in rounding alone, 0.6M tokens each")
# The same of language models of 100M parameters, whose loss falls from 4 to 2.3 on the way, not at the same step in
# each run: studies/results/repeats.npz.
MIDDLE_RUNS = RunOffset(
    0.041, "two models of this project, three and four runs that differ in rounding alone, 149M and 80M tokens"
)
# Runs of which each pair begins with the same trained weights. Two pairs from one checkpoint have not been measured.
# From checkpoints trained alike the gaps of two repeats ended 0.0026 apart, and were 0.049, 0.053 and 0.063 at
# the beginning of three (studies/results/repeats.npz), which holds what the checkpoints differ in, too.
GOING_ON = RunOffset(0.0037, "assumed of runs that go on from one checkpoint: it has not been measured")
# Validation loss, rounding and seed, as published with the records of that speed run.
LARGE_RUNS = RunOffset(0.0013, "ten runs of modded-nanogpt that differ in rounding and seed, a GPT-2 124M on FineWeb")
# Nothing is known of what lies between these runs, so the larger offset of both reaches from the one to the other.
MIDDLE_TOKENS, LARGE_TOKENS = 2e6, 500e6


def run_offset_for(tokens: float | None, going_on: bool = False) -> RunOffset:
    """What is assumed of runs of so many tokens (None: not logged) when nothing is given. going_on: each pair from one
    checkpoint."""
    if going_on:
        return GOING_ON
    if tokens is not None and tokens < MIDDLE_TOKENS:
        return SMALL_RUNS
    return LARGE_RUNS if tokens is not None and tokens >= LARGE_TOKENS else MIDDLE_RUNS


@dataclass(frozen=True)
class Difference:
    """Mean difference of two arms' losses (arm minus baseline) with its interval, in nats.

    step_error, offset_error: half-widths from the noise of the steps and from what else distinguishes runs. The
    half-width of the interval is the root of their summed squares; for three or more pairs that of the pairs' spread.
    baseline: the baseline's mean loss over the same steps. block: steps of a bootstrap block (the longest of the
    pairs). undecided: why the steps give no usable interval (it would be too short), else "".
    """

    mean: float
    low: float
    high: float
    step_error: float
    offset_error: float
    baseline: float
    pairs: int
    steps: int
    block: int
    undecided: str = ""

    @property
    def verdict(self) -> str:
        if self.undecided:
            return "not told apart"
        if self.high < 0:
            return "better"
        return "worse" if self.low > 0 else "not told apart"

    @property
    def relative(self) -> tuple[float, float, float]:
        """(mean, low, high) as shares of the baseline's loss."""
        return self.mean / self.baseline, self.low / self.baseline, self.high / self.baseline


def longest_block(steps: int) -> int:
    """Of so many steps: at least three blocks are drawn."""
    return max(1, steps // 3)


def block_steps(values: np.ndarray) -> int:
    """Steps of a block of the circular bootstrap, from 1 to longest_block. values: float [n].

    The longer one of two: BLOCK_FACTOR times the rule of Politis and White (2004) with the correction of Patton,
    Politis and White (2009), which gives the best estimate of a variance and, used alone, intervals that are too short;
    and DRIFT_FACTOR times what the rule gives for a series of which each value is correlated with the last alone. That
    sees correlations over more steps than the first one looks at. It is taken of the steps and, as their own noise
    hides a slow drift, of the means over DRIFT_GROUPS groups of them, too.

    A block of longest_block says that the steps hold too few independent ones: Difference.undecided.
    """
    n = len(values)
    centred = values - values.mean()
    # Differences that are all equal but for rounding are not correlated.
    if n < 8 or np.abs(centred).max() <= 1e-12 * max(1.0, np.abs(values).max()):
        return 1
    group = max(1, n // DRIFT_GROUPS)
    grouped = centred[n % group :].reshape(-1, group).mean(axis=1)
    drift = DRIFT_FACTOR * max(_drift_block(centred), group * _drift_block(grouped))
    return int(np.clip(math.ceil(max(BLOCK_FACTOR * _automatic_block(centred), drift)), 1, longest_block(n)))


def _automatic_block(centred: np.ndarray) -> float:
    """Of Politis and White. centred: float [n], its mean is 0."""
    n = len(centred)
    variance = float(centred @ centred) / n
    run_length = max(5, math.ceil(math.sqrt(math.log10(n))))
    longest = min(n - 1, math.ceil(math.sqrt(n)) + run_length)
    covariances = np.array([centred[: n - lag] @ centred[lag:] for lag in range(longest + 1)]) / n
    small = np.abs(covariances[1:]) / variance < 2 * math.sqrt(math.log10(n) / n)
    # The first lag after which `run_length` correlations in a row are small.
    first = next((lag for lag in range(len(small) - run_length + 1) if small[lag : lag + run_length].all()), None)
    cut = longest if first is None else min(2 * max(first, 1), longest)
    lags = np.arange(1, cut + 1)
    window = np.clip(2 * (1 - lags / cut), 0, 1)  # flat-top: 1 up to half of the cut, then falling to 0
    slope = 2 * float(np.sum(window * lags * covariances[1 : cut + 1]))
    spectrum = variance + 2 * float(np.sum(window * covariances[1 : cut + 1]))
    return 1.0 if spectrum <= 0 else (2 * slope**2 / (4 / 3 * spectrum**2)) ** (1 / 3) * n ** (1 / 3)


def _drift_block(values: np.ndarray) -> float:
    """The best block for an autoregression of first order, 0 without a positive correlation. values: float [n]."""
    n = len(values)
    centred = values - values.mean()
    variance = float(centred @ centred)
    if variance == 0.0:
        return 0.0
    estimate = float(centred[1:] @ centred[:-1]) / variance
    correlation = min(estimate + (1 + 3 * estimate) / n, 0.999)  # the estimate is too low by that much in the mean
    return (math.sqrt(6) * max(correlation, 0.0) / (1 - correlation**2)) ** (2 / 3) * n ** (1 / 3)


def bootstrap_error(values: np.ndarray, block: int, seed: int = 0) -> float:
    """Half-width of the 95 % interval of the mean, from a circular block bootstrap. values: float [n], n >= 2.

    Student's quantile for the number of blocks takes the place of the normal one: few blocks know their spread badly.
    """
    n = len(values)
    count = max(2, n // block)
    wrapped = np.concatenate([values, values[: block - 1]])
    sums = np.convolve(wrapped, np.ones(block), mode="valid")  # of the block that starts at each step
    starts = np.random.default_rng(seed).integers(0, n, size=(DRAWS, count))
    means = sums[starts].sum(axis=1) / (count * block)
    error = means.std() * math.sqrt(count * block / n) * math.sqrt(count / (count - 1))
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * error)


def difference_of_pairs(pairs: Sequence[tuple[np.ndarray, np.ndarray]], run_offset: float, seed: int = 0) -> Difference:
    """The difference of two arms.

    pairs: (losses of the arm's run, of the baseline's run) at the same steps, float [n] each, n >= 2; a pair per seed.
    run_offset: standard deviation, in nats, of the loss of runs that differ in nothing but rounding (and seed).
    """
    count = len(pairs)
    differences = [arm - baseline for arm, baseline in pairs]
    means = np.array([difference.mean() for difference in differences])
    blocks = [block_steps(difference) for difference in differences]
    errors = [bootstrap_error(difference, block, seed) for difference, block in zip(differences, blocks)]
    step_error = math.sqrt(sum(error**2 for error in errors)) / count
    undecided = ""
    if count >= SPREAD_PAIRS:
        quantile = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
        offset_error = half = float(quantile * means.std(ddof=1) / math.sqrt(count))
    else:
        quantile = stats.norm.ppf((1 + CONFIDENCE) / 2)
        offset_error = float(quantile * run_offset * math.sqrt(2 / count))  # both runs of a pair have theirs
        half = math.hypot(step_error, offset_error)
        undecided = _undecided(differences, blocks)
    mean = float(means.mean())
    return Difference(
        mean=mean,
        low=mean - half,
        high=mean + half,
        step_error=step_error,
        offset_error=offset_error,
        baseline=float(np.mean([baseline.mean() for _, baseline in pairs])),
        pairs=count,
        steps=sum(map(len, differences)),
        block=max(blocks),
        undecided=undecided,
    )


def _undecided(differences: Sequence[np.ndarray], blocks: Sequence[int]) -> str:
    """Why one or two pairs give no interval. blocks: block_steps of the differences."""
    least = min(map(len, differences))
    if least < MIN_STEPS:
        return f"{least} steps were compared, {MIN_STEPS} or more are needed"
    if any(
        block >= longest_block(len(difference)) and abs(difference.mean()) <= CERTAIN * difference.std()
        for difference, block in zip(differences, blocks)
    ):
        return f"their difference drifts too slowly for the {least} steps that were compared to say how far"
    return ""
