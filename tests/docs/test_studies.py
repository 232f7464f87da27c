"""The studies' page is what their data give, and the working tree stays small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What stands before the import of anything but NumPy and the standard library.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(('torch', 'scipy', 'matplotlib', 's2_megatron', 'yaml')))\n"


def test_every_headline_of_the_page_follows_from_the_data():
    """With NumPy alone, from any folder."""
    code = f"{WITHOUT}import runpy; runpy.run_path({str(ROOT / 'studies' / 'check.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0 and "DIFFERS" not in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("ok  ") > 20 and done.stdout.endswith("docs/quality.md is what the data give\n")


def test_the_tree_is_small():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        return  # an sdist
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    files = [path for path in paths if path.is_file() and not path.is_symlink()]
    assert len(paths) <= 750 and sum(path.stat().st_size for path in files) <= 8e6
    assert len([path for path in files if path.suffix == ".png" and path.is_relative_to(ROOT / "docs")]) <= 12
