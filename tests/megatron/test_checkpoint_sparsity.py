"""Resuming under another sparsity is refused, from checkpoints that Megatron itself wrote or lays out."""

from __future__ import annotations

import json
import os
from functools import cache

import pytest

from tests.megatron import forks
from tests.megatron.arguments import CONFIG, ROOT, arguments, parse_cases
from tests.megatron.without_gpt import require_gpt_model
from tests.processes import free_port, python_path

OTHER = CONFIG.replace("stride: 4", "stride: 8")
DENSE = "layers: D\n"
MOVED = CONFIG.replace("stride: 4", "stride: 4, base_offset: 1")
SMALL = {
    "--seq-length": "512",
    "--train-iters": "2",
    "--num-workers": "0",
    "--eval-iters": "0",
    "--eval-interval": "100",
    "--log-interval": "1",
}

# Lays out checkpoints of Megatron's `torch` format with the arguments of a torch_dist one, changed.
LEGACY = """
import copy, json, sys
from pathlib import Path
from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu
install_if_no_gpu()
import torch
from megatron.core.dist_checkpointing import load_common_state_dict
root = Path(sys.argv[1])
trained = load_common_state_dict(root / "trained" / "iter_0000002")["args"]
for name, (changes, iteration) in json.loads(sys.argv[2]).items():
    args = copy.deepcopy(trained)
    for key, value in changes.items():
        setattr(args, key, value) if value is not None else delattr(args, key)
    folder = root / name / iteration / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"args": args, "iteration": 2, "checkpoint_version": 3.0}, folder / "model_optim_rng.pt")
    (root / name / "latest_checkpointed_iteration.txt").write_text("release" if iteration == "release" else "2")
"""


def run(script, *arguments, **environment):
    variables = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
        **environment,
    }
    forks.run(script, [*map(str, arguments)], variables, ROOT)


@cache
def results(folder) -> dict[str, dict]:
    require_gpt_model()
    files = {
        "config": CONFIG,
        "renamed": f"# the same\n{CONFIG}",
        "other": OTHER,
        "moved": MOVED,
        "dense": DENSE,
        "scaled": CONFIG + "softmax_scale: 0.1\n",
    }
    yaml = {name: str(folder / f"{name}.yaml") for name in files}
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    trained, empty = folder / "trained", folder / "empty"
    empty.mkdir()
    flags = {**SMALL, "--s2-config": yaml["config"], "--save": str(trained), "--save-interval": "2"}
    run(
        ROOT / "pretrain_gpt_s2.py",
        *arguments(flags),
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    legacy = {
        "legacy": ({}, "iter_0000002"),
        "was_dense": ({"s2_sparsity": None}, "iter_0000002"),
        "no_optimizer": ({"no_save_optim": True}, "iter_0000002"),
        "future_format": ({"s2_sparsity": '{"format": 99}'}, "iter_0000002"),
        "release": ({}, "release"),
    }
    (folder / "legacy.py").write_text(LEGACY)
    run(folder / "legacy.py", folder, json.dumps(legacy))

    def case(config, load=trained, world_size=1, **changes):
        given = {"--load": None if load is None else str(load), "--s2-config": None if config is None else yaml[config]}
        chosen = {flag: value for flag, value in given.items() if value is not None}
        changes = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        return dict(argv=arguments({**SMALL, **chosen, **changes}), world_size=world_size)

    torch_format = {"ckpt_format": "torch"}
    cases = {
        # no difference
        "same": case("config"),
        "renamed": case("renamed"),
        "other_backend": case("config", s2_backend="reference"),
        "other_core": case("config", s2_dense_core="s2"),
        "other_length": case("config", seq_length="2048"),
        "other_layout": case("config", world_size=4, tensor_model_parallel_size="2", pipeline_model_parallel_size="2"),
        "legacy_same": case("config", folder / "legacy", **torch_format),
        "was_dense_stays_dense": case(None, folder / "was_dense", **torch_format),
        "was_dense_dense_config": case("dense", folder / "was_dense", **torch_format),
        "nothing_there": case("other", empty),
        "no_load": case("other", None),
        # refused
        "other": case("other"),
        "moved": case("moved"),
        "scaled": case("scaled"),
        "dense_config": case("dense"),
        "without_config": case(None),
        "legacy_other": case("other", folder / "legacy", **torch_format),
        "was_dense": case("config", folder / "was_dense", **torch_format),
        "future_format": case("config", folder / "future_format", **torch_format),
        # meant, or weights only
        "allowed": case("other", s2_allow_sparsity_change=None),
        "allowed_future": case("other", folder / "future_format", s2_allow_sparsity_change=None, **torch_format),
        "finetune": case("other", finetune=None),
        "finetune_dense": case(None, finetune=None),
        "no_load_optim": case("other", no_load_optim=None),
        "skip_train": case("other", skip_train=None),
        "pretrained": case("other", empty, pretrained_checkpoint=str(trained)),
        "no_optimizer": case("other", folder / "no_optimizer", **torch_format),
        "release": case("other", folder / "release", **torch_format),
        "from_dense": case("config", folder / "was_dense", finetune=None, **torch_format),
        # the run's own checkpoint counts, not the one it started from
        "resumed_finetune": case("config", pretrained_checkpoint=str(folder / "was_dense")),
    }
    return dict(zip(cases, parse_cases(list(cases.values())), strict=True))


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    return results(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("name", [
    "same", "renamed", "other_backend", "other_core", "other_length", "other_layout", "legacy_same",
    "was_dense_stays_dense", "was_dense_dense_config", "nothing_there", "no_load", "resumed_finetune"])  # fmt: skip
def test_no_difference(cases, name):
    assert cases[name]["error"] is None, cases[name]["message"]
    assert cases[name]["refused_by_megatron"] is None
    assert "another sparsity" not in cases[name]["printed"]


@pytest.mark.parametrize("name, difference, fix", [
    ("other", "layers 1, 2, 3: stride 4 -> 8", "resume with the YAML it was trained with"),
    ("legacy_other", "layers 1, 2, 3: stride 4 -> 8", "resume with the YAML it was trained with"),
    ("moved", "offsets of 4 heads", "resume with the YAML it was trained with"),
    ("scaled", "softmax_scale: default (1/sqrt(head dim)) -> 0.1", "resume with the YAML it was trained with"),
    ("dense_config", "-> dense", "resume with the YAML it was trained with"),
    ("without_config", "-> dense", "add --s2-config with the YAML it was trained with"),
    ("was_dense", "dense ->", "resume without --s2-config"),
    ("future_format", "format 99", "--s2-allow-sparsity-change"),
])  # fmt: skip
def test_refused(cases, name, difference, fix):
    result = cases[name]
    assert result["error"] == "CheckpointError", result
    message = result["message"].replace("layers 1-3", "layers 1, 2, 3")
    assert difference in message and fix in message
    assert "--s2-allow-sparsity-change" in message
    if name == "other":
        assert "(iteration 2)" in message and "softmax_scale" not in message and "layer 0" not in message


@pytest.mark.parametrize("name, how", [
    ("allowed", "--s2-allow-sparsity-change"), ("allowed_future", "--s2-allow-sparsity-change"),
    ("finetune", "weights"), ("finetune_dense", "weights"), ("no_load_optim", "weights"), ("skip_train", "weights"),
    ("pretrained", "weights"), ("no_optimizer", "weights"), ("release", "weights"), ("from_dense", "weights"),
])  # fmt: skip
def test_allowed_and_printed(cases, name, how):
    result = cases[name]
    assert result["error"] is None, result["message"]
    (report,) = [part for part in result["printed"].split("S2: ") if "another sparsity" in part]
    assert how in report and len(report.strip().splitlines()) >= 2
