"""The engines, each in an environment of its own, which `make test-engines` makes (scripts/make-engines.sh)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is an optional extra: pip install 's2-megatron[hf]'")

from tests.engines.models import made_models
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
    tools = Tools()
    yield made_models(tools, tmp_path_factory.mktemp("models"))
    tools.process.stdin.close()
    tools.process.wait(600)


@pytest.fixture(scope="session")
def answers(request, tmp_path_factory):
    """answers(engine, way) -> {folder's name: log-probabilities [tokens, words], or the refusal, a text}. One process
    computes all folders of an engine, once."""
    known = {}

    def ask(engine: str, way: str) -> dict:
        python = python_of(engine)
        if (engine, way) not in known:
            models = request.getfixturevalue("models")  # after the skip: they take minutes
            root = tmp_path_factory.mktemp(engine)
            folders = {f"{name} {kind}": str(at) for name, made in models.items() for kind, at in made.folders.items()}
            text = next(iter(models.values())).text
            (root / "jobs.json").write_text(json.dumps(dict(folders=folders, tokens=text.tolist())))
            command = [python, SCRIPTS / f"{engine}_logprobs.py", way, root / "jobs.json", root / "out.npz"]
            alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            alone["S2_TESTS_PYTHON"] = sys.executable
            ran = subprocess.run(command, text=True, capture_output=True, timeout=SECONDS, env=alone, cwd=root)
            assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
            found = np.load(root / "out.npz")
            known[engine, way] = {name: found[name] if found[name].ndim else str(found[name]) for name in found.files}
        return known[engine, way]

    return ask
