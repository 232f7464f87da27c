r"""The forward on Hopper: a warp that loads (query_loads.py) feeds two warpgroups, which compute the 64 rows of one half
of a tile each.

Q K^T of a step and P V of the step before are in flight together; a softmax runs under its own warpgroup's P V and the
other one's products. Programs are persistent: the queries of the next tile are loaded during this one, whose buffer
takes the result on its way out.

    loading warp                              warpgroups 0 and 1 (compute), 64 queries each
    Q of tile t        -- tiles.full ------->  Q into registers
    K of step n        -- keys.full -------->  S = Q K^T of step n        \  in flight together
    V of step n - 1    -- values.full ------>  O += P V of step n - 1     /
                       <- keys.empty -------   S is there
                                               P, maximum, sum of step n, under P V
                       <- values.empty -----   P V is there; O *= exp2(old maximum - new one)
    Q of tile t + 1    <- tiles.empty ------   O of tile t - 1 has left Q's buffer
                                               at the end O / sum goes out through Q's buffer, LSE beside it
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

from s2_megatron.kernels.hopper.gluon_versions import aggregate, reinterpret, tma_store
from s2_megatron.kernels.hopper.memory import (
    HeadRows,
    QueryTileMemory,
    Result,
    clear_behind,
    load_rows,
    query_tile_memory,
    store_rows,
)
from s2_megatron.kernels.hopper.query_loads import KeySources, QueryLoads, produce
from s2_megatron.kernels.hopper.schedule import BLOCK, LN2, LOG2E, QuerySchedule, StepLists, masked_step, step_mask
from s2_megatron.kernels.hopper.steps import attends, attends_second
from s2_megatron.kernels.hopper.tokens import token_step_mask
from s2_megatron.kernels.hopper.warps import COMPUTE_REGISTERS, COMPUTE_WARPS, LOAD_REGISTERS, LOAD_WARPS
from s2_megatron.kernels.hopper.work_tiles import receive_query_tile, receive_step


@aggregate
class ForwardCall:
    """What the computing warpgroups know of a call."""

    memory: QueryTileMemory
    out: Result
    lse_ptr: gl.tensor
    initial: HeadRows  # CONTINUE: out and LSE that are continued
    initial_lse_ptr: gl.tensor
    rows: gl.tensor
    heads: gl.tensor
    scale: gl.tensor
    BLOCK_D: gl.constexpr
    PACKED: gl.constexpr
    PACK: gl.constexpr
    LISTED: gl.constexpr
    TOKENS: gl.constexpr
    CONTINUE: gl.constexpr


@aggregate
class Softmax:
    """The state of the online softmax of 64 rows: the sum of P V, and of each row the running maximum and sum, base
    2."""

    out: gl.tensor
    maximum: gl.tensor
    total: gl.tensor


@gluon.jit
def start_softmax(call, tile, own_head, row_base, first_row, row, o_layout: gl.constexpr):
    """The state of a tile's half before its first step, CONTINUE: of an earlier call's out and LSE of these rows."""
    s_rows: gl.constexpr = row.type.layout
    out = gl.zeros([BLOCK, call.BLOCK_D], gl.float32, o_layout)
    maximum = gl.full([BLOCK], -1e30, gl.float32, s_rows)  # finite: a row may have no key yet
    total = gl.zeros([BLOCK], gl.float32, s_rows)
    if call.CONTINUE:
        inside = first_row + row < tile.length
        lse = gl.load(call.initial_lse_ptr + row_base + first_row + row, mask=inside, other=float("-inf")) * LOG2E
        seen = lse > float("-inf")
        maximum = gl.where(seen, lse, maximum)
        total = gl.where(seen, 1.0, 0.0)
        initial = call.initial.head(tile.batch, own_head)
        out = load_rows(initial, first_row, call.initial.stride_s, tile.length, o_layout, call.out.HEAD_DIM, call.BLOCK_D)
    return Softmax(out, maximum, total)


@gluon.jit
def softmax_step(scores, maximum, total, scale):
    """(p, new maximum, new sum, factor of what was summed before), base 2. The maximum before is finite."""
    new_max = gl.maximum(maximum, gl.max(scores, axis=1) * scale)
    rescale = gl.exp2(maximum - new_max)
    p = gl.exp2(scores * scale - new_max[:, None])  # probabilities times the row's sum, of the shape of scores
    return p, new_max, total * rescale + gl.sum(p, axis=1), rescale


@gluon.jit
def score_step(query, keys, zeros, pipeline, count):
    """The scores of a step, or of its first block, by themselves. zeros: of their shape."""
    pipeline.wait_full(count)
    # scores = Q K^T, [64 queries, 128 keys], or 64 keys
    s_token = warpgroup_mma(query, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[s_token])
    pipeline.release(count)
    return scores


@gluon.jit
def attend_step(state, query, call, scale, step, rests, count, HALF: gl.constexpr, COLUMNS: gl.constexpr):
    """A step by itself, with the mask of its descriptor; COLUMNS 64: its first block alone. Returns the state after
    it."""
    memory = call.memory
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BLOCK_D, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    rows: gl.constexpr = state.maximum.type.layout
    stage = memory.keys.stage(count)
    row = gl.arange(0, BLOCK, layout=s_rows)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, s_layout))
    scores = score_step(gl.convert_layout(query, q_layout), memory.k_buffers.index(stage).slice(0, COLUMNS),
                        gl.zeros([BLOCK, COLUMNS], gl.float32, s_layout), memory.keys, count)
    keep = token_step_mask(step, row, column, rests, HALF) if call.TOKENS else step_mask(step, row, column, HALF)
    scores = gl.where(keep, scores, float("-inf"))
    p, maximum, total, rescale = softmax_step(scores, gl.convert_layout(state.maximum, s_rows), gl.convert_layout(state.total, s_rows), scale)
    operand = gl.convert_layout(p.to(query.dtype), p_layout)
    out = state.out * gl.convert_layout(rescale, o_rows)[:, None]
    memory.values.wait_full(count)
    # out = out * rescale + P V, [64 queries, BLOCK_D]
    o_token = warpgroup_mma(operand, memory.v_buffers.index(stage).slice(0, COLUMNS), out, is_async=True)
    out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
    memory.values.release(count)
    return Softmax(out, gl.convert_layout(maximum, rows), gl.convert_layout(total, rows))


@gluon.jit
def attend_masked(state, query, call, scale, count, tile, HALF: gl.constexpr):
    """The steps with a mask, that of the diagonal among them. Returns (state, count)."""
    memory = call.memory
    for number in range(tile.masked_steps if call.LISTED else tile.masked_steps + 1):
        if call.LISTED or call.TOKENS:
            memory.keys.wait_full(count)
            step = receive_step(memory.steps, memory.keys.stage(count))
        else:
            step = masked_step(tile.marks, number, call.PACK)
        if attends_second(step, HALF):
            state = attend_step(state, query, call, scale, step, tile.marks >> 2, count, HALF, 128)
        elif attends(step, HALF):
            state = attend_step(state, query, call, scale, step, tile.marks >> 2, count, HALF, BLOCK)
        else:  # a step of the other half alone
            memory.keys.wait_full(count)
            memory.keys.release(count)
            memory.values.wait_full(count)
            memory.values.release(count)
        count += 1
    return state, count


@gluon.jit
def attend_free(state, query, call, scale, count, steps):
    """One step that all rows attend, or more: scores of a step and P V of the one before in flight together. Returns
    (state, count)."""
    memory = call.memory
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    zeros = gl.zeros([BLOCK, 128], gl.float32, s_layout)
    scores = score_step(query, memory.k_buffers.index(memory.keys.stage(count)), zeros, memory.keys, count)
    p, maximum, total, rescale = softmax_step(scores, state.maximum, state.total, scale)
    operand = gl.convert_layout(p.to(query.dtype), p_layout)
    out = state.out * gl.convert_layout(rescale, o_rows)[:, None]
    for number in range(steps - 1):
        before = memory.values.stage(count)
        stage = memory.keys.stage(count + 1)
        memory.keys.wait_full(count + 1)
        # scores of step number + 1, [64 queries, 128 keys]
        s_token = warpgroup_mma(query, memory.k_buffers.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        memory.values.wait_full(count)
        # out += P V of step `number`, [64 queries, BLOCK_D]
        o_token = warpgroup_mma(operand, memory.v_buffers.index(before), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[s_token])
        memory.keys.release(count + 1)
        p, maximum, total, rescale = softmax_step(scores, maximum, total, scale)
        # This wait is over long ago, but it is a branch: without it ptxas waits for P V before the softmax, which shall
        # run under it.
        memory.values.wait_full(count)
        out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
        memory.values.release(count)
        operand = gl.convert_layout(p.to(query.dtype), p_layout)  # not before: it gets the registers that P V reads
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
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    scale = call.scale * LOG2E  # exponentials are of base 2
    row = gl.arange(0, BLOCK, layout=s_rows)
    count = 0
    tiles = 0
    memory.tiles.wait_full(0)
    tile = receive_query_tile(memory.numbers, 0)
    while tile.free_steps >= 0:
        parity = tiles % 2
        buffer = memory.halves.index(parity * 2 + HALF)
        query = buffer.load(q_layout)  # stays in registers: the products with K read K alone from shared memory
        first_row = (tile.low + HALF * (1 - PACK)) * BLOCK
        own_head = tile.head + HALF * PACK
        row_base = (tile.batch * call.heads + own_head).to(gl.int64) * call.rows + tile.token
        state = start_softmax(call, tile, own_head, row_base, first_row, row, o_layout)
        if call.PACKED:
            clear_behind(memory.v_buffers, memory.values, count, tile, PACK)
        state, count = attend_masked(state, query, call, scale, count, tile, HALF)
        if tiles > 0:  # the tile before has left its buffer by now
            tma.store_wait(0)
            mbarrier.arrive(memory.tiles.empty.index(1 - parity), count=1)
        if tile.free_steps > 0:
            state, count = attend_free(state, query, call, scale, count, tile.free_steps)
        inverse = gl.where(state.total == 0.0, 0.0, 1.0 / state.total)
        tiles += 1
        lse = (state.maximum + gl.log2(state.total)) * LN2  # LSE = maximum + log(sum), [64 queries], natural
        gl.store(call.lse_ptr + row_base + first_row + row, lse, mask=first_row + row < tile.length)
        out = state.out * gl.convert_layout(inverse, o_rows)[:, None]
        # TMA would write into the next document.
        if call.out.BY_ROWS or (call.PACKED and first_row + BLOCK > tile.length):
            store_rows(call.out.rows.head(tile.batch, own_head), out, tile.token + first_row, call.out.rows.stride_s,
                       tile.token + tile.length, HEAD_DIM, BLOCK_D)
        else:
            buffer.store(out.to(query.dtype))  # this half of the queries has been read
            fence_async_shared()
            tma_store(call.out.desc, [tile.batch, own_head, tile.token + first_row, 0],
                      reinterpret(buffer, query.dtype, [1, 1, BLOCK, BLOCK_D], call.out.desc.layout))
        memory.tiles.wait_full(tiles)
        tile = receive_query_tile(memory.numbers, memory.tiles.stage(tiles))
    tma.store_wait(0)


# Arguments that differ from batch to batch are not specialised.
@gluon.jit(do_not_specialize=["rows", "n_tiles", "n_programs", "head_group", "own_rows"])
def s2_hopper_forward_kernel(q_desc, k_desc, v_desc, out_desc, k_more_desc, v_more_desc, out_ptr, lse_ptr, initial_ptr, initial_lse_ptr,
                             counter_ptr, ranges_ptr, tokens_ptr, order_ptr, documents_ptr, list_rows_ptr, list_tiles_ptr, list_steps_ptr, scale, rows,
                             heads, n_tiles, n_programs, batches, head_group, own_rows, stride_ob, stride_oh, stride_os, stride_ib, stride_ih,
                             stride_is, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr, RATIO: gl.constexpr, ORDERED: gl.constexpr,
                             PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr, TOKENS: gl.constexpr, KV_STEP: gl.constexpr,
                             MORE: gl.constexpr, CONTINUE: gl.constexpr, BY_ROWS: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
                             num_warps: gl.constexpr):
    """Tensors are [batch, heads, rows, HEAD_DIM] with any strides, in descriptors with boxes of 64 x 64 (K, V) and 64 x
    BLOCK_D (Q, out). KV_STEP: 0 where KV heads share the rows of K and V. MORE: the rows of K and V from own_rows on
    lie in two further tensors (LISTED only). CONTINUE: the softmax goes on from the initial out and LSE (LISTED only).
    BY_ROWS: see Result. counter_ptr: LISTED, a zero."""
    dtype: gl.constexpr = q_desc.dtype
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    CHUNKS: gl.constexpr = BLOCK_D // 64
    memory = query_tile_memory(
        dtype=dtype, BLOCK_D=BLOCK_D, TILES=2, HALVES=4, K_STAGES=STAGES, V_STAGES=STAGES, ROWS=2 * BLOCK,
        LISTED=LISTED or TOKENS)
    q_boxes = reinterpret(memory.halves, dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    k_boxes = reinterpret(memory.k_buffers, dtype, [STAGES * CHUNKS * 2, 1, 1, BLOCK, 64], box)
    v_boxes = reinterpret(memory.v_buffers, dtype, [STAGES * CHUNKS * 2, 1, 1, BLOCK, 64], box)
    sources = KeySources(
        k_desc=k_desc, v_desc=v_desc, k_more_desc=k_more_desc if MORE else k_desc,
        v_more_desc=v_more_desc if MORE else v_desc, own_rows=own_rows, KV_STEP=KV_STEP, MORE=MORE)
    loads = QueryLoads(
        q_desc=q_desc, grad_desc=q_desc, sources=sources, sums=None, memory=memory, tile_boxes=q_boxes, k_boxes=k_boxes,
        v_boxes=v_boxes, BLOCK_D=BLOCK_D, GRAD=False, SINGLE=False)
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
