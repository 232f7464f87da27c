"""Megatron's modules are changed in patches.py only, and once."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.arguments import ROOT

PACKAGE = ROOT / "s2_megatron"
SCRIPT = """
import json, sys
from types import SimpleNamespace
from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu
install_if_no_gpu()
from megatron.core.datasets import utils
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from megatron.training import checkpointing, training
from megatron.training import models
from s2_megatron.megatron import patches

gpt = getattr(models, "gpt", None)

def functions():
    names = ("training_log", "evaluate", "evaluate_and_print_results")
    names += ("save_checkpoint", "maybe_finalize_async_save", "setup_model_and_optimizer")
    checkpoints = [checkpointing.schedule_async_save, checkpointing._load_base_checkpoint]
    checkpoints += [filesystem_async.get_write_results_queue, async_utils.PersistentAsyncCaller.async_loop]
    checkpoints += [gpt.mtp_block_spec] if gpt else []
    return [utils.compile_helpers, *checkpoints, *(getattr(training, name) for name in names)]

def install():
    patches.use_prebuilt_dataset_helpers()
    if gpt:
        patches.use_own_mtp_specs()
    patches.install_loss_log(sys.argv[1])
    patches.guard_processes()
    patches.install_checkpoint_hooks(SimpleNamespace(s2_checksums=False, load=None), None)
    patches.install_model_check()

before = functions()
install()
once = functions()
install()
refused = ""
try:
    patches.install_loss_log(sys.argv[1] + "2")
except ValueError as error:
    refused = str(error)
changed = [one is not two for one, two in zip(before, once)]
again = [one is not two for one, two in zip(once, functions())]
print("result:", json.dumps([changed, again, refused]))
"""


def assigned_attributes(path: Path) -> list[str]:
    """Attributes of things imported from Megatron that a file assigns, 'line: name.attribute'."""
    tree, names, found = ast.parse(path.read_text()), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname for alias in node.names if alias.name.startswith("megatron.") and alias.asname}
            names |= {"megatron" for alias in node.names if alias.name.startswith("megatron") and not alias.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "megatron":
            names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            targets = [ast.Attribute(value=node.args[0], attr="setattr", lineno=node.lineno)]
        for target in targets:
            value = target
            while isinstance(value, ast.Attribute):
                value = value.value
            if isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and value.id in names:
                found.append(f"{target.lineno}: {value.id}.{target.attr}")
    return found


def test_only_patches_assigns_into_megatron():
    found = {str(path.relative_to(ROOT)): assigned_attributes(path) for path in PACKAGE.rglob("*.py")}
    found["pretrain_gpt_s2.py"] = assigned_attributes(ROOT / "pretrain_gpt_s2.py")
    assert found.pop("s2_megatron/megatron/patches.py"), "the scan finds what it should"
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    log = tmp_path_factory.mktemp("patches") / "log"
    command = [sys.executable, "-c", SCRIPT, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("result:")[1])


def test_every_patch_is_installed_once(installed):
    changed, again, _ = installed
    assert all(changed) and not any(again)


def test_a_second_loss_log_is_refused(installed):
    assert "this process already logs to" in installed[2]
