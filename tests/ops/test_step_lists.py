"""The step lists of query and key tiles against brute force: every list is read entry by entry and compared with
Pattern.key_blocks, and so is its order."""

from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2_megatron.kernels.step_descriptor import (
    ATTENDED,
    BOTH_HALVES,
    FLAG_MASK,
    LAST_STEP,
    MEMBER_SHIFT,
    OWN,
    ROW_MASK,
    ROW_SHIFT,
    SINK_SLOT,
    SLOT_BITS,
    SLOT_MASK,
)
from s2_megatron.ops import attended_blocks
from s2_megatron.ops.attended_blocks import heads_of, split_blocks
from s2_megatron.ops.key_steps import key_lists
from s2_megatron.ops.query_steps import query_lists
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import DENSE, HeadPattern
from s2_megatron.patterns.ranges import RangePattern
from tests.ops.step_cases import PATTERNS, attended, mask_of, placements, slot_of


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
            flags[key] = flags.get(key, 0) | ATTENDED << half | own * OWN << half
    entries = [(key[1], flags[key]) for key in sorted(flags)]
    free = [entry for entry in entries if entry[1] == BOTH_HALVES]
    left_over = [free.pop()] if len(free) % 2 else []
    own = [entry for entry in entries if entry[1] >= OWN]
    alone = [[entry for entry in entries if entry[1] == flag] for flag in (1, 2)]
    if free and not (own or left_over or alone[0] or alone[1]):
        left_over, free = free[-2:], free[:-2]
    masked = in_twos(own + left_over + alone[0] + alone[1])
    halves_of = [(first[1] | second[1]) & BOTH_HALVES for first, second in masked]
    ordered = [step for step, of in zip(masked, halves_of) if of == BOTH_HALVES]
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
                [(entry & SLOT_MASK, entry >> SLOT_BITS) for entry in step]
                for step in lists.steps[first : first + masked + free].tolist()
            ]
            halves = []
            for half, (head, query_block) in enumerate(tile_halves(query_blocks, unit, tile, pack)):
                halves.append({} if query_block is None else attended(pattern, head, query_block, key_slot))
                seen = [
                    (slot, bool(flags & OWN << half))
                    for step in steps
                    for slot, flags in step
                    if flags & ATTENDED << half
                ]
                # Every attended block of a half once, and its own one marked.
                assert sorted(seen) == sorted((slot, own) for (_, slot), own in halves[-1].items())
                assert all(flags & ATTENDED << half or not flags & OWN << half for step in steps for _, flags in step)
            assert all(flags == BOTH_HALVES for step in steps[masked:] for _, flags in step)
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
        steps_of = {}
        for first, second, start in columns:
            steps = []
            while not steps or not steps[-1] & LAST_STEP:
                steps.append(int(lists.steps[start + len(steps)]))
            assert not any(step & LAST_STEP for step in steps[:-1])
            read |= set(range(start, start + len(steps)))
            steps_of[first, second] = steps
            seen = [{}, {}]
            queries = [(step >> MEMBER_SHIFT, step >> ROW_SHIFT & ROW_MASK, step & FLAG_MASK) for step in steps]
            for member, row, flags in queries:
                for half in range(2):
                    if flags & ATTENDED << half:
                        seen[half][member, row] = bool(flags & OWN << half)
                    else:
                        assert not flags & OWN << half
            assert seen == [expected[first], expected.get(second, {})]
            assert all(flags for *_, flags in queries) or steps == [LAST_STEP]
            assert queries == sorted(queries, key=lambda query: (query[0], -query[1])) and len(
                {query[:2] for query in queries}
            ) == len(queries)
        assert sorted(steps_of) == sorted(pairs) and len(columns) == len(pairs), (
            "every slot in one column, neighbours of the order"
        )
        lengths[number] = [len(steps_of[first, second]) for first, second, _ in columns]
        # Longest first, and equally long ones as they were.
        assert [tuple(column[:2]) for column in columns] == sorted(pairs, key=lambda pair: -len(steps_of[pair]))
    assert read == set(range(len(lists.steps))) or not read
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


def in_parts(pattern, split, n_blocks):
    """The same attention as a mask of blocks of which `split` are one of the pattern's."""

    def attends(head, query, keys):
        return np.isin(keys // split, pattern.key_blocks(head, query // split)) & (keys <= query)

    heads, groups = pattern.num_heads, pattern.num_kv_heads
    return BlockMaskPattern.from_function(64, heads, groups, n_blocks * split, attends)


@pytest.mark.parametrize("name, split", [*((name, 2) for name in PATTERNS), ("several", 4), ("mask-no-diagonal", 4)])
def test_lists_of_parts_of_large_blocks(name, split):
    """Patterns of larger blocks: their lists are those of the mask of smaller blocks that attends the same tokens."""
    pattern, n_blocks = PATTERNS[name], 20
    if isinstance(pattern, BlockMaskPattern):
        pattern = mask_of(pattern.num_heads, 2, len(pattern.tables), n_blocks, diagonal=name != "mask-no-diagonal")
    pattern = replace(pattern, block_size=64 * split)
    mask = in_parts(pattern, split, n_blocks)
    for where, (query_blocks, key_slot, count, n_slots) in placements(pattern, 16).items():
        key_slot = None if key_slot is None else split_blocks(key_slot, split)
        place = split_blocks(query_blocks, split), key_slot, count * split
        if where == "odd":  # a sequence that ends inside of a large block
            place = place[0][:-1], None, count * split - 1
        heads = heads_of(pattern, n_blocks)
        pairs = pattern.num_heads // pattern.num_kv_heads % 2 == 0 and heads[::2] == heads[1::2]
        for pack in {False, pairs}:
            check_query(mask, *place[:2], query_lists(pattern, *place, pack, split), pack)
        check_key(mask, *place, n_slots * split, key_lists(pattern, *place, n_slots * split, split))


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
    monkeypatch.setattr(attended_blocks, "CELLS", cells)
    assert all(np.array_equal(array, part) for array, part in zip(whole, all_lists(), strict=True))


@pytest.mark.parametrize("first", [0, 1])
def test_the_slot_of_a_sink_is_named_beside_a_dense_head(first):
    """A dense head, to which a sink adds nothing, in the group of one that has it."""
    heads = (HeadPattern(DENSE, 0, None, 70, 64), HeadPattern(((1, 1),), 0, None, 70, 64))
    pattern = RangePattern(64, 1, (heads[first], heads[1 - first]))
    slots = key_lists(pattern, np.arange(4), None, 4, 4).columns[0, :, :2]
    assert sorted(slots.flatten().tolist()) == [0, 2, 3, 1 | SINK_SLOT]
