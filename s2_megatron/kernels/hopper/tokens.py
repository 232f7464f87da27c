"""TOKENS: windows and sinks that are said in tokens (patterns/tokens.py): which key blocks they add to a query tile, with
which flags (step_descriptor.py), and the masks of those flags.

The table of ranges has what is attended as whole blocks, its first range the whole blocks of the window (perhaps none).
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from s2_megatron.kernels.hopper.gluon_versions import aggregate
from s2_megatron.kernels.hopper.steps import (
    ATTENDED,
    BOTH_HALVES,
    EDGE,
    FAR,
    FLAG_BITS,
    HALF_FLAGS,
    NEAR,
    OWN,
    OWN_EDGE,
    SINK,
)

from s2_megatron.kernels.hopper.ranges import divides, load_range, quotient

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
    first = column < 64
    place = column & 63
    difference = place[None, :] - row[:, None]
    seen = (difference >= gl.where(first, least_a, least_b)[None, :]) | (place < gl.where(first, sink_a, sink_b))[None, :]
    return seen & (difference <= gl.where(first, most_a, most_b)[None, :])


@gluon.jit
def key_token_mask(flags, key_row, query_row, rests, HALF: gl.constexpr):
    """bool [64 keys, 64 queries]: what a step's queries see of one half of a key tile, by the flags of half 0."""
    least, most = place_bounds(flags, rests & 63)
    sink_rest = (rests >> (6 + 6 * HALF)) & 63
    difference = key_row[:, None] - query_row[None, :]
    return ((difference >= least) | (key_row < sink_rest)[:, None]) & (difference <= most)


@aggregate
class TokenBlocks:
    """The key blocks of a query tile. Of each free run the first block, the stride, and how many blocks this run and the
    ones before it have, the first run the sink's; of the other blocks before the tile the block, and its flags, 0 for
    none; and the flags of the tile's own blocks."""

    firsts: gl.tuple
    strides: gl.tuple
    ends: gl.tuple
    masked: gl.tuple
    flags: gl.tuple
    own: gl.tensor
    next: gl.tensor


@gluon.jit
def shows_whole(key_block, query_block, rule, ranges_ptr, head, N_RANGES: gl.constexpr):
    """Whether ranges or sink show a query block all of a key block, which comes before it or is its own."""
    distance = query_block - key_block
    whole = key_block < rule.sink_block
    for index in gl.static_range(N_RANGES):
        start, end, stride, offset = load_range(ranges_ptr, head, index, N_RANGES)
        whole = whole | ((distance >= start) & (distance < end) & divides(stride, gl.maximum(key_block, 0) + offset))
    return whole


@gluon.jit
def block_flags(key_block, low, rule, ranges_ptr, head, N_RANGES: gl.constexpr, PACK: gl.constexpr):
    """The flags of a key block for both halves of the tile whose first query block is `low`."""
    at_sink = (key_block == rule.sink_block) & (rule.sink_rest > 0)
    first = code_of(low - key_block, shows_whole(key_block, low, rule, ranges_ptr, head, N_RANGES), rule, at_sink)
    first = gl.where(key_block > low, 0, first)
    second = first
    if not PACK:
        second = code_of(low + 1 - key_block, shows_whole(key_block, low + 1, rule, ranges_ptr, head, N_RANGES), rule, at_sink)
    return first + (second << 1) + gl.where(at_sink, SINK, 0)


@gluon.jit
def blocks_with_tokens(ranges_ptr, head, low, rule, N_RANGES: gl.constexpr, PACK: gl.constexpr):
    """The key blocks of the tile whose first query block is `low`."""
    high = low + 1 - PACK
    sinks = gl.minimum(rule.sink_block, low)
    firsts, strides, ends = (low * 0,), (low * 0 + 1,), (sinks,)
    total = sinks
    candidates = (low - rule.edge, low - rule.edge - 1, rule.sink_block)
    for index in gl.static_range(N_RANGES):
        start, end, stride, offset = load_range(ranges_ptr, head, index, N_RANGES)
        bottom = gl.maximum(high - end + 1, rule.sink_block)
        top = gl.minimum(low - start, low - 1)
        first = quotient(bottom + offset + stride - 1, stride) * stride - offset
        total += gl.where(top >= first, quotient(gl.maximum(top - first, 0), stride) + 1, 0)
        firsts, strides, ends = firsts + (first,), strides + (stride,), ends + (total,)
        if not PACK:
            candidates = candidates + (low + 1 - end,)
    masked, flags = (), ()
    for index in gl.static_range(len(candidates)):
        block = candidates[index]
        new = (block >= rule.sink_block) & (block < low)
        for before in gl.static_range(index):
            new = new & (block != candidates[before])
        found = block_flags(gl.maximum(block, 0), low, rule, ranges_ptr, head, N_RANGES, PACK)
        # Both halves see all of it by one range: it is in the free run of that. By two ranges, at the end of one: not.
        run = low * 0
        for other in gl.static_range(N_RANGES):
            start, end, stride, offset = load_range(ranges_ptr, head, other, N_RANGES)
            run = gl.where((low - block >= start) & (high - block < end) & divides(stride, gl.maximum(block, 0) + offset), 1, run)
        masked, flags = masked + (block,), flags + (gl.where(new & (run == 0), found, 0),)
    own = block_flags(low, low, rule, ranges_ptr, head, N_RANGES, PACK)
    following = block_flags(low + 1, low, rule, ranges_ptr, head, N_RANGES, PACK)
    return TokenBlocks(firsts, strides, ends, masked, flags, own, following)


@gluon.jit
def free_entry(entry, blocks):
    """The key block of one entry of the joined runs."""
    block = blocks.firsts[0] + entry
    for index in gl.static_range(1, len(blocks.firsts)):
        block = gl.where(entry >= blocks.ends[index - 1], blocks.firsts[index] + (entry - blocks.ends[index - 1]) * blocks.strides[index], block)
    return block


@gluon.jit
def token_steps(blocks, PACK: gl.constexpr):
    """(masked steps, free steps, whether there is a masked block beside the diagonal) beside step 0."""
    total = blocks.ends[len(blocks.ends) - 1]
    masked = total % 2
    for index in gl.static_range(len(blocks.flags)):
        masked += gl.where((blocks.flags[index] & ~SINK) != 0, 1, 0)
    return masked // 2 if PACK else (masked + 1) // 2, total // 2, gl.minimum(masked, PACK)


@gluon.jit
def token_entry(entry, low, blocks):
    """(block, flags) of a masked entry: the free block that is left over, then the others; past the end, for no half, a
    block that lies wholly in the document."""
    total = blocks.ends[len(blocks.ends) - 1]
    block = gl.maximum(low - 1, 0)
    seen = total % 2
    keep = gl.where(entry < seen, BOTH_HALVES, 0)
    if entry < seen:
        block = free_entry(total - 1, blocks)
    for index in gl.static_range(len(blocks.masked)):
        here = (blocks.flags[index] & ~SINK) != 0
        take = here & (seen == entry)
        block = gl.where(take, blocks.masked[index], block)
        keep = gl.where(take, blocks.flags[index], keep)
        seen += gl.where(here, 1, 0)
    return block, keep


@gluon.jit
def token_step(step, low, masked_steps, blocks, PACK: gl.constexpr):
    """(first block, second block, descriptor) of a step, counted from step 0 on."""
    entry = 2 * (step - 1 - masked_steps)
    first = free_entry(entry, blocks)
    second = free_entry(entry + 1, blocks)
    flags = low * 0 + (BOTH_HALVES + (BOTH_HALVES << FLAG_BITS))
    if step == 0:
        first = low
        if PACK:
            second, flags = token_entry(0, low, blocks)
            second = gl.where(flags == 0, low, second)
        else:
            second = low + 1
            flags = blocks.next
        flags = blocks.own + (flags << FLAG_BITS)
    elif step <= masked_steps:
        first, flags = token_entry(2 * (step - 1) + PACK, low, blocks)
        second, second_flags = token_entry(2 * (step - 1) + PACK + 1, low, blocks)
        flags += second_flags << FLAG_BITS
    return first, second, flags
