"""No process of a training outlives it, however it ended.

Otherwise a trainer that is killed leaves processes behind: torchrun's ranks, each in its own session; the server of
Megatron's queue for write results, which waits for a caller for ever; the writer of asynchronous checkpoints (590 MB),
which waits for the next one; and the server that the writer was forked from, which waits for the writer. They hold
memory and locks, and may write into the folder of the next run.

Linux kills a child when the thread that started it ends: this serves torchrun's ranks and forks of the main thread.
A fork of another thread is left alone, since that thread may end before its process. A process of multiprocessing that
was not forked watches a pipe, whose other end its parent holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing.util
import operator
import os
import signal
import socket
import threading
import time
from multiprocessing.managers import SyncManager
from pathlib import Path

from s2_megatron.printing import print_once

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def signal_when_parent_ends(number: int = signal.SIGKILL) -> None:
    """Have this process get signal `number` when its parent ends. Does nothing where there is no prctl (not Linux)."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PDEATHSIG, number)


def end_with_parent() -> None:
    """End this process of `multiprocessing`, whatever it was started by, when its parent ends, and not by SIGTERM.

    SLURM sends SIGTERM to every process of a job, on a pre-emption for example. The trainer then saves a checkpoint,
    for which it needs this process. To be called in the main thread.
    """

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    parent = multiprocessing.parent_process()
    if parent is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=watch, name="watch parent", daemon=True).start()


def end_with_torchrun() -> None:
    """End this rank when the torchrun that started it ends: a second run in its folder would meet a writer there.

    Does nothing in a process that torchrun did not start.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal_when_parent_ends()


def tell_torchrun(line: str) -> None:
    """Has torchrun's report of a failed rank, of which it makes 40 lines after the rank's own, end with this line.

    Does nothing in a process that torchrun did not start.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


# How many processes srun and mpirun started; of several, none knows its rank for Megatron.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def start_without_torchrun() -> None:
    """Makes a process that nobody gave a rank the only one, as `torchrun --nproc-per-node 1` would. Does nothing for
    one of several tasks, which Megatron refuses."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & os.environ.keys():
        return
    if any(os.environ.get(name, "1") not in ("", "1") for name in TASKS):  # each of them would train, and save there
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    print_once("S2: no torchrun started this process, so it trains alone")


_forking: dict = {}  # of the fork under way: the process, and whether its main thread does it


def _before_fork() -> None:
    _forking.update(parent=os.getpid(), main=threading.current_thread() is threading.main_thread())


def _in_child() -> None:
    if _forking["main"]:
        signal_when_parent_ends()
        if os.getppid() != _forking["parent"]:
            os._exit(1)


def end_forks_with_this_process() -> None:
    """End what this process forks, and what that forks, with it. Calling again changes nothing.

    Reaches every fork of Python (multiprocessing's, the DataLoader's); not subprocess, nor multiprocessing's spawn.
    """
    if not _forking:
        _forking.update(parent=os.getpid(), main=False)
        os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def _kill_daemons() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises there for a DataLoader worker that was killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def end_daemons_with_this_process() -> None:
    """At the end of this process, kill its daemonic children of multiprocessing.

    multiprocessing itself sends them SIGTERM there, which `end_with_parent` ignores, and waits for them: a trainer that
    failed while it had a persistent checkpoint writer would never end.
    """
    # Finalizers come before multiprocessing's own end, also in a trainer that is itself a process of multiprocessing,
    # which calls no function of atexit.
    multiprocessing.util.Finalize(None, _kill_daemons, exitpriority=1000)


def start_manager(context) -> SyncManager:
    """`context.Manager()` whose server ends with this process. context: of multiprocessing."""
    manager = SyncManager(ctx=context.get_context())
    manager.start(end_with_parent)
    return manager


def call_with_parent(module: str, name: str, *args, **kwargs):
    """In a process of multiprocessing: the function `name` (dotted) of `module`, ended with the parent.

    The process is new, and Megatron's checkpoint writer asks for its GPU: without one the CPU stands in here, too.
    """
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    end_with_parent()
    install_if_no_gpu()
    return operator.attrgetter(name)(importlib.import_module(module))(*args, **kwargs)
