"""Ranks that are forked from a process that has imported Megatron: of a run's 12 seconds the imports are 8.

Like processes of their own they have an environment, arguments, a session and an output of their own. Unlike them they
find the imports done, in the right order; all ranks share Python's hash seed, so that sets are in the same order; what
has been printed once by the imports is not printed again; and nothing that waits for the interpreter's end is run. So
some runs are still started by torchrun.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = "tests.megatron.preloaded"


def start(script: Path, arguments: list[str], environment: dict[str, str], folder: Path, output: Path) -> Forked:
    """`python script *arguments` with this environment, in this folder; what it prints goes to the file `output`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    process = context.Process(target=_run, args=(script, arguments, environment, folder, output))
    # Of the process that imports, when this is the first start.
    with patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=python_path()):
        process.start()
    return Forked(process)


class Forked:
    """As much of subprocess.Popen as there is need for."""

    def __init__(self, process):
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, seconds: float | None = None) -> None:
        self._process.join(seconds)


def run(script: Path, arguments: list[str], environment: dict[str, str], folder: Path, seconds: float = 900) -> str:
    """What a Python script printed, which must end well: forked, or, where there is a GPU, in a process of its own, for
    the imports ask for it."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "output"
        if shutil.which("nvidia-smi") is None:
            job = start(script, arguments, environment, folder, output)
            job.wait(seconds)
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        else:
            command = [sys.executable, str(script), *arguments]
            with output.open("w") as file:
                job = subprocess.run(
                    command, env=environment, cwd=folder, stdout=file, stderr=file, timeout=seconds, check=False
                )
        printed = output.read_text(errors="replace")
    assert job.returncode == 0, f"{script.name}: exit code {job.returncode}\n{printed[-6000:]}"
    return printed


def _run(script: Path, arguments: list[str], environment: dict[str, str], folder: Path, output: Path) -> None:
    os.setsid()
    with output.open("w") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    assert PRELOADED in sys.modules, "the fork server has imported nothing: it is silent about an ImportError"
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(script.parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    runpy.run_path(str(script), run_name="__main__")
