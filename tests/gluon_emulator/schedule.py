"""The schedule functions of the Hopper kernels, and their loading warps, as plain Python: loads read one list of
numbers."""

from itertools import count
from types import FunctionType, SimpleNamespace

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from s2_megatron.kernels.hopper import columns as hopper_columns
from s2_megatron.kernels.hopper import ranges as hopper_ranges
from s2_megatron.kernels.hopper import schedule as hopper_schedule
from s2_megatron.kernels.hopper import steps as hopper_steps
from s2_megatron.kernels.hopper import tokens as hopper_tokens
from s2_megatron.kernels.hopper import work_tiles as hopper_work_tiles
from s2_megatron.kernels.step_descriptor import LAST_STEP
from tests.gluon_emulator.translate import plain_class

TABLE: list[
    int
] = []  # what gl.load reads: the range table of the layout at hand, or all tensors of a launch one behind another
NO_PIPELINE = SimpleNamespace(
    stage=lambda count: 0, wait_empty=lambda count: None, full_barrier=lambda count: None, full=None
)


def where(condition, yes, no):
    found = np.where(condition, yes, no)
    return found if found.ndim else found.item()


STAND_IN = SimpleNamespace(load=lambda index: TABLE[index], where=where, maximum=max, minimum=min, static_range=range)


def plain_functions(*modules, **stand_ins):
    """The functions of the schedule and of other modules without their decorator, but for stand-ins. Integer division
    stands for the kernels' floating-point quotient; barriers and shared memory are not there."""
    namespace = {"gl": STAND_IN, "range": range, "quotient": lambda number, divisor: number // divisor}
    namespace.update(mbarrier=SimpleNamespace(arrive=lambda *_, count: None), **stand_ins)
    for module in (
        hopper_steps,
        hopper_ranges,
        hopper_schedule,
        hopper_tokens,
        hopper_columns,
        hopper_work_tiles,
        *modules,
    ):
        for name, value in vars(module).items():
            if name in namespace:
                continue
            if isinstance(value, gl.constexpr):
                namespace[name] = value.value
            elif hasattr(value, "aggregate_fields"):
                namespace[name] = plain_class(value)
                namespace[name].send = lambda *_, **__: None  # of a work tile, to nobody
            elif hasattr(value, "fn"):
                namespace[name] = FunctionType(value.fn.__code__, namespace, name)
    return SimpleNamespace(**namespace)


def on_memory(arguments):
    """Lays the tensors of a launch into TABLE. Returns what stands for the kernel's schedule: its arguments, tensors as
    where they begin in TABLE."""
    TABLE.clear()
    found = dict(fold=0, n_split=0, part_steps=0, sink_parts=1, SPLIT=False)
    for name, value in arguments.items():
        found[name] = len(TABLE) if isinstance(value, torch.Tensor) else value
        TABLE.extend(value.flatten().tolist() if isinstance(value, torch.Tensor) else [])
    found["counter_ptr"] = programs = count()
    STAND_IN.atomic_add = lambda counter, one: next(programs)
    lists = {f"{name}_ptr": found[f"list_{name}_ptr"] for name in ("rows", "tiles", "steps")}
    return SimpleNamespace(**found, lists=SimpleNamespace(**lists))


def joined(tiles, arguments):
    """Columns with the steps of all of their parts. A part comes behind the one before it, and is of the same size, but
    for the last."""
    columns, places = {}, {}
    for tile in tiles:
        last, part, place = tile.link & 1, tile.link >> 1 & 0x7FF, tile.link >> 12
        key = tile.batch, tile.kv_head, tile.first
        assert [step & LAST_STEP for step in tile.steps] == [0] * (len(tile.steps) - 1) + [LAST_STEP], (
            "last: once, at the end"
        )
        if not last:
            assert len(tile.steps) == arguments["part_steps"]
            tile.steps[-1] -= LAST_STEP
        if last and part == 0:
            assert key not in columns
            columns[key] = tile
            continue
        assert len(tile.steps) <= arguments["part_steps"]
        assert place < (arguments["n_split"] + arguments["n_sink"]) * arguments["units"]
        assert (part, key) == places.get(place, (0, key))
        places[place] = (None if last else part + 1), key
        if part == 0:
            columns[key] = tile
        else:
            columns[key].steps += tile.steps
    assert all(part is None for part, _ in places.values()), "a column without an end"
    return list(columns.values())
