"""Checks of arguments that every function of the Python API shares: each ValueError names the argument, the value, what
was expected and what to do."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

Ranges = tuple[tuple[int | None, int], ...]  # ((end in blocks or None, stride), ...)
LARGEST_STRIDE = 2**24  # blocks; kernels compute with 32-bit integers
LARGEST_END = 2**40  # blocks; host arithmetic is int64
LARGEST_OFFSET = 2**44
LARGEST_BLOCK_SIZE = 2**16
HEAD_DIM_LIMIT = 256  # of the kernels and the reference
SMALLEST_SCALE, LARGEST_SCALE = 1e-6, 1e6  # of the softmax: beyond them scores vanish, or overflow in fp32
MOST_HEADS = 2**16
MOST_LAYERS = 2**16
MOST_TOKENS = 2**40
LARGEST_WINDOW = 2**30  # tokens
MOST_SINK_TOKENS = 2**16


def shown(value: Any, most: int = 60) -> str:
    """A value as Python writes it, short enough for one line."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "shape"):  # its repr may wait for a GPU
        return f"a {type(value).__name__} of shape {list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def check_integer(name: str, value: Any, low: int, high: int, fix: str) -> int:
    """The value as an int. fix: what to do, e.g. "use 64".

    Raises ValueError for anything that is not an integer from low to high. NumPy's integers are accepted; booleans,
    floats, text and tensors are not.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__") or hasattr(value, "backward"):
            raise ValueError(f"{name}={shown(value)}; expected an integer, {low} to {high}; {fix}")
        try:
            value = operator.index(value)
        except TypeError as error:  # an array, for example
            raise ValueError(f"{name}={shown(value)}; expected an integer, {low} to {high}; {fix}") from error
        if isinstance(value, bool):
            raise ValueError(f"{name}={value}; expected an integer, {low} to {high}; {fix}")
    if not low <= value <= high:
        raise ValueError(f"{name}={value}; expected {low} to {high}; {fix}")
    return value


def check_integers(name: str, values: Any, dims: int, fix: str) -> np.ndarray:
    """Integers of any kind as a NumPy array of `dims` dimensions, of their own dtype (int64 for an empty list). Raises
    ValueError for anything else, a tensor on a GPU too."""
    expected = f"expected integers, {dims}-D; {fix}"
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; tensors on a GPU or with gradients
        raise ValueError(f"{name}={shown(values)}; {expected}") from error
    if array.ndim != dims or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} has dtype {array.dtype} and {array.ndim} dimensions; {expected}")
    return array if array.size else array.astype(np.int64)


def check_sequence(name: str, value: Any, expected: str, fix: str) -> tuple:
    """A list or tuple as a tuple. Raises ValueError for anything else."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}={shown(value)}; expected {expected}; {fix}")
    return tuple(value)


def check_tokens(window, sink_tokens, block_size) -> tuple[int | None, int, int | None]:
    """The three as ints, or None. Raises ValueError unless window is None or a number of tokens, sink_tokens one or 0,
    and block_size is given with either."""
    if window is not None:
        window = check_integer(
            "window", window, 1, LARGEST_WINDOW, "use the number of tokens that a query sees, itself included"
        )
    sink_tokens = check_integer(
        "sink_tokens", sink_tokens, 0, MOST_SINK_TOKENS, "use the number of first tokens that all see, e.g. 4"
    )
    if block_size is not None or window is not None or sink_tokens:
        block_size = check_block_size(block_size)
    return window, sink_tokens, block_size


def check_ranges(ranges, beside_window: bool = False) -> Ranges:
    """Ranges as tuples of integers. Raises ValueError for anything but ((end or None, stride), ...), ends growing, the
    first stride 1. beside_window: that may be any, and there may be no range."""
    example = "use for example ((16, 1), (None, 16)), or ((None, 1),) for dense attention"
    expected = "a list or tuple of (end in blocks or None, stride)"
    checked, previous = [], 0
    for position, item in enumerate(check_sequence("ranges", ranges, expected, example)):
        name = f"ranges[{position}]"
        end, stride = pair if len(pair := check_sequence(name, item, "(end, stride)", example)) == 2 else (False, False)
        if end is False:
            raise ValueError(f"{name}={shown(item)}; expected two entries, (end in blocks or None, stride); {example}")
        first = position == 0 and not beside_window
        why = "use 1: a token must see its own block" if first else f"use 1 to {LARGEST_STRIDE} blocks"
        stride = check_integer(f"the stride of {name}", stride, 1, 1 if first else LARGEST_STRIDE, why)
        if end is None and position != len(ranges) - 1:
            raise ValueError(f"the end of {name}=None; only the last range may have no end; use {previous + 16}")
        if end is not None:
            fix = f"the ends must grow; use {previous + 1} or more"
            previous = end = check_integer(f"the end of {name}", end, previous + 1, LARGEST_END, fix)
        checked.append((end, stride))
    if not checked and not beside_window:
        raise ValueError(f"ranges={shown(ranges)}; expected at least one (end, stride); {example}")
    return tuple(checked)


def check_block_size(block_size) -> int:
    """The block size as an int. Raises ValueError unless it is a power of two."""
    block_size = check_integer("block_size", block_size, 1, LARGEST_BLOCK_SIZE, "use a power of two, e.g. 64")
    if block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size}; expected a power of two; use e.g. 64")
    return block_size


def check_shape(block_size, num_heads, num_kv_heads) -> tuple[int, int, int]:
    """(block_size, num_heads, num_kv_heads) as ints. Raises ValueError unless block_size is a power of two and
    num_heads a multiple of num_kv_heads."""
    block_size = check_block_size(block_size)
    num_heads = check_integer("num_heads", num_heads, 1, MOST_HEADS, "use the number of query heads")
    num_kv_heads = check_integer("num_kv_heads", num_kv_heads, 1, MOST_HEADS, "use the number of KV heads")
    if num_heads % num_kv_heads:
        near = max(count for count in range(1, num_kv_heads) if num_heads % count == 0)
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}; expected the same number of "
            f"query heads for every KV head; use e.g. num_kv_heads={near}"
        )
    return block_size, num_heads, num_kv_heads
