"""Reading step descriptors in the Hopper kernels: kernels/step_descriptor.py says what their bits are."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from s2_megatron.kernels import step_descriptor

ATTENDED = gl.constexpr(step_descriptor.ATTENDED)
OWN = gl.constexpr(step_descriptor.OWN)
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
    return (step & (ATTENDED << HALF)) != 0


@gluon.jit
def attends_second(step, HALF: gl.constexpr):
    """The same of the second key block of a query tile's step."""
    return (step & (ATTENDED << (FLAG_BITS + HALF))) != 0


@gluon.jit
def own_flag(step, HALF: gl.constexpr):
    """Not 0 where the step's first block, or its only one, is the half's own, masked by token."""
    return step & (OWN << HALF)


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
