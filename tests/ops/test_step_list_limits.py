"""Order, sharing, size and limits of the step lists."""

import time

import numpy as np
import pytest

from s2_megatron.context_parallel.plan import make_plan
from s2_megatron.kernels.step_descriptor import LAST_STEP
from s2_megatron.ops import key_steps, query_steps
from s2_megatron.ops.device_lists import DeviceSteps
from s2_megatron.ops.key_steps import key_lists
from s2_megatron.ops.layout import build_layout
from s2_megatron.ops.query_steps import query_lists
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern
from tests.ops.step_cases import PAPER, PATTERNS, WINDOW, N, placements, ranges_of


def test_the_order_of_a_tile():
    """By hand: half 0 is query block 8, half 1 is 9."""
    rows = [[query] for query in range(8)] + [[0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 5, 6, 7, 8, 9]]
    for half, blocks in ((8, [0, 1, 2, 4, 6, 7]), (9, [0, 1, 2, 3, 5, 9])):
        rows[half] = blocks
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    lists = query_lists(BlockMaskPattern.from_csr(64, 1, 1, [indptr], [np.concatenate(rows)]), [8, 9], None, 10, False)
    masked = [[9 | 10 << 24, 2 | 3 << 24], [4 | 1 << 24, 6 | 1 << 24], [5 | 2 << 24, 5]]
    # The own block and the free one left over; half 0: 4 6 7, half 1: 3 5; the step of both comes before those of one
    # half.
    masked.insert(1, [7 | 1 << 24, 3 | 2 << 24])
    assert lists.tiles.tolist() == [[[0, 4, 1]]] and lists.steps.tolist() == [*masked, [0 | 3 << 24, 1 | 3 << 24]]


def test_steps_of_the_halves_alternate():
    rows = [[query] for query in range(12)]
    rows[10:] = [[0, 1, 2, 3, 4, 5, 10], [6, 7, 8, 9, 10, 11]]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    lists = query_lists(
        BlockMaskPattern.from_csr(64, 1, 1, [indptr], [np.concatenate(rows)]), [10, 11], None, 12, False
    )
    assert ((lists.steps >> 24).max(axis=1) & 3).tolist() == [2, 1, 2, 1, 2, 1]
    assert (lists.steps & 0xFFFFFF).tolist() == [[10, 11], [0, 1], [6, 7], [2, 3], [8, 9], [4, 5]]


@pytest.mark.parametrize("ratio", [1, 4])
def test_few_steps_of_s2_are_masked(ratio):
    pattern = ranges_of(((16, 1), (None, 16)), 8 * ratio, 8)
    for name, (query_blocks, key_slot, n_blocks, _) in placements(pattern, 256).items():
        if name.split("-")[0] not in ("whole", "local", "remote"):
            continue
        lists = query_lists(pattern, query_blocks, key_slot, n_blocks, False)
        assert lists.tiles[:, :, 1].max() <= 4 and lists.tiles[:, :, 2].max() > 4
    assert len(query_lists(pattern, np.arange(256), None, 256, False).tiles) == 8, "heads of a group share their list"


def test_equal_lists_are_shared():
    """Nine heads, of which several are the same; offsets that differ by a stride are."""
    pattern = RangePattern(64, 3, tuple(HeadPattern(PAPER, offset) for offset in (0, 1, 8, 8, 9, 0, 0, 0, 1)))
    assert query_lists(pattern, np.arange(N), None, N, False).rows.tolist() == [0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert key_lists(pattern, np.arange(N), None, N, N).rows.tolist() == [0, 0, 1]
    key_slot = np.tile(np.arange(N), (3, 1))
    key_slot[1, :2] = 1, 0
    assert query_lists(pattern, np.arange(N), key_slot, N, False).rows.tolist() == [0, 1, 0, 2, 3, 2, 0, 0, 1]
    assert key_lists(pattern, np.arange(N), key_slot, N, N).rows.tolist() == [0, 1, 2]


def test_lists_with_the_same_work_share_their_steps():
    """KV heads 0 and 2 attend the same; 2 has its blocks in other slots, in the same order. The slots of 1 and 3 have
    another order."""
    key_slot = np.tile(np.arange(N), (4, 1))
    key_slot[2] += 5
    key_slot[3] = key_slot[3, ::-1]
    heads = tuple(HeadPattern(PAPER, offset) for offset in (0, 1, 0, 0))
    lists = key_lists(RangePattern(64, 4, heads), np.arange(N), key_slot, N, N + 5)
    assert lists.rows.tolist() == [0, 1, 2, 3]
    begins = [set(columns[:, 2].tolist()) for columns in lists.columns]
    assert begins[0] == begins[2] and not begins[0] & (begins[1] | begins[3]) and not begins[1] & begins[3]


@pytest.mark.parametrize("heads, groups", [(32, 32), (32, 8)])
def test_lists_of_a_million_tokens_take_moments(heads, groups):
    """On one of eight ranks, of its own keys and of the received ones. What other processes take of the machine does
    not count."""
    pattern = ranges_of(((16, 1), (None, 16)), heads, groups)
    plan = make_plan(pattern, 3, 8, 2**20 // 64)
    start = time.process_time()
    lists = []
    for slots in (plan.local_slot, plan.remote_slot):
        lists += query_lists(pattern, plan.query_blocks, slots, plan.n_blocks, groups < heads)
        lists += key_lists(pattern, plan.query_blocks, slots, plan.n_blocks, int(slots.max()) + 1)[:3]
    assert time.process_time() - start < 7
    assert sum(array.nbytes for array in lists) < 110 * 2**20


def test_nothing_is_present():
    absent = np.full((2, N), -1)
    place = PATTERNS["paper"], np.arange(N), absent, N
    apart, packed, key = query_lists(*place, False), query_lists(*place, True), key_lists(*place, 0)
    assert not apart.tiles.any() and not packed.tiles.any() and len(packed.steps) == 1
    assert not key.columns.any() and key.steps.tolist() == [LAST_STEP] and key.n_long == 1


def test_long_columns():
    """Stripes, two of which a column joins, against a window of two blocks; without columns far beyond the mean, half
    of the longest counts."""
    stripes = key_lists(ranges_of(((2, 1), (None, 8)), 1, 1), np.arange(64), None, 64, 64)
    lengths = np.diff(np.append(stripes.columns[0, :, 2], len(stripes.steps)))
    assert sorted(lengths.tolist()) == [2, *[3] * 23, *[4] * 4, 16, 32, 48, 64] and stripes.n_long == 4, (
        "the mean is 7.7"
    )
    window = key_lists(ranges_of(((2, 1),), 1, 1), np.arange(64), None, 64, 64)
    assert window.n_long == window.columns.shape[1] == 32


def test_lists_are_made_once():
    steps = DeviceSteps(PATTERNS["paper"], np.arange(N), None, N, N, "cpu")
    assert steps.query(True) is steps.query(True) is not steps.query(False) and steps.key() is steps.key()


def test_a_layout_holds_the_lists_of_every_length():
    layout = build_layout(PATTERNS["paper"])
    first = layout.steps(2)
    assert layout.steps(3) is not first and layout.steps(2) is first


def test_what_does_not_fit(monkeypatch):
    paper, rows = PATTERNS["paper"], np.arange(N)
    key_slot = np.tile(np.arange(N), (2, 1))
    with pytest.raises(ValueError, match=r"n_slots=31; key_slot names 32"):
        key_lists(paper, rows, key_slot, N, N - 1)
    with pytest.raises(ValueError, match=r"shape \[1, 32\]"):
        query_lists(paper, rows, key_slot[:1], N, False)
    key_slot[0, 3] = 2**24 - 1
    query_lists(paper, rows, key_slot, N, False)
    key_slot[0, 3] = 2**24
    with pytest.raises(ValueError, match="16777217 key slots"):
        query_lists(paper, rows, key_slot, N, False)
    key_lists(ranges_of(WINDOW, 127, 1), rows, None, N, N)
    with pytest.raises(ValueError, match="128 query heads per KV head"):
        key_lists(ranges_of(WINDOW, 128, 1), rows, None, N, N)
    with pytest.raises(AssertionError, match="packed heads"):
        query_lists(PATTERNS["query-slide"], rows, None, N, True)
    monkeypatch.setattr(key_steps, "MOST_ROW_BLOCKS", N - 1)
    with pytest.raises(ValueError, match="32 query row blocks"):
        key_lists(paper, rows, None, N, N)


@pytest.mark.parametrize(
    "module, make", [(query_steps, lambda *a: query_lists(*a, False)), (key_steps, lambda *a: key_lists(*a, N))]
)
def test_lists_that_kernels_could_not_count_are_refused(module, make, monkeypatch):
    pattern = ranges_of(PAPER, 4, 4)
    length = len(make(pattern, range(N), None, N).steps)
    monkeypatch.setattr(module, "MOST_STEPS", length + 1)
    make(pattern, range(N), None, N)
    monkeypatch.setattr(module, "MOST_STEPS", length)
    with pytest.raises(
        ValueError,
        match=f"lists of {length} steps; expected fewer than {length}; use more context- or tensor-parallel",
    ):
        make(pattern, range(N), None, N)
