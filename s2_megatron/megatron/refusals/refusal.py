"""What a refusal is, and the conditions that refusals of several topics need."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

# Above this length Megatron's default of a [b, 1, s, s] mask per microbatch (64 MiB a sample here) is an accident
# rather than a choice.
ATTENTION_MASK_SEQ_LENGTH = 8192


@dataclass(frozen=True)
class Refusal:
    """One setting that S2-Attention cannot honour.

    name: the argument's name in Megatron's namespace, or a made-up one. refused: whether these arguments ask for it.
    reason: what came and why it cannot be. fix: the flag to change. Both may refer to arguments as {args.name}, and to
    what `values` returns for these arguments by its keys. of_machine: whether it depends on what is installed on the
    machine that trains.
    """

    name: str
    refused: Callable[[Namespace], bool]
    reason: str
    fix: str
    values: Callable[[Namespace], dict] = lambda args: {}
    of_machine: bool = False

    def message(self, args: Namespace) -> str:
        known = dict(args=args, **self.values(args))
        return "; ".join(text.format(**known) for text in (self.reason, self.fix))


def is_set(name: str) -> Callable[[Namespace], bool]:
    """Whether an argument is neither absent, None, False, 0 nor empty."""
    return lambda args: bool(getattr(args, name, None))


def listed(found: list[str]) -> str:
    """One text for the messages of everything that is refused."""
    if len(found) == 1:
        return f"--s2-config: {found[0]}"
    return f"--s2-config: {len(found)} settings cannot be honoured" + "".join(f"\n  {text}" for text in found)
