"""The refusals of what has not passed on a GPU, taken away for the tests that are to try it there."""

from __future__ import annotations

# A variable of the environment that asks scripts/watched_pretrain.py for it.
LIFT_UNPROVEN = "LIFT_UNPROVEN_REFUSALS"


def lift_unproven_refusals() -> None:
    """Take what refusals/unproven.py and hybrid.py refuse out of the table of this process."""
    from s2_megatron.megatron.refusals import hybrid, table, unproven

    lifted = (*unproven.REFUSALS, *hybrid.REFUSALS)
    table.REFUSALS = tuple(refusal for refusal in table.REFUSALS if refusal not in lifted)
