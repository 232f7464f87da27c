"""No kernel is compiled in the middle of a run: other lengths, documents and placements find the variants of the first batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel_variants import KINDS


@pytest.fixture(scope="module")
def counted():
    script = Path(__file__).with_name("kernel_variants.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.op
@pytest.mark.parametrize("kind", KINDS)
def test_variants_stay_those_of_the_first_batch(kind, counted):
    later = {kernel: numbers for kernel, numbers in counted[kind].items() if numbers[0] != numbers[1]}
    assert not later, "kernel: [variants after the first batch, after all]"
    if kind == "packed":  # the first one of all: the forward and dQ are two variants of one kernel
        assert {kernel: numbers[0] for kernel, numbers in counted[kind].items()} == {"query": 2, "delta": 1, "dkdv": 1}
