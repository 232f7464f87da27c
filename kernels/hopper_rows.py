"""Small kernels around the Hopper kernels: the table of tiles of packed documents, and dQ from its fp32 buffer."""
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_docs", "n_tiles", "per_document"])
def s2_document_tiles_kernel(starts_ptr, lengths_ptr, tiles_ptr, n_docs, n_tiles, per_document, TILE: tl.constexpr, TILES: tl.constexpr):
    """tiles[n] = (first token, tokens, number within the document, unused) of tile n. Document i owns the numbers from
    starts[i] // TILE + i * per_document on, room for ceil(tokens / TILE) + per_document - 1; numbers without a document get 0 tokens."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    low = tl.zeros([TILES], tl.int32)
    high = low + n_docs
    remaining = n_docs
    while remaining > 1:
        middle = (low + high) // 2
        before = tl.load(starts_ptr + middle) // TILE + middle * per_document <= tile
        search = high - low > 1
        low = tl.where(search & before, middle, low)
        high = tl.where(search & (before == 0), middle, high)
        remaining = (remaining + 1) // 2
    start = tl.load(starts_ptr + low)
    length = tl.load(lengths_ptr + low + 1) - tl.load(lengths_ptr + low)
    number = tile - (start // TILE + low * per_document)
    length = tl.where(number >= 0, length, 0)
    entry = tiles_ptr + tile * 4
    inside = tile < n_tiles
    tl.store(entry, start, mask=inside)
    tl.store(entry + 1, length, mask=inside)
    tl.store(entry + 2, tl.maximum(number, 0), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def s2_scale_kernel(source_ptr, out_ptr, scale, n_rows, n_heads, stride_ob, stride_oh, stride_os,
                    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[b, h, r, :] = scale * source[b, h, r, :], source contiguous fp32."""
    row_tiles = tl.cdiv(n_rows, ROWS)
    rows = (tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    batch_head = (tl.program_id(0) // row_tiles).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    keep = (rows < n_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    values = tl.load(source_ptr + (batch_head * n_rows + rows)[:, None] * HEAD_DIM + dims[None, :], mask=keep, other=0.0)
    out_ptr += batch_head // n_heads * stride_ob + batch_head % n_heads * stride_oh
    tl.store(out_ptr + rows[:, None] * stride_os + dims[None, :], (values * scale).to(out_ptr.dtype.element_ty), mask=keep)
