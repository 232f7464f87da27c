"""Plans of windows alone: how many keys each head sees. It is all that engines with a sliding window can compute."""

from __future__ import annotations

from collections.abc import Callable

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern

HeadWindows = tuple[tuple[int | None, ...], ...]  # of each layer's query heads: keys, its own included; None: all
Refusal = Callable[[int, int, str, str], ValueError]  # of layer, head, what it has, what to train with instead


def head_windows(sparsity: ResolvedSparsity, refusal: Refusal) -> HeadWindows:
    """The window of every layer and query head. Raises what refusal makes for the first head that is neither dense nor
    has one exact window: strides, windows of blocks, sinks visible as tokens, block masks."""
    windows = []
    for layer, one in enumerate(sparsity.layers):
        if one.pattern is None:
            windows.append((None,) * sparsity.num_heads)
            continue
        if not isinstance(one.pattern, RangePattern):
            raise refusal(layer, 0, "a block mask", "with `window: 1024` in its place")
        size = one.pattern.block_size
        windows.append(tuple(_window(head, size, layer, at, refusal) for at, head in enumerate(one.pattern.heads)))
    return tuple(windows)


def _window(head: HeadPattern, block_size: int, layer: int, place: int, refusal: Refusal) -> int | None:
    if head.is_dense:
        return None
    ranges, _, window, sink_tokens, _ = head.canonical
    if strides := [stride for _, stride in ranges if stride > 1]:
        raise refusal(layer, place, f"stride {strides[0]}", "with `window: 1024` alone")
    if ranges:  # one, of the nearest blocks
        keys = ranges[0][0] * block_size
        shown = f"which shows {keys - block_size + 1} to {keys} keys"
        what = f"a window of blocks (local_blocks, local_tokens), {shown}"
        raise refusal(layer, place, what, f"with `window: {keys}` in its place")
    if sink_tokens:
        raise refusal(layer, place, f"sink_tokens {sink_tokens}", "without them")
    return window
