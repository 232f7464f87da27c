"""The schedule functions of the Hopper kernels, and their loading warps, as plain Python: loads read one list of numbers."""

from itertools import count
from types import FunctionType, SimpleNamespace

import numpy as np
import torch

from s2_megatron.kernels import hopper_columns, hopper_schedule

TABLE: list[int] = []  # what gl.load reads: the range table of the layout at hand, or all tensors of a launch one behind another
NO_BARRIER = SimpleNamespace(index=lambda slot: None)
BARRIERS = (NO_BARRIER,) * 8


def where(condition, yes, no):
    found = np.where(condition, yes, no)
    return found if found.ndim else found.item()


STAND_IN = SimpleNamespace(load=lambda index: TABLE[index], where=where, maximum=max, minimum=min, static_range=range)


def plain_functions(*modules, **stand_ins):
    """The functions of the schedule and of other modules without their decorator, but for stand-ins. Integer division stands for the kernels'
    floating-point quotient; barriers and shared memory are not there."""
    namespace = {"gl": STAND_IN, "range": range, "quotient": lambda number, divisor: number // divisor, "BLOCK": 64}
    namespace.update(mbarrier=SimpleNamespace(wait=lambda *_: None, arrive=lambda *_, count: None), send_plan=lambda *_: None, **stand_ins)
    for module in (hopper_schedule, hopper_columns, *modules):
        for name, value in vars(module).items():
            if hasattr(value, "fn") and name not in namespace:
                namespace[name] = FunctionType(value.fn.__code__, namespace, name)
    return SimpleNamespace(**namespace)


def on_memory(arguments):
    """Lays the tensors of a launch into TABLE. Returns take("names of arguments"): their values, or where they begin in it."""
    TABLE.clear()
    found = {}
    for name, value in arguments.items():
        found[name] = len(TABLE) if isinstance(value, torch.Tensor) else value
        TABLE.extend(value.flatten().tolist() if isinstance(value, torch.Tensor) else [])
    found["counter"] = programs = count()
    STAND_IN.atomic_add = lambda counter, one: next(programs)
    return lambda names: tuple(found[name] for name in names.split())
