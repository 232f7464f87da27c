"""dQ from the fp32 buffer that the one-pass Hopper backward adds it up in."""
import triton
import triton.language as tl


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
