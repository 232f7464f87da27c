"""Which tiles the Hopper kernels compute, in which order, and which key blocks a query tile visits: written once for all of them.

A query tile is 128 rows in two halves of one 64-token block each: two neighbouring query blocks of a head or, PACK, the same query block of two
heads that share their KV head and their pattern. A step of its loop takes 128 keys: two key blocks, which may lie anywhere. The steps are
1. step 0, the tile's own blocks, masked by token (PACK has one such block; a free block that is left over comes beside it);
2. masked steps: the free block that is left over when their number is odd, and blocks that only one half attends, at the ends of ranges. In
   this order a half that attends one block of a step mostly has it first, and passes by the second;
3. free steps: pairs of blocks that all rows attend.
Everything follows from the ranges of the pattern by arithmetic; nothing is read but the head's few range entries.

LISTED: block masks, and queries or keys that are placed by blocks, bring their steps as lists instead (block_lists.py): masked steps, of which
one half may attend nothing, then free ones; there is no step 0. Each step comes with a word that says who attends what.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def tile_of_program(index, n_tiles, head_group):
    """(tile, unit): units (heads of the batch) go through the tiles in groups of head_group, so that what they share stays in L2."""
    per_group = n_tiles * head_group
    group = index // per_group
    rest = index - group * per_group
    return rest // head_group, group * head_group + rest % head_group


@gluon.jit
def shared_out(position, program, programs, n_programs, backwards):
    """The tile in a position of a persistent program, which takes every programs-th: every other round goes backwards, as far as it is full, so
    that programs whose tiles get smaller from one to the next have the same work."""
    return gl.where((backwards != 0) & (position - program + programs <= n_programs), position + programs - 1 - 2 * program, position)


@gluon.jit
def head_of_unit(unit, batches, order_ptr, ORDERED: gl.constexpr):
    """(batch, head). ORDERED: by a list, of heads with the most work first where the heads of a layer differ, or of some of the heads."""
    head = unit // batches
    batch = unit - head * batches
    if ORDERED:
        head = gl.load(order_ptr + head)
    return batch, head


@gluon.jit
def query_tile(index, n_tiles, head_group, batches, order_ptr, documents_ptr, rows, ORDERED: gl.constexpr, PACKED: gl.constexpr,
               PACK: gl.constexpr):
    """(batch, first head, first token of the sequence, its length, first query block) of a program's tile; the last tiles first."""
    tile, unit = tile_of_program(index, n_tiles, head_group)
    batch, head = head_of_unit(unit, batches, order_ptr, ORDERED)
    tile = n_tiles - 1 - tile
    token = tile * 0
    length = rows
    if PACKED:
        token = gl.load(documents_ptr + tile * 4)
        length = gl.load(documents_ptr + tile * 4 + 1)
        tile = gl.load(documents_ptr + tile * 4 + 2)
    if PACK:
        head *= 2
    else:
        tile *= 2
    return batch, head, token, length, tile


@gluon.jit
def quotient(number, divisor):
    """number // divisor for 0 <= number < 2**21, by a floating-point division that is exact there and several times as fast.
    Any number will do where the result is thrown away."""
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


@gluon.jit
def plan_query_tile(ranges_ptr, head, low, N_RANGES: gl.constexpr, PACK: gl.constexpr):
    """The key blocks of a tile whose first query block is `low`.

    Returns (first, stride, end) of the free runs as tuples, `end` counting the blocks of this run and the ones before; then (block, bits) of
    the edges, bit w set when half w attends the block, 0 for none; and whether the second half attends the block before its own.
    """
    high = low + 1 - PACK
    firsts, strides, ends = (), (), ()
    edges, bits = (), ()
    total = low * 0
    previous = low * 0
    for index in gl.static_range(N_RANGES):
        start, end, stride, offset = load_range(ranges_ptr, head, index, N_RANGES)
        bottom = gl.maximum(high - end + 1, 0)
        top = gl.minimum(low - start, low - 1)
        first = quotient(bottom + offset + stride - 1, stride) * stride - offset
        total += gl.where(top >= first, quotient(gl.maximum(top - first, 0), stride) + 1, 0)
        firsts, strides, ends = firsts + (first,), strides + (stride,), ends + (total,)
        if PACK:
            edges, bits = edges + (low,), bits + (low * 0,)
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
    return firsts, strides, ends, edges, bits, previous


@gluon.jit
def free_block(entry, firsts, strides, ends, N_RANGES: gl.constexpr):
    """The key block of one entry of the joined runs."""
    block = firsts[0] + entry * strides[0]
    for index in gl.static_range(1, N_RANGES):
        block = gl.where(entry >= ends[index - 1], firsts[index] + (entry - ends[index - 1]) * strides[index], block)
    return block


@gluon.jit
def count_steps(ends, bits, N_RANGES: gl.constexpr, PACK: gl.constexpr):
    """(masked steps, free steps) beside step 0."""
    total = ends[N_RANGES - 1]
    masked = total * 0
    if not PACK:  # with PACK, what is left over comes beside the diagonal
        masked += total % 2
        for index in gl.static_range(N_RANGES):
            masked += gl.where(bits[index] != 0, 1, 0)
    return (masked + 1) // 2, total // 2


@gluon.jit
def masked_entry(entry, low, firsts, strides, ends, edges, bits, N_RANGES: gl.constexpr):
    """(block, bits) of a masked entry: the free block that is left over, then the edges; past the end, for no half, the block before the
    tile: it lies wholly in the document, and what follows a document may be NaN."""
    total = ends[N_RANGES - 1]
    block = gl.maximum(low - 1, 0)
    seen = total % 2
    keep = gl.where(entry < seen, 3, 0)
    if entry < seen:
        block = free_block(total - 1, firsts, strides, ends, N_RANGES)
    for index in gl.static_range(N_RANGES):
        here = bits[index] != 0
        take = here & (seen == entry)
        block = gl.where(take, edges[index], block)
        keep = gl.where(take, bits[index], keep)
        seen += gl.where(here, 1, 0)
    return block, keep


@gluon.jit
def marks_of(masked_steps, previous, low, firsts, strides, ends, edges, bits, N_RANGES: gl.constexpr):
    """One number for the masks of a tile: bit 0, the second half attends the block before its own; bit 1, there is a free block beside the
    diagonal (PACK); from bit 2 on four bits a masked step, two for each of its blocks."""
    marks = previous + 2 * (ends[N_RANGES - 1] % 2)
    for step in gl.static_range(N_RANGES // 2 + 1):
        block, keep_a = masked_entry(2 * step, low, firsts, strides, ends, edges, bits, N_RANGES)
        block, keep_b = masked_entry(2 * step + 1, low, firsts, strides, ends, edges, bits, N_RANGES)
        marks += gl.where(step < masked_steps, (keep_a + 4 * keep_b) << (4 * step + 2), 0)
    return marks


@gluon.jit
def step_blocks(step, low, masked_steps, firsts, strides, ends, edges, bits, N_RANGES: gl.constexpr, PACK: gl.constexpr):
    """The two key blocks of a step."""
    entry = 2 * (step - 1 - masked_steps)
    first = free_block(entry, firsts, strides, ends, N_RANGES)
    second = free_block(entry + 1, firsts, strides, ends, N_RANGES)
    if step == 0:
        first = low
        if PACK:
            total = ends[N_RANGES - 1]
            second = gl.where(total % 2 == 1, free_block(total - 1, firsts, strides, ends, N_RANGES), low)
        else:
            second = low + 1
    elif step <= masked_steps:
        first, keep = masked_entry(2 * (step - 1), low, firsts, strides, ends, edges, bits, N_RANGES)
        second, keep = masked_entry(2 * (step - 1) + 1, low, firsts, strides, ends, edges, bits, N_RANGES)
    return first, second


@gluon.jit
def block_word(marks, number, PACK: gl.constexpr):
    """The word of a masked key block of a tile, counted from step 0 on with two blocks a step, as listed_step has it for its first slot."""
    if PACK:
        own = gl.where(number == 0, 15, 3 * ((marks >> 1) & 1))
    else:
        own = gl.where(number == 0, 5 + 2 * (marks & 1), 10)
    return gl.where(number < 2, own, (marks >> gl.maximum(2 * number - 2, 0)) & 3)


@gluon.jit
def listed_tile(lists, unit, tile, n_tiles):
    """(where its list begins, masked steps, free steps) of a tile of a head, or with PACK of a pair of heads."""
    rows_ptr, tiles_ptr, steps_ptr = lists
    entry = tiles_ptr + (gl.load(rows_ptr + unit) * n_tiles + tile) * 3
    return steps_ptr + gl.load(entry) * 2, gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def listed_step(steps_ptr, step):
    """(first slot, second slot, word): bits 0 and 1 of the word, the halves that attend the first slot; bits 2 and 3, whose own block it is,
    masked by token; from bit 4 on the same of the second."""
    entry_a = gl.load(steps_ptr + step * 2)
    entry_b = gl.load(steps_ptr + step * 2 + 1)
    return entry_a & 0xFFFFFF, entry_b & 0xFFFFFF, (entry_a >> 24) + ((entry_b >> 24) << 4)


@gluon.jit
def last_seen(word, row):
    """The last token of a key block that a row sees, -1 for none. Bit 0 of the word: the block is attended; bit 2: it is the row's own."""
    last = gl.where((word & 4) != 0, row, BLOCK - 1)
    return gl.where((word & 1) != 0, last, -1)


@gluon.jit
def word_mask(word, row, column, HALF: gl.constexpr):
    """bool [64, columns]: what the rows of one half attend in a listed step. row: 0 .. 63; column: 0 .. 127, or as far as is asked for."""
    first = last_seen(word >> HALF, row)
    second = last_seen(word >> (4 + HALF), row)
    return (column & (BLOCK - 1))[None, :] <= gl.where((column < BLOCK)[None, :], first[:, None], second[:, None])
