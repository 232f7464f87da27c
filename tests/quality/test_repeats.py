"""Repeats of one seed: how far apart equal runs end, and what a comparison takes from it."""

import subprocess
import sys

from examples.quality.launch import ROOT
from examples.quality.repeats import gaps, read_repeats, run_offset
from s2_megatron.tools.compare.measure import compare
from s2_megatron.tools.compare.readers import read_run
from s2_megatron.tools.compare.settings import make_arms
from s2_megatron.tools.compare.statistics import MIDDLE_RUNS, SMALL_RUNS

QUALITY = ROOT / "docs" / "quality"
REPEATS = QUALITY / "repeats" / "bfee4945"


def compared(*words: str):
    runs = [read_run(word)[0] for word in words]
    return compare(make_arms(runs, (), [True] * len(runs)))


def test_the_offset_of_a_comparison_is_that_of_the_repeats():
    assert round(run_offset(read_repeats(REPEATS)), 3) == MIDDLE_RUNS.nats


def test_gaps_of_runs_from_one_checkpoint_differ_by_less_than_what_a_comparison_takes():
    repeats = read_repeats(REPEATS)
    (first, second) = (gaps(repeats["s2"][each], repeats["dense"][each], last_step=493) for each in ("1", "2"))
    assert [step for step, *_ in first] == [step for step, *_ in second]
    assert all(abs(one - other) <= SMALL_RUNS.nats for (_, one, _), (_, other, _) in zip(first, second))


def test_one_pair_is_told_apart_only_where_both_go_on_from_one_checkpoint():
    going_on = compared(*(f"{arm}={REPEATS}/{arm}_repeat1.jsonl" for arm in ("dense", "s2")))
    assert going_on.run_offset is SMALL_RUNS
    assert going_on.results[1].difference.verdict == "worse"
    from_scratch = compared(*(f"{arm}={QUALITY}/lm8k/150M-bfee4945/{arm}_seed1.jsonl" for arm in ("dense", "s2")))
    assert from_scratch.run_offset is MIDDLE_RUNS
    assert from_scratch.results[1].difference.mean > going_on.results[1].difference.mean
    assert from_scratch.results[1].difference.verdict == "not told apart"


def test_a_folder_without_repeats_is_one_line(tmp_path):
    words = [sys.executable, "-m", "examples.quality.repeats", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "expected thinned losses of repeated runs" in done.stderr
    assert "Traceback" not in done.stderr
