"""TOKENS: windows and sinks that are said in tokens (patterns/tokens.py): which key blocks they add to a query tile, with
which flags (step_descriptor.py), and the masks of those flags.

The table of ranges has what is attended as whole blocks, its first range the whole blocks of the window (perhaps none).
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from s2_megatron.kernels.hopper.gluon_versions import aggregate
from s2_megatron.kernels.hopper.ranges import divides, load_range, quotient
from s2_megatron.kernels.hopper.steps import (
    ATTENDED,
    BOTH_HALVES,
    EDGE,
    FAR,
    FLAG_BITS,
    FLAG_MASK,
    HALF_FLAGS,
    NEAR,
    OWN,
    OWN_EDGE,
    SINK,
)

NOWHERE = gl.constexpr(1 << 30)  # a distance that no two blocks have


@aggregate
class TokenRule:
    """The window and the sink of a head, in blocks of 64 and what is left."""

    edge: gl.tensor  # the distance of the first block that the window does not see as a whole; NOWHERE without a window
    rest: gl.tensor
    sink_block: gl.tensor  # the blocks before it are seen by all
    sink_rest: gl.tensor  # and of it the first so many tokens

    @gluon.jit
    def rests(self):
        """Both rests in 12 bits."""
        return self.rest + (self.sink_rest << 6)

    @gluon.jit
    def window_end(self):
        """From this distance on the window sees nothing."""
        return gl.where(self.edge == NOWHERE, 0, self.edge + gl.where(self.rest > 1, 2, 1))


@gluon.jit
def load_rule(tokens_ptr, head):
    window = gl.load(tokens_ptr + head * 2)
    sink = gl.load(tokens_ptr + head * 2 + 1)
    return TokenRule(gl.where(window > 0, window >> 6, NOWHERE), window & 63, sink >> 6, sink & 63)


@gluon.jit
def code_of(distance, whole, rule, at_sink):
    """The flags of half 0 for a block at a distance of 0 or more. whole: ranges or sink show all of it. at_sink: it holds
    the sink's last tokens."""
    own = distance == 0
    code = gl.where(at_sink, EDGE, 0)
    code = gl.where((distance == rule.edge + 1) & (rule.rest > 1), FAR, code)
    code = gl.where(distance == rule.edge, gl.where(own, OWN_EDGE, NEAR), code)
    return gl.where(whole, gl.where(own, ATTENDED | OWN, ATTENDED), code)


@gluon.jit
def place_bounds(flags, rest):
    """(least, most) difference of a key's and a query's place in their blocks that is seen, by the flags of half 0."""
    code = flags & HALF_FLAGS
    least = gl.where((code == NEAR) | (code == OWN_EDGE), 1 - rest, -64)
    least = gl.where(code == FAR, 65 - rest, gl.where(code == EDGE, 64, least))
    most = gl.where((code & (ATTENDED | OWN)) == (ATTENDED | OWN), 0, 63)
    return least, gl.where(code == 0, -65, most)


@gluon.jit
def token_step_mask(step, row, column, rests, HALF: gl.constexpr):
    """step_mask of schedule.py for steps with these flags."""
    least_a, most_a = place_bounds(step >> HALF, rests & 63)
    least_b, most_b = place_bounds(step >> (FLAG_BITS + HALF), rests & 63)
    sink_rest = (rests >> 6) & 63
    sink_a = gl.where((step & SINK) != 0, sink_rest, 0)
    sink_b = gl.where((step & (SINK << FLAG_BITS)) != 0, sink_rest, 0)
    # Bounds by row: ptxas would take the differences of rows and columns out of the loops, and spill them.
    first = (column < 64)[None, :]
    place = (column & 63)[None, :]
    seen = place >= gl.where(first, (row + least_a)[:, None], (row + least_b)[:, None])
    seen = seen | (place < gl.where(first, sink_a, sink_b))
    return seen & (place <= gl.where(first, (row + most_a)[:, None], (row + most_b)[:, None]))


@gluon.jit
def key_token_mask(flags, key_row, query_row, rests, HALF: gl.constexpr):
    """bool [64 keys, 64 queries]: what a step's queries see of one half of a key tile, by the flags of half 0."""
    least, most = place_bounds(flags, rests & 63)
    sink_rest = (rests >> (6 + 6 * HALF)) & 63
    last = gl.where(key_row < sink_rest, 63, key_row - least)
    return (query_row[None, :] <= last[:, None]) & (query_row[None, :] >= (key_row - most)[:, None])


@aggregate
class HeadRanges:
    """The ranges of a head. The first one begins at distance 0 and has stride 1."""

    first_end: gl.tensor
    starts: gl.tuple  # of the others
    ends: gl.tuple
    strides: gl.tuple
    offsets: gl.tuple

    @gluon.jit
    def show(self, key_block, query_block, last_query):
        """Whether one range shows the query blocks from query_block to last_query all of a key block before them, or
        of query_block's own."""
        shown = last_query - key_block < self.first_end
        for index in gl.static_range(len(self.ends)):
            inside = (query_block - key_block >= self.starts[index]) & (last_query - key_block < self.ends[index])
            shown = shown | (inside & divides(self.strides[index], gl.maximum(key_block, 0) + self.offsets[index]))
        return shown


@gluon.jit
def load_ranges(ranges_ptr, head, N_RANGES: gl.constexpr):
    starts, ends, strides, offsets = (), (), (), ()
    for index in gl.static_range(1, N_RANGES):
        start, end, stride, offset = load_range(ranges_ptr, head, index, N_RANGES)
        starts, ends, strides, offsets = starts + (start,), ends + (end,), strides + (stride,), offsets + (offset,)
    return HeadRanges(gl.load(ranges_ptr + head * N_RANGES * 4 + 1), starts, ends, strides, offsets)


@aggregate
class TokenBlocks:
    """The key blocks of a query tile that it sees as a whole, those of the sink first, then those of each range (entry
    e of range i is bases[i] + e * strides[i], the first one without a stride), and the masked ones."""

    sinks: gl.tensor
    bases: gl.tuple
    strides: gl.tuple
    ends: gl.tuple  # how many entries the sink and the ranges up to this one have
    masked: gl.tuple  # (block << FLAG_BITS) + flags, which are 0 where there is none
    own: gl.tensor  # the flags of the tile's own blocks, a step's descriptor


@gluon.jit
def block_flags(key_block, low, rule, ranges, PACK: gl.constexpr):
    """The flags of a key block for both halves of the tile whose first query block is `low`."""
    at_sink = (key_block == rule.sink_block) & (rule.sink_rest > 0)
    in_sink = key_block < rule.sink_block
    first = code_of(low - key_block, ranges.show(key_block, low, low) | in_sink, rule, at_sink)
    second = first
    if not PACK:
        second = code_of(low + 1 - key_block, ranges.show(key_block, low + 1, low + 1) | in_sink, rule, at_sink)
    return first + (second << 1) + gl.where(at_sink, SINK, 0)


@gluon.jit
def blocks_with_tokens(ranges_ptr, head, low, rule, N_RANGES: gl.constexpr, PACK: gl.constexpr):
    """The key blocks of the tile whose first query block is `low`."""
    high = low + 1 - PACK
    ranges = load_ranges(ranges_ptr, head, N_RANGES)
    sinks = gl.minimum(rule.sink_block, low)
    candidates = (low - rule.edge, low - rule.edge - 1, rule.sink_block)
    if not PACK:
        candidates = candidates + (low + 1 - ranges.first_end,)
    first = gl.maximum(high - ranges.first_end + 1, rule.sink_block)
    bases = (first - sinks,)
    total = sinks + gl.maximum(low - first, 0)
    strides, ends = (), (total,)
    for index in gl.static_range(N_RANGES - 1):
        end, stride, offset = ranges.ends[index], ranges.strides[index], ranges.offsets[index]
        bottom = gl.maximum(high - end + 1, rule.sink_block)
        top = gl.minimum(low - ranges.starts[index], low - 1)
        first = quotient(bottom + offset + stride - 1, stride) * stride - offset
        bases, strides = bases + (first - total * stride,), strides + (stride,)
        total += gl.where(top >= first, quotient(gl.maximum(top - first, 0), stride) + 1, 0)
        ends = ends + (total,)
        if not PACK:
            candidates = candidates + (low + 1 - end,)
    masked = ()
    for index in gl.static_range(len(candidates)):
        block = candidates[index]
        new = (block >= rule.sink_block) & (block < low)
        for before in gl.static_range(index):
            new = new & (block != candidates[before])
        # What both halves see by one range is among its entries; what they see by two ranges, at the end of one, is not.
        new = new & (ranges.show(block, low, high) == 0)
        block = gl.maximum(block, 0)
        masked = masked + ((block << FLAG_BITS) + gl.where(new, block_flags(block, low, rule, ranges, PACK), 0),)
    own = block_flags(low, low, rule, ranges, PACK)
    if not PACK:  # of the block behind `low` the first half sees nothing
        following = block_flags(low + 1, low + 1, rule, ranges, True)
        own += (following & ~HALF_FLAGS) << FLAG_BITS
    return TokenBlocks(sinks, bases, strides, ends, masked, own)


@gluon.jit
def free_entry(entry, blocks):
    """The key block of one entry."""
    block = gl.where(entry >= blocks.sinks, blocks.bases[0] + entry, entry)
    for index in gl.static_range(len(blocks.strides)):
        block = gl.where(entry >= blocks.ends[index], blocks.bases[index + 1] + entry * blocks.strides[index], block)
    return block


@gluon.jit
def attended(entry):
    """Whether a masked entry attends more than the sink's tokens say."""
    return (entry & FLAG_MASK & ~SINK) != 0


@gluon.jit
def token_steps(blocks, PACK: gl.constexpr):
    """(masked steps, free steps, whether there is a masked block beside the diagonal) beside step 0."""
    total = blocks.ends[len(blocks.ends) - 1]
    masked = total % 2
    for index in gl.static_range(len(blocks.masked)):
        masked += gl.where(attended(blocks.masked[index]), 1, 0)
    return masked // 2 if PACK else (masked + 1) // 2, total // 2, gl.minimum(masked, PACK)


@gluon.jit
def token_entry(number, low, blocks):
    """(block, flags) of a masked entry: the free block that is left over, then the others; past the end, for no half, a
    block that lies wholly in the document."""
    total = blocks.ends[len(blocks.ends) - 1]
    seen = total % 2
    entry = gl.maximum(low - 1, 0) << FLAG_BITS
    if number < seen:
        entry = (free_entry(total - 1, blocks) << FLAG_BITS) + BOTH_HALVES
    for index in gl.static_range(len(blocks.masked)):
        here = attended(blocks.masked[index])
        entry = gl.where(here & (seen == number), blocks.masked[index], entry)
        seen += gl.where(here, 1, 0)
    return entry >> FLAG_BITS, entry & FLAG_MASK


@gluon.jit
def masked_token_step(number, low, blocks, PACK: gl.constexpr):
    """(first block, second block, descriptor) of a masked step, counted from step 0 on."""
    if number == 0:
        first = low
        second = low + 1
        step = blocks.own
        if PACK:
            second, flags = token_entry(0, low, blocks)
            second = gl.where(flags == 0, low, second)
            step += flags << FLAG_BITS
    else:
        first, flags = token_entry(2 * (number - 1) + PACK, low, blocks)
        second, second_flags = token_entry(2 * (number - 1) + PACK + 1, low, blocks)
        step = flags + (second_flags << FLAG_BITS)
    return first, second, step


@gluon.jit
def free_token_step(number, blocks):
    """The same of a free step, counted from 0 on."""
    step = blocks.sinks * 0 + (BOTH_HALVES + (BOTH_HALVES << FLAG_BITS))
    return free_entry(2 * number, blocks), free_entry(2 * number + 1, blocks), step
