"""The warp that loads for dK and dV on Hopper: the keys of a tile, then its queries with their gradients, and what each step is."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from s2_megatron.kernels.hopper.columns import key_tile, listed_column, query_block_of, query_run, step_word
from s2_megatron.kernels.hopper.gluon_versions import copy_to_shared, tma_load
from s2_megatron.kernels.hopper.memory import send_plan, send_word
from s2_megatron.kernels.hopper.parts import part_of_program, place_of_column, visits_of_part, words_of_column
from s2_megatron.kernels.hopper.schedule import BLOCK


@gluon.jit
def load_keys(k_desc, v_desc, k_tiles, v_tiles, plan, barriers, tiles, batch, kv_head, token, length, first, second, key_length,
              link, KV_STEP: gl.constexpr, BLOCK_D: gl.constexpr):
    """Both halves of a key tile, and its plan. link: see parts.py. Returns the count of tiles after it."""
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty, ds_full, ds_empty = barriers
    slot = tiles % 2
    head = kv_head * KV_STEP
    row_a = token + first * BLOCK
    row_b = gl.where(second * BLOCK < key_length, token + second * BLOCK, row_a)  # a second block that does not exist: something finite
    mbarrier.wait(kv_empty.index(slot), ((tiles // 2) & 1) ^ 1)
    barrier = kv_full.index(slot)
    mbarrier.expect(barrier, 4 * BLOCK * BLOCK_D * 2)
    tma_load(k_desc, [batch, head, row_a, 0], barrier, k_tiles.index(slot * 2))
    tma_load(k_desc, [batch, head, row_b, 0], barrier, k_tiles.index(slot * 2 + 1))
    tma_load(v_desc, [batch, head, row_a, 0], barrier, v_tiles.index(slot * 2))
    tma_load(v_desc, [batch, head, row_b, 0], barrier, v_tiles.index(slot * 2 + 1))
    send_plan(plan, slot, batch, kv_head, token, length, first, second, key_length, link)
    mbarrier.arrive(barrier, count=1)
    return tiles + 1


@gluon.jit
def load_queries(word, count, q_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, lse_buffers, delta_buffers, words, step_barriers,
                 batch, kv_head, token, length, heads, rows, RATIO: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr,
                 GRAD_STAGES: gl.constexpr):
    """A step: queries, LSE, gradients, delta. Returns the count of steps after it."""
    q_full, q_empty, grad_full, grad_empty = step_barriers
    # 4 bytes at a time: the copy engine wants 16, and a document may start anywhere. Rows that are masked out become zeros (in PTX a source of
    # size 0), which they have to be: they are multiplied with the zeros of queries behind the sequence.
    lane = gl.arange(0, BLOCK, layout=gl.BlockedLayout([2], [32], [1], [0]))
    head = kv_head * RATIO + (word >> 24)
    row = query_block_of(word) * BLOCK
    sums = (batch * heads + head).to(gl.int64) * rows + token + row
    inside = row + lane < length
    stage = count % Q_STAGES
    mbarrier.wait(q_empty.index(stage), ((count // Q_STAGES) & 1) ^ 1)
    barrier = q_full.index(stage)
    mbarrier.expect(barrier, BLOCK * BLOCK_D * 2)
    tma_load(q_desc, [batch, head, token + row, 0], barrier, q_tiles.index(stage))
    copy_to_shared(lse_buffers.index(stage), lse_ptr + sums + lane, mask=inside)
    async_copy.mbarrier_arrive(barrier)
    send_word(words, stage, word)
    mbarrier.arrive(barrier, count=1)
    stage = count % GRAD_STAGES
    mbarrier.wait(grad_empty.index(stage), ((count // GRAD_STAGES) & 1) ^ 1)
    barrier = grad_full.index(stage)
    mbarrier.expect(barrier, BLOCK * BLOCK_D * 2)
    tma_load(grad_desc, [batch, head, token + row, 0], barrier, grad_tiles.index(stage))
    copy_to_shared(delta_buffers.index(stage), delta_ptr + sums + lane, mask=inside)
    async_copy.mbarrier_arrive(barrier)
    mbarrier.arrive(barrier, count=1)
    return count + 1


@gluon.jit
def produce(q_desc, k_desc, v_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, k_tiles, v_tiles, lse_buffers, delta_buffers, words,
            plan, barriers, columns, ranges_ptr, lists, heads, rows, key_rows, N_RANGES: gl.constexpr, RATIO: gl.constexpr,
            ORDERED: gl.constexpr, PACKED: gl.constexpr, MIXED: gl.constexpr, LISTED: gl.constexpr, SPLIT: gl.constexpr,
            KV_STEP: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr):
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty, ds_full, ds_empty = barriers
    step_barriers = (q_full, q_empty, grad_full, grad_empty)
    # Query heads of one pattern visit a key tile together, a query block at a time, others one after the other.
    RUNS: gl.constexpr = RATIO if MIXED else 1
    TOGETHER: gl.constexpr = 1 if MIXED else RATIO
    counter_ptr, n_programs, fold, n_long, n_rest, units, batches, head_group, n_split, part_steps, order_ptr, documents_ptr, \
        distance_ptr = columns
    count = 0
    tiles = 0
    upward = 0
    index = gl.atomic_add(counter_ptr, 1)
    while index < n_programs:
        part = 0
        if SPLIT:
            index, part = part_of_program(index, n_split, n_programs, n_long, n_rest, units, head_group)
            place = place_of_column(index, n_split, n_long, n_rest, units, head_group)
        if LISTED:
            exists = True
            link = 0
            if SPLIT:
                n_words = words_of_column(index, place, n_long, n_rest, units, batches, head_group, lists)
                part_first, part_end, link = visits_of_part(part, gl.where(n_words > 0, place, -1), gl.maximum(n_words, 1), part_steps)
                exists = part_first < part_end
            batch, kv_head, first, second, entry = listed_column(index, n_long, n_rest, units, batches, head_group, lists)
            index = gl.atomic_add(counter_ptr, 1)
            if (first * BLOCK < key_rows) & exists:
                words_ptr = lists[2] + entry
                if SPLIT:
                    words_ptr += part_first
                    left = gl.where(n_words > 0, part_end - part_first, 1 << 28)
                word = gl.load(words_ptr)
                tiles = load_keys(k_desc, v_desc, k_tiles, v_tiles, plan, barriers, tiles, batch, kv_head, 0, rows, first, second, key_rows,
                                  link, KV_STEP, BLOCK_D)
                more = word * 0 + 1
                while more != 0:
                    words_ptr += 1
                    following = gl.load(words_ptr)  # the lists end with a word too many
                    if SPLIT:
                        left -= 1
                        word |= gl.where(left == 0, 16, 0)
                    count = load_queries(word, count, q_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, lse_buffers, delta_buffers,
                                         words, step_barriers, batch, kv_head, 0, rows, heads, rows, RATIO, BLOCK_D, Q_STAGES, GRAD_STAGES)
                    more = (word & 16) ^ 16
                    word = following
        else:
            batch, kv_head, token, length, first, second = key_tile(
                index, fold, upward, n_long, n_rest, units, batches, head_group, order_ptr, documents_ptr, ranges_ptr, distance_ptr, rows,
                N_RANGES, RATIO, ORDERED, PACKED, MIXED)
            direction = upward
            if (fold != 0) & (index < n_long * units) & (upward == 0):
                upward = 1
            else:
                index = gl.atomic_add(counter_ptr, 1)
                upward = 0
            n_blocks = (length + BLOCK - 1) // BLOCK
            runs = gl.where(first < n_blocks, RUNS, 0)
            link = 0
            passed = 0  # visits of the runs before
            if SPLIT:
                column_visits = index * 0
                for run in range(runs):
                    steps, top, gap, first_end, second_end = query_run(first, second, n_blocks, ranges_ptr, kv_head * RATIO + run, N_RANGES)
                    column_visits += steps * TOGETHER
                part_first, part_end, link = visits_of_part(part, place, column_visits, part_steps)
                runs = gl.where(part_first < part_end, runs, 0)
                passed = index * 0
            if runs > 0:
                tiles = load_keys(k_desc, v_desc, k_tiles, v_tiles, plan, barriers, tiles, batch, kv_head, token, length, first, second, length,
                                  link, KV_STEP, BLOCK_D)
            for run in range(runs):
                steps, top, gap, first_end, second_end = query_run(first, second, n_blocks, ranges_ptr, kv_head * RATIO + run, N_RANGES)
                visits = steps * TOGETHER
                low = 0
                high = visits
                if SPLIT:
                    low = gl.minimum(gl.maximum(part_first - passed, 0), visits)
                    high = gl.minimum(gl.maximum(part_end - passed, 0), visits)
                for visit in range(low, high):
                    step = visit // TOGETHER
                    member = run + visit - step * TOGETHER
                    query_block = top - 1 - gl.where(direction != 0, steps - 1 - step, step)
                    query_block -= gl.where(query_block < second, gap, 0)
                    last = (run == RUNS - 1) & (visit == visits - 1)
                    if SPLIT:
                        last = passed + visit == part_end - 1
                    word = step_word(query_block, member, first, second, first_end, second_end, last)
                    count = load_queries(word, count, q_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, lse_buffers, delta_buffers,
                                         words, step_barriers, batch, kv_head, token, length, heads, rows, RATIO, BLOCK_D, Q_STAGES,
                                         GRAD_STAGES)
                if SPLIT:
                    passed += visits
    slot = tiles % 2
    mbarrier.wait(kv_empty.index(slot), ((tiles // 2) & 1) ^ 1)
    send_plan(plan, slot, 0, 0, 0, 0, 0, 0, -1, 0)
    mbarrier.arrive(kv_full.index(slot), count=2)
