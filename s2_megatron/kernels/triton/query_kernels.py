"""The kernels with one program per query tile: the forward, and dQ of the backward, which walk over the same key tiles
(walk.py). Also delta, the backward's row sums."""
import triton
import triton.language as tl

from s2_megatron.kernels.triton.walk import (
    LENGTHS,
    LN2,
    LOG2E,
    SCALAR_TABLES,
    find_document,
    inner_products,
    load_rows,
    walk_query_tile,
)


@triton.jit
def tile_of_program(pid, n_tiles, HEAD_GROUP: tl.constexpr, LATE_FIRST: tl.constexpr):
    """(tile, head of the batch). HEAD_GROUP heads walk the tiles together, so that their keys stay in L2; the longest
    tiles go first."""
    per_group = n_tiles * HEAD_GROUP
    group = pid // per_group
    rest = pid - group * per_group
    tile = rest // HEAD_GROUP
    if LATE_FIRST:
        tile = n_tiles - 1 - tile
    return tile, group * HEAD_GROUP + rest % HEAD_GROUP


@triton.jit
def sequence_of_tile(tile, starts_ptr, lengths_ptr, n_docs, query_rows, kv_rows, n_blocks,
                     BLOCK: tl.constexpr, TILE_M: tl.constexpr, PACKED: tl.constexpr, KEY_SLOT: tl.constexpr):
    """(first token, query rows, keys, tile within it) of the sequence that a tile belongs to: PACKED, its document."""
    token = 0
    kv_length = n_blocks * BLOCK if KEY_SLOT else kv_rows
    rows_end = query_rows
    if PACKED:
        token, kv_length, tile = find_document(tile, starts_ptr, lengths_ptr, n_docs, TILE_M)
        rows_end = kv_length
    return token, rows_end, kv_length, tile


@triton.jit
def rows_of_tile(tile, rows_end, query_ids_ptr, BLOCK: tl.constexpr, TILE_M: tl.constexpr, QUERY_IDS: tl.constexpr):
    """(rows, positions, first query block, last one, last position) of a tile. Rows [TILE_M] are counted in memory, all
    others in the sequence; QUERY_IDS: a block of rows may lie anywhere in it."""
    rows = tile * TILE_M + tl.arange(0, TILE_M)
    last_row = tl.minimum((tile + 1) * TILE_M, rows_end) - 1
    query_low = tile * TILE_M // BLOCK
    query_high = last_row // BLOCK
    positions = rows
    last_position = last_row
    if QUERY_IDS:
        shift = (tl.load(query_ids_ptr + query_low) - query_low) * BLOCK
        query_low += shift // BLOCK
        query_high += shift // BLOCK
        positions = rows + shift
        last_position = last_row + shift
    return rows, positions, query_low, query_high, last_position


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=SCALAR_TABLES)
def s2_forward_kernel(
        query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, initial_out_ptr, initial_lse_ptr,
        ranges_ptr, row_starts_ptr, key_blocks_ptr, starts_ptr, lengths_ptr, query_ids_ptr, slot_ptr,
        run_index_ptr, run_prefix_ptr, run_slots_ptr, tokens_ptr,
        scale, n_tiles, n_docs, query_rows, kv_rows, n_heads, n_kv_heads, n_tables, table_rows, n_blocks,
        stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
        stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, stride_os, stride_od,
        stride_ib, stride_ih, stride_is, stride_id,
        BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        N_RANGES: tl.constexpr, TABLE: tl.constexpr, TOKENS: tl.constexpr, PACKED: tl.constexpr, QUERY_IDS: tl.constexpr,
        KEY_SLOT: tl.constexpr, RUNS: tl.constexpr, CONTINUE: tl.constexpr, HEAD_GROUP: tl.constexpr,
        STAGES: tl.constexpr, IEEE: tl.constexpr):
    """out and LSE of one query tile. CONTINUE: the softmax goes on from the initial out and LSE."""
    tile, batch_head = tile_of_program(tl.program_id(0), n_tiles, HEAD_GROUP, not PACKED)
    batch = (batch_head // n_heads).to(tl.int64)
    head = batch_head % n_heads
    kv_head = head // (n_heads // n_kv_heads)
    token, rows_end, kv_length, tile = sequence_of_tile(
        tile, starts_ptr, lengths_ptr, n_docs, query_rows, kv_rows, n_blocks, BLOCK, TILE_M, PACKED, KEY_SLOT)
    if (tile < 0) | (tile * TILE_M >= rows_end):
        return
    rows, positions, query_low, query_high, last_position = rows_of_tile(
        tile, rows_end, query_ids_ptr, BLOCK, TILE_M, QUERY_IDS)
    inside = rows < rows_end
    far_rows = rows.to(tl.int64)
    token = token.to(tl.int64) if PACKED else tl.full([], 0, tl.int64)
    query = load_rows(query_ptr + batch * stride_qb + head.to(tl.int64) * stride_qh + token * stride_qs,
                      far_rows, stride_qs, stride_qd, inside, HEAD_DIM, BLOCK_D, MASK=True)  # Q [TILE_M, BLOCK_D]
    out_base = batch * stride_ob + head.to(tl.int64) * stride_oh + token * stride_os
    dims = tl.arange(0, BLOCK_D)
    store = inside[:, None] & (dims < HEAD_DIM)[None, :]
    row_base = batch_head.to(tl.int64) * query_rows + token
    accumulator = tl.zeros([TILE_M, BLOCK_D], tl.float32)
    running_sum = tl.zeros([TILE_M], tl.float32)
    running_max = tl.full([TILE_M], float("-inf"), tl.float32)  # base 2
    if CONTINUE:  # all keys so far count as one, whose score is the initial LSE and whose value the initial out
        running_max = tl.load(initial_lse_ptr + row_base + rows, mask=inside, other=float("-inf")) * LOG2E
        running_sum = tl.where(running_max == float("-inf"), 0.0, 1.0)
        initial_out = initial_out_ptr + batch * stride_ib + head.to(tl.int64) * stride_ih + token * stride_is
        accumulator = load_rows(initial_out, far_rows, stride_is, stride_id, inside, HEAD_DIM, BLOCK_D,
                                MASK=True).to(tl.float32)
    accumulator, running_sum, running_max = walk_query_tile(
        accumulator, running_sum, running_max, query, query,
        key_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh + token * stride_ks,
        value_ptr + batch * stride_vb + kv_head.to(tl.int64) * stride_vh + token * stride_vs,
        stride_ks, stride_kd, stride_vs, stride_vd, ranges_ptr, row_starts_ptr, key_blocks_ptr,
        slot_ptr + kv_head * n_blocks, run_index_ptr, run_prefix_ptr, run_slots_ptr, head, head * n_tables // n_heads,
        table_rows, tokens_ptr, positions, query_low, query_high, last_position, kv_length, scale * LOG2E,
        BLOCK=BLOCK, TILE_M=TILE_M, TILE_N=TILE_N, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, N_RANGES=N_RANGES, TABLE=TABLE, TOKENS=TOKENS,
        KEY_SLOT=KEY_SLOT, RUNS=RUNS, STAGES=STAGES, IEEE=IEEE, FORWARD=True)
    # LSE = maximum + log(sum); a row without a key has -inf, and out 0
    tl.store(lse_ptr + row_base + rows, running_max * LN2 + tl.log(running_sum), mask=inside)
    out = accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
    tl.store(out_ptr + out_base + far_rows[:, None] * stride_os + dims[None, :] * stride_od,
             out.to(out_ptr.dtype.element_ty), mask=store)


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=SCALAR_TABLES)
def s2_grad_query_kernel(
        query_ptr, key_ptr, value_ptr, grad_query_ptr, lse_ptr, grad_out_ptr, delta_ptr, initial_grad_query_ptr,
        ranges_ptr, row_starts_ptr, key_blocks_ptr, starts_ptr, lengths_ptr, query_ids_ptr, slot_ptr,
        run_index_ptr, run_prefix_ptr, run_slots_ptr, tokens_ptr,
        scale, n_tiles, n_docs, query_rows, kv_rows, n_heads, n_kv_heads, n_tables, table_rows, n_blocks,
        stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
        stride_vb, stride_vh, stride_vs, stride_vd, stride_dqb, stride_dqh, stride_dqs, stride_dqd,
        stride_gb, stride_gh, stride_gs, stride_gd, stride_ib, stride_ih, stride_is, stride_id,
        BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        N_RANGES: tl.constexpr, TABLE: tl.constexpr, TOKENS: tl.constexpr, PACKED: tl.constexpr, QUERY_IDS: tl.constexpr,
        KEY_SLOT: tl.constexpr, RUNS: tl.constexpr, CONTINUE: tl.constexpr, HEAD_GROUP: tl.constexpr,
        STAGES: tl.constexpr, IEEE: tl.constexpr):
    """dQ of one query tile, from grad_out, delta and LSE. CONTINUE: on top of the initial dQ."""
    tile, batch_head = tile_of_program(tl.program_id(0), n_tiles, HEAD_GROUP, not PACKED)
    batch = (batch_head // n_heads).to(tl.int64)
    head = batch_head % n_heads
    kv_head = head // (n_heads // n_kv_heads)
    token, rows_end, kv_length, tile = sequence_of_tile(
        tile, starts_ptr, lengths_ptr, n_docs, query_rows, kv_rows, n_blocks, BLOCK, TILE_M, PACKED, KEY_SLOT)
    if (tile < 0) | (tile * TILE_M >= rows_end):
        return
    rows, positions, query_low, query_high, last_position = rows_of_tile(
        tile, rows_end, query_ids_ptr, BLOCK, TILE_M, QUERY_IDS)
    inside = rows < rows_end
    far_rows = rows.to(tl.int64)
    token = token.to(tl.int64) if PACKED else tl.full([], 0, tl.int64)
    query = load_rows(query_ptr + batch * stride_qb + head.to(tl.int64) * stride_qh + token * stride_qs,
                      far_rows, stride_qs, stride_qd, inside, HEAD_DIM, BLOCK_D, MASK=True)  # Q [TILE_M, BLOCK_D]
    grad_query_base = batch * stride_dqb + head.to(tl.int64) * stride_dqh + token * stride_dqs
    dims = tl.arange(0, BLOCK_D)
    store = inside[:, None] & (dims < HEAD_DIM)[None, :]
    row_base = batch_head.to(tl.int64) * query_rows + token
    grad_out = load_rows(grad_out_ptr + batch * stride_gb + head.to(tl.int64) * stride_gh + token * stride_gs,
                         far_rows, stride_gs, stride_gd, inside, HEAD_DIM, BLOCK_D, MASK=True)  # dO [TILE_M, BLOCK_D]
    accumulator = tl.zeros([TILE_M, BLOCK_D], tl.float32)
    delta = tl.load(delta_ptr + row_base + rows, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + row_base + rows, mask=inside, other=float("inf")) * LOG2E  # base 2
    lse = tl.where(lse == float("-inf"), float("inf"), lse)  # a row without a key: every probability is 0
    accumulator, _, _ = walk_query_tile(
        accumulator, delta, lse, query, grad_out,
        key_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh + token * stride_ks,
        value_ptr + batch * stride_vb + kv_head.to(tl.int64) * stride_vh + token * stride_vs,
        stride_ks, stride_kd, stride_vs, stride_vd, ranges_ptr, row_starts_ptr, key_blocks_ptr,
        slot_ptr + kv_head * n_blocks, run_index_ptr, run_prefix_ptr, run_slots_ptr, head, head * n_tables // n_heads,
        table_rows, tokens_ptr, positions, query_low, query_high, last_position, kv_length, scale * LOG2E,
        BLOCK=BLOCK, TILE_M=TILE_M, TILE_N=TILE_N, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D, N_RANGES=N_RANGES, TABLE=TABLE, TOKENS=TOKENS,
        KEY_SLOT=KEY_SLOT, RUNS=RUNS, STAGES=STAGES, IEEE=IEEE, FORWARD=False)
    grad_query = accumulator * scale
    if CONTINUE:
        initial = initial_grad_query_ptr + batch * stride_ib + head.to(tl.int64) * stride_ih + token * stride_is
        grad_query += load_rows(initial, far_rows, stride_is, stride_id, inside, HEAD_DIM, BLOCK_D,
                                MASK=True).to(tl.float32)
    tl.store(grad_query_ptr + grad_query_base + far_rows[:, None] * stride_dqs + dims[None, :] * stride_dqd,
             grad_query.to(grad_query_ptr.dtype.element_ty), mask=store)


# The gradient of LSE has the strides of its user, which depend on the length.
@triton.jit(do_not_specialize=["n_counters", "n_rows", "stride_lb", "stride_lh"])
def s2_delta_kernel(out_ptr, grad_out_ptr, grad_lse_ptr, lse_ptr, delta_ptr, clear_ptr, counters_ptr, n_counters, n_rows, n_heads,
                    stride_ob, stride_oh, stride_os, stride_od, stride_gb, stride_gh, stride_gs, stride_gd,
                    stride_lb, stride_lh, stride_ls,
                    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GRAD_LSE: tl.constexpr, CLEAR: tl.constexpr,
                    COUNTERS: tl.constexpr):
    """delta = rowsum(out * grad_out) - grad_lse, fp32 [B, H, rows]. CLEAR: also zeros into clear, fp32 [B, H, rows,
    D]. COUNTERS: also into counters, int32 [n_counters]."""
    row_tiles = tl.cdiv(n_rows, ROWS)
    rows = (tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    batch_head = (tl.program_id(0) // row_tiles).to(tl.int64)
    batch = batch_head // n_heads
    head = batch_head % n_heads
    inside = rows < n_rows
    out = load_rows(out_ptr + batch * stride_ob + head * stride_oh, rows, stride_os, stride_od, inside, HEAD_DIM, BLOCK_D, True)
    grad = load_rows(grad_out_ptr + batch * stride_gb + head * stride_gh, rows, stride_gs, stride_gd, inside, HEAD_DIM, BLOCK_D, True)
    if grad_out_ptr.dtype.element_ty == tl.float32:
        # Summed in the order of dP, from which it is taken: with few keys the two are nearly equal.
        products = inner_products(grad, out.to(tl.float32), True)
        same_row = tl.arange(0, ROWS)[:, None] == tl.arange(0, ROWS)[None, :]
        delta = tl.sum(tl.where(same_row, products, 0.0), 1)
    else:
        delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if GRAD_LSE:
        grad_lse = tl.load(grad_lse_ptr + batch * stride_lb + head * stride_lh + rows * stride_ls, mask=inside, other=0.0)
        lse = tl.load(lse_ptr + batch_head * n_rows + rows, mask=inside, other=0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, grad_lse)
    tl.store(delta_ptr + batch_head * n_rows + rows, delta, mask=inside)
    if COUNTERS:
        if tl.program_id(0) == 0:
            for first in range(0, n_counters, ROWS):
                counters = first + tl.arange(0, ROWS)
                tl.store(counters_ptr + counters, tl.zeros([ROWS], tl.int32), mask=counters < n_counters)
    if CLEAR:
        dims = tl.arange(0, BLOCK_D)
        keep = inside[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(clear_ptr + (batch_head * n_rows + rows)[:, None] * HEAD_DIM + dims[None, :], tl.zeros([ROWS, BLOCK_D], tl.float32), mask=keep)
