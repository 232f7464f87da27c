"""What the loading warp of a Hopper kernel says to the computing warpgroups: a few numbers of each work tile, and a
descriptor of each step.

They travel through shared memory; the loading warp arrives at the barrier of the tile or stage after it has stored
them.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from s2_megatron.kernels.hopper.gluon_versions import aggregate

NUMBERS = gl.constexpr(8)  # of a tile; a key tile has one more with TOKENS


@aggregate
class QueryTile:
    """The work tile of a kernel with a program per query tile."""

    batch: gl.tensor
    head: gl.tensor  # the first of two, PACK
    token: gl.tensor  # the first one of the sequence
    length: gl.tensor  # of the sequence
    low: gl.tensor  # the first query block
    masked_steps: gl.tensor
    free_steps: gl.tensor  # -1: there are no more tiles
    marks: gl.tensor  # see schedule.py; TOKENS: bit 1 as there, from bit 2 on TokenRule.rests

    @gluon.jit
    def send(self, numbers, slot):
        values = (self.batch, self.head, self.token, self.length, self.low, self.masked_steps, self.free_steps, self.marks)
        _send(numbers, slot, values, NUMBERS)


@aggregate
class KeyTile:
    """The work tile of the kernels of dK and dV."""

    batch: gl.tensor
    kv_head: gl.tensor
    token: gl.tensor  # the first one of the sequence
    length: gl.tensor  # of the sequence
    first: gl.tensor  # key block or slot
    second: gl.tensor
    # Rows of the keys: a block that begins behind them does not exist; -1: there are no more tiles.
    key_length: gl.tensor
    link: gl.tensor  # SPLIT: see parts.py
    rests: gl.tensor  # TOKENS: 6 bits each of the window, and of the sink in the first and in the second block

    @gluon.jit
    def send(self, numbers, slot, TOKENS: gl.constexpr):
        values = (self.batch, self.kv_head, self.token, self.length, self.first, self.second, self.key_length, self.link, self.rests)
        _send(numbers, slot, values, NUMBERS + 1 if TOKENS else NUMBERS)


@gluon.jit
def _send(numbers, slot, values, COUNT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for index in gl.static_range(COUNT):
        numbers.index(slot * COUNT + index).store(gl.full([1], values[index], gl.int32, layout))


@gluon.jit
def _receive(numbers, slot, COUNT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    values = ()
    for index in gl.static_range(COUNT):
        values = values + (gl.sum(numbers.index(slot * COUNT + index).load(layout), axis=0),)
    return values


@gluon.jit
def receive_query_tile(numbers, slot):
    """What was sent, in every thread of a warpgroup."""
    values = _receive(numbers, slot, NUMBERS)
    return QueryTile(values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7])


@gluon.jit
def receive_key_tile(numbers, slot, TOKENS: gl.constexpr):
    """What was sent, in every thread of a warpgroup. rests are those of TOKENS alone."""
    values = _receive(numbers, slot, NUMBERS + 1 if TOKENS else NUMBERS)
    if not TOKENS:
        values = values + (values[0],)
    return KeyTile(values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7], values[8])


@gluon.jit
def send_step(steps, stage, step):
    """The descriptor of a step: see steps.py."""
    steps.index(stage).store(gl.full([1], step, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def receive_step(steps, stage):
    """What was sent, in every thread of a warpgroup."""
    return gl.sum(steps.index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
