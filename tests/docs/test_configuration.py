"""docs/configuration.md is what the schema says, and the configs that the docs draw are valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from s2_megatron.config.load import load_config
from s2_megatron.tools.configuration_page import configuration_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == configuration_page(), "run: s2-megatron schema --write"


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "patterns").glob("*.yaml")), ids=lambda path: path.stem)
def test_drawn_configs(path):
    load_config(path).resolve(num_layers=1, num_heads=4, num_kv_heads=4, seq_length=1536)
    assert path.with_suffix(".png").is_file()
    assert f"patterns/{path.stem}.png" in (ROOT / "docs" / "patterns.md").read_text()
