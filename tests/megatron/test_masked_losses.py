"""Targets that do not count: context-parallel ranks with unequal numbers of those that do train as one process does."""

from __future__ import annotations

import pytest

from s2_megatron.megatron.records.loss_log import read_loss_log
from tests.tiers import mostly_slow

CP2 = "--context-parallel-size 2"
FEW = "--train-iters 3 --eval-iters 1 --eval-interval 3 --eval-micro-batch-size 2 --eval-global-batch-size 4"
MASKED = "--s2-loss-from-token 100 --eod-mask-loss --s2-position-loss 4"


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
