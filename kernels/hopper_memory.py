"""What the two Hopper kernels with a program per query tile share: buffers, barriers, loads of key tiles."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from s2_megatron.kernels.hopper_schedule import BLOCK


@gluon.jit
def load_pair(desc, batch, head, row_a, row_b, tiles, stage, barrier, BLOCK_D: gl.constexpr):
    """Two blocks of 64 rows into one [128, BLOCK_D] stage, which lies in memory as chunks of 64 columns with the two blocks in each."""
    CHUNKS: gl.constexpr = BLOCK_D // 64
    for chunk in gl.static_range(CHUNKS):
        tma.async_copy_global_to_shared(desc, [batch, head, row_a, chunk * 64], barrier, tiles.index((stage * CHUNKS + chunk) * 2))
        tma.async_copy_global_to_shared(desc, [batch, head, row_b, chunk * 64], barrier, tiles.index((stage * CHUNKS + chunk) * 2 + 1))


@gluon.jit
def clear_rows(buffer, low, high, ROWS: gl.constexpr):
    """Zeros in the rows low .. high - 1 of a [ROWS, D] buffer, by one warpgroup: behind a document there may be NaN, and 0 * NaN is NaN."""
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy))
    held = buffer.load(copy)
    buffer.store(gl.where(((row < low) | (row >= high))[:, None], held, gl.zeros_like(held)))
    fence_async_shared()
    gl.thread_barrier()


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
def tile_memory(dtype: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr):
    """(four buffers for halves of query tiles, key stages, value stages, plans, barriers); TILES: how many tiles the first ones hold."""
    matrix: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    halves = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK_D], matrix)
    keys = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_D], matrix)
    values = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_D], matrix)
    plan = gl.allocate_shared_memory(gl.int32, [TILES * 8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for tile in gl.static_range(TILES):
        mbarrier.init(q_full.index(tile), count=2)  # the copy engine's bytes, the plan
        mbarrier.init(q_empty.index(tile), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    return halves, keys, values, plan, (q_full, q_empty, k_full, k_empty, v_full, v_empty)
