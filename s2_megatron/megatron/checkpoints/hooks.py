"""What this package does around Megatron's saving and loading of checkpoints (patches.py puts it there).

Saving: TensorBoard's events are on disk before the checkpoint that counts them; a checkpoint that stands in the way of
a new one of the same iteration is moved aside, not overwritten; checksums are made in the background; a full disk is
one line. Loading: the checksums are verified before anything is read; the sparsity of a local checkpoint is compared,
which is not known before; TensorBoard is told which steps are trained again, and a run that starts at the first
iteration moves the events of an earlier one aside.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from s2_megatron.config.errors import joined
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.checkpoints.checksums import BackgroundChecksums, damaged_files, files_of_rank, read_checksums
from s2_megatron.megatron.checkpoints.compare import compare_softmax_type, compare_sparsity
from s2_megatron.megatron.checkpoints.folder import FOLDER, CheckpointError, StoredCheckpoint, find_problem, remedy
from s2_megatron.megatron.checkpoints.metadata import forget_metadata
from s2_megatron.megatron.checkpoints.translation import compare_models, loads_weights_only
from s2_megatron.megatron.errors import RunError
from s2_megatron.printing import is_first_rank, print_once

# The last two are torch's words for a file that took less than it was given.
NO_SPACE = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|\[Errno (?:27|28|122)\]"
    r"|PytorchStreamWriter failed writing|unexpected pos \d"
)
READ_ONLY = re.compile(r"Read-only file system|Permission denied")
ALMOST_FULL = 16 * 10**6  # bytes: torch's own message for a full disk may say no more than `unexpected pos`
COMPLETE = ("metadata.json", ".metadata")  # what Megatron writes last
NON_PERSISTENT = ("non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir")
WITHOUT_CHECKSUMS = ("LEGACY", "LOCAL")  # of Megatron's CheckpointType


def _rank_and_world_size() -> tuple[int, int]:
    import torch

    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def free_way(folder: Path) -> None:
    """Lets a new checkpoint be saved to `folder`: what a save that was cut off left there goes; a checkpoint that was
    complete once is moved aside, one of the legacy format too."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not any((folder / name).exists() for name in COMPLETE) and find_problem(folder) is not None:
        shutil.rmtree(folder)
        return
    number = 1
    while (aside := folder.with_name(f"replaced_{folder.name}_{number}")).exists():
        number += 1
    folder.rename(aside)
    print(
        f"S2: {folder} was there already and is now {aside}; remove it when it is not needed",
        file=sys.stderr,
        flush=True,
    )


class CheckpointHooks:
    """One object for a process. args: Megatron's. sparsity: of this run, None for a dense one."""

    def __init__(self, args: Namespace, sparsity: ResolvedSparsity | None):
        self.args, self.sparsity = args, sparsity
        self.checksums = BackgroundChecksums() if args.s2_checksums else None
        self.loaded = f"the checkpoints in {args.load}"
        self.verified: set[Path] = set()
        self.saving: Path | None = None  # the folder of the save that has begun last, of a persistent one
        self.written = "save"  # the argument that names the folder which the last save goes to

    # Saving

    def before_save(self, iteration: int, non_persistent: bool) -> None:
        from megatron.training import checkpointing
        from megatron.training.global_vars import get_tensorboard_writer

        writer = get_tensorboard_writer()
        if writer is not None:
            writer.flush()
        self.saving = None
        self.written = self._written_by(non_persistent)
        if non_persistent or not self.args.use_dist_ckpt:
            return
        self.saving = Path(checkpointing.get_checkpoint_name(self.args.save, iteration, return_base_dir=True))
        rank, world_size = _rank_and_world_size()
        if rank == 0:
            free_way(self.saving)
        if world_size > 1:  # no rank writes before the way is free
            import torch

            torch.distributed.barrier()

    def _written_by(self, non_persistent: bool) -> str:
        """The argument that names the folder of a save."""
        if not non_persistent:
            return "save"
        name = f"non_persistent_{self.args.non_persistent_ckpt_type}_ckpt_dir"
        return name if getattr(self.args, name, None) else "save"  # a global one goes below --save by default

    def _folder_of_error(self, text: str) -> tuple[str, Path]:
        """(flag, folder) that an error of a save is about: the one that it names, or that of the last save."""
        names = [
            name for name in dict.fromkeys((self.written, "save", *NON_PERSISTENT)) if getattr(self.args, name, None)
        ]
        named = [name for name in names if str(getattr(self.args, name)) in text]
        name = max(named, key=lambda each: len(str(getattr(self.args, each))), default=self.written)
        return f"--{name.replace('_', '-')}", Path(getattr(self.args, name))

    def when_saved(self) -> Callable[[], None]:
        """What every rank has to call when the checkpoint that it has begun to save is complete."""
        return functools.partial(self._saved, self.saving)

    def _saved(self, folder: Path | None) -> None:
        if folder is not None and self.checksums is not None:
            self.checksums.start(folder, *_rank_and_world_size())

    @contextlib.contextmanager
    def one_line_for_the_disk(self):
        """Raises RunError in place of the errors that Megatron and torch have for a full or a read-only disk."""
        from torch.distributed.checkpoint.api import CheckpointException  # no subclass of Exception

        try:
            yield
        except (Exception, CheckpointException) as error:
            texts, cause = [], error
            while cause is not None:
                texts.append(str(cause))
                cause = cause.__cause__ or cause.__context__
            text = " ".join(texts)
            flag, folder = self._folder_of_error(text)
            again = "the same command goes on from the last complete checkpoint"
            if READ_ONLY.search(text):
                raise RunError(
                    f"{flag}={folder} cannot be written ({READ_ONLY.search(text)[0]}); expected a folder for a "
                    f"checkpoint; make it writable; {again}"
                ) from error
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            free = shutil.disk_usage(there).free
            if NO_SPACE.search(text) or free < ALMOST_FULL:
                raise RunError(
                    f"{flag}={folder}: the disk is full (no space left for it, {free / 1e6:.0f} MB free); expected "
                    f"room for a checkpoint; free some, or move the folder to a larger disk; {again}"
                ) from error
            raise

    # Loading

    def after_load(self, name, kind) -> None:
        """Megatron has read the common part of a checkpoint. name, kind: its folder and format.

        Raises CheckpointError for files that have changed since they were saved.
        """
        import torch

        if torch.distributed.is_initialized() and kind.name not in WITHOUT_CHECKSUMS:
            self._verify(Path(name))

    def _verify(self, folder: Path) -> None:
        """Compares a checkpoint's files with their checksums, each rank a share of them; every rank is told."""
        if self.checksums is None or folder in self.verified:
            return
        self.verified.add(folder)
        checksums = read_checksums(folder)
        rank, world_size = _rank_and_world_size()
        damaged = damaged_files(folder, checksums, rank, world_size)
        if world_size > 1:
            import torch

            shares: list = [None] * world_size
            torch.distributed.all_gather_object(shares, damaged)
            damaged = sorted(name for share in shares for name in share)
        if damaged:
            number = FOLDER.fullmatch(folder.name)
            raise CheckpointError(
                f"--load={folder.parent}: {folder.name} is not what was saved: {joined(damaged, 3)}; expected files "
                f"with its checksums; {remedy(folder.parent, int(number[1]) if number else None)}"
            )
        count = len(files_of_rank(folder, 0, 1))
        print_once(f"S2: {len(checksums)} of the {count} files of {folder} verified by their checksums")

    @contextlib.contextmanager
    def one_line_for_a_local_copy(self, iteration: int):
        """Around the loading of local checkpoints: raises CheckpointError for one that cannot be read."""
        try:
            yield
        except Exception as error:
            folder, rank = Path(self.args.non_persistent_local_ckpt_dir), _rank_and_world_size()[0]
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            files = f"{shlex.quote(str(folder))}/*/iter_{iteration:07d}_*"
            raise CheckpointError(
                f"--non-persistent-local-ckpt-dir={folder}: its checkpoint of iteration {iteration} cannot be read on "
                f"rank {rank} ({reason}); expected what Megatron saved; do on every node: rm {files} (training goes on "
                f"from the checkpoints in {self.args.load})"
            ) from error

    def local_loaded(self, state: dict) -> None:
        """The sparsity in a local checkpoint is not known before all ranks have loaded it. Raises ValueError as
        `compare_sparsity` and `compare_softmax_type`, and for the checkpoint of a GPT in a HybridModel, or of a
        HybridModel in a GPT."""
        folder = self.args.non_persistent_local_ckpt_dir
        self.loaded = f"the local checkpoint in {folder}"
        if state.get("args") is not None:
            weights_only = loads_weights_only(self.args, state["args"])
            stored = StoredCheckpoint(folder, state["args"], state.get("iteration", 0), weights_only, kind="LOCAL")
            compare_models(self.args, stored)
            compare_sparsity(self.args, self.sparsity, stored)
            compare_softmax_type(self.args, stored)

    def model_ready(self) -> None:
        """Called when the model is built and what is to be loaded has been: the first step comes next."""
        from megatron.training.global_vars import get_tensorboard_writer

        if self.args.non_persistent_ckpt_type == "local":
            remove_unfinished(Path(self.args.non_persistent_local_ckpt_dir) / str(_rank_and_world_size()[0]))
        forget_metadata()
        iteration = self.args.iteration
        writer = get_tensorboard_writer()
        if writer is not None and iteration:
            purge_later_steps(writer, iteration)
        elif writer is not None:
            set_events_aside(Path(writer.log_dir), Path(writer.file_writer.event_writer._file_name).name)
        last = last_logged_iteration(self.args.s2_loss_log)
        if is_first_rank() and last > iteration and not self.args.finetune:
            print(
                f"S2: goes on after iteration {iteration} of {self.loaded}; {last - iteration} iterations were lost "
                f"and are trained again (the loss log ends at {last})",
                file=sys.stderr,
                flush=True,
            )


def remove_unfinished(folder: Path) -> None:
    """Removes what a killed rank had not written to its end: the next save of that iteration would meet it, and end
    the run. folder: of one rank's local checkpoints."""
    for path in folder.glob("iter_*_local.dirty.pt"):
        path.unlink(missing_ok=True)


def purge_later_steps(writer, iteration: int) -> None:
    """Has TensorBoard forget what earlier event files of the folder say of steps after `iteration`: what
    SummaryWriter(purge_step=iteration + 1) writes, for a writer that was made before the iteration was known."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = Event(session_log=SessionLog(status=SessionLog.START))
    writer.file_writer.add_event(start, step=iteration + 1)


def set_events_aside(folder: Path, own: str) -> None:
    """Moves TensorBoard's event files of an earlier start (all but the one named `own`) into a folder of their own,
    which TensorBoard shows as another run. For a run that begins at the first iteration: another one in a used folder,
    or the same one killed before its first checkpoint."""
    earlier = [path for path in folder.glob("events.out.tfevents.*") if path.name != own]
    if not earlier:
        return
    number = 1
    while (aside := folder / f"replaced_events_{number}").exists():
        number += 1
    aside.mkdir()
    for path in earlier:
        path.rename(aside / path.name)
    print(
        f"S2: the training starts at iteration 1; TensorBoard's events of an earlier start in {folder} are now in "
        f"{aside}; remove it when it is not needed",
        file=sys.stderr,
        flush=True,
    )


def last_logged_iteration(path: str | None, tail: int = 1 << 16) -> int:
    """The iteration of the last training record of a loss log, 0 without one. Reads the last `tail` bytes."""
    if path is None or not os.path.exists(path):
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - tail))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut at the beginning, or by a kill
        if isinstance(record, dict) and "grad_norm" in record:
            return record["iteration"]
    return 0
