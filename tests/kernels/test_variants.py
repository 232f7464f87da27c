"""No kernel is compiled in the middle of a run: other lengths, documents and placements find the variants of the first
batch."""

from pathlib import Path

import pytest
import torch

from tests.conftest import HAS_GPU
from tests.processes import found_by
from tests.tiers import mostly_slow

KINDS = ("packed", "placed even", "placed odd", "parts even", "parts odd", "sbhd", "bhsd", "mask")
FIRST = {  # variants that a first packed batch takes
    "triton": {"portable_forward": 1, "portable_grad_query": 1, "delta": 1, "dkdv": 1},
    "gluon": {
        "portable_forward": 0,
        "portable_grad_query": 0,
        "delta": 2,
        "dkdv": 0,
        "forward": 1,
        "backward": 2,
        "grad_query": 1,
        "scale": 1,
        "documents": 2,
    },
    "gluon 192": {
        "portable_forward": 0,
        "portable_grad_query": 0,
        "delta": 1,
        "dkdv": 0,
        "d256_forward": 1,
        "d256_backward": 1,
        "d256_grad_query": 1,
        "documents": 2,
    },
}


@pytest.fixture(scope="module", params=mostly_slow(FIRST, "triton"))
def counted(request):
    """(backend, what kernel_variants.py counted)"""
    if request.param != "triton" and HAS_GPU and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU, or none")
    script = Path(__file__).with_name("kernel_variants.py")
    return request.param, found_by(script, *request.param.split(), TRITON_INTERPRET="0")


@pytest.mark.op
@pytest.mark.parametrize("kind", KINDS)
def test_variants_stay_those_of_the_first_batch(kind, counted):
    backend, found = counted
    later = {kernel: numbers for kernel, numbers in found[kind].items() if numbers[0] != numbers[1]}
    assert not later, "kernel: [variants after the first batch, after all]"
    if kind == "packed":
        assert {
            kernel: numbers[0] for kernel, numbers in found[kind].items() if numbers[0] or kernel in FIRST[backend]
        } == FIRST[backend]
