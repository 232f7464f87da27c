"""dK and dV: one program per key tile (a part of one key block) of one KV head, over the query heads of its group.

A key block is attended by runs of query blocks, one per range: k + start <= q < k + end where the block is a member of
the range's stride. The sums are in a fixed order and without atomics, so the result is bitwise repeatable.
"""
import triton
import triton.language as tl

from s2_megatron.kernels.triton.walk import (
    LENGTHS,
    LOG2E,
    SCALAR_TABLES,
    attended,
    find_document,
    inner_products,
    load_range,
    load_rows,
    load_tokens,
)


@triton.jit
def add_product(total, left, right, IEEE: tl.constexpr):
    """total + left @ right. 32-bit inputs: the product is a sum of its own, for one chain of additions over all queries
    is less exact than a matrix library's."""
    if IEEE:
        # The last argument, without meaning for 32 bits, keeps the compiler from making one chain of the two sums.
        return total + tl.dot(left, right, input_precision="ieee", max_num_imprecise_acc=1)
    else:
        return tl.dot(left, right, total)


@triton.jit
def grad_key_step(grad_key, grad_value, key, value, query_ptr, grad_out_ptr, lse_ptr, delta_ptr, base, rows, inside, keep,
                  stride_qs, stride_qd, stride_gs, stride_gd, scale_log2,
                  HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASK_ROWS: tl.constexpr, MASK: tl.constexpr, IEEE: tl.constexpr):
    """One query tile, rows base + rows (base int64), against the resident key tile. Scores are transposed (key x
    query), so that they feed both sums from registers."""
    lse_ptr += base
    delta_ptr += base
    query = load_rows(query_ptr + base * stride_qs, rows, stride_qs, stride_qd, inside, HEAD_DIM, BLOCK_D, MASK_ROWS)
    scores = inner_products(key, query, IEEE)  # S^T = K Q^T, [TILE_N keys, TILE_M queries]
    if MASK_ROWS:
        lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + rows, mask=inside, other=0.0)
    else:
        lse = tl.load(lse_ptr + rows)
        delta = tl.load(delta_ptr + rows)
    lse = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E  # rows outside or without a key: probability 0
    p = tl.exp2(scores * scale_log2 - lse[None, :])  # P^T = exp(scale * S^T - LSE)
    if MASK:
        p = tl.where(keep, p, 0.0)
    grad_out = load_rows(grad_out_ptr + base * stride_gs, rows, stride_gs, stride_gd, inside, HEAD_DIM, BLOCK_D, MASK_ROWS)
    grad_value = add_product(grad_value, p.to(grad_out.dtype), grad_out, IEEE)  # dV += P^T dO, [TILE_N, BLOCK_D]
    grad_p = inner_products(value, grad_out, IEEE)  # dP^T = V dO^T
    grad_scores = p * (grad_p - delta[None, :])  # dS^T = P^T * (dP^T - delta)
    grad_key = add_product(grad_key, grad_scores.to(query.dtype), query, IEEE)  # dK / scale += dS^T Q
    return grad_key, grad_value


@triton.jit
def longest_first(index, n_blocks, ranges_ptr, head, N_RANGES: tl.constexpr):
    """index -> key block: first the members of the last stride, which are attended longest, then the others."""
    stride = tl.load(ranges_ptr + (head * N_RANGES + N_RANGES - 1) * 4 + 2)
    offset = tl.load(ranges_ptr + (head * N_RANGES + N_RANGES - 1) * 4 + 3)
    first = (stride - offset) % stride
    n_long = tl.where(n_blocks > first, (n_blocks - first + stride - 1) // stride, 0)
    short = index - n_long
    beyond = short - first
    between = first + 1 + beyond + beyond // tl.maximum(stride - 1, 1)
    return tl.where(index < n_long, first + index * stride, tl.where(short < first, short, between))


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=SCALAR_TABLES)
def s2_backward_dkdv_kernel(query_ptr, key_ptr, value_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_key_ptr, grad_value_ptr,
                            ranges_ptr, tokens_ptr, column_starts_ptr, query_blocks_ptr, starts_ptr, lengths_ptr, query_ids_ptr, query_rank_ptr, slot_ptr,
                            scale, n_tiles, n_docs, query_rows, kv_rows, n_heads, n_kv_heads, n_tables, table_rows, n_blocks,
                            stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
                            stride_vb, stride_vh, stride_vs, stride_vd, stride_gb, stride_gh, stride_gs, stride_gd,
                            stride_dkb, stride_dkh, stride_dks, stride_dkd, stride_dvb, stride_dvh, stride_dvs, stride_dvd,
                            BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                            N_RANGES: tl.constexpr, EFFICIENT: tl.constexpr, RATIO: tl.constexpr, TABLE: tl.constexpr, TOKENS: tl.constexpr,
                            PACKED: tl.constexpr, QUERY_IDS: tl.constexpr, KEY_SLOT: tl.constexpr, HEAD_GROUP: tl.constexpr, STAGES: tl.constexpr,
                            IEEE: tl.constexpr):
    PARTS: tl.constexpr = BLOCK // TILE_N
    DIAGONAL_ROWS: tl.constexpr = (BLOCK + TILE_M - 1) // TILE_M * TILE_M
    per_group = n_tiles * HEAD_GROUP
    pid = tl.program_id(0)
    group = pid // per_group
    rest = pid - group * per_group
    tile = rest // HEAD_GROUP
    batch_head = group * HEAD_GROUP + rest % HEAD_GROUP
    batch = (batch_head // n_kv_heads).to(tl.int64)
    kv_head = batch_head % n_kv_heads
    kv_length = kv_rows
    rows_limit = query_rows
    if PACKED:
        token, kv_length, tile = find_document(tile, starts_ptr, lengths_ptr, n_docs, TILE_N)
        token = token.to(tl.int64)
        rows_limit = kv_length
    else:
        token = tl.full([], 0, tl.int64)
        if not TABLE and not KEY_SLOT:
            tile = longest_first(tile // PARTS, n_tiles // PARTS, ranges_ptr, kv_head * RATIO, N_RANGES) * PARTS + tile % PARTS
    if not KEY_SLOT:
        if (tile < 0) | (tile * TILE_N >= kv_length):
            return
    key_block = tile * TILE_N // BLOCK
    columns = tile * TILE_N + tl.arange(0, TILE_N)
    memory_rows = columns.to(tl.int64)
    present = columns < kv_length
    if KEY_SLOT:
        slot = tl.load(slot_ptr + kv_head * n_blocks + key_block)
        if slot < 0:
            return
        memory_rows = slot.to(tl.int64) * BLOCK + columns % BLOCK
        present = columns >= 0
    key = load_rows(key_ptr + batch * stride_kb + kv_head.to(tl.int64) * stride_kh + token * stride_ks, memory_rows, stride_ks, stride_kd,
                    present, HEAD_DIM, BLOCK_D, True)
    value = load_rows(value_ptr + batch * stride_vb + kv_head.to(tl.int64) * stride_vh + token * stride_vs, memory_rows, stride_vs, stride_vd,
                      present, HEAD_DIM, BLOCK_D, True)
    grad_key = tl.zeros([TILE_N, BLOCK_D], tl.float32)
    grad_value = tl.zeros([TILE_N, BLOCK_D], tl.float32)
    offsets = tl.arange(0, TILE_M)
    nowhere = tl.full([], 0, tl.int64)  # rows that count from the start of the sequence
    scale_log2 = scale * LOG2E
    for member in range(RATIO):
        head = kv_head * RATIO + member
        head_base = head.to(tl.int64)
        query_base = query_ptr + batch * stride_qb + head_base * stride_qh + token * stride_qs
        grad_out_base = grad_out_ptr + batch * stride_gb + head_base * stride_gh + token * stride_gs
        row_base = (batch * n_heads + head_base) * query_rows + token
        lse_base = lse_ptr + row_base
        delta_base = delta_ptr + row_base
        if TABLE:
            column = column_starts_ptr + (head * n_tables // n_heads) * table_rows + key_block
            list_start = tl.load(column)
            count = (tl.load(column + 1) - list_start).to(tl.int32)
            for step in tl.range(0, count * BLOCK, TILE_M, num_stages=STAGES):
                entry = (step + offsets) // BLOCK
                wanted = entry < count
                query_block = tl.load(query_blocks_ptr + list_start + entry, mask=wanted, other=0)
                positions = query_block * BLOCK + (step + offsets) % BLOCK
                rows = positions
                if QUERY_IDS:
                    inside_table = wanted & (query_block < n_blocks)
                    local = tl.load(query_rank_ptr + query_block, mask=inside_table, other=0)
                    wanted = inside_table & (tl.load(query_rank_ptr + query_block + 1, mask=inside_table, other=0) > local)
                    rows = local * BLOCK + (step + offsets) % BLOCK
                wanted = wanted & (rows < rows_limit)
                keep = positions[None, :] >= columns[:, None]
                grad_key, grad_value = grad_key_step(grad_key, grad_value, key, value, query_base, grad_out_base, lse_base, delta_base,
                                                     nowhere, rows.to(tl.int64), wanted, keep, stride_qs, stride_qd, stride_gs, stride_gd,
                                                     scale_log2, HEAD_DIM, BLOCK_D, True, True, IEEE)
        else:
            for index in range(1 if EFFICIENT else N_RANGES):
                start, end, stride, offset = load_range(ranges_ptr, head, index, N_RANGES)
                # The runs of a member's ranges join: one loop instead of a loop of loops, which ptxas cannot pipeline.
                if EFFICIENT:
                    for other in tl.static_range(1, N_RANGES):
                        other_start, other_end, other_stride, other_offset = load_range(ranges_ptr, head, other, N_RANGES)
                        # An unused range is empty.
                        joins = (other_end > other_start) & ((key_block + other_offset) % other_stride == 0)
                        end = tl.where(joins, tl.maximum(end, other_end), end)
                if QUERY_IDS:
                    row_low = tl.load(query_rank_ptr + tl.minimum(key_block + start, n_blocks)) * BLOCK
                    row_high = tl.load(query_rank_ptr + tl.minimum(key_block + end, n_blocks)) * BLOCK
                else:
                    limit = (rows_limit + BLOCK - 1) // BLOCK
                    row_low = tl.maximum(tl.minimum(key_block + start, limit) * BLOCK, tile * TILE_N)
                    row_high = tl.minimum(tl.minimum(key_block + end, limit) * BLOCK, rows_limit)
                row_high = tl.where((key_block + offset) % stride == 0, row_high, row_low)
                # Masked steps: those that may hold the diagonal, and the last one where it is not full. Then all
                # others.
                diagonal_end = tl.where(start == 0, tl.minimum(row_high, row_low + DIAGONAL_ROWS), row_low)
                diagonal_steps = tl.cdiv(diagonal_end - row_low, TILE_M)
                full = (row_high - diagonal_end) // TILE_M
                tail = diagonal_end + full * TILE_M
                for step in range(diagonal_steps + tl.where(tail < row_high, 1, 0)):
                    rows = tl.where(step < diagonal_steps, row_low + step * TILE_M, tail) + offsets
                    inside = rows < tl.where(step < diagonal_steps, diagonal_end, row_high)
                    positions = rows
                    if QUERY_IDS:
                        positions = tl.load(query_ids_ptr + rows // BLOCK, mask=inside, other=0) * BLOCK + rows % BLOCK
                    keep = positions[None, :] >= columns[:, None]
                    grad_key, grad_value = grad_key_step(grad_key, grad_value, key, value, query_base, grad_out_base, lse_base, delta_base,
                                                         nowhere, rows.to(tl.int64), inside, keep, stride_qs, stride_qd, stride_gs, stride_gd,
                                                         scale_log2, HEAD_DIM, BLOCK_D, True, True, IEEE)
                for step in tl.range(0, full, num_stages=STAGES):
                    base = (diagonal_end + step * TILE_M).to(tl.int64)
                    grad_key, grad_value = grad_key_step(grad_key, grad_value, key, value, query_base, grad_out_base, lse_base, delta_base,
                                                         base, offsets, offsets >= 0, offsets[None, :] >= 0, stride_qs, stride_qd, stride_gs,
                                                         stride_gd, scale_log2, HEAD_DIM, BLOCK_D, False, False, IEEE)
            if TOKENS:  # what a window and a sink show beside the whole blocks of the ranges
                window, sink = load_tokens(tokens_ptr, head)
                for part in tl.static_range(2):
                    if part == 0:
                        block_low = key_block + window // BLOCK
                        block_high = tl.where(window > 0, block_low + 2, block_low)
                    else:
                        block_low = key_block
                        block_high = tl.where(key_block * BLOCK < sink, 1 << 30, block_low)
                    if QUERY_IDS:
                        row_low = tl.load(query_rank_ptr + tl.minimum(block_low, n_blocks)) * BLOCK
                        row_high = tl.load(query_rank_ptr + tl.minimum(block_high, n_blocks)) * BLOCK
                    else:
                        limit = (rows_limit + BLOCK - 1) // BLOCK
                        row_low = tl.minimum(block_low, limit) * BLOCK
                        row_high = tl.minimum(tl.minimum(block_high, limit) * BLOCK, rows_limit)
                    for step in range(tl.cdiv(tl.maximum(row_high - row_low, 0), TILE_M)):
                        rows = row_low + step * TILE_M + offsets
                        inside = rows < row_high
                        positions = rows
                        if QUERY_IDS:
                            positions = tl.load(query_ids_ptr + rows // BLOCK, mask=inside, other=0) * BLOCK + rows % BLOCK
                        in_window = positions[None, :] - columns[:, None] < window
                        keep = (in_window == (part == 0)) & (positions[None, :] >= columns[:, None]) & inside[None, :]
                        if part == 1:
                            keep = keep & (columns < sink)[:, None]
                        whole = attended((positions // BLOCK)[None, :], (columns // BLOCK)[:, None], ranges_ptr, head, N_RANGES)
                        grad_key, grad_value = grad_key_step(grad_key, grad_value, key, value, query_base, grad_out_base, lse_base, delta_base,
                                                             nowhere, rows.to(tl.int64), inside, keep & (whole == 0), stride_qs, stride_qd,
                                                             stride_gs, stride_gd, scale_log2, HEAD_DIM, BLOCK_D, True, True, IEEE)
    dims = tl.arange(0, BLOCK_D)
    store = present[:, None] & (dims < HEAD_DIM)[None, :]
    row_offsets = memory_rows[:, None]
    tl.store(grad_key_ptr + batch * stride_dkb + kv_head.to(tl.int64) * stride_dkh + token * stride_dks + row_offsets * stride_dks
             + dims[None, :] * stride_dkd, (grad_key * scale).to(grad_key_ptr.dtype.element_ty), mask=store)
    tl.store(grad_value_ptr + batch * stride_dvb + kv_head.to(tl.int64) * stride_dvh + token * stride_dvs + row_offsets * stride_dvs
             + dims[None, :] * stride_dvd, grad_value.to(grad_value_ptr.dtype.element_ty), mask=store)


@triton.jit
def s2_add_returned_kernel(own_ptr, returned_ptr, out_ptr, starts_ptr, entries_ptr, n_batch, n_heads, part,
                           stride_gb, stride_gh, stride_gs, stride_gd, stride_ob, stride_oh, stride_os, stride_od,
                           BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program per block of this rank, KV head and batch: out = own + the returned slots of this block in the order
    of ranks, in the precision of own. part: 0 for K, 1 for V."""
    batch = (tl.program_id(0) % n_batch).to(tl.int64)
    place = tl.program_id(0) // n_batch  # block * n_heads + head
    head = (place % n_heads).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    rows = (place // n_heads).to(tl.int64) * BLOCK + inside
    dims = tl.arange(0, BLOCK_D)
    keep = (inside >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    total = tl.load(own_ptr + batch * stride_gb + head * stride_gh + rows[:, None] * stride_gs + dims[None, :] * stride_gd, mask=keep)
    for entry in range(tl.load(starts_ptr + place), tl.load(starts_ptr + place + 1)):
        slot = tl.load(entries_ptr + entry).to(tl.int64)
        row = ((slot * BLOCK + inside) * 2 + part) * n_batch + batch
        total += tl.load(returned_ptr + row[:, None] * HEAD_DIM + dims[None, :], mask=keep).to(total.dtype)
    target = out_ptr + batch * stride_ob + head * stride_oh + rows[:, None] * stride_os + dims[None, :] * stride_od
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=keep)
