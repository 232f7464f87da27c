"""The command `s2-megatron`, and `python -m s2_megatron`: one subcommand for each tool.

    s2-megatron inspect configs/quickstart.yaml --num-layers 4 --num-attention-heads 4 --seq-length 512
    s2-megatron env-report

A new tool is a module with `add_arguments(parser)` and `run(args)`, and a line in COMMANDS; a valid line for it in
tests/tools/tries.py lets the tests try every option and file with invalid values. Its docstring, with an example, is
what --help shows. `run` returns the exit status (None: 0) and raises ValueError for bad input, which becomes one
`error:` line and status 2. Only the tool that is asked for is imported. Characters that the terminal's encoding lacks
are escaped. Ctrl-C ends a command with one line and status 130; it must not leave a half-written file (outputs.py,
hf/folders.py). When the reader of a pipe has gone, a command ends without a word and with status 141, as if SIGPIPE had
killed it.

Completion in bash or zsh: eval "$(register-python-argcomplete s2-megatron)".
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import NamedTuple, NoReturn

from s2_megatron import __version__
from s2_megatron.printing import open_streams
from s2_megatron.tools.streams import BAD_INPUT, flush, one_line, say_error


class Command(NamedTuple):
    """One subcommand. module: what has its add_arguments and run. summary: its line in --help. takes_launch_line:
    whether words behind `--` are a training's launch line, which `run` finds in args.launch_line (None without `--`);
    launch_line.py reads it."""

    module: str
    summary: str
    takes_launch_line: bool = False


COMMANDS = {
    "check": Command("s2_megatron.tools.check", "a launch line, before it is started", takes_launch_line=True),
    "inspect": Command(
        "s2_megatron.tools.inspect.command", "what a sparsity YAML means, and a training's time and memory", True
    ),
    "compare": Command("s2_megatron.tools.compare.command", "training runs side by side, with noise told from signal"),
    "make-dataset": Command("s2_megatron.tools.dataset.command", "text files become what Megatron's --data-path reads"),
    "export-hf": Command("s2_megatron.tools.hf.export_hf", "a Megatron checkpoint becomes a Hugging Face folder"),
    "import-hf": Command(
        "s2_megatron.tools.hf.import_hf", "a folder of Llama, Qwen or Mistral, also with experts, becomes a checkpoint"
    ),
    "export-pattern": Command("s2_megatron.tools.export_pattern", "which blocks are attended, for ports, with vectors"),
    "choose-dense": Command("s2_megatron.tools.choose_dense.command", "which heads of a dense checkpoint stay dense"),
    "generate": Command("s2_megatron.tools.generate", "a checkpoint continues a prompt, in Megatron"),
    "env-report": Command("s2_megatron.tools.env_report", "every version that a bug report needs"),
    "schema": Command("s2_megatron.tools.schema", "the JSON Schema of the sparsity YAML, for editors"),
}


class CommandParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of argparse's usage and line."""
        unknown = re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose from", message)
        if unknown:
            message = f"{unknown[1]} is no command{_meant(unknown[1], COMMANDS)}"
        self.exit(2, f"error: {one_line(message)}; see {self.prog} --help\n")


def _meant(word: str, names: Iterable[str]) -> str:
    """The question after the name that resembles an unknown word, if one does."""
    from s2_megatron.config.errors import nearest_name

    near = nearest_name(word.partition("=")[0], names)
    return f"; did you mean {near}?" if near else ""


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of the command line, with the arguments of the chosen subcommand only."""
    parser = CommandParser(prog="s2-megatron", description="Tools of S2-Attention in Megatron.")
    parser.add_argument("--version", action="version", version=f"s2-megatron {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=command.summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == chosen:
            module = import_module(command.module)
            subparser.description = module.__doc__
            module.add_arguments(subparser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command. arguments: default those of the command line. Returns the exit status."""
    open_streams()
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        except BrokenPipeError:
            raise
        except BAD_INPUT as error:  # said before what is left is written to a reader that may have gone
            say_error(error)
            with contextlib.suppress(OSError):
                flush()
            return 2
        finally:
            flush()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # who reads has seen enough, as in `| head`
        return 128 + signal.SIGPIPE
    except OSError as error:
        say_error(error)
        return 2


def _complete() -> None:
    """What a shell offers behind the words so far (argcomplete), which ends the process: its line is in COMP_LINE."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(_parser(next((word for word in words if word in COMMANDS), None)))


def _run(arguments: list[str]) -> int:
    """The exit status of a command line. Raises what the command does."""
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    chosen, launch_line = arguments[0] if arguments else None, None
    if chosen in COMMANDS and COMMANDS[chosen].takes_launch_line and "--" in arguments:
        at = arguments.index("--")
        arguments, launch_line = arguments[:at], arguments[at + 1 :]
    parser = _parser(chosen)
    args, unknown = parser.parse_known_args(arguments, argparse.Namespace(launch_line=launch_line))
    if unknown:
        command = COMMANDS[args.command]
        behind = "; a training's launch line stands behind --" if command.takes_launch_line else ""
        options = parser._subparsers._group_actions[0].choices[args.command]._option_string_actions
        meant = _meant(unknown[0], set(options) - {"-h", "--help"}) if unknown[0].startswith("-") else ""
        words = f"unrecognized arguments: {' '.join(unknown)}{meant or behind}"
        raise ValueError(f"{words}; see s2-megatron {args.command} --help")
    return import_module(COMMANDS[args.command].module).run(args) or 0
