r"""The forward on Hopper for head dims above 128: as in forward.py, but a stage holds one key block, and the queries of
one tile are in memory.

    loading warp                              warpgroups 0 and 1 (compute), 64 queries each
    Q of a tile        -- tiles.full ------->  Q stays in its buffer
    K of block n       -- keys.full -------->  S = Q K^T of block n       \  in flight together
    V of block n - 1   -- values.full ------>  O += P V of block n - 1    /
                       <- keys.empty -------   S is there
                                               P, maximum, sum of block n, under P V
                       <- values.empty -----   P V is there; O *= exp2(old maximum - new one)
    the next tile's    <- tiles.empty ------   O / sum has left through Q's buffer

Masked blocks are computed one after the other, for a half skips those that it does not attend. Of free blocks, Q K^T is
in flight together with P V of the block before.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from s2_megatron.kernels.hopper.forward import ForwardCall, Softmax, softmax_step, start_softmax
from s2_megatron.kernels.hopper.gluon_versions import reinterpret, tma_store
from s2_megatron.kernels.hopper.memory import HeadRows, Result, clear_rows, query_tile_memory, store_rows
from s2_megatron.kernels.hopper.query_loads import KeySources, QueryLoads, produce
from s2_megatron.kernels.hopper.schedule import BLOCK, LN2, LOG2E, QuerySchedule, StepLists, masked_flags
from s2_megatron.kernels.hopper.steps import attends, is_own
from s2_megatron.kernels.hopper.tokens import token_step_mask
from s2_megatron.kernels.hopper.warps import COMPUTE_REGISTERS, COMPUTE_WARPS, LOAD_REGISTERS, LOAD_WARPS
from s2_megatron.kernels.hopper.work_tiles import receive_query_tile, receive_step


@gluon.jit
def score_block(memory, count, HALF: gl.constexpr):
    """The scores of a key block, by themselves."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    memory.keys.wait_full(count)
    query = memory.halves.index(HALF + (count >> 30))  # see d256/grad_query.py
    key = memory.k_buffers.index(memory.keys.stage(count))
    zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
    # scores = Q K^T, [64 queries, 64 keys]
    s_token = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[s_token])
    memory.keys.release(count)
    return scores


@gluon.jit
def attend_masked(state, call, scale, count, tile, first_row, HALF: gl.constexpr):
    """The masked blocks of a tile, as the step descriptors say. Returns (state, count)."""
    memory = call.memory
    dtype: gl.constexpr = memory.halves.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, s_layout))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, s_layout))
    out, maximum, total = state.out, state.maximum, state.total
    for number in range(2 * tile.masked_steps if call.LISTED else 2 * tile.masked_steps + 2):  # with those of step 0
        value = memory.v_buffers.index(memory.values.stage(count))
        if call.LISTED or call.TOKENS:
            memory.keys.wait_full(count)
            step = receive_step(memory.steps, memory.keys.stage(count))
        else:
            step = masked_flags(tile.marks, number, call.PACK)
        if attends(step, HALF):
            scores = score_block(memory, count, HALF)
            own = is_own(step, HALF, call.TOKENS)
            if call.TOKENS:
                keep = token_step_mask(step, row, column, tile.marks >> 2, HALF)
            else:
                keep = (row[:, None] >= column[None, :]) | (own == 0)
            scores = gl.where(keep, scores, float("-inf"))
            p, maximum, total, rescale = softmax_step(scores, maximum, total, scale)
            operand = gl.convert_layout(p.to(dtype), p_layout)
            out = out * gl.convert_layout(rescale, o_rows)[:, None]
            memory.values.wait_full(count)
            if call.PACKED:
                # Rows behind the document may hold anything, and 0 * NaN is NaN.
                if own & (first_row + BLOCK > tile.length):
                    clear_rows(value, tile.length - first_row, BLOCK, BLOCK)
            o_token = warpgroup_mma(operand, value, out, is_async=True)  # out += P V, [64 queries, BLOCK_D]
            out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
        else:
            memory.keys.wait_full(count)
            memory.keys.release(count)
            memory.values.wait_full(count)
        memory.values.release(count)
        count += 1
    return Softmax(out, maximum, total), count


@gluon.jit
def attend_free(state, call, scale, count, blocks, HALF: gl.constexpr):
    """One block that all rows attend, or more. Returns (state, count)."""
    memory = call.memory
    dtype: gl.constexpr = memory.halves.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    scores = score_block(memory, count, HALF)
    p, maximum, total, rescale = softmax_step(scores, state.maximum, state.total, scale)
    operand = gl.convert_layout(p.to(dtype), p_layout)
    out = state.out * gl.convert_layout(rescale, o_rows)[:, None]
    for number in range(blocks - 1):
        memory.keys.wait_full(count + 1)
        query = memory.halves.index(HALF + (count >> 30))
        key = memory.k_buffers.index(memory.keys.stage(count + 1))
        value = memory.v_buffers.index(memory.values.stage(count))
        zeros = gl.zeros([BLOCK, BLOCK], gl.float32, s_layout)
        # scores of block number + 1, [64 queries, 64 keys]; out += P V of block `number`
        s_token = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
        memory.values.wait_full(count)
        o_token = warpgroup_mma(operand, value, out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[s_token])
        memory.keys.release(count + 1)
        p, maximum, total, rescale = softmax_step(scores, maximum, total, scale)
        memory.values.wait_full(count)  # keeps the softmax under P V: see forward.py
        out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
        memory.values.release(count)
        operand = gl.convert_layout(p.to(dtype), p_layout)
        out = out * gl.convert_layout(rescale, o_rows)[:, None]
        count += 1
    memory.values.wait_full(count)
    o_token = warpgroup_mma(operand, memory.v_buffers.index(memory.values.stage(count)), out, is_async=True)
    out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
    memory.values.release(count)
    return Softmax(out, maximum, total), count + 1


@gluon.jit
def compute(call, HALF: gl.constexpr):
    """One warpgroup: half HALF of each tile."""
    memory = call.memory
    PACK: gl.constexpr = call.PACK
    HEAD_DIM: gl.constexpr = call.out.HEAD_DIM
    BLOCK_D: gl.constexpr = call.BLOCK_D
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    scale = call.scale * LOG2E  # exponentials are of base 2
    row = gl.arange(0, BLOCK, layout=s_rows)
    query = memory.halves.index(HALF)
    count = 0
    tiles = 0
    memory.tiles.wait_full(0)
    tile = receive_query_tile(memory.numbers, 0)
    while tile.free_steps >= 0:
        first_row = (tile.low + HALF * (1 - PACK)) * BLOCK
        own_head = tile.head + HALF * PACK
        row_base = (tile.batch * call.heads + own_head).to(gl.int64) * call.rows + tile.token
        state = start_softmax(call, tile, own_head, row_base, first_row, row, o_layout)
        state, count = attend_masked(state, call, scale, count, tile, first_row, HALF)
        if tile.free_steps > 0:
            state, count = attend_free(state, call, scale, count, 2 * tile.free_steps, HALF)
        tiles += 1
        lse = (state.maximum + gl.log2(state.total)) * LN2
        gl.store(call.lse_ptr + row_base + first_row + row, lse, mask=first_row + row < tile.length)
        out = state.out * gl.convert_layout(gl.where(state.total == 0.0, 0.0, 1.0 / state.total), o_rows)[:, None]
        # TMA would write into the next document.
        if call.out.BY_ROWS or (call.PACKED and first_row + BLOCK > tile.length):
            memory.tiles.release(0)
            store_rows(call.out.rows.head(tile.batch, own_head), out, tile.token + first_row, call.out.rows.stride_s,
                       tile.token + tile.length, HEAD_DIM, BLOCK_D)
        else:
            query.store(out.to(query.dtype))  # this half of the queries has been read
            fence_async_shared()
            tma_store(call.out.desc, [tile.batch, own_head, tile.token + first_row, 0],
                      reinterpret(query, query.dtype, [1, 1, BLOCK, BLOCK_D], call.out.desc.layout))
            tma.store_wait(0)
            memory.tiles.release(0)
        memory.tiles.wait_full(tiles)
        tile = receive_query_tile(memory.numbers, 0)


# Arguments that differ from batch to batch are not specialised.
@gluon.jit(do_not_specialize=["rows", "n_tiles", "n_programs", "head_group", "own_rows"])
def s2_hopper_d256_forward_kernel(q_desc, k_desc, v_desc, out_desc, k_more_desc, v_more_desc, out_ptr, lse_ptr, initial_ptr, initial_lse_ptr,
                                  counter_ptr, ranges_ptr, tokens_ptr, order_ptr, documents_ptr, list_rows_ptr, list_tiles_ptr, list_steps_ptr, scale, rows,
                                  heads, n_tiles, n_programs, batches, head_group, own_rows, stride_ob, stride_oh, stride_os, stride_ib,
                                  stride_ih, stride_is, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr, RATIO: gl.constexpr,
                                  ORDERED: gl.constexpr, PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr, TOKENS: gl.constexpr,
                                  KV_STEP: gl.constexpr, MORE: gl.constexpr, CONTINUE: gl.constexpr, BY_ROWS: gl.constexpr, BLOCK_D: gl.constexpr,
                                  STAGES: gl.constexpr, V_STAGES: gl.constexpr, num_warps: gl.constexpr):
    """Arguments as in forward.py, but all boxes are 64 x BLOCK_D, and STAGES are those of the keys."""
    dtype: gl.constexpr = q_desc.dtype
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    memory = query_tile_memory(
        dtype=dtype, BLOCK_D=BLOCK_D, TILES=1, HALVES=2, K_STAGES=STAGES, V_STAGES=V_STAGES, ROWS=BLOCK, LISTED=LISTED or TOKENS)
    q_boxes = reinterpret(memory.halves, dtype, [2, 1, 1, BLOCK, BLOCK_D], box)
    k_boxes = reinterpret(memory.k_buffers, dtype, [STAGES, 1, 1, BLOCK, BLOCK_D], box)
    v_boxes = reinterpret(memory.v_buffers, dtype, [V_STAGES, 1, 1, BLOCK, BLOCK_D], box)
    sources = KeySources(
        k_desc=k_desc, v_desc=v_desc, k_more_desc=k_more_desc if MORE else k_desc,
        v_more_desc=v_more_desc if MORE else v_desc, own_rows=own_rows, KV_STEP=KV_STEP, MORE=MORE)
    loads = QueryLoads(
        q_desc=q_desc, grad_desc=q_desc, sources=sources, sums=None, memory=memory, tile_boxes=q_boxes, k_boxes=k_boxes,
        v_boxes=v_boxes, BLOCK_D=BLOCK_D, GRAD=False, SINGLE=True)
    lists = StepLists(list_rows_ptr, list_tiles_ptr, list_steps_ptr)
    schedule = QuerySchedule(
        ranges_ptr=ranges_ptr, order_ptr=order_ptr, documents_ptr=documents_ptr, counter_ptr=counter_ptr, lists=lists, tokens_ptr=tokens_ptr,
        rows=rows, n_tiles=n_tiles, n_programs=n_programs, batches=batches, head_group=head_group, N_RANGES=N_RANGES,
        RATIO=RATIO, ORDERED=ORDERED, PACKED=PACKED, PACK=PACK, LISTED=LISTED, TOKENS=TOKENS)
    out = Result(out_desc, HeadRows(out_ptr, stride_ob, stride_oh, stride_os), HEAD_DIM, BY_ROWS)
    initial = HeadRows(initial_ptr, stride_ib, stride_ih, stride_is)
    call = ForwardCall(
        memory=memory, out=out, lse_ptr=lse_ptr, initial=initial, initial_lse_ptr=initial_lse_ptr, rows=rows,
        heads=heads, scale=scale, BLOCK_D=BLOCK_D, PACKED=PACKED, PACK=PACK, LISTED=LISTED, TOKENS=TOKENS, CONTINUE=CONTINUE)
    gl.warp_specialize([(compute, (call, 0)), (compute, (call, 1)), (produce, (loads, schedule))],
                       [COMPUTE_WARPS, LOAD_WARPS], [COMPUTE_REGISTERS, LOAD_REGISTERS])
