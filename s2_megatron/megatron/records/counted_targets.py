"""Whether any target counts in a step and in an evaluation, where a mask may leave none.

A microbatch without one adds nothing to the gradients, which is right. A step without one trains nothing, and its loss
would be 0/0: that is said in one line and no loss is logged; a run of such steps ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from s2_megatron.megatron.errors import RunError
from s2_megatron.megatron.records.position_loss import EVALUATE, TRAIN

STEPS_IN_A_ROW = 10


class CountedTargets:
    """Adds up how many targets count, on the device of the losses. masks: the flags that leave some out."""

    def __init__(self, masks: Sequence[str]):
        self.masks = ", ".join(masks)
        # int64 [training, evaluation]. Never replaced, for CUDA graphs of whole iterations.
        self.sums: torch.Tensor | None = None
        self.first_step: int | None = None
        self.empty_steps = 0  # the last ones, in a row

    def add(self, number: torch.Tensor) -> None:
        """Those of one microbatch on this rank; does not wait for the device."""
        if self.sums is None:
            self.sums = torch.zeros(2, dtype=torch.int64, device=number.device)
        self.sums[TRAIN if torch.is_grad_enabled() else EVALUATE] += number

    def _none_counted(self, kind: int) -> bool:
        """Since the last time, over the ranks that share the batch, all of which must ask."""
        from megatron.core import mpu

        if self.sums is None:  # a loss function of the script's own
            return False
        counted = self.sums[kind].clone()
        self.sums[kind] = 0
        torch.distributed.all_reduce(counted, group=mpu.get_data_parallel_group(with_context_parallel=True))
        return counted.item() == 0

    def losses_of_step(self, losses: dict, iteration: int, last: int) -> dict:
        """`losses`, or {} for a step in which no target counted.

        losses: of the step, {} on ranks without the last pipeline stage and for a step that was skipped. last: the
        iteration that ends the training. Raises RunError after STEPS_IN_A_ROW such steps, and at the end of a training
        that had no other.
        """
        if not losses:
            return losses
        self.first_step = iteration if self.first_step is None else self.first_step
        if not self._none_counted(TRAIN):
            self.empty_steps = 0
            return losses
        self.empty_steps += 1
        steps = f"iterations {iteration - self.empty_steps + 1} to {iteration}" if self.empty_steps > 1 else iteration
        if self.empty_steps >= STEPS_IN_A_ROW or (iteration >= last and self.empty_steps > last - self.first_step):
            raise RunError(
                f"no target counts in {self.empty_steps} steps ({steps}), so nothing is trained: {self.masks} leaves "
                "out all of them; expected data with targets that count; correct the flag or the data"
            )
        self._say(f"iteration {iteration}: no target of its batch counts ({self.masks}); it trains nothing")
        return {}

    def losses_of_evaluation(self, losses: dict, name: str) -> dict:
        """`losses`, or {} for an evaluation in which no target counted. name: of the evaluation."""
        if not losses or not self._none_counted(EVALUATE):
            return losses
        self._say(f"{name}: no target counts ({self.masks}); it has no loss")
        return {}

    def _say(self, line: str) -> None:
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:  # which prints Megatron's losses
            print(f"S2: {line}", file=sys.stderr, flush=True)


_current: CountedTargets | None = None


def count_targets(masks: Sequence[str]) -> None:
    """Has the loss function of loss.py count targets in this process, when flags leave some out. masks: these flags."""
    global _current
    _current = CountedTargets(masks) if masks else None


def counted_targets() -> CountedTargets | None:
    """What the loss function adds to; None where every target counts."""
    return _current


def losses_of_step(losses: dict, iteration: int) -> dict:
    """As CountedTargets has it; `losses` where every target counts."""
    from megatron.training.global_vars import get_args

    return losses if _current is None else _current.losses_of_step(losses, iteration, get_args().train_iters)


def losses_of_evaluation(losses: dict, name: str) -> dict:
    """As losses_of_step."""
    return losses if _current is None else _current.losses_of_evaluation(losses, name)
