"""The warp that loads for dK and dV on Hopper for head dims above 128: each block of a key tile in a pass of its own, the first one first.

A pass has the words of the tile's steps as if there was no other block: bits 0 and 2 are its own, and steps of the other block alone are left
out.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from s2_megatron.kernels.hopper.backward_loads import load_queries
from s2_megatron.kernels.hopper.columns import key_tile, listed_column, run_end, step_word
from s2_megatron.kernels.hopper.gluon_versions import tma_load
from s2_megatron.kernels.hopper.memory import send_plan
from s2_megatron.kernels.hopper.schedule import BLOCK


@gluon.jit
def load_pass(k_desc, v_desc, key_tiles, plan, barriers, passes, batch, kv_head, token, length, block, key_length,
              KV_STEP: gl.constexpr, BLOCK_D: gl.constexpr):
    """A key block, and its plan. Returns the count of passes after it."""
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty = barriers
    barrier = kv_full.index(0)
    mbarrier.wait(kv_empty.index(0), (passes & 1) ^ 1)
    mbarrier.expect(barrier, 2 * BLOCK * BLOCK_D * 2)
    row = token + block * BLOCK
    tma_load(k_desc, [batch, kv_head * KV_STEP, row, 0], barrier, key_tiles.index(0))
    tma_load(v_desc, [batch, kv_head * KV_STEP, row, 0], barrier, key_tiles.index(1))
    send_plan(plan, 0, batch, kv_head, token, length, block, 0, key_length, 0)
    mbarrier.arrive(barrier, count=1)
    return passes + 1


@gluon.jit
def produce(q_desc, k_desc, v_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, key_tiles, lse_buffers, delta_buffers, words, plan,
            barriers, columns, ranges_ptr, lists, heads, rows, key_rows, N_RANGES: gl.constexpr, RATIO: gl.constexpr,
            ORDERED: gl.constexpr, PACKED: gl.constexpr, MIXED: gl.constexpr, LISTED: gl.constexpr, KV_STEP: gl.constexpr,
            BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr):
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty = barriers
    step_barriers = (q_full, q_empty, grad_full, grad_empty)
    counter_ptr, n_programs, n_long, n_rest, units, batches, head_group, order_ptr, documents_ptr, distance_ptr = columns
    count = 0
    passes = 0
    index = gl.atomic_add(counter_ptr, 1)
    while index < n_programs:
        if LISTED:
            batch, kv_head, first, second, entry = listed_column(index, n_long, n_rest, units, batches, head_group, lists)
            index = gl.atomic_add(counter_ptr, 1)
            for half in range(2):
                slot = gl.where(half == 0, first, second)
                if slot * BLOCK < key_rows:
                    passes = load_pass(k_desc, v_desc, key_tiles, plan, barriers, passes, batch, kv_head, 0, rows, slot, key_rows, KV_STEP,
                                       BLOCK_D)
                    words_ptr = lists[2] + entry
                    following = gl.load(words_ptr)
                    more = following * 0 + 1
                    due = following * 0 + 16  # the word that is sent when the next one is known; this one attends nothing
                    while more != 0:
                        word = following
                        words_ptr += 1
                        following = gl.load(words_ptr)  # the lists end with a word too many
                        more = (word & 16) ^ 16
                        word = (word & -32) + ((word >> half) & 5)
                        if (word & 1) != 0:
                            if (due & 1) != 0:
                                count = load_queries(due, count, q_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, lse_buffers,
                                                     delta_buffers, words, step_barriers, batch, kv_head, 0, rows, heads, rows, RATIO,
                                                     BLOCK_D, Q_STAGES, GRAD_STAGES)
                            due = word
                    count = load_queries(due | 16, count, q_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, lse_buffers,
                                         delta_buffers, words, step_barriers, batch, kv_head, 0, rows, heads, rows, RATIO, BLOCK_D,
                                         Q_STAGES, GRAD_STAGES)
        else:
            batch, kv_head, token, length, first, second = key_tile(
                index, 0, 0, n_long, n_rest, units, batches, head_group, order_ptr, documents_ptr, ranges_ptr, distance_ptr, rows, N_RANGES,
                RATIO, ORDERED, PACKED, MIXED)
            index = gl.atomic_add(counter_ptr, 1)
            n_blocks = (length + BLOCK - 1) // BLOCK
            for half in range(2):
                block = gl.where(half == 0, first, second)
                members = gl.where(block < n_blocks, RATIO, 0)
                if members > 0:
                    passes = load_pass(k_desc, v_desc, key_tiles, plan, barriers, passes, batch, kv_head, token, length, block, length, KV_STEP,
                                       BLOCK_D)
                for member in range(members):
                    end = run_end(block, n_blocks, ranges_ptr, kv_head * RATIO + member, N_RANGES)
                    for step in range(end - block):  # from the end of the run on, one query head after the other
                        word = step_word(end - 1 - step, member, block, n_blocks, end, 0, (member == RATIO - 1) & (step == end - block - 1))
                        count = load_queries(word, count, q_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, lse_buffers,
                                             delta_buffers, words, step_barriers, batch, kv_head, token, length, heads, rows, RATIO,
                                             BLOCK_D, Q_STAGES, GRAD_STAGES)
    mbarrier.wait(kv_empty.index(0), (passes & 1) ^ 1)
    send_plan(plan, 0, 0, 0, 0, 0, 0, 0, -1, 0)
    mbarrier.arrive(kv_full.index(0), count=2)
