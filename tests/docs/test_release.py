"""One version everywhere. What a release carries: tests/test_packaging.py."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import s2_megatron

ROOT = Path(__file__).resolve().parents[2]


def test_one_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == s2_megatron.__version__
    released = re.findall(r"^## (\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == s2_megatron.__version__
