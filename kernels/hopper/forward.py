"""The forward on Hopper: a warp that loads (query_loads.py) feeds two warpgroups, which compute the 64 rows of one half of a tile each.

Q K^T of a step and P V of the step before are in flight together; a softmax runs under its own warpgroup's P V and the other one's products.
Programs are persistent: the queries of the next tile are loaded during this one, whose buffer takes the result on its way out.
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
    load_rows,
    receive_plan,
    receive_word,
    store_rows,
    tile_memory,
)
from s2_megatron.kernels.hopper.query_loads import produce
from s2_megatron.kernels.hopper.schedule import BLOCK, LN2, LOG2E, block_word, word_mask


@gluon.jit
def start_softmax(initial_ptr, initial_lse_ptr, row_base, first_row, row, stride_row, length, o_layout: gl.constexpr, CONTINUE: gl.constexpr,
                  HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr):
    """(out, running maximum, running sum) of a tile's half before its first step, CONTINUE: of an earlier call's out and LSE of these rows."""
    s_rows: gl.constexpr = row.type.layout
    out = gl.zeros([BLOCK, BLOCK_D], gl.float32, o_layout)
    running_max = gl.full([BLOCK], -1e30, gl.float32, s_rows)  # finite: a row may have no key yet
    running_sum = gl.zeros([BLOCK], gl.float32, s_rows)
    if CONTINUE:
        lse = gl.load(initial_lse_ptr + row_base + first_row + row, mask=first_row + row < length, other=float("-inf")) * LOG2E
        seen = lse > float("-inf")
        running_max = gl.where(seen, lse, running_max)
        running_sum = gl.where(seen, 1.0, 0.0)
        out = load_rows(initial_ptr, first_row, stride_row, length, o_layout, HEAD_DIM, BLOCK_D)
    return out, running_max, running_sum


@gluon.jit
def softmax_step(scores, running_max, running_sum, scale):
    """(p, new maximum, new sum, factor of what was summed before), base 2. The maximum before is finite."""
    new_max = gl.maximum(running_max, gl.max(scores, axis=1) * scale)
    rescale = gl.exp2(running_max - new_max)
    p = gl.exp2(scores * scale - new_max[:, None])
    return p, new_max, running_sum * rescale + gl.sum(p, axis=1), rescale


@gluon.jit
def begin_step(query, keys, zeros, barriers, count, STAGES: gl.constexpr):
    """The scores of a step, or of its first block, by themselves. zeros: of their shape."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    stage = count % STAGES
    mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
    s_token = warpgroup_mma(query, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[s_token])
    mbarrier.arrive(k_empty.index(stage), count=1)
    return scores


@gluon.jit
def masked_step(out, running_max, running_sum, query, keys, values, word, barriers, count, scale, HALF: gl.constexpr, COLUMNS: gl.constexpr,
                BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """A step by itself, with the mask of its word; COLUMNS 64: its first block alone. Returns (out, running_max, running_sum)."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    rows: gl.constexpr = running_max.type.layout
    stage = count % STAGES
    row = gl.arange(0, BLOCK, layout=s_rows)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, s_layout))
    scores = begin_step(gl.convert_layout(query, q_layout), keys.index(stage).slice(0, COLUMNS),
                        gl.zeros([BLOCK, COLUMNS], gl.float32, s_layout), barriers, count, STAGES)
    scores = gl.where(word_mask(word, row, column, HALF), scores, float("-inf"))
    p, running_max, running_sum, rescale = softmax_step(scores, gl.convert_layout(running_max, s_rows), gl.convert_layout(running_sum, s_rows),
                                                        scale)
    operand = gl.convert_layout(p.to(query.dtype), p_layout)
    out = out * gl.convert_layout(rescale, o_rows)[:, None]
    mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
    o_token = warpgroup_mma(operand, values.index(stage).slice(0, COLUMNS), out, is_async=True)
    out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return out, gl.convert_layout(running_max, rows), gl.convert_layout(running_sum, rows)


@gluon.jit
def attend_masked(out, running_max, running_sum, query, keys, values, words, barriers, count, steps, marks, scale, HALF: gl.constexpr,
                  PACK: gl.constexpr, LISTED: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """The steps with a mask, that of the diagonal among them. Returns (out, running_max, running_sum, count)."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    for step in range(steps):
        stage = count % STAGES
        if LISTED:
            mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
            word = receive_word(words, stage)
        else:
            word = block_word(marks, 2 * step, PACK) + (block_word(marks, 2 * step + 1, PACK) << 4)
        if (word & (0x10 << HALF)) != 0:
            out, running_max, running_sum = masked_step(out, running_max, running_sum, query, keys, values, word, barriers, count, scale, HALF,
                                                        128, BLOCK_D, STAGES)
        elif (word & (1 << HALF)) != 0:
            out, running_max, running_sum = masked_step(out, running_max, running_sum, query, keys, values, word, barriers, count, scale, HALF,
                                                        BLOCK, BLOCK_D, STAGES)
        else:  # a step of the other half alone
            mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
            mbarrier.arrive(v_empty.index(stage), count=1)
        count += 1
    return out, running_max, running_sum, count


@gluon.jit
def attend_free(out, running_max, running_sum, query, keys, values, barriers, count, steps, scale, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """One step that all rows attend, or more: scores of a step and P V of the one before in flight together. Returns (out, running_max,
    running_sum, count)."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    zeros = gl.zeros([BLOCK, 128], gl.float32, s_layout)
    scores = begin_step(query, keys.index(count % STAGES), zeros, barriers, count, STAGES)
    p, running_max, running_sum, rescale = softmax_step(scores, running_max, running_sum, scale)
    operand = gl.convert_layout(p.to(query.dtype), p_layout)
    out = out * gl.convert_layout(rescale, o_rows)[:, None]
    for step in range(steps - 1):
        before = count % STAGES
        stage = (count + 1) % STAGES
        mbarrier.wait(k_full.index(stage), ((count + 1) // STAGES) & 1)
        s_token = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (count // STAGES) & 1)
        o_token = warpgroup_mma(operand, values.index(before), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[s_token])
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, running_max, running_sum, rescale = softmax_step(scores, running_max, running_sum, scale)
        # Over long ago, but a branch: without it ptxas waits for P V before the softmax, which shall run under it.
        mbarrier.wait(v_full.index(before), (count // STAGES) & 1)
        out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
        mbarrier.arrive(v_empty.index(before), count=1)
        operand = gl.convert_layout(p.to(query.dtype), p_layout)  # not before: it gets the registers that P V reads
        out = out * gl.convert_layout(rescale, o_rows)[:, None]
        count += 1
    before = count % STAGES
    mbarrier.wait(v_full.index(before), (count // STAGES) & 1)
    o_token = warpgroup_mma(operand, values.index(before), out, is_async=True)
    out, operand = warpgroup_mma_wait(0, deps=[o_token, operand])
    mbarrier.arrive(v_empty.index(before), count=1)
    return out, running_max, running_sum, count + 1


@gluon.jit
def compute(out_desc, out_ptr, lse_ptr, initial_ptr, initial_lse_ptr, q_buffers, k_buffers, v_buffers, words, plan, barriers, rows, scale,
            heads, stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, HALF: gl.constexpr, HEAD_DIM: gl.constexpr,
            PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr, CONTINUE: gl.constexpr, WIDE: gl.constexpr, BLOCK_D: gl.constexpr,
            STAGES: gl.constexpr):
    """One warpgroup: half HALF of each tile."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    scale = scale * LOG2E  # exponentials are of base 2
    row = gl.arange(0, BLOCK, layout=s_rows)
    count = 0
    tiles = 0
    mbarrier.wait(q_full.index(0), 0)
    batch, head, token, length, low, masked_steps, free_steps, marks = receive_plan(plan, 0)
    while free_steps >= 0:
        parity = tiles % 2
        buffer = q_buffers.index(parity * 2 + HALF)
        query = buffer.load(q_layout)  # kept in registers: the products with K read K alone from shared memory
        first_row = (low + HALF * (1 - PACK)) * BLOCK
        own_head = head + HALF * PACK
        row_base = (batch * heads + own_head).to(gl.int64) * rows + token
        initial_rows = initial_ptr + batch.to(gl.int64) * stride_ib + own_head.to(gl.int64) * stride_ih
        out, running_max, running_sum = start_softmax(initial_rows, initial_lse_ptr, row_base, first_row, row, stride_is, length, o_layout,
                                                      CONTINUE, HEAD_DIM, BLOCK_D)
        if PACKED:
            clear_behind(v_buffers, v_full, count, low, length, marks, PACK, STAGES)
        out, running_max, running_sum, count = attend_masked(
            out, running_max, running_sum, query, k_buffers, v_buffers, words, barriers, count, masked_steps if LISTED else masked_steps + 1,
            marks, scale, HALF, PACK, LISTED, BLOCK_D, STAGES)
        if tiles > 0:  # the tile before has left its buffer by now
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(1 - parity), count=1)
        if free_steps > 0:
            out, running_max, running_sum, count = attend_free(out, running_max, running_sum, query, k_buffers, v_buffers, barriers, count,
                                                               free_steps, scale, BLOCK_D, STAGES)
        inverse = gl.where(running_sum == 0.0, 0.0, 1.0 / running_sum)
        tiles += 1
        lse = (running_max + gl.log2(running_sum)) * LN2
        gl.store(lse_ptr + row_base + first_row + row, lse, mask=first_row + row < length)
        out = out * gl.convert_layout(inverse, o_rows)[:, None]
        if WIDE or (PACKED and first_row + BLOCK > length):  # TMA would write into the next document
            store_rows(out_ptr + batch.to(gl.int64) * stride_ob + own_head.to(gl.int64) * stride_oh, out, token + first_row, stride_os,
                       token + length, HEAD_DIM, BLOCK_D)
        else:
            buffer.store(out.to(query.dtype))  # this half of the queries has been read
            fence_async_shared()
            tma_store(out_desc, [batch, own_head, token + first_row, 0],
                                            reinterpret(buffer, query.dtype, [1, 1, BLOCK, BLOCK_D], out_desc.layout))
        mbarrier.wait(q_full.index(tiles % 2), (tiles // 2) & 1)
        batch, head, token, length, low, masked_steps, free_steps, marks = receive_plan(plan, tiles % 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "n_tiles", "n_programs", "head_group", "own_rows"])  # they differ from batch to batch
def s2_hopper_forward_kernel(q_desc, k_desc, v_desc, out_desc, k_more_desc, v_more_desc, out_ptr, lse_ptr, initial_ptr, initial_lse_ptr,
                             counter_ptr, ranges_ptr, order_ptr, documents_ptr, list_rows_ptr, list_tiles_ptr, list_steps_ptr, scale, rows,
                             heads, n_tiles, n_programs, batches, head_group, own_rows, stride_ob, stride_oh, stride_os, stride_ib, stride_ih,
                             stride_is, HEAD_DIM: gl.constexpr, N_RANGES: gl.constexpr, RATIO: gl.constexpr, ORDERED: gl.constexpr,
                             PACKED: gl.constexpr, PACK: gl.constexpr, LISTED: gl.constexpr, KV_STEP: gl.constexpr, MORE: gl.constexpr,
                             CONTINUE: gl.constexpr, WIDE: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr):
    """Tensors are [batch, heads, rows, HEAD_DIM] with any strides, in descriptors with boxes of 64 x 64 (K, V) and 64 x BLOCK_D (Q, out).
    KV_STEP: 0 where KV heads share the rows of K and V. MORE: the rows of K and V from own_rows on lie in two further tensors (LISTED only).
    CONTINUE: the softmax goes on from the initial out and LSE (LISTED only). WIDE: out is of another type than the queries, and is not written
    through its descriptor. counter_ptr: LISTED, a zero."""
    dtype: gl.constexpr = q_desc.dtype
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    CHUNKS: gl.constexpr = BLOCK_D // 64
    q_buffers, k_buffers, v_buffers, plan, words, barriers = tile_memory(dtype, BLOCK_D, 2, 4, STAGES, STAGES, 2 * BLOCK, LISTED)
    q_tiles = reinterpret(q_buffers, dtype, [4, 1, 1, BLOCK, BLOCK_D], box)
    k_tiles = reinterpret(k_buffers, dtype, [STAGES * CHUNKS * 2, 1, 1, BLOCK, 64], box)
    v_tiles = reinterpret(v_buffers, dtype, [STAGES * CHUNKS * 2, 1, 1, BLOCK, 64], box)
    sources = (k_desc, v_desc, k_more_desc if MORE else k_desc, v_more_desc if MORE else v_desc, own_rows)
    work = (ranges_ptr, order_ptr, documents_ptr, counter_ptr, rows, n_tiles, n_programs, batches, head_group)
    lists = (list_rows_ptr, list_tiles_ptr, list_steps_ptr)
    gl.warp_specialize([
        (compute, (out_desc, out_ptr, lse_ptr, initial_ptr, initial_lse_ptr, q_buffers, k_buffers, v_buffers, words, plan, barriers, rows,
                   scale, heads, stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, 0, HEAD_DIM, PACKED, PACK, LISTED, CONTINUE,
                   WIDE, BLOCK_D, STAGES)),
        (compute, (out_desc, out_ptr, lse_ptr, initial_ptr, initial_lse_ptr, q_buffers, k_buffers, v_buffers, words, plan, barriers, rows,
                   scale, heads, stride_ob, stride_oh, stride_os, stride_ib, stride_ih, stride_is, 1, HEAD_DIM, PACKED, PACK, LISTED, CONTINUE,
                   WIDE, BLOCK_D, STAGES)),
        (produce, (q_desc, sources, q_desc, q_tiles, k_tiles, v_tiles, (), words, plan, barriers, work, lists, N_RANGES, RATIO, ORDERED,
                   PACKED, PACK, LISTED, KV_STEP, MORE, BLOCK_D, STAGES, STAGES, 2, False, False)),
    ], [4, 1], [240, 24])
