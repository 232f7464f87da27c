"""What the Hopper kernels share: buffers, barriers, loads of key tiles, and the numbers that the loading warp sends to the others."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from s2_megatron.kernels.hopper.gluon_versions import reinterpret, thread_barrier, tma_load
from s2_megatron.kernels.hopper.schedule import BLOCK


@gluon.jit
def load_pair(desc, batch, head, row_a, row_b, tiles, stage, barrier, BLOCK_D: gl.constexpr):
    """Two blocks of 64 rows into one [128, BLOCK_D] stage, which lies in memory as chunks of 64 columns with the two blocks in each."""
    CHUNKS: gl.constexpr = BLOCK_D // 64
    for chunk in gl.static_range(CHUNKS):
        tma_load(desc, [batch, head, row_a, chunk * 64], barrier, tiles.index((stage * CHUNKS + chunk) * 2))
        tma_load(desc, [batch, head, row_b, chunk * 64], barrier, tiles.index((stage * CHUNKS + chunk) * 2 + 1))


@gluon.jit
def load_block(desc, more_desc, own_rows, batch, head, row, tiles, first, barrier, CHUNKS: gl.constexpr):
    """One block of 64 rows, which lies in the second tensor if it is not one of own_rows, into every other of the boxes from `first` on."""
    if row < own_rows:
        for chunk in gl.static_range(CHUNKS):
            tma_load(desc, [batch, head, row, chunk * 64], barrier, tiles.index(first + chunk * 2))
    else:
        for chunk in gl.static_range(CHUNKS):
            tma_load(more_desc, [batch, 0, row - own_rows, chunk * 64], barrier, tiles.index(first + chunk * 2))


@gluon.jit
def clear_rows(buffer, low, high, ROWS: gl.constexpr):
    """Zeros in the rows low .. high - 1 of a [ROWS, D] buffer, by one warpgroup: behind a document there may be NaN, and 0 * NaN is NaN.
    low may be negative: a block may lie wholly behind it. high: a multiple of 8. A loop over pieces of 8 rows and 64 columns, as they lie in
    memory: it seldom runs, and long code in its place slows what runs always."""
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
def clear_behind(buffers, full, count, low, length, marks, PACK: gl.constexpr, STAGES: gl.constexpr):
    """Zeros in the keys or values of a tile's step 0 that lie behind its document, where that ends in it."""
    if (low + 2 - PACK) * BLOCK > length:
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        beside = (marks & 2) != 0 if PACK else False  # a block of its own in the second half
        clear_rows(buffers.index(stage), length - low * BLOCK, gl.where(beside, BLOCK, 128), 128)


@gluon.jit
def send_plan(plan, slot, batch, head, token, length, low, masked_steps, free_steps, marks):
    """What the computing warpgroups have to know of a tile; free_steps is -1 when there are no more."""
    values = (batch, head, token, length, low, masked_steps, free_steps, marks)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for index in gl.static_range(8):
        plan.index(slot * 8 + index).store(gl.full([1], values[index], gl.int32, layout))


@gluon.jit
def receive_plan(plan, slot):
    """What send_plan was given."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    values = ()
    for index in gl.static_range(8):
        values = values + (gl.sum(plan.index(slot * 8 + index).load(layout), axis=0),)
    return values


@gluon.jit
def send_word(words, stage, word):
    """One number of a step, from the loading warp. Its arrival at the stage's barrier has to follow."""
    words.index(stage).store(gl.full([1], word, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def receive_word(words, stage):
    """What send_word was given, in every thread of a warpgroup."""
    return gl.sum(words.index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


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
    """Values [64, BLOCK_D] into rows row .. row + 63 at pointer, as far as they lie before last_row; not through TMA."""
    layout: gl.constexpr = values.type.layout
    rows = row + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    gl.store(pointer + rows.to(gl.int64)[:, None] * stride_row + dim[None, :], values.to(pointer.dtype.element_ty),
             mask=(rows < last_row)[:, None] & (dim < HEAD_DIM)[None, :])


@gluon.jit
def add_returned(values, returned, batch, kv_head, block, PART: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr):
    """fp32 [64, BLOCK_D] of dK (PART 0) or dV (1) of a block, and what came for it in slots, one after the other (context parallelism)."""
    slots_ptr, starts_ptr, entries_ptr, batches, kv_heads = returned
    layout: gl.constexpr = values.type.layout
    place = block * kv_heads + kv_head
    for entry in range(gl.load(starts_ptr + place), gl.load(starts_ptr + place + 1)):
        slot = gl.load(entries_ptr + entry)
        values += load_rows(slots_ptr + (PART * batches + batch) * HEAD_DIM, slot * BLOCK, 2 * batches * HEAD_DIM, (slot + 1) * BLOCK, layout,
                            HEAD_DIM, BLOCK_D)
    return values


@gluon.jit
def tile_memory(dtype: gl.constexpr, BLOCK_D: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr, K_STAGES: gl.constexpr,
                V_STAGES: gl.constexpr, ROWS: gl.constexpr, LISTED: gl.constexpr):
    """(buffers for halves of query tiles, key stages, value stages, plans, words of steps, barriers); TILES: how many tiles the first ones
    hold. ROWS: keys of a stage. LISTED: every stage of keys comes with a word."""
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    halves = gl.allocate_shared_memory(dtype, [HALVES, BLOCK, BLOCK_D], matrix)
    keys = gl.allocate_shared_memory(dtype, [K_STAGES, ROWS, BLOCK_D], matrix)
    values = gl.allocate_shared_memory(dtype, [V_STAGES, ROWS, BLOCK_D], matrix)
    plan = gl.allocate_shared_memory(gl.int32, [TILES * 8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    words = gl.allocate_shared_memory(gl.int32, [K_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], barrier)
    for tile in gl.static_range(TILES):
        mbarrier.init(q_full.index(tile), count=2)  # the copy engine's bytes, the plan; arrivals of asynchronous copies add themselves
        mbarrier.init(q_empty.index(tile), count=2)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(stage), count=2 if LISTED else 1)
        mbarrier.init(k_empty.index(stage), count=2)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    return halves, keys, values, plan, words, (q_full, q_empty, k_full, k_empty, v_full, v_empty)
