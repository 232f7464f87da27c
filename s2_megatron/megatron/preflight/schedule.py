"""Megatron's own schedule of learning rate, weight decay and batches, gone through before the model is built: some of
its assertions are reached only in the middle of a training."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

POINTS = 64  # of a training that are looked at


def check_schedule(args: Namespace, resumed: dict | None = None) -> None:
    """Raises what Megatron raises for a schedule that it does not take, or fails on later.

    args: Megatron's, validated; its calculator of microbatches has been made. resumed: the schedule in a checkpoint
    whose optimizer goes on.
    """
    if args.skip_train:  # without an optimizer
        return
    from megatron.core import num_microbatches_calculator as batches
    from megatron.training import training
    from megatron.training.global_vars import set_args

    length = args.train_samples or (args.train_iters or 0) * (args.global_batch_size or 0)
    set_args(Namespace(**vars(args)))  # what is written into them is not kept
    try:
        schedule = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[{}]))
        if resumed is not None:
            schedule.load_state_dict(dict(resumed))
        done = schedule.num_steps
        points = [done + (length - done) * point // POINTS for point in range(POINTS + 1)] if length > done else []
        for samples in points:
            schedule.step(samples - schedule.num_steps)
            batches.update_num_microbatches(samples, consistency_check=True)
    finally:
        set_args(args)
        batches.update_num_microbatches(0, consistency_check=False)
