"""Windows and sinks in tokens through the Hopper kernels as plain Python."""

import pytest

from s2_megatron.kernels.hopper import launch as hopper
from s2_megatron.patterns.ranges import make_range_pattern
from tests.gluon_emulator.test_hopper import F16, check, in_python, pytestmark  # noqa: F401 (a fixture, and marks)
from tests.kernels.test_hopper import check_documents

# ranges, window, sink tokens
RULES = [
    ((), 100, 0),
    ((), 128, 5),
    ((), 20, 0),
    ((), 65, 64),
    ((), 1, 1),
    (((None, 4),), 130, 4),
    (((None, 2),), 40, 70),
    (((2, 1), (None, 4)), None, 3),
    (((3, 2), (None, 4)), 33, 130),
]


def pattern_of(rule, block_size=64, num_heads=2, num_kv_heads=1):
    ranges, window, sink = rule
    return make_range_pattern(
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ranges=ranges,
        window=window,
        sink_tokens=sink,
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_two_query_heads_in_a_tile(rule):
    check(pattern_of(rule), 128, 590)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_two_query_blocks_in_a_tile(rule, monkeypatch):
    """With dQ in the pass of dK and dV."""
    monkeypatch.setattr(hopper, "FEW_UNITS", 0)
    check(pattern_of(rule, num_kv_heads=2), 64, 590, deterministic=False)
