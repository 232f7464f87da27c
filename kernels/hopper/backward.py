"""dK and dV on Hopper: two warpgroups compute, each the 64 keys of one half of a key tile, on [64 keys, 64 queries] a step; a warp loads
(backward_loads.py), and says with a word for each step which half attends it.

The accumulators of S^T and dP^T start at -LSE / scale and -delta, which frees the registers that both would take: P^T is exp2 of the first, and
dS^T is P^T times the second. A warpgroup passes by the query blocks that attend the other half of the tile only. DQ: dQ in the same pass, by a
third warpgroup that multiplies dS with the keys and adds the result to an fp32 buffer through the copy engine, in whatever order the tiles
come; without it the result is bitwise repeatable. SPLIT: a column may be in several programs (parts.py).
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

from s2_megatron.kernels.hopper.backward_loads import produce
from s2_megatron.kernels.hopper.columns import query_block_of
from s2_megatron.kernels.hopper.gluon_versions import reinterpret, tma_add, tma_store
from s2_megatron.kernels.hopper.memory import (
    add_returned,
    clear_rows,
    known_lse,
    receive_plan,
    receive_word,
    store_rows,
)
from s2_megatron.kernels.hopper.parts import add_parts, is_last
from s2_megatron.kernels.hopper.schedule import BLOCK, LOG2E


@gluon.jit
def add_grad_query(dq_desc, k_chunks, ds_buffers, ds_words, dq_buffers, plan, barriers, RATIO: gl.constexpr, BLOCK_D: gl.constexpr,
                   DS_STAGES: gl.constexpr):
    """The warpgroup of dQ: of each query block, 64 columns at a time."""
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty, ds_full, ds_empty = barriers
    CHUNKS: gl.constexpr = BLOCK_D // 64
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    count = 0
    tiles = 0
    mbarrier.wait(kv_full.index(0), 0)
    batch, kv_head, token, length, first, second, key_length, unused = receive_plan(plan, 0)
    while key_length >= 0:
        slot = tiles % 2
        more = key_length * 0 + 1
        while more != 0:
            stage = count % DS_STAGES
            mbarrier.wait(ds_full.index(stage), (count // DS_STAGES) & 1)
            word = receive_word(ds_words, stage)
            more = (word & 16) ^ 16
            for chunk in gl.static_range(CHUNKS):
                zeros = gl.zeros([BLOCK, 64], gl.float32, layout)
                token_a = warpgroup_mma(ds_buffers.index(stage * 2).permute((1, 0)), k_chunks.index(slot * 2 * CHUNKS + chunk), zeros,
                                        use_acc=False, is_async=True)
                token_b = warpgroup_mma(ds_buffers.index(stage * 2 + 1).permute((1, 0)), k_chunks.index((slot * 2 + 1) * CHUNKS + chunk),
                                        token_a, is_async=True)
                dq = warpgroup_mma_wait(0, deps=[token_b])
                if chunk == CHUNKS - 1:
                    mbarrier.arrive(ds_empty.index(stage), count=1)
                tma.store_wait(CHUNKS - 1)  # the one before with this buffer
                dq_buffers.index(chunk).store(dq)
                fence_async_shared()
                tma_add(dq_desc, [batch, kv_head * RATIO + (word >> 24), token + query_block_of(word) * BLOCK, chunk * 64],
                                reinterpret(dq_buffers.index(chunk), gl.float32, [1, 1, BLOCK, 64], dq_desc.layout))
            count += 1
        mbarrier.arrive(kv_empty.index(slot), count=1)
        tiles += 1
        mbarrier.wait(kv_full.index(tiles % 2), (tiles // 2) & 1)
        batch, kv_head, token, length, first, second, key_length, unused = receive_plan(plan, tiles % 2)
    tma.store_wait(0)


@gluon.jit
def start_grad_p(value, grad, delta_buffer, full, phase, partial, present, PACKED: gl.constexpr):
    """dP^T - delta of a query block, on its way."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mbarrier.wait(full, phase)
    if PACKED:
        if partial:
            clear_rows(grad, present, BLOCK, BLOCK)
    minus_delta = gl.zeros([BLOCK, BLOCK], gl.float32, layout) - delta_buffer.load(gl.SliceLayout(0, layout))[None, :]
    return warpgroup_mma(value, grad.permute((1, 0)), minus_delta, is_async=True)


@gluon.jit
def send_ds(ds, word, count, ds_buffers, ds_words, barriers, HALF: gl.constexpr, DS_STAGES: gl.constexpr):
    """dS of one half, and the step's word, to the warpgroup of dQ."""
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty, ds_full, ds_empty = barriers
    stage = count % DS_STAGES
    mbarrier.wait(ds_empty.index(stage), ((count // DS_STAGES) & 1) ^ 1)
    ds_buffers.index(stage * 2 + HALF).store(ds)
    if HALF == 0:
        ds_words.index(stage).store(gl.full([1], word, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(stage), count=1)


@gluon.jit
def compute(dk_desc, dv_desc, dk_ptr, dv_ptr, q_buffers, grad_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, words, ds_buffers,
            ds_words, plan, barriers, parts, returned, scale, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
            HALF: gl.constexpr, HEAD_DIM: gl.constexpr, PACKED: gl.constexpr, LISTED: gl.constexpr, SPLIT: gl.constexpr, WIDE: gl.constexpr,
            RETURNED: gl.constexpr, GRAD_STEP: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr,
            DS_STAGES: gl.constexpr, DQ: gl.constexpr):
    """One warpgroup: the keys of half HALF of each tile."""
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty, ds_full, ds_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = k_buffers.dtype
    scale_log2 = scale * LOG2E
    count = 0
    tiles = 0
    mbarrier.wait(kv_full.index(0), 0)
    batch, kv_head, token, length, first, second, key_length, link = receive_plan(plan, 0)
    while key_length >= 0:
        slot = tiles % 2
        block = first if HALF == 0 else second
        key = k_buffers.index(slot * 2 + HALF)
        value = v_buffers.index(slot * 2 + HALF)
        full_blocks = length // BLOCK
        dk = gl.zeros([BLOCK, BLOCK_D], gl.float32, kv_layout)
        dv = gl.zeros([BLOCK, BLOCK_D], gl.float32, kv_layout)
        key_row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, s_layout))
        query_row = gl.arange(0, BLOCK, layout=columns)
        if PACKED:
            if block >= full_blocks:  # in part behind the document, or not there at all
                clear_rows(key, length - block * BLOCK, BLOCK, BLOCK)
                clear_rows(value, length - block * BLOCK, BLOCK, BLOCK)
        if tiles > 0:  # the gradients of the tile before have left its buffers by now
            tma.store_wait(0)
            mbarrier.arrive(kv_empty.index(1 - slot), count=1)
        more = key_length * 0 + 1
        while more != 0:
            q_stage = count % Q_STAGES
            g_stage = count % GRAD_STAGES
            query = q_buffers.index(q_stage)
            grad = grad_buffers.index(g_stage)
            mbarrier.wait(q_full.index(q_stage), (count // Q_STAGES) & 1)
            word = receive_word(words, q_stage)
            more = (word & 16) ^ 16
            if (word & (1 << HALF)) != 0:
                own = word & (4 << HALF)
                partial = False  # rows behind a sequence are zeros, whatever their probabilities; behind a document there is another one
                if PACKED:
                    partial = query_block_of(word) >= full_blocks
                    if partial:
                        clear_rows(query, length - full_blocks * BLOCK, BLOCK, BLOCK)
                zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
                minus_lse = zeros + (known_lse(lse_buffers.index(q_stage).load(columns), LISTED) * (-1.0 / scale))[None, :]
                s_token = warpgroup_mma(key, query.permute((1, 0)), minus_lse, is_async=True)
                dp_token = start_grad_p(value, grad, delta_buffers.index(g_stage), grad_full.index(g_stage), (count // GRAD_STAGES) & 1,
                                        partial, length - full_blocks * BLOCK, PACKED)
                scores = warpgroup_mma_wait(1, deps=[s_token])
                p = gl.exp2(scores * scale_log2)
                if (own != 0) | partial:
                    keep = (query_row[None, :] >= key_row[:, None]) | (own == 0)
                    if PACKED:
                        keep = keep & (query_block_of(word) * BLOCK + query_row < length)[None, :]
                    p = gl.where(keep, p, 0.0)
                p_operand = gl.convert_layout(p.to(dtype), operand)
                dv_token = warpgroup_mma(p_operand, grad, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[dp_token])
                ds = (p * dp).to(dtype)
                ds_operand = gl.convert_layout(ds, operand)
                if DQ:
                    send_ds(ds, word, count, ds_buffers, ds_words, barriers, HALF, DS_STAGES)
                dk_token = warpgroup_mma(ds_operand, query, dk, is_async=True)
                dv, p_operand = warpgroup_mma_wait(1, deps=[dv_token, p_operand])
                mbarrier.arrive(grad_empty.index(g_stage), count=1)
                dk, ds_operand = warpgroup_mma_wait(0, deps=[dk_token, ds_operand])
                mbarrier.arrive(q_empty.index(q_stage), count=1)
            else:  # a step of the other half alone
                mbarrier.wait(grad_full.index(g_stage), (count // GRAD_STAGES) & 1)
                if DQ:
                    send_ds(gl.zeros([BLOCK, BLOCK], dtype, s_layout), word, count, ds_buffers, ds_words, barriers, HALF, DS_STAGES)
                mbarrier.arrive(grad_empty.index(g_stage), count=1)
                mbarrier.arrive(q_empty.index(q_stage), count=1)
            count += 1
        row = block * BLOCK
        whole = row < key_length
        if SPLIT:
            if whole:
                dk, dv = add_parts(dk, dv, link, parts, HALF, BLOCK_D)
            whole = whole & is_last(link)
        dk_out = dk * scale
        if whole:
            if RETURNED:
                dk_out = add_returned(dk_out, returned, batch, kv_head, block, 0, HEAD_DIM, BLOCK_D)
                dv = add_returned(dv, returned, batch, kv_head, block, 1, HEAD_DIM, BLOCK_D)
            grad_head = kv_head * GRAD_STEP
            if WIDE or (PACKED and row + BLOCK > length):  # TMA would write into the next document
                last_row = token + key_length
                store_rows(dk_ptr + batch.to(gl.int64) * stride_dkb + grad_head.to(gl.int64) * stride_dkh, dk_out, token + row, stride_dks,
                           last_row, HEAD_DIM, BLOCK_D)
                store_rows(dv_ptr + batch.to(gl.int64) * stride_dvb + grad_head.to(gl.int64) * stride_dvh, dv, token + row, stride_dvs,
                           last_row, HEAD_DIM, BLOCK_D)
            else:
                value.store(dv.to(dtype))  # nobody else reads this half's values
                fence_async_shared()
                tma_store(dv_desc, [batch, grad_head, token + row, 0],
                                                reinterpret(value, dtype, [1, 1, BLOCK, BLOCK_D], dv_desc.layout))
                if DQ:  # its keys are wanted for dQ yet
                    tma.store_wait(0)
                    value.store(dk_out.to(dtype))
                    fence_async_shared()
                    tma_store(dk_desc, [batch, grad_head, token + row, 0],
                                                    reinterpret(value, dtype, [1, 1, BLOCK, BLOCK_D], dk_desc.layout))
                else:
                    key.store(dk_out.to(dtype))
                    fence_async_shared()
                    tma_store(dk_desc, [batch, grad_head, token + row, 0],
                                                    reinterpret(key, dtype, [1, 1, BLOCK, BLOCK_D], dk_desc.layout))
        tiles += 1
        mbarrier.wait(kv_full.index(tiles % 2), (tiles // 2) & 1)
        batch, kv_head, token, length, first, second, key_length, link = receive_plan(plan, tiles % 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "key_rows", "fold", "n_long", "n_rest", "n_programs", "head_group", "n_split",
                               "part_steps"])  # they differ from batch to batch
def s2_hopper_backward_kernel(q_desc, k_desc, v_desc, grad_desc, dk_desc, dv_desc, dq_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, counter_ptr,
                              returned_ptr, returned_starts_ptr, returned_entries_ptr, sums_ptr, ranges_ptr, order_ptr, documents_ptr,
                              distance_ptr, list_rows_ptr, list_tiles_ptr, list_steps_ptr, scale, rows, key_rows, heads, fold, n_long, n_rest,
                              n_programs, units, batches, head_group, n_split, part_steps, stride_dkb, stride_dkh, stride_dks, stride_dvb,
                              stride_dvh, stride_dvs, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr, RATIO: gl.constexpr,
                              ORDERED: gl.constexpr, PACKED: gl.constexpr, MIXED: gl.constexpr, LISTED: gl.constexpr, SPLIT: gl.constexpr,
                              KV_STEP: gl.constexpr, GRAD_STEP: gl.constexpr, WIDE: gl.constexpr, RETURNED: gl.constexpr,
                              BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
                              DQ: gl.constexpr, num_warps: gl.constexpr):
    """Tensors are [batch, heads, rows, HEAD_DIM] with any strides, in descriptors with boxes of 64 x BLOCK_D (dQ / scale, fp32: 64 x 64); LSE
    and delta [batch * heads * rows]. KV_STEP, GRAD_STEP: 0 where KV heads share the rows of K and V, or of their gradients. WIDE: those are of
    another type, and are not written through descriptors. counter: 0, and SPLIT: as many zeros behind it as there are halves in sums_ptr.
    RETURNED: to the gradients of block b of KV head g are added those slots of returned, [slots, 64, 2 (K, V), batches, HEAD_DIM], that its
    entries from starts[b * KV heads + g] on name; each rounded once."""
    dtype: gl.constexpr = q_desc.dtype
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CHUNKS: gl.constexpr = BLOCK_D // 64
    k_buffers = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK_D], matrix)  # two tiles of two halves
    v_buffers = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK_D], matrix)
    k_tiles = reinterpret(k_buffers, dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    v_tiles = reinterpret(v_buffers, dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    k_chunks = reinterpret(k_buffers, dtype, [4 * CHUNKS, BLOCK, 64], matrix)
    q_buffers = gl.allocate_shared_memory(dtype, [Q_STAGES, BLOCK, BLOCK_D], matrix)
    grad_buffers = gl.allocate_shared_memory(dtype, [GRAD_STAGES, BLOCK, BLOCK_D], matrix)
    q_tiles = reinterpret(q_buffers, dtype, [Q_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    grad_tiles = reinterpret(grad_buffers, dtype, [GRAD_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    ds_buffers = gl.allocate_shared_memory(dtype, [2 * DS_STAGES, BLOCK, BLOCK], matrix)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK], vector)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [GRAD_STAGES, BLOCK], vector)
    words = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], vector)
    ds_words = gl.allocate_shared_memory(gl.int32, [DS_STAGES, 1], vector)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    plan = gl.allocate_shared_memory(gl.int32, [2 * 8, 1], vector)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    grad_full = gl.allocate_shared_memory(gl.int64, [GRAD_STAGES, 1], barrier)
    grad_empty = gl.allocate_shared_memory(gl.int64, [GRAD_STAGES, 1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], barrier)
    ds_empty = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], barrier)
    for slot in gl.static_range(2):
        mbarrier.init(kv_full.index(slot), count=2)  # the copy engine's bytes, the plan
        mbarrier.init(kv_empty.index(slot), count=3 if DQ else 2)
    for stage in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(stage), count=2)
        mbarrier.init(q_empty.index(stage), count=2)
    for stage in gl.static_range(GRAD_STAGES):
        mbarrier.init(grad_full.index(stage), count=2)
        mbarrier.init(grad_empty.index(stage), count=2)
    for stage in gl.static_range(DS_STAGES):
        mbarrier.init(ds_full.index(stage), count=2)
        mbarrier.init(ds_empty.index(stage), count=1)
    fence_async_shared()
    barriers = (kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty, ds_full, ds_empty)
    columns = (counter_ptr, n_programs, fold, n_long, n_rest, units, batches, head_group, n_split, part_steps, order_ptr, documents_ptr,
               distance_ptr)
    parts = (sums_ptr, counter_ptr)
    returned = (returned_ptr, returned_starts_ptr, returned_entries_ptr, batches, heads // RATIO)
    lists = (list_rows_ptr, list_tiles_ptr, list_steps_ptr)
    if DQ:
        dq_buffers = gl.allocate_shared_memory(gl.float32, [CHUNKS, BLOCK, 64], wide)
        gl.warp_specialize([
            (compute, (dk_desc, dv_desc, dk_ptr, dv_ptr, q_buffers, grad_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, words,
                       ds_buffers, ds_words, plan, barriers, parts, returned, scale, stride_dkb, stride_dkh, stride_dks, stride_dvb,
                       stride_dvh, stride_dvs, 0, HEAD_DIM, PACKED, LISTED, SPLIT, WIDE, RETURNED, GRAD_STEP, BLOCK_D, Q_STAGES,
                       GRAD_STAGES, DS_STAGES, DQ)),
            (compute, (dk_desc, dv_desc, dk_ptr, dv_ptr, q_buffers, grad_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, words,
                       ds_buffers, ds_words, plan, barriers, parts, returned, scale, stride_dkb, stride_dkh, stride_dks, stride_dvb,
                       stride_dvh, stride_dvs, 1, HEAD_DIM, PACKED, LISTED, SPLIT, WIDE, RETURNED, GRAD_STEP, BLOCK_D, Q_STAGES,
                       GRAD_STAGES, DS_STAGES, DQ)),
            (add_grad_query, (dq_desc, k_chunks, ds_buffers, ds_words, dq_buffers, plan, barriers, RATIO, BLOCK_D, DS_STAGES)),
            (produce, (q_desc, k_desc, v_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, k_tiles, v_tiles, lse_buffers, delta_buffers,
                       words, plan, barriers, columns, ranges_ptr, lists, heads, rows, key_rows, N_RANGES, RATIO, ORDERED, PACKED, MIXED,
                       LISTED, SPLIT, KV_STEP, BLOCK_D, Q_STAGES, GRAD_STAGES)),
        ], [4, 4, 1], [208, 72, 24])
    else:
        gl.warp_specialize([
            (compute, (dk_desc, dv_desc, dk_ptr, dv_ptr, q_buffers, grad_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, words,
                       ds_buffers, ds_words, plan, barriers, parts, returned, scale, stride_dkb, stride_dkh, stride_dks, stride_dvb,
                       stride_dvh, stride_dvs, 0, HEAD_DIM, PACKED, LISTED, SPLIT, WIDE, RETURNED, GRAD_STEP, BLOCK_D, Q_STAGES,
                       GRAD_STAGES, DS_STAGES, DQ)),
            (compute, (dk_desc, dv_desc, dk_ptr, dv_ptr, q_buffers, grad_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, words,
                       ds_buffers, ds_words, plan, barriers, parts, returned, scale, stride_dkb, stride_dkh, stride_dks, stride_dvb,
                       stride_dvh, stride_dvs, 1, HEAD_DIM, PACKED, LISTED, SPLIT, WIDE, RETURNED, GRAD_STEP, BLOCK_D, Q_STAGES,
                       GRAD_STAGES, DS_STAGES, DQ)),
            (produce, (q_desc, k_desc, v_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, k_tiles, v_tiles, lse_buffers, delta_buffers,
                       words, plan, barriers, columns, ranges_ptr, lists, heads, rows, key_rows, N_RANGES, RATIO, ORDERED, PACKED, MIXED,
                       LISTED, SPLIT, KV_STEP, BLOCK_D, Q_STAGES, GRAD_STAGES)),
        ], [4, 1], [240, 24])
