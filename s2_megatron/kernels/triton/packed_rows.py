"""Where packed documents lie: the table of their tiles, and zeros in the rows between them."""
import triton
import triton.language as tl


@triton.jit
def last_not_beyond(wanted, starts_ptr, n_docs, per_document, TILE: tl.constexpr):
    """Per element of `wanted`: the last document i with starts[i] // TILE + i * per_document <= wanted, the first one
    if there is none."""
    low = tl.zeros_like(wanted)
    high = low + n_docs
    remaining = n_docs
    while remaining > 1:
        middle = (low + high) // 2
        before = tl.load(starts_ptr + middle) // TILE + middle * per_document <= wanted
        search = high - low > 1
        low = tl.where(search & before, middle, low)
        high = tl.where(search & (before == 0), middle, high)
        remaining = (remaining + 1) // 2
    return low


@triton.jit(do_not_specialize=["n_docs", "n_tiles", "per_document"])
def s2_document_tiles_kernel(starts_ptr, lengths_ptr, tiles_ptr, n_docs, n_tiles, per_document, TILE: tl.constexpr, TILES: tl.constexpr):
    """tiles[n] = (first token, tokens, number within the document, unused) of tile n. Document i owns the numbers from
    starts[i] // TILE + i * per_document on, room for ceil(tokens / TILE) + per_document - 1; numbers without a document
    get 0 tokens."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    document = last_not_beyond(tile, starts_ptr, n_docs, per_document, TILE)
    start = tl.load(starts_ptr + document)
    length = tl.load(lengths_ptr + document + 1) - tl.load(lengths_ptr + document)
    number = tile - (start // TILE + document * per_document)
    length = tl.where(number >= 0, length, 0)
    entry = tiles_ptr + tile * 4
    inside = tile < n_tiles
    tl.store(entry, start, mask=inside)
    tl.store(entry + 1, length, mask=inside)
    tl.store(entry + 2, tl.maximum(number, 0), mask=inside)


@triton.jit
def outside_of_documents(row, starts_ptr, lengths_ptr, n_docs, n_rows):
    document = last_not_beyond(row, starts_ptr, n_docs, 0, 1)
    start = tl.load(starts_ptr + document)
    length = tl.load(lengths_ptr + document + 1) - tl.load(lengths_ptr + document)
    return ((row < start) | (row >= start + length)) & (row < n_rows)


@triton.jit(do_not_specialize=["n_docs", "n_rows", "n_heads"])
def s2_fill_between_kernel(out_ptr, starts_ptr, lengths_ptr, value, n_docs, n_rows, n_heads, stride_head, stride_row, stride_dim,
                           HEADS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """`value` in the rows of [heads, rows, DIM] that belong to no document. A program per ROWS rows and HEADS heads,
    which looks at all of its rows first: most often every one is in a document, and it is done. STEP: rows that are
    written together."""
    first = tl.program_id(0) * ROWS
    if tl.max(outside_of_documents(first + tl.arange(0, ROWS), starts_ptr, lengths_ptr, n_docs, n_rows).to(tl.int32), 0) > 0:
        head = tl.program_id(1) * HEADS
        dims = tl.arange(0, BLOCK_D)
        values = tl.full([STEP, BLOCK_D], value, tl.float32).to(out_ptr.dtype.element_ty)
        for start in range(first, tl.minimum(first + ROWS, n_rows), STEP):
            row = start + tl.arange(0, STEP)
            between = outside_of_documents(row, starts_ptr, lengths_ptr, n_docs, n_rows)
            if tl.max(between.to(tl.int32), 0) > 0:
                keep = between[:, None] & (dims < DIM)[None, :]
                pointers = out_ptr + head.to(tl.int64) * stride_head + row.to(tl.int64)[:, None] * stride_row + dims[None, :] * stride_dim
                for _ in range(head, tl.minimum(head + HEADS, n_heads)):
                    tl.store(pointers, values, mask=keep)
                    pointers += stride_head
