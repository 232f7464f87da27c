"""One launch per number of ranks, and one for the kernels; the tests read what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    """found(ranks) -> what every rank found, {part: {case: ...}}; found(ranks, "triton"): with the kernels."""
    done = {}

    def run(ranks: int, *parts: str) -> list[dict]:
        if (ranks, parts) not in done:
            file = tmp_path_factory.mktemp("context_parallel") / f"{ranks}.json"
            asked = parts or ("gradients", "wrong", "packed", "contexts" if ranks < 8 else "volume")
            environment = {
                **os.environ,
                "PYTHONPATH": python_path(),
                "OMP_NUM_THREADS": "1",
                "TRITON_INTERPRET": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(ranks), str(file), *asked]
            process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
            assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-6000:]}"
            done[ranks, parts] = json.loads(file.read_text())
        return done[ranks, parts]

    return run
