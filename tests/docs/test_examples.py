"""The examples in the texts run, docs/configuration.md is what the schema says, and the configs that the docs draw are
valid."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from s2_megatron.config.load import SparsityConfig, load_config
from s2_megatron.tools.configuration_page import configuration_page
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)


def run(code: str, folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_op_in_the_readme(tmp_path):
    """On the CPU and a shorter sequence."""
    (code,) = blocks("README.md", "python")
    assert "8192" in code
    code = code.replace('device="cuda"', 'device="cpu"').replace("8192", "256")
    run(f"{code}\nassert out.shape == query.shape == query.grad.shape", tmp_path)


def test_the_mask_in_the_patterns_page(tmp_path):
    (code,) = blocks("docs/patterns.md", "python")
    run(code, tmp_path)
    (tmp_path / "mask.yaml").write_text("layers: S\nspecs: {S: {mask: mask.npz}}\n")
    resolved = load_config(tmp_path / "mask.yaml").resolve(
        num_layers=1, num_heads=4, num_kv_heads=2, seq_length=128 * 64
    )
    assert resolved.layers[0].pattern.key_blocks(0, 5).tolist() == [0, 4, 5]


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md"])
def test_whole_yaml_files(page):
    configs = [block for block in blocks(page, "yaml") if "layers:" in block]
    assert configs
    for block in configs:
        SparsityConfig.from_data(yaml.safe_load(block))


def test_the_page_of_the_configuration_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == configuration_page(), "run: s2-megatron schema --write"


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "patterns").glob("*.yaml")), ids=lambda path: path.stem)
def test_drawn_configs(path):
    load_config(path).resolve(num_layers=1, num_heads=4, num_kv_heads=4, seq_length=1536)
    assert path.with_suffix(".png").is_file()
    assert f"patterns/{path.stem}.png" in (ROOT / "docs" / "patterns.md").read_text()
