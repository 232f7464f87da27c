"""The warp that loads for the forward and for dQ on Hopper: the queries of a tile, then the keys and values of its steps in the order of use.

GRAD: dQ, which wants the gradients of the output beside the queries, and K and V of a step at the same time; the forward wants V a stage later.
SINGLE: a stage holds one key block instead of the two of a step, and both have a stage of their own.
MORE: the rows from own_rows on lie in two further tensors, whose KV heads share their rows (blocks received from other ranks). sources: the
descriptors of K and V, those of the further two (any where there are none), own_rows.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from s2_megatron.kernels.hopper.gluon_versions import copy_to_shared, tma_load
from s2_megatron.kernels.hopper.memory import load_block, load_pair, send_plan, send_word
from s2_megatron.kernels.hopper.schedule import (
    BLOCK,
    count_steps,
    listed_step,
    listed_tile,
    marks_of,
    plan_query_tile,
    query_tile,
    shared_out,
    step_blocks,
)


@gluon.jit
def load_halves(q_desc, grad_desc, tile_boxes, sums, plan, barriers, tiles, batch, head, token, length, low, masked_steps, free_steps, marks,
                rows, PACK: gl.constexpr, BLOCK_D: gl.constexpr, SLOTS: gl.constexpr, GRAD: gl.constexpr):
    """The queries of a tile and its plan, GRAD: the gradients of its output, LSE and delta as well. Returns the count of tiles after it.
    SLOTS: tiles in memory."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    slot = tiles % SLOTS
    mbarrier.wait(q_empty.index(slot), ((tiles // SLOTS) & 1) ^ 1)
    mbarrier.expect(q_full.index(slot), (4 if GRAD else 2) * BLOCK * BLOCK_D * 2)
    for half in gl.static_range(2):
        row = token + (low + half * (1 - PACK)) * BLOCK
        tma_load(q_desc, [batch, head + half * PACK, row, 0], q_full.index(slot), tile_boxes.index(slot * 2 + half))
        if GRAD:
            tma_load(grad_desc, [batch, head + half * PACK, row, 0], q_full.index(slot), tile_boxes.index(2 + half))
            # 4 bytes at a time: the copy engine wants 16, and a document may start anywhere.
            lse_ptr, delta_ptr, lse_buffers, delta_buffers, heads = sums
            first = (low + half * (1 - PACK)) * BLOCK
            lane = gl.arange(0, BLOCK, layout=gl.BlockedLayout([2], [32], [1], [0]))
            base = (batch * heads + head + half * PACK).to(gl.int64) * rows + token + first
            inside = first + lane < length
            copy_to_shared(lse_buffers.index(half), lse_ptr + base + lane, mask=inside)
            copy_to_shared(delta_buffers.index(half), delta_ptr + base + lane, mask=inside)
    if GRAD:
        async_copy.mbarrier_arrive(q_full.index(slot))
    send_plan(plan, slot, batch, head, token, length, low, masked_steps, free_steps, marks)
    mbarrier.arrive(q_full.index(slot), count=1)
    return tiles + 1


@gluon.jit
def load_blocks(sources, PART: gl.constexpr, boxes, full, empty, words, batch, kv_head, row_a, row_b, word, count, WORDS: gl.constexpr,
                MORE: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, SINGLE: gl.constexpr):
    """Two blocks, or SINGLE one, of K (PART 0) or V (1) into the stage whose turn it is; with a word, WORDS. count: of stages that were filled
    before."""
    stage = count % STAGES
    barrier = full.index(stage)
    desc = sources[PART]
    mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
    if WORDS:
        send_word(words, stage, word)
        mbarrier.arrive(barrier, count=1)
    mbarrier.expect(barrier, (1 if SINGLE else 2) * BLOCK * BLOCK_D * 2)
    if MORE:
        CHUNKS: gl.constexpr = 1 if SINGLE else BLOCK_D // 64
        load_block(desc, sources[2 + PART], sources[4], batch, kv_head, row_a, boxes, stage * CHUNKS * (1 if SINGLE else 2), barrier, CHUNKS)
        if not SINGLE:
            load_block(desc, sources[2 + PART], sources[4], batch, kv_head, row_b, boxes, stage * CHUNKS * 2 + 1, barrier, CHUNKS)
    elif SINGLE:
        tma_load(desc, [batch, kv_head, row_a, 0], barrier, boxes.index(stage))
    else:
        load_pair(desc, batch, kv_head, row_a, row_b, boxes, stage, barrier, BLOCK_D)


@gluon.jit
def load_next(sources, k_tiles, v_tiles, words, barriers, batch, kv_head, row_a, row_b, before_a, before_b, word, count, number, numbers,
              LISTED: gl.constexpr, MORE: gl.constexpr, BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
              GRAD: gl.constexpr, SINGLE: gl.constexpr):
    """Stage `number` of a tile's `numbers`: its K, and V of the one before, whose rows are `before`; GRAD: its own V. What is free first goes
    first. count: of stages before this one."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    if GRAD and not SINGLE:
        load_blocks(sources, 1, v_tiles, v_full, v_empty, words, batch, kv_head, row_a, row_b, word, count, False, MORE, BLOCK_D, V_STAGES,
                    SINGLE)
    if number < numbers:
        load_blocks(sources, 0, k_tiles, k_full, k_empty, words, batch, kv_head, row_a, row_b, word, count, LISTED, MORE, BLOCK_D, K_STAGES,
                    SINGLE)
    if GRAD and SINGLE:  # V has fewer stages than K
        load_blocks(sources, 1, v_tiles, v_full, v_empty, words, batch, kv_head, row_a, row_b, word, count, False, MORE, BLOCK_D, V_STAGES,
                    SINGLE)
    if not GRAD:
        if (number > 0) & (number <= numbers):
            load_blocks(sources, 1, v_tiles, v_full, v_empty, words, batch, kv_head, before_a, before_b, word, count - 1, False, MORE, BLOCK_D,
                        V_STAGES, SINGLE)


@gluon.jit
def load_step(sources, k_tiles, v_tiles, words, barriers, batch, kv_head, row_a, row_b, before_a, before_b, word, count, step, steps,
              LISTED: gl.constexpr, MORE: gl.constexpr, BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
              GRAD: gl.constexpr, SINGLE: gl.constexpr):
    """Both blocks of a step. before: the rows of the step before. count: of steps before this one."""
    if SINGLE:
        load_next(sources, k_tiles, v_tiles, words, barriers, batch, kv_head, row_a, row_a, before_b, before_b, word & 15, 2 * count,
                  2 * step, 2 * steps, LISTED, MORE, BLOCK_D, K_STAGES, V_STAGES, GRAD, SINGLE)
        load_next(sources, k_tiles, v_tiles, words, barriers, batch, kv_head, row_b, row_b, row_a, row_a, word >> 4, 2 * count + 1,
                  2 * step + 1, 2 * steps, LISTED, MORE, BLOCK_D, K_STAGES, V_STAGES, GRAD, SINGLE)
    else:
        load_next(sources, k_tiles, v_tiles, words, barriers, batch, kv_head, row_a, row_b, before_a, before_b, word, count, step, steps,
                  LISTED, MORE, BLOCK_D, K_STAGES, V_STAGES, GRAD, SINGLE)


@gluon.jit
def walk_ranges(q_desc, sources, grad_desc, tile_boxes, k_tiles, v_tiles, sums, words, plan, barriers, work, N_RANGES: gl.constexpr,
                RATIO: gl.constexpr, ORDERED: gl.constexpr, PACKED: gl.constexpr, PACK: gl.constexpr, KV_STEP: gl.constexpr,
                BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, SLOTS: gl.constexpr, GRAD: gl.constexpr,
                SINGLE: gl.constexpr):
    """Every programs-th tile, whose steps follow from the ranges. Returns how many there were."""
    ranges_ptr, order_ptr, documents_ptr, counter_ptr, rows, n_tiles, n_programs, batches, head_group = work
    count = 0
    tiles = 0
    backwards = 0
    for position in range(gl.program_id(0), n_programs, gl.num_programs(0)):
        index = shared_out(position, gl.program_id(0), gl.num_programs(0), n_programs, backwards)
        backwards ^= 1
        batch, head, token, length, low = query_tile(index, n_tiles, head_group, batches, order_ptr, documents_ptr, rows, ORDERED, PACKED, PACK)
        kv_head = head // RATIO * KV_STEP
        before_a = low
        before_b = low
        firsts, strides, ends, edges, bits, previous = plan_query_tile(ranges_ptr, head, low, N_RANGES, PACK)
        masked_steps, free_steps = count_steps(ends, bits, N_RANGES, PACK)
        steps = gl.where(low * BLOCK < length, 1 + masked_steps + free_steps, 0)
        if steps > 0:
            marks = marks_of(masked_steps, previous, low, firsts, strides, ends, edges, bits, N_RANGES)
            tiles = load_halves(q_desc, grad_desc, tile_boxes, sums, plan, barriers, tiles, batch, head, token, length, low, masked_steps,
                                free_steps, marks, rows, PACK, BLOCK_D, SLOTS, GRAD)
        for step in range(steps if GRAD else steps + gl.where(steps > 0, 1, 0)):
            block_a, block_b = step_blocks(step, low, masked_steps, firsts, strides, ends, edges, bits, N_RANGES, PACK)
            row_a = token + block_a * BLOCK
            row_b = token + block_b * BLOCK
            load_step(sources, k_tiles, v_tiles, words, barriers, batch, kv_head, row_a, row_b, before_a, before_b, 0, count + step, step,
                      steps, False, False, BLOCK_D, K_STAGES, V_STAGES, GRAD, SINGLE)
            before_a = row_a
            before_b = row_b
        count += steps
    return tiles


@gluon.jit
def walk_lists(q_desc, sources, grad_desc, tile_boxes, k_tiles, v_tiles, sums, words, plan, barriers, work, lists, RATIO: gl.constexpr,
               ORDERED: gl.constexpr, PACK: gl.constexpr, KV_STEP: gl.constexpr, MORE: gl.constexpr, BLOCK_D: gl.constexpr,
               K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, SLOTS: gl.constexpr, GRAD: gl.constexpr, SINGLE: gl.constexpr):
    """Whichever tile is next when a program begins with one: tiles differ, and a collective of other ranks' keys may hold multiprocessors for a
    while. Returns how many there were."""
    ranges_ptr, order_ptr, documents_ptr, counter_ptr, rows, n_tiles, n_programs, batches, head_group = work
    count = 0
    tiles = 0
    index = gl.atomic_add(counter_ptr, 1)
    while index < n_programs:
        batch, head, token, length, low = query_tile(index, n_tiles, head_group, batches, order_ptr, documents_ptr, rows, ORDERED, False, PACK)
        index = gl.atomic_add(counter_ptr, 1)
        kv_head = head // RATIO * KV_STEP
        before_a = low
        before_b = low
        steps_ptr, masked_steps, free_steps = listed_tile(lists, head // (1 + PACK), low // (2 - PACK), n_tiles)
        steps = masked_steps + free_steps
        tiles = load_halves(q_desc, grad_desc, tile_boxes, sums, plan, barriers, tiles, batch, head, token, length, low, masked_steps,
                            free_steps, 0, rows, PACK, BLOCK_D, SLOTS, GRAD)
        for step in range(steps if GRAD else steps + gl.where(steps > 0, 1, 0)):
            block_a, block_b, word = listed_step(steps_ptr, step if GRAD else gl.minimum(step, steps - 1))
            row_a = block_a * BLOCK
            row_b = block_b * BLOCK
            load_step(sources, k_tiles, v_tiles, words, barriers, batch, kv_head, row_a, row_b, before_a, before_b, word, count + step, step,
                      steps, True, MORE, BLOCK_D, K_STAGES, V_STAGES, GRAD, SINGLE)
            before_a = row_a
            before_b = row_b
        count += steps
    return tiles


@gluon.jit
def produce(q_desc, sources, grad_desc, tile_boxes, k_tiles, v_tiles, sums, words, plan, barriers, work, lists, N_RANGES: gl.constexpr,
            RATIO: gl.constexpr, ORDERED: gl.constexpr, PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr, KV_STEP: gl.constexpr,
            MORE: gl.constexpr, BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, SLOTS: gl.constexpr,
            GRAD: gl.constexpr, SINGLE: gl.constexpr):
    """All tiles of a program, then a plan that says so. Without GRAD neither grad_desc is read, nor sums, (LSE, delta, buffers for halves of
    both, heads)."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    if LISTED:
        tiles = walk_lists(q_desc, sources, grad_desc, tile_boxes, k_tiles, v_tiles, sums, words, plan, barriers, work, lists, RATIO, ORDERED,
                           PACK, KV_STEP, MORE, BLOCK_D, K_STAGES, V_STAGES, SLOTS, GRAD, SINGLE)
    else:
        tiles = walk_ranges(q_desc, sources, grad_desc, tile_boxes, k_tiles, v_tiles, sums, words, plan, barriers, work, N_RANGES, RATIO,
                            ORDERED, PACKED, PACK, KV_STEP, BLOCK_D, K_STAGES, V_STAGES, SLOTS, GRAD, SINGLE)
    slot = tiles % SLOTS
    mbarrier.wait(q_empty.index(slot), ((tiles // SLOTS) & 1) ^ 1)
    send_plan(plan, slot, 0, 0, 0, 0, 0, 0, -1, 0)
    mbarrier.arrive(q_full.index(slot), count=2)
