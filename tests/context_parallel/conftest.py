"""One launch per number of ranks; the tests read what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    """found(ranks) -> what every rank found, {part: {case: ...}}."""
    done = {}

    def run(ranks: int) -> list[dict]:
        if ranks not in done:
            file = tmp_path_factory.mktemp("context_parallel") / f"{ranks}.json"
            parts = [
                *(["contexts"] if ranks < 8 else []),
                "gradients",
                "wrong",
                "packed",
                *{2: ["triton"], 4: ["triton"], 8: ["volume"]}.get(ranks, []),
            ]
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TRITON_INTERPRET": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(ranks), str(file), *parts]
            process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
            assert process.returncode == 0, f"{process.stdout[-3000:]}\n{process.stderr[-6000:]}"
            done[ranks] = json.loads(file.read_text())
        return done[ranks]

    return run
