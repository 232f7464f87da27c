"""Which checkpoint a folder has to offer: complete ones, broken ones, trackers of every kind; nothing that a pickle
names is run."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s2_megatron.megatron.checkpoints import folder as checkpoint_folder
from s2_megatron.megatron.checkpoints import metadata as checkpoint_metadata
from s2_megatron.megatron.checkpoints.folder import (
    TRACKER,
    Checkpoint,
    CheckpointError,
    checkpoint_to_load,
    find_problem,
    iterations,
    newest_complete,
)
from s2_megatron.megatron.checkpoints.metadata import MetadataError, parse_metadata, read_metadata
from tests.checkpoints import SHAPES, write_checkpoint


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the complete iterations 75, 150 and 300, the tracker naming the last."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for iteration in (75, 150):
        write_checkpoint(folder, iteration)
    write_checkpoint(folder, 300, tracker=True)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "a folder")


def newest(folder):
    return folder / "iter_0000300"


def shard(folder):
    return next(newest(folder).glob("*.distcp"))


def cut(file, length):
    with file.open("r+b") as opened:
        opened.truncate(length)


# What is done to iteration 300, and what is said of it.
BREAKAGES = {
    "a shard is missing": (lambda f: shard(f).unlink(), "__0_0.distcp is missing"),
    "a shard is cut": (lambda f: cut(shard(f), 10), "__0_0.distcp has 10 of "),
    "a shard is empty": (lambda f: cut(shard(f), 0), "__0_0.distcp has 0 of "),
    "a shard is longer": (lambda f: os.truncate(shard(f), 10**6), "__0_0.distcp has 1000000 of "),
    "a shard is a folder": (lambda f: (shard(f).unlink(), (newest(f) / "__0_0.distcp").mkdir()), "is missing"),
    "no .metadata": (lambda f: (newest(f) / ".metadata").unlink(), "no .metadata: its save did not end"),
    "an empty .metadata": (lambda f: cut(newest(f) / ".metadata", 0), ".metadata that is empty"),
    "a cut .metadata": (lambda f: cut(newest(f) / ".metadata", 500), "it was cut or changed"),
    "no metadata.json": (lambda f: (newest(f) / "metadata.json").unlink(), "no metadata.json: its save did not end"),
    "a cut metadata.json": (lambda f: cut(newest(f) / "metadata.json", 9), "a metadata.json that was cut or changed"),
    "zarr": (lambda f: (newest(f) / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "the format 'zarr'"),
    "a file": (lambda f: (shutil.rmtree(newest(f)), newest(f).write_text("")), "is no folder"),
    "nothing": (lambda f: shutil.rmtree(newest(f)), "does not exist"),
}


def test_a_complete_checkpoint_is_found(folder):
    assert iterations(folder) == [75, 150, 300]
    assert checkpoint_to_load(folder) == Checkpoint(folder, 300)
    assert checkpoint_to_load(folder, step=75) == Checkpoint(folder, 75)
    assert newest_complete(folder) == 300 and newest_complete(folder, below=300) == 150
    metadata = read_metadata(newest(folder) / ".metadata")
    assert metadata.shapes == SHAPES and metadata.objects == {"common_state/shard_0_1"}
    assert metadata.sizes == {"__0_0.distcp": shard(folder).stat().st_size}


def test_a_large_metadata_is_announced_and_read_once(folder, monkeypatch, capsys):
    file = newest(folder) / ".metadata"
    expected = read_metadata(file)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(checkpoint_metadata, "SLOW_BYTES", 0)
    assert read_metadata(file) == read_metadata(file) == expected
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"S2: checks {file} (0 MB), about 0 s")
    content = file.read_bytes()
    cut(file, len(content) - 1)  # what has changed is read again
    with pytest.raises(MetadataError, match="cut or changed"):
        read_metadata(file)


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_checkpoint_is_named_and_the_remedy_works(folder, name):
    breaks, words = BREAKAGES[name]
    breaks(folder)
    problem = find_problem(newest(folder))
    assert words in problem
    assert newest_complete(folder) == 150
    with pytest.raises(CheckpointError) as caught:
        checkpoint_to_load(folder)
    text = str(caught.value)
    assert text.startswith(f"--load={folder}: its tracker {TRACKER} names iteration 300, and iter_0000300 {problem}")
    assert "\n" not in text and "the newest complete checkpoint is of iteration 150; do: " in text
    subprocess.run(text.partition("do: ")[2], shell=True, check=True)
    assert checkpoint_to_load(folder) == Checkpoint(folder, 150)
    with pytest.raises(CheckpointError, match=r"--ckpt-step=300: iter_0000300 in .*; --ckpt-step 150"):
        checkpoint_to_load(folder, step=300)


@pytest.mark.parametrize("content, words", [
    (b"", "is empty"), (b"\n", "is empty"), (b"what\n", "holds 'what', expected the number"),
    (b"\xff\x00", "expected the number"), (b"-3", "holds '-3'"), (b"1.5", "holds '1.5'"), (b"1_0", "holds '1_0'"),
    (b"9" * 5000, "holds '99"), (b"9" * 12, "does not exist"), ("٣".encode(), "holds"),
])  # fmt: skip
def test_a_wrong_tracker_has_a_remedy(folder, content, words):
    (folder / TRACKER).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        checkpoint_to_load(folder, setting="--save")
    text = str(caught.value)
    assert text.startswith("--save=") and words in text and "\n" not in text and len(text) < 1000
    subprocess.run(text.partition("do: ")[2], shell=True, check=True)
    assert checkpoint_to_load(folder) == Checkpoint(folder, 300)


def test_a_tracker_that_is_a_folder(folder):
    (folder / TRACKER).unlink()
    (folder / TRACKER).mkdir()
    with pytest.raises(CheckpointError, match="is a folder"):
        checkpoint_to_load(folder)


def test_checkpoints_that_no_tracker_names(folder):
    (folder / TRACKER).unlink()
    with pytest.raises(
        CheckpointError, match=r"is missing; .* writes over the checkpoints; .* do: echo 300 > "
    ) as caught:
        checkpoint_to_load(folder)
    subprocess.run(str(caught.value).partition("do: ")[2], shell=True, check=True)
    assert checkpoint_to_load(folder) == Checkpoint(folder, 300)


def test_a_first_save_that_was_killed_starts_again(tmp_path):
    """Nothing is lost: there is no complete checkpoint, and no tracker yet."""
    (write_checkpoint(tmp_path, 75) / ".metadata").unlink()
    assert checkpoint_to_load(tmp_path) is None
    (tmp_path / TRACKER).write_text("75")
    with pytest.raises(CheckpointError, match=r"there is no complete checkpoint; do: rm .* \(training starts again\)"):
        checkpoint_to_load(tmp_path)


def test_folders_without_checkpoints(tmp_path):
    assert checkpoint_to_load(tmp_path) is None and checkpoint_to_load(tmp_path / "none") is None
    assert newest_complete(tmp_path / "none") is None
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file; expected a folder with checkpoints"):
        checkpoint_to_load(tmp_path / "file")


def test_what_cannot_be_read_is_named(folder, monkeypatch):
    def refuses(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_folder, "read_metadata", refuses)
    assert find_problem(newest(folder)).startswith("cannot be read (Permission denied: ")


def test_a_release(folder):
    newest(folder).rename(folder / "release")
    (folder / TRACKER).write_text("release\n")
    found = checkpoint_to_load(folder)
    assert found.iteration is None and found.path.name == "release" and found.name == "the release checkpoint"


def test_the_legacy_format(tmp_path):
    path = tmp_path / "iter_0000010"
    for rank in ("mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"):
        (path / rank).mkdir(parents=True)
        with zipfile.ZipFile(path / rank / "model_optim_rng.pt", "w") as archive:
            archive.writestr("data.pkl", bytes(1000))
    assert find_problem(path) is None
    cut(path / "mp_rank_01_001" / "model_optim_rng.pt", 500)
    assert find_problem(path) == "has a mp_rank_01_001/model_optim_rng.pt that was cut"
    shutil.rmtree(path / "mp_rank_01_001")
    assert find_problem(path) == "has the files of 3 model-parallel ranks, and some are missing"


def test_a_torch_dcp_checkpoint_has_no_metadata_json(tmp_path):
    import torch
    from torch.distributed import checkpoint

    checkpoint.save({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "iter_0000010", no_dist=True)
    assert find_problem(tmp_path / "iter_0000010") is None


class Evil:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("function, arguments", [(os.system, ("touch made",)), (eval, ("open('made', 'w')",)),
    (os.mkdir, ("made",)), (getattr, ("", "join"))])  # fmt: skip
def test_nothing_is_run(tmp_path, monkeypatch, function, arguments, protocol):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MetadataError, match="which no checkpoint of PyTorch needs: it was not loaded"):
        parse_metadata(pickle.dumps([Evil(function, *arguments)], protocol))
    assert not (tmp_path / "made").exists()


def test_files_outside_of_the_folder_are_not_asked_for(folder):
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    for name in ("../x", "/etc/passwd", "a/../../x"):
        content = pickle.dumps(Metadata({}, storage_data={MetadataIndex("a"): _StorageInfo(name, 0, 1)}))
        with pytest.raises(MetadataError, match="has not the structure"):
            parse_metadata(content)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 10**6))
def test_changed_bytes_are_no_other_error(written, changes, length):
    content = bytearray((newest(written) / ".metadata").read_bytes())
    for place, value in changes:
        content[place % len(content)] = value
    found = None
    try:
        found = parse_metadata(bytes(content[: length % (2 * len(content))]))
    except MetadataError as error:
        assert "\n" not in str(error) and len(str(error)) < 300  # noqa: PT017 - it may raise
    assert found is None or all(isinstance(size, int) for size in found.sizes.values())


def test_it_needs_no_torch():
    code = "import sys, s2_megatron.megatron.checkpoints.folder; print({'torch', 'megatron.core'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
