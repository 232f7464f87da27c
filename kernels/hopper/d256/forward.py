"""The forward on Hopper for head dims above 128: as in forward.py, but a stage holds one key block, and the queries of one
tile are in memory.

Masked blocks come one product after the other, for a half passes by those that it does not attend. Of free blocks, Q K^T is in flight together
with P V of the block before.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from s2_megatron.kernels.hopper.forward import softmax_step, start_softmax
from s2_megatron.kernels.hopper.gluon_versions import reinterpret, tma_store
from s2_megatron.kernels.hopper.memory import clear_rows, receive_plan, receive_word, store_rows, tile_memory
from s2_megatron.kernels.hopper.query_loads import produce
from s2_megatron.kernels.hopper.schedule import BLOCK, LN2, LOG2E, block_word


@gluon.jit
def score_block(queries, keys, barriers, count, HALF: gl.constexpr, K_STAGES: gl.constexpr):
    """The scores of a key block, by themselves."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    stage = count % K_STAGES
    mbarrier.wait(k_full.index(stage), (count // K_STAGES) & 1)
    query = queries.index(HALF + (count >> 30))  # see d256/grad_query.py
    zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
    s_token = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[s_token])
    mbarrier.arrive(k_empty.index(stage), count=1)
    return scores


@gluon.jit
def attend_masked(out, running_max, running_sum, queries, keys, values, words, barriers, count, blocks, marks, first_row, length, scale,
                  HALF: gl.constexpr, PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr, BLOCK_D: gl.constexpr,
                  K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """The first `blocks` blocks of a tile, as their words say. Returns (out, running_max, running_sum, count)."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, s_layout))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, s_layout))
    for number in range(blocks):
        k_stage = count % K_STAGES
        v_stage = count % V_STAGES
        v_phase = (count // V_STAGES) & 1
        if LISTED:
            mbarrier.wait(k_full.index(k_stage), (count // K_STAGES) & 1)
            word = receive_word(words, k_stage)
        else:
            word = block_word(marks, number, PACK)
        if (word & (1 << HALF)) != 0:
            scores = score_block(queries, keys, barriers, count, HALF, K_STAGES)
            own = word & (4 << HALF)
            scores = gl.where((row[:, None] >= column[None, :]) | (own == 0), scores, float("-inf"))
            p, running_max, running_sum, rescale = softmax_step(scores, running_max, running_sum, scale)
            operand = gl.convert_layout(p.to(queries.dtype), p_layout)
            out = out * gl.convert_layout(rescale, o_rows)[:, None]
            mbarrier.wait(v_full.index(v_stage), v_phase)
            if PACKED:
                if (own != 0) & (first_row + BLOCK > length):  # rows behind the document may hold anything, and 0 * NaN is NaN
                    clear_rows(values.index(v_stage), length - first_row, BLOCK, BLOCK)
            o_token = warpgroup_mma(operand, values.index(v_stage), out, is_async=True)
            out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
        else:
            mbarrier.wait(k_full.index(k_stage), (count // K_STAGES) & 1)
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            mbarrier.wait(v_full.index(v_stage), v_phase)
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        count += 1
    return out, running_max, running_sum, count


@gluon.jit
def attend_free(out, running_max, running_sum, queries, keys, values, barriers, count, blocks, scale, HALF: gl.constexpr, BLOCK_D: gl.constexpr,
                K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """One block that all rows attend, or more. Returns (out, running_max, running_sum, count)."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    scores = score_block(queries, keys, barriers, count, HALF, K_STAGES)
    p, running_max, running_sum, rescale = softmax_step(scores, running_max, running_sum, scale)
    operand = gl.convert_layout(p.to(queries.dtype), p_layout)
    out = out * gl.convert_layout(rescale, o_rows)[:, None]
    for number in range(blocks - 1):
        k_stage = (count + 1) % K_STAGES
        v_stage = count % V_STAGES
        mbarrier.wait(k_full.index(k_stage), ((count + 1) // K_STAGES) & 1)
        query = queries.index(HALF + (count >> 30))
        zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
        s_token = warpgroup_mma(query, keys.index(k_stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), (count // V_STAGES) & 1)
        o_token = warpgroup_mma(operand, values.index(v_stage), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[s_token])
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        p, running_max, running_sum, rescale = softmax_step(scores, running_max, running_sum, scale)
        mbarrier.wait(v_full.index(v_stage), (count // V_STAGES) & 1)  # keeps the softmax under P V: see forward.py
        out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        operand = gl.convert_layout(p.to(queries.dtype), p_layout)
        out = out * gl.convert_layout(rescale, o_rows)[:, None]
        count += 1
    v_stage = count % V_STAGES
    mbarrier.wait(v_full.index(v_stage), (count // V_STAGES) & 1)
    o_token = warpgroup_mma(operand, values.index(v_stage), out, is_async=True)
    out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    return out, running_max, running_sum, count + 1


@gluon.jit
def compute(out_desc, out_ptr, lse_ptr, initial_ptr, initial_lse_ptr, q_buffers, k_buffers, v_buffers, words, plan, barriers, rows, scale,
            heads, stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, HALF: gl.constexpr, HEAD_DIM: gl.constexpr,
            PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr, CONTINUE: gl.constexpr, WIDE: gl.constexpr, BLOCK_D: gl.constexpr,
            K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """One warpgroup: half HALF of each tile."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    scale = scale * LOG2E  # exponentials are of base 2
    row = gl.arange(0, BLOCK, layout=s_rows)
    query = q_buffers.index(HALF)
    count = 0
    tiles = 0
    mbarrier.wait(q_full.index(0), 0)
    batch, head, token, length, low, masked_steps, free_steps, marks = receive_plan(plan, 0)
    while free_steps >= 0:
        first_row = (low + HALF * (1 - PACK)) * BLOCK
        own_head = head + HALF * PACK
        row_base = (batch * heads + own_head).to(gl.int64) * rows + token
        initial_rows = initial_ptr + batch.to(gl.int64) * stride_ib + own_head.to(gl.int64) * stride_ih
        out, running_max, running_sum = start_softmax(initial_rows, initial_lse_ptr, row_base, first_row, row, stride_is, length, o_layout,
                                                      CONTINUE, HEAD_DIM, BLOCK_D)
        masked_blocks = 2 * masked_steps if LISTED else 2 * masked_steps + 2  # with those of step 0
        out, running_max, running_sum, count = attend_masked(
            out, running_max, running_sum, q_buffers, k_buffers, v_buffers, words, barriers, count, masked_blocks, marks, first_row, length,
            scale, HALF, PACKED, PACK, LISTED, BLOCK_D, K_STAGES, V_STAGES)
        if free_steps > 0:
            out, running_max, running_sum, count = attend_free(
                out, running_max, running_sum, q_buffers, k_buffers, v_buffers, barriers, count, 2 * free_steps, scale, HALF, BLOCK_D, K_STAGES,
                V_STAGES)
        tiles += 1
        lse = (running_max + gl.log2(running_sum)) * LN2
        gl.store(lse_ptr + row_base + first_row + row, lse, mask=first_row + row < length)
        out = out * gl.convert_layout(gl.where(running_sum == 0.0, 0.0, 1.0 / running_sum), o_rows)[:, None]
        if WIDE or (PACKED and first_row + BLOCK > length):  # TMA would write into the next document
            mbarrier.arrive(q_empty.index(0), count=1)
            store_rows(out_ptr + batch.to(gl.int64) * stride_ob + own_head.to(gl.int64) * stride_oh, out, token + first_row, stride_os,
                       token + length, HEAD_DIM, BLOCK_D)
        else:
            query.store(out.to(query.dtype))  # this half of the queries has been read
            fence_async_shared()
            tma_store(out_desc, [batch, own_head, token + first_row, 0],
                                            reinterpret(query, query.dtype, [1, 1, BLOCK, BLOCK_D], out_desc.layout))
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(0), count=1)
        mbarrier.wait(q_full.index(0), tiles & 1)
        batch, head, token, length, low, masked_steps, free_steps, marks = receive_plan(plan, 0)


@gluon.jit(do_not_specialize=["rows", "n_tiles", "n_programs", "head_group", "own_rows"])  # they differ from batch to batch
def s2_hopper_wide_forward_kernel(q_desc, k_desc, v_desc, out_desc, k_more_desc, v_more_desc, out_ptr, lse_ptr, initial_ptr, initial_lse_ptr,
                                  counter_ptr, ranges_ptr, order_ptr, documents_ptr, list_rows_ptr, list_tiles_ptr, list_steps_ptr, scale, rows,
                                  heads, n_tiles, n_programs, batches, head_group, own_rows, stride_ob, stride_oh, stride_os, stride_ib,
                                  stride_ih, stride_is, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr, RATIO: gl.constexpr,
                                  ORDERED: gl.constexpr, PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr, KV_STEP: gl.constexpr,
                                  MORE: gl.constexpr, CONTINUE: gl.constexpr, WIDE: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
                                  V_STAGES: gl.constexpr, num_warps: gl.constexpr):
    """Arguments as in forward.py, but all boxes are 64 x BLOCK_D, and STAGES are those of the keys."""
    dtype: gl.constexpr = q_desc.dtype
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    q_buffers, k_buffers, v_buffers, plan, words, barriers = tile_memory(dtype, BLOCK_D, 1, 2, STAGES, V_STAGES, BLOCK, LISTED)
    q_tiles = reinterpret(q_buffers, dtype, [2, 1, 1, BLOCK, BLOCK_D], box)
    k_tiles = reinterpret(k_buffers, dtype, [STAGES, 1, 1, BLOCK, BLOCK_D], box)
    v_tiles = reinterpret(v_buffers, dtype, [V_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    sources = (k_desc, v_desc, k_more_desc if MORE else k_desc, v_more_desc if MORE else v_desc, own_rows)
    work = (ranges_ptr, order_ptr, documents_ptr, counter_ptr, rows, n_tiles, n_programs, batches, head_group)
    lists = (list_rows_ptr, list_tiles_ptr, list_steps_ptr)
    gl.warp_specialize([
        (compute, (out_desc, out_ptr, lse_ptr, initial_ptr, initial_lse_ptr, q_buffers, k_buffers, v_buffers, words, plan, barriers, rows,
                   scale, heads, stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, 0, HEAD_DIM, PACKED, PACK, LISTED, CONTINUE,
                   WIDE, BLOCK_D, STAGES, V_STAGES)),
        (compute, (out_desc, out_ptr, lse_ptr, initial_ptr, initial_lse_ptr, q_buffers, k_buffers, v_buffers, words, plan, barriers, rows,
                   scale, heads, stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, 1, HEAD_DIM, PACKED, PACK, LISTED, CONTINUE,
                   WIDE, BLOCK_D, STAGES, V_STAGES)),
        (produce, (q_desc, sources, q_desc, q_tiles, k_tiles, v_tiles, (), words, plan, barriers, work, lists, N_RANGES, RATIO, ORDERED,
                   PACKED, PACK, LISTED, KV_STEP, MORE, BLOCK_D, STAGES, V_STAGES, 1, False, True)),
    ], [4, 1], [240, 24])
