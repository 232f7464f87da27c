"""The warp that loads for the forward and for dQ on Hopper: the queries of a tile, then the keys and values of its
steps in the order of use.

    forward   Q of tile t | K 0 | K 1, V 0 | K 2, V 1 | ... | V of the last step | Q of tile t + 1 | ...
    dQ        Q, dO, LSE, delta of tile t | V 0, K 0 | V 1, K 1 | ... | Q, dO, LSE, delta of tile t + 1 | ...

Before it fills a stage it waits until both computing warpgroups have released what lay there (pipeline.py).

GRAD: dQ, which wants the gradients of the output beside the queries, and K and V of a step at the same time; the
forward wants V a stage later. SINGLE: a stage holds one key block instead of the two of a step, and both have a stage
of their own.
MORE: the rows from own_rows on lie in two further tensors, whose KV heads share their rows (blocks received from other
ranks).
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from s2_megatron.kernels.hopper.gluon_versions import aggregate, copy_to_shared, tma_load
from s2_megatron.kernels.hopper.memory import QueryTileMemory, load_block, load_pair
from s2_megatron.kernels.hopper.schedule import (
    BLOCK,
    blocks_of_ranges,
    count_steps,
    listed_step,
    listed_tile,
    marks_of,
    query_tile,
    shared_out,
    step_blocks,
)
from s2_megatron.kernels.hopper.steps import FLAG_BITS, FLAG_MASK
from s2_megatron.kernels.hopper.tokens import (
    blocks_with_tokens,
    free_token_step,
    load_rule,
    masked_token_step,
    token_steps,
)
from s2_megatron.kernels.hopper.work_tiles import QueryTile, send_step


@aggregate
class KeySources:
    """The descriptors that K and V are loaded by; with MORE those of the further tensors, else any."""

    k_desc: gl.base_value
    v_desc: gl.base_value
    k_more_desc: gl.base_value
    v_more_desc: gl.base_value
    own_rows: gl.tensor
    KV_STEP: gl.constexpr  # 0 where KV heads share the rows of K and V
    MORE: gl.constexpr


@aggregate
class RowSums:
    """GRAD: LSE and delta [batch * heads * rows], and where a tile's go."""

    lse_ptr: gl.tensor
    delta_ptr: gl.tensor
    lse_buffers: gl.shared_memory_descriptor
    delta_buffers: gl.shared_memory_descriptor
    heads: gl.tensor


@aggregate
class QueryLoads:
    """What is loaded, and where it goes: the memory of the computing warpgroups, seen as the boxes that TMA fills."""

    q_desc: gl.base_value
    grad_desc: gl.base_value  # read with GRAD
    sources: KeySources
    sums: RowSums  # read with GRAD
    memory: QueryTileMemory
    tile_boxes: gl.shared_memory_descriptor
    k_boxes: gl.shared_memory_descriptor
    v_boxes: gl.shared_memory_descriptor
    BLOCK_D: gl.constexpr
    GRAD: gl.constexpr
    SINGLE: gl.constexpr


@gluon.jit
def load_halves(loads, tiles, tile, rows, PACK: gl.constexpr):
    """The queries of a tile and its numbers, GRAD: the gradients of its output, LSE and delta as well. Returns the
    count of tiles after it."""
    memory = loads.memory
    slot = memory.tiles.stage(tiles)
    memory.tiles.wait_empty(tiles)
    barrier = memory.tiles.full_barrier(tiles)
    mbarrier.expect(barrier, (4 if loads.GRAD else 2) * BLOCK * loads.BLOCK_D * 2)
    for half in gl.static_range(2):
        row = tile.token + (tile.low + half * (1 - PACK)) * BLOCK
        tma_load(loads.q_desc, [tile.batch, tile.head + half * PACK, row, 0], barrier, loads.tile_boxes.index(slot * 2 + half))
        if loads.GRAD:
            tma_load(loads.grad_desc, [tile.batch, tile.head + half * PACK, row, 0], barrier, loads.tile_boxes.index(2 + half))
            # 4 bytes at a time: TMA wants 16, and a document may start anywhere.
            sums = loads.sums
            first = (tile.low + half * (1 - PACK)) * BLOCK
            lane = gl.arange(0, BLOCK, layout=gl.BlockedLayout([2], [32], [1], [0]))
            base = (tile.batch * sums.heads + tile.head + half * PACK).to(gl.int64) * rows + tile.token + first
            inside = first + lane < tile.length
            copy_to_shared(sums.lse_buffers.index(half), sums.lse_ptr + base + lane, mask=inside)
            copy_to_shared(sums.delta_buffers.index(half), sums.delta_ptr + base + lane, mask=inside)
    if loads.GRAD:
        async_copy.mbarrier_arrive(barrier)
    tile.send(memory.numbers, slot)
    mbarrier.arrive(barrier, count=1)
    return tiles + 1


@gluon.jit
def load_blocks(loads, desc, more_desc, boxes, pipeline, batch, kv_head, first_row, second_row, step, count,
                STEPS: gl.constexpr):
    """The two blocks of K or V that begin at first_row and second_row, or SINGLE the first one, into the stage whose
    turn it is; STEPS: with a step descriptor. count: of stages that were filled before."""
    SINGLE: gl.constexpr = loads.SINGLE
    BLOCK_D: gl.constexpr = loads.BLOCK_D
    stage = pipeline.stage(count)
    barrier = pipeline.full_barrier(count)
    pipeline.wait_empty(count)
    if STEPS:
        send_step(loads.memory.steps, stage, step)
        mbarrier.arrive(barrier, count=1)
    mbarrier.expect(barrier, (1 if SINGLE else 2) * BLOCK * BLOCK_D * 2)
    if loads.sources.MORE:
        CHUNKS: gl.constexpr = 1 if SINGLE else BLOCK_D // 64
        own_rows = loads.sources.own_rows
        first_box = stage * CHUNKS * (1 if SINGLE else 2)
        load_block(desc, more_desc, own_rows, batch, kv_head, first_row, boxes, first_box, barrier, CHUNKS)
        if not SINGLE:
            load_block(desc, more_desc, own_rows, batch, kv_head, second_row, boxes, first_box + 1, barrier, CHUNKS)
    elif SINGLE:
        tma_load(desc, [batch, kv_head, first_row, 0], barrier, boxes.index(stage))
    else:
        load_pair(desc, batch, kv_head, first_row, second_row, boxes, stage, barrier, BLOCK_D)


@gluon.jit
def load_keys(loads, batch, kv_head, first_row, second_row, step, count, STEPS: gl.constexpr):
    sources = loads.sources
    load_blocks(loads, sources.k_desc, sources.k_more_desc, loads.k_boxes, loads.memory.keys, batch, kv_head,
                first_row, second_row, step, count, STEPS)


@gluon.jit
def load_values(loads, batch, kv_head, first_row, second_row, step, count):
    sources = loads.sources
    load_blocks(loads, sources.v_desc, sources.v_more_desc, loads.v_boxes, loads.memory.values, batch, kv_head,
                first_row, second_row, step, count, STEPS=False)


@gluon.jit
def load_next(loads, batch, kv_head, first_row, second_row, first_before, second_before, step, count, number, numbers,
              LISTED: gl.constexpr):
    """Stage `number` of a tile's `numbers`: its K, and V of the one before, whose rows are `before`; GRAD: its own V.
    What is free first goes first. count: of stages before this one."""
    if loads.GRAD and not loads.SINGLE:
        load_values(loads, batch, kv_head, first_row, second_row, step, count)
    if number < numbers:
        load_keys(loads, batch, kv_head, first_row, second_row, step, count, LISTED)
    if loads.GRAD and loads.SINGLE:  # V has fewer stages than K
        load_values(loads, batch, kv_head, first_row, second_row, step, count)
    if not loads.GRAD:
        if (number > 0) & (number <= numbers):
            load_values(loads, batch, kv_head, first_before, second_before, step, count - 1)


@gluon.jit
def load_step(loads, batch, kv_head, first_row, second_row, first_before, second_before, step, count, number, steps,
              LISTED: gl.constexpr):
    """Both blocks of a step. before: the rows of the step before. count: of steps before this one. number: of the
    tile's `steps`."""
    if loads.SINGLE:
        load_next(loads, batch, kv_head, first_row, first_row, second_before, second_before, step & FLAG_MASK,
                  2 * count, 2 * number, 2 * steps, LISTED)
        load_next(loads, batch, kv_head, second_row, second_row, first_row, first_row, step >> FLAG_BITS,
                  2 * count + 1, 2 * number + 1, 2 * steps, LISTED)
    else:
        load_next(loads, batch, kv_head, first_row, second_row, first_before, second_before, step, count, number, steps,
                  LISTED)


@gluon.jit
def load_token_steps(loads, batch, kv_head, token, low, first_before, second_before, blocks, begin, end, steps, count, MASKED: gl.constexpr,
                     PACK: gl.constexpr):
    """TOKENS: the steps from `begin` to `end` of a tile, MASKED or free (then low: of the first free one). Returns the
    rows of the last one."""
    for number in range(begin, end):
        if MASKED:
            first_block, second_block, step = masked_token_step(number, low, blocks, PACK)
        else:
            first_block, second_block, step = free_token_step(number - low, blocks)
        first_row = token + first_block * BLOCK
        second_row = token + second_block * BLOCK
        load_step(loads, batch, kv_head, first_row, second_row, first_before, second_before, step, count + number, number, steps,
                  LISTED=True)
        first_before = first_row
        second_before = second_row
    return first_before, second_before


@gluon.jit
def walk_ranges(loads, schedule):
    """Every programs-th tile, whose steps follow from the ranges. Returns how many there were."""
    N_RANGES: gl.constexpr = schedule.N_RANGES
    PACK: gl.constexpr = schedule.PACK
    n_programs = schedule.n_programs
    count = 0
    tiles = 0
    backwards = 0
    for position in range(gl.program_id(0), n_programs, gl.num_programs(0)):
        index = shared_out(position, gl.program_id(0), gl.num_programs(0), n_programs, backwards)
        backwards ^= 1
        batch, head, token, length, low = query_tile(index, schedule)
        kv_head = head // schedule.RATIO * loads.sources.KV_STEP
        first_before = low
        second_before = low
        if schedule.TOKENS:
            rule = load_rule(schedule.tokens_ptr, head)
            blocks = blocks_with_tokens(schedule.ranges_ptr, head, low, rule, N_RANGES, PACK)
            masked_steps, free_steps, beside = token_steps(blocks, PACK)
        else:
            blocks = blocks_of_ranges(schedule.ranges_ptr, head, low, N_RANGES, PACK)
            masked_steps, free_steps = count_steps(blocks, N_RANGES, PACK)
        steps = gl.where(low * BLOCK < length, 1 + masked_steps + free_steps, 0)
        if steps > 0:
            if schedule.TOKENS:
                marks = 2 * beside + (rule.rests() << 2)
            else:
                marks = marks_of(masked_steps, low, blocks, N_RANGES)
            tile = QueryTile(
                batch=batch, head=head, token=token, length=length, low=low, masked_steps=masked_steps,
                free_steps=free_steps, marks=marks)
            tiles = load_halves(loads, tiles, tile, schedule.rows, PACK)
        numbers = steps if loads.GRAD else steps + gl.where(steps > 0, 1, 0)
        if schedule.TOKENS:  # in two loops: what masked steps take is too much for the registers of this warp
            free_from = gl.minimum(1 + masked_steps, numbers)
            first_before, second_before = load_token_steps(
                loads, batch, kv_head, token, low, first_before, second_before, blocks, 0, free_from, steps, count,
                MASKED=True, PACK=PACK)
            load_token_steps(loads, batch, kv_head, token, 1 + masked_steps, first_before, second_before, blocks, free_from, numbers,
                             steps, count, MASKED=False, PACK=PACK)
        else:
            for number in range(numbers):
                first_block, second_block = step_blocks(number, low, masked_steps, blocks, N_RANGES, PACK)
                first_row = token + first_block * BLOCK
                second_row = token + second_block * BLOCK
                load_step(loads, batch, kv_head, first_row, second_row, first_before, second_before, 0, count + number, number, steps,
                          LISTED=False)
                first_before = first_row
                second_before = second_row
        count += steps
    return tiles


@gluon.jit
def walk_lists(loads, schedule):
    """Whichever tile is next when a program begins with one: tiles differ, and a collective of other ranks' keys may
    hold multiprocessors for a while. Returns how many there were."""
    PACK: gl.constexpr = schedule.PACK
    count = 0
    tiles = 0
    index = gl.atomic_add(schedule.counter_ptr, 1)
    while index < schedule.n_programs:
        batch, head, token, length, low = query_tile(index, schedule)
        index = gl.atomic_add(schedule.counter_ptr, 1)
        kv_head = head // schedule.RATIO * loads.sources.KV_STEP
        first_before = low
        second_before = low
        steps_ptr, masked_steps, free_steps = listed_tile(schedule.lists, head // (1 + PACK), low // (2 - PACK), schedule.n_tiles)
        steps = masked_steps + free_steps
        marks = load_rule(schedule.tokens_ptr, head).rests() << 2 if schedule.TOKENS else 0
        tile = QueryTile(
            batch=batch, head=head, token=token, length=length, low=low, masked_steps=masked_steps,
            free_steps=free_steps, marks=marks)
        tiles = load_halves(loads, tiles, tile, schedule.rows, PACK)
        for number in range(steps if loads.GRAD else steps + gl.where(steps > 0, 1, 0)):
            entry = number if loads.GRAD else gl.minimum(number, steps - 1)
            first_block, second_block, step = listed_step(steps_ptr, entry)
            first_row = first_block * BLOCK
            second_row = second_block * BLOCK
            load_step(loads, batch, kv_head, first_row, second_row, first_before, second_before, step, count + number,
                      number, steps, LISTED=True)
            first_before = first_row
            second_before = second_row
        count += steps
    return tiles


@gluon.jit
def produce(loads, schedule):
    """All tiles of a program, then one that says that there are no more."""
    if schedule.LISTED:
        tiles = walk_lists(loads, schedule)
    else:
        tiles = walk_ranges(loads, schedule)
    pipeline = loads.memory.tiles
    pipeline.wait_empty(tiles)
    end = QueryTile(batch=0, head=0, token=0, length=0, low=0, masked_steps=0, free_steps=-1, marks=0)
    end.send(loads.memory.numbers, pipeline.stage(tiles))
    mbarrier.arrive(pipeline.full_barrier(tiles), count=2)
