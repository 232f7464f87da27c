"""The table of ranges in the Hopper kernels, and the arithmetic on it."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def quotient(number, divisor):
    """number // divisor for 0 <= number < 2**21, by a floating-point division that is exact there and several times as
    fast. Any number will do where the result is thrown away."""
    return ((number.to(gl.float32) + 0.5) / divisor.to(gl.float32)).to(gl.int32)


@gluon.jit
def divides(divisor, number):
    """Whether number, 0 or more, is a multiple of divisor."""
    return quotient(number, divisor) * divisor == number


@gluon.jit
def load_range(ranges_ptr, head, index: gl.constexpr, N_RANGES: gl.constexpr):
    """(first distance, distance limit, stride, offset) of one range of a head, in blocks."""
    entry = ranges_ptr + (head * N_RANGES + index) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
