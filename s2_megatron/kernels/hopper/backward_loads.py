"""The warp that loads for dK and dV on Hopper: the keys of a tile, then its queries with their gradients, and what each
step is.

    K, V of a tile | Q, LSE, descriptor of step 0 | dO, delta of step 0 | Q, LSE, descriptor of step 1 | ... | next tile

Before it fills a stage it waits until all that read it have released what lay there (pipeline.py).
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from s2_megatron.kernels.hopper.columns import (
    codes_of_block,
    key_step,
    key_tile,
    listed_column,
    query_run,
    rests_of_blocks,
    run_end,
    sink_columns,
)
from s2_megatron.kernels.hopper.gluon_versions import aggregate, copy_to_shared, tma_load
from s2_megatron.kernels.hopper.parts import part_of_program, place_of_column, steps_of_column, visits_of_part
from s2_megatron.kernels.hopper.pipeline import Pipeline, make_pipeline
from s2_megatron.kernels.hopper.schedule import BLOCK
from s2_megatron.kernels.hopper.steps import LAST_STEP, MEMBER_SHIFT, ROW_SHIFT, goes_on, member_of, row_block_of
from s2_megatron.kernels.hopper.tokens import load_rule
from s2_megatron.kernels.hopper.work_tiles import KeyTile, send_step


@aggregate
class StepMemory:
    """Shared memory for the steps of key tiles: stages of queries with LSE and the step's descriptor, and of gradients
    with delta."""

    q_buffers: gl.shared_memory_descriptor  # [stages, 64, BLOCK_D]
    grad_buffers: gl.shared_memory_descriptor
    lse_buffers: gl.shared_memory_descriptor  # [stages, 64]
    delta_buffers: gl.shared_memory_descriptor
    steps: gl.shared_memory_descriptor
    queries: Pipeline
    grads: Pipeline


@gluon.jit
def step_memory(dtype: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr):
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_buffers = gl.allocate_shared_memory(dtype, [Q_STAGES, BLOCK, BLOCK_D], matrix)
    grad_buffers = gl.allocate_shared_memory(dtype, [GRAD_STAGES, BLOCK, BLOCK_D], matrix)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK], vector)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [GRAD_STAGES, BLOCK], vector)
    steps = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], vector)
    queries = make_pipeline(STAGES=Q_STAGES, FILLS=2, READERS=2)  # filled by TMA and by the descriptor
    grads = make_pipeline(
        STAGES=GRAD_STAGES, FILLS=2, READERS=2)  # filled by TMA, and an arrival after the copies of delta
    return StepMemory(
        q_buffers=q_buffers, grad_buffers=grad_buffers, lse_buffers=lse_buffers, delta_buffers=delta_buffers,
        steps=steps, queries=queries, grads=grads)


@aggregate
class KeyLoads:
    """What is loaded, and where it goes: the memory of the computing warpgroups, seen as the boxes that TMA fills."""

    q_desc: gl.base_value
    k_desc: gl.base_value
    v_desc: gl.base_value
    grad_desc: gl.base_value
    lse_ptr: gl.tensor
    delta_ptr: gl.tensor
    memory: StepMemory
    tiles: Pipeline
    numbers: gl.shared_memory_descriptor  # of the work tiles
    q_boxes: gl.shared_memory_descriptor
    grad_boxes: gl.shared_memory_descriptor
    k_boxes: gl.shared_memory_descriptor
    v_boxes: gl.shared_memory_descriptor
    KV_STEP: gl.constexpr  # 0 where KV heads share the rows of K and V
    BLOCK_D: gl.constexpr


@gluon.jit
def load_keys(loads, tiles, tile, TOKENS: gl.constexpr):
    """Both halves of a key tile, and its numbers. Returns the count of tiles after it."""
    slot = loads.tiles.stage(tiles)
    head = tile.kv_head * loads.KV_STEP
    first_row = tile.token + tile.first * BLOCK
    # For a second block that does not exist, something finite.
    second_row = gl.where(tile.second * BLOCK < tile.key_length, tile.token + tile.second * BLOCK, first_row)
    loads.tiles.wait_empty(tiles)
    barrier = loads.tiles.full_barrier(tiles)
    mbarrier.expect(barrier, 4 * BLOCK * loads.BLOCK_D * 2)
    tma_load(loads.k_desc, [tile.batch, head, first_row, 0], barrier, loads.k_boxes.index(slot * 2))
    tma_load(loads.k_desc, [tile.batch, head, second_row, 0], barrier, loads.k_boxes.index(slot * 2 + 1))
    tma_load(loads.v_desc, [tile.batch, head, first_row, 0], barrier, loads.v_boxes.index(slot * 2))
    tma_load(loads.v_desc, [tile.batch, head, second_row, 0], barrier, loads.v_boxes.index(slot * 2 + 1))
    tile.send(loads.numbers, slot, TOKENS)
    mbarrier.arrive(barrier, count=1)
    return tiles + 1


@gluon.jit
def load_queries(loads, step, count, tile, schedule):
    """A step of a tile: queries, LSE, gradients, delta. Returns the count of steps after it."""
    memory = loads.memory
    # 4 bytes at a time: TMA wants 16, and a document may start anywhere. Rows that are masked out become zeros (in PTX
    # a source of size 0), which they have to be: they are multiplied with the zeros of queries behind the sequence.
    lane = gl.arange(0, BLOCK, layout=gl.BlockedLayout([2], [32], [1], [0]))
    head = tile.kv_head * schedule.RATIO + member_of(step)
    row = row_block_of(step) * BLOCK
    sums = (tile.batch * schedule.heads + head).to(gl.int64) * schedule.rows + tile.token + row
    inside = row + lane < tile.length
    stage = memory.queries.stage(count)
    memory.queries.wait_empty(count)
    barrier = memory.queries.full_barrier(count)
    mbarrier.expect(barrier, BLOCK * loads.BLOCK_D * 2)
    tma_load(loads.q_desc, [tile.batch, head, tile.token + row, 0], barrier, loads.q_boxes.index(stage))
    copy_to_shared(memory.lse_buffers.index(stage), loads.lse_ptr + sums + lane, mask=inside)
    async_copy.mbarrier_arrive(barrier)
    send_step(memory.steps, stage, step)
    mbarrier.arrive(barrier, count=1)
    stage = memory.grads.stage(count)
    memory.grads.wait_empty(count)
    barrier = memory.grads.full_barrier(count)
    mbarrier.expect(barrier, BLOCK * loads.BLOCK_D * 2)
    tma_load(loads.grad_desc, [tile.batch, head, tile.token + row, 0], barrier, loads.grad_boxes.index(stage))
    copy_to_shared(memory.delta_buffers.index(stage), loads.delta_ptr + sums + lane, mask=inside)
    async_copy.mbarrier_arrive(barrier)
    mbarrier.arrive(barrier, count=1)
    return count + 1


@gluon.jit
def walk_lists(loads, schedule):
    """All tiles of a program, whose steps come as lists. Returns how many there were."""
    SPLIT: gl.constexpr = schedule.SPLIT
    count = 0
    tiles = 0
    index = gl.atomic_add(schedule.counter_ptr, 1)
    while index < schedule.n_programs:
        part = 0
        if SPLIT:
            index, part = part_of_program(index, schedule)
            place = place_of_column(index, schedule)
        exists = True
        link = 0
        if SPLIT:
            n_steps = steps_of_column(index, place, schedule)
            part_first, part_end, link = visits_of_part(part, gl.where(n_steps > 0, place, -1), gl.maximum(n_steps, 1), schedule.part_steps)
            exists = part_first < part_end
        batch, kv_head, first, second, entry, rests = listed_column(index, schedule)
        index = gl.atomic_add(schedule.counter_ptr, 1)
        if (first * BLOCK < schedule.key_rows) & exists:
            steps_ptr = schedule.lists.steps_ptr + entry
            if SPLIT:
                steps_ptr += part_first
                left = gl.where(n_steps > 0, part_end - part_first, 1 << 28)
            step = gl.load(steps_ptr)
            tile = KeyTile(
                batch=batch, kv_head=kv_head, token=0, length=schedule.rows, first=first, second=second,
                key_length=schedule.key_rows, link=link, rests=rests)
            tiles = load_keys(loads, tiles, tile, schedule.TOKENS)
            more = 1
            while more != 0:
                steps_ptr += 1
                following = gl.load(steps_ptr)  # the lists end with a step too many
                if SPLIT:
                    left -= 1
                    step |= gl.where(left == 0, LAST_STEP, 0)
                count = load_queries(loads, step, count, tile, schedule)
                more = goes_on(step)
                step = following
    return tiles


@gluon.jit
def walk_ranges(loads, schedule):
    """All tiles of a program, whose steps follow from the ranges. Returns how many there were."""
    SPLIT: gl.constexpr = schedule.SPLIT
    RATIO: gl.constexpr = schedule.RATIO
    # Query heads of one pattern visit a key tile together, a query block at a time, others one after the other.
    RUNS: gl.constexpr = RATIO if schedule.MIXED else 1
    TOGETHER: gl.constexpr = 1 if schedule.MIXED else RATIO
    count = 0
    tiles = 0
    upward = 0
    program = gl.atomic_add(schedule.counter_ptr, 1)
    while program < schedule.n_programs:
        index = program
        part = 0
        if SPLIT:
            index, part = part_of_program(program, schedule)
            place = place_of_column(index, schedule)
        batch, kv_head, token, length, first, second = key_tile(index, upward, schedule)
        direction = upward
        ordinary = index - sink_columns(schedule) if schedule.TOKENS else index
        if (schedule.fold != 0) & (ordinary >= 0) & (ordinary < schedule.n_long * schedule.units) & (upward == 0):
            upward = 1
        else:
            program = gl.atomic_add(schedule.counter_ptr, 1)
            upward = 0
        n_blocks = (length + BLOCK - 1) // BLOCK
        runs = gl.where(first < n_blocks, RUNS, 0)
        link = 0
        passed = 0  # visits of the runs before
        if SPLIT:
            column_visits = 0
            for run in range(runs):
                steps, top, gap, first_end, second_end = query_run(first, second, n_blocks, schedule, kv_head * RATIO + run)
                column_visits += steps * TOGETHER
            part_first, part_end, link = visits_of_part(part, place, column_visits, schedule.part_steps)
            runs = gl.where(part_first < part_end, runs, 0)
            passed = 0
        rests = 0
        if schedule.TOKENS:
            rule = load_rule(schedule.tokens_ptr, kv_head * RATIO)
            rests = rests_of_blocks(first, second, rule)
        tile = KeyTile(
            batch=batch, kv_head=kv_head, token=token, length=length, first=first, second=second, key_length=length,
            link=link, rests=rests)
        if runs > 0:
            tiles = load_keys(loads, tiles, tile, schedule.TOKENS)
        for run in range(runs):
            steps, top, gap, first_end, second_end = query_run(first, second, n_blocks, schedule, kv_head * RATIO + run)
            visits = steps * TOGETHER
            if schedule.TOKENS:
                whole_end = run_end(first, n_blocks, schedule.ranges_ptr, kv_head * RATIO + run, schedule.N_RANGES)
                first_codes = codes_of_block(first, n_blocks, rule, whole_end)
                whole_end = run_end(second, n_blocks, schedule.ranges_ptr, kv_head * RATIO + run, schedule.N_RANGES)
                second_codes = codes_of_block(second, n_blocks, rule, whole_end)
            low = 0
            high = visits
            if SPLIT:
                low = gl.minimum(gl.maximum(part_first - passed, 0), visits)
                high = gl.minimum(gl.maximum(part_end - passed, 0), visits)
            for visit in range(low, high):
                number = visit // TOGETHER
                member = run + visit - number * TOGETHER
                query_block = top - 1 - gl.where(direction != 0, steps - 1 - number, number)
                query_block -= gl.where(query_block < second, gap, 0)
                last = (run == RUNS - 1) & (visit == visits - 1)
                if SPLIT:
                    last = passed + visit == part_end - 1
                if schedule.TOKENS:
                    code = first_codes.at(query_block) + (second_codes.at(query_block) << 1)
                    step = code + gl.where(last, LAST_STEP, 0) + (query_block << ROW_SHIFT) + (member << MEMBER_SHIFT)
                else:
                    step = key_step(query_block, member, first, second, first_end, second_end, last)
                count = load_queries(loads, step, count, tile, schedule)
            if SPLIT:
                passed += visits
    return tiles


@gluon.jit
def produce(loads, schedule):
    """All tiles of a program, then one that says that there are no more."""
    if schedule.LISTED:
        tiles = walk_lists(loads, schedule)
    else:
        tiles = walk_ranges(loads, schedule)
    end_tiles(loads, tiles, schedule.TOKENS)


@gluon.jit
def end_tiles(loads, tiles, TOKENS: gl.constexpr):
    loads.tiles.wait_empty(tiles)
    end = KeyTile(batch=0, kv_head=0, token=0, length=0, first=0, second=0, key_length=-1, link=0, rests=0)
    end.send(loads.numbers, loads.tiles.stage(tiles), TOKENS)
    mbarrier.arrive(loads.tiles.full_barrier(tiles), count=2)
