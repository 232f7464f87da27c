"""What S2-Attention refuses of Megatron's command line, each refusal with the flag to change.

A new refusal goes into the tuple of its topic: model.py (which Megatron, which model, which layer spec), attention.py
(what attention computes), parallel.py (how the model is spread over ranks), execution.py (CUDA graphs, recomputation,
inference, checkpoints), unproven.py (what failed on a GPU, or has not been run there), ../flag_refusals.py (what
`s2-megatron inspect` refuses, too). What depends on the sparsity of the layers goes into sparsity.py. A test compares
REFUSALS and the settings that are honoured (tests/megatron/decided.py) with Megatron's own parser: every attention flag
of a new Megatron has to be decided.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from s2_megatron.megatron import flag_refusals
from s2_megatron.megatron.refusal import Refusal, listed
from s2_megatron.megatron.refusals import attention, execution, model, parallel, unproven
from s2_megatron.megatron.refusals.sparsity import refuse_layers, refuse_softmax_scale

__all__ = [
    "REFUSALS",
    "Refusal",
    "refuse_layers",
    "refuse_softmax_scale",
    "refuse_unsupported",
    "refuse_yaml_command_line",
]

REFUSALS: tuple[Refusal, ...] = (
    model.VERSION,
    *flag_refusals.REFUSALS,
    *attention.REFUSALS,
    *model.REFUSALS,
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
