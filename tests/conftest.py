"""Kernels run on the GPU where there is one; elsewhere through Triton's interpreter, which must be chosen before Triton
is imported."""

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.interpreter import patch_language_once

# The same examples every time, however slow the machine; `--hypothesis-profile default` looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

TESTS = Path(__file__).resolve().parent
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Those that take half a minute or more in a tier, the longest first: a worker of pytest-xdist that began with one of
# them at the end would leave the others idle.
LONGEST_FILES = (
    "kernels/test_compile.py",  # a quarter of an hour, where its list is of other code
    "test_example_runs.py",
    "gluon_emulator/test_hopper.py",
    "megatron/test_context_parallel.py",
    "ops/test_attention.py",
    "test_quickstart.py",
    "megatron/test_parallel.py",
    "tools/test_check.py",
    "context_parallel/test_gradients.py",
    "megatron/test_survival.py",
    "megatron/test_features.py",
    "test_preflight.py",
    "megatron/test_run_logs.py",
    "tools/test_tries.py",
    "ops/test_learns.py",
    "benchmarks/test_end_to_end.py",
    "megatron/test_run_status.py",
    "megatron/test_position_loss.py",
    "kernels/test_launches_in_c.py",
    "megatron/test_packed.py",
    "huggingface/test_decode_kernel.py",
    "huggingface/test_cache.py",
    "megatron/test_export_hf.py",
    "benchmarks/test_loss_measurements.py",
    "kernels/test_hopper_schedule.py",
    "test_slurm.py",
    "megatron/test_launches.py",
    "ops/test_placements.py",
    "huggingface/test_conversion.py",
    "megatron/test_checkpoint_sparsity.py",
    "megatron/test_entry.py",
    "megatron/test_refusals.py",
    "ops/test_custom_op.py",
)


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist's order: the file with the most tests first


def pytest_collection_modifyitems(items):
    rank = {TESTS / name: number for number, name in enumerate(LONGEST_FILES)}
    assert all(path.exists() for path in rank), "a file of LONGEST_FILES is gone"
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    if not HAS_GPU:
        if "triton" in sys.modules:
            patch_language_once()
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; run `make test-gpu` on such a machine"))


def seed_all():
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


@pytest.fixture(autouse=True, scope="module")
def same_numbers_in_fixtures():
    """Those of a module draw the same in every run, whatever the worker ran before."""
    seed_all()


@pytest.fixture(autouse=True)
def same_numbers(same_numbers_in_fixtures):
    """What a test draws without a seed of its own is the same in every run."""
    seed_all()


@pytest.fixture(autouse=True)
def memory_for_other_workers():
    """What a test had of the GPU's memory goes back: the workers of pytest-xdist share one card."""
    yield
    if HAS_GPU:
        torch.cuda.empty_cache()
