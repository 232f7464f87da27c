"""What the page says of the targets at equal tokens and at equal time, from made-up runs."""

from __future__ import annotations

import pytest

from examples.quality.targets import read_planned, target_lines
from s2_megatron.tools.compare.measure import compare
from s2_megatron.tools.compare.readers import read_run
from s2_megatron.tools.compare.settings import make_arms
from tests.tools.logged_runs import BATCH, SEQ_LENGTH, losses, s2_arguments, write_loss_log

STEP_TOKENS = BATCH * SEQ_LENGTH


def lines(folder):
    """Of the arms dense and s2 in a folder."""
    runs = [read_run(f"{arm}={folder / arm}_seed1.jsonl")[0] for arm in ("dense", "s2")]
    comparison = compare(make_arms(runs, (), [True, True]))
    return target_lines(comparison.results, read_planned(folder, "dense"), STEP_TOKENS)


@pytest.fixture
def folder(tmp_path):
    """A study of 300 steps: s2 is 3 % worse, and takes five sixths of the time."""
    folder = tmp_path / "0.6M-abc"
    write_loss_log(folder / "dense_seed1.jsonl", losses(1, 11), seconds=0.6)
    write_loss_log(folder / "s2_seed1.jsonl", losses(1, 21, gap=0.03), **s2_arguments())
    return folder


def planned(folder, steps, gap, corpus="abc", seed=1):
    """A dense run of `steps` steps, written beside the study."""
    path = folder.parent / f"{steps}-{corpus}" / f"dense_seed{seed}.jsonl"
    write_loss_log(path, losses(1, 31, steps=steps, gap=gap), seconds=0.6, train_iters=steps, seed=seed)


def test_equal_time_takes_a_dense_run_planned_for_it(folder):
    missed, open_question = lines(folder)
    assert "at most 1 % above dense at equal tokens: **missed** (+3" in missed
    # 300 steps of 0.5 s are 250 of 0.6 s.
    assert f"at equal time: **not decided**. It takes a dense run whose schedule ends after 150 s: `--arms dense "\
           f"--tokens {250 * STEP_TOKENS / 1e6:.4g}e6`." in open_question  # fmt: skip


@pytest.mark.parametrize(("gap", "verdict"), [(0.1, "met"), (-0.1, "missed")])
def test_it_decides(folder, gap, verdict):
    planned(folder, 250, gap)
    said = next(line for line in lines(folder) if "equal time" in line)
    assert f"at equal time: **{verdict}** (validation loss " in said
    assert "after 150 s; dense, planned for 0.5M tokens" in said and said.endswith("after 150 s; 1 seed).")


def test_other_lengths_seeds_and_corpora_do_not(folder):
    planned(folder, 200, 0.1)
    planned(folder, 250, 0.1, corpus="def")
    planned(folder, 250, 0.1, seed=2)
    assert any("**not decided**" in line for line in lines(folder))
