"""What the Hopper kernels share: buffers, loads of key tiles, rows of global memory, and what the loading warp sends to
the others."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from s2_megatron.kernels.hopper.gluon_versions import aggregate, reinterpret, thread_barrier, tma_load
from s2_megatron.kernels.hopper.pipeline import Pipeline, make_pipeline
from s2_megatron.kernels.hopper.schedule import BLOCK
from s2_megatron.kernels.hopper.work_tiles import NUMBERS


@aggregate
class HeadRows:
    """A tensor [batch, heads, rows, D] in global memory, contiguous in D."""

    ptr: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_s: gl.tensor

    @gluon.jit
    def head(self, batch, head):
        """Where the rows of a head begin."""
        return self.ptr + batch.to(gl.int64) * self.stride_b + head.to(gl.int64) * self.stride_h


@aggregate
class Result:
    """A tensor that a kernel writes, through TMA or, BY_ROWS, with stores: it is of another type than the queries, or
    TMA cannot address it."""

    desc: gl.base_value
    rows: HeadRows
    HEAD_DIM: gl.constexpr
    BY_ROWS: gl.constexpr


@gluon.jit
def load_pair(desc, batch, head, first_row, second_row, tiles, stage, barrier, BLOCK_D: gl.constexpr):
    """Two blocks of 64 rows into one [128, BLOCK_D] stage, which lies in memory as chunks of 64 columns with the two
    blocks in each."""
    CHUNKS: gl.constexpr = BLOCK_D // 64
    for chunk in gl.static_range(CHUNKS):
        tma_load(desc, [batch, head, first_row, chunk * 64], barrier, tiles.index((stage * CHUNKS + chunk) * 2))
        tma_load(desc, [batch, head, second_row, chunk * 64], barrier, tiles.index((stage * CHUNKS + chunk) * 2 + 1))


@gluon.jit
def load_block(desc, more_desc, own_rows, batch, head, row, tiles, first, barrier, CHUNKS: gl.constexpr):
    """One block of 64 rows, which lies in the second tensor if it is not one of own_rows, into every other of the boxes
    from `first` on."""
    if row < own_rows:
        for chunk in gl.static_range(CHUNKS):
            tma_load(desc, [batch, head, row, chunk * 64], barrier, tiles.index(first + chunk * 2))
    else:
        for chunk in gl.static_range(CHUNKS):
            tma_load(more_desc, [batch, 0, row - own_rows, chunk * 64], barrier, tiles.index(first + chunk * 2))


@gluon.jit
def clear_rows(buffer, low, high, ROWS: gl.constexpr):
    """Zeros in the rows low .. high - 1 of a [ROWS, D] buffer, by one warpgroup: behind a document there may be NaN,
    and 0 * NaN is NaN. low may be negative: a block may lie wholly behind it. high: a multiple of 8. A loop over pieces
    of 8 rows and 64 columns, as they lie in memory: it seldom runs, and long code in its place slows what runs
    always."""
    piece: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    copy: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    CHUNKS: gl.constexpr = buffer.shape[1] // 64
    pieces = reinterpret(buffer, buffer.dtype, [CHUNKS * ROWS // 8, 8, 64], piece)
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, copy))
    for first in range(gl.maximum(low, 0) // 8 * 8, high, 8):
        for chunk in range(CHUNKS):
            place = pieces.index((chunk * ROWS + first) // 8)
            held = place.load(copy)
            place.store(gl.where((first + row < low)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def clear_behind(buffers, pipeline, count, tile, PACK: gl.constexpr):
    """Zeros in the keys or values of a tile's step 0 that lie behind its document, where that ends in it."""
    if (tile.low + 2 - PACK) * BLOCK > tile.length:
        pipeline.wait_full(count)
        beside = (tile.marks & 2) != 0 if PACK else False  # a block of its own in the second half
        clear_rows(buffers.index(pipeline.stage(count)), tile.length - tile.low * BLOCK, gl.where(beside, BLOCK, 128), 128)


@gluon.jit
def known_lse(lse, LISTED: gl.constexpr):
    """LSE with +inf in rows without a key, which lists may have: every probability of such a row is 0."""
    if LISTED:
        lse = gl.where(lse == float("-inf"), float("inf"), lse)
    return lse


@gluon.jit
def load_rows(pointer, row, stride_row, last_row, layout: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr):
    """fp32 [64, BLOCK_D]: rows row .. row + 63 at pointer as far as they lie before last_row, zeros elsewhere."""
    rows = row + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    inside = (rows < last_row)[:, None] & (dim < HEAD_DIM)[None, :]
    return gl.load(pointer + rows.to(gl.int64)[:, None] * stride_row + dim[None, :], mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def store_rows(pointer, values, row, stride_row, last_row, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr):
    """Values [64, BLOCK_D] into rows row .. row + 63 at pointer, as far as they lie before last_row; not through
    TMA."""
    layout: gl.constexpr = values.type.layout
    rows = row + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    gl.store(pointer + rows.to(gl.int64)[:, None] * stride_row + dim[None, :], values.to(pointer.dtype.element_ty),
             mask=(rows < last_row)[:, None] & (dim < HEAD_DIM)[None, :])


@aggregate
class Returned:
    """Gradients of key blocks that came back in slots (context parallelism): those of block b of KV head g are the
    slots that the entries from starts[b * kv_heads + g] on name."""

    slots_ptr: gl.tensor  # [slots, 64, 2 (K, V), batches, HEAD_DIM]
    starts_ptr: gl.tensor
    entries_ptr: gl.tensor
    batches: gl.tensor
    kv_heads: gl.tensor


@gluon.jit
def add_returned(values, returned, batch, kv_head, block, PART: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr):
    """fp32 [64, BLOCK_D] of dK (PART 0) or dV (1) of a block, and what was returned for it, one slot after the
    other."""
    batches = returned.batches
    layout: gl.constexpr = values.type.layout
    place = block * returned.kv_heads + kv_head
    for entry in range(gl.load(returned.starts_ptr + place), gl.load(returned.starts_ptr + place + 1)):
        slot = gl.load(returned.entries_ptr + entry)
        values += load_rows(returned.slots_ptr + (PART * batches + batch) * HEAD_DIM, slot * BLOCK, 2 * batches * HEAD_DIM, (slot + 1) * BLOCK,
                            layout, HEAD_DIM, BLOCK_D)
    return values


@aggregate
class QueryTileMemory:
    """Shared memory of a kernel with a program per query tile."""

    halves: gl.shared_memory_descriptor  # [halves of query tiles, 64, BLOCK_D]
    k_buffers: gl.shared_memory_descriptor  # [stages, rows, BLOCK_D]
    v_buffers: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor  # of the work tiles
    steps: gl.shared_memory_descriptor  # LISTED: the descriptor of the step in each stage of keys
    tiles: Pipeline
    keys: Pipeline
    values: Pipeline


@gluon.jit
def query_tile_memory(dtype: gl.constexpr, BLOCK_D: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr, K_STAGES: gl.constexpr,
                      V_STAGES: gl.constexpr, ROWS: gl.constexpr, LISTED: gl.constexpr):
    """TILES: how many tiles the HALVES hold, of queries or of queries and gradients. ROWS: keys of a stage. LISTED:
    every stage of keys comes with a step descriptor."""
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    halves = gl.allocate_shared_memory(dtype, [HALVES, BLOCK, BLOCK_D], matrix)
    k_buffers = gl.allocate_shared_memory(dtype, [K_STAGES, ROWS, BLOCK_D], matrix)
    v_buffers = gl.allocate_shared_memory(dtype, [V_STAGES, ROWS, BLOCK_D], matrix)
    numbers = gl.allocate_shared_memory(gl.int32, [TILES * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    steps = gl.allocate_shared_memory(gl.int32, [K_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = make_pipeline(STAGES=TILES, FILLS=2, READERS=2)  # filled by TMA and by the numbers
    keys = make_pipeline(STAGES=K_STAGES, FILLS=2 if LISTED else 1, READERS=2)
    values = make_pipeline(STAGES=V_STAGES, FILLS=1, READERS=2)
    fence_async_shared()
    return QueryTileMemory(
        halves=halves, k_buffers=k_buffers, v_buffers=v_buffers, numbers=numbers, steps=steps, tiles=tiles, keys=keys,
        values=values)
