"""A copy of the installed Megatron without GPTModel, as Megatron-LM means to be one day (issue 6071 there): of a model
class HybridModel is left, and the layer specs that HybridModel's own are made of.

    python -m tests.megatron.without_gpt /tmp/without-gpt
    PYTHONPATH=/tmp/without-gpt make test TESTS=tests/megatron

Also what a Megatron may lack otherwise, for the tests that skip there.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

GONE = ("core/models/gpt/gpt_model.py", "training/models/gpt.py")
# Of the modules that every run imports: what names the class, and what stands there instead.
CHANGED = {
    "core/models/gpt/__init__.py": [(r"from \.gpt_model import GPTModel\n", "")],
    "core/inference/model_inference_wrappers/abstract_model_inference_wrapper.py": [
        (r"from megatron\.core\.models\.gpt\.gpt_model import GPTModel\n", ""),
        (r"Union\['LegacyGPTModel', GPTModel\]", "object"),
    ],
    "core/inference/model_inference_wrappers/gpt/gpt_inference_wrapper.py": [
        (r"from megatron\.core\.models\.gpt import GPTModel\n", ""),
        (r"model: GPTModel\b", "model: object"),
    ],
    "training/models/__init__.py": [
        (r"from megatron\.training\.models\.gpt import .*\n", ""),
        (r' +"GPTModel\w+",\n', ""),
    ],
    "training/config/container.py": [(r"GPTModelConfig, ", ""), (r" \| GPTModelConfig\b", "")],
    "training/argument_utils.py": [
        (r"import GPTModelConfig, ", "import "),
        (r"(?s)\ndef gpt_config_from_args\(.*?(?=\n(?:def|class|@|[A-Z_]+ =))", "\n"),
    ],
}


def megatron_folder() -> Path:
    """The installed Megatron; found without an import of it, which takes seconds."""
    folders = map(Path, find_spec("megatron").submodule_search_locations)
    return next(folder for folder in folders if (folder / "training").is_dir())


HAS_GPT_MODEL = (megatron_folder() / GONE[1]).exists()


def require_gpt_model() -> None:
    """Skips a test of GPTs where Megatron has none."""
    if not HAS_GPT_MODEL:
        pytest.skip("this Megatron has no GPTModel")


def write_megatron(out: Path) -> Path:
    """Writes the folder out/megatron; out goes into PYTHONPATH. Raises ValueError where this release of Megatron names
    the class in other words."""
    source = megatron_folder()
    shutil.copytree(source, out / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for name in GONE:
        (out / "megatron" / name).unlink()
    for name, changes in CHANGED.items():
        file = out / "megatron" / name
        text = file.read_text()
        for pattern, words in changes:
            text, found = re.subn(pattern, words, text)
            if not found:
                raise ValueError(f"{source / name} has no {pattern!r}; expected Megatron's way to name GPTModel")
        file.write_text(text)
    return out


def builds_mtp() -> bool:
    """Whether Megatron can build layers of multi-token prediction here. Its development branch asks of each whether it
    is one of two layers of Transformer Engine (is_inference_column_parallel_linear in
    core/tensor_parallel/inference_layers.py), which are no types where Transformer Engine is not installed."""
    from megatron.core.tensor_parallel import inference_layers

    try:
        getattr(inference_layers, "is_inference_column_parallel_linear", bool)(None)
    except TypeError:
        return False
    return True


def require_mtp() -> None:
    """Skips a test of multi-token prediction where Megatron cannot build it."""
    if not builds_mtp():
        pytest.skip(
            "this Megatron builds no multi-token prediction without Transformer Engine "
            "(core/tensor_parallel/inference_layers.py: isinstance() with what is no type)"
        )


if __name__ == "__main__":
    write_megatron(Path(sys.argv[1]))
