"""What export-hf, generate and import-hf refuse before they read or write anything: damaged and half-written
checkpoints, a YAML of another sparsity, a config.json that is none. And the folder that they write into."""

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from s2_megatron.config.load import load_config
from s2_megatron.megatron.checkpoints.checksums import write_checksums
from s2_megatron.tools import commands
from s2_megatron.tools.hf import torch_dist
from s2_megatron.tools.hf.architecture import sparsity_of_arguments
from s2_megatron.tools.hf.folders import complete_folder
from s2_megatron.tools.hf.torch_dist import TorchDistWriter, iteration_folder
from s2_megatron.tools.hf.weights import Shape

SHAPE = Shape(2, 64, 96, 4, 2, 16, 128, 128, False, False, False)
SPARSE = "block_size: 64\nlayers: DS\nspecs:\n  S: {local_blocks: 2}\n"
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def load(tmp_path):
    """A --load folder with the iterations 5 and 10."""
    folder = tmp_path / "load"
    for name in ("iter_0000005", "iter_0000010"):
        (folder / name).mkdir(parents=True)
        writer = TorchDistWriter(folder / name)
        writer.add("a", (50, 10), (0, 0), torch.ones(50, 10))
        writer.add_object("common_state/shard_0_1", [{"iteration": 10}])
        writer.finish()
        write_checksums(folder / name, 0, 1)
    (folder / TRACKER).write_text("10")
    return folder


def refused(capsys, *arguments) -> str:
    capsys.readouterr()
    assert commands.main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {
    "flipped byte": ("iter_0000010/__0_0.distcp", flip, "is not what was saved: __0_0.distcp has changed"),
    "longer": ("iter_0000010/metadata.json", lambda p: p.write_text(p.read_text() + " "), "metadata.json has changed"),
    "changed checksums": ("iter_0000010/rank_0.sha256", cut, "is not what was saved"),
    "cut shard": ("iter_0000010/__0_0.distcp", cut, "iter_0000010 __0_0.distcp has "),
    "no shard": ("iter_0000010/__0_0.distcp", Path.unlink, "iter_0000010 __0_0.distcp is missing"),
    "cut .metadata": ("iter_0000010/.metadata", cut, "has a .metadata that cannot be read"),
    "empty .metadata": ("iter_0000010/.metadata", lambda p: p.write_bytes(b""), "has a .metadata that is empty"),
    "no .metadata": ("iter_0000010/.metadata", Path.unlink, "has no .metadata: its save did not end"),
    "list": ("iter_0000010/metadata.json", lambda p: p.write_text("[1]"), "a metadata.json that was cut or changed"),
    "garbage": ("iter_0000010/metadata.json", lambda p: p.write_bytes(b"\xff\0{"), "that was cut or changed"),
    "empty": ("iter_0000010/metadata.json", lambda p: p.write_text(""), "a metadata.json that was cut or changed"),
    "unfinished": ("iter_0000010/metadata.json", Path.unlink, "has no metadata.json: its save did not end"),
    "other format": (
        "iter_0000010/metadata.json", lambda p: p.write_text('{"sharded_backend": "zarr"}'), "has the format 'zarr'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_refused_in_one_line(load, capsys, name):
    file, damage, message = DAMAGE[name]
    assert iteration_folder(load).name == "iter_0000010"
    damage(load / file)
    output = load.parent / "out"
    another = f"--load {load / 'iter_0000005'}\n"
    error = refused(capsys, "export-hf", "--load", load, "--output", output)
    assert message in error and error.endswith(another)
    assert refused(capsys, "generate", "--load", load, "--prompt", "a") == error
    named = refused(capsys, "export-hf", "--load", load / "iter_0000010", "--output", output)  # without the tracker
    assert message in named and named.endswith(another)
    assert [path.name for path in load.parent.iterdir()] == ["load"]
    assert iteration_folder(load / "iter_0000005")


def test_hashing_a_large_checkpoint_is_announced(load, monkeypatch, capsys):
    iteration_folder(load)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(torch_dist, "SLOW_BYTES", 1000)
    iteration_folder(load)
    assert capsys.readouterr() == ("", f"verifying {load / 'iter_0000010'} (0.0 GB)\n")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\x8f\x01z\xff\x0e", "its tracker latest_checkpointed_iteration.txt holds "),
        (b"", "its tracker latest_checkpointed_iteration.txt is empty"),
        (b"-5", "holds '-5', expected the number of an iteration"),
        (b"99", "iter_0000099, which its tracker names, does not exist"),
        (None, "neither a tracker latest_checkpointed_iteration.txt nor a checkpoint's .metadata is there"),
    ],
)
def test_trackers_that_name_nothing(load, capsys, content, message):
    (load / TRACKER).unlink() if content is None else (load / TRACKER).write_bytes(content)
    error = refused(capsys, "export-hf", "--load", load, "--output", load.parent / "out")
    assert message in error and error.endswith(f"--load {load / 'iter_0000010'}\n")


def test_the_legacy_format_is_to_be_converted(load, capsys):
    """However it is named."""
    shutil.rmtree(load / "iter_0000010")
    (ranks := load / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    torch.save({}, ranks / "model_optim_rng.pt")
    for place in (load, load / "iter_0000010"):
        error = refused(capsys, "export-hf", "--load", place, "--output", load.parent / "out")
        assert "iter_0000010 has no metadata.json; expected a checkpoint of --ckpt-format torch_dist; convert" in error
        assert "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER" in error
    (ranks / "model_optim_rng.pt").unlink()
    error = refused(capsys, "export-hf", "--load", load / "iter_0000010", "--output", load.parent / "out")
    assert "has no mp_rank_00/model_optim_rng.pt" in error


def test_without_another_checkpoint_none_is_named(load, capsys):
    shutil.rmtree(load / "iter_0000005")
    flip(load / "iter_0000010" / "__0_0.distcp")
    assert "no other checkpoint there is complete" in refused(
        capsys, "export-hf", "--load", load, "--output", load.parent / "out"
    )


def test_the_yaml_is_compared_without_need_too(tmp_path):
    paths = {name: tmp_path / f"{name}.yaml" for name in ("same", "other", "dense")}
    paths["same"].write_text(SPARSE)
    paths["other"].write_text(SPARSE.replace("2}", "3}"))
    resolved = load_config(paths["same"]).resolve(num_layers=2, num_heads=4, num_kv_heads=2, seq_length=1024)
    sparse = Namespace(s2_sparsity=resolved.canonical_json(), seq_length=1024)
    dense = Namespace(seq_length=1024)
    for config in (None, paths["same"]):
        assert sparsity_of_arguments(sparse, SHAPE, config).canonical_json() == sparse.s2_sparsity
    assert not any(layer.pattern for layer in sparsity_of_arguments(dense, SHAPE, None).layers)
    for args, name in ((sparse, "other"), (dense, "same")):
        with pytest.raises(ValueError, match=rf"^--s2-config .*{name}.yaml is another sparsity .*layer 1: "):
            sparsity_of_arguments(args, SHAPE, paths[name])
    for args in (sparse, dense):
        with pytest.raises(ValueError, match=r"^--s2-config .*none.yaml does not exist .*or leave --s2-config out"):
            sparsity_of_arguments(args, SHAPE, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "content, message",
    [
        ([1], "config.json holds [1]; expected an object"),
        (4, "config.json holds 4; expected"),
        (
            dict(model_type="llama"),
            "num_hidden_layers is missing; hidden_size is missing; intermediate_size is missing",
        ),
    ],
)
def test_a_config_that_is_none(tmp_path, capsys, content, message):
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert message in refused(capsys, "import-hf", "--input", tmp_path, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--output .*/file/out: .*/file is a file; expected a folder; name another"):
        write(tmp_path / "file" / "out", "first")


def write(output: Path, name: str, meanwhile=lambda: None) -> None:
    """One export, of one file. meanwhile: called while it is under way."""
    with complete_folder(output, "--output") as work:
        assert not list(work.iterdir())
        (work / name).touch()
        meanwhile()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_export_removes_only_what_it_made(tmp_path):
    output, foreign = tmp_path / "out", tmp_path / ".out.unfinished"
    foreign.mkdir()
    (foreign / "kept").touch()

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            write(output, "second", interrupt)

    write(output, "first", interrupted)
    assert [path.name for path in output.iterdir()] == ["first"] and (foreign / "kept").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.unfinished", "out"]
    assert output.stat().st_mode == foreign.stat().st_mode  # as readable as any new folder


def test_the_faster_of_two_exports_to_one_folder_stays(tmp_path):
    output = tmp_path / "out"
    with pytest.raises(ValueError, match=r"^--output .* exists and is never overwritten"):
        write(output, "slower", lambda: write(output, "faster"))
    assert [path.name for path in output.iterdir()] == ["faster"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
