"""The folder that --save writes and --load reads: which checkpoint its tracker names, and which ones are complete.

    FOLDER/latest_checkpointed_iteration.txt     the tracker: the number of an iteration, or "release"
    FOLDER/iter_0000150/                         one checkpoint

What Megatron writes of a distributed checkpoint (--ckpt-format torch_dist), in this order: the files with the shards,
`.metadata`, `metadata.json`, and last of all the tracker. So a checkpoint is complete when the two metadata are there
and every file has the size that `.metadata` says. Checkpoints of the legacy format (torch) and of torch_dcp are
looked at as far as their files allow.

Everything here reads only, and needs neither PyTorch nor Megatron.
"""

from __future__ import annotations

import json
import re
import shlex
import zipfile
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from s2_megatron.config.errors import joined, printable
from s2_megatron.megatron.checkpoints.metadata import MetadataError, read_metadata

TRACKER = "latest_checkpointed_iteration.txt"
FOLDER = re.compile(r"iter_([0-9]{7,12})")
LEGACY_FOLDER = re.compile(r"mp_rank_([0-9]+)(?:_([0-9]+))?(?:_([0-9]+))?")
LARGEST_TRACKER = 100  # bytes


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: which setting names it, what is wrong, what to do."""


class Checkpoint(NamedTuple):
    """One checkpoint of a folder. iteration: None for a release."""

    folder: Path
    iteration: int | None

    @property
    def path(self) -> Path:
        return self.folder / ("release" if self.iteration is None else f"iter_{self.iteration:07d}")

    @property
    def name(self) -> str:
        return "the release checkpoint" if self.iteration is None else f"iteration {self.iteration}"


class StoredCheckpoint(NamedTuple):
    """What a run is about to load."""

    folder: str
    args: Namespace  # Megatron's arguments of the run that saved it
    iteration: int
    weights_only: bool  # whether this run takes nothing but the weights (and perhaps the iteration) from it
    scheduler: dict | None = None  # the state of the optimizer's schedule
    content: dict | None = None  # what it says of its own formats
    kind: str = "GLOBAL"  # its format, a name of Megatron's CheckpointType; this is torch_dist


def read_tracker(folder: Path) -> Checkpoint | None:
    """The checkpoint that the tracker names, whether it exists or not; None without a tracker.

    Raises CheckpointError (only what is wrong with the tracker) and OSError.
    """
    tracker = folder / TRACKER
    if tracker.is_dir():
        raise CheckpointError("is a folder")
    if not tracker.exists():
        return None
    with tracker.open("rb") as file:
        text = file.read(LARGEST_TRACKER + 1).decode(errors="replace").strip()
    if text == "release":
        return Checkpoint(folder, None)
    if not text:
        raise CheckpointError("is empty")
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise CheckpointError(f"holds {printable(repr(text[:40]))}, expected the number of an iteration")
    return Checkpoint(folder, int(text))


def iterations(folder: Path) -> list[int]:
    """The iterations that the folder has checkpoints of, complete or not, ascending. Raises OSError."""
    found = (FOLDER.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def is_legacy(path: Path) -> bool:
    """Whether a folder holds a checkpoint of the format `torch`, complete or not. Raises OSError."""
    return any(LEGACY_FOLDER.fullmatch(entry.name) for entry in path.iterdir())


def find_problem(path: Path) -> str | None:
    """Why a checkpoint (`iter_...`) is not complete, as the end of a sentence that begins with it; None: it is.

    Reads `.metadata` (with a restricted unpickler) and the sizes of the files, not what is in the shards.
    """
    try:
        if not path.is_dir():
            return "does not exist" if not path.exists() else "is no folder"
        if is_legacy(path):
            return _legacy_problem(path)
        return _config_problem(path / "metadata.json") or _shard_problem(path)
    except OSError as error:
        return f"cannot be read ({error.strerror}: {printable(error.filename, 200)})"


def _config_problem(file: Path) -> str | None:
    """What is wrong with metadata.json; nothing where there is none, as in torch_dcp."""
    if not file.exists():
        return None
    try:
        backend = json.loads(file.read_bytes()[:10_000])["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"has a {file.name} that was cut or changed"
    return None if backend == "torch_dist" else f"has the format {printable(repr(backend))}, which Megatron dropped"


def _shard_problem(path: Path) -> str | None:
    if not (path / ".metadata").exists():
        return "has no .metadata: its save did not end"
    try:
        metadata = read_metadata(path / ".metadata")
    except MetadataError as error:
        return f"has a .metadata that {error}"
    # Of Megatron's own state: in a shard, in older releases in common.pt; torch_dcp has it elsewhere.
    common = any(name.startswith("common_state/") for name in metadata.objects)
    distributed = (path / "metadata.json").exists()
    if common and not distributed:
        return "has no metadata.json: its save did not end"
    if distributed and not common and not (path / "common.pt").exists():
        return "has no common.pt"
    wrong = []
    for file, size in metadata.sizes.items():
        found = (path / file).stat().st_size if (path / file).is_file() else None
        if found is None:
            wrong.append(f"{file} is missing")
        elif found != size:
            wrong.append(f"{file} has {found} of {size} bytes")
    return joined(wrong, 3) if wrong else None


def _legacy_problem(path: Path) -> str | None:
    """Of the format `torch`: one folder for each model-parallel rank, each with an archive of torch.save."""
    ranks = {match.groups(): match[0] for entry in path.iterdir() if (match := LEGACY_FOLDER.fullmatch(entry.name))}
    axes = [sorted({rank[axis] for rank in ranks}, key=str) for axis in range(3)]
    if len(ranks) != len(list(product(*axes))):
        return f"has the files of {len(ranks)} model-parallel ranks, and some are missing"
    for folder in ranks.values():
        file = path / folder / "model_optim_rng.pt"
        if not file.is_file():
            return f"has no {folder}/{file.name}"
        with file.open("rb") as opened:
            is_archive = opened.read(2) == b"PK"
        if file.stat().st_size == 0 or (is_archive and not zipfile.is_zipfile(file)):
            return f"has a {folder}/{file.name} that was cut"
    return None


def newest_complete(folder: Path, below: int | None = None) -> int | None:
    """The largest iteration (less than `below`) with a complete checkpoint; None when there is none. Raises OSError."""
    found = (number for number in reversed(iterations(folder)) if below is None or number < below)
    return next((number for number in found if find_problem(Checkpoint(folder, number).path) is None), None)


def remedy(folder: Path, below: int | None = None) -> str:
    """What to do about a tracker that names nothing complete: a shell command. Raises OSError.

    below: the iteration of a checkpoint that looks complete and is not."""
    newest, tracker = newest_complete(folder, below), shlex.quote(str(folder / TRACKER))
    if newest is None:
        return f"there is no complete checkpoint; do: rm {tracker} (training starts again)"
    return f"the newest complete checkpoint is of iteration {newest}; do: echo {newest} > {tracker}"


def checkpoint_to_load(folder: Path, *, setting: str = "--load", step: int | None = None) -> Checkpoint | None:
    """The complete checkpoint that a run continues from; None where there is none and the training starts.

    setting: the flag that named the folder, for messages. step: --ckpt-step, instead of what the tracker says.
    Raises CheckpointError when the tracker or the step names no complete checkpoint, and when there is a complete one
    that no tracker names, because training would start again and write over it.
    """
    place = f"{setting}={folder}"
    try:
        if not folder.exists():
            return None
        if not folder.is_dir():
            raise CheckpointError(f"{place}: a file; expected a folder with checkpoints; name the folder")
        try:
            chosen = Checkpoint(folder, step) if step else read_tracker(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{place}: its tracker {TRACKER} {error}; {remedy(folder)}") from None
        if chosen is None:
            newest = newest_complete(folder)
            if newest is None:
                return None
            raise CheckpointError(
                f"{place}: its tracker {TRACKER} is missing; expected the number of an iteration, without which "
                f"training starts again and writes over the checkpoints; {remedy(folder)}"
            )
        problem = find_problem(chosen.path)
        if problem is None:
            return chosen
        if step:
            complete = [n for n in iterations(folder) if find_problem(Checkpoint(folder, n).path) is None]
            fix = f"--ckpt-step {complete[-1]}" if complete else "leave --ckpt-step out"
            raise CheckpointError(
                f"--ckpt-step={step}: {chosen.path.name} in {folder} {problem}; expected a complete checkpoint; {fix}"
            )
        raise CheckpointError(
            f"{place}: its tracker {TRACKER} names {chosen.name}, and {chosen.path.name} {problem}; {remedy(folder)}"
        )
    except OSError as error:
        raise CheckpointError(
            f"{place}: {printable(error.filename, 200)}: {error.strerror}; expected a folder that can be read; make it "
            "readable"
        ) from error
