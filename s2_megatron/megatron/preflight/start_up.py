"""Errors of a start become one line `error: ...` and status 2: of pretrain_gpt_s2.py, and of `s2-megatron check`.

`start_up()` goes around everything that pretrain_gpt_s2.py does before it trains. The first rank of each node (its
folders may be local) checks flags and files first. What Megatron prints meanwhile, its list of arguments above all, is
held back until the start is through, so that an error is the last line and nearly the only one.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
import time
from argparse import Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import NoReturn

from s2_megatron.config.errors import nearest_name, printable
from s2_megatron.megatron.errors import TRACEBACK, error_text, is_of_the_machine
from s2_megatron.megatron.preflight.datasets import check_datasets
from s2_megatron.megatron.preflight.mistakes import check_flags, check_written
from s2_megatron.megatron.records.status import fail, is_first_of_node, refuse, wait_for_first_of_node
from s2_megatron.megatron.refusals.model import megatron_version
from s2_megatron.printing import held as held_lines
from s2_megatron.printing import open_streams

DEFAULT_TOKENIZER = "GPT2BPETokenizer"  # of pretrain_gpt_s2.py, as of Megatron's pretrain_gpt.py
Provider = Callable[[ArgumentParser], ArgumentParser]
MOST_REPEATS = 10_000  # of a pattern in a flag, more than any model has layers


def with_error_lines(provider: Provider) -> Provider:
    """An extra_args_provider whose parser raises ValueError instead of printing its usage and ending the process.
    Megatron 0.19.2 has help texts with a single %, at which argparse fails, and looks some words up in an enum, whose
    KeyError argparse lets through."""

    def extra_args_provider(parser: ArgumentParser) -> ArgumentParser:
        parser = provider(parser)
        for action in parser._actions:
            action.help = re.sub(r"%%|%(?!\()", "%%", action.help or "")
        parse_value = parser._get_value

        def get_value(action: Action, text: str):
            try:
                return parse_value(action, text)
            except KeyError as error:
                names = ", ".join(repr(getattr(choice, "name", choice)) for choice in action.choices or ())
                among = f" (choose from {names})" if names else ""
                raise ArgumentError(action, f"invalid choice: {printable(text)!r}{among}") from error

        def error(message: str) -> NoReturn:
            raise ValueError(_flag_error(message, parser))

        parser._get_value, parser.error = get_value, error
        return parser

    return extra_args_provider


def _flag_error(message: str, parser: ArgumentParser) -> str:
    """What argparse found, with the flag that resembles an unknown one."""
    unknown = message.partition("unrecognized arguments: ")[2].split()
    near = nearest_name(unknown[0].partition("=")[0], parser._option_string_actions) if unknown else None
    if unknown:
        message = f"unknown flag (Megatron {megatron_version()}): {' '.join(unknown[:3])}"
    found = f"did you mean {near}?" if near else "expected what pretrain_gpt_s2.py --help says"
    return f"{printable(message.removeprefix('argument '), 400)}; {found}"


def check_repeats(arguments: list[str]) -> None:
    """Raises ValueError for a pattern such as `[1]*999999999` or `(t|)*999999999`, which Megatron writes out."""
    for word in arguments:
        product = math.prod(int(count[:10]) for count in re.findall(r"\*\s*0*([0-9]+)", word.replace("_", "")))
        if product > MOST_REPEATS:
            raise ValueError(
                f"{printable(word)}: a pattern that is repeated {product} times; expected {MOST_REPEATS} at most; "
                "repeat it as often as the model has layers"
            )


def parse(provider: Provider, *, ignore_unknown: bool = False) -> Namespace:
    """Megatron's arguments from sys.argv, not validated. Raises ValueError for flags that cannot be parsed, and for
    --yaml-cfg, with which Megatron drops every flag."""
    if any(word.partition("=")[0] == "--yaml-cfg" for word in sys.argv[1:]):
        raise ValueError(
            "--yaml-cfg makes Megatron drop every other flag, those of S2-Attention among them; expected flags; remove "
            "--yaml-cfg and give its settings as flags"
        )
    check_repeats(sys.argv[1:])
    from megatron.training.arguments import parse_args

    return parse_args(with_error_lines(provider), ignore_unknown)


def check_before(args: Namespace) -> None:
    """Flags, folders and data of a run, before Megatron validates its arguments. Raises ValueError."""
    check_flags(args)
    check_written(args)
    check_datasets(args)


def asks_help(arguments: list[str]) -> bool:
    return any(word in ("-h", "--help") for word in arguments)


def save_folder(arguments: list[str]) -> str | None:
    """The folder of --save; read without Megatron's parser, which may be what fails."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save", nargs="?")
    save = parser.parse_known_args(arguments)[0].save
    return None if save is None or "\0" in save else save


@contextmanager
def start_up(provider: Provider) -> Iterator[Provider]:
    """Around the start of a training script, up to where it trains. Yields the extra_args_provider for Megatron.

    provider: add_s2_arguments. An error ends the process with status 2, after one line on stderr and an entry in the
    run's status file; with --s2-traceback, and when it is the machine's, it is raised.
    """
    began = time.time()
    open_streams()
    held, lines = io.StringIO(), io.StringIO()
    held.isatty, lines.isatty = sys.stdout.isatty, sys.stderr.isatty  # as colourful as they are

    def let_go() -> None:
        print(lines.getvalue(), end="", file=sys.stderr, flush=True)
        print(held.getvalue(), end="", flush=True)

    try:
        with redirect_stdout(held), held_lines(lines):
            if is_first_of_node() and not asks_help(sys.argv[1:]):
                check_before(parse(provider))
            yield with_error_lines(provider)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or asks_help(sys.argv[1:]):
            let_go()
            raise
        wait_for_first_of_node()
        if TRACEBACK in sys.argv or is_of_the_machine(error):
            let_go()
            fail(save_folder(sys.argv[1:]), error, began)
            raise
        refuse(save_folder(sys.argv[1:]), error_text(error, held.getvalue()), began)
    try:
        let_go()
    except OSError as error:  # of stdout: stderr takes everything
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the end of the process flushes once more
        text = f"standard output: {error.strerror}; expected room for the log; free some, or write it to another disk"
        refuse(save_folder(sys.argv[1:]), text, began)
