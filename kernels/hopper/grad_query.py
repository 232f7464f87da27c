"""dQ alone on Hopper, for the deterministic backward and for context parallelism: the forward's walk over the keys, with a product for dP and
one for dQ.

Each of two warpgroups computes the 64 rows of one half of a query tile, and passes by the masked blocks that its half does not attend. The
accumulators start at -LSE / scale and -delta.
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
    clear_behind,
    known_lse,
    load_rows,
    receive_plan,
    receive_word,
    store_rows,
    tile_memory,
)
from s2_megatron.kernels.hopper.query_loads import produce
from s2_megatron.kernels.hopper.schedule import BLOCK, LOG2E, block_word, word_mask


@gluon.jit
def gradient_step(dq, minus_lse, minus_delta, halves, keys, values, barriers, count, scale_log2, word, last, COLUMNS: gl.constexpr,
                  HALF: gl.constexpr, MASK: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """dQ += dS K of the first COLUMNS keys of a step, one block or two. minus_lse, minus_delta: what the two accumulators start with. MASK: by
    the step's word. last: the next tile's queries may be loaded already, while this one's dQ is finished."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dq_layout, 2)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    zeros = gl.zeros([BLOCK, COLUMNS], gl.float32, s_layout)
    nothing = count >> 30  # without it ptxas keeps the descriptors of all products with queries and gradients through the loop
    query = halves.index(HALF + nothing)
    grad = halves.index(2 + HALF + nothing)
    stage = count % STAGES
    phase = (count // STAGES) & 1
    key = keys.index(stage).slice(0, COLUMNS)
    value = values.index(stage).slice(0, COLUMNS)
    mbarrier.wait(v_full.index(stage), phase)
    mbarrier.wait(k_full.index(stage), phase)
    s_token = warpgroup_mma(query, key.permute((1, 0)), zeros + gl.convert_layout(minus_lse, s_rows)[:, None], is_async=True)
    p_token = warpgroup_mma(grad, value.permute((1, 0)), zeros + gl.convert_layout(minus_delta, s_rows)[:, None], is_async=True)
    scores = warpgroup_mma_wait(1, deps=[s_token])
    p = gl.exp2(scores * scale_log2)
    mbarrier.wait(k_full.index(stage), phase)  # keeps the exponentials under dP: see forward.py
    dp = warpgroup_mma_wait(0, deps=[p_token])
    mbarrier.arrive(v_empty.index(stage), count=1)
    if last:
        mbarrier.arrive(q_empty.index(0), count=1)
    ds = p * dp
    if MASK:  # the product, for values behind a document may be NaN
        row = gl.arange(0, BLOCK, layout=s_rows)
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, s_layout))
        ds = gl.where(word_mask(word, row, column, HALF), ds, 0.0)
    ds = gl.convert_layout(ds.to(query.dtype), operand)
    dq_token = warpgroup_mma(ds, key, dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, deps=[dq_token, ds])
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq


@gluon.jit
def masked_step(dq, minus_lse, minus_delta, halves, keys, values, barriers, count, scale_log2, word, HALF: gl.constexpr,
                BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """A step of which this half may attend the first block alone, or none. word: as listed_step has it."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    attended = (word >> HALF) & 0x11
    if attended == 0x01:
        dq = gradient_step(dq, minus_lse, minus_delta, halves, keys, values, barriers, count, scale_log2, word, False, BLOCK, HALF, True,
                           BLOCK_D, STAGES)
    elif attended != 0:
        dq = gradient_step(dq, minus_lse, minus_delta, halves, keys, values, barriers, count, scale_log2, word, False, 2 * BLOCK, HALF,
                           True, BLOCK_D, STAGES)
    else:  # a step of the other half alone
        stage = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        mbarrier.arrive(k_empty.index(stage), count=1)
    return dq


@gluon.jit
def compute(out_desc, out_ptr, initial_ptr, halves, lse_buffers, delta_buffers, out_buffers, k_buffers, v_buffers, words, plan, barriers,
            scale, stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, HALF: gl.constexpr, HEAD_DIM: gl.constexpr,
            PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr, CONTINUE: gl.constexpr, WIDE: gl.constexpr, BLOCK_D: gl.constexpr,
            STAGES: gl.constexpr):
    """One warpgroup: half HALF of each tile."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = halves.dtype
    staging = out_buffers.index(HALF)
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
        if PACKED:
            clear_behind(k_buffers, k_full, count, low, length, marks, PACK, STAGES)
        for step in range(masked_steps + 1 - LISTED):
            if LISTED:
                stage = count % STAGES
                mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
                word = receive_word(words, stage)
            else:
                word = block_word(marks, 2 * step, PACK) + (block_word(marks, 2 * step + 1, PACK) << 4)
            dq = masked_step(dq, minus_lse, minus_delta, halves, k_buffers, v_buffers, barriers, count, scale_log2, word, HALF, BLOCK_D,
                             STAGES)
            count += 1
        for step in range(free_steps):
            dq = gradient_step(dq, minus_lse, minus_delta, halves, k_buffers, v_buffers, barriers, count, scale_log2, 0,
                               step == free_steps - 1, 2 * BLOCK, HALF, False, BLOCK_D, STAGES)
            count += 1
        if free_steps == 0:
            mbarrier.arrive(q_empty.index(0), count=1)
        dq = dq * scale
        if CONTINUE:
            dq += load_rows(initial_ptr + batch.to(gl.int64) * stride_ib + own_head.to(gl.int64) * stride_ih, first_row, stride_is, length,
                            dq_layout, HEAD_DIM, BLOCK_D)
        if WIDE or (PACKED and first_row + BLOCK > length):  # TMA would write into the next document
            store_rows(out_ptr + batch.to(gl.int64) * stride_ob + own_head.to(gl.int64) * stride_oh, dq, token + first_row, stride_os,
                       token + length, HEAD_DIM, BLOCK_D)
        else:
            tma.store_wait(0)
            staging.store(dq.to(dtype))
            fence_async_shared()
            tma_store(out_desc, [batch, own_head, token + first_row, 0],
                                            reinterpret(staging, dtype, [1, 1, BLOCK, BLOCK_D], out_desc.layout))
        mbarrier.wait(q_full.index(0), tiles & 1)
        batch, head, token, length, low, masked_steps, free_steps, marks = receive_plan(plan, 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "n_tiles", "n_programs", "head_group", "own_rows"])  # they differ from batch to batch
def s2_hopper_grad_query_kernel(q_desc, k_desc, v_desc, grad_desc, out_desc, k_more_desc, v_more_desc, out_ptr, lse_ptr, delta_ptr, initial_ptr,
                                counter_ptr, ranges_ptr, order_ptr, documents_ptr, list_rows_ptr, list_tiles_ptr, list_steps_ptr, scale, rows,
                                heads, n_tiles, n_programs, batches, head_group, own_rows, stride_ob, stride_oh, stride_os, stride_ib,
                                stride_ih, stride_is, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr, RATIO: gl.constexpr,
                                ORDERED: gl.constexpr, PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr, KV_STEP: gl.constexpr,
                                MORE: gl.constexpr, CONTINUE: gl.constexpr, WIDE: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
                                num_warps: gl.constexpr):
    """out receives dQ, with CONTINUE on top of the initial one. Descriptors and flags as in the forward; LSE and delta [batch * heads * rows].
    """
    dtype: gl.constexpr = q_desc.dtype
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    CHUNKS: gl.constexpr = BLOCK_D // 64
    # Halves of queries, then of gradients.
    halves, k_buffers, v_buffers, plan, words, barriers = tile_memory(dtype, BLOCK_D, 1, 4, STAGES, STAGES, 2 * BLOCK, LISTED)
    out_buffers = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK_D], gl.NVMMASharedLayout(128, 16, rank=2))
    tile_boxes = reinterpret(halves, dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    k_tiles = reinterpret(k_buffers, dtype, [STAGES * CHUNKS * 2, 1, 1, BLOCK, 64], box)
    v_tiles = reinterpret(v_buffers, dtype, [STAGES * CHUNKS * 2, 1, 1, BLOCK, 64], box)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_buffers = gl.allocate_shared_memory(gl.float32, [2, BLOCK], vector)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [2, BLOCK], vector)
    sums = (lse_ptr, delta_ptr, lse_buffers, delta_buffers, heads)
    sources = (k_desc, v_desc, k_more_desc if MORE else k_desc, v_more_desc if MORE else v_desc, own_rows)
    work = (ranges_ptr, order_ptr, documents_ptr, counter_ptr, rows, n_tiles, n_programs, batches, head_group)
    lists = (list_rows_ptr, list_tiles_ptr, list_steps_ptr)
    gl.warp_specialize([
        (compute, (out_desc, out_ptr, initial_ptr, halves, lse_buffers, delta_buffers, out_buffers, k_buffers, v_buffers, words, plan, barriers,
                   scale, stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, 0, HEAD_DIM, PACKED, PACK, LISTED, CONTINUE, WIDE,
                   BLOCK_D, STAGES)),
        (compute, (out_desc, out_ptr, initial_ptr, halves, lse_buffers, delta_buffers, out_buffers, k_buffers, v_buffers, words, plan, barriers,
                   scale, stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, 1, HEAD_DIM, PACKED, PACK, LISTED, CONTINUE, WIDE,
                   BLOCK_D, STAGES)),
        (produce, (q_desc, sources, grad_desc, tile_boxes, k_tiles, v_tiles, sums, words, plan, barriers, work, lists, N_RANGES, RATIO,
                   ORDERED, PACKED, PACK, LISTED, KV_STEP, MORE, BLOCK_D, STAGES, STAGES, 1, True, False)),
    ], [4, 1], [240, 24])
