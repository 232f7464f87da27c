"""Which blocks the kernels with a program per query tile (forward, dQ) visit by lists: their own schedule functions,
run as plain Python, against the pattern."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from s2_megatron.kernels.hopper import launch as hopper
from s2_megatron.kernels.hopper import query_loads as hopper_query_loads
from s2_megatron.kernels.step_descriptor import FLAG_BITS, FLAG_MASK, HALF_FLAGS
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import Placement, build_layout
from tests.gluon_emulator.schedule import NO_PIPELINE, STAND_IN, on_memory, plain_functions
from tests.ops.step_cases import PATTERNS, placements

SCHEDULE = plain_functions()


@pytest.fixture(
    params=list(product([False, True], [False, True])), ids=["forward", "forward-single", "dq", "dq-single"]
)
def query_walk(request, monkeypatch):
    """walk(pattern, pack, query rows, key rows, placement=None): tiles of a kernel with a program per query tile, as
    its loading warp goes through their lists. A tile: batch, head, first row block, masked steps, steps of (first slot,
    second slot, descriptor)."""
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 3)
    grad, single = request.param

    def walk(pattern, pack, query_rows, key_rows, placement=None):
        query, key = (
            torch.empty(2, pattern.num_heads, query_rows, 64),
            torch.empty(2, pattern.num_kv_heads, key_rows, 64),
        )
        call = hopper.Geometry(query, key, key, AttentionCall(build_layout(pattern), 1.0, placement=placement))
        launches = call.query_tiles(call.tiles.forward._replace(pack=bool(pack)))
        programs, arguments = launches.grid[0], launches.arguments
        assert arguments["LISTED"] and arguments["PACK"] == pack
        schedule = on_memory(arguments)
        tiles, loaded = [], []

        def load_halves(loads, count, tile, rows, with_pack):
            assert (tile.token, tile.length, count, with_pack) == (0, query_rows, len(tiles), pack)
            tile.blocks = []
            tiles.append(tile)
            return len(tiles)

        def load_blocks(loads, desc, more, boxes, pipeline, batch, kv_head, first_row, second_row, step, count, STEPS):
            assert (batch, kv_head) == (tiles[-1].batch, tiles[-1].head * pattern.num_kv_heads // pattern.num_heads)
            assert (desc == "K") == STEPS and count == sum(name == desc for name, _ in loaded)
            blocks = (first_row // 64,) if single else (first_row // 64, second_row // 64)
            loaded.append((desc, blocks))
            if desc == "K":
                tiles[-1].blocks += (
                    [(blocks[0], step)] if single else [(blocks[0], step & FLAG_MASK), (blocks[1], step >> FLAG_BITS)]
                )

        functions = plain_functions(hopper_query_loads, load_halves=load_halves, load_blocks=load_blocks)
        sources = functions.KeySources("K", "V", None, None, 0, arguments["KV_STEP"], arguments["MORE"])
        memory = SimpleNamespace(tiles=NO_PIPELINE, keys=None, values=None, numbers=None)
        loads = functions.QueryLoads("Q", "G", sources, None, memory, None, None, None, 64, grad, single)
        everything = []
        for program in range(programs):
            STAND_IN.program_id, STAND_IN.num_programs = (lambda axis, program=program: program), lambda axis: programs
            tiles.clear(), loaded.clear()
            functions.produce(loads, schedule)
            check_order(loaded, [len(tile.blocks) // (1 if single else 2) for tile in tiles], grad, single)
            everything += tiles
        for tile in everything:
            assert len(tile.blocks) % 2 == 0
            tile.steps = [
                (*slots, first + (second << FLAG_BITS))
                for (*slots, first, second) in (
                    (a[0], b[0], a[1], b[1]) for a, b in zip(tile.blocks[::2], tile.blocks[1::2])
                )
            ]
        return everything

    return walk


def check_order(loads, lengths, grad, single):
    """Values come in the order of their keys; in the forward a stage later than those, and at a tile's end with
    nothing."""
    keys, values = ([blocks for name, blocks in loads if name == kind] for kind in "KV")
    assert values == keys
    if grad:
        expected = ("KV" if single else "VK") * len(keys)
    else:
        expected = "".join("K" + "KV" * (length - 1) + "V" if length else "" for length in lengths)
    assert "".join(name for name, _ in loads) == expected


def check_masks(tiles, pattern, pack, query_blocks, slot_of_block):
    """Every tile once, and what its steps attend, token by token."""
    ratio, row, column = pattern.num_heads // pattern.num_kv_heads, np.arange(64), np.arange(128)
    lows = range(0, len(query_blocks), 1 if pack else 2)
    expected_tiles = product(range(2), range(0, pattern.num_heads, 1 + pack), lows)
    assert sorted((tile.batch, tile.head, tile.low) for tile in tiles) == sorted(expected_tiles)
    width = 64 * (1 + max(int(np.max(slot_of_block)), 0))
    for tile in tiles:
        assert len(tile.steps) == tile.masked_steps + tile.free_steps
        for half in range(2):
            head, at = (tile.head + half, tile.low) if pack else (tile.head, tile.low + half)
            expected, found = np.zeros((64, width), int), np.zeros((64, width), int)
            if at < len(query_blocks):
                for block in pattern.key_blocks(head, query_blocks[at]).tolist():
                    slot = slot_of_block[head // ratio][block]
                    if slot >= 0:
                        expected[:, slot * 64 : slot * 64 + 64] = np.tri(64) if block == query_blocks[at] else 1
            for number, (first, second, step) in enumerate(tile.steps):
                mask = SCHEDULE.step_mask(step, row, column, half)
                assert mask.any() == ((step & (HALF_FLAGS << half | HALF_FLAGS << FLAG_BITS + half)) != 0), (
                    "what the computing warpgroups ask"
                )
                assert number < tile.masked_steps or mask.all()
                for place, slot in enumerate((first, second)):
                    found[:, slot * 64 : slot * 64 + 64] += mask[:, place * 64 : place * 64 + 64]
            assert (found == expected).all(), (tile, half)


@pytest.mark.parametrize(
    "name, pack",
    [
        *product(("mask-shared", "mask-kv-heads", "mask-no-diagonal"), (0, 1)),
        ("mask-heads", 0),
        ("mask-thin", 0),
    ],
)
def test_listed_query_tiles_of_block_masks(name, pack, query_walk):
    pattern = PATTERNS[name]
    for n_blocks in (1, 5, 12):
        rows = 64 * n_blocks - 17
        slots = np.tile(np.arange(n_blocks), (pattern.num_kv_heads, 1))
        check_masks(query_walk(pattern, pack, rows, rows), pattern, pack, range(n_blocks), slots)


@pytest.mark.parametrize("pack", [0, 1])
@pytest.mark.parametrize("place", ["odd-chunks", "local-1of4", "remote-0of2", "remote-2of4"])
@pytest.mark.parametrize("name", ["paper", "not-efficient", "mask-kv-heads"])
def test_listed_query_tiles_of_placed_blocks(name, place, pack, query_walk):
    pattern = PATTERNS[name]
    query_blocks, key_slot, n_blocks, n_slots = placements(pattern)[place]
    placement = Placement.make(query_blocks, n_blocks, key_slot, pattern=pattern)
    check_masks(
        query_walk(pattern, pack, 64 * len(query_blocks), 64 * n_slots, placement),
        pattern,
        pack,
        query_blocks,
        key_slot,
    )
