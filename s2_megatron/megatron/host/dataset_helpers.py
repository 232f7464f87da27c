"""Whether `make` can build Megatron's dataset helpers, as it does at the first start from a checkout.

Source: core/datasets/utils.py (compile_helpers) and core/datasets/Makefile of Megatron-LM.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")  # of this Python's libraries
SECONDS = 60.0  # one of the Makefile's questions to python3, on a slow file system


def is_built(folder: Path) -> bool:
    """Whether the library is there for this Python, and no older than its source. folder: megatron/core/datasets."""
    library, source = folder / f"helpers_cpp{SUFFIX}", folder / "helpers.cpp"
    return library.exists() and (not source.exists() or library.stat().st_mtime >= source.stat().st_mtime)


def check_build(folder: Path) -> None:
    """folder: megatron/core/datasets of a checkout. Raises ValueError on rank 0, which builds the library, when it has
    to be built and cannot be. The Makefile asks the python3 of PATH, which may be another one than this."""
    if os.environ.get("RANK", "0") != "0" or is_built(folder):
        return
    begin = f"{folder}: Megatron's dataset helpers are not built for this Python, and `make` cannot build them: "
    for tool in ("make", os.environ.get("CXX", "g++")):
        if shutil.which(shlex.split(tool)[0]) is None:
            raise ValueError(f"{begin}there is no {tool}; expected it on PATH; apt-get install make g++")
    if _answer("python3", "-m", "pybind11", "--includes") is None:
        python = shutil.which("python3")
        raise ValueError(
            f"{begin}{python or 'python3, which is not on PATH,'} has no pybind11; expected it in the python3 of PATH; "
            "activate this environment, and python3 -m pip install pybind11"
        )
    if (answer := _answer("python3-config", "--extension-suffix")) != SUFFIX:
        raise ValueError(
            f"{begin}python3-config --extension-suffix says {answer or 'nothing'}; expected {SUFFIX}; build them once: "
            f"make -C {shlex.quote(str(folder))} LIBEXT={SUFFIX}"
        )


def _answer(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def say_prebuilt() -> None:
    """In place of `make`."""
    logging.getLogger(__name__).info("Megatron's dataset helpers are compiled; `make` is skipped")
