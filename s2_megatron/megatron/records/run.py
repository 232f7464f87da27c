"""What a run says of itself beside its losses: the header of its loss log, how far it is, and its losses by position in
the loss log, TensorBoard and wandb."""

from __future__ import annotations

import json
import time
from argparse import Namespace

import torch

from s2_megatron.megatron.host.cuda_on_cpu import compute_device
from s2_megatron.megatron.records.position_loss import position_loss
from s2_megatron.megatron.settings import is_packed

POSITION_LOSS, POSITION_TOKENS = "lm loss by position/", "tokens by position/"


def flops_per_token(args: Namespace) -> dict[str, float] | None:
    """{"attended", "dense"}: FLOPs of a token, forward and backward, by Megatron's formula with the pairs that are
    attended, and with dense attention. None for packed documents, whose lengths decide. args: Megatron's."""
    from megatron.training import training

    if is_packed(args):
        return None
    flops = training.num_floating_point_operations(args, 1)
    return {
        "attended": float(flops) / args.seq_length,
        "dense": float(getattr(flops, "dense", flops)) / args.seq_length,
    }


def device_name() -> str:
    """What computes this process's part of the model: the GPU's name, or "CPU"."""
    device = compute_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def run_header() -> dict:
    """The arguments of this run as plain values, its FLOPs per token and its device: what a comparison of runs
    needs."""
    from megatron.training.global_vars import get_args

    args = get_args()
    arguments = json.loads(json.dumps(vars(args), default=str))
    return {"arguments": arguments, "flops_per_token": flops_per_token(args), "machine": {"device": device_name()}}


def progress() -> dict:
    """Sequences consumed, and the time of the clock in seconds."""
    from megatron.training.global_vars import get_args

    return {"samples": get_args().consumed_train_samples, "time": time.time()}


def read_position_loss(kind: int) -> dict[str, tuple[float, float]]:
    """The losses by position since the last reading, added over the ranks that share the batch; {} where they are not
    wanted and on ranks without the last pipeline stage.

    Raises ValueError when the training script has a loss function of its own, which adds nothing.
    """
    sums = position_loss()
    if sums is None:
        return {}
    from megatron.core import mpu

    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    if sums.sums[kind] is None:
        raise ValueError(
            "--s2-position-loss: the loss function added no losses by position; expected that of "
            "s2_megatron.megatron.data; "
            "give its forward_step to Megatron's pretrain, or leave the flag out"
        )
    return sums.read(kind, mpu.get_data_parallel_group(with_context_parallel=True))


def as_record(positions: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The fields of a loss log's record."""
    losses = {f"{POSITION_LOSS}{name}": loss for name, (loss, _) in positions.items()}
    return losses | {f"{POSITION_TOKENS}{name}": tokens for name, (_, tokens) in positions.items()}


def report_position_loss(positions: dict[str, tuple[float, float]], iteration: int, suffix: str = "") -> None:
    """Writes the losses to TensorBoard and wandb, where Megatron has opened them and as often as it writes there."""
    if not positions:
        return
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if writer is None or (not suffix and iteration % get_args().tensorboard_log_interval):
        return
    losses = {f"{POSITION_LOSS}{name}{suffix}": loss for name, (loss, _) in positions.items()}
    for name, loss in losses.items():
        writer.add_scalar(name, loss, iteration)
    if wandb is not None:
        wandb.log(losses, iteration)


def validation_suffixes(data_iterators) -> list[str]:
    """How Megatron tells several validation sets apart in its names; [""] for one. data_iterators: as
    evaluate_and_print_results gets them."""
    from megatron.training.global_vars import get_args

    args = get_args()
    if not args.multiple_validation_sets:
        return [""]
    return [f"-{name}" for name in args.validation_set_names or range(len(data_iterators))]
