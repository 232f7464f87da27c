"""Kernels run on the GPU where there is one; elsewhere through Triton's interpreter, which must be chosen before Triton
is imported."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples every time, however slow the machine; `--hypothesis-profile default` looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; run `make test-gpu` on such a machine"))


@pytest.fixture(autouse=True)
def same_numbers():
    """What a test draws without a seed of its own is the same in every run."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global one, for code that draws from it
    torch.manual_seed(0)


@pytest.fixture
def nan_scratch():
    """Every tensor that torch allocates without a value holds NaN, so that an unwritten output shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device():
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def write(tmp_path):
    """write(text) -> path of a YAML in an empty folder."""

    def write_file(text: str, name: str = "my.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file
