"""Every tile of the table fits into the shared memory of the cards that it is meant for: compiled, not run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Shared memory a block may use, bytes (CUDA C++ programming guide, technical specifications per compute capability).
LIMITS = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


@pytest.mark.parametrize("cases", [
    [f"{card}:{dim}:bf16" for card in (86, 80) for dim in (64, 128, 256)] + ["86:32:bf16", "86:32:fp32", "86:64:fp32"],
    ["86:128:fp32", "86:256:fp32", "80:256:fp32", "120:128:bf16", "120:256:bf16", "90:128:bf16", "90:256:bf16", "100:128:bf16"],
], ids=["ampere", "others"])  # fmt: skip
def test_tiles_fit(cases):
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(script), *cases], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 3 * len(cases)
    too_large = [entry for entry in found if entry[-1] > LIMITS[entry[0]]]
    assert not too_large
