"""The arms of the studies: one model with many sparsities.

`s2` is all layers with a window and, beyond it, one block in the stride, another one in each KV head. The other arms
change one thing of it: which layers are dense, which heads, the stride, the window, or the offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

BASELINE, SHARDED = "dense", "s2"
BEFORE_SHARE = 0.8

# {name: (number of layers) -> the dense ones, from 0}
PLACEMENTS: dict[str, Callable[[int], Iterable[int]]] = {
    "none": lambda layers: (),
    "all": range,
    "first two": lambda layers: range(2),
    "middle two": lambda layers: range(layers // 2 - 1, layers // 2 + 1),
    "last two": lambda layers: range(layers - 2, layers),
    "every fourth": lambda layers: range(3, layers, 4),  # the last of each four, as Llama 4 has them
    "middle one": lambda layers: (layers // 2 - 1,),
}


@dataclass(frozen=True)
class Arm:
    """name: of files and of `--arms`. dense: which layers are, a key of PLACEMENTS. spec: keys of the sparse layers'
    spec beside the study's window and stride, or in their place. window_alone: no stride, and a window of as many
    pairs as `s2`. whole_spec: `spec` is all of it. chosen: so many KV heads over all layers are dense beside that (with
    by_layer: so many layers), other ones in every seed: chosen.py measures on the seed's dense model which, beside the
    sparse heads of the study's `measured_beside`, or, with own_choice, of this arm; ranked_on: a kind of ranked.py's
    sequences, empty for the text that the dense model did not read. offset: learnable softmax offsets, begun by
    offsets.py. before: the arm as which the first BEFORE_SHARE of the tokens are trained."""

    name: str
    dense: str = "none"
    spec: Mapping = field(default_factory=dict)
    window_alone: bool = False
    whole_spec: bool = False
    chosen: int = 0
    own_choice: bool = False
    by_layer: bool = False
    ranked_on: str = ""
    offset: bool = False
    before: str = ""


_DENSE = Arm(BASELINE, dense="all")
WINDOW = Arm("window", window_alone=True)
_ONE_OFFSET = Arm("one-offset", spec=dict(head_step=0, layer_step=0))
FOURTH = Arm("dense-fourth", dense="every fourth")
BY_QUERY_HEAD = Arm("offsets-query", spec=dict(slide="query"))
_HYBRID = Arm("hybrid", dense="first two")
CONTROLLED = (_DENSE, _HYBRID, Arm(SHARDED), _ONE_OFFSET, WINDOW)


def stride_arm(stride: int) -> Arm:
    return Arm(f"stride-{stride}", spec=dict(stride=stride))


def window_arm(window: int) -> Arm:
    return Arm(f"window-{window}", spec=dict(local_tokens=window))


def heads_arm(count: int) -> Arm:
    """count: KV heads of every layer that are dense."""
    return Arm("dense-heads", spec=dict(dense_heads={"spread": count}))


def chosen_arms(count: int, window: int, stride: int) -> tuple[Arm, ...]:
    """count: KV heads over all layers, as many as `dense-heads` has. The other arms have a quarter of it: the same ones
    beside the heads of `s2`, beside windows alone, which says whether the strides are needed, and beside heads of twice
    the window and the stride. `own-window` has those that matter most beside windows."""
    few = max(1, count // 4)
    return (
        Arm("chosen-heads", chosen=count),
        Arm("chosen-few", chosen=few),
        Arm("chosen-window", window_alone=True, chosen=few),
        Arm("own-window", window_alone=True, chosen=few, own_choice=True),
        Arm("chosen-wide", spec=dict(local_tokens=2 * window, stride=2 * stride), chosen=few),
    )


# Of four KV heads one is dense: of a multiple of four layers, as many pairs as every fourth layer.
WITH_HYBRIDS = (*CONTROLLED, FOURTH, heads_arm(1))


def long_arms(stride: int) -> tuple[Arm, ...]:
    """Dense, dense-fourth, s2, window, and s2 with twice and four times the stride."""
    return (_DENSE, FOURTH, Arm(SHARDED), WINDOW, stride_arm(2 * stride), stride_arm(4 * stride))


def rules_arms(window: int, stride: int, dense_heads: int) -> tuple[Arm, ...]:
    """What is tried around `s2` with a window of `window` tokens and this stride. dense_heads: KV heads of every layer,
    as many as have the pairs of two dense layers."""
    return (
        Arm(SHARDED),
        _HYBRID,
        Arm("dense-middle", dense="middle two"),
        Arm("dense-last", dense="last two"),
        FOURTH,
        Arm("dense-one", dense="middle one"),
        _DENSE,
        heads_arm(dense_heads),
        *(stride_arm(each) for each in _strides(stride) if each != stride),
        *(window_arm(each) for each in _windows(window) if each != window),
        Arm("offsets-layer", spec=dict(head_step=0, layer_step=1)),
        Arm("offsets-both", spec=dict(layer_step=1)),
        Arm("offsets-half", spec=dict(head_step=2, layer_step=1)),  # as with half as many KV heads as the stride
        _ONE_OFFSET,
    )


def _strides(stride: int) -> tuple[int, ...]:
    return stride // 2, stride, 2 * stride, 4 * stride


def _windows(window: int) -> tuple[int, ...]:
    return window // 4, window // 2, window, 2 * window
