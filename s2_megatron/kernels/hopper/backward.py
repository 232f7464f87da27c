r"""dK and dV on Hopper: two warpgroups compute, each the 64 keys of one half of a key tile, on [64 keys, 64 queries] a
step; a warp loads (backward_loads.py), and says with a descriptor of each step which half attends it.

    loading warp                                 warpgroups 0 and 1 (compute), 64 keys each
    K, V of a tile     -- tiles.full ---------->
    Q, LSE of a step   -- queries.full -------->  S^T  = K Q^T - LSE / scale \  in flight together
    dO, delta of it    -- grads.full ---------->  dP^T = V dO^T - delta      /
                                                  P^T  = exp2(S^T * scale * log2(e)), under dP^T
                                                  dV  += P^T dO
                                                  dS^T = P^T * dP^T
                       <- grads.empty ----------  dK  += dS^T Q, begun before dV is waited for
                       <- queries.empty --------
    the next tile's    <- tiles.empty ----------  dK, dV have left through the buffers of K and V
                                                    |            ^
    DQ:                                          ds.full      ds.empty
                                                    v            |
                       <- tiles.empty ----------  warpgroup 2 (add_grad_query): dQ += dS K, by TMA in fp32

The accumulators of S^T and dP^T start at -LSE / scale and -delta, which frees the registers that both would take: P^T
is exp2 of the first, and dS^T is P^T times the second. A warpgroup skips the query blocks that attend the other half of
the tile only. DQ: dQ in the same pass, by a third warpgroup that multiplies dS with the keys and adds the result to an
fp32 buffer through TMA, in whatever order the tiles come; without it the result is bitwise repeatable. SPLIT: a column
may be in several programs (parts.py).
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

from s2_megatron.kernels.hopper.backward_loads import KeyLoads, StepMemory, produce, step_memory
from s2_megatron.kernels.hopper.columns import KeySchedule
from s2_megatron.kernels.hopper.gluon_versions import aggregate, reinterpret, tma_add, tma_store
from s2_megatron.kernels.hopper.memory import (
    HeadRows,
    Result,
    Returned,
    add_returned,
    clear_rows,
    known_lse,
    store_rows,
)
from s2_megatron.kernels.hopper.parts import PartSums, add_parts, is_last_part
from s2_megatron.kernels.hopper.pipeline import Pipeline, make_pipeline
from s2_megatron.kernels.hopper.schedule import BLOCK, LOG2E, StepLists
from s2_megatron.kernels.hopper.steps import HALF_FLAGS, attends, goes_on, masked_flags_of, member_of, row_block_of
from s2_megatron.kernels.hopper.tokens import key_token_mask
from s2_megatron.kernels.hopper.warps import (
    COMPUTE_REGISTERS,
    COMPUTE_REGISTERS_BESIDE_DQ,
    COMPUTE_WARPS,
    DQ_REGISTERS,
    LOAD_REGISTERS,
    LOAD_WARPS,
)
from s2_megatron.kernels.hopper.work_tiles import NUMBERS, receive_key_tile, receive_step


@aggregate
class GradScores:
    """DQ: dS of both halves of a tile, with the step's descriptor, on its way to the warpgroup of dQ."""

    buffers: gl.shared_memory_descriptor  # [2 * stages, 64 keys, 64 queries]
    steps: gl.shared_memory_descriptor
    pipeline: Pipeline


@aggregate
class KeyCall:
    """What the computing warpgroups know of a call."""

    memory: StepMemory
    k_buffers: gl.shared_memory_descriptor  # [2 tiles * 2 halves, 64, BLOCK_D]
    v_buffers: gl.shared_memory_descriptor
    tiles: Pipeline
    numbers: gl.shared_memory_descriptor  # of the work tiles
    ds: GradScores  # None without DQ
    dk: Result
    dv: Result
    parts: PartSums
    returned: Returned
    scale: gl.tensor
    BLOCK_D: gl.constexpr
    PACKED: gl.constexpr
    LISTED: gl.constexpr
    SPLIT: gl.constexpr
    TOKENS: gl.constexpr
    RETURNED: gl.constexpr
    GRAD_STEP: gl.constexpr  # 0 where KV heads share the rows of dK and dV
    DQ: gl.constexpr


@gluon.jit
def add_grad_query(dq_desc, dq_buffers, k_chunks, call, RATIO: gl.constexpr):
    """The warpgroup of dQ: of each query block, 64 columns at a time."""
    CHUNKS: gl.constexpr = call.BLOCK_D // 64
    ds = call.ds
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    count = 0
    tiles = 0
    call.tiles.wait_full(0)
    tile = receive_key_tile(call.numbers, 0, call.TOKENS)
    while tile.key_length >= 0:
        slot = tiles % 2
        more = 1
        while more != 0:
            stage = ds.pipeline.stage(count)
            ds.pipeline.wait_full(count)
            step = receive_step(ds.steps, stage)
            more = goes_on(step)
            for chunk in gl.static_range(CHUNKS):
                zeros = gl.zeros([BLOCK, 64], gl.float32, layout)
                # dQ / scale = dS K of both halves' keys, [64 queries, 64 dims]
                dq_token = warpgroup_mma(ds.buffers.index(stage * 2).permute((1, 0)),
                                         k_chunks.index(slot * 2 * CHUNKS + chunk), zeros, use_acc=False, is_async=True)
                dq_token = warpgroup_mma(ds.buffers.index(stage * 2 + 1).permute((1, 0)),
                                         k_chunks.index((slot * 2 + 1) * CHUNKS + chunk), dq_token, is_async=True)
                dq = warpgroup_mma_wait(0, deps=[dq_token])
                if chunk == CHUNKS - 1:
                    ds.pipeline.release(count)
                tma.store_wait(CHUNKS - 1)  # the one before with this buffer
                dq_buffers.index(chunk).store(dq)
                fence_async_shared()
                tma_add(dq_desc, [tile.batch, tile.kv_head * RATIO + member_of(step), tile.token + row_block_of(step) * BLOCK, chunk * 64],
                        reinterpret(dq_buffers.index(chunk), gl.float32, [1, 1, BLOCK, 64], dq_desc.layout))
            count += 1
        mbarrier.arrive(call.tiles.empty.index(slot), count=1)
        tiles += 1
        call.tiles.wait_full(tiles)
        tile = receive_key_tile(call.numbers, tiles % 2, call.TOKENS)
    tma.store_wait(0)


@gluon.jit
def start_grad_p(value, grad, memory, count, partial, present, PACKED: gl.constexpr):
    """dP^T - delta = V dO^T - delta of a query block, [64 keys, 64 queries], on its way."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    memory.grads.wait_full(count)
    if PACKED:
        if partial:
            clear_rows(grad, present, BLOCK, BLOCK)
    delta = memory.delta_buffers.index(memory.grads.stage(count)).load(gl.SliceLayout(0, layout))
    minus_delta = gl.zeros([BLOCK, BLOCK], gl.float32, layout) - delta[None, :]
    return warpgroup_mma(value, grad.permute((1, 0)), minus_delta, is_async=True)


@gluon.jit
def send_ds(values, step, count, ds, HALF: gl.constexpr):
    """dS of one half, and the step's descriptor, to the warpgroup of dQ."""
    stage = ds.pipeline.stage(count)
    ds.pipeline.wait_empty(count)
    ds.buffers.index(stage * 2 + HALF).store(values)
    if HALF == 0:
        ds.steps.index(stage).store(gl.full([1], step, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    fence_async_shared()
    mbarrier.arrive(ds.pipeline.full_barrier(count), count=1)


@gluon.jit
def store_gradients(call, tile, block, key, value, dk, dv, dtype: gl.constexpr):
    """dK and dV of one half of a tile; key, value: its buffers, through which they go."""
    BLOCK_D: gl.constexpr = call.BLOCK_D
    HEAD_DIM: gl.constexpr = call.dk.HEAD_DIM
    row = block * BLOCK
    grad_head = tile.kv_head * call.GRAD_STEP
    if call.dk.BY_ROWS or (call.PACKED and row + BLOCK > tile.length):  # TMA would write into the next document
        last_row = tile.token + tile.key_length
        store_rows(call.dk.rows.head(tile.batch, grad_head), dk, tile.token + row, call.dk.rows.stride_s, last_row, HEAD_DIM, BLOCK_D)
        store_rows(call.dv.rows.head(tile.batch, grad_head), dv, tile.token + row, call.dv.rows.stride_s, last_row, HEAD_DIM, BLOCK_D)
    else:
        place = [tile.batch, grad_head, tile.token + row, 0]
        value.store(dv.to(dtype))  # nobody else reads this half's values
        fence_async_shared()
        tma_store(call.dv.desc, place, reinterpret(value, dtype, [1, 1, BLOCK, BLOCK_D], call.dv.desc.layout))
        if call.DQ:  # the half's keys are needed for dQ yet
            tma.store_wait(0)
            value.store(dk.to(dtype))
            fence_async_shared()
            tma_store(call.dk.desc, place, reinterpret(value, dtype, [1, 1, BLOCK, BLOCK_D], call.dk.desc.layout))
        else:
            key.store(dk.to(dtype))
            fence_async_shared()
            tma_store(call.dk.desc, place, reinterpret(key, dtype, [1, 1, BLOCK, BLOCK_D], call.dk.desc.layout))


@gluon.jit
def compute(call, HALF: gl.constexpr):
    """One warpgroup: the keys of half HALF of each tile."""
    memory = call.memory
    PACKED: gl.constexpr = call.PACKED
    HEAD_DIM: gl.constexpr = call.dk.HEAD_DIM
    BLOCK_D: gl.constexpr = call.BLOCK_D
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = call.k_buffers.dtype
    scale = call.scale
    scale_log2 = scale * LOG2E
    count = 0
    tiles = 0
    call.tiles.wait_full(0)
    tile = receive_key_tile(call.numbers, 0, call.TOKENS)
    while tile.key_length >= 0:
        slot = tiles % 2
        block = tile.first if HALF == 0 else tile.second
        key = call.k_buffers.index(slot * 2 + HALF)
        value = call.v_buffers.index(slot * 2 + HALF)
        full_blocks = tile.length // BLOCK
        dk = gl.zeros([BLOCK, BLOCK_D], gl.float32, kv_layout)
        dv = gl.zeros([BLOCK, BLOCK_D], gl.float32, kv_layout)
        key_row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, s_layout))
        query_row = gl.arange(0, BLOCK, layout=columns)
        if PACKED:
            if block >= full_blocks:  # in part behind the document, or not there at all
                clear_rows(key, tile.length - block * BLOCK, BLOCK, BLOCK)
                clear_rows(value, tile.length - block * BLOCK, BLOCK, BLOCK)
        if tiles > 0:  # the gradients of the tile before have left its buffers by now
            tma.store_wait(0)
            mbarrier.arrive(call.tiles.empty.index(1 - slot), count=1)
        more = 1
        while more != 0:
            q_stage = memory.queries.stage(count)
            query = memory.q_buffers.index(q_stage)
            grad = memory.grad_buffers.index(memory.grads.stage(count))
            memory.queries.wait_full(count)
            step = receive_step(memory.steps, q_stage)
            more = goes_on(step)
            if attends(step, HALF):
                flags = masked_flags_of(step, HALF, call.TOKENS)
                # Rows behind a sequence are zeros, whatever their probabilities; behind a document there is another
                # one.
                partial = False
                if PACKED:
                    partial = row_block_of(step) >= full_blocks
                    if partial:
                        clear_rows(query, tile.length - full_blocks * BLOCK, BLOCK, BLOCK)
                zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
                lse = known_lse(memory.lse_buffers.index(q_stage).load(columns), call.LISTED)
                minus_lse = zeros + (lse * (-1.0 / scale))[None, :]
                # S^T = K Q^T - LSE / scale, [64 keys, 64 queries]
                s_token = warpgroup_mma(key, query.permute((1, 0)), minus_lse, is_async=True)
                dp_token = start_grad_p(value, grad, memory, count, partial, tile.length - full_blocks * BLOCK, PACKED)
                scores = warpgroup_mma_wait(1, deps=[s_token])
                p = gl.exp2(scores * scale_log2)  # P^T = exp(scale * K Q^T - LSE)
                if (flags != 0) | partial:
                    if call.TOKENS:
                        keep = key_token_mask((step >> HALF) & HALF_FLAGS, key_row, query_row, tile.rests, HALF)
                    else:
                        keep = (query_row[None, :] >= key_row[:, None]) | (flags == 0)
                    if PACKED:
                        keep = keep & (row_block_of(step) * BLOCK + query_row < tile.length)[None, :]
                    p = gl.where(keep, p, 0.0)
                p_operand = gl.convert_layout(p.to(dtype), operand)
                dv_token = warpgroup_mma(p_operand, grad, dv, is_async=True)  # dV += P^T dO, [64 keys, BLOCK_D]
                dp = warpgroup_mma_wait(1, deps=[dp_token])
                ds = (p * dp).to(dtype)  # dS^T = P^T * (dP^T - delta)
                ds_operand = gl.convert_layout(ds, operand)
                if call.DQ:
                    send_ds(ds, step, count, call.ds, HALF)
                dk_token = warpgroup_mma(ds_operand, query, dk, is_async=True)  # dK / scale += dS^T Q
                dv, p_operand = warpgroup_mma_wait(1, deps=[dv_token, p_operand])
                memory.grads.release(count)
                dk, ds_operand = warpgroup_mma_wait(0, deps=[dk_token, ds_operand])
                memory.queries.release(count)
            else:  # a step of the other half alone
                memory.grads.wait_full(count)
                if call.DQ:
                    send_ds(gl.zeros([BLOCK, BLOCK], dtype, s_layout), step, count, call.ds, HALF)
                memory.grads.release(count)
                memory.queries.release(count)
            count += 1
        whole = block * BLOCK < tile.key_length
        if call.SPLIT:
            if whole:
                dk, dv = add_parts(dk, dv, tile.link, call.parts, HALF, BLOCK_D)
            whole = whole & is_last_part(tile.link)
        dk_out = dk * scale
        if whole:
            if call.RETURNED:
                dk_out = add_returned(dk_out, call.returned, tile.batch, tile.kv_head, block, 0, HEAD_DIM, BLOCK_D)
                dv = add_returned(dv, call.returned, tile.batch, tile.kv_head, block, 1, HEAD_DIM, BLOCK_D)
            store_gradients(call, tile, block, key, value, dk_out, dv, dtype)
        tiles += 1
        call.tiles.wait_full(tiles)
        tile = receive_key_tile(call.numbers, tiles % 2, call.TOKENS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "key_rows", "fold", "n_long", "n_rest", "n_programs", "head_group", "n_split",
                               "part_steps", "n_sink", "sink_parts"])  # they differ from batch to batch
def s2_hopper_backward_kernel(q_desc, k_desc, v_desc, grad_desc, dk_desc, dv_desc, dq_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, counter_ptr,
                              returned_ptr, returned_starts_ptr, returned_entries_ptr, sums_ptr, ranges_ptr, tokens_ptr, order_ptr, documents_ptr,
                              distance_ptr, list_rows_ptr, list_tiles_ptr, list_steps_ptr, scale, rows, key_rows, heads, fold, n_long, n_rest,
                              n_programs, units, batches, head_group, n_split, part_steps, n_sink, sink_parts, stride_dkb, stride_dkh, stride_dks,
                              stride_dvb, stride_dvh, stride_dvs, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr, RATIO: gl.constexpr,
                              ORDERED: gl.constexpr, PACKED: gl.constexpr, MIXED: gl.constexpr, LISTED: gl.constexpr, SPLIT: gl.constexpr,
                              TOKENS: gl.constexpr, KV_STEP: gl.constexpr, GRAD_STEP: gl.constexpr, BY_ROWS: gl.constexpr, RETURNED: gl.constexpr,
                              BLOCK_D: gl.constexpr, Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr, DS_STAGES: gl.constexpr,
                              DQ: gl.constexpr, num_warps: gl.constexpr):
    """Tensors are [batch, heads, rows, HEAD_DIM] with any strides, in descriptors with boxes of 64 x BLOCK_D (dQ /
    scale, fp32: 64 x 64); LSE and delta [batch * heads * rows]. KV_STEP, GRAD_STEP: 0 where KV heads share the rows of
    K and V, or of their gradients. BY_ROWS: see Result. counter: 0, and SPLIT: as many zeros behind it as there are
    halves in sums_ptr. RETURNED: what was returned is added to the gradients; each is rounded once."""
    dtype: gl.constexpr = q_desc.dtype
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    matrix_fp32: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CHUNKS: gl.constexpr = BLOCK_D // 64
    k_buffers = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK_D], matrix)  # two tiles of two halves
    v_buffers = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK_D], matrix)
    k_boxes = reinterpret(k_buffers, dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    v_boxes = reinterpret(v_buffers, dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    k_chunks = reinterpret(k_buffers, dtype, [4 * CHUNKS, BLOCK, 64], matrix)
    memory = step_memory(dtype, BLOCK_D, Q_STAGES, GRAD_STAGES)
    q_boxes = reinterpret(memory.q_buffers, dtype, [Q_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    grad_boxes = reinterpret(memory.grad_buffers, dtype, [GRAD_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    numbers = gl.allocate_shared_memory(gl.int32, [2 * (NUMBERS + 1 if TOKENS else NUMBERS), 1], vector)
    tiles = make_pipeline(STAGES=2, FILLS=2, READERS=3 if DQ else 2)  # filled by TMA and by the numbers
    if DQ:
        ds_buffers = gl.allocate_shared_memory(dtype, [2 * DS_STAGES, BLOCK, BLOCK], matrix)
        ds_steps = gl.allocate_shared_memory(gl.int32, [DS_STAGES, 1], vector)
        ds = GradScores(ds_buffers, ds_steps, make_pipeline(STAGES=DS_STAGES, FILLS=2, READERS=1))
    else:
        ds: gl.constexpr = None  # a pipeline that is made has to be used: see pipeline.py
    fence_async_shared()
    lists = StepLists(list_rows_ptr, list_tiles_ptr, list_steps_ptr)
    schedule = KeySchedule(
        ranges_ptr=ranges_ptr, order_ptr=order_ptr, documents_ptr=documents_ptr, distance_ptr=distance_ptr,
        counter_ptr=counter_ptr, lists=lists, tokens_ptr=tokens_ptr, heads=heads, rows=rows, key_rows=key_rows, n_programs=n_programs,
        n_long=n_long, n_rest=n_rest, units=units, batches=batches, head_group=head_group, fold=fold, n_split=n_split,
        part_steps=part_steps, n_sink=n_sink, sink_parts=sink_parts, N_RANGES=N_RANGES, RATIO=RATIO, ORDERED=ORDERED, PACKED=PACKED, MIXED=MIXED,
        LISTED=LISTED, TOKENS=TOKENS, SPLIT=SPLIT)
    loads = KeyLoads(
        q_desc=q_desc, k_desc=k_desc, v_desc=v_desc, grad_desc=grad_desc, lse_ptr=lse_ptr, delta_ptr=delta_ptr,
        memory=memory, tiles=tiles, numbers=numbers, q_boxes=q_boxes, grad_boxes=grad_boxes, k_boxes=k_boxes,
        v_boxes=v_boxes, KV_STEP=KV_STEP, BLOCK_D=BLOCK_D)
    dk = Result(dk_desc, HeadRows(dk_ptr, stride_dkb, stride_dkh, stride_dks), HEAD_DIM, BY_ROWS)
    dv = Result(dv_desc, HeadRows(dv_ptr, stride_dvb, stride_dvh, stride_dvs), HEAD_DIM, BY_ROWS)
    returned = Returned(
        slots_ptr=returned_ptr, starts_ptr=returned_starts_ptr, entries_ptr=returned_entries_ptr, batches=batches,
        kv_heads=heads // RATIO)
    call = KeyCall(
        memory=memory, k_buffers=k_buffers, v_buffers=v_buffers, tiles=tiles, numbers=numbers, ds=ds, dk=dk, dv=dv,
        parts=PartSums(sums_ptr, counter_ptr), returned=returned, scale=scale, BLOCK_D=BLOCK_D, PACKED=PACKED,
        LISTED=LISTED, TOKENS=TOKENS, SPLIT=SPLIT, RETURNED=RETURNED, GRAD_STEP=GRAD_STEP, DQ=DQ)
    if DQ:
        dq_buffers = gl.allocate_shared_memory(gl.float32, [CHUNKS, BLOCK, 64], matrix_fp32)
        gl.warp_specialize([(compute, (call, 0)), (compute, (call, 1)),
                            (add_grad_query, (dq_desc, dq_buffers, k_chunks, call, RATIO)),
                            (produce, (loads, schedule))],
                           [COMPUTE_WARPS, COMPUTE_WARPS, LOAD_WARPS],
                           [COMPUTE_REGISTERS_BESIDE_DQ, DQ_REGISTERS, LOAD_REGISTERS])
    else:
        gl.warp_specialize([(compute, (call, 0)), (compute, (call, 1)), (produce, (loads, schedule))],
                           [COMPUTE_WARPS, LOAD_WARPS], [COMPUTE_REGISTERS, LOAD_REGISTERS])
