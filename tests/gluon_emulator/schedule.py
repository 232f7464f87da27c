"""The schedule functions of the Hopper kernels, and their loading warps, as plain Python: loads read one list of
numbers."""

from itertools import count
from types import FunctionType, SimpleNamespace

import numpy as np
import torch

from s2_megatron.kernels.hopper import columns as hopper_columns
from s2_megatron.kernels.hopper import schedule as hopper_schedule

TABLE: list[
    int
] = []  # what gl.load reads: the range table of the layout at hand, or all tensors of a launch one behind another
NO_BARRIER = SimpleNamespace(index=lambda slot: None)
BARRIERS = (NO_BARRIER,) * 8


def where(condition, yes, no):
    found = np.where(condition, yes, no)
    return found if found.ndim else found.item()


STAND_IN = SimpleNamespace(load=lambda index: TABLE[index], where=where, maximum=max, minimum=min, static_range=range)


def plain_functions(*modules, **stand_ins):
    """The functions of the schedule and of other modules without their decorator, but for stand-ins. Integer division
    stands for the kernels' floating-point quotient; barriers and shared memory are not there."""
    namespace = {"gl": STAND_IN, "range": range, "quotient": lambda number, divisor: number // divisor, "BLOCK": 64}
    namespace.update(
        mbarrier=SimpleNamespace(wait=lambda *_: None, arrive=lambda *_, count: None),
        send_plan=lambda *_: None,
        **stand_ins,
    )
    for module in (hopper_schedule, hopper_columns, *modules):
        for name, value in vars(module).items():
            if hasattr(value, "fn") and name not in namespace:
                namespace[name] = FunctionType(value.fn.__code__, namespace, name)
    return SimpleNamespace(**namespace)


def on_memory(arguments):
    """Lays the tensors of a launch into TABLE. Returns take("names of arguments"): their values, or where they begin in
    it."""
    TABLE.clear()
    found = {}
    for name, value in arguments.items():
        found[name] = len(TABLE) if isinstance(value, torch.Tensor) else value
        TABLE.extend(value.flatten().tolist() if isinstance(value, torch.Tensor) else [])
    found["counter"] = programs = count()
    STAND_IN.atomic_add = lambda counter, one: next(programs)
    return lambda names: tuple(found[name] for name in names.split())


def joined(tiles, arguments):
    """Columns with the words of all of their parts. A part comes behind the one before it, and is of the same size, but
    for the last."""
    columns, places = {}, {}
    for tile in tiles:
        last, part, place = tile.link & 1, tile.link >> 1 & 0x7FF, tile.link >> 12
        key = tile.batch, tile.kv_head, tile.first
        assert [word >> 4 & 1 for word in tile.words] == [0] * (len(tile.words) - 1) + [1], "last: once, at the end"
        if not last:
            assert len(tile.words) == arguments["part_steps"]
            tile.words[-1] -= 16
        if last and part == 0:
            assert key not in columns
            columns[key] = tile
            continue
        assert len(tile.words) <= arguments["part_steps"] and place < arguments["n_split"] * arguments["units"]
        assert (part, key) == places.get(place, (0, key))
        places[place] = (None if last else part + 1), key
        if part == 0:
            columns[key] = tile
        else:
            columns[key].words += tile.words
    assert all(part is None for part, _ in places.values()), "a column without an end"
    return list(columns.values())
