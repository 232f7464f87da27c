"""Windows and sinks in tokens through the Hopper kernels as plain Python."""

import pytest

from s2_megatron.kernels.hopper import launch as hopper
from s2_megatron.patterns.ranges import make_range_pattern
from tests.gluon_emulator.test_hopper import F16, check, in_python, pytestmark  # noqa: F401 (a fixture, and marks)
from tests.kernels.placed_blocks import check_placed_blocks
from tests.kernels.test_hopper import RULES, check_documents, in_parts  # noqa: F401 (a fixture)
from tests.tiers import mostly_slow


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


@pytest.mark.parametrize("rule", [RULES[1], RULES[2], RULES[6]], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_head_dims_above_128(rule, groups):
    check(pattern_of(rule, num_kv_heads=groups), 192, 450)


@pytest.mark.parametrize("rule", [RULES[2], RULES[3], RULES[5]], ids=str)
def test_a_query_that_is_the_end_of_its_keys_and_large_blocks(rule):
    """Whose steps come as lists."""
    check(pattern_of(rule, 128), 128, 590)


def test_columns_in_parts(in_parts, monkeypatch):  # noqa: F811
    """Those of the sink are the longest; on so many multiprocessors the others are divided, too."""
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 24)
    check(pattern_of(((), 100, 70), 64, 4, 1), 128, 1100)


def test_windows_that_differ_by_kv_head():
    check(pattern_of((((None, 8),), [20, 300], 5), 64, 4, 2), 128, 590)


def test_a_sequence_without_a_column_of_the_stripes():
    """The first block of these heads' stripes lies behind it."""
    pattern = make_range_pattern(
        block_size=64, num_heads=2, num_kv_heads=2, ranges=((None, 8),), window=70, sink_tokens=5, base_offset=2
    )
    check(pattern, 128, 190)


DOCUMENTS = [(128, "tokens"), (192, "tokens"), (128, "short window")]
PLACED = [(64, "tokens", 8), (64, "tokens of 128", 4), (192, "short window", 8), (64, "long window", 16)]


@pytest.mark.parametrize("dim, kind", mostly_slow(DOCUMENTS, (128, "tokens")))
def test_documents(dim, kind):
    check_documents(True, dim, kind, "cpu", F16)


@pytest.mark.parametrize("dim, kind, n_blocks", mostly_slow(PLACED, (64, "tokens", 8)))
def test_placed_blocks(dim, kind, n_blocks):
    check_placed_blocks(dim, kind, 2, n_blocks, "cpu", F16)
