"""The step lists against brute force: every list is read entry by entry and compared with Pattern.key_blocks, and so is
its order."""

import time
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2_megatron.context_parallel.plan import make_plan
from s2_megatron.ops import block_lists as step_lists
from s2_megatron.ops.block_lists import key_lists, query_lists
from s2_megatron.ops.layout import DeviceSteps, build_layout
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import DENSE, HeadPattern, RangePattern, make_range_pattern

PAPER, SEVERAL, UNEVEN, WINDOW = (
    ((4, 1), (None, 8)),
    ((2, 1), (5, 2), (None, 4)),
    ((2, 1), (5, 3), (None, 4)),
    ((3, 1),),
)
N = 32  # blocks of a sequence; a multiple of 2 * CP


def ranges_of(ranges, heads, groups, slide="kv", **options):
    return make_range_pattern(
        block_size=64, num_heads=heads, num_kv_heads=groups, ranges=ranges, slide=slide, **options
    )


def mask_of(heads, groups, tables, n_blocks=N, seed=0, density=0.4, diagonal=True):
    random = np.random.default_rng(seed)
    rows = [[np.flatnonzero(random.random(query + 1) < density) for query in range(n_blocks)] for _ in range(tables)]
    always = [query if diagonal else query // 2 for query in range(n_blocks)]
    rows = [[np.union1d(row, [block]) for row, block in zip(table, always)] for table in rows]
    indptr = [np.concatenate([[0], np.cumsum([len(row) for row in table])]) for table in rows]
    return BlockMaskPattern.from_csr(64, heads, groups, indptr, [np.concatenate(table).astype(int) for table in rows])


PATTERNS = {
    "paper": ranges_of(PAPER, 4, 2),
    "query-slide": ranges_of(PAPER, 4, 2, "query"),
    "several": ranges_of(SEVERAL, 4, 4),
    "not-efficient": ranges_of(UNEVEN, 4, 2),
    "window": ranges_of(WINDOW, 4, 1),
    "dense": RangePattern.dense(64, 2, 1),
    "dense-kv-head": ranges_of(PAPER, 8, 4, dense_heads=[1]),
    "uneven-heads": RangePattern(
        64, 2, (HeadPattern(WINDOW), HeadPattern(DENSE), *[HeadPattern(((2, 1), (6, 2)), 1)] * 2)
    ),
    "mask-shared": mask_of(4, 2, 1),
    "mask-kv-heads": mask_of(4, 2, 2),
    "mask-heads": mask_of(4, 2, 4),
    "mask-no-diagonal": mask_of(4, 2, 2, diagonal=False),
    "mask-thin": mask_of(2, 2, 2, density=0.05),
}


def placements(pattern, n_blocks=N):
    """{name: (query_blocks, key_slot, n_blocks, n_slots)}"""
    every = np.arange(n_blocks)
    chosen = {
        "whole": (every, None, n_blocks, n_blocks),
        "odd": (every[: n_blocks - 1], None, n_blocks, n_blocks),
        "gaps": (every[[0, 1, 2, 5, 8, 9, n_blocks - 1]], None, n_blocks, n_blocks),
        "one": (every[-1:], None, n_blocks, n_blocks + 3),
    }
    for size in (2, 4):
        for rank in range(size):
            plan = make_plan(pattern, rank, size, n_blocks)
            chosen[f"local-{rank}of{size}"] = (
                plan.query_blocks,
                plan.local_slot,
                n_blocks,
                int(plan.local_slot.max()) + 1,
            )
            chosen[f"remote-{rank}of{size}"] = (
                plan.query_blocks,
                plan.remote_slot,
                n_blocks,
                int(plan.remote_slot.max()) + 1,
            )
    odd = make_plan(pattern, 1, 2, 20)  # five row blocks in a chunk: the third tile has a half in each
    chosen["odd-chunks"] = (odd.query_blocks, odd.local_slot, 20, 10)
    return chosen


def slot_of(key_slot, group, block):
    return block if key_slot is None else int(key_slot[group, block])


def attended(pattern, head, query_block, key_slot):
    """{(key block, slot): is it the own block} of the key blocks that are present."""
    group = head * pattern.num_kv_heads // pattern.num_heads
    pairs = [(block, slot_of(key_slot, group, block)) for block in pattern.key_blocks(head, query_block).tolist()]
    return {(block, slot): bool(block == query_block) for block, slot in pairs if slot >= 0}


def tile_halves(query_blocks, unit, tile, pack):
    """[(head, query block or None)] of the two halves."""
    if pack:
        return [(2 * unit, query_blocks[tile]), (2 * unit + 1, query_blocks[tile])]
    return [
        (unit, row)
        for row in (query_blocks[2 * tile], query_blocks[2 * tile + 1] if 2 * tile + 1 < len(query_blocks) else None)
    ]


def in_twos(entries):
    """Steps of two entries; a missing one is the first one's slot without flags."""
    return [(*entries[i : i + 2], (entries[i][0], 0))[:2] for i in range(0, len(entries), 2)]


def expected_tile(halves):
    """(masked steps, free steps) of two {(key block, slot): own}; a step is two (slot, flags)."""
    flags = {}
    for half, keys in enumerate(halves):
        for key, own in keys.items():
            flags[key] = flags.get(key, 0) | 1 << half | own << 2 + half
    entries = [(key[1], flags[key]) for key in sorted(flags)]
    free = [entry for entry in entries if entry[1] == 3]
    left_over = [free.pop()] if len(free) % 2 else []
    own = [entry for entry in entries if entry[1] > 3]
    alone = [[entry for entry in entries if entry[1] == flag] for flag in (1, 2)]
    if free and not (own or left_over or alone[0] or alone[1]):
        left_over, free = free[-2:], free[:-2]
    masked = in_twos(own + left_over + alone[0] + alone[1])
    halves_of = [(first[1] | second[1]) & 3 for first, second in masked]
    ordered = [step for step, of in zip(masked, halves_of) if of == 3]
    for pair in zip_longest(*([step for step, of in zip(masked, halves_of) if of == half] for half in (1, 2))):
        ordered += [step for step in pair if step]
    return ordered, in_twos(free)


def check_query(pattern, query_blocks, key_slot, lists, pack):
    heads = pattern.num_heads
    assert [array.dtype for array in lists] == [np.int32] * 3
    assert lists.rows.shape == (heads // 2 if pack else heads,) and lists.tiles.shape[1] == -(
        -len(query_blocks) // (1 if pack else 2)
    )
    assert lists.tiles[:, :, 1:].sum() == len(lists.steps) or not lists.tiles[:, :, 1:].any()
    for unit, number in enumerate(lists.rows):
        for tile, (first, masked, free) in enumerate(lists.tiles[number].tolist()):
            steps = [
                [(word & 0xFFFFFF, word >> 24) for word in step]
                for step in lists.steps[first : first + masked + free].tolist()
            ]
            halves = []
            for half, (head, query_block) in enumerate(tile_halves(query_blocks, unit, tile, pack)):
                halves.append({} if query_block is None else attended(pattern, head, query_block, key_slot))
                seen = [
                    (slot, bool(flags >> 2 + half & 1)) for step in steps for slot, flags in step if flags >> half & 1
                ]
                # Every attended block of a half once, and its own one marked.
                assert sorted(seen) == sorted((slot, own) for (_, slot), own in halves[-1].items())
                assert all(flags >> half & 1 or not flags >> 2 + half & 1 for step in steps for _, flags in step)
            assert all(flags == 3 for step in steps[masked:] for _, flags in step)
            expected = expected_tile(halves)
            assert [[tuple(step) for step in part] for part in (steps[:masked], steps[masked:])] == [*expected]


def check_key(pattern, query_blocks, key_slot, n_blocks, n_slots, lists):
    ratio = pattern.num_heads // pattern.num_kv_heads
    assert [array.dtype for array in lists[:3]] == [np.int32] * 3 and lists.rows.shape == (pattern.num_kv_heads,)
    lengths, read = {}, set()
    for group, number in enumerate(lists.rows.tolist()):
        slots = {slot_of(key_slot, group, block): block for block in range(n_blocks)}
        slots.pop(-1, None)
        expected = {}  # slot -> {(member, row block): is it the own block}
        for slot in slots:
            expected[slot] = {}
        for member in range(ratio):
            for row, query_block in enumerate(query_blocks):
                for (_, slot), own in attended(pattern, group * ratio + member, query_block, key_slot).items():
                    expected[slot][member, row] = own
        rows = {slot: [row for _, row in queries] for slot, queries in expected.items()}
        order = sorted(
            slots, key=lambda slot: (-max(rows[slot], default=-1), min(rows[slot], default=len(query_blocks)), slot)
        )
        pairs = [(*order[i : i + 2], n_slots)[:2] for i in range(0, len(order), 2)]
        columns = lists.columns[number].tolist()
        while columns and columns[-1] == [n_slots, n_slots, 0]:
            columns.pop()
        words_of = {}
        for first, second, start in columns:
            words = []
            while not words or not words[-1] & 16:
                words.append(int(lists.words[start + len(words)]))
            assert not any(word & 16 for word in words[:-1])
            read |= set(range(start, start + len(words)))
            words_of[first, second] = words
            seen = [{}, {}]
            queries = [(word >> 24, word >> 5 & (1 << 19) - 1, word & 15) for word in words]
            for member, row, bits in queries:
                for half in range(2):
                    if bits >> half & 1:
                        seen[half][member, row] = bool(bits >> 2 + half & 1)
                    else:
                        assert not bits >> 2 + half & 1
            assert seen == [expected[first], expected.get(second, {})]
            assert all(bits for *_, bits in queries) or words == [16]
            assert queries == sorted(queries, key=lambda query: (query[0], -query[1])) and len(
                {query[:2] for query in queries}
            ) == len(queries)
        assert sorted(words_of) == sorted(pairs) and len(columns) == len(pairs), (
            "every slot in one column, neighbours of the order"
        )
        lengths[number] = [len(words_of[first, second]) for first, second, _ in columns]
        # Longest first, and equally long ones as they were.
        assert [tuple(column[:2]) for column in columns] == sorted(pairs, key=lambda pair: -len(words_of[pair]))
    assert read == set(range(len(lists.words))) or not read
    every = [count for counts in lengths.values() for count in counts]
    long = [count for count in every if count > 1.5 * sum(every) / len(every)] or [
        count for count in every if 2 * count >= max(every)
    ]
    assert lists.n_long == max(
        1, *(sum(count >= min(long, default=0) for count in counts) for counts in lengths.values())
    )
    assert lists.columns.shape[:2] == (len(lengths), max(1, *map(len, lengths.values())))


def check(pattern, query_blocks, key_slot, n_blocks, n_slots):
    place = pattern, query_blocks, key_slot, n_blocks
    check_query(pattern, query_blocks, key_slot, query_lists(*place, False), False)
    heads = (
        pattern.heads
        if isinstance(pattern, RangePattern)
        else [pattern.table_of(head) for head in range(pattern.num_heads)]
    )
    if pattern.num_heads // pattern.num_kv_heads % 2 == 0 and heads[::2] == heads[1::2]:
        check_query(pattern, query_blocks, key_slot, query_lists(*place, True), True)
    check_key(pattern, query_blocks, key_slot, n_blocks, n_slots, key_lists(*place, n_slots))


@pytest.mark.parametrize("name", PATTERNS)
def test_lists(name):
    for place in placements(PATTERNS[name]).values():
        check(PATTERNS[name], *place)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_masks(data):
    groups, ratio = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    n_blocks = data.draw(st.integers(1, 12))
    tables = data.draw(st.sampled_from([1, groups, groups * ratio]))
    seed, density, diagonal = data.draw(
        st.tuples(st.integers(0, 2**32), st.sampled_from([0.1, 0.5, 0.9]), st.booleans())
    )
    pattern = mask_of(groups * ratio, groups, tables, n_blocks, seed, density, diagonal)
    query_blocks = np.array(sorted(data.draw(st.sets(st.integers(0, n_blocks - 1), min_size=1))))
    key_slot, n_slots = None, n_blocks
    if data.draw(st.booleans()):
        n_slots = groups * n_blocks
        present = np.array(data.draw(st.lists(st.booleans(), min_size=n_slots, max_size=n_slots)))
        key_slot = np.where(present, data.draw(st.permutations(range(n_slots))), -1).reshape(groups, n_blocks)
    check(pattern, query_blocks, key_slot, n_blocks, n_slots)


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


def test_halves_take_turns():
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


@pytest.mark.parametrize("cells", [1, 300])
@pytest.mark.parametrize(
    "name", ["paper", "query-slide", "not-efficient", "window", "uneven-heads", "mask-kv-heads", "mask-thin"]
)
def test_lists_do_not_depend_on_how_many_cells_are_made_at_a_time(name, cells, monkeypatch):
    pattern = PATTERNS[name]

    def all_lists():
        for query_blocks, key_slot, n_blocks, n_slots in placements(pattern).values():
            yield from query_lists(pattern, query_blocks, key_slot, n_blocks, False)
            yield from key_lists(pattern, query_blocks, key_slot, n_blocks, n_slots)[:3]

    whole = list(all_lists())
    monkeypatch.setattr(step_lists, "CELLS", cells)
    assert all(np.array_equal(array, part) for array, part in zip(whole, all_lists(), strict=True))


def test_lists_with_the_same_work_share_their_words():
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
    assert time.process_time() - start < 2.5
    assert sum(array.nbytes for array in lists) < 110 * 2**20


def test_nothing_is_present():
    absent = np.full((2, N), -1)
    place = PATTERNS["paper"], np.arange(N), absent, N
    apart, packed, key = query_lists(*place, False), query_lists(*place, True), key_lists(*place, 0)
    assert not apart.tiles.any() and not packed.tiles.any() and len(packed.steps) == 1
    assert not key.columns.any() and key.words.tolist() == [16] and key.n_long == 1


def test_long_columns():
    """Stripes, two of which a column joins, against a window of two blocks; without columns far beyond the mean, half
    of the longest counts."""
    stripes = key_lists(ranges_of(((2, 1), (None, 8)), 1, 1), np.arange(64), None, 64, 64)
    lengths = np.diff(np.append(stripes.columns[0, :, 2], len(stripes.words)))
    assert sorted(lengths.tolist()) == [2, *[3] * 23, *[4] * 4, 16, 32, 48, 64] and stripes.n_long == 4, (
        "the mean is 7.7"
    )
    window = key_lists(ranges_of(((2, 1),), 1, 1), np.arange(64), None, 64, 64)
    assert window.n_long == window.columns.shape[1] == 32


def test_lists_are_kept():
    steps = DeviceSteps(PATTERNS["paper"], np.arange(N), None, N, N, "cpu")
    assert steps.query(True) is steps.query(True) is not steps.query(False) and steps.key() is steps.key()


def test_a_layout_keeps_the_lists_of_every_length():
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
    monkeypatch.setattr(step_lists, "MOST_ROW_BLOCKS", N - 1)
    with pytest.raises(ValueError, match="32 query row blocks"):
        key_lists(paper, rows, None, N, N)


@pytest.mark.parametrize(
    "make, what", [(lambda *a: query_lists(*a, False), "steps"), (lambda *a: key_lists(*a, N), "words")]
)
def test_lists_that_kernels_could_not_count_are_refused(make, what, monkeypatch):
    pattern = ranges_of(PAPER, 4, 4)
    lists = make(pattern, range(N), None, N)
    length = len(lists.steps if what == "steps" else lists.words)
    monkeypatch.setattr(step_lists, "MOST_STEPS", length + 1)
    make(pattern, range(N), None, N)
    monkeypatch.setattr(step_lists, "MOST_STEPS", length)
    with pytest.raises(
        ValueError,
        match=f"lists of {length} {what}; expected fewer than {length}; use more context- or tensor-parallel",
    ):
        make(pattern, range(N), None, N)
