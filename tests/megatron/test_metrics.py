"""S2 settings reach wandb's config and TensorBoard, through the writers that Megatron opens."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from s2_megatron.config.load import load_config
from tests.megatron.arguments import CONFIG, arguments
from tests.processes import python_path
from tests.tiers import mostly_slow

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")

SCRIPT = """
import json, sys
from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu
install_if_no_gpu()
from megatron.training.arguments import parse_and_validate_args
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from s2_megatron.megatron.arguments import add_s2_arguments, prepare_s2
args = parse_and_validate_args(add_s2_arguments)
prepare_s2(args)
wandb, writer = get_wandb_writer(), get_tensorboard_writer()
if writer is not None:
    writer.close()
config = None
if wandb is not None:
    config = dict(wandb.config)
    wandb.finish()
print("result:", json.dumps({"wandb": config and {key: value for key, value in config.items() if key.startswith("s2_")},
                             "writers": [wandb is not None, writer is not None]}))
"""


@pytest.fixture(scope="module", params=mostly_slow(["last_rank", "other_rank"], "last_rank"))
def run(request, tmp_path_factory):
    """(what the script printed, its folder), on the last of two ranks, where Megatron logs, and on the first."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.yaml").write_text(CONFIG)
    flags = {
        "--s2-config": str(folder / "config.yaml"),
        "--tensorboard-dir": str(folder / "events"),
        "--wandb-project": "s2",
        "--wandb-exp-name": "test",
        "--wandb-save-dir": str(folder / "wandb"),
    }
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WORLD_SIZE": "2",
        "RANK": "1" if request.param == "last_rank" else "0",
        "HOME": str(folder),
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments(flags)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return request.param, json.loads(done.stdout.split("result:")[1].splitlines()[0]), folder


def test_settings_reach_the_writers(run):
    rank, result, folder = run
    if rank == "other_rank":
        assert result == {"wandb": None, "writers": [False, False]}
        return
    expected = load_config(folder / "config.yaml").resolve(num_layers=4, num_heads=4, num_kv_heads=2, seq_length=1024)
    settings = result["wandb"]
    assert settings["s2_density"] == expected.density()
    assert settings["s2_sparsity"] == expected.canonical_json()
    assert settings["s2_plan"] == ["D", "S", "S", "S"]
    assert settings["s2_layers"] == {"dense": 1, "s2": 3}
    assert settings["s2_config"] == str(folder / "config.yaml") and settings["s2_backend"] == "auto"
    assert settings["s2_patterns"]["S"].startswith("local 2 + stride 4")
    assert list((folder / "wandb" / "wandb").glob("offline-run-*/*.wandb"))

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "events"), size_guidance={"tensors": 0})
    events.Reload()
    (density,) = events.Scalars("s2/density")
    assert density.value == pytest.approx(expected.density(), rel=1e-6)
    (picture,) = events.Images("s2/patterns")
    assert picture.encoded_image_string.startswith(b"\x89PNG")
    assert list((folder / "wandb" / "wandb").glob("offline-run-*/files/media/images/s2/patterns_*.png"))
    (device,) = events.Tensors("s2/device/text_summary")
    assert device.tensor_proto.string_val == [b"CPU"]
    (plan,) = events.Tensors("s2/plan/text_summary")
    assert json.loads(plan.tensor_proto.string_val[0]) == ["D", "S", "S", "S"]
