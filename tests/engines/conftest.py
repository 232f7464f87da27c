"""The engines, each in an environment of its own, which `make test-engines` makes (scripts/make-engines.sh)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is an optional extra: pip install 's2-megatron[hf]'")

from tests.engines.models import LENGTH, head_models, made_models
from tests.huggingface.forked import ROOT, Tools

SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENTS = Path(os.environ.get("S2_ENGINES", ROOT / ".engines"))
SECONDS = 3000  # of an engine, for all its folders


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)


def python_of(engine: str) -> Path:
    """The Python that has the engine; stock transformers is in the environment of the tests, too."""
    if engine == "transformers":
        return Path(sys.executable)
    if not (ENVIRONMENTS / engine / ".installed").exists():
        pytest.skip(f"{engine} is not in {ENVIRONMENTS}: `make test-engines` installs it")
    return ENVIRONMENTS / engine / "bin" / "python"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """name -> Made: the folders of export-hf --stock, and what Megatron's model says."""
    return _made(made_models, tmp_path_factory)


@pytest.fixture(scope="session")
def models_of_heads(tmp_path_factory):
    """name -> Made: the folders of our own model type, whose heads differ."""
    return _made(head_models, tmp_path_factory)


def _made(make, tmp_path_factory) -> dict:
    tools = Tools()
    made = make(tools, tmp_path_factory.mktemp("models"))
    tools.process.stdin.close()
    tools.process.wait(600)
    return made


@pytest.fixture(scope="session")
def plugin(tmp_path_factory) -> Path:
    """A folder with the package as pip installs it, without its dependencies: vLLM finds it by its entry point."""
    root = tmp_path_factory.mktemp("plugin")
    source, site = root / "source", root / "site"
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "s2_megatron", source / "s2_megatron", ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "pretrain_gpt_s2.py"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    ran = subprocess.run(
        [*pip, "--no-build-isolation", "--target", site, source], text=True, capture_output=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return site


def run_script(python: Path, root: Path, name: str, *arguments, **environment) -> None:
    """A script of this folder in an engine's environment, without the packages of this checkout."""
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    alone["S2_TESTS_PYTHON"] = sys.executable
    command = list(map(str, [python, SCRIPTS / name, *arguments]))
    ran = subprocess.run(command, text=True, capture_output=True, timeout=SECONDS, env=alone, cwd=root)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]


def jobs_file(root: Path, folders: dict, text: np.ndarray) -> Path:
    (root / "jobs.json").write_text(json.dumps(dict(folders=folders, tokens=text.tolist())))
    return root / "jobs.json"


@pytest.fixture(scope="session")
def answers(request, tmp_path_factory):
    """answers(engine, way) -> {folder's name: log-probabilities [tokens, words], or the refusal, a text}, of `models`;
    with our plugin of `models_of_heads`. One process computes all folders of an engine, once."""
    known = {}

    def ask(engine: str, way: str, with_plugin: bool = False) -> dict:
        python, key = python_of(engine), (engine, way, with_plugin)
        if key not in known:
            # After the skip: they take minutes.
            models = request.getfixturevalue("models_of_heads" if with_plugin else "models")
            environment = dict(PYTHONPATH=str(request.getfixturevalue("plugin"))) if with_plugin else {}
            root = tmp_path_factory.mktemp(engine)
            folders = {f"{name} {kind}": str(at) for name, made in models.items() for kind, at in made.folders.items()}
            jobs = jobs_file(root, folders, next(iter(models.values())).text[:LENGTH])
            run_script(python, root, f"{engine}_logprobs.py", way, jobs, root / "out.npz", **environment)
            found = np.load(root / "out.npz")
            known[key] = {name: found[name] if found[name].ndim else str(found[name]) for name in found.files}
        return known[key]

    return ask
