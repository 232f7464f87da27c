"""Reads the command that starts a training: `s2-megatron check -- LAUNCH LINE`, `s2-megatron inspect CONFIG -- ...`.

    NAME=value torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt_s2.py --num-layers 32 ...
    srun --nodes 4 --ntasks-per-node 1 env NAME=value python -m torch.distributed.run ... pretrain_gpt_s2.py ...
    python pretrain_gpt_s2.py --num-layers 4 ...
    --num-layers 4 ...

All of these, as words or as one quoted text. Nothing is run, and no other package is imported: what Megatron's flags
mean is for the caller to say.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from s2_megatron.tools.inputs import standard_input

EXAMPLE = "torchrun --nproc-per-node 8 pretrain_gpt_s2.py --num-layers 32 ..."
HINT = f"for example {EXAMPLE}"
MOST_WORDS = 10_000
MOST_CHARACTERS = 2**20
MOST_PROCESSES = 2**20

ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
PREFIXES = ("exec", "nohup", "time", "command", "export")  # programs and shell words that run what stands behind them
RUNNERS = ("srun", "mpirun", "mpiexec")
SHELLS = ("bash", "sh", "zsh")
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
# torchrun's options (torch.distributed.run), which a test compares with torch's own parser.
TORCHRUN_VALUES = (
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts",
    "--monitor-interval", "--start-method", "--event-log-handler", "--role", "--log-dir", "--redirects", "--tee",
    "--log-line-prefix-template", "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
    "--node-rank", "--master-addr", "--master-port", "--local-addr", "--logs-specs", "--numa-binding",
    "--signals-to-handle", "--shutdown-timeout",
)  # fmt: skip
TORCHRUN_SWITCHES = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
TORCHRUN_SHORT = {"--redirects": "-r", "--tee": "-t", "--module": "-m"}
PYTHON_VALUES = ("-X", "-W", "--check-hash-based-pycs")  # of Python's own options, those with a value behind them


@dataclass(frozen=True)
class LaunchLine:
    """A command that starts a training.

    flags: the training script's. script: its path, or None where the line has flags alone. environment: the variables
    that the line sets. nodes, processes_per_node: as torchrun or srun start them; processes_per_node is None where
    torchrun counts the devices of the machine that it runs on (`auto`, `gpu`, `cpu`).
    """

    flags: tuple[str, ...]
    script: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    processes_per_node: int | None = 1

    def world_size(self, devices: int | None = None) -> int:
        """How many processes train. devices: the GPUs of a node, for `--nproc-per-node gpu`; 0 or None: not known.

        Raises ValueError where they are needed and not known.
        """
        per_node = self.processes_per_node or devices
        if not per_node:
            raise ValueError(
                "--nproc-per-node counts the GPUs of the machine that trains, which are not known here; expected a "
                "number of processes; give --nproc-per-node 8"
            )
        return self.nodes * per_node


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"launch line: torchrun: {message}; expected torchrun's options, the script, its flags")


def _short(words: Sequence[str], most: int = 60) -> str:
    """The words as one line."""
    text = ascii(" ".join(words[:10])[: most + 1])
    return text if len(text) <= most else text[: most - 4] + "...'"


def _refused(found: str, expected: str, fix: str) -> ValueError:
    return ValueError(f"launch line: {found}; expected {expected}; {fix}")


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text) or not 1 <= int(text) <= MOST_PROCESSES:
        raise _refused(f"{name}={_short([text])}", "a number of processes, 1 or more", f"give {name} 8")
    return int(text)


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _is_program(word: str) -> bool:
    """Whether a word is something that this module knows how to read on from."""
    name = _name(word)
    known = (*PREFIXES, *RUNNERS, *SHELLS, "env", "torchrun", "nice")
    return name in known or PYTHON.fullmatch(name) is not None or name.endswith((".py", ".sh", ".sbatch"))


def _torchrun_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="torchrun", add_help=False)
    for name in TORCHRUN_VALUES:
        parser.add_argument(*_spellings(name))
    for name in TORCHRUN_SWITCHES:
        parser.add_argument(*_spellings(name), action="store_true")
    parser.add_argument("script")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    return parser


def _spellings(name: str) -> list[str]:
    """--nproc-per-node, --nproc_per_node; -r, --redirects."""
    short = [TORCHRUN_SHORT[name]] if name in TORCHRUN_SHORT else []
    return list(dict.fromkeys([*short, name, f"--{name[2:].replace('-', '_')}"]))


def _behind_runner(words: list[str]) -> tuple[int, list[str]]:
    """(tasks that a runner starts, the words behind its options). words: from the runner on."""
    at = next((at for at, word in enumerate(words[1:], 1) if _is_program(word) or ASSIGNMENT.match(word)), None)
    if at is None:
        raise _refused(f"{_short(words)} starts no training", "a torchrun or python command behind it", HINT)
    counts = {}
    names = {"-n": "--ntasks", "-np": "--ntasks", "--np": "--ntasks", "-N": "--nodes"}
    for word, behind in zip(words[1:at], [*words[2:at], ""]):
        glued = re.fullmatch(r"(-[nN])([0-9]+)", word)
        name, _, value = (glued[1], "", glued[2]) if glued else word.partition("=")
        name = names.get(name, name)
        if name in ("--ntasks", "--nodes", "--ntasks-per-node"):
            counts[name] = _number(name, (value or behind).partition("-")[0])
    tasks = counts.get("--ntasks", counts.get("--nodes", 1) * counts.get("--ntasks-per-node", 1))
    return tasks, words[at:]


def _behind_env(words: list[str]) -> list[str]:
    """The words behind env's options, its assignments first."""
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in ("-u", "--unset", "-C", "--chdir") else 1
    return words[at:]


def _behind_nice(words: list[str]) -> list[str]:
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in ("-n", "--adjustment") else 1
    return words[at:]


def _of_python(words: list[str], tasks: int, environment: dict) -> LaunchLine:
    """`python [options] script flags`, or torch.distributed.run as a module. words: behind the interpreter."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c"):
        at += 2 if words[at] in PYTHON_VALUES else 1
    if at < len(words) and words[at] == "-m":
        if words[at + 1 : at + 2] and words[at + 1] in TORCHRUN_MODULES:
            return _of_torchrun(words[at + 2 :], environment)
        raise _refused(f"python {_short(words[at:])}", "the module torch.distributed.run, or a script", HINT)
    if at == len(words) or words[at] == "-c":
        raise _refused(f"python {_short(words[at:])} names no script", "a training script", HINT)
    size = environment.get("WORLD_SIZE")
    processes = _number("WORLD_SIZE", size) if size else tasks
    return LaunchLine(tuple(words[at + 1 :]), words[at], environment, 1, processes)


def _of_torchrun(words: list[str], environment: dict) -> LaunchLine:
    parsed = _torchrun_parser().parse_args(words)
    if parsed.module or parsed.no_python:
        raise _refused(
            f"torchrun {_short(words)}", "a training script", "name the script, without --module or --no-python"
        )
    # A range MIN:MAX is an elastic job's; it begins with as many nodes as come, MAX at most.
    nodes = environment.get("PET_NNODES", "1") if parsed.nnodes is None else parsed.nnodes
    per_node = environment.get("PET_NPROC_PER_NODE", "1") if parsed.nproc_per_node is None else parsed.nproc_per_node
    counted = per_node in ("auto", "gpu", "cpu", "xpu")
    return LaunchLine(
        tuple(parsed.flags),
        parsed.script,
        environment,
        _number("--nnodes", nodes.rpartition(":")[2]),
        None if counted else _number("--nproc-per-node", per_node),
    )


def launch_words(words: list[str]) -> list[str]:
    """The words behind --; of a single - those of the standard input, one a line or as one text, whose lines then end
    with a backslash."""
    if words != ["-"]:
        return words
    text = standard_input("launch line", MOST_CHARACTERS).strip()
    return [text] if "\\\n" in text else [line for line in text.splitlines() if line]


def parse_launch_line(words: Sequence[str]) -> LaunchLine:
    """The parts of a launch line. words: as a shell hands them over, or the whole line as one word.

    Raises ValueError for a line that starts no Python training script: a shell script, another program, nothing.
    """
    words = list(words)
    if len(words) > MOST_WORDS or sum(map(len, words)) > MOST_CHARACTERS:
        raise _refused(f"{len(words)} words", f"at most {MOST_WORDS} words", "leave out what is no flag")
    if len(words) == 1 and len(words[0].split()) > 1:
        try:
            words = shlex.split(words[0].replace("\\\n", " "))
        except ValueError as error:
            raise _refused(_short(words), "text that a shell can split", f"close its quotes ({error})") from error
    environment: dict[str, str] = {}
    tasks = 1
    while words:
        name = _name(words[0])
        if ASSIGNMENT.match(words[0]):
            variable, _, value = words[0].partition("=")
            environment[variable] = value
            words = words[1:]
        elif name in PREFIXES:
            words = words[1:]
        elif name == "env":
            words = _behind_env(words)
        elif name == "nice":
            words = _behind_nice(words)
        elif name in RUNNERS:
            tasks, words = _behind_runner(words)
        elif name == "torchrun":
            return _of_torchrun(words[1:], environment)
        elif PYTHON.fullmatch(name):
            return _of_python(words[1:], tasks, environment)
        elif name.endswith(".py"):
            return _of_python(words, tasks, environment)
        elif words[0].startswith("--"):
            return LaunchLine(tuple(words), None, environment, 1, tasks)
        elif name in SHELLS or name.endswith((".sh", ".sbatch")):
            raise _refused(
                f"{_short(words)} is a shell script",
                "the command that it starts",
                f"give that command: {EXAMPLE} (write echo in front of it in the script; the launchers of s2-megatron, "
                "and no others, print theirs with DRY_RUN=1)",
            )
        else:
            break
    found = f"{_short(words)} is no training command" if words else "there is none"
    raise _refused(found, "torchrun or python, a script and its flags", HINT)
