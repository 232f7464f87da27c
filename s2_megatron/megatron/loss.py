"""The loss of a microbatch, in the form that Megatron's schedules expect, and how many targets count in it.

Megatron divides a microbatch's sum by its number of targets, and takes the mean over microbatches, data-parallel and
context-parallel ranks; with --calculate-per-token-loss it divides the sum over all of them by the number over all of
them, once.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from megatron.core import mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args

from s2_megatron.megatron.records.counted_targets import counted_targets
from s2_megatron.megatron.records.position_loss import position_loss

# A loss counts as spiky (--check-for-spiky-loss) when it is this many times the largest one seen so far.
SPIKY_LOSS_FACTOR = 10


@cache
def _cached_teacher_loss():
    """Megatron's distillation loss from stored teacher logits; built once, because it opens the store."""
    from megatron.training.distillation import LossFuncCallable

    args = get_args()
    return LossFuncCallable(
        logprobs_dir=args.logits_load_dir,
        decode_threads=args.logits_load_decode_threads,
        prefetch_factor=args.logits_load_prefetch_factor,
        msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
        kd_loss_alpha=args.logits_load_kd_loss_alpha,
        ignore_errors=args.logits_load_ignore_errors,
    )


def language_model_loss(
    loss_mask: torch.Tensor, output: torch.Tensor, model=None, positions: torch.Tensor | None = None
):
    """The loss of one microbatch, in the form that Megatron's schedules expect.

    loss_mask: fp32, 0 where a token does not count. output: per-token losses of the same number of elements. positions:
    int64 of that number, for the loss by position; None without it.
    Returns (sum of the masked losses, number of counted tokens int32, {'lm loss': fp32 [2] with these two for the
    log}). With context parallelism `_of_whole_sequence` changes them. With --check-for-nan-in-loss-and-grad a NaN or
    Inf ends the run, with --check-for-spiky-loss a sudden jump is reported.
    """
    args = get_args()
    if args.logits_load_dir is not None:
        loss, num_tokens, report = _cached_teacher_loss()(loss_mask, output, model=model)
    else:
        mask = loss_mask.view(-1).float()
        loss = (output.view(-1).float() * mask).sum()
        num_tokens = mask.sum().detach().to(torch.int)
        report = {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}
    _check_loss(loss, args)
    if counted_targets() is not None:
        counted_targets().add(num_tokens)
    if positions is not None:
        position_loss().add(output.view(-1), loss_mask, positions)
    return _of_whole_sequence(loss, num_tokens, report, args)


def _of_whole_sequence(loss: torch.Tensor, num_tokens: torch.Tensor, report: dict, args) -> tuple:
    """What a context-parallel rank returns: its sum of losses times the number of ranks, and the count of all ranks.

    Megatron divides the one by the other and takes the mean over the ranks. That gives the mean over the targets of the
    whole sequence, also where a mask leaves the ranks unequal numbers of targets.

    With --calculate-per-token-loss Megatron adds up sums and counts by itself: only the report, which the validation
    of --sft averages over the ranks, is changed.
    """
    ranks = args.context_parallel_size
    if ranks == 1 or args.hybrid_context_parallel:  # whose groups change; it takes --calculate-per-token-loss alone
        return loss, num_tokens, report
    counted = num_tokens.clone()
    torch.distributed.all_reduce(counted, group=mpu.get_context_parallel_group())
    report = {name: torch.stack([value[0] * ranks, counted.to(value.dtype)]) for name, value in report.items()}
    if args.calculate_per_token_loss:
        return loss, num_tokens, report
    return loss * ranks, counted, report


def _check_loss(loss: torch.Tensor, args) -> None:
    # A forward pass is deterministic, so a rerun that gives another result points at the hardware: tolerance 0.
    validate = partial(get_rerun_state_machine().validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        validate(rejection_func=torch.isnan, message="the loss of a microbatch is NaN", fatal=True)
        validate(rejection_func=torch.isinf, message="the loss of a microbatch is infinite", fatal=True)
    if args.check_for_spiky_loss:
        spiky = partial(get_rerun_state_machine().is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss")
        validate(rejection_func=spiky, message="the loss of a microbatch is spiky", fatal=False)
