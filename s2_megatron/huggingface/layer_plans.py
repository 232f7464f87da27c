"""What each layer of a model attends, looked up by the content of the sparsity in its config.

Never by the module or the config as objects: a config may be changed, and torch.compile takes modules for one another.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.config.stored import sparsity_from_stored
from s2_megatron.ops.layout import Layout, layout_for
from s2_megatron.patterns.ranges import Pattern, RangePattern

MOST_KNOWN = 16


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """pattern, layout: None where the layer is dense. kept_pattern, kept_layout: the same, or a pattern of all blocks
    where the layer is dense. scale: the softmax scale that is stored with the sparsity; None: the model's own."""

    pattern: Pattern | None
    layout: Layout | None
    kept_pattern: Pattern
    kept_layout: Layout
    scale: float | None


class _Known(NamedTuple):
    stored: dict
    sparsity: ResolvedSparsity
    plans: tuple[LayerPlan, ...]


_known: tuple[_Known, ...] = ()  # newest first; replaced as a whole, for threads


def resolved_sparsity(config) -> ResolvedSparsity:
    """The sparsity in any transformers config with the field s2_sparsity, as it is now. Equal ones share the object.

    Raises ValueError when there is none: attention over a model without sparsity would be dense without a word.
    """
    return _look_up(config).sparsity


def layer_plans(config) -> tuple[LayerPlan, ...]:
    """Of every layer, by layer_idx. Raises ValueError as resolved_sparsity does, and for the sparsity of a model with
    fewer layers or other heads than the config's."""
    known = _look_up(config)
    heads = config.num_attention_heads
    wanted = (config.num_hidden_layers, heads, getattr(config, "num_key_value_heads", None) or heads)
    stored = (len(known.plans), known.sparsity.num_heads, known.sparsity.num_kv_heads)
    if wanted[0] > stored[0] or wanted[1:] != stored[1:]:
        raise other_shape(stored, wanted)
    return known.plans


def other_shape(stored: tuple[int, int, int], wanted: tuple[int, int, int]) -> ValueError:
    """layers, query heads, KV heads."""
    return ValueError(
        f"s2_sparsity is of a model with {stored[0]} layers, {stored[1]} query and {stored[2]} KV heads; "
        f"the config has {wanted[0]}, {wanted[1]} and {wanted[2]}; "
        "resolve the sparsity for this model's shape"
    )


def _look_up(config) -> _Known:
    stored = getattr(config, "s2_sparsity", None)
    if stored is None:
        raise ValueError(
            f"the config of type {config.model_type!r} has no s2_sparsity, so the attention 's2' does not know what to "
            "attend; set config.s2_sparsity = stored_sparsity(...) (s2_megatron.config.stored), or load a folder that "
            "s2-megatron export-hf wrote"
        )
    global _known
    for known in _known:
        if known.stored == stored:
            return known
    sparsity = sparsity_from_stored(stored)
    with torch.inference_mode(False):  # layouts stay, and a training may come after an evaluation
        made: dict[Pattern | None, LayerPlan] = {}
        for layer in sparsity.layers:
            if layer.pattern not in made:
                made[layer.pattern] = _plan(layer.pattern, sparsity)
    known = _Known(copy.deepcopy(stored), sparsity, tuple(made[layer.pattern] for layer in sparsity.layers))
    _known = (known, *_known[: MOST_KNOWN - 1])
    return known


def _plan(pattern: Pattern | None, sparsity: ResolvedSparsity) -> LayerPlan:
    kept = kept_pattern(pattern, sparsity)
    layout = layout_for(kept)
    return LayerPlan(pattern, None if pattern is None else layout, kept, layout, sparsity.softmax_scale)


def kept_pattern(pattern: Pattern | None, sparsity: ResolvedSparsity) -> Pattern:
    """The pattern itself; of all blocks where the layer is dense (None)."""
    if pattern is None:
        return RangePattern.dense(sparsity.block_size, sparsity.num_heads, sparsity.num_kv_heads)
    return pattern
