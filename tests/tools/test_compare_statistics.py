"""What `s2-megatron compare` calls different: planted effects are found, noise alone is not."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import signal

from s2_megatron.tools.compare import statistics
from s2_megatron.tools.compare.statistics import (
    GOING_ON,
    LARGE_RUNS,
    LARGE_TOKENS,
    MIDDLE_RUNS,
    MIDDLE_TOKENS,
    MIN_STEPS,
    SMALL_RUNS,
    block_steps,
    bootstrap_error,
    difference_of_pairs,
    longest_block,
    run_offset_for,
)
from s2_megatron.tools.compare.table import amount_text

PAIRS = 200
RUN_OFFSET = LARGE_RUNS.nats
# The bound for 5 %: with a true rate of 5 % a count above 17 of 200 has a probability of 2 %, one above 20 of 0.1 %,
# which is the bound where many rates are asked for.
CALLED_AT_MOST, CALLED_AT_MOST_OF_MANY = 17, 20


def noise(rng, steps: int, correlation: float, size: float) -> np.ndarray:
    """A stationary series, correlated from step to step; with correlation 1 the last quarter of a random walk. Returns
    float64 [steps]."""
    if correlation == 1.0:
        return np.cumsum(rng.normal(0, size, 4 * steps))[-steps:]
    before = 1000  # steps, after which a series of 0.99 has forgotten its start
    shocks = rng.normal(0, size * np.sqrt(1 - correlation**2), before + steps)
    return signal.lfilter([1.0], [1.0, -correlation], shocks)[before:]


def pair(rng, steps: int, correlation: float, gap: float = 0.0, offset: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Two runs with common batches. gap: share by which the first is higher. offset: deviation of each run's own."""
    batches = 3.3 + rng.normal(0, 0.05, steps)
    own = noise(rng, steps, correlation, 0.01) + rng.normal(0, np.sqrt(2) * offset)
    return batches * (1 + gap) + own, batches


@pytest.fixture
def few_draws(monkeypatch):
    """Enough for a rate over many pairs."""
    monkeypatch.setattr(statistics, "DRAWS", 300)


@pytest.mark.parametrize(
    "steps, correlation",
    [*product((40, 75, 250), (0.0, 0.8, 0.9, 0.95, 0.98, 1.0)), (20, 0.9), (1000, 0.0), (1000, 0.98)],
)
def test_noise_of_steps_alone_is_not_called_different(steps, correlation, few_draws):
    """However strongly it is correlated, up to a random walk, and without anything added for what else differs."""
    rng = np.random.default_rng([steps, round(100 * correlation)])
    found = [difference_of_pairs([pair(rng, steps, correlation)], run_offset=0.0) for _ in range(PAIRS)]
    assert sum(difference.verdict != "not told apart" for difference in found) <= CALLED_AT_MOST_OF_MANY


@pytest.mark.parametrize("steps, correlation", [(500, 0.9), (1000, 0.95)])
def test_a_drift_beneath_the_noise_of_single_steps_is_seen(steps, correlation, few_draws):
    """Seven tenths of the variance are noise of each step by itself."""
    rng = np.random.default_rng([steps, round(100 * correlation)])
    own = np.sqrt(0.7 / 0.3) * 0.01
    found = [
        difference_of_pairs([(arm + rng.normal(0, own, steps), baseline)], run_offset=0.0)
        for arm, baseline in (pair(rng, steps, correlation) for _ in range(PAIRS))
    ]
    assert sum(difference.verdict != "not told apart" for difference in found) <= CALLED_AT_MOST


@pytest.mark.parametrize("steps, correlation", [(75, 0.5), (250, 0.8), (1000, 0.8)])
def test_the_bootstrap_is_not_too_wide(steps, correlation, few_draws):
    """Intervals that never miss are of no use, nor are those that are never given."""
    rng = np.random.default_rng(2)
    found = [difference_of_pairs([pair(rng, steps, correlation)], run_offset=0.0) for _ in range(PAIRS)]
    assert sum(difference.verdict != "not told apart" for difference in found) >= 1
    assert sum(bool(difference.undecided) for difference in found) <= 0.05 * PAIRS


def test_too_few_steps_and_a_slow_drift_are_said():
    rng = np.random.default_rng(8)
    few = difference_of_pairs([pair(rng, MIN_STEPS - 1, 0.0, gap=0.05)], RUN_OFFSET)
    assert few.verdict == "not told apart" and "39 steps were compared, 40 or more are needed" in few.undecided
    assert difference_of_pairs([pair(rng, MIN_STEPS, 0.0, gap=0.05)], RUN_OFFSET).verdict == "worse"
    walks = [noise(rng, 75, 0.99, 0.01) for _ in range(3)]
    drifting = [(3.3 + 0.03 + walk, np.full(75, 3.3)) for walk in walks]
    assert "drifts too slowly for the 75 steps" in difference_of_pairs(drifting[:1], RUN_OFFSET).undecided
    # A gap of many times what the drift moves is decided all the same.
    assert difference_of_pairs([(3.3 + 0.3 + walks[0], np.full(75, 3.3))], RUN_OFFSET).verdict == "worse"
    # Three pairs measure themselves how far apart such drifts end.
    assert difference_of_pairs(drifting, RUN_OFFSET).undecided == ""


def test_a_gap_of_half_a_percent_is_found():
    rng = np.random.default_rng(3)
    for sign, verdict in ((1, "worse"), (-1, "better")):
        found = [difference_of_pairs([pair(rng, 250, 0.8, sign * 0.005, RUN_OFFSET)], RUN_OFFSET) for _ in range(PAIRS)]
        verdicts = [difference.verdict for difference in found]
        assert verdicts.count(verdict) >= 0.95 * PAIRS
        assert verdicts.count(verdict) + verdicts.count("not told apart") == PAIRS
        assert np.mean([difference.relative[0] for difference in found]) == pytest.approx(sign * 0.005, rel=0.1)


def test_equal_batches_are_what_finds_it():
    """The noise of batches alone is three times the gap: with batches of another order the interval is wider."""
    rng = np.random.default_rng(4)
    (arm, same_batches), (_, other_batches) = (pair(rng, 250, 0.5, 0.005) for _ in range(2))
    paired, unpaired = (difference_of_pairs([(arm, batches)], 0.0) for batches in (same_batches, other_batches))
    assert paired.verdict == "worse"
    assert unpaired.high - unpaired.low > 1.5 * (paired.high - paired.low)


def test_one_pair_carries_the_offset_between_equal_runs():
    """Two runs without any noise of steps, 0.002 apart: a bootstrap over steps would be certain."""
    baseline = np.linspace(3.5, 3.3, 100)
    assert difference_of_pairs([(baseline + 0.002, baseline)], RUN_OFFSET).verdict == "not told apart"
    certain = difference_of_pairs([(baseline + 0.002, baseline)], run_offset=0.0)
    assert certain.verdict == "worse" and certain.step_error < 1e-9
    assert difference_of_pairs([(baseline + 0.01, baseline)], RUN_OFFSET).verdict == "worse"


def test_three_pairs_measure_their_own_spread():
    baseline = np.linspace(3.5, 3.3, 100)
    spread = [(baseline + offset, baseline) for offset in (0.02, -0.01, 0.03)]
    difference = difference_of_pairs(spread, RUN_OFFSET)
    # Student's t for two degrees of freedom: 4.303.
    assert difference.offset_error == pytest.approx(4.303 * np.std([0.02, -0.01, 0.03], ddof=1) / np.sqrt(3), rel=1e-3)
    assert difference.verdict == "not told apart" and difference.pairs == 3
    close = [(baseline + offset, baseline) for offset in (0.0201, 0.0199, 0.02)]
    assert difference_of_pairs(close, RUN_OFFSET).verdict == "worse"
    rng = np.random.default_rng(5)
    triples = [[pair(rng, 100, 0.8, offset=0.01) for _ in range(3)] for _ in range(PAIRS)]
    assert sum(difference_of_pairs(each, RUN_OFFSET).verdict != "not told apart" for each in triples) <= CALLED_AT_MOST


def test_blocks_grow_with_correlation():
    rng = np.random.default_rng(6)
    none, some, much = (
        np.median([block_steps(noise(rng, 1000, correlation, 1.0)) for _ in range(20)])
        for correlation in (0.0, 0.5, 0.9)
    )
    assert none < 50 < much and none < some < much
    assert (
        block_steps(np.ones(100)) == block_steps(0.002 + np.linspace(3.5, 3.3, 100) - np.linspace(3.5, 3.3, 100)) == 1
    )
    assert block_steps(np.arange(30.0)) == longest_block(30) == 10  # a trend


def test_the_bootstrap_of_independent_steps_is_the_standard_error():
    values = np.random.default_rng(7).normal(0, 1, 2000)
    assert bootstrap_error(values, 1) == pytest.approx(1.96 / np.sqrt(2000), rel=0.05)
    assert bootstrap_error(values, 20) == pytest.approx(1.96 / np.sqrt(2000), rel=0.15)


def test_times_of_a_row_have_one_unit():
    assert amount_text("hours", 0.11) == "0.11 h" and amount_text("hours", 0.05) == "180 s"
    assert amount_text("hours", 0.11, least=0.05) == "396 s"


def test_short_runs_are_assumed_to_end_further_apart():
    assert run_offset_for(0.6e6) is run_offset_for(MIDDLE_TOKENS - 1) is SMALL_RUNS
    assert run_offset_for(MIDDLE_TOKENS) is run_offset_for(LARGE_TOKENS - 1) is MIDDLE_RUNS
    assert run_offset_for(None) is MIDDLE_RUNS  # the tokens were not logged: the careful one
    assert run_offset_for(LARGE_TOKENS) is LARGE_RUNS
    assert run_offset_for(80e6, going_on=True) is run_offset_for(None, going_on=True) is GOING_ON
    assert MIDDLE_RUNS.nats > SMALL_RUNS.nats > LARGE_RUNS.nats
