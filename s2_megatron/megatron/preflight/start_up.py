"""Errors of a start become one line `error: ...` and status 2: of pretrain_gpt_s2.py, and of `s2-megatron check`.

`start_up()` goes around everything that pretrain_gpt_s2.py does before it trains. The first rank of each node (its
folders may be local) checks flags and files first. What Megatron prints meanwhile, its list of arguments above all, is
held back until the start is through, so that an error is the last line and nearly the only one.
"""

from __future__ import annotations

import functools
import io
import os
import re
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import NoReturn

from s2_megatron.config.errors import nearest_name, printable
from s2_megatron.megatron.errors import TRACEBACK, error_text, is_of_the_machine
from s2_megatron.megatron.host.processes import tell_torchrun
from s2_megatron.megatron.preflight.datasets import check_datasets
from s2_megatron.megatron.preflight.files import check_files
from s2_megatron.megatron.preflight.mistakes import check_flags
from s2_megatron.megatron.records.status import is_first_of_node, wait_for_first_of_node, write_status
from s2_megatron.megatron.refusals.model import megatron_version
from s2_megatron.printing import held as held_lines
from s2_megatron.printing import open_streams, print_once

DEFAULT_TOKENIZER = "GPT2BPETokenizer"  # of pretrain_gpt_s2.py, as of Megatron's pretrain_gpt.py
MOST_REPEATS = 10_000  # of a pattern in a flag, more than any model has layers


class _Held(io.StringIO):
    """Output that is held back, as wide and as colourful as the real one."""

    def __init__(self, real):
        super().__init__()
        self.isatty, self.real = real.isatty, real


def with_error_lines(
    provider: Callable[[ArgumentParser], ArgumentParser],
) -> Callable[[ArgumentParser], ArgumentParser]:
    """An extra_args_provider whose parser raises ValueError instead of printing its usage and ending the process."""

    def extra_args_provider(parser: ArgumentParser) -> ArgumentParser:
        parser = provider(parser)
        for action in parser._actions:
            _mend_help(action)
            _mend_type(action)

        def error(message: str) -> NoReturn:
            raise ValueError(_flag_error(message, parser))

        parser.error = error
        return parser

    return extra_args_provider


def _mend_help(action: Action) -> None:
    """Megatron 0.19.2 has help texts with a single %, at which argparse fails when it prints them."""
    try:
        _ = (action.help or "") % {"default": "", "prog": "", "type": "", "dest": "", "choices": "", "metavar": ""}
    except (ValueError, TypeError, KeyError):
        action.help = action.help.replace("%", "%%")


def _mend_type(action: Action) -> None:
    """Megatron 0.19.2 looks some words up in an enum, and argparse lets the KeyError of an unknown one through."""
    parse = action.type
    if parse in (None, int, float, str):
        return

    @functools.wraps(parse)
    def mended(text: str):
        try:
            return parse(text)
        except KeyError as error:
            names = ", ".join(repr(getattr(choice, "name", choice)) for choice in action.choices or ())
            among = f" (choose from {names})" if names else ""
            raise ArgumentTypeError(f"invalid choice: {printable(text)!r}{among}") from error

    action.type = mended


def _flag_error(message: str, parser: ArgumentParser) -> str:
    """What argparse found, with the flag that resembles an unknown one."""
    flag, found = message, ""
    if message.startswith("unrecognized arguments: "):
        unknown = message.removeprefix("unrecognized arguments: ").split()
        flag = f"unknown flag (Megatron {megatron_version()}): {printable(' '.join(unknown[:3]), 200)}"
        near = nearest_name(unknown[0].partition("=")[0], parser._option_string_actions) if unknown else None
        found = f"; did you mean {near}?" if near else ""
    elif message.startswith("argument "):
        flag = message.removeprefix("argument ")
    return f"{printable(flag, 400)}{found or '; expected what pretrain_gpt_s2.py --help says'}"


def check_repeats(arguments: list[str]) -> None:
    """Raises ValueError for a pattern such as `[1]*999999999` or `(t|)*999999999`, which Megatron writes out."""
    for word in arguments:
        product = 1
        for count in re.findall(r"\*\s*([0-9_]+)", word):
            digits = count.replace("_", "").lstrip("0")
            product *= int(digits[:10] or 0)
        if product > MOST_REPEATS:
            raise ValueError(
                f"{printable(word)}: a pattern that is repeated {product} times; expected {MOST_REPEATS} at most; "
                "repeat it as often as the model has layers"
            )


def parse(provider: Callable, *, ignore_unknown: bool = False) -> Namespace:
    """Megatron's arguments from sys.argv, not validated. Raises ValueError for flags that cannot be parsed, and for
    --yaml-cfg, with which Megatron drops every flag."""
    given = {word.partition("=")[0] for word in sys.argv[1:]}
    if "--yaml-cfg" in given:
        raise ValueError(
            "--yaml-cfg makes Megatron drop every other flag, those of S2-Attention among them; expected flags; remove "
            "--yaml-cfg and give its settings as flags"
        )
    check_repeats(sys.argv[1:])
    from megatron.training.arguments import parse_args

    return parse_args(with_error_lines(provider), ignore_unknown)


def check_before(args: Namespace) -> list[str]:
    """Flags and files of a run, before Megatron validates its arguments. Returns warnings. Raises ValueError."""
    check_flags(args)
    warnings = check_files(args)
    check_datasets(args)
    return warnings


def asks_help(arguments: list[str]) -> bool:
    return any(word in ("-h", "--help") for word in arguments)


def save_folder(arguments: list[str]) -> str | None:
    """The folder of --save, the last one as argparse takes it; read without a parser, which may be what fails."""
    found = None
    for at, word in enumerate(arguments):
        if word == "--save" and at + 1 < len(arguments):
            found = arguments[at + 1]
        elif word.startswith("--save="):
            found = word.removeprefix("--save=")
    return found


@contextmanager
def start_up(provider: Callable[[ArgumentParser], ArgumentParser]) -> Iterator[Callable]:
    """Around the start of a training script, up to where it trains. Yields the extra_args_provider for Megatron.

    provider: add_s2_arguments. An error ends the process with status 2, after one line on stderr and an entry in the
    run's status file; with --s2-traceback, and when it is the machine's, it is raised.
    """
    open_streams()
    first = is_first_of_node()
    held, lines = _Held(sys.stdout), _Held(sys.stderr)

    def let_go() -> None:
        print(lines.getvalue(), end="", file=sys.stderr, flush=True)
        print(held.getvalue(), end="", flush=True)

    def refuse(text: str) -> NoReturn:
        if first:
            record("refused", text, 2)
        tell_torchrun(f"error: {text}")
        print(f"error: {text}", file=sys.stderr, flush=True)
        sys.exit(2)

    try:
        with redirect_stdout(held), held_lines(lines):
            if first and not asks_help(sys.argv[1:]):
                for warning in check_before(parse(provider)):
                    print_once(f"S2: {warning}")
            yield with_error_lines(provider)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or asks_help(sys.argv[1:]):
            let_go()
            raise
        wait_for_first_of_node()
        if TRACEBACK in sys.argv or is_of_the_machine(error):
            let_go()
            if first:
                record("failed", f"{type(error).__name__}: {error}", 1)
            tell_torchrun(f"{type(error).__name__}: {error}")
            raise
        refuse(error_text(error, held.getvalue()))
    try:
        let_go()
    except OSError as error:  # of stdout: stderr takes everything
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the end of the process flushes once more
        refuse(f"standard output: {error.strerror}; expected room for the log; free some, or write it to another disk")


def record(state: str, text: str, status: int) -> None:
    """Writes into the run's status file that it was not started."""
    save = save_folder(sys.argv[1:])
    if save is not None and "\0" not in save:
        write_status(save, state, " ".join(text.split()), status=status)
