"""Targets that do not count: steps and evaluations without any that does, and context-parallel ranks with unequal
numbers of them, which train as one process does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import mpu

from s2_megatron.megatron.errors import RunError
from s2_megatron.megatron.records import counted_targets
from s2_megatron.megatron.records.counted_targets import STEPS_IN_A_ROW, CountedTargets, count_targets
from s2_megatron.megatron.records.loss_log import read_loss_log
from s2_megatron.megatron.records.status import read_status
from s2_megatron.megatron.settings import RunFlags
from tests.tiers import mostly_slow

LOSSES = {"lm loss": torch.tensor(2.0)}
CP2 = "--context-parallel-size 2"
FEW = "--train-iters 3 --eval-iters 1 --eval-interval 3 --eval-micro-batch-size 2 --eval-global-batch-size 4"
MASKED = "--s2-loss-from-token 100 --eod-mask-loss --s2-position-loss 4"


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(mpu, "get_data_parallel_group", lambda with_context_parallel: None)
    for name, value in (("all_reduce", None), ("get_rank", 0), ("get_world_size", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda *args, value=value, **kwargs: value)


def steps(counts, last=100, first=1):
    """What is left of each step's losses; counts: of the microbatches of each."""
    targets = CountedTargets(["--sft"])
    kept = []
    for iteration, microbatches in enumerate(counts, start=first):
        for number in microbatches:
            targets.add(torch.tensor(number, dtype=torch.int32))
        kept.append(targets.losses_of_step(LOSSES, iteration, last))
    return kept


def test_an_empty_microbatch_is_nothing_to_speak_of(capsys):
    assert steps([[0, 3], [1, 0]]) == [LOSSES, LOSSES] and not capsys.readouterr().err


def test_an_empty_step_is_said_and_has_no_loss(capsys):
    assert steps([[1], [0, 0], [2]]) == [LOSSES, {}, LOSSES]
    assert capsys.readouterr().err == "S2: iteration 2: no target of its batch counts (--sft); it trains nothing\n"


@pytest.mark.parametrize(
    ("counts", "last", "where"),
    [
        ([[1], *[[0]] * STEPS_IN_A_ROW], 100, f"iterations 2 to {STEPS_IN_A_ROW + 1}"),
        ([[0]] * 3, 3, "iterations 1 to 3"),
        ([[0]], 1, "(1)"),
    ],
)
def test_a_run_of_empty_steps_ends(counts, last, where):
    with pytest.raises(RunError, match=r"no target counts in .*--sft leaves out all of them; expected") as end:
        steps(counts, last)
    assert where in str(end.value)
    assert steps(counts[:-1], last)[-1:] in ([], [{}])  # not before


def test_a_step_that_was_skipped_and_a_loss_function_of_another_script():
    targets = CountedTargets(["--sft"])
    assert targets.losses_of_step({}, 1, 1) == {}
    assert targets.losses_of_step(LOSSES, 1, 1) == LOSSES


def test_an_empty_evaluation(capsys):
    targets = CountedTargets(["--sft"])
    with torch.no_grad():
        targets.add(torch.tensor(0))
    assert targets.losses_of_evaluation(LOSSES, "iteration 5 on validation set") == {}
    assert "S2: iteration 5 on validation set: no target counts (--sft); it has no loss" in capsys.readouterr().err
    targets.add(torch.tensor(1))
    assert targets.losses_of_step(LOSSES, 6, 10) == LOSSES


def test_only_where_targets_are_masked():
    flags = dict(s2_loss_from_token=None, eod_mask_loss=False, sft=False)
    others = dict(s2_loss_log=None, s2_position_loss=None, seq_length=128, log_throughput=False)
    masked = SimpleNamespace(**others, **flags | dict(s2_loss_from_token=0, eod_mask_loss=True))
    count_targets(RunFlags.from_args(masked).masks)
    assert counted_targets.counted_targets().masks == "--s2-loss-from-token 0, --eod-mask-loss"
    count_targets(RunFlags.from_args(SimpleNamespace(**others, **flags)).masks)
    assert counted_targets.counted_targets() is None


def test_all_targets_masked(lab, tmp_path):
    """Data without the tokens that count."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{tmp_path}/low.bin", dtype=np.uint16)
    for _ in range(20):
        builder.add_document(np.arange(100), [100])
    builder.finalize(f"{tmp_path}/low.idx")
    flags = f"--s2-loss-from-token 120 --train-iters 2 --save {tmp_path}/save --save-interval 10"
    output = lab.run("all_masked", flags, f"--data-path {tmp_path}/low --split 100,0,0", fails=True).output
    assert output.count("S2: iteration 1: no target of its batch counts") == 1
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "no target counts in 2 steps (iterations 1 to 2)" in line and "Traceback" not in output
    assert read_status(tmp_path / "save")["state"] == "failed" and "lm loss" not in output


def numbers(lab, name):
    """Everything that a run logged, (iteration or name, key) -> value."""
    records, evaluations = read_loss_log(lab.folder / f"{name}.jsonl")
    return {
        (which, key): value
        for which, record in (records | evaluations).items()
        for key, value in record.items()
        if "loss" in key or "tokens" in key or key == "grad_norm"
    }


@pytest.mark.parametrize("name", mostly_slow(["mean", "per_token"], "mean"))
def test_context_parallel_ranks_train_as_one_process(lab, name):
    """Conversations (--sft) are in test_context_parallel.py."""
    flags = MASKED + (" --calculate-per-token-loss" if name == "per_token" else "")
    lab.run(f"{name}_alone", FEW, flags)
    lab.run(f"{name}_cp2", FEW, flags, CP2, processes=2)
    one, two = numbers(lab, f"{name}_alone"), numbers(lab, f"{name}_cp2")
    assert one.keys() == two.keys() and {(1, "grad_norm"), (3, "lm loss")} <= one.keys()
    assert any("validation" in str(which) for which, _ in one)
    assert two == {key: pytest.approx(value, abs=1e-5) for key, value in one.items()}
