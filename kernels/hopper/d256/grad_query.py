"""dQ on Hopper for head dims above 128: as in grad_query.py, but a stage holds one key block, of which there are more for K than for V,
and the queries' buffer takes the result.
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

from s2_megatron.kernels.hopper.gluon_versions import reinterpret, tma_store
from s2_megatron.kernels.hopper.memory import (
    clear_rows,
    known_lse,
    load_rows,
    receive_plan,
    receive_word,
    store_rows,
    tile_memory,
)
from s2_megatron.kernels.hopper.query_loads import produce
from s2_megatron.kernels.hopper.schedule import BLOCK, LOG2E, block_word


@gluon.jit
def gradient_block(dq, minus_lse, minus_delta, halves, keys, values, barriers, count, scale_log2, own, present, HALF: gl.constexpr,
                   MASK: gl.constexpr, PACKED: gl.constexpr, BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """dQ += dS K of one key block. minus_lse, minus_delta: what the two accumulators start with. MASK: by token if own is not 0. present: rows
    of a document from the query block's first row on, which may be any number."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dq_layout, 2)
    zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
    nothing = count >> 30  # without it ptxas keeps the descriptors of all products with queries and gradients through the loop
    query = halves.index(HALF + nothing)
    grad = halves.index(2 + HALF + nothing)
    k_stage = count % K_STAGES
    v_stage = count % V_STAGES
    start_s = zeros + minus_lse[:, None]
    start_p = zeros + minus_delta[:, None]
    mbarrier.wait(k_full.index(k_stage), (count // K_STAGES) & 1)
    if MASK and PACKED:
        if (own != 0) & (present < BLOCK):  # keys behind the document may hold anything, and 0 * NaN is NaN
            clear_rows(keys.index(k_stage), present, BLOCK, BLOCK)
    s_token = warpgroup_mma(query, keys.index(k_stage).permute((1, 0)), start_s, is_async=True)
    mbarrier.wait(v_full.index(v_stage), (count // V_STAGES) & 1)
    p_token = warpgroup_mma(grad, values.index(v_stage).permute((1, 0)), start_p, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[s_token])
    p = gl.exp2(scores * scale_log2)
    mbarrier.wait(v_full.index(v_stage), (count // V_STAGES) & 1)  # keeps the exponentials under dP: see forward.py
    dp = warpgroup_mma_wait(0, deps=[p_token])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    ds = p * dp
    if MASK:  # the product, for values behind a document may be NaN
        row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, s_layout))
        column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, s_layout))
        ds = gl.where((row[:, None] >= column[None, :]) | (own == 0), ds, 0.0)
    ds = gl.convert_layout(ds.to(query.dtype), operand)
    dq_token = warpgroup_mma(ds, keys.index(k_stage), dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, deps=[dq_token, ds])
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    return dq


@gluon.jit
def compute(out_desc, out_ptr, initial_ptr, halves, lse_buffers, delta_buffers, k_buffers, v_buffers, words, plan, barriers, scale,
            stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, HALF: gl.constexpr, HEAD_DIM: gl.constexpr, PACKED: gl.constexpr,
            PACK: gl.constexpr, LISTED: gl.constexpr, CONTINUE: gl.constexpr, WIDE: gl.constexpr, BLOCK_D: gl.constexpr, K_STAGES: gl.constexpr,
            V_STAGES: gl.constexpr):
    """One warpgroup: half HALF of each tile."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    query = halves.index(HALF)
    scale_log2 = scale * LOG2E
    count = 0
    tiles = 0
    mbarrier.wait(q_full.index(0), 0)
    batch, head, token, length, low, masked_steps, free_steps, marks = receive_plan(plan, 0)
    while free_steps >= 0:
        first_row = (low + HALF * (1 - PACK)) * BLOCK
        own_head = head + HALF * PACK
        minus_lse = known_lse(lse_buffers.index(HALF).load(s_rows), LISTED) * (-1.0 / scale)
        minus_delta = -delta_buffers.index(HALF).load(s_rows)
        dq = gl.zeros([BLOCK, BLOCK_D], gl.float32, dq_layout)
        tiles += 1
        for number in range(2 * masked_steps if LISTED else 2 * masked_steps + 2):  # with those of step 0
            k_stage = count % K_STAGES
            v_stage = count % V_STAGES
            if LISTED:
                mbarrier.wait(k_full.index(k_stage), (count // K_STAGES) & 1)
                word = receive_word(words, k_stage)
            else:
                word = block_word(marks, number, PACK)
            if (word & (1 << HALF)) != 0:
                dq = gradient_block(dq, minus_lse, minus_delta, halves, k_buffers, v_buffers, barriers, count, scale_log2,
                                    word & (4 << HALF), length - first_row, HALF, True, PACKED, BLOCK_D, K_STAGES, V_STAGES)
            else:
                mbarrier.wait(k_full.index(k_stage), (count // K_STAGES) & 1)
                mbarrier.wait(v_full.index(v_stage), (count // V_STAGES) & 1)
                mbarrier.arrive(v_empty.index(v_stage), count=1)
                mbarrier.arrive(k_empty.index(k_stage), count=1)
            count += 1
        for number in range(2 * free_steps):
            dq = gradient_block(dq, minus_lse, minus_delta, halves, k_buffers, v_buffers, barriers, count, scale_log2, 0, BLOCK, HALF,
                                False, PACKED, BLOCK_D, K_STAGES, V_STAGES)
            count += 1
        dq = dq * scale
        if CONTINUE:
            dq += load_rows(initial_ptr + batch.to(gl.int64) * stride_ib + own_head.to(gl.int64) * stride_ih, first_row, stride_is, length,
                            dq_layout, HEAD_DIM, BLOCK_D)
        if WIDE or (PACKED and first_row + BLOCK > length):  # TMA would write into the next document
            mbarrier.arrive(q_empty.index(0), count=1)
            store_rows(out_ptr + batch.to(gl.int64) * stride_ob + own_head.to(gl.int64) * stride_oh, dq, token + first_row, stride_os,
                       token + length, HEAD_DIM, BLOCK_D)
        else:
            query.store(dq.to(query.dtype))  # this half of the queries has been read
            fence_async_shared()
            tma_store(out_desc, [batch, own_head, token + first_row, 0],
                                            reinterpret(query, query.dtype, [1, 1, BLOCK, BLOCK_D], out_desc.layout))
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(0), count=1)
        mbarrier.wait(q_full.index(0), tiles & 1)
        batch, head, token, length, low, masked_steps, free_steps, marks = receive_plan(plan, 0)


@gluon.jit(do_not_specialize=["rows", "n_tiles", "n_programs", "head_group", "own_rows"])  # they differ from batch to batch
def s2_hopper_wide_grad_query_kernel(q_desc, k_desc, v_desc, grad_desc, out_desc, k_more_desc, v_more_desc, out_ptr, lse_ptr, delta_ptr,
                                     initial_ptr, counter_ptr, ranges_ptr, order_ptr, documents_ptr, list_rows_ptr, list_tiles_ptr,
                                     list_steps_ptr, scale, rows, heads, n_tiles, n_programs, batches, head_group, own_rows, stride_ob,
                                     stride_oh, stride_os, stride_ib, stride_ih, stride_is, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr,
                                     RATIO: gl.constexpr, ORDERED: gl.constexpr, PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr,
                                     KV_STEP: gl.constexpr, MORE: gl.constexpr, CONTINUE: gl.constexpr, WIDE: gl.constexpr,
                                     BLOCK_D: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, num_warps: gl.constexpr):
    """Arguments as in grad_query.py, but all boxes are 64 x BLOCK_D, and STAGES are those of the keys."""
    dtype: gl.constexpr = q_desc.dtype
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    # Halves of queries, then of gradients.
    halves, k_buffers, v_buffers, plan, words, barriers = tile_memory(dtype, BLOCK_D, 1, 4, STAGES, V_STAGES, BLOCK, LISTED)
    tile_boxes = reinterpret(halves, dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    k_tiles = reinterpret(k_buffers, dtype, [STAGES, 1, 1, BLOCK, BLOCK_D], box)
    v_tiles = reinterpret(v_buffers, dtype, [V_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_buffers = gl.allocate_shared_memory(gl.float32, [2, BLOCK], vector)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [2, BLOCK], vector)
    sums = (lse_ptr, delta_ptr, lse_buffers, delta_buffers, heads)
    sources = (k_desc, v_desc, k_more_desc if MORE else k_desc, v_more_desc if MORE else v_desc, own_rows)
    work = (ranges_ptr, order_ptr, documents_ptr, counter_ptr, rows, n_tiles, n_programs, batches, head_group)
    lists = (list_rows_ptr, list_tiles_ptr, list_steps_ptr)
    gl.warp_specialize([
        (compute, (out_desc, out_ptr, initial_ptr, halves, lse_buffers, delta_buffers, k_buffers, v_buffers, words, plan, barriers, scale,
                   stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, 0, HEAD_DIM, PACKED, PACK, LISTED, CONTINUE, WIDE,
                   BLOCK_D, STAGES, V_STAGES)),
        (compute, (out_desc, out_ptr, initial_ptr, halves, lse_buffers, delta_buffers, k_buffers, v_buffers, words, plan, barriers, scale,
                   stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, 1, HEAD_DIM, PACKED, PACK, LISTED, CONTINUE, WIDE,
                   BLOCK_D, STAGES, V_STAGES)),
        (produce, (q_desc, sources, grad_desc, tile_boxes, k_tiles, v_tiles, sums, words, plan, barriers, work, lists, N_RANGES, RATIO,
                   ORDERED, PACKED, PACK, LISTED, KV_STEP, MORE, BLOCK_D, STAGES, V_STAGES, 1, True, True)),
    ], [4, 1], [240, 24])
