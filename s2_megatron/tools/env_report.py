"""Every version that a bug report needs: `s2-megatron env-report`.

    s2-megatron           0.1.0
    python                3.12.1 (/root/.venv/bin/python)
    platform              Linux-6.1.0-x86_64-with-glibc2.36, 2 CPU cores
    torch                 2.11.0
    triton                3.6.0
    megatron-core         0.19.2
    transformer-engine    not installed
    ...

What is missing, or fails to be asked, is said in its line; the report always ends.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

DISTRIBUTIONS = {
    "s2-megatron": ("s2-megatron",),
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton"),
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine", "transformer_engine"),
    "flash-attn": ("flash-attn",),
    "numpy": ("numpy",),
    "pydantic": ("pydantic",),
    "transformers": ("transformers",),
    "tokenizers": ("tokenizers",),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
}
ENVIRONMENT_PREFIXES = ("CUDA_", "NCCL_", "NVTE_", "TRITON_", "TORCH_", "OMP_")


def distribution_version(names: tuple[str, ...]) -> str:
    """The version of the first distribution that is installed, else "not installed"."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def apex_text() -> str:
    """NVIDIA's Apex is recognised by its modules, because PyPI has another project of the name `apex`."""
    if importlib.util.find_spec("apex") is None:
        return "not installed"
    if importlib.util.find_spec("apex.optimizers") is None:
        return "PyPI's package of that name, which is another project; NVIDIA's is not installed"
    return distribution_version(("apex",))


def megatron_text() -> str:
    """The version of the Megatron that a run imports: a checkout on PYTHONPATH comes before the installed package."""
    installed = distribution_version(DISTRIBUTIONS["megatron-core"])
    found = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    if not found or not found.origin:
        return installed
    folder = Path(found.origin).parent
    if installed != "not installed":
        of_pip = importlib.metadata.distribution("megatron-core").locate_file("megatron/core")
        if Path(of_pip).resolve() == folder.resolve():
            return installed
    version = runpy.run_path(str(folder / "package_info.py"))["__version__"]  # +COMMIT, of whatever git finds there
    return f"{version} ({folder}; pip's: {installed})"


def torch_lines() -> dict[str, str]:
    """What torch was built with, and the GPUs that it sees."""
    import torch

    lines = {
        "cuda (torch's)": torch.version.cuda or "none: a CPU build of torch",
        "cudnn (torch's)": str(torch.backends.cudnn.version() or "none"),
    }
    if not torch.cuda.is_available():
        return lines | {"gpu": "none"}
    lines["nccl (torch's)"] = ".".join(map(str, torch.cuda.nccl.version()))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines[f"gpu {index}"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
        )
    return lines


def command_line(*command: str) -> str:
    """The last line that a command prints, or why there is none."""
    if shutil.which(command[0]) is None:
        return "not found"
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    lines = (result.stdout or result.stderr).strip().splitlines()
    return lines[-1] if lines else f"prints nothing (status {result.returncode})"


def driver_text() -> str:
    return command_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def report() -> dict[str, str]:
    """All lines, name to text."""
    lines = {name: distribution_version(names) for name, names in DISTRIBUTIONS.items()}
    lines["python"] = f"{platform.python_version()} ({sys.executable})"
    lines["platform"] = f"{platform.platform()}, {os.cpu_count()} CPU cores"
    first = ("s2-megatron", "python", "platform")
    lines = {name: lines[name] for name in (*first, *(name for name in lines if name not in first))}

    def ask(name: str, question: Callable[[], str | dict[str, str]]) -> None:
        try:
            answer = question()
        except (ImportError, OSError, RuntimeError, AttributeError, ValueError, subprocess.SubprocessError) as error:
            answer = f"could not be asked: {type(error).__name__}: {error}"
        lines.update(answer if isinstance(answer, dict) else {name: answer})

    ask("megatron-core", megatron_text)
    ask("apex", apex_text)
    ask("torch's build", torch_lines)
    ask("driver", driver_text)
    ask("nvcc", lambda: command_line("nvcc", "--version"))
    ask("c compiler", lambda: command_line(os.environ.get("CC", "cc"), "-dumpfullversion"))
    for name in sorted(os.environ):
        if name.startswith(ENVIRONMENT_PREFIXES):
            lines[name] = os.environ[name]
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(args: argparse.Namespace) -> None:
    lines = report()
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name:<{width}}  {text}")
