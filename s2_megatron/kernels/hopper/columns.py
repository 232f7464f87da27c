"""Which key tiles the Hopper backward computes, and which query blocks visit them.

A key tile is 128 keys: two key blocks of one KV head with runs of about the same length. In a KV-cache efficient
pattern a block is attended by one run of query blocks, from its own on, as long as the last range that it is a member
of. So the blocks fall into classes by that range; neighbours in a class make a tile: two blocks of the last stride,
which are attended to the end, or two of those between, which only the window sees. MIXED: the query heads of a group
have different classes; then two blocks lie the group's last stride apart, which puts them into the same class of its
last range for every head whose last stride divides it.

fold: a program takes two of a KV head's long columns, the j-th from the sequence's end down and then the j-th last from
its own block up. Both together are of the same length for every j where the last range has no end, so that all programs
of a head meet the same queries at the same time: those come from L2. If each column started when another one ends, with
hundreds of different lengths, they would come from memory again and again.

TOKENS: the columns of the sink, which every query visits, come first (n_sink of a unit at most, 0 for documents, where
they have their places in the classes); in the classes their blocks are left out.

LISTED: block masks, and queries or keys that are placed by blocks, bring their tiles and steps as lists instead
(ops/key_steps.py). Either way each step comes with a descriptor that says who attends what.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from s2_megatron.kernels.hopper.gluon_versions import aggregate
from s2_megatron.kernels.hopper.ranges import divides, load_range, quotient
from s2_megatron.kernels.hopper.schedule import StepLists, head_of_unit
from s2_megatron.kernels.hopper.steps import (
    ATTENDED,
    EDGE,
    FAR,
    LAST_STEP,
    MEMBER_SHIFT,
    NEAR,
    OWN,
    OWN_EDGE,
    ROW_SHIFT,
    SINK_SLOT,
    SLOT_MASK,
)
from s2_megatron.kernels.hopper.tokens import load_rule


@aggregate
class KeySchedule:
    """What the kernels of dK and dV take their tiles, a column of the attention matrix each, from."""

    ranges_ptr: gl.tensor
    order_ptr: gl.tensor
    documents_ptr: gl.tensor
    distance_ptr: gl.tensor  # MIXED: between the two blocks of a tile, by KV head
    counter_ptr: gl.tensor
    lists: StepLists
    tokens_ptr: gl.tensor
    heads: gl.tensor
    rows: gl.tensor
    key_rows: gl.tensor
    n_programs: gl.tensor
    n_long: gl.tensor  # columns of a unit (a KV head of the batch) that go first
    n_rest: gl.tensor
    units: gl.tensor
    batches: gl.tensor
    head_group: gl.tensor
    fold: gl.tensor
    n_split: gl.tensor  # SPLIT, see parts.py
    part_steps: gl.tensor
    n_sink: gl.tensor  # TOKENS: columns of a unit
    sink_parts: gl.tensor  # SPLIT, too: the most parts of one
    N_RANGES: gl.constexpr
    RATIO: gl.constexpr  # query heads of a KV head
    ORDERED: gl.constexpr
    PACKED: gl.constexpr
    MIXED: gl.constexpr
    LISTED: gl.constexpr
    SPLIT: gl.constexpr
    TOKENS: gl.constexpr


@gluon.jit
def others_before(position, factor):
    """How many of 0 .. position - 1 are no multiples of factor."""
    return position - quotient(position + factor - 1, factor)


@gluon.jit
def class_block(rank, first, last_position, stride, factor):
    """The block of one rank among the members (first + t * stride) of a range that are not members of the next one,
    whose stride is `factor` times as wide (0: there is no next range). last_position: (first + offset) / stride."""
    between = rank + others_before(last_position, gl.maximum(factor, 1))
    position = gl.where(factor == 0, last_position + rank, between + quotient(between, gl.maximum(factor - 1, 1)) + 1)
    return first + (position - last_position) * stride


@gluon.jit
def key_pair(column, n_blocks, ranges_ptr, head, N_RANGES: gl.constexpr, TOKENS: gl.constexpr):
    """(first block, second block) of a head's column; the longest class first. A second one of n_blocks or more does
    not exist, nor does a column whose first one is."""
    first_block = n_blocks
    second_block = n_blocks
    passed = 0
    next_stride = 0
    shift = 0  # the head's offset; in the table it is cut down to each stride
    for back in gl.static_range(N_RANGES):
        start, end, stride, offset = load_range(ranges_ptr, head, N_RANGES - 1 - back, N_RANGES)
        used = end > start
        if TOKENS and back == N_RANGES - 1:  # its blocks have queries even where the window shows none of them as a whole
            used = end >= start
        shift = gl.where(used & (next_stride == 0), offset, shift)
        position = quotient(shift + stride - 1, stride)
        first = position * stride - shift
        factor = quotient(next_stride, stride)
        members = gl.where(n_blocks > first, quotient(gl.maximum(n_blocks - first + stride - 1, 0), stride), 0)
        count = gl.where(factor == 0, members, others_before(position + members, gl.maximum(factor, 1)) - others_before(
            position, gl.maximum(factor, 1)))
        count = gl.where(used, count, 0)
        columns = (count + 1) // 2
        rank = 2 * (column - passed)
        here = (rank >= 0) & (rank < count)
        first_block = gl.where(here, class_block(rank, first, position, stride, factor), first_block)
        second_block = gl.where(here & (rank + 1 < count), class_block(rank + 1, first, position, stride, factor), second_block)
        passed += columns
        next_stride = gl.where(used, stride, next_stride)
    return first_block, second_block


@gluon.jit
def long_columns(n_blocks, ranges_ptr, head, N_RANGES: gl.constexpr, TOKENS: gl.constexpr):
    """Columns of a head's last class."""
    columns = 0
    for index in gl.static_range(N_RANGES):
        start, end, stride, offset = load_range(ranges_ptr, head, index, N_RANGES)
        first = gl.where(offset == 0, 0, stride - offset)
        members = gl.where(n_blocks > first, quotient(gl.maximum(n_blocks - first + stride - 1, 0), stride), 0)
        used = end >= start if TOKENS and index == 0 else end > start
        columns = gl.where(used, (members + 1) // 2, columns)
    return columns


@gluon.jit
def column_of_program(index, n_long, n_rest, units, head_group):
    """(column, unit, whether it is one of the long ones) of a program, counted from 0 among the long ones or the rest:
    the long columns of all heads go first, so that the short ones fill the end."""
    is_long = index < n_long * units
    rest = gl.where(is_long, index, index - n_long * units)
    per_group = gl.where(is_long, n_long, n_rest) * head_group
    group = rest // per_group
    rest -= group * per_group
    return rest // head_group, group * head_group + rest % head_group, is_long


@gluon.jit
def sink_columns(schedule):
    """TOKENS: how many programs have the columns of the sink, in a launch without parts."""
    return schedule.n_sink * schedule.units


@gluon.jit
def ordinary_column(index, schedule):
    """column_of_program for a program of a launch without parts, TOKENS: as if the sink had no columns; what it says of
    those is of no use."""
    ordinary = index
    if schedule.TOKENS:
        ordinary = gl.maximum(index - sink_columns(schedule), 0)
    return column_of_program(ordinary, schedule.n_long, schedule.n_rest, schedule.units, schedule.head_group)


@gluon.jit
def pair_beside_sink(first, second, column, at_sink, n_blocks, rule, n_sink):
    """The pair of a column of the sink, or what an ordinary one has beside it."""
    end = gl.where(n_sink > 0, rule.sink_block + gl.where(rule.sink_rest > 0, 1, 0), 0)
    sink_first, sink_second = 2 * column, 2 * column + 1
    other = gl.where(second < end, n_blocks, second)
    other_first = gl.where(first < end, other, first)
    other_second = gl.where(first < end, n_blocks, other)
    sink_first = gl.where(sink_first < end, sink_first, n_blocks)
    sink_second = gl.where(sink_second < end, sink_second, n_blocks)
    return gl.where(at_sink, sink_first, other_first), gl.where(at_sink, sink_second, other_second)


@gluon.jit
def listed_column(index, schedule):
    """(batch, KV head, first slot, second slot, where its steps begin, KeyTile.rests) of a program, from the lists of
    ops/key_steps.py. A slot beyond the keys does not exist, nor does a column whose first one is."""
    lists = schedule.lists
    column, unit, is_long = column_of_program(index, schedule.n_long, schedule.n_rest, schedule.units, schedule.head_group)
    kv_head = unit // schedule.batches
    column += gl.where(is_long, 0, schedule.n_long)
    entry = lists.tiles_ptr + (gl.load(lists.rows_ptr + kv_head) * (schedule.n_long + schedule.n_rest) + column) * 3
    first = gl.load(entry)
    second = gl.load(entry + 1)
    rests = 0
    if schedule.TOKENS:
        rule = load_rule(schedule.tokens_ptr, kv_head * schedule.RATIO)
        rests = rule.rest + (gl.where((first & SINK_SLOT) != 0, rule.sink_rest, 0) << 6)
        rests += gl.where((second & SINK_SLOT) != 0, rule.sink_rest, 0) << 12
        first &= SLOT_MASK
        second &= SLOT_MASK
    return unit - kv_head * schedule.batches, kv_head, first, second, gl.load(entry + 2), rests


@gluon.jit
def key_tile(index, upward, schedule):
    """(batch, KV head, first token of the sequence, its length, first block, second block) of a program. A block of
    n_blocks or more does not exist. fold: a long program has two columns, the second one when `upward`."""
    RATIO: gl.constexpr = schedule.RATIO
    N_RANGES: gl.constexpr = schedule.N_RANGES
    token = 0
    length = schedule.rows
    if schedule.PACKED:
        tile = index // schedule.units
        unit = index - tile * schedule.units
        batch, kv_head = head_of_unit(unit, schedule.batches, schedule.order_ptr, schedule.ORDERED)
        token = gl.load(schedule.documents_ptr + tile * 4)
        length = gl.load(schedule.documents_ptr + tile * 4 + 1)
        column = gl.load(schedule.documents_ptr + tile * 4 + 2)
    else:
        column, unit, is_long = ordinary_column(index, schedule)
        if schedule.TOKENS:
            sinks = sink_columns(schedule)
            unit = gl.where(index < sinks, index // gl.maximum(schedule.n_sink, 1), unit)
        batch, kv_head = head_of_unit(unit, schedule.batches, schedule.order_ptr, schedule.ORDERED)
    n_blocks = (length + 63) // 64
    if schedule.MIXED:
        distance = gl.load(schedule.distance_ptr + kv_head)
        first = column + quotient(column, distance) * distance
        second = first + distance
    else:
        if not schedule.PACKED:
            head_long = long_columns(n_blocks, schedule.ranges_ptr, kv_head * RATIO, N_RANGES, schedule.TOKENS)
            turned = head_long - 1 - column
            beyond = (column >= head_long) | ((schedule.fold != 0) & (column > turned))
            outside = is_long & (beyond | ((upward != 0) & (column == turned)))
            column = gl.where(is_long & (upward != 0), turned, column)
            column = gl.where(is_long, gl.where(outside, 1 << 28, column), column + head_long)
        first, second = key_pair(column, n_blocks, schedule.ranges_ptr, kv_head * RATIO, N_RANGES, schedule.TOKENS)
    if schedule.TOKENS and not schedule.PACKED:
        rule = load_rule(schedule.tokens_ptr, kv_head * RATIO)
        first, second = pair_beside_sink(first, second, index - unit * schedule.n_sink, index < sinks, n_blocks, rule, schedule.n_sink)
    return batch, kv_head, token, length, gl.minimum(first, n_blocks), gl.minimum(second, n_blocks)


@gluon.jit
def run_end(block, n_blocks, ranges_ptr, head, N_RANGES: gl.constexpr):
    """Where the run of query blocks that attend all of a key block ends; 0 for a block that does not exist."""
    limit = block
    for index in gl.static_range(N_RANGES):
        start, end, stride, offset = load_range(ranges_ptr, head, index, N_RANGES)
        limit = gl.where((end > start) & divides(stride, block + offset), block + end, limit)
    return gl.where(block < n_blocks, gl.minimum(limit, n_blocks), 0)


@gluon.jit
def touched_end(block, whole_end, n_blocks, rule):
    """TOKENS: where the run of query blocks that attend a token of a key block ends, whose `run_end` is whole_end."""
    end = gl.maximum(whole_end, gl.minimum(block + rule.window_end(), n_blocks))
    sink = (block < rule.sink_block) | ((block == rule.sink_block) & (rule.sink_rest > 0))
    return gl.where(block < n_blocks, gl.where(sink, n_blocks, end), 0)


@gluon.jit
def query_run(first, second, n_blocks, schedule, head):
    """The query blocks that visit a key tile: (steps, top, gap, first end, second end). Step i visits top - 1 - i, less
    `gap` where that lies below the second block: from the end of the sequence on, so that tiles of different length
    read the same rows at the same time (the second column of a folded program in the opposite order)."""
    first_end = run_end(first, n_blocks, schedule.ranges_ptr, head, schedule.N_RANGES)
    second_end = run_end(second, n_blocks, schedule.ranges_ptr, head, schedule.N_RANGES)
    if schedule.TOKENS:
        rule = load_rule(schedule.tokens_ptr, head)
        first_end = touched_end(first, first_end, n_blocks, rule)
        second_end = touched_end(second, second_end, n_blocks, rule)
    top = gl.maximum(first_end, second_end)
    gap = gl.where(second_end > 0, gl.maximum(second - first_end, 0), 0)
    steps = gl.where(first < n_blocks, top - first - gap, 0)
    return steps, top, gap, first_end, second_end


@gluon.jit
def key_step(query_block, member, first, second, first_end, second_end, last):
    """The descriptor of a step of a key tile."""
    first_keep = (query_block >= first) & (query_block < first_end)
    second_keep = (query_block >= second) & (query_block < second_end)
    flags = gl.where(first_keep, ATTENDED, 0) + gl.where(second_keep, ATTENDED << 1, 0)
    step = flags + gl.where(last, LAST_STEP, 0) + (query_block << ROW_SHIFT) + (member << MEMBER_SHIFT)
    own = gl.where(first_keep & (query_block == first), OWN, 0)
    return step + own + gl.where(second_keep & (query_block == second), OWN << 1, 0)


@aggregate
class BlockCodes:
    """TOKENS: the flags of half 0 for a key block, by query block."""

    block: gl.tensor
    whole_end: gl.tensor  # the query blocks before it see all of the key block
    near: gl.tensor  # the query block that is the window's `edge` away
    own: gl.tensor  # the flags of the key block's own query block,
    far: gl.tensor  # of the one behind `near`,
    rest: gl.tensor  # and of the others

    @gluon.jit
    def at(self, query_block):
        code = gl.where(query_block == self.near + 1, self.far, self.rest)
        code = gl.where(query_block == self.near, NEAR, code)
        code = gl.where(query_block < self.whole_end, ATTENDED, code)
        code = gl.where(query_block == self.block, self.own, code)
        return gl.where(query_block < self.block, 0, code)


@gluon.jit
def codes_of_block(block, n_blocks, rule, whole_end):
    """Of a key block whose `run_end` is whole_end. One that does not exist, n_blocks, comes before no query block."""
    whole_end = gl.where(block < rule.sink_block, n_blocks, whole_end)
    rest = gl.where((block == rule.sink_block) & (rule.sink_rest > 0), EDGE, 0)
    own = gl.where(whole_end > block, ATTENDED | OWN, gl.where(rule.edge == 0, OWN_EDGE, rest))
    return BlockCodes(block, whole_end, block + rule.edge, own, gl.where(rule.rest > 1, FAR, rest), rest)


@gluon.jit
def rests_of_blocks(first, second, rule):
    """TOKENS: see KeyTile.rests."""
    at_first = gl.where(first == rule.sink_block, rule.sink_rest, 0)
    return rule.rest + (at_first << 6) + (gl.where(second == rule.sink_block, rule.sink_rest, 0) << 12)
