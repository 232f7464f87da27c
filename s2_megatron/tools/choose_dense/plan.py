"""A plan of S2 layers with more KV heads dense: its patterns, and the YAML that says the same."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import yaml

from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.schema import S2Config, SpecConfig
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.patterns.head import DENSE, HeadPattern
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.tools.choose_dense.search import Unit

HEAD, LAYER = "head", "layer"  # of --by


def dense_kv_heads(pattern: RangePattern) -> list[int]:
    """KV heads whose query heads all attend everything."""
    ratio = pattern.num_heads // pattern.num_kv_heads
    heads = [pattern.heads[kv * ratio : (kv + 1) * ratio] for kv in range(pattern.num_kv_heads)]
    return [kv for kv, own in enumerate(heads) if all(head.is_dense for head in own)]


def candidates(sparsity: ResolvedSparsity, by: str) -> list[Unit]:
    """What can become dense: every sparse KV head, or, by LAYER, those of a layer together. Layers that attend
    everything at this length have none. The patterns are those of ranges."""
    units = []
    for at, layer in enumerate(sparsity.layers):
        if layer.pattern is None or layer.pattern.density(sparsity.seq_length) == 1:
            continue
        dense = dense_kv_heads(layer.pattern)
        sparse = [kv for kv in range(sparsity.num_kv_heads) if kv not in dense]
        units += [Unit(at, (kv,)) for kv in sparse] if by == HEAD else [Unit(at, tuple(sparse))]
    return units


def _all_dense_heads(layer: LayerSparsity, num_kv_heads: int) -> set[int]:
    """KV heads that attend everything at any length."""
    return set(range(num_kv_heads)) if layer.pattern is None else set(dense_kv_heads(layer.pattern))


def sparse_in(sparsity: ResolvedSparsity, units: Sequence[Unit]) -> list[Unit]:
    """The units without the heads that are dense in a plan already."""
    left = []
    for unit in units:
        dense = _all_dense_heads(sparsity.layers[unit.layer], sparsity.num_kv_heads)
        heads = tuple(head for head in unit.heads if head not in dense)
        left += [Unit(unit.layer, heads)] if heads else []
    return left


def dense_in_one(one: ResolvedSparsity, other: ResolvedSparsity) -> list[tuple[int, int]]:
    """(layer, KV head) of those that attend everything at the length of the first plan, in it, and are sparse in the
    second at some length."""
    found = []
    for at, (first, second) in enumerate(zip(one.layers, other.layers, strict=True)):
        whole = first.pattern is None or first.pattern.density(one.seq_length) == 1
        dense = set(range(one.num_kv_heads)) if whole else _all_dense_heads(first, one.num_kv_heads)
        found += [(at, head) for head in sorted(dense - _all_dense_heads(second, other.num_kv_heads))]
    return found


def with_dense(sparsity: ResolvedSparsity, units: Sequence[Unit]) -> ResolvedSparsity:
    """The plan with these units dense. A layer whose KV heads are all dense is D."""
    added: dict[int, set[int]] = {}
    for unit in units:
        added.setdefault(unit.layer, set()).update(unit.heads)
    ratio = sparsity.num_heads // sparsity.num_kv_heads
    layers = []
    for at, layer in enumerate(sparsity.layers):
        pattern = layer.pattern
        if pattern is not None and at in added:
            heads = (
                HeadPattern(DENSE) if head // ratio in added[at] else own for head, own in enumerate(pattern.heads)
            )
            pattern = RangePattern(pattern.block_size, pattern.num_kv_heads, tuple(heads))
        is_dense = pattern is None or all(head.is_dense for head in pattern.heads)
        layers.append(LayerSparsity("D", None) if is_dense else LayerSparsity(layer.spec, pattern))
    return replace(sparsity, layers=tuple(layers), notes=())


def all_dense(sparsity: ResolvedSparsity) -> ResolvedSparsity:
    return replace(sparsity, layers=(LayerSparsity("D", None),) * len(sparsity.layers), notes=())


def sink_tokens(sparsity: ResolvedSparsity) -> int:
    """The largest number that a head has; 0 without sinks."""
    heads = [head for layer in sparsity.layers if layer.pattern is not None for head in layer.pattern.heads]
    return max((head.sink_tokens for head in heads), default=0)


def with_sink(sparsity: ResolvedSparsity, tokens: int) -> ResolvedSparsity:
    """The plan whose sparse heads have sinks of so many tokens, 0 for none. The patterns are those of ranges."""
    layers = []
    for layer in sparsity.layers:
        pattern = layer.pattern
        if pattern is not None:
            heads = tuple(
                head
                if head.is_dense
                else HeadPattern(
                    head.ranges, head.offset, head.window, tokens,
                    pattern.block_size if tokens or head.window is not None else None,
                )
                for head in pattern.heads
            )  # fmt: skip
            pattern = RangePattern(pattern.block_size, pattern.num_kv_heads, heads)
        layers.append(LayerSparsity(layer.spec, pattern))
    return replace(sparsity, layers=tuple(layers), notes=())


def count_dense(sparsity: ResolvedSparsity) -> int:
    """Dense KV heads of all layers together."""
    return sum(
        sparsity.num_kv_heads if layer.pattern is None else len(dense_kv_heads(layer.pattern))
        for layer in sparsity.layers
    )


def yaml_content(settings: S2Config, sparsity: ResolvedSparsity, units: Sequence[Unit]) -> dict:
    """The content of a YAML of the plan with these units dense. settings, sparsity: the plan without them.

    Layers that differ in their dense heads have specs of their own, so that `layer_step`, which counts the layers of a
    spec, cannot say their offsets any more: they stand in `base_offset`, and every sparse head keeps its own.
    """
    chosen = with_dense(sparsity, units)
    first: dict[str, RangePattern] = {}  # of every spec
    specs: dict[str, dict] = {}
    plan = []
    for before, after in zip(sparsity.layers, chosen.layers):
        if before.pattern is not None:
            first.setdefault(before.spec, before.pattern)
        if after.pattern is None:
            plan.append("D")
            continue
        spec = settings.specs[before.spec]
        own = spec.model_dump(exclude_unset=True, exclude_none=True)
        own |= {"base_offset": _base_offset(spec, first[before.spec], before.pattern), "layer_step": 0}
        own |= {"dense_heads": dense_kv_heads(after.pattern)}
        own = {key: value for key, value in own.items() if value or key not in ("base_offset", "dense_heads")}
        plan.append(_name_of(own, before.spec, specs, settings.specs))
    scale = {} if settings.softmax_scale is None else {"softmax_scale": settings.softmax_scale}
    content = {"block_size": settings.block_size, "layers": plan, **scale, "specs": specs}
    resolved = SparsityConfig.from_data(content).resolve(
        num_layers=len(sparsity.layers),
        num_heads=sparsity.num_heads,
        num_kv_heads=sparsity.num_kv_heads,
        seq_length=sparsity.seq_length,
    )
    assert resolved.canonical_json() == chosen.canonical_json(), content
    return content


def _base_offset(spec: SpecConfig, first: RangePattern, pattern: RangePattern) -> int:
    """The base_offset with which the first layer of a spec has the offsets of `pattern`, another of its layers."""
    sparse = next(at for at, head in enumerate(first.heads) if not head.is_dense)
    moved = pattern.heads[sparse].offset - first.heads[sparse].offset
    period = math.lcm(*(stride for _, stride in first.heads[sparse].touched_ranges))
    return (spec.base_offset + moved) % period if moved else spec.base_offset


def _name_of(own: dict, base: str, specs: dict[str, dict], others: dict[str, SpecConfig]) -> str:
    """The name of a spec with these keys, which is added to `specs` where it is not there: `base`, or with a number
    behind it that no spec of `others` has."""
    for name, there in specs.items():
        if json.dumps(there, sort_keys=True) == json.dumps(own, sort_keys=True):
            return name
    taken = {name.lower() for name in (*specs, *others)} | {"d"}
    number, name = 0, base
    while name in specs or (number and name.lower() in taken):
        number += 1
        name = f"{base}{number}"
    specs[name] = own
    return name


def yaml_text(content: dict, comment: Sequence[str]) -> str:
    """comment: lines of the header, without their #."""
    body = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)
    return "".join(f"# {line}\n" for line in comment) + body
