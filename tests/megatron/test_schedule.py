"""Schedules that the preflight takes are those that Megatron's scheduler takes."""

from __future__ import annotations

import os
from argparse import Namespace

import pytest

from s2_megatron.megatron.checkpoints.folder import CheckpointError
from s2_megatron.megatron.preflight.combinations import MISTAKES
from s2_megatron.megatron.preflight.schedule import check_batches, compare_schedules, scheduler_state
from tests.megatron import forks
from tests.megatron.arguments import ROOT


def test_what_is_refused_is_what_megatron_fails_on(tmp_path, scripts):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    forks.run(scripts / "schedules.py", ["600"], environment, tmp_path)


def test_another_batch_is_named_by_its_flag():
    """All lengths of Megatron's scheduler are in samples."""
    flags = dict(train_iters=10, lr_warmup_iters=2, lr_decay_iters=None, lr_warmup_fraction=None, lr_warmup_samples=0)
    flags |= dict(lr=1e-3, min_lr=0.0, lr_decay_style="cosine", weight_decay_incr_style="constant")
    flags |= dict(start_weight_decay=0.1, end_weight_decay=0.1, skip_train=False)
    flags |= dict(override_opt_param_scheduler=False, use_checkpoint_opt_param_scheduler=False)
    stored, ours = Namespace(**flags, global_batch_size=8), Namespace(**flags, global_batch_size=16)
    compare_schedules(stored, scheduler_state(stored), stored, "--load=x: iteration 2")
    with pytest.raises(CheckpointError, match=r"samples is 16 there \(--global-batch-size 8\) and 32 here"):
        compare_schedules(ours, scheduler_state(stored), stored, "--load=x: iteration 2")


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_sizes_that_the_checkpoint_brings_are_not_judged(in_checkpoint):
    """Tensor parallelism of 8, say, for which a batch of 4 is fine, and as many layers as the list has."""
    args = Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1)
    args.__dict__ |= dict(world_size=8, micro_batch_size=1, global_batch_size=4, step_batch_size_schedule=None)
    args.__dict__ |= dict(decrease_batch_size_if_needed=False, train_samples=None, skip_train=False)
    args.__dict__ |= dict(use_checkpoint_args=in_checkpoint, use_mp_args_from_checkpoint_args=in_checkpoint)
    args.__dict__ |= dict(moe_layer_freq=[0, 1], num_layers=None, num_experts=2)
    assert MISTAKES["moe_layer_freq"].made(args) is not in_checkpoint
    if in_checkpoint:
        check_batches(args)
    else:
        with pytest.raises(ValueError, match="data parallelism over 8 ranks: expected a multiple of 8"):
            check_batches(args)
