"""Package metadata. `make pretrain` and `make test` call this through `pip install -e .[dev]`.

The packages are listed by hand: `s2_megatron/kernels` has no `__init__.py` (CONTRIBUTING.md says why), and automatic
discovery skips such a folder.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PACKAGE = (ROOT / "s2_megatron" / "__init__.py").read_text(encoding="utf-8")

setup(
    name="s2-megatron",
    version=re.search(r'^__version__ = "([^"]+)"$', PACKAGE, re.MULTILINE)[1],
    description="Pretraining GPTs with S2-Attention in Megatron: kernels behind a Megatron-core attention submodule",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=[
        "s2_megatron",
        "s2_megatron.patterns",
        "s2_megatron.config",
        "s2_megatron.ops",
        "s2_megatron.kernels",
        "s2_megatron.kernels.triton",
        "s2_megatron.kernels.hopper",
        "s2_megatron.kernels.hopper.d256",
        "s2_megatron.context_parallel",
        "s2_megatron.megatron",
        "s2_megatron.megatron.checkpoints",
        "s2_megatron.megatron.host",
        "s2_megatron.megatron.model",
        "s2_megatron.megatron.records",
        "s2_megatron.megatron.refusals",
        "s2_megatron.megatron.preflight",
        "s2_megatron.huggingface",
        "s2_megatron.tools",
        "s2_megatron.tools.choose_dense",
        "s2_megatron.tools.compare",
        "s2_megatron.tools.dataset",
        "s2_megatron.tools.forecast",
        "s2_megatron.tools.hf",
        "s2_megatron.tools.inspect",
        "s2_megatron.testing",
        "s2_megatron.vllm",
    ],
    package_data={"s2_megatron.tools.forecast": ["*.json"]},
    py_modules=["pretrain_gpt_s2"],
    entry_points={
        "console_scripts": ["s2-megatron = s2_megatron.tools.commands:main"],
        "vllm.general_plugins": ["s2_gpt = s2_megatron.vllm:register"],
    },
    install_requires=[
        "torch>=2.8",
        "megatron-core[training]>=0.19.2,<0.21",
        "argcomplete",
        "numpy",
        "packaging",
        "pydantic>=2",
        "PyYAML",
        "rich",
        "tensorboard",
        "tokenizers",
        "matplotlib",
        "pillow",
        "scipy",
    ],
    extras_require={
        # numpy: from 2.4 on, int() of a one-element array raises, which Triton 3.6's interpreter relies on (tests of
        # the kernels on a CPU)
        "dev": [
            "numpy<2.4",
            "pytest>=8",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "import-linter>=2",
            "setuptools>=77",
            "wheel",
            "einops",  # Megatron-FSDP imports it
        ],
        "te": ["transformer-engine[pytorch]"],
        # --non-persistent-ckpt-type local, and --async-strategy nvrx; its wheels are for glibc 2.39 or newer
        "resiliency": ["nvidia-resiliency-ext>=0.6"],
        # Megatron imports it when --wandb-project is given, `s2-megatron compare` when it reads such a run
        "wandb": ["wandb"],
        "hf": ["transformers>=5.4", "safetensors"],
        # serves exported models; into vLLM's own environment it is better installed with --no-deps (docs/inference.md)
        "vllm": ["vllm>=0.32", "transformers>=5.4"],
        # `s2-megatron make-dataset` reads .zst files with it; Python has it from 3.14 on, as compression.zstd
        "zstd": ['backports.zstd; python_version < "3.14"'],
    },
)
