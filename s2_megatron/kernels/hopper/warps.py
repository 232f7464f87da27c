"""The warps of each partition of a Hopper kernel, and the registers that a thread of it gets.

The first partition is a warpgroup too, and gets what the others leave. Registers are given out by warpgroups, so the
loading warp counts as one: (240 + 240 + 24) * 128 threads = 64,512 of a multiprocessor's 65,536 registers; with the
warpgroup of dQ (208 + 208 + 72 + 24) * 128 = 65,536.
"""
from triton.experimental.gluon import language as gl

COMPUTE_WARPS = gl.constexpr(4)  # a warpgroup, whose four warps make a product together
LOAD_WARPS = gl.constexpr(1)

COMPUTE_REGISTERS = gl.constexpr(240)
LOAD_REGISTERS = gl.constexpr(24)  # the least there is

# The backward with dQ in the same pass: a third warpgroup, which holds 64 x 64 of dQ alone.
COMPUTE_REGISTERS_BESIDE_DQ = gl.constexpr(208)
DQ_REGISTERS = gl.constexpr(72)
