"""Which blocks the Hopper kernels visit: their own schedule functions, run as plain Python on a machine without a GPU, against the pattern."""

from collections import Counter
from random import Random
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

from s2_megatron.kernels import hopper_columns, hopper_schedule
from s2_megatron.layout import build_layout
from s2_megatron.patterns import HeadPattern, RangePattern

TABLE: list[int] = []  # what gl.load reads: the range table of the layout at hand
STAND_IN = SimpleNamespace(
    load=lambda index: TABLE[index],
    where=lambda condition, yes, no: yes if condition else no,
    maximum=max,
    minimum=min,
    static_range=range,
)


def plain_functions():
    """The functions of both modules without their decorator. Integer division stands for the kernels' floating-point quotient."""
    namespace = {"gl": STAND_IN, "range": range, "quotient": lambda number, divisor: number // divisor}
    for module in (hopper_schedule, hopper_columns):
        for name, value in vars(module).items():
            if hasattr(value, "fn") and name != "quotient":
                namespace[name] = FunctionType(value.fn.__code__, namespace, name)
    return SimpleNamespace(**namespace)


SCHEDULE = plain_functions()


def some_head(random):
    strides, ends = [1], [random.randint(1, 6)]
    for _ in range(random.randint(0, 3)):
        strides.append(strides[-1] * random.choice((1, 2, 3, 4)))
        ends.append(ends[-1] + random.randint(1, 9))
    if random.random() < 0.7:
        ends[-1] = None
    return HeadPattern(tuple(zip(ends, strides)), random.randint(0, 40))


def load(heads, kv_heads):
    layout = build_layout(RangePattern(64, kv_heads, tuple(heads)))
    TABLE[:] = layout.ranges.flatten().tolist()
    return layout, layout.ranges.shape[1]


def visited(low, pack, n_ranges):
    """Per half of a query tile of head 0: how often each key block counts."""
    plan = SCHEDULE.plan_query_tile(0, 0, low, n_ranges, pack)
    firsts, strides, ends, edges, bits, previous = plan
    masked, masked_steps, free_steps = SCHEDULE.count_steps(ends, bits, n_ranges, pack)
    marks = SCHEDULE.marks_of(masked_steps, previous, masked, low, firsts, strides, ends, edges, bits, n_ranges)
    assert 0 <= marks < 2**31
    seen = Counter(), Counter()
    for step in range(1 + masked_steps + free_steps):
        blocks = SCHEDULE.step_blocks(step, low, masked, masked_steps, firsts, strides, ends, edges, bits, n_ranges, pack)
        for half in (0, 1):
            if step == 0 and pack:
                keep = True, marks & 2
            elif step == 0:
                keep = (half == 0 or marks & 1), half == 1
            elif step <= masked_steps:
                wanted = marks >> (4 * (step - 1) + 2 + half)
                keep = wanted & 1, wanted & 4
                assert all(wanted_block or block < low for block, wanted_block in zip(blocks, keep)), "a filler behind the document"
            else:
                keep = True, True
            seen[half].update(block for block, wanted_block in zip(blocks, keep) if wanted_block)
    return seen


@pytest.mark.parametrize("pack", [0, 1])
def test_query_tiles_visit_what_the_pattern_attends(pack):
    random = Random(pack)
    for _ in range(400):
        head = some_head(random)
        _, n_ranges = load([head], 1)
        low = random.randrange(0, 40) if pack else 2 * random.randrange(0, 20)
        for half, counts in enumerate(visited(low, pack, n_ranges)):
            expected = Counter(head.key_blocks(low + half * (1 - pack)).tolist())
            assert counts == expected, (head, low, half)


@pytest.mark.parametrize("mixed", [False, True])
def test_key_tiles_cover_every_block_once(mixed):
    """Each key block lies in one tile, and is visited by the query blocks that attend it."""
    random = Random(7 + mixed)
    for _ in range(200):
        heads = [some_head(random) for _ in range(2 if mixed else 1)]
        layout, n_ranges = load(heads, 1)
        n_blocks, distances = random.randint(1, 40), layout.pair_distances
        assert (distances is not None) == (len(set(heads)) > 1)
        n_long, n_rest = layout.key_columns(n_blocks)
        seen = Counter()
        for column in range(n_long + n_rest):
            if distances is None:
                is_long = column < n_long
                local = column if is_long else column - n_long
                own_long = SCHEDULE.long_columns(n_blocks, 0, 0, n_ranges)
                local = (1 << 28 if local >= own_long else local) if is_long else local + own_long
                pair = SCHEDULE.key_pair(local, n_blocks, 0, 0, n_ranges)
            else:
                first = column + column // int(distances[0]) * int(distances[0])
                pair = first, first + int(distances[0])
            first, second = (min(block, n_blocks) for block in pair)
            if first == n_blocks:
                continue
            seen.update(block for block in (first, second) if block < n_blocks)
            for index, head in enumerate(heads):
                steps, top, gap, first_end, second_end = SCHEDULE.query_run(first, second, n_blocks, 0, index, n_ranges)
                queries = [top - 1 - step - (gap if top - 1 - step < second else 0) for step in range(steps)]
                for block, end in ((first, first_end), (second, second_end)):
                    attending = [query for query in range(n_blocks) if block < n_blocks and block in head.key_blocks(query)]
                    assert attending == list(range(block, max(end, block))), (head, block)
                    assert set(attending) <= set(queries)
        assert seen == Counter(range(n_blocks)), (heads, n_blocks)


def test_the_quotient_is_exact():
    """Two units in the last place to either side, as far as the GPU's division may be off, change no result below 2**21."""
    random = np.random.default_rng(0)
    number = np.concatenate([random.integers(0, 2**21, 300000), np.arange(2**21 - 1000, 2**21)])
    wide = random.integers(1, 2**19, len(number))
    for divisor in (wide, np.maximum(number // np.maximum(wide % 50, 1), 1), 1 + wide % 64):
        exact = (number.astype(np.float32) + np.float32(0.5)) / divisor.astype(np.float32)
        for off in (-1, 0, 1):
            near = exact + off * np.spacing(exact)
            assert (near.astype(np.int32) == number // divisor).all()
