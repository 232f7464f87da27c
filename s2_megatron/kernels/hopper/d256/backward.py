"""dK and dV on Hopper for head dims above 128, where both are too many registers for one warpgroup: one computes dV,
the other dK of the same 64 keys. Both compute S^T, so that there are five products a step instead of four, and nothing
is handed over. A warp loads (d256/backward_loads.py); the accumulators of S^T start at -LSE / scale as in backward.py.

    loading warp                           warpgroup 0 (compute: dV)       warpgroup 1 (compute, KEYS: dK)
    K, V of a block    -- tiles.full --->
    Q, LSE of a step   -- queries.full ->  S^T = K Q^T - LSE / scale       S^T = K Q^T - LSE / scale
    dO, delta of it    -- grads.full --->                                  dP^T = V dO^T
                       <- queries.empty    S^T is there
                                           P^T = exp2(S^T * ...)           P^T = exp2(S^T * ...), under dP^T
                       <- grads.empty ---  dV += P^T dO is there           dP^T is there
                                                                           dK += (P^T * (dP^T - delta)) Q
                       <- queries.empty                                    dK is there
    the next block's   <- tiles.empty ---  all steps are computed          dK has left through V's buffer
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from s2_megatron.kernels.hopper.backward_loads import KeyLoads, StepMemory, step_memory
from s2_megatron.kernels.hopper.columns import KeySchedule
from s2_megatron.kernels.hopper.d256.backward_loads import produce
from s2_megatron.kernels.hopper.gluon_versions import aggregate, reinterpret, tma_store
from s2_megatron.kernels.hopper.memory import (
    HeadRows,
    Result,
    Returned,
    add_returned,
    clear_rows,
    known_lse,
    store_rows,
)
from s2_megatron.kernels.hopper.pipeline import Pipeline, make_pipeline
from s2_megatron.kernels.hopper.schedule import BLOCK, LOG2E, StepLists
from s2_megatron.kernels.hopper.steps import HALF_FLAGS, attends, goes_on, masked_flags_of, row_block_of
from s2_megatron.kernels.hopper.tokens import key_token_mask
from s2_megatron.kernels.hopper.warps import COMPUTE_REGISTERS, COMPUTE_WARPS, LOAD_REGISTERS, LOAD_WARPS
from s2_megatron.kernels.hopper.work_tiles import NUMBERS, receive_key_tile, receive_step


@aggregate
class BlockCall:
    """What the computing warpgroups know of a call."""

    memory: StepMemory
    key_buffers: gl.shared_memory_descriptor  # K, V, dV on its way out; dK goes through that of V
    tiles: Pipeline
    numbers: gl.shared_memory_descriptor  # of the work tiles
    returned: Returned
    scale: gl.tensor
    BLOCK_D: gl.constexpr
    PACKED: gl.constexpr
    LISTED: gl.constexpr
    TOKENS: gl.constexpr
    RETURNED: gl.constexpr
    GRAD_STEP: gl.constexpr  # 0 where KV heads share the rows of dK and dV


@gluon.jit
def keep_of(step, length, rests, PACKED: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr):
    """bool [64 keys, 64 queries] of a step that is masked: by token in the block's own step, and of a document what it
    has."""
    key_row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    query_row = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    if TOKENS:
        keep = key_token_mask(step & HALF_FLAGS, key_row, query_row, rests, 0)
    else:
        keep = (query_row[None, :] >= key_row[:, None]) | (masked_flags_of(step, 0, False) == 0)
    if PACKED:
        keep = keep & (row_block_of(step) * BLOCK + query_row < length)[None, :]
    return keep


@gluon.jit
def compute(call, result, KEYS: gl.constexpr):
    """One warpgroup: dV of each key block, or KEYS: dK."""
    memory = call.memory
    PACKED: gl.constexpr = call.PACKED
    HEAD_DIM: gl.constexpr = result.HEAD_DIM
    BLOCK_D: gl.constexpr = call.BLOCK_D
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = call.key_buffers.dtype
    staging = call.key_buffers.index(1 if KEYS else 2)
    scale = call.scale
    scale_log2 = scale * LOG2E
    zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
    count = 0
    passes = 0
    call.tiles.wait_full(0)
    tile = receive_key_tile(call.numbers, 0, call.TOKENS)
    while tile.key_length >= 0:
        full_blocks = tile.length // BLOCK
        out = gl.zeros([BLOCK, BLOCK_D], gl.float32, out_layout)
        more = 1
        while more != 0:
            q_stage = memory.queries.stage(count)
            g_stage = memory.grads.stage(count)
            query = memory.q_buffers.index(q_stage)
            grad = memory.grad_buffers.index(g_stage)
            memory.queries.wait_full(count)
            step = receive_step(memory.steps, q_stage)
            more = goes_on(step)
            if attends(step, 0):
                nothing = count >> 30  # see d256/grad_query.py
                key = call.key_buffers.index(nothing)
                # Rows behind a sequence are zeros, whatever their probabilities; behind a document there is another
                # one.
                masked = masked_flags_of(step, 0, call.TOKENS) != 0
                partial = False
                if PACKED:
                    partial = row_block_of(step) >= full_blocks
                    if KEYS:
                        if partial:
                            clear_rows(query, tile.length - full_blocks * BLOCK, BLOCK, BLOCK)
                lse = known_lse(memory.lse_buffers.index(q_stage).load(columns), call.LISTED)
                minus_lse = zeros + (lse * (-1.0 / scale))[None, :]
                # S^T = K Q^T - LSE / scale, [64 keys, 64 queries]
                s_token = warpgroup_mma(key, query.permute((1, 0)), minus_lse, is_async=True)
                if KEYS:
                    memory.grads.wait_full(count)
                    # Delta is no start of this product: ptxas would wait for S^T before it writes the registers.
                    value = call.key_buffers.index(1 + nothing)
                    dp_token = warpgroup_mma(value, grad.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    delta = memory.delta_buffers.index(g_stage).load(columns)
                    scores = warpgroup_mma_wait(1, deps=[s_token])
                    p = gl.exp2(scores * scale_log2)
                    memory.grads.wait_full(count)  # keeps the exponentials under dP: see forward.py
                    dp = warpgroup_mma_wait(0, deps=[dp_token])
                    memory.grads.release(count)
                    ds = p * (dp - delta[None, :])  # dS^T = P^T * (dP^T - delta)
                    if masked | partial:  # the product, for gradients behind a document may be NaN
                        ds = gl.where(keep_of(step, tile.length, tile.rests, PACKED, call.TOKENS, s_layout), ds, 0.0)
                    factor = gl.convert_layout(ds.to(dtype), operand)
                    out_token = warpgroup_mma(factor, query, out, is_async=True)  # dK / scale += dS^T Q, [64, BLOCK_D]
                    out, factor = warpgroup_mma_wait(0, deps=[out_token, factor])
                    memory.queries.release(count)
                else:
                    scores = warpgroup_mma_wait(0, deps=[s_token])
                    memory.queries.release(count)
                    p = gl.exp2(scores * scale_log2)
                    if masked | partial:
                        p = gl.where(keep_of(step, tile.length, tile.rests, PACKED, call.TOKENS, s_layout), p, 0.0)
                    factor = gl.convert_layout(p.to(dtype), operand)
                    memory.grads.wait_full(count)
                    if PACKED:
                        if partial:
                            clear_rows(grad, tile.length - full_blocks * BLOCK, BLOCK, BLOCK)
                    out_token = warpgroup_mma(factor, grad, out, is_async=True)  # dV += P^T dO, [64 keys, BLOCK_D]
                    out, factor = warpgroup_mma_wait(0, deps=[out_token, factor])
                    memory.grads.release(count)
            else:  # a block that nothing attends
                memory.grads.wait_full(count)
                memory.grads.release(count)
                memory.queries.release(count)
            count += 1
        if KEYS:
            out = out * scale
        else:
            call.tiles.release(0)
        block = tile.first
        row = block * BLOCK
        if call.RETURNED:
            out = add_returned(out, call.returned, tile.batch, tile.kv_head, block, 0 if KEYS else 1, HEAD_DIM, BLOCK_D)
        grad_head = tile.kv_head * call.GRAD_STEP
        if result.BY_ROWS or (PACKED and row + BLOCK > tile.length):  # TMA would write into the next document
            if KEYS:
                call.tiles.release(0)
            store_rows(result.rows.head(tile.batch, grad_head), out, tile.token + row, result.rows.stride_s, tile.token + tile.key_length,
                       HEAD_DIM, BLOCK_D)
        else:
            if not KEYS:
                tma.store_wait(0)  # the block before has left the buffer
            staging.store(out.to(dtype))
            fence_async_shared()
            tma_store(result.desc, [tile.batch, grad_head, tile.token + row, 0],
                      reinterpret(staging, dtype, [1, 1, BLOCK, BLOCK_D], result.desc.layout))
            if KEYS:
                tma.store_wait(0)
                call.tiles.release(0)
        passes += 1
        call.tiles.wait_full(passes)
        tile = receive_key_tile(call.numbers, 0, call.TOKENS)
    tma.store_wait(0)


# Arguments that differ from batch to batch are not specialised.
@gluon.jit(do_not_specialize=["rows", "key_rows", "n_long", "n_rest", "n_programs", "head_group", "n_sink"])
def s2_hopper_d256_backward_kernel(q_desc, k_desc, v_desc, grad_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, counter_ptr,
                                   returned_ptr, returned_starts_ptr, returned_entries_ptr, ranges_ptr, tokens_ptr, order_ptr, documents_ptr,
                                   distance_ptr, list_rows_ptr, list_tiles_ptr, list_steps_ptr, scale, rows, key_rows, heads, n_long, n_rest,
                                   n_programs, units, batches, head_group, n_sink, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh,
                                   stride_dvs, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr, RATIO: gl.constexpr, ORDERED: gl.constexpr,
                                   PACKED: gl.constexpr, MIXED: gl.constexpr, LISTED: gl.constexpr, TOKENS: gl.constexpr, KV_STEP: gl.constexpr,
                                   GRAD_STEP: gl.constexpr, BY_ROWS: gl.constexpr, RETURNED: gl.constexpr, BLOCK_D: gl.constexpr,
                                   Q_STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr, num_warps: gl.constexpr):
    """Arguments as in backward.py, without those of dQ and of columns in parts."""
    dtype: gl.constexpr = q_desc.dtype
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    key_buffers = gl.allocate_shared_memory(dtype, [3, BLOCK, BLOCK_D], matrix)
    key_boxes = reinterpret(key_buffers, dtype, [3, 1, 1, BLOCK, BLOCK_D], box)
    memory = step_memory(dtype, BLOCK_D, Q_STAGES, GRAD_STAGES)
    q_boxes = reinterpret(memory.q_buffers, dtype, [Q_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    grad_boxes = reinterpret(memory.grad_buffers, dtype, [GRAD_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS + 1 if TOKENS else NUMBERS, 1], vector)
    tiles = make_pipeline(STAGES=1, FILLS=2, READERS=2)  # filled by TMA and by the numbers
    fence_async_shared()
    lists = StepLists(list_rows_ptr, list_tiles_ptr, list_steps_ptr)
    schedule = KeySchedule(
        ranges_ptr=ranges_ptr, order_ptr=order_ptr, documents_ptr=documents_ptr, distance_ptr=distance_ptr,
        counter_ptr=counter_ptr, lists=lists, tokens_ptr=tokens_ptr, heads=heads, rows=rows, key_rows=key_rows, n_programs=n_programs,
        n_long=n_long, n_rest=n_rest, units=units, batches=batches, head_group=head_group, fold=0, n_split=0,
        part_steps=0, n_sink=n_sink, sink_parts=1, N_RANGES=N_RANGES, RATIO=RATIO, ORDERED=ORDERED, PACKED=PACKED, MIXED=MIXED, LISTED=LISTED, TOKENS=TOKENS,
        SPLIT=False)
    loads = KeyLoads(
        q_desc=q_desc, k_desc=k_desc, v_desc=v_desc, grad_desc=grad_desc, lse_ptr=lse_ptr, delta_ptr=delta_ptr,
        memory=memory, tiles=tiles, numbers=numbers, q_boxes=q_boxes, grad_boxes=grad_boxes, k_boxes=key_boxes,
        v_boxes=key_boxes, KV_STEP=KV_STEP, BLOCK_D=BLOCK_D)
    returned = Returned(
        slots_ptr=returned_ptr, starts_ptr=returned_starts_ptr, entries_ptr=returned_entries_ptr, batches=batches,
        kv_heads=heads // RATIO)
    call = BlockCall(
        memory=memory, key_buffers=key_buffers, tiles=tiles, numbers=numbers, returned=returned, scale=scale,
        BLOCK_D=BLOCK_D, PACKED=PACKED, LISTED=LISTED, TOKENS=TOKENS, RETURNED=RETURNED, GRAD_STEP=GRAD_STEP)
    dk = Result(dk_desc, HeadRows(dk_ptr, stride_dkb, stride_dkh, stride_dks), HEAD_DIM, BY_ROWS)
    dv = Result(dv_desc, HeadRows(dv_ptr, stride_dvb, stride_dvh, stride_dvs), HEAD_DIM, BY_ROWS)
    gl.warp_specialize([(compute, (call, dv, False)), (compute, (call, dk, True)), (produce, (loads, schedule))],
                       [COMPUTE_WARPS, LOAD_WARPS], [COMPUTE_REGISTERS, LOAD_REGISTERS])
