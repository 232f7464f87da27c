"""Every refusal of Megatron's command line, and what looks at them."""

from __future__ import annotations

import sys
from argparse import Namespace

from s2_megatron.megatron.refusals import attention, execution, flags, hybrid, model, parallel, unproven
from s2_megatron.megatron.refusals.refusal import Refusal, listed

REFUSALS: tuple[Refusal, ...] = (
    model.VERSION,
    *flags.REFUSALS,
    *attention.REFUSALS,
    *model.REFUSALS,
    *hybrid.REFUSALS,
    *parallel.REFUSALS,
    *execution.REFUSALS,
    *unproven.REFUSALS,
)


def refuse_unsupported(args: Namespace, *, elsewhere: bool = False) -> None:
    """Raises ValueError that lists every setting in `args` that S2-Attention cannot honour, each with the flag to
    change. elsewhere: another machine than this one trains, so that its packages are not known."""
    refusals = (model.VERSION,) if model.VERSION.refused(args) else REFUSALS
    looked_at = [refusal for refusal in refusals if not (elsewhere and refusal.of_machine)]
    found = [refusal.message(args) for refusal in looked_at if refusal.refused(args)]
    if found:
        raise ValueError(listed(found))


def refuse_yaml_command_line(argv: list[str] | None = None) -> None:
    """Raises ValueError when --s2-config and --yaml-cfg stand on one command line.

    It has to be asked before Megatron parses: with --yaml-cfg nothing of --s2-config is left afterwards, and the run
    would be dense.
    """
    given = {argument.partition("=")[0] for argument in (sys.argv if argv is None else argv)}
    if {"--s2-config", "--yaml-cfg"} <= given:
        refusal = next(item for item in REFUSALS if item.name == "yaml_cfg")
        raise ValueError(listed([f"{refusal.reason}; {refusal.fix}"]))
