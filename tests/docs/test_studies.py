"""The studies' page is what their data give, and the working tree stays small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from studies.tests import passed

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


def test_a_change_asks_for_the_tests_of_the_studies(tmp_path, monkeypatch):
    """Of their code, of their data, or of a module that they import; .ci/run runs them then."""
    names = {path.relative_to(ROOT).as_posix() for path in passed.sources()}
    assert {"studies/run.py", "studies/tests/test_study.py", "studies/results/lm8k.npz"} <= names
    assert {"s2_megatron/tools/dataset/write.py", "examples/quickstart/launch.py"} <= names
    monkeypatch.setattr(passed, "COMMITTED", tmp_path / "passed.txt")
    monkeypatch.setattr("tests.sources.ROOT", tmp_path)
    for name, change in (("studies/run.py", b"\nx = 1\n"), ("studies/results/lm8k.npz", b"x")):
        copy = tmp_path / Path(name).name
        copy.write_bytes((ROOT / name).read_bytes())
        monkeypatch.setattr(passed, "sources", lambda copy=copy: {copy})
        assert passed.main([]) == 1
        assert passed.main(["--write"]) == 0 and passed.main([]) == 0
        copy.write_bytes(copy.read_bytes() + change)
        assert passed.main([]) == 1
