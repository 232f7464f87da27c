"""`import s2_megatron`: cheap, and with every public name; and one version everywhere. What a release carries:
test_packaging.py."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import s2_megatron

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "triton", "megatron", "numpy", "pydantic")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout


def imported_by(statement: str) -> set[str]:
    return set(eval(python(f"{statement}\nimport sys; print([name for name in {HEAVY} if name in sys.modules])")))


def test_importing_the_package_imports_nothing_heavy():
    assert imported_by("import s2_megatron; s2_megatron.__version__; dir(s2_megatron)") == set()


def test_a_pattern_and_a_config_need_no_torch():
    assert not {"torch", "triton", "megatron"} & imported_by("from s2_megatron import load_config, make_range_pattern")


@pytest.mark.slow
def test_the_op_needs_no_megatron():
    assert "megatron" not in imported_by("from s2_megatron import build_layout, s2_attention")


@pytest.mark.parametrize("name", [name for name in s2_megatron.__all__ if not name.startswith("__")])
def test_every_public_name_is_the_one_of_its_module(name):
    value = getattr(s2_megatron, name)
    assert value.__name__ == name and value.__module__.startswith("s2_megatron.")
    assert name in dir(s2_megatron)


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="module 's2_megatron' has no attribute 's2_attentions'"):
        s2_megatron.s2_attentions  # noqa: B018


@pytest.mark.slow
def test_context_parallelism_is_imported_from_its_package():
    from s2_megatron import context_parallel

    assert context_parallel.ContextParallel.__module__ == "s2_megatron.context_parallel.attention"
    assert "ContextParallel" in dir(context_parallel)
    with pytest.raises(AttributeError, match="has no attribute 'Parallel'"):
        context_parallel.Parallel  # noqa: B018
    statement = "from s2_megatron.context_parallel import ContextParallel"
    assert {"torch"} <= imported_by(statement) and "megatron" not in imported_by(statement)
    assert "torch" not in imported_by("from s2_megatron.context_parallel import plan")


@pytest.mark.slow
def test_megatron_is_not_imported_before_a_machine_without_a_gpu_is_prepared():
    """A script may import them before it calls install_if_no_gpu."""
    assert "megatron" not in imported_by("from s2_megatron import add_s2_arguments, prepare_s2")


def test_adding_the_flags_patches_and_changes_nothing():
    """Megatron is not even imported; without --s2-config parsing them does not patch it either."""
    parser = "import argparse, s2_megatron; parser = argparse.ArgumentParser()"
    adding = "parser.set_defaults(flight_recorder_extra_dump_on_exec=True); s2_megatron.add_s2_arguments(parser)"
    assert "megatron" not in imported_by(
        f"{parser}; {adding}; assert parser.parse_args([]).flight_recorder_extra_dump_on_exec"
    )


# Commands, whose output it is; and what the start of a training script held back of Megatron's.
PRINTERS = ("tools/", "testing/", "megatron/preflight/start_up.py")


def test_stdout_belongs_to_the_program_around_the_package():
    found = []
    for root in (ROOT / "s2_megatron", ROOT / "kernels"):
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if name.startswith(PRINTERS) or name.startswith("kernels/"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                called = isinstance(node, ast.Call) and getattr(node.func, "id", None)
                if called in ("print", "Console") and "file" not in [word.arg for word in node.keywords]:
                    found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not found


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
