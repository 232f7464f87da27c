"""dK and dV on Hopper for head dims above 128, where both are too many registers for one warpgroup: one computes dV, the other dK of the
same 64 keys. Both compute S^T, so that there are five products a step instead of four, and nothing is handed over. A warp loads
(d256/backward_loads.py); the accumulators of S^T start at -LSE / scale as in backward.py.
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

from s2_megatron.kernels.hopper.columns import query_block_of
from s2_megatron.kernels.hopper.d256.backward_loads import produce
from s2_megatron.kernels.hopper.gluon_versions import reinterpret, tma_store
from s2_megatron.kernels.hopper.memory import (
    add_returned,
    clear_rows,
    known_lse,
    receive_plan,
    receive_word,
    store_rows,
)
from s2_megatron.kernels.hopper.schedule import BLOCK, LOG2E


@gluon.jit
def keep_of(word, length, PACKED: gl.constexpr, layout: gl.constexpr):
    """bool [64 keys, 64 queries] of a step that is masked: by token in the block's own step, and of a document what it has."""
    key_row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    query_row = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    keep = (query_row[None, :] >= key_row[:, None]) | ((word & 4) == 0)
    if PACKED:
        keep = keep & (query_block_of(word) * BLOCK + query_row < length)[None, :]
    return keep


@gluon.jit
def compute(out_desc, out_ptr, q_buffers, grad_buffers, key_buffers, lse_buffers, delta_buffers, words, plan, barriers,
            returned, scale, stride_b, stride_h, stride_s, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, PACKED: gl.constexpr,
            LISTED: gl.constexpr, WIDE: gl.constexpr, RETURNED: gl.constexpr, GRAD_STEP: gl.constexpr, BLOCK_D: gl.constexpr,
            Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr):
    """One warpgroup: dV of each key block, or KEYS: dK. key_buffers: K, V, dV on its way out; dK goes through that of V."""
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = key_buffers.dtype
    staging = key_buffers.index(1 if KEYS else 2)
    scale_log2 = scale * LOG2E
    zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
    count = 0
    passes = 0
    mbarrier.wait(kv_full.index(0), 0)
    batch, kv_head, token, length, block, unused, key_length, marks = receive_plan(plan, 0)
    while key_length >= 0:
        full_blocks = length // BLOCK
        out = gl.zeros([BLOCK, BLOCK_D], gl.float32, out_layout)
        more = key_length * 0 + 1
        while more != 0:
            q_stage = count % Q_STAGES
            g_stage = count % GRAD_STAGES
            query = q_buffers.index(q_stage)
            grad = grad_buffers.index(g_stage)
            mbarrier.wait(q_full.index(q_stage), (count // Q_STAGES) & 1)
            word = receive_word(words, q_stage)
            more = (word & 16) ^ 16
            if (word & 1) != 0:
                nothing = count >> 30  # see d256/grad_query.py
                key = key_buffers.index(nothing)
                partial = False  # rows behind a sequence are zeros, whatever their probabilities; behind a document there is another one
                if PACKED:
                    partial = query_block_of(word) >= full_blocks
                    if KEYS:
                        if partial:
                            clear_rows(query, length - full_blocks * BLOCK, BLOCK, BLOCK)
                minus_lse = zeros + (known_lse(lse_buffers.index(q_stage).load(columns), LISTED) * (-1.0 / scale))[None, :]
                s_token = warpgroup_mma(key, query.permute((1, 0)), minus_lse, is_async=True)
                if KEYS:
                    mbarrier.wait(grad_full.index(g_stage), (count // GRAD_STAGES) & 1)
                    # Delta is no start of this product: ptxas would wait for S^T before it writes the registers.
                    dp_token = warpgroup_mma(key_buffers.index(1 + nothing), grad.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    delta = delta_buffers.index(g_stage).load(columns)
                    scores = warpgroup_mma_wait(1, deps=[s_token])
                    p = gl.exp2(scores * scale_log2)
                    # Keeps the exponentials under dP: see forward.py.
                    mbarrier.wait(grad_full.index(g_stage), (count // GRAD_STAGES) & 1)
                    dp = warpgroup_mma_wait(0, deps=[dp_token])
                    mbarrier.arrive(grad_empty.index(g_stage), count=1)
                    ds = p * (dp - delta[None, :])
                    if ((word & 4) != 0) | partial:  # the product, for gradients behind a document may be NaN
                        ds = gl.where(keep_of(word, length, PACKED, s_layout), ds, 0.0)
                    factor = gl.convert_layout(ds.to(dtype), operand)
                    out_token = warpgroup_mma(factor, query, out, is_async=True)
                    out, factor = warpgroup_mma_wait(0, deps=[out_token, factor])
                    mbarrier.arrive(q_empty.index(q_stage), count=1)
                else:
                    scores = warpgroup_mma_wait(0, deps=[s_token])
                    mbarrier.arrive(q_empty.index(q_stage), count=1)
                    p = gl.exp2(scores * scale_log2)
                    if ((word & 4) != 0) | partial:
                        p = gl.where(keep_of(word, length, PACKED, s_layout), p, 0.0)
                    factor = gl.convert_layout(p.to(dtype), operand)
                    mbarrier.wait(grad_full.index(g_stage), (count // GRAD_STAGES) & 1)
                    if PACKED:
                        if partial:
                            clear_rows(grad, length - full_blocks * BLOCK, BLOCK, BLOCK)
                    out_token = warpgroup_mma(factor, grad, out, is_async=True)
                    out, factor = warpgroup_mma_wait(0, deps=[out_token, factor])
                    mbarrier.arrive(grad_empty.index(g_stage), count=1)
            else:  # a block that nothing attends
                mbarrier.wait(grad_full.index(g_stage), (count // GRAD_STAGES) & 1)
                mbarrier.arrive(grad_empty.index(g_stage), count=1)
                mbarrier.arrive(q_empty.index(q_stage), count=1)
            count += 1
        if KEYS:
            out = out * scale
        else:
            mbarrier.arrive(kv_empty.index(0), count=1)
        row = block * BLOCK
        if RETURNED:
            out = add_returned(out, returned, batch, kv_head, block, 0 if KEYS else 1, HEAD_DIM, BLOCK_D)
        grad_head = kv_head * GRAD_STEP
        if WIDE or (PACKED and row + BLOCK > length):  # TMA would write into the next document
            if KEYS:
                mbarrier.arrive(kv_empty.index(0), count=1)
            store_rows(out_ptr + batch.to(gl.int64) * stride_b + grad_head.to(gl.int64) * stride_h, out, token + row, stride_s,
                       token + key_length, HEAD_DIM, BLOCK_D)
        else:
            if not KEYS:
                tma.store_wait(0)  # the block before has left the buffer
            staging.store(out.to(dtype))
            fence_async_shared()
            tma_store(out_desc, [batch, grad_head, token + row, 0],
                                            reinterpret(staging, dtype, [1, 1, BLOCK, BLOCK_D], out_desc.layout))
            if KEYS:
                tma.store_wait(0)
                mbarrier.arrive(kv_empty.index(0), count=1)
        passes += 1
        mbarrier.wait(kv_full.index(0), passes & 1)
        batch, kv_head, token, length, block, unused, key_length, marks = receive_plan(plan, 0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "key_rows", "n_long", "n_rest", "n_programs", "head_group"])  # they differ from batch to batch
def s2_hopper_wide_backward_kernel(q_desc, k_desc, v_desc, grad_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, counter_ptr,
                                   returned_ptr, returned_starts_ptr, returned_entries_ptr, ranges_ptr, order_ptr, documents_ptr,
                                   distance_ptr, list_rows_ptr, list_tiles_ptr, list_steps_ptr, scale, rows, key_rows, heads, n_long, n_rest,
                                   n_programs, units, batches, head_group, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh,
                                   stride_dvs, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr, RATIO: gl.constexpr, ORDERED: gl.constexpr,
                                   PACKED: gl.constexpr, MIXED: gl.constexpr, LISTED: gl.constexpr, KV_STEP: gl.constexpr,
                                   GRAD_STEP: gl.constexpr, WIDE: gl.constexpr, RETURNED: gl.constexpr, BLOCK_D: gl.constexpr,
                                   Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr, num_warps: gl.constexpr):
    """Arguments as in backward.py, without those of dQ."""
    dtype: gl.constexpr = q_desc.dtype
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    key_buffers = gl.allocate_shared_memory(dtype, [3, BLOCK, BLOCK_D], matrix)  # keys, values, dV on its way out
    key_tiles = reinterpret(key_buffers, dtype, [3, 1, 1, BLOCK, BLOCK_D], box)
    q_buffers = gl.allocate_shared_memory(dtype, [Q_STAGES, BLOCK, BLOCK_D], matrix)
    grad_buffers = gl.allocate_shared_memory(dtype, [GRAD_STAGES, BLOCK, BLOCK_D], matrix)
    q_tiles = reinterpret(q_buffers, dtype, [Q_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    grad_tiles = reinterpret(grad_buffers, dtype, [GRAD_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK], vector)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [GRAD_STAGES, BLOCK], vector)
    words = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], vector)
    plan = gl.allocate_shared_memory(gl.int32, [8, 1], vector)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    kv_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    grad_full = gl.allocate_shared_memory(gl.int64, [GRAD_STAGES, 1], barrier)
    grad_empty = gl.allocate_shared_memory(gl.int64, [GRAD_STAGES, 1], barrier)
    mbarrier.init(kv_full.index(0), count=2)  # the copy engine's bytes, the plan
    mbarrier.init(kv_empty.index(0), count=2)
    for stage in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(stage), count=2)
        mbarrier.init(q_empty.index(stage), count=2)
    for stage in gl.static_range(GRAD_STAGES):
        mbarrier.init(grad_full.index(stage), count=2)
        mbarrier.init(grad_empty.index(stage), count=2)
    fence_async_shared()
    barriers = (kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty)
    columns = (counter_ptr, n_programs, n_long, n_rest, units, batches, head_group, order_ptr, documents_ptr, distance_ptr)
    returned = (returned_ptr, returned_starts_ptr, returned_entries_ptr, batches, heads // RATIO)
    lists = (list_rows_ptr, list_tiles_ptr, list_steps_ptr)
    gl.warp_specialize([
        (compute, (dv_desc, dv_ptr, q_buffers, grad_buffers, key_buffers, lse_buffers, delta_buffers, words, plan, barriers, returned,
                   scale, stride_dvb, stride_dvh, stride_dvs, False, HEAD_DIM, PACKED, LISTED, WIDE, RETURNED, GRAD_STEP, BLOCK_D, Q_STAGES,
                   GRAD_STAGES)),
        (compute, (dk_desc, dk_ptr, q_buffers, grad_buffers, key_buffers, lse_buffers, delta_buffers, words, plan, barriers, returned,
                   scale, stride_dkb, stride_dkh, stride_dks, True, HEAD_DIM, PACKED, LISTED, WIDE, RETURNED, GRAD_STEP, BLOCK_D, Q_STAGES,
                   GRAD_STAGES)),
        (produce, (q_desc, k_desc, v_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, key_tiles, lse_buffers, delta_buffers, words,
                   plan, barriers, columns, ranges_ptr, lists, heads, rows, key_rows, N_RANGES, RATIO, ORDERED, PACKED, MIXED,
                   LISTED, KV_STEP, BLOCK_D, Q_STAGES, GRAD_STAGES)),
    ], [4, 1], [240, 24])
