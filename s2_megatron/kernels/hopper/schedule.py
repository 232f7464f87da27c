"""Which tiles the Hopper kernels compute, in which order, and which key blocks a query tile visits: written once for
all of them.

A query tile is 128 rows in two halves of one 64-token block each: two neighbouring query blocks of a head or, PACK, the
same query block of two heads that share their KV head and their pattern. A step of its loop takes 128 keys: two key
blocks, which may lie anywhere. The steps are 1. step 0, the tile's own blocks, masked by token (PACK has one such
block; a free block that is left over comes beside it); 2. masked steps: the free block that is left over when their
number is odd, and blocks that only one half attends, at the ends of ranges. In
   this order a half that attends one block of a step mostly has it first, and skips the second;
3. free steps: pairs of blocks that all rows attend.
Everything follows from the ranges of the pattern by arithmetic; nothing is read but the head's few range entries.

LISTED: block masks, and queries or keys that are placed by blocks, bring their steps as lists instead
(ops/query_steps.py): masked steps, of which one half may attend nothing, then free ones; there is no step 0. Each step
comes with a descriptor that says who attends what.

TOKENS: a window and a sink in tokens add masked blocks, which come with descriptors, too (tokens.py).
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from s2_megatron.kernels.hopper.gluon_versions import aggregate
from s2_megatron.kernels.hopper.ranges import divides, load_range, quotient
from s2_megatron.kernels.hopper.steps import ATTENDED, BOTH_HALVES, FLAG_BITS, OWN, SLOT_BITS, SLOT_MASK

BLOCK = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@aggregate
class StepLists:
    """The tiles and their steps where they come as lists."""

    rows_ptr: gl.tensor
    tiles_ptr: gl.tensor
    steps_ptr: gl.tensor


@aggregate
class QuerySchedule:
    """What a kernel with a program per query tile takes its tiles from."""

    ranges_ptr: gl.tensor
    order_ptr: gl.tensor
    documents_ptr: gl.tensor
    counter_ptr: gl.tensor  # LISTED: a zero
    lists: StepLists
    tokens_ptr: gl.tensor
    rows: gl.tensor
    n_tiles: gl.tensor
    n_programs: gl.tensor
    batches: gl.tensor
    head_group: gl.tensor
    N_RANGES: gl.constexpr
    RATIO: gl.constexpr  # query heads of a KV head
    ORDERED: gl.constexpr
    PACKED: gl.constexpr
    PACK: gl.constexpr
    LISTED: gl.constexpr
    TOKENS: gl.constexpr


@aggregate
class RangeBlocks:
    """The key blocks of a query tile. Of each free run the first block, the stride, and how many blocks this run and
    the ones before it have; of each edge the block, and its bits: bit h set when half h attends it, 0 for none.
    previous: the second half attends the block before its own."""

    firsts: gl.tuple
    strides: gl.tuple
    ends: gl.tuple
    edges: gl.tuple
    bits: gl.tuple
    previous: gl.tensor


@gluon.jit
def tile_of_program(index, n_tiles, head_group):
    """(tile, unit): units (heads of the batch) go through the tiles in groups of head_group, so that what they share
    stays in L2."""
    per_group = n_tiles * head_group
    group = index // per_group
    rest = index - group * per_group
    return rest // head_group, group * head_group + rest % head_group


@gluon.jit
def shared_out(position, program, programs, n_programs, backwards):
    """The tile in a position of a persistent program, which takes every programs-th: every other round goes backwards,
    as far as it is full, so that programs whose tiles get smaller from one to the next have the same work."""
    return gl.where((backwards != 0) & (position - program + programs <= n_programs), position + programs - 1 - 2 * program, position)


@gluon.jit
def head_of_unit(unit, batches, order_ptr, ORDERED: gl.constexpr):
    """(batch, head). ORDERED: by a list, of heads with the most work first where the heads of a layer differ, or of
    some of the heads."""
    head = unit // batches
    batch = unit - head * batches
    if ORDERED:
        head = gl.load(order_ptr + head)
    return batch, head


@gluon.jit
def query_tile(index, schedule):
    """(batch, first head, first token of the sequence, its length, first query block) of a program's tile; the last
    tiles first."""
    tile, unit = tile_of_program(index, schedule.n_tiles, schedule.head_group)
    batch, head = head_of_unit(unit, schedule.batches, schedule.order_ptr, schedule.ORDERED)
    tile = schedule.n_tiles - 1 - tile
    token = 0
    length = schedule.rows
    if schedule.PACKED:
        token = gl.load(schedule.documents_ptr + tile * 4)
        length = gl.load(schedule.documents_ptr + tile * 4 + 1)
        tile = gl.load(schedule.documents_ptr + tile * 4 + 2)
    if schedule.PACK:
        head *= 2
    else:
        tile *= 2
    return batch, head, token, length, tile


@gluon.jit
def blocks_of_ranges(ranges_ptr, head, low, N_RANGES: gl.constexpr, PACK: gl.constexpr):
    """The key blocks of the tile whose first query block is `low`."""
    high = low + 1 - PACK
    firsts, strides, ends = (), (), ()
    edges, bits = (), ()
    total = 0
    previous = 0
    for index in gl.static_range(N_RANGES):
        start, end, stride, offset = load_range(ranges_ptr, head, index, N_RANGES)
        bottom = gl.maximum(high - end + 1, 0)
        top = gl.minimum(low - start, low - 1)
        first = quotient(bottom + offset + stride - 1, stride) * stride - offset
        total += gl.where(top >= first, quotient(gl.maximum(top - first, 0), stride) + 1, 0)
        firsts, strides, ends = firsts + (first,), strides + (stride,), ends + (total,)
        if PACK:
            no_half = 0
            edges, bits = edges + (low,), bits + (no_half,)
        else:
            edge = low + 1 - end
            at_edge = gl.maximum(edge, 0)
            both = gl.where(divides(stride, at_edge + offset), 1, 0)
            inside = (edge >= 0) & (edge < low)
            if index + 1 < N_RANGES:
                next_start, next_end, next_stride, next_offset = load_range(ranges_ptr, head, index + 1, N_RANGES)
                both += gl.where((next_end > next_start) & divides(next_stride, at_edge + next_offset), 2, 0)
            edges, bits = edges + (edge,), bits + (gl.where(inside, both, 0),)
            previous = gl.where((start <= 1) & (end > 1) & divides(stride, low + offset), 1, previous)
    return RangeBlocks(firsts, strides, ends, edges, bits, previous)


@gluon.jit
def free_block(entry, blocks, N_RANGES: gl.constexpr):
    """The key block of one entry of the joined runs."""
    block = blocks.firsts[0] + entry * blocks.strides[0]
    for index in gl.static_range(1, N_RANGES):
        block = gl.where(entry >= blocks.ends[index - 1], blocks.firsts[index] + (entry - blocks.ends[index - 1]) * blocks.strides[index], block)
    return block


@gluon.jit
def count_steps(blocks, N_RANGES: gl.constexpr, PACK: gl.constexpr):
    """(masked steps, free steps) beside step 0."""
    total = blocks.ends[N_RANGES - 1]
    masked = 0
    if not PACK:  # with PACK, what is left over comes beside the diagonal
        masked += total % 2
        for index in gl.static_range(N_RANGES):
            masked += gl.where(blocks.bits[index] != 0, 1, 0)
    return (masked + 1) // 2, total // 2


@gluon.jit
def masked_entry(entry, low, blocks, N_RANGES: gl.constexpr):
    """(block, bits) of a masked entry: the free block that is left over, then the edges; past the end, for no half, the
    block before the tile: it lies wholly in the document, and what follows a document may be NaN."""
    total = blocks.ends[N_RANGES - 1]
    block = gl.maximum(low - 1, 0)
    seen = total % 2
    keep = gl.where(entry < seen, BOTH_HALVES, 0)
    if entry < seen:
        block = free_block(total - 1, blocks, N_RANGES)
    for index in gl.static_range(N_RANGES):
        here = blocks.bits[index] != 0
        take = here & (seen == entry)
        block = gl.where(take, blocks.edges[index], block)
        keep = gl.where(take, blocks.bits[index], keep)
        seen += gl.where(here, 1, 0)
    return block, keep


@gluon.jit
def marks_of(masked_steps, low, blocks, N_RANGES: gl.constexpr):
    """One number for the masks of a tile: bit 0, the second half attends the block before its own; bit 1, there is a
    free block beside the diagonal (PACK); from bit 2 on four bits a masked step, two for each of its blocks."""
    marks = blocks.previous + 2 * (blocks.ends[N_RANGES - 1] % 2)
    for step in gl.static_range(N_RANGES // 2 + 1):
        block, first_keep = masked_entry(2 * step, low, blocks, N_RANGES)
        block, second_keep = masked_entry(2 * step + 1, low, blocks, N_RANGES)
        marks += gl.where(step < masked_steps, (first_keep + 4 * second_keep) << (4 * step + 2), 0)
    return marks


@gluon.jit
def step_blocks(step, low, masked_steps, blocks, N_RANGES: gl.constexpr, PACK: gl.constexpr):
    """The two key blocks of a step."""
    entry = 2 * (step - 1 - masked_steps)
    first = free_block(entry, blocks, N_RANGES)
    second = free_block(entry + 1, blocks, N_RANGES)
    if step == 0:
        first = low
        if PACK:
            total = blocks.ends[N_RANGES - 1]
            second = gl.where(total % 2 == 1, free_block(total - 1, blocks, N_RANGES), low)
        else:
            second = low + 1
    elif step <= masked_steps:
        first, keep = masked_entry(2 * (step - 1), low, blocks, N_RANGES)
        second, keep = masked_entry(2 * (step - 1) + 1, low, blocks, N_RANGES)
    return first, second


@gluon.jit
def masked_flags(marks, number, PACK: gl.constexpr):
    """The flags of a masked key block of a tile, counted from step 0 on with two blocks a step."""
    OWN_BLOCK: gl.constexpr = ATTENDED | OWN
    if PACK:
        own = gl.where(number == 0, OWN_BLOCK | OWN_BLOCK << 1, BOTH_HALVES * ((marks >> 1) & 1))
    else:
        own = gl.where(number == 0, OWN_BLOCK + (ATTENDED << 1) * (marks & 1), OWN_BLOCK << 1)
    return gl.where(number < 2, own, (marks >> gl.maximum(2 * number - 2, 0)) & BOTH_HALVES)


@gluon.jit
def masked_step(marks, number, PACK: gl.constexpr):
    """The descriptor of a masked step, counted from step 0 on."""
    return masked_flags(marks, 2 * number, PACK) + (masked_flags(marks, 2 * number + 1, PACK) << FLAG_BITS)


@gluon.jit
def listed_tile(lists, unit, tile, n_tiles):
    """(where its list begins, masked steps, free steps) of a tile of a head, or with PACK of a pair of heads."""
    entry = lists.tiles_ptr + (gl.load(lists.rows_ptr + unit) * n_tiles + tile) * 3
    return lists.steps_ptr + gl.load(entry) * 2, gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def listed_step(steps_ptr, number):
    """(first slot, second slot, descriptor) of a step."""
    first_entry = gl.load(steps_ptr + number * 2)
    second_entry = gl.load(steps_ptr + number * 2 + 1)
    step = (first_entry >> SLOT_BITS) + ((second_entry >> SLOT_BITS) << FLAG_BITS)
    return first_entry & SLOT_MASK, second_entry & SLOT_MASK, step


@gluon.jit
def last_seen(flags, row):
    """The last token of a key block that a row sees, -1 for none, by the flags of the row's half shifted down to those
    of half 0."""
    last = gl.where((flags & OWN) != 0, row, BLOCK - 1)
    return gl.where((flags & ATTENDED) != 0, last, -1)


@gluon.jit
def step_mask(step, row, column, HALF: gl.constexpr):
    """bool [64, columns]: what the rows of one half attend in a step. row: 0 .. 63; column: 0 .. 127, or as far as is
    asked for."""
    first = last_seen(step >> HALF, row)
    second = last_seen(step >> (FLAG_BITS + HALF), row)
    return (column & (BLOCK - 1))[None, :] <= gl.where((column < BLOCK)[None, :], first[:, None], second[:, None])
