"""dK and dV on Hopper: two warpgroups compute, each the 64 keys of one half of a key tile, on [64 keys, 64 queries] a step; a warp loads.

The accumulators of S^T and dP^T start at -LSE / scale and -delta, which frees the registers that both would take: P^T is exp2 of the first, and
dS^T is P^T times the second. A warpgroup passes by the query blocks that attend the other half of the tile only. DQ: dQ in the same pass, by a
third warpgroup that multiplies dS with the keys and adds the result to an fp32 buffer through the copy engine, in whatever order the tiles
come; without it the result is bitwise repeatable.
"""
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from s2_megatron.kernels.hopper_columns import key_tile, query_run
from s2_megatron.kernels.hopper_memory import clear_rows, receive_plan, send_plan
from s2_megatron.kernels.hopper_schedule import BLOCK, LOG2E


@builtin
def add_through_tma(desc, coord, source, _semantic=None):
    """desc[coord] += source (shared memory), by the copy engine. Gluon has the operation but exports no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle)


@gluon.jit
def produce(q_desc, k_desc, v_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, k_tiles, v_tiles, lse_buffers, delta_buffers, plan,
            barriers, columns, ranges_ptr, scale, heads, rows, N_RANGES: gl.constexpr, RATIO: gl.constexpr, HEAD_GROUP: gl.constexpr,
            ORDERED: gl.constexpr, PACKED: gl.constexpr, MIXED: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr,
            GRAD_STAGES: gl.constexpr):
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty, ds_full, ds_empty = barriers
    counter_ptr, n_programs, n_long, n_rest, units, batches, order_ptr, documents_ptr, distance_ptr = columns
    # LSE and delta go through registers: the copy engine wants them on 16 bytes, and a document may start anywhere.
    vector: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    lane = gl.arange(0, BLOCK, layout=vector)
    count = 0
    tiles = 0
    index = gl.atomic_add(counter_ptr, 1)
    while index < n_programs:
        batch, kv_head, token, length, first, second = key_tile(index, n_long, n_rest, units, batches, order_ptr, documents_ptr, ranges_ptr,
                                                                distance_ptr, rows, N_RANGES, RATIO, HEAD_GROUP, ORDERED, PACKED, MIXED)
        index = gl.atomic_add(counter_ptr, 1)
        n_blocks = (length + BLOCK - 1) // BLOCK
        members = gl.where(first < n_blocks, RATIO, 0)
        if members > 0:
            slot = tiles % 2
            row_a = token + first * BLOCK
            row_b = token + gl.minimum(second, n_blocks - 1) * BLOCK  # a second block that does not exist: something finite
            mbarrier.wait(kv_empty.index(slot), ((tiles // 2) & 1) ^ 1)
            barrier = kv_full.index(slot)
            mbarrier.expect(barrier, 4 * BLOCK * BLOCK_D * 2)
            tma.async_copy_global_to_shared(k_desc, [batch, kv_head, row_a, 0], barrier, k_tiles.index(slot * 2))
            tma.async_copy_global_to_shared(k_desc, [batch, kv_head, row_b, 0], barrier, k_tiles.index(slot * 2 + 1))
            tma.async_copy_global_to_shared(v_desc, [batch, kv_head, row_a, 0], barrier, v_tiles.index(slot * 2))
            tma.async_copy_global_to_shared(v_desc, [batch, kv_head, row_b, 0], barrier, v_tiles.index(slot * 2 + 1))
            send_plan(plan, slot, batch, kv_head, token, length, first, second, 1, 0)
            mbarrier.arrive(barrier, count=1)
            tiles += 1
        for member in range(members):
            head = kv_head * RATIO + member
            steps, top, gap, first_end, second_end = query_run(first, second, n_blocks, ranges_ptr, head, N_RANGES)
            row_base = (batch * heads + head).to(gl.int64) * rows + token
            for step in range(steps):
                query_block = top - 1 - step
                query_block -= gl.where(query_block < second, gap, 0)
                row = query_block * BLOCK
                inside = row + lane < length
                lse = gl.load(lse_ptr + row_base + row + lane, mask=inside, other=0.0)
                delta = gl.load(delta_ptr + row_base + row + lane, mask=inside, other=0.0)
                stage = count % Q_STAGES
                mbarrier.wait(q_empty.index(stage), ((count // Q_STAGES) & 1) ^ 1)
                barrier = q_full.index(stage)
                mbarrier.expect(barrier, BLOCK * BLOCK_D * 2)
                tma.async_copy_global_to_shared(q_desc, [batch, head, token + row, 0], barrier, q_tiles.index(stage))
                lse_buffers.index(stage).store(lse * (-1.0 / scale))
                mbarrier.arrive(barrier, count=1)
                stage = count % GRAD_STAGES
                mbarrier.wait(grad_empty.index(stage), ((count // GRAD_STAGES) & 1) ^ 1)
                barrier = grad_full.index(stage)
                mbarrier.expect(barrier, BLOCK * BLOCK_D * 2)
                tma.async_copy_global_to_shared(grad_desc, [batch, head, token + row, 0], barrier, grad_tiles.index(stage))
                delta_buffers.index(stage).store(-delta)
                mbarrier.arrive(barrier, count=1)
                count += 1
    slot = tiles % 2
    mbarrier.wait(kv_empty.index(slot), ((tiles // 2) & 1) ^ 1)
    send_plan(plan, slot, 0, 0, 0, 0, 0, 0, -1, 0)
    mbarrier.arrive(kv_full.index(slot), count=2)


@gluon.jit
def add_grad_query(dq_desc, k_chunks, ds_buffers, dq_buffers, plan, barriers, ranges_ptr, N_RANGES: gl.constexpr, RATIO: gl.constexpr,
                   BLOCK_D: gl.constexpr, DS_STAGES: gl.constexpr):
    """The warpgroup of dQ: of each query block, 64 columns at a time."""
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty, ds_full, ds_empty = barriers
    CHUNKS: gl.constexpr = BLOCK_D // 64
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    count = 0
    tiles = 0
    mbarrier.wait(kv_full.index(0), 0)
    batch, kv_head, token, length, first, second, live, unused = receive_plan(plan, 0)
    while live > 0:
        slot = tiles % 2
        n_blocks = (length + BLOCK - 1) // BLOCK
        for member in range(RATIO):
            head = kv_head * RATIO + member
            steps, top, gap, first_end, second_end = query_run(first, second, n_blocks, ranges_ptr, head, N_RANGES)
            for step in range(steps):
                query_block = top - 1 - step
                query_block -= gl.where(query_block < second, gap, 0)
                stage = count % DS_STAGES
                mbarrier.wait(ds_full.index(stage), (count // DS_STAGES) & 1)
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
                    add_through_tma(dq_desc, [batch, head, token + query_block * BLOCK, chunk * 64],
                                    dq_buffers.index(chunk)._reinterpret(gl.float32, [1, 1, BLOCK, 64], dq_desc.layout))
                count += 1
        mbarrier.arrive(kv_empty.index(slot), count=1)
        tiles += 1
        mbarrier.wait(kv_full.index(tiles % 2), (tiles // 2) & 1)
        batch, kv_head, token, length, first, second, live, unused = receive_plan(plan, tiles % 2)
    tma.store_wait(0)


@gluon.jit
def start_grad_p(value, grad, delta_buffer, full, phase, partial, present, PACKED: gl.constexpr):
    """dP^T - delta of a query block, on its way."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    mbarrier.wait(full, phase)
    if PACKED:
        if partial:
            clear_rows(grad, present, BLOCK, BLOCK)
    minus_delta = delta_buffer.load(gl.SliceLayout(0, layout))[None, :] + gl.zeros([BLOCK, BLOCK], gl.float32, layout)
    return warpgroup_mma(value, grad.permute((1, 0)), minus_delta, is_async=True)


@gluon.jit
def pass_by(steps, count, ds_buffers, barriers, HALF: gl.constexpr, Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr,
            DS_STAGES: gl.constexpr, DQ: gl.constexpr):
    """Steps that concern the other half of the tile alone. Returns the count of steps after them."""
    kv_full, kv_empty, q_full, q_empty, grad_full, grad_empty, ds_full, ds_empty = barriers
    for step in range(steps):
        q_stage = count % Q_STAGES
        g_stage = count % GRAD_STAGES
        mbarrier.wait(q_full.index(q_stage), (count // Q_STAGES) & 1)
        mbarrier.wait(grad_full.index(g_stage), (count // GRAD_STAGES) & 1)
        if DQ:
            d_stage = count % DS_STAGES
            layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
            mbarrier.wait(ds_empty.index(d_stage), ((count // DS_STAGES) & 1) ^ 1)
            ds_buffers.index(d_stage * 2 + HALF).store(gl.zeros([BLOCK, BLOCK], ds_buffers.dtype, layout))
            fence_async_shared()
            mbarrier.arrive(ds_full.index(d_stage), count=1)
        mbarrier.arrive(grad_empty.index(g_stage), count=1)
        mbarrier.arrive(q_empty.index(q_stage), count=1)
        count += 1
    return count


@gluon.jit
def compute(dk_desc, dv_desc, dk_ptr, dv_ptr, q_buffers, grad_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, ds_buffers, plan,
            barriers, ranges_ptr, scale, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs, HALF: gl.constexpr,
            HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr, RATIO: gl.constexpr, PACKED: gl.constexpr, BLOCK_D: gl.constexpr,
            Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ: gl.constexpr):
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
    batch, kv_head, token, length, first, second, live, unused = receive_plan(plan, 0)
    while live > 0:
        slot = tiles % 2
        block = first if HALF == 0 else second
        key = k_buffers.index(slot * 2 + HALF)
        value = v_buffers.index(slot * 2 + HALF)
        n_blocks = (length + BLOCK - 1) // BLOCK
        full_blocks = length // BLOCK
        dk = gl.zeros([BLOCK, BLOCK_D], gl.float32, kv_layout)
        dv = gl.zeros([BLOCK, BLOCK_D], gl.float32, kv_layout)
        key_row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, s_layout))
        query_row = gl.arange(0, BLOCK, layout=columns)
        if PACKED:
            if block >= full_blocks:  # in part behind the document, or not there at all
                clear_rows(key, gl.maximum(length - block * BLOCK, 0), BLOCK, BLOCK)
                clear_rows(value, gl.maximum(length - block * BLOCK, 0), BLOCK, BLOCK)
        if tiles > 0:  # the gradients of the tile before have left its buffers by now
            tma.store_wait(0)
            mbarrier.arrive(kv_empty.index(1 - slot), count=1)
        for member in range(RATIO):
            steps, top, gap, first_end, second_end = query_run(first, second, n_blocks, ranges_ptr, kv_head * RATIO + member, N_RANGES)
            # From the top down: steps of the other half alone, this half's run, and for the second half the other's again.
            end = first_end if HALF == 0 else second_end
            own = gl.maximum(end - block, 0)
            above = steps - own if HALF == 0 else gl.where(own > 0, top - end, steps)
            count = pass_by(above, count, ds_buffers, barriers, HALF, Q_STAGES, GRAD_STAGES, DS_STAGES, DQ)
            for step in range(own):
                query_block = end - 1 - step
                q_stage = count % Q_STAGES
                g_stage = count % GRAD_STAGES
                query = q_buffers.index(q_stage)
                grad = grad_buffers.index(g_stage)
                mbarrier.wait(q_full.index(q_stage), (count // Q_STAGES) & 1)
                zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
                if PACKED:
                    if query_block >= full_blocks:
                        clear_rows(query, length - full_blocks * BLOCK, BLOCK, BLOCK)
                minus_lse = lse_buffers.index(q_stage).load(columns)[None, :] + zeros
                s_token = warpgroup_mma(key, query.permute((1, 0)), minus_lse, is_async=True)
                dp_token = start_grad_p(value, grad, delta_buffers.index(g_stage), grad_full.index(g_stage), (count // GRAD_STAGES) & 1,
                                        query_block >= full_blocks, length - full_blocks * BLOCK, PACKED)
                scores = warpgroup_mma_wait(1, deps=[s_token])
                p = gl.exp2(scores * scale_log2)
                if (query_block == block) | (query_block >= full_blocks):
                    seen = query_block * BLOCK + query_row
                    p = gl.where((seen[None, :] >= (block * BLOCK + key_row)[:, None]) & (seen < length)[None, :], p, 0.0)
                p_operand = gl.convert_layout(p.to(dtype), operand)
                dv_token = warpgroup_mma(p_operand, grad, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[dp_token])
                ds = (p * dp).to(dtype)
                ds_operand = gl.convert_layout(ds, operand)
                if DQ:
                    d_stage = count % DS_STAGES
                    mbarrier.wait(ds_empty.index(d_stage), ((count // DS_STAGES) & 1) ^ 1)
                    ds_buffers.index(d_stage * 2 + HALF).store(ds)
                    fence_async_shared()
                    mbarrier.arrive(ds_full.index(d_stage), count=1)
                dk_token = warpgroup_mma(ds_operand, query, dk, is_async=True)
                dv, p_operand = warpgroup_mma_wait(1, deps=[dv_token, p_operand])
                mbarrier.arrive(grad_empty.index(g_stage), count=1)
                dk, ds_operand = warpgroup_mma_wait(0, deps=[dk_token, ds_operand])
                mbarrier.arrive(q_empty.index(q_stage), count=1)
                count += 1
            count = pass_by(steps - above - own, count, ds_buffers, barriers, HALF, Q_STAGES, GRAD_STAGES, DS_STAGES, DQ)
        dk_out = (dk * scale).to(dtype)
        dv_out = dv.to(dtype)
        if block < n_blocks:
            if PACKED and (block + 1) * BLOCK > length:  # not through TMA, which would write into the next document
                row = block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, kv_layout))
                dim = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, kv_layout))
                inside = (row < length)[:, None] & (dim < HEAD_DIM)[None, :]
                far = (token + row).to(gl.int64)[:, None]
                dk_base = dk_ptr + batch.to(gl.int64) * stride_dkb + kv_head.to(gl.int64) * stride_dkh
                dv_base = dv_ptr + batch.to(gl.int64) * stride_dvb + kv_head.to(gl.int64) * stride_dvh
                gl.store(dk_base + far * stride_dks + dim[None, :], dk_out, mask=inside)
                gl.store(dv_base + far * stride_dvs + dim[None, :], dv_out, mask=inside)
            else:
                value.store(dv_out)  # nobody else reads this half's values
                fence_async_shared()
                tma.async_copy_shared_to_global(dv_desc, [batch, kv_head, token + block * BLOCK, 0],
                                                value._reinterpret(dtype, [1, 1, BLOCK, BLOCK_D], dv_desc.layout))
                if DQ:  # its keys are wanted for dQ yet
                    tma.store_wait(0)
                    value.store(dk_out)
                    fence_async_shared()
                    tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, token + block * BLOCK, 0],
                                                    value._reinterpret(dtype, [1, 1, BLOCK, BLOCK_D], dk_desc.layout))
                else:
                    key.store(dk_out)
                    fence_async_shared()
                    tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, token + block * BLOCK, 0],
                                                    key._reinterpret(dtype, [1, 1, BLOCK, BLOCK_D], dk_desc.layout))
        tiles += 1
        mbarrier.wait(kv_full.index(tiles % 2), (tiles // 2) & 1)
        batch, kv_head, token, length, first, second, live, unused = receive_plan(plan, tiles % 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "n_long", "n_rest", "n_programs"])  # they differ from batch to batch
def s2_hopper_backward_kernel(q_desc, k_desc, v_desc, grad_desc, lse_ptr, delta_ptr, dq_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, ranges_ptr,
                              order_ptr, documents_ptr, distance_ptr, counter_ptr, scale, rows, heads, n_long, n_rest, n_programs, units,
                              batches,
                              stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs, HEAD_DIM: gl.constexpr,
                              N_RANGES: gl.constexpr, RATIO: gl.constexpr, HEAD_GROUP: gl.constexpr, ORDERED: gl.constexpr,
                              PACKED: gl.constexpr, MIXED: gl.constexpr, BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr,
                              GRAD_STAGES: gl.constexpr, DS_STAGES: gl.constexpr, DQ: gl.constexpr, num_warps: gl.constexpr):
    """Tensors are [batch, heads, rows, HEAD_DIM] with any strides, in descriptors with boxes of 64 x BLOCK_D (dQ / scale, fp32: 64 x 64); LSE
    and delta [batch * heads * rows]."""
    dtype: gl.constexpr = q_desc.dtype
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CHUNKS: gl.constexpr = BLOCK_D // 64
    k_buffers = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK_D], matrix)  # two tiles of two halves
    v_buffers = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK_D], matrix)
    k_tiles = k_buffers._reinterpret(dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    v_tiles = v_buffers._reinterpret(dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    k_chunks = k_buffers._reinterpret(dtype, [4 * CHUNKS, BLOCK, 64], matrix)
    q_buffers = gl.allocate_shared_memory(dtype, [Q_STAGES, BLOCK, BLOCK_D], matrix)
    grad_buffers = gl.allocate_shared_memory(dtype, [GRAD_STAGES, BLOCK, BLOCK_D], matrix)
    q_tiles = q_buffers._reinterpret(dtype, [Q_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    grad_tiles = grad_buffers._reinterpret(dtype, [GRAD_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    ds_buffers = gl.allocate_shared_memory(dtype, [2 * DS_STAGES, BLOCK, BLOCK], matrix)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK], vector)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [GRAD_STAGES, BLOCK], vector)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    plan = gl.allocate_shared_memory(gl.int32, [2 * 8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    columns = (counter_ptr, n_programs, n_long, n_rest, units, batches, order_ptr, documents_ptr, distance_ptr)
    if DQ:
        dq_buffers = gl.allocate_shared_memory(gl.float32, [CHUNKS, BLOCK, 64], wide)
        gl.warp_specialize([
            (compute, (dk_desc, dv_desc, dk_ptr, dv_ptr, q_buffers, grad_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, ds_buffers,
                       plan, barriers, ranges_ptr, scale, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs, 0, HEAD_DIM,
                       N_RANGES, RATIO, PACKED, BLOCK_D, Q_STAGES, GRAD_STAGES, DS_STAGES, DQ)),
            (compute, (dk_desc, dv_desc, dk_ptr, dv_ptr, q_buffers, grad_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, ds_buffers,
                       plan, barriers, ranges_ptr, scale, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs, 1, HEAD_DIM,
                       N_RANGES, RATIO, PACKED, BLOCK_D, Q_STAGES, GRAD_STAGES, DS_STAGES, DQ)),
            (add_grad_query, (dq_desc, k_chunks, ds_buffers, dq_buffers, plan, barriers, ranges_ptr, N_RANGES, RATIO, BLOCK_D, DS_STAGES)),
            (produce, (q_desc, k_desc, v_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, k_tiles, v_tiles, lse_buffers, delta_buffers,
                       plan, barriers, columns, ranges_ptr, scale, heads, rows, N_RANGES, RATIO, HEAD_GROUP, ORDERED, PACKED, MIXED, BLOCK_D,
                       Q_STAGES, GRAD_STAGES)),
        ], [4, 4, 1], [208, 72, 24])
    else:
        gl.warp_specialize([
            (compute, (dk_desc, dv_desc, dk_ptr, dv_ptr, q_buffers, grad_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, ds_buffers,
                       plan, barriers, ranges_ptr, scale, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs, 0, HEAD_DIM,
                       N_RANGES, RATIO, PACKED, BLOCK_D, Q_STAGES, GRAD_STAGES, DS_STAGES, DQ)),
            (compute, (dk_desc, dv_desc, dk_ptr, dv_ptr, q_buffers, grad_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers, ds_buffers,
                       plan, barriers, ranges_ptr, scale, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs, 1, HEAD_DIM,
                       N_RANGES, RATIO, PACKED, BLOCK_D, Q_STAGES, GRAD_STAGES, DS_STAGES, DQ)),
            (produce, (q_desc, k_desc, v_desc, grad_desc, lse_ptr, delta_ptr, q_tiles, grad_tiles, k_tiles, v_tiles, lse_buffers, delta_buffers,
                       plan, barriers, columns, ranges_ptr, scale, heads, rows, N_RANGES, RATIO, HEAD_GROUP, ORDERED, PACKED, MIXED, BLOCK_D,
                       Q_STAGES, GRAD_STAGES)),
        ], [4, 1], [240, 24])
