"""The warp that loads for dK and dV on Hopper for head dims above 128: each block of a key tile in a pass of its own,
the first one first.

A pass has the descriptors of the tile's steps as if there was no other block: the flags of half 0 are its own, and
steps of the other block alone are left out.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from s2_megatron.kernels.hopper.backward_loads import end_tiles, load_queries
from s2_megatron.kernels.hopper.columns import (
    codes_of_block,
    key_step,
    key_tile,
    listed_column,
    rests_of_blocks,
    run_end,
    touched_end,
)
from s2_megatron.kernels.hopper.gluon_versions import tma_load
from s2_megatron.kernels.hopper.schedule import BLOCK
from s2_megatron.kernels.hopper.steps import HALF_FLAGS, LAST_STEP, ROW_SHIFT, goes_on
from s2_megatron.kernels.hopper.tokens import load_rule
from s2_megatron.kernels.hopper.work_tiles import KeyTile


@gluon.jit
def load_pass(loads, passes, tile, TOKENS: gl.constexpr):
    """The first block of a key tile, and its numbers. Returns the count of passes after it."""
    barrier = loads.tiles.full.index(0)
    loads.tiles.wait_empty(passes)
    mbarrier.expect(barrier, 2 * BLOCK * loads.BLOCK_D * 2)
    row = tile.token + tile.first * BLOCK
    tma_load(loads.k_desc, [tile.batch, tile.kv_head * loads.KV_STEP, row, 0], barrier, loads.k_boxes.index(0))
    tma_load(loads.v_desc, [tile.batch, tile.kv_head * loads.KV_STEP, row, 0], barrier, loads.v_boxes.index(1))
    tile.send(loads.numbers, 0, TOKENS)
    mbarrier.arrive(barrier, count=1)
    return passes + 1


@gluon.jit
def walk_lists(loads, schedule):
    """All passes of a program, whose steps come as lists. Returns how many there were."""
    count = 0
    passes = 0
    index = gl.atomic_add(schedule.counter_ptr, 1)
    while index < schedule.n_programs:
        batch, kv_head, first, second, entry, rests = listed_column(index, schedule)
        index = gl.atomic_add(schedule.counter_ptr, 1)
        for half in range(2):
            slot = gl.where(half == 0, first, second)
            if slot * BLOCK < schedule.key_rows:
                rests_of_slot = (rests & 63) + ((rests >> (6 + 6 * half)) & 63) * 64
                tile = KeyTile(
                    batch=batch, kv_head=kv_head, token=0, length=schedule.rows, first=slot, second=0,
                    key_length=schedule.key_rows, link=0, rests=rests_of_slot)
                passes = load_pass(loads, passes, tile, schedule.TOKENS)
                steps_ptr = schedule.lists.steps_ptr + entry
                following = gl.load(steps_ptr)
                more = 1
                # The step that is sent when the next one is known; this one attends nothing.
                due = LAST_STEP
                while more != 0:
                    step = following
                    steps_ptr += 1
                    following = gl.load(steps_ptr)  # the lists end with a step too many
                    more = goes_on(step)
                    step = (step & -(1 << ROW_SHIFT)) + ((step >> half) & HALF_FLAGS)
                    if (step & HALF_FLAGS) != 0:
                        if (due & HALF_FLAGS) != 0:
                            count = load_queries(loads, due, count, tile, schedule)
                        due = step
                count = load_queries(loads, due | LAST_STEP, count, tile, schedule)
    return passes


@gluon.jit
def walk_ranges(loads, schedule):
    """All passes of a program, whose steps follow from the ranges. Returns how many there were."""
    RATIO: gl.constexpr = schedule.RATIO
    count = 0
    passes = 0
    index = gl.atomic_add(schedule.counter_ptr, 1)
    while index < schedule.n_programs:
        batch, kv_head, token, length, first, second = key_tile(index, 0, schedule)
        index = gl.atomic_add(schedule.counter_ptr, 1)
        n_blocks = (length + BLOCK - 1) // BLOCK
        for half in range(2):
            block = gl.where(half == 0, first, second)
            members = gl.where(block < n_blocks, RATIO, 0)
            rests = 0
            if schedule.TOKENS:
                rule = load_rule(schedule.tokens_ptr, kv_head * RATIO)
                rests = rests_of_blocks(block, n_blocks, rule)
            tile = KeyTile(
                batch=batch, kv_head=kv_head, token=token, length=length, first=block, second=0, key_length=length,
                link=0, rests=rests)
            if members > 0:
                passes = load_pass(loads, passes, tile, schedule.TOKENS)
            for member in range(members):
                whole_end = run_end(block, n_blocks, schedule.ranges_ptr, kv_head * RATIO + member, schedule.N_RANGES)
                end = whole_end
                if schedule.TOKENS:
                    end = touched_end(block, whole_end, n_blocks, rule)
                    codes = codes_of_block(block, n_blocks, rule, whole_end)
                for number in range(end - block):  # from the end of the run on, one query head after the other
                    last = (member == RATIO - 1) & (number == end - block - 1)
                    step = key_step(end - 1 - number, member, block, n_blocks, end, 0, last)
                    if schedule.TOKENS:
                        step = (step & ~HALF_FLAGS) + codes.at(end - 1 - number)
                    count = load_queries(loads, step, count, tile, schedule)
    return passes


@gluon.jit
def produce(loads, schedule):
    """All passes of a program, then one that says that there are no more."""
    if schedule.LISTED:
        passes = walk_lists(loads, schedule)
    else:
        passes = walk_ranges(loads, schedule)
    end_tiles(loads, passes, schedule.TOKENS)
