"""How long a run trains, how its learning rate and weight decay go, and whether a resumed run's go on as they began.

Mirrors what Megatron 0.19.2 requires with bare assertions once the model is built: core/optimizer_param_scheduler.py
(OptimizerParamScheduler and its load_state_dict), training/training.py (get_optimizer_param_scheduler,
update_train_iters) and core/num_microbatches_calculator.py. Each function raises ValueError for the first thing that is
wrong.
"""

from __future__ import annotations

import math
from argparse import Namespace

from s2_megatron.config.errors import printable
from s2_megatron.megatron.checkpoints.folder import CheckpointError


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def data_parallel_size(args: Namespace) -> int:
    """Before Megatron has validated its arguments, and set it."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    return max(1, args.world_size // model)


def check_batches(args: Namespace) -> None:
    """The batch is one for every data-parallel rank and microbatch; a number of samples is at least one batch."""
    ranks, micro = data_parallel_size(args), args.micro_batch_size
    if micro is None:
        return  # from a checkpoint's arguments, or missing, which is said elsewhere
    ramp = getattr(args, "rampup_batch_size", None)
    if ramp is not None:
        raise ValueError(
            f"--rampup-batch-size={' '.join(map(str, ramp))}: this Megatron ignores it; expected "
            "another flag; use --step-batch-size-schedule, whose help shows its form"
        )
    if args.use_checkpoint_args and args.use_mp_args_from_checkpoint_args:
        return  # how many ranks share a batch is in the checkpoint
    batch, step = args.global_batch_size, micro * ranks
    if args.step_batch_size_schedule is not None:
        _check_steps(args, step)
    if batch is None:
        batch = step
    elif batch % step and not args.decrease_batch_size_if_needed:
        raise ValueError(
            f"--global-batch-size={batch} with --micro-batch-size={micro} and data parallelism over {ranks} ranks: "
            f"expected a multiple of {step}; use --global-batch-size {max(1, round(batch / step)) * step}"
        )
    elif batch < step:
        raise ValueError(
            f"--global-batch-size={batch} with --micro-batch-size={micro} and data parallelism over {ranks} ranks: "
            f"expected {step} or more, one microbatch for each rank; use --global-batch-size {step}"
        )
    unjudged = args.step_batch_size_schedule is not None or args.skip_train
    if args.train_samples is not None and not unjudged and args.train_samples < batch:
        raise ValueError(
            f"--train-samples={args.train_samples} with a global batch of {batch} samples: not one iteration; expected "
            f"{batch} or more; use --train-samples {batch}"
        )


def _check_steps(args: Namespace, step: int) -> None:
    """Of --step-batch-size-schedule, by Megatron's own parser. step: what a batch has to be a multiple of."""
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    text, micro = printable(args.step_batch_size_schedule, 200), args.micro_batch_size
    try:
        calculator = StepBatchsizeNumMicroBatchesCalculator(
            micro, step // micro, False, 1, args.step_batch_size_schedule, args.seq_length
        )
    except (ValueError, AssertionError, OverflowError) as error:
        raise ValueError(
            f"--step-batch-size-schedule={text}: {printable(error, 200)}; expected TOKENS:BATCH words, the first of 0 "
            f"tokens; use --step-batch-size-schedule '0:{step} 1B:{2 * step}'"
        ) from error
    wrong = [batch for _, batch in calculator.schedule if batch % step]
    if wrong and args.load is None:  # a run that goes on may be past its first batches
        raise ValueError(
            f"--step-batch-size-schedule={text}: a batch of {wrong[0]} samples, with --micro-batch-size={micro} and "
            f"data parallelism over {step // micro} ranks; expected multiples of {step}; use one of them"
        )


def check_schedule(args: Namespace) -> None:
    """The learning rate and the weight decay."""
    if args.skip_train:  # without an optimizer
        return
    unit = "samples" if args.train_samples is not None else "iters"
    _check_rates(args)
    _check_warmup(args, unit)
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        raise ValueError(
            f"--lr-decay-style=WSD without --lr-wsd-decay-{unit}: how long the decay at the end is; expected both; add "
            f"--lr-wsd-decay-{unit} {max(1, _decay(args, unit)[1] // 10)}"
        )
    constant, first, last = args.weight_decay_incr_style == "constant", args.start_weight_decay, args.end_weight_decay
    if constant and not args.weight_decay >= 0:
        raise ValueError(f"--weight-decay={args.weight_decay:g}: expected 0 or more; use --weight-decay 0")
    if not constant and None not in (first, last) and not 0 <= first <= last:
        raise ValueError(
            f"--start-weight-decay={first:g} and --end-weight-decay={last:g}: expected 0 or more, and the end no lower "
            "than the start; swap them, or use --weight-decay 0.1 alone"
        )
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ValueError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler: the one takes the schedule of "
            "these flags, the other that of the checkpoint; expected one of them; remove the other"
        )


def _check_rates(args: Namespace) -> None:
    highest, lowest, first = args.lr, args.min_lr, args.lr_warmup_init
    if highest is None:
        return
    if not (highest >= 0 and math.isfinite(highest)):
        raise ValueError(f"--lr={highest:g}: expected a number, 0 or more; use --lr 3e-4")
    if not 0 <= lowest <= highest:
        raise ValueError(
            f"--min-lr={lowest:g} with --lr={highest:g}: expected 0 to --lr; use --min-lr {highest / 10:g}"
        )
    if not first <= highest:
        raise ValueError(
            f"--lr-warmup-init={first:g} with --lr={highest:g}: the warm-up rises to --lr; expected less; leave "
            "--lr-warmup-init out, which starts at 0"
        )


def _decay(args: Namespace, unit: str) -> tuple[str, int]:
    """(the flag that says how long the learning rate decays, its value)"""
    own = getattr(args, f"lr_decay_{unit}")
    name = f"lr_decay_{unit}" if own is not None else f"train_{unit}"
    return _flag(name), getattr(args, name)


def _check_warmup(args: Namespace, unit: str) -> None:
    flag, decay = _decay(args, unit)
    if decay <= 0:
        raise ValueError(f"{flag}={decay}: expected 1 or more; leave it out, or use {flag} {args.train_iters or 1}")
    fraction, warmup = args.lr_warmup_fraction, getattr(args, f"lr_warmup_{unit}")
    if fraction is not None:
        if not 0 <= fraction < 1:
            raise ValueError(
                f"--lr-warmup-fraction={fraction:g}: the share of the decay that is warm-up; expected 0 or more and "
                "less than 1; use --lr-warmup-fraction 0.01"
            )
    elif warmup >= decay:
        longest = "" if flag.startswith("--train") else " (it may be as long as the training)"
        raise ValueError(
            f"--lr-warmup-{unit}={warmup} with {flag}={decay}: the warm-up comes before the decay is over; expected "
            f"0 to {decay - 1}; use --lr-warmup-{unit} {decay // 10}, or a larger {flag}{longest}"
        )


# What Megatron compares when it resumes an optimizer: its name in the scheduler's state, the flags that set it
COMPARED = {
    "max_lr": ("the highest learning rate", "lr"),
    "min_lr": ("the lowest learning rate", "min_lr"),
    "lr_warmup_steps": ("the warm-up in samples", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction",
        "global_batch_size"),
    "lr_decay_steps": (
        "the length of the decay in samples", "lr_decay_iters", "train_iters", "lr_decay_samples", "train_samples",
        "global_batch_size",
    ),
    "lr_decay_style": ("the form of the decay", "lr_decay_style"),
    "start_wd": ("the first weight decay", "start_weight_decay"),
    "end_wd": ("the last weight decay", "end_weight_decay"),
    "wd_incr_steps": ("how long the weight decay changes, in samples", "train_iters", "train_samples",
        "global_batch_size"),
    "wd_incr_style": ("how the weight decay changes", "weight_decay_incr_style"),
}  # fmt: skip


def scheduler_state(args: Namespace) -> dict:
    """What Megatron's scheduler is made of, named as in its state; lengths in samples. args: Megatron's, validated."""
    if args.train_iters:
        batch, warmup = args.global_batch_size, args.lr_warmup_iters * args.global_batch_size
        decay, length = (args.lr_decay_iters or args.train_iters) * batch, args.train_iters * batch
    else:
        length, warmup = args.train_samples, args.lr_warmup_samples
        decay = args.lr_decay_samples or length
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    return dict(
        max_lr=float(args.lr),
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=length,
        wd_incr_style=args.weight_decay_incr_style,
    )


def compare_schedules(args: Namespace, state: dict, stored: Namespace, where: str) -> None:
    """Raises CheckpointError when a run that resumes its optimizer has another schedule than the checkpoint, unless a
    flag says which of the two counts. args: Megatron's, validated. state: of the scheduler in the checkpoint. stored:
    the arguments there. where: the flag, folder and iteration."""
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler or args.skip_train:
        return
    for name, ours in scheduler_state(args).items():
        theirs = state.get(name, ours)  # older releases have other names, which Megatron knows
        if theirs != ours:
            what, *flags = COMPARED[name]
            given = [flag for flag in flags if getattr(args, flag, None) != getattr(stored, flag, None)]
            changed = ", ".join(f"{_flag(flag)} {printable(getattr(stored, flag, None))}" for flag in given)
            raise CheckpointError(
                f"{where} goes on with its optimizer, and {what} is {printable(theirs)} there ({changed or name}) and "
                f"{printable(ours)} here; expected the same; give the same flags, or add "
                "--override-opt-param-scheduler to go on with these, or --use-checkpoint-opt-param-scheduler to go on "
                "with the checkpoint's"
            )
