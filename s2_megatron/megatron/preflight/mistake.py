"""What a mistake in Megatron's flags is: an entry of a table, which becomes one line. Neither Megatron nor torch is
imported: `s2-megatron inspect` needs it, too."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import NamedTuple

from s2_megatron.config.errors import printable


class Mistake(NamedTuple):
    """made: whether Megatron's arguments, as the parser left them, make it. text: of the error; {name} stands for the
    argument of that name. of_machine: whether it depends on what is installed on the machine that trains. of_script:
    whether it is one in pretrain_gpt_s2.py alone, whose data and tasks other scripts need not have."""

    made: Callable[[Namespace], bool]
    text: str
    of_machine: bool = False
    of_script: bool = False


class _Arguments:
    """Megatron's, with None for those that another release does not have, or inspect does not read."""

    def __init__(self, args: Namespace):
        self._args = args

    def __getattr__(self, name: str):
        return getattr(self._args, name, None)


def refuse_first(args: Namespace, mistakes: Iterable[Mistake]) -> None:
    """Raises ValueError for the first of the mistakes that these arguments make."""
    given = _Arguments(args)
    for mistake in mistakes:
        if mistake.made(given):
            raise ValueError(mistake.text.format(**{name: _shown(value) for name, value in vars(args).items()}))


def _shown(value: object) -> str:
    return printable(" ".join(map(str, value)) if isinstance(value, list | tuple) else value, 200)
