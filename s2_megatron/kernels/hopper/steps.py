"""Reading step descriptors in the Hopper kernels: kernels/step_descriptor.py says what their bits are."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from s2_megatron.kernels import step_descriptor

ATTENDED = gl.constexpr(step_descriptor.ATTENDED)
OWN = gl.constexpr(step_descriptor.OWN)
EDGE = gl.constexpr(step_descriptor.EDGE)
SINK = gl.constexpr(step_descriptor.SINK)
NEAR = gl.constexpr(step_descriptor.NEAR)
FAR = gl.constexpr(step_descriptor.FAR)
OWN_EDGE = gl.constexpr(step_descriptor.OWN_EDGE)
HALF_FLAGS = gl.constexpr(step_descriptor.HALF_FLAGS)
SINK_SLOT = gl.constexpr(step_descriptor.SINK_SLOT)
BOTH_HALVES = gl.constexpr(step_descriptor.BOTH_HALVES)
FLAG_BITS = gl.constexpr(step_descriptor.FLAG_BITS)
FLAG_MASK = gl.constexpr(step_descriptor.FLAG_MASK)
SLOT_BITS = gl.constexpr(step_descriptor.SLOT_BITS)
SLOT_MASK = gl.constexpr(step_descriptor.SLOT_MASK)
LAST_STEP = gl.constexpr(step_descriptor.LAST_STEP)
ROW_SHIFT = gl.constexpr(step_descriptor.ROW_SHIFT)
ROW_MASK = gl.constexpr(step_descriptor.ROW_MASK)
MEMBER_SHIFT = gl.constexpr(step_descriptor.MEMBER_SHIFT)


@gluon.jit
def attends(step, HALF: gl.constexpr):
    """Whether half HALF of the tile and the step's first block, or its only one, attend."""
    return (step & (HALF_FLAGS << HALF)) != 0


@gluon.jit
def attends_second(step, HALF: gl.constexpr):
    """The same of the second key block of a query tile's step."""
    return (step & (HALF_FLAGS << (FLAG_BITS + HALF))) != 0


@gluon.jit
def masked_flags_of(step, HALF: gl.constexpr, TOKENS: gl.constexpr):
    """Not 0 where a half does not attend all of the step's first block, or its only one."""
    if TOKENS:
        flags = (step >> HALF) & HALF_FLAGS
        masked = gl.where(flags == ATTENDED, 0, flags)
    else:
        masked = step & (OWN << HALF)
    return masked


@gluon.jit
def is_own(step, HALF: gl.constexpr, TOKENS: gl.constexpr):
    """Whether the step's first block, or its only one, is the half's own."""
    FLAGS: gl.constexpr = ATTENDED + OWN if TOKENS else OWN
    return (step & (FLAGS << HALF)) == (FLAGS << HALF)


@gluon.jit
def goes_on(step):
    """Not 0 unless a key tile's step is its last one."""
    return (step & LAST_STEP) ^ LAST_STEP


@gluon.jit
def row_block_of(step):
    """Of a key tile's step, the query row block."""
    return (step >> ROW_SHIFT) & ROW_MASK


@gluon.jit
def member_of(step):
    """Of a key tile's step, the query head within its group."""
    return step >> MEMBER_SHIFT
