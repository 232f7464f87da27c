"""What ended `make pretrain`, in one line, and whether the user can mend it (status 2) or not (status 1)."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

from s2_megatron.megatron.checkpoints.folder import CheckpointError, checkpoint_to_load

TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/.*failed \(exitcode")
NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]")
REFUSAL = re.compile(r"^error: (.+)$", re.MULTILINE)
NEEDED_BYTES = 100 * 10**6  # the corpus takes 15 MB, a checkpoint 20; while it is written the one before stays


class QuickstartError(Exception):
    """Printed as one line; status: of the process. 2: the user can mend it."""

    def __init__(self, text: str, status: int = 2):
        super().__init__(text)
        self.status = status


def free_bytes(folder: Path) -> int:
    """Of the disk that holds the folder, or that will hold it."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def disk_full(folder: Path) -> QuickstartError:
    return QuickstartError(
        f"disk full: RUNS={folder} has {free_bytes(folder) / 1e6:.0f} MB free, expected {NEEDED_BYTES / 1e6:.0f} MB; "
        "free some, or give RUNS=/a/larger/disk; the same command goes on from the last checkpoint"
    )


def require_space(folder: Path) -> None:
    """Raises QuickstartError when a run cannot be written to the folder's disk."""
    if free_bytes(folder) < NEEDED_BYTES:
        raise disk_full(folder)


def of_system(error: OSError, runs: Path) -> QuickstartError | None:
    """The line for a file or folder that could not be used; None for an error that names none."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(runs)
    if error.filename is None:
        return None
    return QuickstartError(f"{error.filename}: {error.strerror}; make it usable, or give another RUNS= or CONFIG=")


def own_output(log: Path, start: int) -> str:
    """What the training process has written since byte `start` of its log: its attempts of before left out, and what
    torchrun says about the process."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    end = next((number for number, line in enumerate(lines) if TORCHRUN_REPORT.search(line)), len(lines))
    return "\n".join(lines[:end])


def last_lines(output: str, lines: int = 20) -> str:
    return "\n".join(output.splitlines()[-lines:])


def of_training(output: str, status: int, log: Path, runs: Path) -> QuickstartError:
    """Why the training process ended with this status. output: its own, of this attempt."""
    if NO_SPACE.search(output) or free_bytes(runs) < NEEDED_BYTES:
        return disk_full(runs)
    refused = REFUSAL.findall(output)
    if refused:
        return QuickstartError(refused[-1])
    return QuickstartError(f"training ended with status {status}; the whole output is in {log}", status=1)


def checkpoint_iteration(run_folder: Path) -> int:
    """The iteration of the checkpoint that a start continues from, 0 without one. Raises QuickstartError when
    Megatron's tracker file does not name a complete checkpoint."""
    try:
        found = checkpoint_to_load(run_folder / "checkpoints")
    except CheckpointError as error:
        raise QuickstartError(str(error)) from error
    return 0 if found is None else found.iteration or 0
