"""The op across context-parallel ranks: what each rank needs, how it travels, and what is computed meanwhile.

    from s2_megatron.context_parallel import ContextParallel

The name is imported when it is first asked for: the plan alone (plan.py) needs no torch.
"""

from importlib import import_module

__all__ = ["ContextParallel"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module("s2_megatron.context_parallel.attention"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
