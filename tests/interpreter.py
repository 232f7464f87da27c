"""Triton's interpreter, a quarter quicker: it replaces the functions of `triton.language` once per launch.

It does so again in every call of a device function, where all of them are replaced already.
"""

from __future__ import annotations

from types import ModuleType


def patch_language_once() -> None:
    """To be called after Triton's import; calling again changes nothing."""
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    if getattr(executor.__call__, "patches_once", False):
        return
    patch_language, execute = interpreter._patch_lang, executor.__call__
    kinds: dict[int, frozenset[int]] = {}  # the modules that are visible from a function, by its namespace
    launches: list[set[frozenset[int]]] = []  # of those under way: what is replaced

    def patch_language_in(function):
        names = function.__globals__
        if id(names) not in kinds:
            modules = (value for value in names.values() if isinstance(value, ModuleType))
            kinds[id(names)] = frozenset(id(module) for module in modules if module.__name__.startswith("triton."))
        kind = kinds[id(names)]
        if launches and kind in launches[-1]:
            return None  # a device function's call, which ignores it
        if launches:
            launches[-1].add(kind)
        return patch_language(function)

    def launch(self, *arguments, **options):
        launches.append(set())
        try:
            return execute(self, *arguments, **options)
        finally:
            launches.pop()

    launch.patches_once = True
    interpreter._patch_lang, executor.__call__ = patch_language_in, launch
