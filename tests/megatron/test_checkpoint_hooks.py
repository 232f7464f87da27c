"""What stands around Megatron's saving and loading: checksums, the way of a new checkpoint, TensorBoard, full disks."""

from __future__ import annotations

import logging
import re
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from s2_megatron.megatron.checkpoints.checksums import (
    BackgroundChecksums,
    damaged_files,
    files_of_rank,
    read_checksums,
    write_checksums,
)
from s2_megatron.megatron.checkpoints.hooks import (
    CheckpointHooks,
    free_way,
    last_logged_iteration,
    purge_later_steps,
    set_events_aside,
)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A folder with the files of a checkpoint that two ranks wrote."""
    folder = tmp_path / "iter_0000004"
    folder.mkdir()
    for name in ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "common.pt", ".metadata", "metadata.json"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


def test_every_file_has_one_rank_that_hashes_it(checkpoint):
    names = [sorted(path.name for path in files_of_rank(checkpoint, rank, 2)) for rank in (0, 1)]
    assert names[1] == ["__1_0.distcp"]
    assert names[0] == [".metadata", "__0_0.distcp", "__0_1.distcp", "common.pt", "metadata.json"]
    # Shards of ranks that this job does not have fall to rank 0.
    assert len(files_of_rank(checkpoint, 0, 1)) == 6


def test_coreutils_verify_the_checksums_too(checkpoint):
    for rank in (0, 1):
        write_checksums(checkpoint, rank, 2)
    command = "sha256sum --check --quiet rank_*.sha256"
    assert subprocess.run(command, shell=True, cwd=checkpoint).returncode == 0
    (checkpoint / "__1_0.distcp").write_bytes(b"other")
    assert subprocess.run(command, shell=True, cwd=checkpoint, capture_output=True).returncode == 1


@pytest.mark.parametrize("name", ["__1_0.distcp", "__0_1.distcp", ".metadata", "common.pt"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_file_is_named(checkpoint, name, damage):
    for rank in (0, 1):
        write_checksums(checkpoint, rank, 2)
    checksums = read_checksums(checkpoint)
    assert len(checksums) == 6 and damaged_files(checkpoint, checksums) == []
    path, content = checkpoint / name, bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 4
    {
        "flip": lambda: path.write_bytes(content),
        "cut": lambda: path.write_bytes(content[:-1]),
        "delete": path.unlink,
    }[damage]()
    (line,) = damaged_files(checkpoint, checksums)
    assert line.startswith(name) and ("No such file" in line) == (damage == "delete")
    # Each rank looks at a share of the files, and all shares together are all files.
    shares = [damaged_files(checkpoint, checksums, rank, 4) for rank in range(4)]
    assert [found for share in shares for found in share] == [line]


def test_damaged_checksums_are_named(checkpoint):
    write_checksums(checkpoint, 0, 1)
    (checkpoint / "rank_0.sha256").write_bytes(b"\xff\xfe rubbish\n")
    assert damaged_files(checkpoint, read_checksums(checkpoint)) == ["rank_0.sha256 has changed"]


def test_checksums_are_made_in_the_background(checkpoint, monkeypatch):
    """`start` returns while the files are still read."""
    opened, has_returned = [], threading.Event()
    monkeypatch.setattr(
        "s2_megatron.megatron.checkpoints.checksums.sha256_of",
        lambda path: has_returned.wait(600) and opened.append(path),
    )
    background = BackgroundChecksums()
    background.start(checkpoint, 0, 1)
    assert opened == []
    has_returned.set()
    background._thread.shutdown(wait=True)
    assert len(opened) == 6 and (checkpoint / "rank_0.sha256").exists()


def test_checksums_of_a_checkpoint_that_is_gone(tmp_path, capsys):
    BackgroundChecksums._write(tmp_path / "iter_0000001", 0, 1)
    assert not any(tmp_path.iterdir()) and capsys.readouterr().err == ""


def test_a_complete_checkpoint_in_the_way_is_moved_aside(checkpoint, capsys):
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    free_way(checkpoint)
    aside = checkpoint.with_name("replaced_iter_0000004_1")
    assert not checkpoint.exists() and {path.name: path.read_bytes() for path in aside.iterdir()} == before
    assert str(aside) in capsys.readouterr().err
    checkpoint.mkdir()
    (checkpoint / "metadata.json").write_text("{}")
    free_way(checkpoint)
    assert checkpoint.with_name("replaced_iter_0000004_2").is_dir() and aside.is_dir()


def test_what_a_save_that_did_not_end_left_goes(checkpoint, capsys):
    """Shards of another number of ranks would stay beside the new ones."""
    for name in (".metadata", "metadata.json"):
        (checkpoint / name).unlink()
    free_way(checkpoint)
    assert not any(checkpoint.parent.iterdir()) and capsys.readouterr().err == ""
    free_way(checkpoint)  # nothing there


def test_a_legacy_checkpoint_in_the_way_is_moved_aside(tmp_path):
    """A folder that a run with --ckpt-format torch wrote, under a run with torch_dist."""
    folder = tmp_path / "iter_0000004"
    (folder / "mp_rank_00").mkdir(parents=True)
    (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"weights")
    free_way(folder)
    assert not folder.exists()
    assert (tmp_path / "replaced_iter_0000004_1" / "mp_rank_00" / "model_optim_rng.pt").read_bytes() == b"weights"


def hooks(tmp_path, **settings) -> CheckpointHooks:
    args = dict(save=str(tmp_path), load=str(tmp_path), s2_checksums=True, use_dist_ckpt=True, s2_loss_log=None)
    return CheckpointHooks(SimpleNamespace(**{**args, **settings}), None)


@pytest.mark.parametrize("kind", ["GLOBAL", "FSDP_DTENSOR"])
def test_a_damaged_checkpoint_is_refused_before_it_is_read(checkpoint, kind, monkeypatch):
    """GLOBAL is what Megatron calls torch_dist, FSDP_DTENSOR the checkpoints of Megatron-FSDP."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("s2_megatron.megatron.checkpoints.hooks._rank_and_world_size", lambda: (0, 1))
    write_checksums(checkpoint, 0, 1)
    (checkpoint / "__1_0.distcp").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"iter_0000004 is not what was saved: __1_0\.distcp has changed"):
        hooks(checkpoint.parent).after_load(str(checkpoint), SimpleNamespace(name=kind))
    hooks(checkpoint.parent).after_load(str(checkpoint), SimpleNamespace(name="LOCAL"))


def fails(tmp_path, text: str) -> None:
    """A save that ends in this error, as deep as Megatron's worker threads wrap it."""
    with hooks(tmp_path).one_line_for_the_disk():
        try:
            raise OSError(text)
        except OSError as error:
            raise RuntimeError("Worker failure") from error


@pytest.mark.parametrize("text, line", [
    ("[Errno 28] No space left on device", "the disk is full"), ("write: Disk quota exceeded", "the disk is full"),
    ("[Errno 30] Read-only file system: 'x'", "cannot be written (Read-only file system)"),
])  # fmt: skip
def test_a_disk_that_takes_nothing_is_one_line(tmp_path, text, line):
    with pytest.raises(ValueError) as caught:
        fails(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"--save={tmp_path}") and line in message and "\n" not in message
    assert "the same command goes on from the last complete checkpoint" in message


@pytest.mark.parametrize("kind", ["local", "global"])
def test_the_disk_of_a_non_persistent_save_is_named(tmp_path, monkeypatch, kind):
    """Its folder may lie in that of --save, as here. What the last save was is known; an asynchronous one before it may
    be what fails, and then its error names the file."""
    folder, flag = tmp_path / "memory", f"--non-persistent-{kind}-ckpt-dir={tmp_path / 'memory'}"
    folder.mkdir()
    settings = {"non_persistent_ckpt_type": kind, f"non_persistent_{kind}_ckpt_dir": str(folder)}
    saving = hooks(tmp_path, **settings)
    monkeypatch.setattr("megatron.training.global_vars.get_tensorboard_writer", lambda: None)
    for non_persistent, text, start in (
        (True, "[Errno 28] No space left on device", flag),
        (True, "[Errno 30] Read-only file system", flag),
        (True, f"[Errno 28] No space left on device: '{tmp_path / 'iter_0000004'}'", f"--save={tmp_path}"),
        (False, "[Errno 28] No space left on device", f"--save={tmp_path}"),
        (False, f"[Errno 28] No space left on device: '{folder / '0'}'", flag),
    ):
        saving.before_save(4, non_persistent)
        with pytest.raises(ValueError) as caught, saving.one_line_for_the_disk():
            raise OSError(text)
        assert re.match(rf"{re.escape(start)}(:| cannot)", str(caught.value)), str(caught.value)


def test_a_global_save_below_save_is_named_by_it(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.training.global_vars.get_tensorboard_writer", lambda: None)
    saving = hooks(tmp_path, non_persistent_ckpt_type="global", non_persistent_global_ckpt_dir=None)
    saving.before_save(4, True)
    with pytest.raises(ValueError, match=f"--save={tmp_path}: the disk is full"), saving.one_line_for_the_disk():
        raise OSError("[Errno 28] No space left on device")


def test_other_errors_of_a_save_stay(tmp_path):
    with pytest.raises(RuntimeError, match="Worker failure"):
        fails(tmp_path, "another")


def test_tensorboard_forgets_what_is_trained_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    for number, (resumed_from, last) in enumerate(((0, 7), (4, 6), (2, 5))):
        writer = SummaryWriter(tmp_path, filename_suffix=f".{number}")
        purge_later_steps(writer, resumed_from)
        for step in range(resumed_from + 1, last + 1):
            writer.add_scalar("lm loss", number, step)
        writer.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("lm loss")
    assert [(event.step, event.value) for event in events] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]


def test_a_new_run_in_a_used_tensorboard_folder_loses_nothing(tmp_path, monkeypatch, capsys):
    """Nor does --finetune, or a run that is killed before its first checkpoint: all begin at iteration 1."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    def losses(folder: Path) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars("lm loss")]

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    for number in range(3):
        writer = SummaryWriter(tmp_path, filename_suffix=f".{number}")
        monkeypatch.setattr("megatron.training.global_vars.get_tensorboard_writer", lambda writer=writer: writer)
        hooks(tmp_path, iteration=0, finetune=True, non_persistent_ckpt_type=None).model_ready()
        for step in (1, 2, 3):
            writer.add_scalar("lm loss", number, step)
        writer.close()
        printed = capsys.readouterr().err
        aside = tmp_path / f"replaced_events_{number}"
        assert (printed.count("\n"), f"are now in {aside};" in printed) == ((1, True) if number else (0, False)), (
            printed
        )
    for folder, number in ((tmp_path, 2), (tmp_path / "replaced_events_1", 0), (tmp_path / "replaced_events_2", 1)):
        assert losses(folder) == [(step, number) for step in (1, 2, 3)]


def test_no_events_no_folder(tmp_path, capsys):
    (tmp_path / "events.out.tfevents.1.own").write_text("x")
    (tmp_path / "other").write_text("x")
    set_events_aside(tmp_path, "events.out.tfevents.1.own")
    set_events_aside(tmp_path / "none", "own")
    assert len(list(tmp_path.iterdir())) == 2 and capsys.readouterr().err == ""


@pytest.mark.parametrize("lines, expected", [
    ([], 0), (['{"iteration": 3, "grad_norm": 1}'], 3), (['{"iteration": 3, "grad_norm": 1}', '{"iter'], 3),
    (['{"iteration": 3, "grad_norm": 1}', '{"iteration": 4, "validation": "x"}', '{"run": {}, "iteration": 4}'], 3),
])  # fmt: skip
def test_the_last_logged_iteration(tmp_path, lines, expected):
    log = tmp_path / "log"
    assert last_logged_iteration(str(log)) == last_logged_iteration(None) == 0
    log.write_text("x" * 70_000 + "\n" + "".join(f"{line}\n" for line in lines))
    assert last_logged_iteration(str(log)) == expected
