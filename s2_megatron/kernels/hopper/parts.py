"""SPLIT: a long column of dK and dV in parts, for several programs of the Hopper backward; where few KV heads are on a
GPU, their few long columns would keep most multiprocessors waiting.

Part p of a column has its visits p * part_steps and following, so that the same part of all columns meets the same
queries. The parts hand their sums on: each waits until the one before has written its fp32 sum and raised the flag of
that half of the column, adds its own, and writes that back; the last one writes the gradients. So the order of the sums
follows from the shapes and the number of multiprocessors.

No program waits for ever: the counter deals out tiles in order, and a part has a higher number than the one before it.
A program computes its tiles in the order in which it got them; what its loading warp has got beyond the current one has
a higher number. So a wait is always for a lower number than that of the waiting tile, which a running program has got,
and the lowest tile that is not done waits for nothing but its own program's loads.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from s2_megatron.kernels.hopper.columns import column_of_program, ordinary_column, sink_columns
from s2_megatron.kernels.hopper.gluon_versions import aggregate, thread_barrier
from s2_megatron.kernels.hopper.schedule import BLOCK


@aggregate
class PartSums:
    """Where the parts of columns hand their sums on."""

    sums_ptr: gl.tensor  # fp32 [halves of columns, 2 (dK, dV), BLOCK, BLOCK_D]
    counter_ptr: gl.tensor  # from 1 on: a flag for each of these halves


@gluon.jit
def part_of_program(index, schedule):
    """(index of the column, part): all parts of the sink's columns, then the long columns or their first parts, then
    each further part of the first n_split columns of every unit, then the short columns. An index of a column is that
    of its program in a launch without parts."""
    n_split, n_long, units, head_group = schedule.n_split, schedule.n_long, schedule.units, schedule.head_group
    sinks, sink_programs, program = 0, 0, index
    if schedule.TOKENS:
        sinks = sink_columns(schedule)
        sink_programs = sinks * schedule.sink_parts
        index -= sink_programs
    further = schedule.n_programs - sink_programs - (n_long + schedule.n_rest) * units
    beyond = index - n_long * units
    part = gl.where((beyond >= 0) & (beyond < further), 1 + beyond // gl.maximum(n_split * units, 1), 0)
    rest = beyond - (part - 1) * n_split * units
    group = rest // gl.maximum(n_split * head_group, 1)
    column_index = gl.where(beyond < 0, index, index - further)
    column_index = gl.where(part > 0, rest + group * (n_long - n_split) * head_group, column_index)
    if schedule.TOKENS:
        sink_part = program // gl.maximum(sinks, 1)
        column_index = gl.where(index < 0, program - sink_part * sinks, sinks + column_index)
        part = gl.where(index < 0, sink_part, part)
    return column_index, part


@gluon.jit
def place_of_column(index, schedule):
    """Which sums and flags are a column's; -1 for one that has no parts."""
    column, unit, is_long = ordinary_column(index, schedule)
    sinks = sink_columns(schedule) if schedule.TOKENS else 0
    place = gl.where(is_long & (column < schedule.n_split), sinks + unit * schedule.n_split + column, -1)
    if schedule.TOKENS:
        place = gl.where(index < sinks, index, place)
    return place


@gluon.jit
def steps_of_column(index, place, schedule):
    """How many steps a column in parts has in the lists of ops/key_steps.py: up to those of the next column, which are
    shorter. Less than 1 for one without parts, and for the last one of its list."""
    n_long, n_rest, lists = schedule.n_long, schedule.n_rest, schedule.lists
    column, unit, is_long = column_of_program(index, n_long, n_rest, schedule.units, schedule.head_group)
    entry = lists.tiles_ptr + (gl.load(lists.rows_ptr + unit // schedule.batches) * (n_long + n_rest) + column) * 3 + 2
    return gl.load(entry + gl.where(place >= 0, 3, 0)) - gl.load(entry)


@gluon.jit
def visits_of_part(part, place, visits, part_steps):
    """(first visit, end, link) of a part of a column with so many visits; a part that does not exist has none. link:
    what the computing warpgroups need to know; bit 0, it is the last part; from bit 1 the part; from bit 12 the
    place."""
    first = part * part_steps
    end = gl.where(place >= 0, gl.minimum(first + part_steps, visits), visits)
    return first, end, gl.where(end == visits, 1, 0) + (part << 1) + (gl.maximum(place, 0) << 12)


@gluon.jit
def is_last_part(link):
    return (link & 1) != 0


@gluon.jit
def add_parts(dk, dv, link, parts, HALF: gl.constexpr, BLOCK_D: gl.constexpr):
    """dk and dv of a part, with those of the parts before it. Hands them on, unless it is the last one."""
    layout: gl.constexpr = dk.type.layout
    number = (link >> 12) * 2 + HALF
    part = (link >> 1) & 0x7FF
    flag_ptr = parts.counter_ptr + 1 + number  # how many parts are in the sums
    rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, layout))
    dk_ptr = parts.sums_ptr + number * (2 * BLOCK * BLOCK_D) + rows[:, None] * BLOCK_D + dims[None, :]
    dv_ptr = dk_ptr + BLOCK * BLOCK_D
    if part > 0:
        done = gl.atomic_add(flag_ptr, 0, sem="acquire")
        while done < part:
            done = gl.atomic_add(flag_ptr, 0, sem="acquire")
        dk += gl.load(dk_ptr, cache_modifier=".cg")  # this multiprocessor's L1 may hold the sum of another part
        dv += gl.load(dv_ptr, cache_modifier=".cg")
    if not is_last_part(link):
        gl.store(dk_ptr, dk)
        gl.store(dv_ptr, dv)
        thread_barrier()
        gl.atomic_add(flag_ptr, 1, sem="release")
    return dk, dv
