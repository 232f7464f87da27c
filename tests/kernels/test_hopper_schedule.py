"""Which blocks the Hopper kernels visit: their own schedule functions, run as plain Python on a machine without a GPU,
against the pattern."""

from collections import Counter
from itertools import product
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from s2_megatron.kernels.hopper import backward_loads as hopper_backward_loads
from s2_megatron.kernels.hopper import launch as hopper
from s2_megatron.kernels.hopper import parts as hopper_parts
from s2_megatron.kernels.hopper.d256 import backward_loads as hopper_d256_backward_loads
from s2_megatron.kernels.step_descriptor import HALF_FLAGS, LAST_STEP, ROW_SHIFT
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import Placement, build_layout
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern
from tests.gluon_emulator.schedule import NO_PIPELINE, TABLE, joined, on_memory, plain_functions
from tests.ops.step_cases import PATTERNS, placements

SCHEDULE = plain_functions()


def some_head(random):
    strides, ends = [1], [random.randint(1, 6)]
    for _ in range(random.randint(0, 3)):
        strides.append(strides[-1] * random.choice((1, 2, 3, 4)))
        ends.append(ends[-1] + random.randint(1, 9))
    if random.random() < 0.7:
        ends[-1] = None
    return HeadPattern(tuple(zip(ends, strides)), random.randint(0, 40))


def load(heads, kv_heads):
    layout = build_layout(RangePattern(64, kv_heads, tuple(heads)))
    TABLE[:] = layout.ranges.flatten().tolist()
    return layout, layout.ranges.shape[1]


def visited(low, pack, n_ranges):
    """Per half of a query tile of head 0: how often each key block counts."""
    found = SCHEDULE.blocks_of_ranges(0, 0, low, n_ranges, pack)
    masked_steps, free_steps = SCHEDULE.count_steps(found, n_ranges, pack)
    marks = SCHEDULE.marks_of(masked_steps, low, found, n_ranges)
    assert 0 <= marks < 2**31
    seen = Counter(), Counter()
    for step in range(1 + masked_steps + free_steps):
        blocks = SCHEDULE.step_blocks(step, low, masked_steps, found, n_ranges, pack)
        for half in (0, 1):
            if step == 0 and pack:
                keep = True, marks & 2
            elif step == 0:
                keep = (half == 0 or marks & 1), half == 1
            elif step <= masked_steps:
                wanted = marks >> (4 * (step - 1) + 2 + half)
                keep = wanted & 1, wanted & 4
                assert all(wanted_block or block < low for block, wanted_block in zip(blocks, keep)), (
                    "a filler behind the document"
                )
            else:
                keep = True, True
            if step <= masked_steps:  # what the kernels with a block a stage have instead
                flags = [SCHEDULE.masked_flags(marks, 2 * step + place, pack) for place in (0, 1)]
                assert [bool(flag >> half & 1) for flag in flags] == [bool(wanted_block) for wanted_block in keep]
                assert [bool(flag >> 2 + half & 1) for flag in flags] == [
                    step == 0 and place == half * (1 - pack) for place in (0, 1)
                ]
            seen[half].update(block for block, wanted_block in zip(blocks, keep) if wanted_block)
    return seen


@pytest.mark.parametrize("pack", [0, 1])
def test_query_tiles_visit_what_the_pattern_attends(pack):
    random = Random(pack)
    for _ in range(400):
        head = some_head(random)
        _, n_ranges = load([head], 1)
        low = random.randrange(0, 40) if pack else 2 * random.randrange(0, 20)
        for half, counts in enumerate(visited(low, pack, n_ranges)):
            expected = Counter(head.key_blocks(low + half * (1 - pack)).tolist())
            assert counts == expected, (head, low, half)


@pytest.fixture
def key_walk(monkeypatch):
    """walk(pattern, query rows, key rows, batch=1, placement=None): (tiles, arguments) of dK and dV as the loading warp
    goes through them, with the arguments that they are launched with. A tile: batch, KV head, first slot, second slot,
    descriptors of its steps, where parts are joined. Also goes through them in passes of one block, for head dims above
    128, and compares these with the tiles."""
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)

    def walk(pattern, query_rows, key_rows, batch=1, placement=None):
        query, key = (
            torch.empty(batch, pattern.num_heads, query_rows, 64),
            torch.empty(batch, pattern.num_kv_heads, key_rows, 64),
        )
        arguments = hopper.Geometry(
            query, key, key, AttentionCall(build_layout(pattern), 1.0, placement=placement)
        ).key_tiles.arguments
        schedule = on_memory(arguments)
        tiles = []

        def load_keys(loads, count, tile, TOKENS):
            assert (tile.token, tile.length, count) == (0, query_rows, len(tiles)) and loads.KV_STEP == 1
            tile.steps = []
            tiles.append(tile)
            return count + 1

        def load_queries(loads, step, count, tile, schedule):
            assert tile is tiles[-1] and count == sum(len(tile.steps) for tile in tiles)
            tile.steps.append(step)
            return count + 1

        loads = SimpleNamespace(tiles=NO_PIPELINE, numbers=None, KV_STEP=arguments["KV_STEP"])
        produce = plain_functions(
            hopper_parts, hopper_backward_loads, load_keys=load_keys, load_queries=load_queries
        ).produce
        produce(loads, schedule)
        found, tiles = joined(tiles, arguments) if arguments["SPLIT"] else tiles, []

        d256_query, d256_key = torch.empty(*query.shape[:3], 192), torch.empty(*key.shape[:3], 192)
        call = AttentionCall(build_layout(pattern), 1.0, placement=placement)
        schedule = on_memory(hopper.Geometry(d256_query, d256_key, d256_key, call).key_tiles.arguments)
        produce = plain_functions(hopper_d256_backward_loads, load_pass=load_keys, load_queries=load_queries).produce
        produce(loads, schedule)
        check_passes(tiles, found)
        return found, arguments

    return walk


def check_passes(passes, tiles):
    """Each block of a tile in a pass of its own, with the descriptors of the steps that attend it, in any order."""
    expected = {}
    for tile in tiles:
        for half, block in enumerate((tile.first, tile.second)):
            if block * 64 < tile.key_length:
                steps = [
                    (step >> half & HALF_FLAGS) + (step & -1 << ROW_SHIFT)
                    for step in tile.steps
                    if step >> half & HALF_FLAGS
                ]
                expected[tile.batch, tile.kv_head, block, tile.key_length] = sorted(steps) or [0]
    assert len(passes) == len(expected)
    for one in passes:
        assert [step & LAST_STEP for step in one.steps] == [0] * (len(one.steps) - 1) + [LAST_STEP], (
            "last: once, at the end"
        )
        assert (
            sorted(step & ~LAST_STEP for step in one.steps)
            == expected[one.batch, one.kv_head, one.first, one.key_length]
        )


def check_steps(tiles, pattern, batches, query_blocks, slot_of_block):
    """Every present key block of every KV head lies in one tile, whose steps name every attended pair once.
    slot_of_block: [G, blocks]."""
    ratio, seen, blocks = pattern.num_heads // pattern.num_kv_heads, Counter(), Counter()
    block_in = [{slot: block for block, slot in enumerate(row) if slot >= 0} for row in slot_of_block]
    for tile in tiles:
        present = block_in[tile.kv_head]
        halves = [present.get(tile.first), present.get(tile.second)]
        assert halves[0] is not None and (halves[1] is not None) == (tile.second * 64 < tile.key_length)
        blocks.update((tile.batch, tile.kv_head, block) for block in halves if block is not None)
        assert [step & LAST_STEP for step in tile.steps] == [0] * (len(tile.steps) - 1) + [LAST_STEP], (
            "last: once, at the end"
        )
        assert all(step & 3 for step in tile.steps) or tile.steps == [LAST_STEP]
        for step in tile.steps:
            assert 0 <= step < 2**31
            row, member = SCHEDULE.row_block_of(step), step >> 24
            for half, block in enumerate(halves):
                if step >> half & 1:
                    seen[tile.batch, tile.kv_head * ratio + member, row, block] += 1
                assert bool(step >> 2 + half & 1) == (bool(step >> half & 1) and block == query_blocks[row])
    assert blocks == Counter(
        (batch, head, block) for batch in range(batches) for head, row in enumerate(block_in) for block in row.values()
    )
    expected = Counter()
    for head, (row, query_block) in product(range(pattern.num_heads), enumerate(query_blocks)):
        attended = [
            block
            for block in pattern.key_blocks(head, query_block).tolist()
            if slot_of_block[head // ratio][block] >= 0
        ]
        expected.update((batch, head, row, block) for batch in range(batches) for block in attended)
    assert seen == expected


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_key_tiles_of_ranges(mixed, key_walk, monkeypatch):
    """Also: tiles of the blocks that the last range has, which take long, come first."""
    random, split = Random(7 + mixed), 0
    for _ in range(200):
        processors = random.choice((1, 132))
        monkeypatch.setattr(hopper, "_multiprocessors", lambda device, processors=processors: processors)
        monkeypatch.setattr(hopper, "PART_STEPS", random.choice((2, 7, 64)))
        monkeypatch.setattr(hopper, "MOST_SUMS", random.choice((2**18, 14 * 2**20)))  # of head dim 64: 4 columns or all
        groups, ratio, batches = random.randint(1, 4), random.randint(1 + mixed, 3), random.randint(1, 2)
        heads = [some_head(random) for _ in range(groups * ratio if mixed else groups)]
        pattern = RangePattern(64, groups, tuple(heads if mixed else [head for head in heads for _ in range(ratio)]))
        n_blocks = random.randint(1, 40)
        rows = 64 * n_blocks - random.choice((0, 1, 63))
        tiles, arguments = key_walk(pattern, rows, rows, batches)
        assert arguments["MIXED"] == any(
            len(set(pattern.heads[i : i + ratio])) > 1 for i in range(0, groups * ratio, ratio)
        )
        check_steps(tiles, pattern, batches, range(n_blocks), np.tile(np.arange(n_blocks), (groups, 1)))
        split += arguments["n_split"] > 0
        if not arguments["MIXED"]:
            lasts = [pattern.heads[tile.kv_head * ratio] for tile in tiles]
            is_long = [(tile.first + head.offset) % head.ranges[-1][1] == 0 for tile, head in zip(tiles, lasts)]
            assert is_long == sorted(is_long, reverse=True)
    assert 20 < split < 180


@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("n_blocks", [64, 67, 80])
def test_long_columns_pass_by_the_same_queries_together(n_blocks, ratio, key_walk, monkeypatch):
    """Two columns of a program one behind the other: down from the end of the sequence, then up to it, with all others
    at every step."""
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 1)
    pattern = RangePattern(
        64, 3, tuple(HeadPattern(((4, 1), (None, 4)), offset) for offset in (0, 1, 3) for _ in range(ratio))
    )
    tiles, arguments = key_walk(pattern, 64 * n_blocks, 64 * n_blocks)
    assert arguments["fold"] == 1 and (arguments["n_long"] + arguments["n_rest"]) * 3 == arguments["n_programs"]
    for head in range(3):
        rows = [[SCHEDULE.row_block_of(step) for step in tile.steps] for tile in tiles if tile.kv_head == head]
        members = sum((block + pattern.heads[head * ratio].offset) % 4 == 0 for block in range(n_blocks))
        long, rest = rows[: (members + 1) // 2], rows[(members + 1) // 2 :]
        assert all(visits[0] == n_blocks - 1 and visits == sorted(visits, reverse=True) for visits in long[::2])
        assert all(visits[-1] == n_blocks - 1 and visits == sorted(visits) for visits in long[1::2])
        assert all(len(visits) <= 8 * ratio for visits in rest) and min(map(len, long)) <= 8 * ratio
        together = [len(down) + len(up) for down, up in zip(long[::2], long[1::2])]
        assert len(long) < 4 or max(together) - min(together) <= 4 * ratio, "one pair of blocks may lack its second"


def check_listed(tiles, arguments, pattern, batches, query_blocks, slots):
    check_steps(tiles, pattern, batches, query_blocks, slots)
    lengths = {}
    for tile in tiles:
        lengths.setdefault((tile.batch, tile.kv_head), []).append(len(tile.steps))
        tile.late = len(lengths[tile.batch, tile.kv_head]) > arguments["n_long"]
    assert [tile.late for tile in tiles] == sorted(tile.late for tile in tiles)
    assert all(counts == sorted(counts, reverse=True) for counts in lengths.values())


@pytest.mark.parametrize("name", [name for name, pattern in PATTERNS.items() if isinstance(pattern, BlockMaskPattern)])
@pytest.mark.parametrize("part_steps", [3, 64])
def test_key_tiles_of_block_masks(name, part_steps, key_walk, monkeypatch):
    monkeypatch.setattr(hopper, "PART_STEPS", part_steps)
    for n_blocks in (1, 2, 15, 32):
        rows = 64 * n_blocks - 17
        tiles, arguments = key_walk(PATTERNS[name], rows, rows, 2)
        check_listed(
            tiles,
            arguments,
            PATTERNS[name],
            2,
            range(n_blocks),
            np.tile(np.arange(n_blocks), (PATTERNS[name].num_kv_heads, 1)),
        )


@pytest.mark.parametrize("more_slots", [0, 3])
@pytest.mark.parametrize("part_steps", [2, 64])
@pytest.mark.parametrize("name", ["paper", "query-slide", "dense-kv-head", "uneven-heads", "mask-kv-heads"])
def test_key_tiles_of_placed_blocks(name, part_steps, more_slots, key_walk, monkeypatch):
    """Also with slots behind those that the placement names, which are no keys of it."""
    monkeypatch.setattr(hopper, "PART_STEPS", part_steps)
    pattern, split = PATTERNS[name], 0
    for query_blocks, key_slot, n_blocks, n_slots in placements(pattern).values():
        if key_slot is None:
            continue
        placement = Placement.make(query_blocks, n_blocks, key_slot, pattern=pattern)
        tiles, arguments = key_walk(pattern, 64 * len(query_blocks), 64 * (n_slots + more_slots), 2, placement)
        check_listed(tiles, arguments, pattern, 2, query_blocks, key_slot)
        split += arguments["n_split"] > 0
    assert (split > 0) == (part_steps == 2)


def test_columns_of_programs():
    """Every column of every unit once; the long ones of all units first."""
    for n_long, n_rest, head_group, groups in product((1, 2, 5), (0, 1, 7), (1, 2, 4), (1, 3)):
        units = head_group * groups
        programs = [
            SCHEDULE.column_of_program(index, n_long, n_rest, units, head_group)
            for index in range((n_long + n_rest) * units)
        ]
        assert [is_long for *_, is_long in programs] == [True] * (n_long * units) + [False] * (n_rest * units)
        columns = [(column + (0 if is_long else n_long), unit) for column, unit, is_long in programs]
        assert sorted(columns) == sorted(product(range(n_long + n_rest), range(units)))


def test_columns_beside_those_of_a_sink():
    """Also where no long ones follow, by whose number nothing is divided then."""
    schedule = SimpleNamespace(TOKENS=True, n_sink=1, n_long=0, n_rest=3, units=2, head_group=1)
    columns = [SCHEDULE.ordinary_column(index, schedule) for index in range(8)]
    assert columns[2:] == [SCHEDULE.column_of_program(index, 0, 3, 2, 1) for index in range(6)]


def test_keys_and_values_share_their_rows_together():
    """The kernels have one answer to whether the heads share them."""
    layout = build_layout(RangePattern.dense(64, 2, 2))
    tensor = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16)
    shared = tensor[:, :1].expand(1, 2, 128, 64)
    for key, value in ((tensor, tensor), (shared, shared), (tensor, shared), (shared, tensor)):
        reason = hopper.refusal(tensor, key, value, AttentionCall(layout, 1.0))
        assert (reason is None) == (key is value) and "only one of key and value" in (
            reason or "only one of key and value"
        )


def test_the_quotient_is_exact():
    """Two units in the last place to either side, as far as the GPU's division may be off, change no result below
    2**21."""
    random = np.random.default_rng(0)
    number = np.concatenate([random.integers(0, 2**21, 300000), np.arange(2**21 - 1000, 2**21)])
    wide = random.integers(1, 2**19, len(number))
    for divisor in (wide, np.maximum(number // np.maximum(wide % 50, 1), 1), 1 + wide % 64):
        exact = (number.astype(np.float32) + np.float32(0.5)) / divisor.astype(np.float32)
        for off in (-1, 0, 1):
            near = exact + off * np.spacing(exact)
            assert (near.astype(np.int32) == number // divisor).all()
