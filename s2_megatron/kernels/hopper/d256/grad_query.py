r"""dQ on Hopper for head dims above 128: as in grad_query.py, but a stage holds one key block, of which there are more
for K than for V, and the queries' buffer takes the result.

    loading warp                              warpgroups 0 and 1 (compute), 64 queries each
    Q, dO, LSE, delta  -- tiles.full ------->  -LSE / scale and -delta into registers
    K of block n       -- keys.full -------->  S  = Q K^T - LSE / scale   \  in flight together
    V of block n       -- values.full ------>  dP = dO V^T - delta        /
                                               P  = exp2(S * scale * log2(e)), under dP
                       <- values.empty -----   dP is there; dS = P * dP
                       <- keys.empty -------   dQ += dS K is there
    the next tile's    <- tiles.empty ------   scale * dQ has left through Q's buffer
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from s2_megatron.kernels.hopper.gluon_versions import reinterpret, tma_store
from s2_megatron.kernels.hopper.grad_query import GradQueryCall
from s2_megatron.kernels.hopper.memory import (
    HeadRows,
    Result,
    clear_rows,
    known_lse,
    load_rows,
    query_tile_memory,
    store_rows,
)
from s2_megatron.kernels.hopper.query_loads import KeySources, QueryLoads, RowSums, produce
from s2_megatron.kernels.hopper.schedule import BLOCK, LOG2E, QuerySchedule, StepLists, masked_flags
from s2_megatron.kernels.hopper.steps import attends, is_own
from s2_megatron.kernels.hopper.tokens import token_step_mask
from s2_megatron.kernels.hopper.warps import COMPUTE_REGISTERS, COMPUTE_WARPS, LOAD_REGISTERS, LOAD_WARPS
from s2_megatron.kernels.hopper.work_tiles import receive_query_tile, receive_step


@gluon.jit
def gradient_block(dq, minus_lse, minus_delta, memory, count, scale_log2, step, rests, present, HALF: gl.constexpr, MASK: gl.constexpr,
                   PACKED: gl.constexpr, TOKENS: gl.constexpr, BLOCK_D: gl.constexpr):
    """dQ += dS K of one key block. minus_lse, minus_delta: what the two accumulators start with. MASK: by
    the step's flags. present: rows of a document from the query block's first row on, which may be any number."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dq_layout, 2)
    zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
    # Without it ptxas keeps the descriptors of all products with queries and gradients through the loop.
    nothing = count >> 30
    query = memory.halves.index(HALF + nothing)
    grad = memory.halves.index(2 + HALF + nothing)
    key = memory.k_buffers.index(memory.keys.stage(count))
    value = memory.v_buffers.index(memory.values.stage(count))
    start_s = zeros + minus_lse[:, None]
    start_dp = zeros + minus_delta[:, None]
    memory.keys.wait_full(count)
    if MASK and PACKED:
        if is_own(step, HALF, TOKENS) & (present < BLOCK):  # keys behind the document may hold anything, and 0 * NaN is NaN
            clear_rows(key, present, BLOCK, BLOCK)
    # S = Q K^T - LSE / scale and dP - delta = dO V^T - delta, [64 queries, 64 keys]
    s_token = warpgroup_mma(query, key.permute((1, 0)), start_s, is_async=True)
    memory.values.wait_full(count)
    dp_token = warpgroup_mma(grad, value.permute((1, 0)), start_dp, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[s_token])
    p = gl.exp2(scores * scale_log2)  # P = exp(scale * Q K^T - LSE)
    memory.values.wait_full(count)  # keeps the exponentials under dP: see forward.py
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    memory.values.release(count)
    ds = p * dp  # dS = P * (dP - delta)
    if MASK:  # the product, for values behind a document may be NaN
        row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, s_layout))
        column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, s_layout))
        if TOKENS:
            keep = token_step_mask(step, row, column, rests, HALF)
        else:
            keep = (row[:, None] >= column[None, :]) | (is_own(step, HALF, TOKENS) == 0)
        ds = gl.where(keep, ds, 0.0)
    ds = gl.convert_layout(ds.to(query.dtype), operand)
    dq_token = warpgroup_mma(ds, key, dq, is_async=True)  # dQ / scale += dS K, [64 queries, BLOCK_D]
    dq, ds = warpgroup_mma_wait(0, deps=[dq_token, ds])
    memory.keys.release(count)
    return dq


@gluon.jit
def compute(call, HALF: gl.constexpr):
    """One warpgroup: half HALF of each tile."""
    memory = call.memory
    PACK: gl.constexpr = call.PACK
    PACKED: gl.constexpr = call.PACKED
    HEAD_DIM: gl.constexpr = call.out.HEAD_DIM
    BLOCK_D: gl.constexpr = call.BLOCK_D
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    query = memory.halves.index(HALF)
    scale = call.scale
    scale_log2 = scale * LOG2E
    count = 0
    tiles = 0
    memory.tiles.wait_full(0)
    tile = receive_query_tile(memory.numbers, 0)
    while tile.free_steps >= 0:
        first_row = (tile.low + HALF * (1 - PACK)) * BLOCK
        own_head = tile.head + HALF * PACK
        minus_lse = known_lse(call.sums.lse_buffers.index(HALF).load(s_rows), call.LISTED) * (-1.0 / scale)
        minus_delta = -call.sums.delta_buffers.index(HALF).load(s_rows)
        dq = gl.zeros([BLOCK, BLOCK_D], gl.float32, dq_layout)
        tiles += 1
        # With those of step 0.
        for number in range(2 * tile.masked_steps if call.LISTED else 2 * tile.masked_steps + 2):
            if call.LISTED or call.TOKENS:
                memory.keys.wait_full(count)
                step = receive_step(memory.steps, memory.keys.stage(count))
            else:
                step = masked_flags(tile.marks, number, PACK)
            if attends(step, HALF):
                dq = gradient_block(dq, minus_lse, minus_delta, memory, count, scale_log2, step, tile.marks >> 2,
                                    tile.length - first_row, HALF=HALF, MASK=True, PACKED=PACKED, TOKENS=call.TOKENS,
                                    BLOCK_D=BLOCK_D)
            else:
                memory.keys.wait_full(count)
                memory.values.wait_full(count)
                memory.values.release(count)
                memory.keys.release(count)
            count += 1
        for number in range(2 * tile.free_steps):
            dq = gradient_block(dq, minus_lse, minus_delta, memory, count, scale_log2, 0, 0, BLOCK,
                                HALF=HALF, MASK=False, PACKED=PACKED, TOKENS=False, BLOCK_D=BLOCK_D)
            count += 1
        dq = dq * scale
        if call.CONTINUE:
            dq += load_rows(call.initial.head(tile.batch, own_head), first_row, call.initial.stride_s, tile.length, dq_layout, HEAD_DIM,
                            BLOCK_D)
        if call.out.BY_ROWS or (PACKED and first_row + BLOCK > tile.length):  # TMA would write into the next document
            memory.tiles.release(0)
            store_rows(call.out.rows.head(tile.batch, own_head), dq, tile.token + first_row, call.out.rows.stride_s, tile.token + tile.length,
                       HEAD_DIM, BLOCK_D)
        else:
            query.store(dq.to(query.dtype))  # this half of the queries has been read
            fence_async_shared()
            tma_store(call.out.desc, [tile.batch, own_head, tile.token + first_row, 0],
                      reinterpret(query, query.dtype, [1, 1, BLOCK, BLOCK_D], call.out.desc.layout))
            tma.store_wait(0)
            memory.tiles.release(0)
        memory.tiles.wait_full(tiles)
        tile = receive_query_tile(memory.numbers, 0)


# Arguments that differ from batch to batch are not specialised.
@gluon.jit(do_not_specialize=["rows", "n_tiles", "n_programs", "head_group", "own_rows"])
def s2_hopper_d256_grad_query_kernel(q_desc, k_desc, v_desc, grad_desc, out_desc, k_more_desc, v_more_desc, out_ptr, lse_ptr, delta_ptr,
                                     initial_ptr, counter_ptr, ranges_ptr, tokens_ptr, order_ptr, documents_ptr, list_rows_ptr, list_tiles_ptr,
                                     list_steps_ptr, scale, rows, heads, n_tiles, n_programs, batches, head_group, own_rows, stride_ob,
                                     stride_oh, stride_os, stride_ib, stride_ih, stride_is, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr,
                                     RATIO: gl.constexpr, ORDERED: gl.constexpr, PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr,
                                     TOKENS: gl.constexpr, KV_STEP: gl.constexpr, MORE: gl.constexpr, CONTINUE: gl.constexpr, BY_ROWS: gl.constexpr,
                                     BLOCK_D: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, num_warps: gl.constexpr):
    """Arguments as in grad_query.py, but all boxes are 64 x BLOCK_D, and STAGES are those of the keys."""
    dtype: gl.constexpr = q_desc.dtype
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    memory = query_tile_memory(
        dtype=dtype, BLOCK_D=BLOCK_D, TILES=1, HALVES=4, K_STAGES=STAGES, V_STAGES=V_STAGES, ROWS=BLOCK, LISTED=LISTED or TOKENS)
    tile_boxes = reinterpret(memory.halves, dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    k_boxes = reinterpret(memory.k_buffers, dtype, [STAGES, 1, 1, BLOCK, BLOCK_D], box)
    v_boxes = reinterpret(memory.v_buffers, dtype, [V_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_buffers = gl.allocate_shared_memory(gl.float32, [2, BLOCK], vector)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [2, BLOCK], vector)
    sums = RowSums(
        lse_ptr=lse_ptr, delta_ptr=delta_ptr, lse_buffers=lse_buffers, delta_buffers=delta_buffers, heads=heads)
    sources = KeySources(
        k_desc=k_desc, v_desc=v_desc, k_more_desc=k_more_desc if MORE else k_desc,
        v_more_desc=v_more_desc if MORE else v_desc, own_rows=own_rows, KV_STEP=KV_STEP, MORE=MORE)
    loads = QueryLoads(
        q_desc=q_desc, grad_desc=grad_desc, sources=sources, sums=sums, memory=memory, tile_boxes=tile_boxes,
        k_boxes=k_boxes, v_boxes=v_boxes, BLOCK_D=BLOCK_D, GRAD=True, SINGLE=True)
    lists = StepLists(list_rows_ptr, list_tiles_ptr, list_steps_ptr)
    schedule = QuerySchedule(
        ranges_ptr=ranges_ptr, order_ptr=order_ptr, documents_ptr=documents_ptr, counter_ptr=counter_ptr, lists=lists, tokens_ptr=tokens_ptr,
        rows=rows, n_tiles=n_tiles, n_programs=n_programs, batches=batches, head_group=head_group, N_RANGES=N_RANGES,
        RATIO=RATIO, ORDERED=ORDERED, PACKED=PACKED, PACK=PACK, LISTED=LISTED, TOKENS=TOKENS)
    out = Result(out_desc, HeadRows(out_ptr, stride_ob, stride_oh, stride_os), HEAD_DIM, BY_ROWS)
    initial = HeadRows(initial_ptr, stride_ib, stride_ih, stride_is)
    call = GradQueryCall(
        memory=memory, sums=sums, out=out, initial=initial, scale=scale, BLOCK_D=BLOCK_D, PACKED=PACKED, PACK=PACK,
        LISTED=LISTED, TOKENS=TOKENS, CONTINUE=CONTINUE)
    gl.warp_specialize([(compute, (call, 0)), (compute, (call, 1)), (produce, (loads, schedule))],
                       [COMPUTE_WARPS, LOAD_WARPS], [COMPUTE_REGISTERS, LOAD_REGISTERS])
