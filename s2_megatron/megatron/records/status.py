"""How a run ended, in a file beside its checkpoints: run_status.json in the folder of --save.

    {
     "state": "stopped",
     "line": "iteration 1200 of 5000, by --exit-duration-in-mins 1430",
     "iteration": 1200,
     "exit_status": 0,
     "rank": 0,
     "host": "node17",
     "job": "4711",
     "time": "2026-03-01T12:00:00+00:00"
    }

| state | the run | what to do with its job |
|---|---|---|
| running | trains, or was killed without a word | once it is gone: start it again |
| finished | has done all of its iterations | nothing |
| stopped | ended before its end on purpose, with a checkpoint: time limit, SIGTERM, --exit-interval | start it again |
| refused | was not started, because of what `line` says | mend that first |
| failed | ended with the error of `line` | look at the log |

One key a line, so that a shell script needs no JSON. Written to another name and renamed: a reader sees the old or the
new file, never a part of one. On a disk that is full it is written over the old file, which has spaces behind its
record for that.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from s2_megatron.config.errors import printable
from s2_megatron.megatron.checkpoints.folder import CheckpointError
from s2_megatron.megatron.errors import TRACEBACK, RunError, error_text, is_of_the_machine
from s2_megatron.megatron.host.processes import tell_torchrun

FILE = "run_status.json"
STATES = ("running", "finished", "stopped", "refused", "failed")
LONGEST_LINE = 2000
RESERVED = 4096  # bytes of a running run's file, room for any other
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A rank that is not the first of its node waits this long with its error: torchrun ends it sooner when the first has
# one as well, so that the first one's checks are done and the error is printed once.
GRACE_SECONDS = 10.0
# Of Megatron's rerun state machine: a run that asks to be started again, to tell a broken GPU from a wrong loss.
STATUS_RESUME = 16


def write_status(save: str | Path | None, state: str, line: str, *, iteration: int | None = None, status: int = 0):
    """Writes the file; nothing without --save. save: the folder of --save, which is made. status: of the exit.

    A folder that cannot be written costs one line on stderr, no error.
    """
    if save is None:
        return
    assert state in STATES, state
    record = {
        "state": state,
        "line": printable(line, LONGEST_LINE),
        "iteration": iteration,
        "exit_status": status,
        "rank": int(os.environ.get("RANK", "0")),
        "host": socket.gethostname(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    path = Path(save) / FILE
    temporary = path.with_name(f".{FILE}.{record['host']}.{os.getpid()}")
    text = (json.dumps(record, indent=1) + "\n").encode()
    reserved = text.ljust(RESERVED - 1) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_now(temporary, "wb", reserved if state == "running" else text)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if error.errno in FULL and path.exists() and path.stat().st_size >= len(reserved):
            with suppress(OSError):
                return _write_now(path, "r+b", reserved)
        print(f"S2: {path} could not be written ({error.strerror}); it would say: {state}: {line}", file=sys.stderr)


def _write_now(path: Path, mode: str, text: bytes) -> None:
    with path.open(mode) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_status(save: str | Path) -> dict | None:
    """The record in the file, or None without a file. Raises ValueError when the file holds something else."""
    path = Path(save) / FILE
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON; expected a run's status; remove it") from error
    if not isinstance(record, dict) or record.get("state") not in STATES:
        raise ValueError(f"{path}: no state of {', '.join(STATES)}; expected a run's status; remove it")
    return record


def is_first_of_node() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def wait_for_first_of_node() -> None:
    """Called by a rank that has an error, before it prints it."""
    if not is_first_of_node():
        time.sleep(GRACE_SECONDS)


def _one_line(error: BaseException) -> str:
    """The type and the message of an error, in one line."""
    return f"{type(error).__name__}: {_in_one_line(str(error))}".removesuffix(": ")


def _why_stopped(args: Namespace, iteration: int) -> str:
    """Which of Megatron's reasons ended a run early, as far as this rank knows."""
    from megatron.training import global_vars, training

    handler = global_vars._GLOBAL_SIGNAL_HANDLER
    by_signal = f"by {args.exit_signal.name}"
    if handler is not None and handler._signal_received:  # the public method asks all ranks
        return by_signal
    if args.exit_interval and iteration % args.exit_interval == 0:
        return f"by --exit-interval {args.exit_interval}"
    minutes = args.exit_duration_in_mins
    if minutes and time.time() - training._TRAIN_START_TIME > 60 * minutes:
        return f"by --exit-duration-in-mins {minutes}"
    return f"{by_signal} to another rank" if handler is not None else "by Megatron"


def _steps_done(args: Namespace) -> tuple[int, int]:
    """(iterations that this process has done, the last one's number). Megatron sets args.iteration when it has loaded,
    and args.curr_iteration, to the one before, at the start of each."""
    start, last = getattr(args, "iteration", 0), getattr(args, "curr_iteration", None)
    if last is None or last < start or not args.train_iters:
        return 0, start
    return last + 1 - start, last + 1


def _entered_training(error: BaseException) -> bool:
    """Whether an exit comes out of Megatron's training loop, and not out of what is done before it."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "train" and code.co_filename.endswith("training.py"):
            return True
        trace = trace.tb_next
    return False


@contextmanager
def recorded_run(args: Namespace) -> Iterator[None]:
    """Around Megatron's `pretrain`: writes the file when it starts and when it ends, and mends the exit status.

    args: Megatron's. Rank 0 writes; of errors, the rank that has one first. Megatron ends some failures with a bare
    sys.exit(), that is with status 0, for example when it cannot read a checkpoint: they end with status 1. So does a
    run that returns without a step although there were some to do. A checkpoint that turns out not to be what was saved
    when it is loaded, and whatever else is raised before the second iteration and is no failure of the machine, is
    refused as at the start (start_up.py): one line, status 2. A RunError is one line, status 1.
    """
    first, began = int(os.environ.get("RANK", "0")) == 0, time.time()
    logging.getLogger("megatron.core.utils").addFilter(_without_traceback)
    if first:
        write_status(args.save, "running", f"started as process {os.getpid()}")
    try:
        yield
        line = _finished(args)
    except SystemExit as error:
        status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        done, iteration = _steps_done(args)
        if status in (0, STATUS_RESUME) and _entered_training(error):
            if first:
                why = (
                    _why_stopped(args, iteration) if status == 0 else "to be started again by Megatron's rerun machine"
                )
                line = f"iteration {iteration} of {args.train_iters}, {why}"
                write_status(args.save, "stopped", line, iteration=iteration, status=status)
            raise
        line = f"Megatron ended with sys.exit({error.code!r}) after {done} iterations; its last lines say why"
        _ended(args.save, "failed", line, began, iteration, status or 1)
        if status:
            raise
        tell_torchrun(f"error: {line}")
        print(f"error: {line}", file=sys.stderr)
        sys.exit(1)
    except BaseException as error:
        refused = _is_refusal(args, error) and TRACEBACK not in sys.argv
        explained = isinstance(error, RunError) and TRACEBACK not in sys.argv
        if refused or explained or _is_starting(args):
            wait_for_first_of_node()
        if refused:
            refuse(args.save, str(error) if isinstance(error, CheckpointError) else error_text(error), began)
        if explained:
            _ended(args.save, "failed", str(error), began, _steps_done(args)[1], 1)
            _exit_with_line(args.save, str(error), began, 1)
        fail(args.save, error, began, _steps_done(args)[1])
        raise
    if first:
        write_status(args.save, "finished", line, iteration=_steps_done(args)[1])


def _finished(args: Namespace) -> str:
    """What a run says that has returned. Raises ValueError when it did no step and there were some to do."""
    done, iteration = _steps_done(args)
    if args.skip_train:
        return f"evaluated at iteration {iteration}; --skip-train trains nothing"
    if done:
        return f"iteration {iteration} of {args.train_iters}"
    if args.train_iters and iteration >= args.train_iters:
        line = f"iteration {iteration} of {args.train_iters} was done before; nothing was left to train"
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"S2: finished: {line}; for more, raise --train-iters", file=sys.stderr, flush=True)
        return line
    raise ValueError(
        f"the run ended at iteration {iteration} of {args.train_iters} without a step; expected data to train on and "
        "--train-iters above 0; look at --split and --train-iters"
    )


def _without_traceback(record: logging.LogRecord) -> bool:
    """For the log of Megatron's straggler detector, which writes the traceback of an error that it raises on."""
    return TRACEBACK in sys.argv or "Traceback (most recent call last)" not in record.getMessage()


def _is_starting(args: Namespace) -> bool:
    """Whether no second iteration has begun: the first one still finds out what cannot be computed."""
    last = getattr(args, "curr_iteration", None)
    return last is None or last <= getattr(args, "iteration", 0)


def _is_refusal(args: Namespace, error: BaseException) -> bool:
    """Whether an error is one of the settings: of whatever the start raises, and of a checkpoint that is not what was
    saved. The next start may succeed when a file could not be read, memory ran out or a rank was lost: these are
    failures."""
    if isinstance(error, CheckpointError):
        return not isinstance(error.__cause__, (OSError, MemoryError, RuntimeError))
    usual = isinstance(error, Exception) and not isinstance(error, RunError)
    return usual and _is_starting(args) and not is_of_the_machine(error)


def _recorded(save: str | None, began: float) -> dict | None:
    """The error that a rank of this start has written; None without one."""
    if save is None:
        return None
    with suppress(ValueError, OSError):
        found = read_status(save)
        if found is not None and found["state"] in ("refused", "failed"):
            return found if (Path(save) / FILE).stat().st_mtime >= began else None
    return None


def _ended(save: str | None, state: str, line: str, began: float, iteration: int | None, status: int) -> None:
    """Writes an error, unless another rank has written the one that came first."""
    if _recorded(save, began) is None:
        write_status(save, state, _in_one_line(line), iteration=iteration, status=status)


def _exit_with_line(save: str | None, line: str, began: float, status: int) -> NoReturn:
    """Ends with one `error:` line. The first rank of a node prints it; another one only where none has written the same
    into the status file: torchrun, which ends that rank meanwhile, is late on a busy machine."""
    tell_torchrun(f"error: {line}")
    said = None if is_first_of_node() else _recorded(save, began)
    rank = int(os.environ.get("RANK", "0"))
    if said is None or said["rank"] == rank or said["line"] != printable(_in_one_line(line), LONGEST_LINE):
        print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(status)


def refuse(save: str | None, text: str, began: float) -> NoReturn:
    """Ends a start with its one `error:` line and status 2. save: of --save. began: time.time() at its start."""
    _ended(save, "refused", text, began, None, 2)
    _exit_with_line(save, text, began, 2)


def fail(save: str | None, error: BaseException, began: float, iteration: int | None = None) -> None:
    """Records an error that is raised on. iteration: the last one that was done."""
    _ended(save, "failed", _one_line(error), began, iteration, 1)
    tell_torchrun(_one_line(error))


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
