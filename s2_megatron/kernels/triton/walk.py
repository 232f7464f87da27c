"""Which key blocks a query tile visits, and in which order: written once for the forward and for dQ.

A tile holds TILE_M query rows of one head: the query blocks query_low .. query_high. Its key blocks come in three
kinds: 1. the tile's own blocks (the diagonal), masked by token;
2. the edges of ranges: blocks that the tile's first query blocks still attend and its last ones do not, masked by
block; 3. all others, attended by every row, without a mask.
TOKENS: two more kinds for a window and a sink in tokens, both masked by token: 4. the blocks at the window's edge; 5.
those of the sink. Both leave out what the ranges attend as whole blocks, and 5 what 4 has.
Kinds 2 and 3 are runs `first + t * stride`, t < count, computed from the pattern's ranges, or lists of an index table
(block masks). The key columns of a step are TILE_N tokens: TILE_N // BLOCK neighbouring entries of a run.
"""
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Arguments that differ from batch to batch. Triton compiles a variant for a value of 1, for multiples of 16 and for
# other values; it must not for these, or a packed run compiles in its middle. The tables are read one number at a time:
# their alignment is of no use either.
LENGTHS = ["n_tiles", "n_docs", "query_rows", "kv_rows", "n_blocks"]
SCALAR_TABLES = ["starts_ptr", "lengths_ptr", "query_ids_ptr", "query_rank_ptr", "slot_ptr"]


@triton.jit
def find_document(tile, starts_ptr, lengths_ptr, n_docs, TILE: tl.constexpr):
    """(first token, tokens, tile within the document) of a tile number. Document i owns the numbers from starts[i] //
    TILE + i on: at least as many as it has tiles, so that no table of tiles is needed. Numbers before the first
    document give a negative tile."""
    low = 0
    high = n_docs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts_ptr + middle) // TILE + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    start = tl.load(starts_ptr + low)
    length = tl.load(lengths_ptr + low + 1) - tl.load(lengths_ptr + low)
    return start, length, tile - (start // TILE + low)


@triton.jit
def load_range(ranges_ptr, head, index, N_RANGES: tl.constexpr):
    """(first distance, distance limit, stride, offset) of one range of a head."""
    entry = ranges_ptr + (head * N_RANGES + index) * 4
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def members(low, high, stride, offset):
    """(first, count) of the blocks k in [low, high] with (k + offset) % stride == 0; low >= 0."""
    first = low + (stride - (low + offset) % stride) % stride
    return first, tl.where(high >= first, (high - first) // stride + 1, 0)


@triton.jit
def attended(row_block, column_block, ranges_ptr, head, N_RANGES: tl.constexpr):
    """Whether blocks [M, 1] attend blocks [1, N], by the definition of the pattern."""
    distance = row_block - column_block
    keep = distance != distance
    for index in tl.static_range(N_RANGES):
        start, end, stride, offset = load_range(ranges_ptr, head, index, N_RANGES)
        keep = keep | ((distance >= start) & (distance < end) & ((column_block + offset) % stride == 0))
    return keep


@triton.jit
def load_tokens(tokens_ptr, head):
    """(window, sink) of a head in tokens; 0 for none."""
    return tl.load(tokens_ptr + head * 2), tl.load(tokens_ptr + head * 2 + 1)


@triton.jit
def load_rows(ptr, rows, stride_row, stride_dim, keep, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr):
    """[rows, BLOCK_D] of a matrix; keep bool [rows]. Dims from HEAD_DIM on, and masked rows, are 0. rows: int64, or
    int32 when they count from `ptr` within one tile: those take half the registers."""
    dims = tl.arange(0, BLOCK_D)
    pointers = ptr + (rows[:, None] * stride_row + dims[None, :] * stride_dim)
    if MASK:
        return tl.load(pointers, mask=keep[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if BLOCK_D != HEAD_DIM:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def key_rows(columns, block, slot_ptr, BLOCK: tl.constexpr, KEY_SLOT: tl.constexpr):
    """(memory rows, present) of key columns; with slots, a block may lie anywhere or be absent."""
    if KEY_SLOT:
        slot = tl.load(slot_ptr + block)
        return slot.to(tl.int64) * BLOCK + columns % BLOCK, slot >= 0
    return columns.to(tl.int64), columns >= 0


@triton.jit
def inner_products(left, right, IEEE: tl.constexpr):
    """left [M, D] @ right [N, D]^T in fp32. 32-bit inputs: in parts of 64 dims, for one chain of 256 additions is less
    exact than a matrix library's sums, and its error passes through the exponential."""
    if IEEE and left.shape[1] > 64:
        parts: tl.constexpr = left.shape[1] // 64
        left = tl.permute(tl.reshape(left, [left.shape[0], parts, 64]), (1, 0, 2))
        right = tl.permute(tl.reshape(right, [right.shape[0], parts, 64]), (1, 2, 0))
        return tl.sum(tl.dot(left, right, input_precision="ieee"), 0)
    else:
        return tl.dot(left, tl.trans(right), input_precision="ieee" if IEEE else None)


@triton.jit
def softmax_step(accumulator, running_sum, running_max, query, key, value, keep, scale_log2, MASK: tl.constexpr, IEEE: tl.constexpr):
    """One key tile of the online softmax (base 2). Rows without a key so far keep running_max = -inf and never make a
    NaN."""
    scores = inner_products(query, key, IEEE)  # scores = Q K^T, [TILE_M, TILE_N]
    if MASK:
        scores = tl.where(keep, scores, float("-inf"))
    # The scale is positive: scaling after the maximum saves a product.
    new_max = tl.maximum(running_max, tl.max(scores, 1) * scale_log2)
    base = new_max
    if MASK:
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(running_max - base)
    p = tl.exp2(scores * scale_log2 - base[:, None])  # probabilities times the row's sum, [TILE_M, TILE_N]
    running_sum = running_sum * rescale + tl.sum(p, 1)
    # accumulator = accumulator * rescale + P V, [TILE_M, BLOCK_D]
    accumulator = tl.dot(p.to(value.dtype), value, accumulator * rescale[:, None], input_precision="ieee" if IEEE else None)
    return accumulator, running_sum, new_max


@triton.jit
def grad_query_step(grad_query, delta, lse, query, grad_out, key, value, keep, scale_log2, MASK: tl.constexpr, IEEE: tl.constexpr):
    """One key tile of dQ / softmax scale."""
    scores = inner_products(query, key, IEEE)  # scores = Q K^T, [TILE_M, TILE_N]
    p = tl.exp2(scores * scale_log2 - lse[:, None])  # P = softmax(scale * scores)
    if MASK:
        p = tl.where(keep, p, 0.0)
    grad_p = inner_products(grad_out, value, IEEE)  # dP = dO V^T
    grad_scores = p * (grad_p - delta[:, None])  # dS = P * (dP - delta)
    # dQ / scale = dQ / scale + dS K, [TILE_M, BLOCK_D]
    return tl.dot(grad_scores.to(key.dtype), key, grad_query, input_precision="ieee" if IEEE else None)


@triton.jit
def visit(accumulator, row_sum, row_base, query, grad_out, key_ptr, value_ptr,
          stride_ks, stride_kd, stride_vs, stride_vd, rows, columns_keep, keep, scale_log2,
          HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr, IEEE: tl.constexpr, FORWARD: tl.constexpr):
    """Loads one key and value tile [TILE_N, BLOCK_D] and does the forward's or dQ's step with it. row_sum, row_base:
    see walk_query_tile; dQ leaves them as they are."""
    key = load_rows(key_ptr, rows, stride_ks, stride_kd, columns_keep, HEAD_DIM, BLOCK_D, MASK)
    value = load_rows(value_ptr, rows, stride_vs, stride_vd, columns_keep, HEAD_DIM, BLOCK_D, MASK)
    if FORWARD:
        accumulator, row_sum, row_base = softmax_step(
            accumulator, row_sum, row_base, query, key, value, keep, scale_log2, MASK=MASK, IEEE=IEEE)
    else:
        accumulator = grad_query_step(
            accumulator, row_sum, row_base, query, grad_out, key, value, keep, scale_log2, MASK=MASK, IEEE=IEEE)
    return accumulator, row_sum, row_base


@triton.jit
def walk_query_tile(accumulator, row_sum, row_base, query, grad_out, key_ptr, value_ptr,
                    stride_ks, stride_kd, stride_vs, stride_vd,
                    ranges_ptr, row_starts_ptr, key_blocks_ptr, slot_ptr, run_index_ptr, run_prefix_ptr, run_slots_ptr, head,
                    table, table_rows, tokens_ptr, positions, query_low, query_high, last_position, kv_length, scale_log2,
                    BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                    N_RANGES: tl.constexpr, TABLE: tl.constexpr, TOKENS: tl.constexpr, KEY_SLOT: tl.constexpr, RUNS: tl.constexpr,
                    STAGES: tl.constexpr, IEEE: tl.constexpr, FORWARD: tl.constexpr):
    """Visits every key tile of a query tile. Returns (accumulator, row_sum, row_base).

    accumulator: fp32 [TILE_M, BLOCK_D], the sum of P V in the forward, dQ / scale in dQ.
    row_sum: fp32 [TILE_M], in the forward the running sum of each row's probabilities, in dQ its delta.
    row_base: fp32 [TILE_M], what exponents of base 2 are counted from: in the forward the running maximum, in dQ LSE.
    grad_out: read in dQ. positions: int [TILE_M] tokens of the rows; last_position: of the tile's last row."""
    PER_STEP: tl.constexpr = TILE_N // BLOCK if TILE_N > BLOCK else 1
    PARTS: tl.constexpr = BLOCK // TILE_N if BLOCK > TILE_N else 1
    SHARED: tl.constexpr = TILE_M > BLOCK
    offsets = tl.arange(0, TILE_N)
    row_block = positions // BLOCK
    # 1. the diagonal
    diagonal_end = tl.minimum(last_position + 1, kv_length)
    list_start = tl.full([], 0, tl.int64)
    list_count = 0
    if TABLE:
        row = row_starts_ptr + table * table_rows + query_low
        list_start = tl.load(row)
        list_count = (tl.load(row + 1) - list_start).to(tl.int32)
        own = tl.load(key_blocks_ptr + list_start + list_count - 1) == query_low
        list_count = tl.where(own, list_count - 1, list_count)
        diagonal_end = tl.where(own, diagonal_end, 0)
    if KEY_SLOT:
        own_blocks = tl.minimum(query_low + tl.arange(0, TILE_M // BLOCK if SHARED else 1), query_high)
        diagonal_end = tl.where(tl.max(tl.load(slot_ptr + own_blocks), 0) >= 0, diagonal_end, 0)
    for column in range(query_low * BLOCK, diagonal_end, TILE_N):
        columns = column + offsets
        block = columns // BLOCK
        present = columns < diagonal_end
        rows, in_slot = key_rows(columns, tl.where(present, block, query_low), slot_ptr, BLOCK, KEY_SLOT)
        present = present & in_slot
        keep = (positions[:, None] >= columns[None, :]) & present[None, :]
        if SHARED or TOKENS:
            seen = attended(row_block[:, None], block[None, :], ranges_ptr, head, N_RANGES)
            if TOKENS:
                window, sink = load_tokens(tokens_ptr, head)
                seen = seen | (positions[:, None] - columns[None, :] < window) | (columns < sink)[None, :]
            keep = keep & seen
        accumulator, row_sum, row_base = visit(
            accumulator, row_sum, row_base, query, grad_out, key_ptr, value_ptr,
            stride_ks, stride_kd, stride_vs, stride_vd, rows, present, keep, scale_log2,
            HEAD_DIM, BLOCK_D, MASK=True, IEEE=IEEE, FORWARD=FORWARD)
    if TOKENS:
        window, sink = load_tokens(tokens_ptr, head)
        for part in tl.static_range(2):
            if part == 0:  # 4. the window's edge
                low = tl.maximum(query_low - window // BLOCK - 1, 0) * BLOCK
                high = tl.where(window > 0, tl.minimum(query_high - window // BLOCK + 1, query_low) * BLOCK, 0)
            else:  # 5. the sink
                low = query_low * 0
                high = tl.minimum(sink, query_low * BLOCK)
            for column in range(low, high, TILE_N):
                columns = column + offsets
                block = columns // BLOCK
                present = columns < high
                rows, in_slot = key_rows(columns, tl.where(present, block, low // BLOCK), slot_ptr, BLOCK, KEY_SLOT)
                present = present & in_slot
                if tl.max(present.to(tl.int32), 0) > 0:
                    in_window = positions[:, None] - columns[None, :] < window
                    keep = (in_window == (part == 0)) & present[None, :]
                    keep = keep & (attended(row_block[:, None], block[None, :], ranges_ptr, head, N_RANGES) == 0)
                    accumulator, row_sum, row_base = visit(
                        accumulator, row_sum, row_base, query, grad_out, key_ptr, value_ptr,
                        stride_ks, stride_kd, stride_vs, stride_vd, rows, present, keep, scale_log2,
                        HEAD_DIM, BLOCK_D, MASK=True, IEEE=IEEE, FORWARD=FORWARD)
    for index in tl.static_range(N_RANGES):
        start, end, stride, offset = load_range(ranges_ptr, head, index, N_RANGES)
        # 2. the edge of this range
        if SHARED:
            first, count = members(tl.maximum(query_low - end + 1, 0), tl.minimum(query_high - end, query_low - 1), stride, offset)
            next_start, next_end, next_stride, next_offset = load_range(ranges_ptr, head, tl.minimum(index + 1, N_RANGES - 1), N_RANGES)
            next_stride = tl.where((index + 1 < N_RANGES) & (next_end > next_start), next_stride, 0)
            for step in range(0, count * PARTS, PER_STEP):
                entry = step // PARTS + offsets // BLOCK
                block = first + tl.minimum(entry, count - 1) * stride
                # members of the next range belong to it for every row of the tile (kind 3)
                never = tl.where(next_stride == 0, -1, 0)
                wanted = (entry < count) & ((block + next_offset) % tl.maximum(next_stride, 1) != never)
                columns = block * BLOCK + (step % PARTS) * TILE_N + offsets % BLOCK
                rows, in_slot = key_rows(columns, block, slot_ptr, BLOCK, KEY_SLOT)
                wanted = wanted & in_slot
                if tl.max(wanted.to(tl.int32), 0) > 0:
                    keep = (row_block[:, None] - block[None, :] < end) & wanted[None, :]
                    accumulator, row_sum, row_base = visit(
                        accumulator, row_sum, row_base, query, grad_out, key_ptr, value_ptr,
                        stride_ks, stride_kd, stride_vs, stride_vd, rows, wanted, keep, scale_log2,
                        HEAD_DIM, BLOCK_D, MASK=True, IEEE=IEEE, FORWARD=FORWARD)
        # 3. what every row attends
        if TABLE:
            first = 0
            stride = 1
            count = list_count
        else:
            first, count = members(tl.maximum(query_high - end + 1, 0), tl.minimum(query_high - start, query_low - 1), stride, offset)
        if KEY_SLOT and not RUNS:
            for step in range(0, count * PARTS, PER_STEP):
                entry = step // PARTS + offsets // BLOCK
                wanted = entry < count
                entry = tl.minimum(entry, count - 1)
                block = first + entry * stride
                if TABLE:
                    block = tl.load(key_blocks_ptr + list_start + entry)
                columns = block * BLOCK + (step % PARTS) * TILE_N + offsets % BLOCK
                rows, in_slot = key_rows(columns, block, slot_ptr, BLOCK, KEY_SLOT)
                wanted = wanted & in_slot
                if tl.max(wanted.to(tl.int32), 0) > 0:
                    keep = (positions[:, None] >= 0) & wanted[None, :]
                    accumulator, row_sum, row_base = visit(
                        accumulator, row_sum, row_base, query, grad_out, key_ptr, value_ptr,
                        stride_ks, stride_kd, stride_vs, stride_vd, rows, wanted, keep, scale_log2,
                        HEAD_DIM, BLOCK_D, MASK=True, IEEE=IEEE, FORWARD=FORWARD)
        else:
            if TABLE:
                list_ptr = key_blocks_ptr + list_start
            if RUNS:  # the present ones of the run's candidates
                candidate = tl.where(count > 0, (first + offset) // stride - tl.where(offset > 0, 1, 0), 0)
                entry_index = run_index_ptr + (head * N_RANGES + index) * 2
                prefix_ptr = run_prefix_ptr + tl.load(entry_index) + candidate
                skipped = tl.load(prefix_ptr)
                list_ptr = run_slots_ptr + tl.load(entry_index + 1) + skipped
                count = tl.load(prefix_ptr + count) - skipped
            full = count * PARTS // PER_STEP
            for step in tl.range(0, full, num_stages=STAGES):
                entry = step * PER_STEP // PARTS
                if PER_STEP > 1:
                    entry += offsets // BLOCK
                if TABLE or RUNS:
                    block = tl.load(list_ptr + entry)
                else:
                    block = first + entry * stride
                if PER_STEP > 1:
                    base = tl.full([], 0, tl.int64)
                    rows = block.to(tl.int64) * BLOCK + offsets % BLOCK
                else:
                    base = block.to(tl.int64) * BLOCK + (step % PARTS) * TILE_N
                    rows = offsets
                accumulator, row_sum, row_base = visit(
                    accumulator, row_sum, row_base, query, grad_out,
                    key_ptr + base * stride_ks, value_ptr + base * stride_vs,
                    stride_ks, stride_kd, stride_vs, stride_vd, rows, rows >= 0, rows[None, :] >= 0, scale_log2,
                    HEAD_DIM, BLOCK_D, MASK=False, IEEE=IEEE, FORWARD=FORWARD)
            if PER_STEP > 1:
                if full * PER_STEP < count:
                    entry = full * PER_STEP + offsets // BLOCK
                    wanted = entry < count
                    entry = tl.minimum(entry, count - 1)
                    block = first + entry * stride
                    if TABLE or RUNS:
                        block = tl.load(list_ptr + entry)
                    rows = block.to(tl.int64) * BLOCK + offsets % BLOCK
                    keep = (positions[:, None] >= 0) & wanted[None, :]
                    accumulator, row_sum, row_base = visit(
                        accumulator, row_sum, row_base, query, grad_out, key_ptr, value_ptr,
                        stride_ks, stride_kd, stride_vs, stride_vd, rows, wanted, keep, scale_log2,
                        HEAD_DIM, BLOCK_D, MASK=True, IEEE=IEEE, FORWARD=FORWARD)
    return accumulator, row_sum, row_base
