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


def test_one_oldest_transformers():
    """setup.py's and that of the import, which says so in one line."""
    wanted = re.search(r'"transformers>=([\d.]+)"', (ROOT / "setup.py").read_text())[1]
    imported = (ROOT / "s2_megatron/huggingface/__init__.py").read_text()
    page = (ROOT / "docs/inference.md").read_text()
    said = re.findall(r'(?:transformers |Version\(")(\d[\d.]*)', imported)
    said += re.findall(r"# transformers (\S+) or later", page)
    assert len(said) == 4 and set(said) == {wanted}
