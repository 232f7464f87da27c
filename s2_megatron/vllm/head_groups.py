"""Which KV heads of a layer go into one attention of vLLM's: those that see the same keys.

vLLM's cache gives every attention pages of one size, and shares them best where all attentions have as many KV heads:
unequal ones get padded pages. So all groups of a model have one size, the largest that fits every layer.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from s2_megatron.config.head_windows import head_windows
from s2_megatron.config.sparsity import ResolvedSparsity

Windows = tuple[int | None, ...]  # of the KV heads of a layer: how many keys a query sees, its own included; None: all


class HeadGroup(NamedTuple):
    """KV heads with the same window (None: all keys), by their place in the model, ascending."""

    window: int | None
    kv_heads: tuple[int, ...]


def kv_head_windows(sparsity: ResolvedSparsity) -> tuple[Windows, ...]:
    """The windows of every layer. Raises ValueError for a head that is neither dense nor has one exact window, and
    where the query heads of one KV head differ."""
    ratio = sparsity.num_heads // sparsity.num_kv_heads
    layers = head_windows(sparsity, _refused)
    for layer, windows in enumerate(layers):
        for head, window in enumerate(windows):
            if window != windows[head // ratio * ratio]:
                mine, first = (
                    "all keys" if one is None else f"window {one}" for one in (window, windows[head // ratio * ratio])
                )
                what = f"{mine}, head {head // ratio * ratio} of the same KV head has {first}"
                raise _refused(layer, head, what, "with the same window for all query heads of a KV head")
    return tuple(windows[::ratio] for windows in layers)


def _refused(layer: int, head: int, what: str, fix: str) -> ValueError:
    return ValueError(
        f"vLLM: layer {layer}, head {head} has {what}; expected heads that are dense or have one exact window, which "
        f"is what vLLM's attention computes; train {fix}, or run the model where all plans run: in transformers "
        "(S2Cache) or with `s2-megatron generate`"
    )


def local_kv_heads(kv_heads: int, ranks: int, rank: int) -> range:
    """The KV heads that vLLM's QKVParallelLinear gives to a tensor-parallel rank; one head to several ranks where
    there are fewer heads than ranks. Raises ValueError where they cannot be divided."""
    most, least = max(kv_heads, ranks), min(kv_heads, ranks)
    if most % least:
        raise ValueError(
            f"tensor_parallel_size={ranks} for {kv_heads} KV heads; expected a divisor or a multiple of them; use "
            f"tensor_parallel_size={math.gcd(kv_heads, ranks)}"
        )
    first = rank * kv_heads // ranks
    return range(first, first + max(1, kv_heads // ranks))


def group_size(layers: Sequence[Windows], ranks: int = 1) -> int:
    """How many KV heads all groups of a model have: the largest number with which groups of one window fill every
    layer on every rank."""
    counts: set[int] = set()
    for windows in layers:
        for rank in range(ranks):
            counts |= set(Counter(windows[head] for head in local_kv_heads(len(windows), ranks, rank)).values())
    return math.gcd(*counts)


def head_groups(windows: Windows, heads: Sequence[int], size: int) -> tuple[HeadGroup, ...]:
    """The groups of `size` KV heads that `heads` of a layer form, by their first head. size: of group_size."""
    alike: dict[int | None, list[int]] = defaultdict(list)
    for head in heads:
        alike[windows[head]].append(head)
    groups = [
        HeadGroup(window, tuple(members[first : first + size]))
        for window, members in alike.items()
        for first in range(0, len(members), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.kv_heads))
