"""What becomes of an error that a start raises, in Megatron's validation or later: the text of its one line."""

from __future__ import annotations

import errno
import inspect
import linecache
import os
import re
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from s2_megatron.config.errors import printable

TRACEBACK = "--s2-traceback"
OWN, MEGATRON = "s2_megatron", "megatron"  # packages; a path may be a link, and any folder may have such a name
FAULT = "s2_megatron failed in"  # begins the text of an error that is no refusal
LONGEST = 900  # characters of Megatron's messages
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# The machine's errors, not the settings': the same start may succeed later, so they are no refusal.
OF_THE_MACHINE = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ECONNREFUSED,
    errno.ENOSPC, errno.EDQUOT,
)  # fmt: skip
OF_THE_NETWORK = re.compile(
    r"NCCL|[Gg]loo|context-parallel exchange failed|CUDA error|Connection (closed|reset|refused)|TCPStore|"
    r"DataLoader worker"
)
# Errors whose text says what Megatron wants; of others the line of source does.
SPEAKING = (AssertionError, ValueError, RuntimeError, ImportError, OSError)
SETTING = re.compile(r"\b(args|config|self)\.([A-Za-z_]\w*)")
NO_FLAGS = ("world_size", "rank", "data_parallel_size")


class RunError(ValueError):
    """Ends a run that trains already; its message says everything, so that no traceback is printed."""


def is_of_the_machine(error: BaseException) -> bool:
    """Whether an error is none of the settings: memory, a file system, a GPU or a network that fails."""
    if isinstance(error, OSError):
        return error.errno in OF_THE_MACHINE or isinstance(error, ConnectionError | TimeoutError)
    of_torch = {base.__name__ for base in type(error).__mro__} & {"DistError", "AcceleratorError", "OutOfMemoryError"}
    lost = isinstance(error, RuntimeError) and OF_THE_NETWORK.search(str(error))
    return isinstance(error, MemoryError) or bool(of_torch or lost)


def _source(error: BaseException) -> tuple[str, str, str]:
    """(the statement that raised, the settings in it with their values, its file). Of an error that a library raises,
    Megatron's call of it."""
    places = list(traceback.walk_tb(error.__traceback__))
    frames = traceback.extract_tb(error.__traceback__)
    of_megatron = [at for at, (frame, _) in enumerate(places) if _package(frame) == MEGATRON]
    at = (of_megatron or [-1])[-1]
    frame, local = frames[at], places[at][0].f_locals
    lines = range(frame.lineno or 1, (frame.end_lineno or frame.lineno or 1) + 1)
    statement = " ".join(linecache.getline(frame.filename, line).strip() for line in lines)
    known = {}
    for owner, name in SETTING.findall(statement):
        value = getattr(local.get(owner), name, known)
        if isinstance(value, int | float | str | list | None):
            known[f"--{name.replace('_', '-')}" if owner == "args" and name not in NO_FLAGS else name] = value
    settings = ", ".join(f"{name}={printable(value, 100)}" for name, value in known.items())
    return "" if statement.startswith("raise ") else statement, settings, Path(frame.filename).name


def _own_place(error: BaseException) -> str | None:
    """Where this package failed, as file:line: a library that it called counts as this package, Megatron does not, nor
    does a script whose code is in a `with` of this package."""
    places = list(traceback.walk_tb(error.__traceback__))
    if len(places) > 1 and places[0][0].f_code.co_flags & inspect.CO_GENERATOR:
        places = places[1:]  # the context manager at its yield
    known = [place for place in places if _package(place[0]) in (OWN, MEGATRON)]
    if not known or _package(known[-1][0]) != OWN:
        return None
    frame, line = known[-1]
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def _package(frame: FrameType) -> str:
    """The name of the package whose code a frame runs."""
    return frame.f_globals.get("__name__", "").partition(".")[0]


def error_text(error: BaseException, printed: str = "") -> str:
    """The text of an error's line. printed: what Megatron has printed so far, which says why it exits."""
    text = str(error)
    if isinstance(error, SystemExit):
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "it does not say why")
        return (
            f"Megatron ended the start with sys.exit({error.code!r}): {printable(last.strip(), LONGEST)}; expected "
            f"flags that it takes; correct them ({TRACEBACK} shows where)"
        )
    raised_by = [_package(frame) for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    if isinstance(error, ValueError) and raised_by == [OWN]:
        return text
    if isinstance(error, OSError) and error.filename is not None:
        name = printable(error.filename, 300)
        return f"{name}: {error.strerror}; expected a file that can be used; correct the flag that names it"
    said, where = " ".join(text.split()), type(error).__name__
    if (own := _own_place(error)) is not None:
        said = printable(": ".join(filter(None, (where, said))), LONGEST)
        return f"{FAULT} {own}: {said}; expected to train or to refuse; report what {TRACEBACK} shows"
    if error.__traceback__ and not ("--" in said and isinstance(error, SPEAKING)):
        statement, settings, file = _source(error)
        if not (said and isinstance(error, SPEAKING)):
            said = ": ".join(filter(None, (said, statement)))
        said, where = ", with ".join(filter(None, (said, settings))), f"{where} in {file}"
    if error.__cause__ is not None and str(error.__cause__) not in said:
        said += f"; {type(error.__cause__).__name__}: {' '.join(str(error.__cause__).split())}"
    said = printable(said, LONGEST)
    refused, expected = "these flags", "flags that it takes; correct them"
    if CONNECTIONS in said:  # no flag: 1 for tensor and context parallelism, more for FSDP
        variable = f"{CONNECTIONS}={8 if os.environ.get(CONNECTIONS) == '1' else 1}"
        refused = "this environment"
        expected = f"{variable} in the environment; export {variable}, or write it in front of the command"
    elif re.search(r"\b(TE|Transformer Engine)( version)? *>=", said) and find_spec("transformer_engine") is None:
        expected += ", or check where Transformer Engine is installed, which it is not here"
    elif said.startswith("OptimizerParamScheduler: class input value"):  # of a run that goes on
        expected = (
            "the same flags as before; or add --override-opt-param-scheduler to go on with these, or "
            "--use-checkpoint-opt-param-scheduler to go on with the checkpoint's"
        )
    return f"Megatron refuses {refused}: {said} ({where}); expected {expected} ({TRACEBACK} shows where)"
