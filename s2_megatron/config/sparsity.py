"""The sparsity of a whole model, layer by layer: what a config resolves to, what a checkpoint stores, and what
start-up prints.

Layers are 0-based and global here; Megatron's own layer numbers are 1-based.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rich.table import Table

from s2_megatron.patterns.ranges import Pattern, period_coverage

FORMAT = 1  # of canonical_json; a checkpoint carries it
DENSE = {"kind": "dense"}  # the canonical form of dense attention, whoever computes it and in whatever block size


def canonical_pattern(pattern: Pattern | None) -> dict:
    """JSON-able form that is equal for two layers iff they compute the same attention. None: a dense layer."""
    if pattern is None:
        return DENSE
    form = pattern.canonical()
    if form["kind"] == "ranges" and all(group["ranges"] == [[None, 1]] for group in form["groups"]):
        return DENSE
    return form


@dataclass(frozen=True)
class LayerSparsity:
    """One layer. spec: its name in the plan. pattern: None for the predefined dense spec `D`."""

    spec: str
    pattern: Pattern | None

    @property
    def kind(self) -> str:
        """ "dense" or "s2"."""
        return "dense" if self.pattern is None else "s2"


@dataclass(frozen=True)
class ResolvedSparsity:
    """Every layer's sparsity. Equal layers share one Pattern object.

    layers: the decoder's, in global order. mtp_layers: the multi-token-prediction layers. softmax_scale: for every
    layer of the model, dense ones included; None leaves Megatron's 1/sqrt(head dim). seq_length: the one that tables
    and densities are computed for. notes: remarks worth printing. places: where `layers` stand among all layers of a
    model that has others, too (Megatron's HybridModel), in order; empty where they are all of them. mtp_places: where
    `mtp_layers` stand in their own depth of such a model.
    """

    layers: tuple[LayerSparsity, ...]
    mtp_layers: tuple[LayerSparsity, ...]
    softmax_scale: float | None
    block_size: int
    num_heads: int
    num_kv_heads: int
    seq_length: int
    notes: tuple[str, ...] = field(default=(), compare=False)
    places: tuple[int, ...] = field(default=(), compare=False)
    mtp_places: tuple[int, ...] = field(default=(), compare=False)

    def place(self, layer: int) -> int:
        """The index of a layer of `all_layers` among all layers of the model; Megatron counts those of multi-token
        prediction from the start again."""
        if layer < len(self.layers):
            return self.places[layer] if self.places else layer
        layer -= len(self.layers)
        return self.mtp_places[layer] if self.mtp_places else layer

    @property
    def all_layers(self) -> tuple[LayerSparsity, ...]:
        return self.layers + self.mtp_layers

    def canonical_json(self) -> str:
        """JSON text, equal for two models iff they compute the same attention: names of specs, the file's name,
        comments and the sequence length play no part. Checkpoints store it."""
        patterns: list[dict] = []

        def index_of(layer: LayerSparsity) -> int:
            form = forms[id(layer.pattern)]
            if form not in patterns:
                patterns.append(form)
            return patterns.index(form)

        forms = {id(layer.pattern): canonical_pattern(layer.pattern) for layer in self.all_layers}
        content = {
            "format": FORMAT,
            "softmax_scale": self.softmax_scale,
            "layers": [index_of(layer) for layer in self.layers],
            "mtp_layers": [index_of(layer) for layer in self.mtp_layers],
            "patterns": patterns,
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":"))

    def layer_pairs(self, layer: LayerSparsity, seq_length: int | None = None) -> int:
        """(query, key) token pairs that one layer attends in one sequence, summed over its query heads."""
        length = self.seq_length if seq_length is None else seq_length
        return dense_pairs(self.num_heads, length) if layer.pattern is None else layer.pattern.attended_pairs(length)

    def attended_pairs(self, seq_length: int | None = None) -> int:
        """The pairs of all layers together, dense and multi-token-prediction layers included."""
        return sum(self.layer_pairs(layer, seq_length) for layer in self.all_layers)

    def density(self, seq_length: int | None = None) -> float:
        """attended_pairs over those of the same model with dense attention."""
        length = self.seq_length if seq_length is None else seq_length
        return self.attended_pairs(length) / (dense_pairs(self.num_heads, length) * len(self.all_layers))

    @cached_property
    def n_blocks(self) -> int:
        return -(-self.seq_length // self.block_size)

    def spec_coverage(self) -> dict[str, tuple[int, float]]:
        """{spec: (layers, coverage)}: how many consecutive layers of an S2 spec it takes until their coverage no
        longer grows, and the share of the causal blocks that their heads attend together."""
        result = {}
        for spec in dict.fromkeys(layer.spec for layer in self.all_layers if layer.pattern is not None):
            patterns = {id(layer.pattern): layer.pattern for layer in self.all_layers if layer.spec == spec}
            distinct = list(patterns.values())
            total = period_coverage(distinct, self.n_blocks)
            # Coverage grows with the layers, so that the first number that reaches it can be searched by halves.
            before = bisect_left(
                range(1, len(distinct)), total, key=lambda count: period_coverage(distinct[:count], self.n_blocks)
            )
            result[spec] = (before + 1, total)
        return result

    def table(self, core_modules: Sequence[str] | None = None) -> Table:
        """A rich table with one row per group of layers that read the same, and the totals beneath. (Layers of one row
        may differ in their offsets.)

        core_modules: what computes each layer of `all_layers`, shown as one more column.
        Raises ValueError when its length is not the number of layers.
        """
        layers = self.all_layers
        if core_modules is not None and len(core_modules) != len(layers):
            raise ValueError(f"core_modules has {len(core_modules)} entries; expected {len(layers)}, one per layer")
        groups: dict[tuple[str, ...], list[str]] = {}
        texts = {id(layer.pattern): self._texts(layer.pattern) for layer in layers}
        for index, layer in enumerate(layers):
            name = str(index) if index < len(self.layers) else f"mtp {index - len(self.layers)}"
            core = [core_modules[index]] if core_modules is not None else []
            groups.setdefault((layer.spec, layer.kind, *texts[id(layer.pattern)], *core), []).append(name)

        table = Table(
            title=f"Attention of {len(self.layers)} layers"
            + (f" and {len(self.mtp_layers)} multi-token-prediction layers" if self.mtp_layers else "")
            + f", {self.num_heads} query / {self.num_kv_heads} KV heads, {self.seq_length} tokens, "
            f"blocks of {self.block_size}",
            caption=self.summary(),
            caption_justify="left",
            title_justify="left",
        )
        for name in ("layer", "spec", "kind", "pattern", "density", "coverage"):
            table.add_column(name, justify="right" if name in ("density", "coverage") else "left")
            if name == "layer" and self.places:
                table.add_column("in the model")
        if core_modules is not None:
            table.add_column("core")
        for texts_of_row, names in groups.items():
            places = [str(self.place(int(name))) for name in names if name.isdigit()]
            table.add_row(joined_layers(names), *([joined_layers(places)] if self.places else []), *texts_of_row)
        return table

    def _texts(self, pattern: Pattern | None) -> tuple[str, str, str]:
        """Pattern, density and coverage of a layer as the table shows them."""
        if pattern is None:
            return "dense", "100.0%", "100.0%"
        return pattern.describe(), f"{pattern.density(self.seq_length):.1%}", f"{pattern.coverage(self.n_blocks):.1%}"

    def summary(self) -> str:
        """The totals in words: attended pairs, coverage over consecutive layers, softmax scale, notes."""
        dense = dense_pairs(self.num_heads, self.seq_length) * len(self.all_layers)
        lines = [f"attended pairs a sequence: {self.attended_pairs():,} of {dense:,} ({self.density():.1%})"]
        for spec, (count, coverage) in self.spec_coverage().items():
            span = "each layer alone covers" if count == 1 else f"{count} consecutive {spec} layers together cover"
            lines.append(f"{spec}: {span} {coverage:.1%} of the causal blocks")
        if self.softmax_scale is not None:
            lines.append(f"softmax scale: {self.softmax_scale:g} in every layer")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def dense_pairs(num_heads: int, seq_length: int) -> int:
    """(query, key) token pairs of one dense causal layer."""
    return num_heads * (seq_length * (seq_length + 1) // 2)


def joined_layers(names: Sequence[str]) -> str:
    """["0", "1", "2", "5", "mtp 0"] -> "0-2, 5, mtp 0"."""
    parts: list[str] = []
    numbers = [int(name) for name in names if name.isdigit()]
    for number in numbers:
        if parts and int(parts[-1].split("-")[-1]) == number - 1:
            parts[-1] = f"{parts[-1].split('-')[0]}-{number}"
        else:
            parts.append(str(number))
    return ", ".join([*parts, *(name for name in names if not name.isdigit())])


def tensor_parallel_balance(sparsity: ResolvedSparsity, tp_size: int) -> float:
    """Largest over mean attention work of the tensor-parallel ranks: 1.0 is perfect balance, 1.1 means 10 % of the
    time is waiting.

    Work is attended pairs. The ranks wait for each other in every layer, so the largest share of each layer counts,
    not of the sum. Raises ValueError when tp_size fits neither the query nor the KV heads.
    """
    length = sparsity.seq_length
    per_pattern: dict[int, tuple[int, int]] = {}
    largest = total = 0
    for layer in sparsity.all_layers:
        if id(layer.pattern) not in per_pattern:
            if layer.pattern is None:
                whole = dense_pairs(sparsity.num_heads, length)
                per_pattern[id(layer.pattern)] = (whole, whole)
            else:
                shares = [
                    layer.pattern.tensor_parallel_slice(rank, tp_size).attended_pairs(length) for rank in range(tp_size)
                ]
                per_pattern[id(layer.pattern)] = (max(shares) * tp_size, sum(shares))
        slowest, work = per_pattern[id(layer.pattern)]
        largest, total = largest + slowest, total + work
    return largest / total if total else 1.0


def diff_sparsity(old_json: str, new_json: str) -> list[str]:
    """What differs between two canonical_json texts, in words; empty when they are the same attention.

    Equal changes of several layers share a line: "layers 1, 3: stride 16 -> 8".
    Raises ValueError when a text is not one that canonical_json wrote.
    """
    old, new = (_parsed(text) for text in (old_json, new_json))
    lines = []
    if old["softmax_scale"] != new["softmax_scale"]:
        lines.append(f"softmax_scale: {_scale_text(old)} -> {_scale_text(new)}")
    for key, name in (("layers", "layer"), ("mtp_layers", "mtp layer")):
        if len(old[key]) != len(new[key]):
            lines.append(f"number of {name}s: {len(old[key])} -> {len(new[key])}")
        changes: dict[str, list[str]] = {}
        for index, (before, after) in enumerate(zip(old[key], new[key])):
            if old["patterns"][before] != new["patterns"][after]:
                text = _pattern_change(old["patterns"][before], new["patterns"][after])
                changes.setdefault(text, []).append(str(index))
        lines += [f"{name}{'s' * (len(at) > 1)} {joined_layers(at)}: {text}" for text, at in changes.items()]
    return lines


def _parsed(text: str) -> dict:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"stored sparsity {text[:40]!r} is not JSON; expected the text of ResolvedSparsity.canonical_json()"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"stored sparsity has format {found!r}; expected {FORMAT}; use the release that wrote the checkpoint"
        )
    return content


def _scale_text(content: dict) -> str:
    return "default (1/sqrt(head dim))" if content["softmax_scale"] is None else f"{content['softmax_scale']:g}"


def _form_text(form: dict) -> str:
    if form["kind"] == "dense":
        return "dense"
    if form["kind"] == "block_mask":
        return f"block mask {form['sha256'][0][:12]} (blocks of {form['block_size']})"
    parts = []
    for group in form["groups"]:
        heads = len(group["heads"])
        parts.append(f"{_rule_text(group)} in {heads} head{'s' * (heads > 1)}")
    return f"{'; '.join(parts)} (blocks of {form['block_size']})"


def _rule_text(group: dict) -> str:
    parts = [f"window {group['window']}"] if "window" in group else []
    if "window" in group:
        parts += [f"stride {stride}" + ("" if end is None else f" to {end}") for end, stride in group["ranges"]]
    else:
        parts.append(_ranges_text(group["ranges"]))
    return " + ".join(parts + ([f"sink {group['sink_tokens']}"] if "sink_tokens" in group else []))


def _ranges_text(ranges: list) -> str:
    if ranges == [[None, 1]]:
        return "dense"
    parts = []
    for index, (end, stride) in enumerate(ranges):
        reach = "" if end is None else f" to {end}"
        parts.append(f"local {end}" if index == 0 else f"stride {stride}{reach}")
    return " + ".join(parts)


def _pattern_change(old: dict, new: dict) -> str:
    """ "stride 16 -> 8" when two patterns are of one form, otherwise both in full."""
    if not old["kind"] == new["kind"] == "ranges":
        return f"{_form_text(old)} -> {_form_text(new)}"
    if any("window" in group for form in (old, new) for group in form["groups"]):
        return f"{_form_text(old)} -> {_form_text(new)}"
    heads_old, heads_new = (_by_head(form) for form in (old, new))
    changes = [
        f"{name} {old[key]} -> {new[key]}"
        for key, name in (("block_size", "block_size"), ("kv_heads", "KV heads"))
        if old[key] != new[key]
    ]
    if len(heads_old) != len(heads_new):
        changes.append(f"query heads {len(heads_old)} -> {len(heads_new)}")
        return ", ".join(changes)
    dense_old, dense_new = (
        {head for head, (ranges, _) in heads.items() if ranges == ((None, 1),)} for heads in (heads_old, heads_new)
    )
    if dense_old != dense_new:
        changes.append(f"dense query heads {sorted(dense_old) or 'none'} -> {sorted(dense_new) or 'none'}")
    sparse = [head for head in heads_old if head not in dense_old | dense_new]
    sinks = [sorted({group.get("sink_tokens", 0) for group in form["groups"]}) for form in (old, new)]
    if sinks[0] != sinks[1]:
        old_sink, new_sink = (" and ".join(map(str, sink)) for sink in sinks)
        changes.append(f"sink_tokens {old_sink} -> {new_sink}")
    for before, after in dict.fromkeys((heads_old[head][0], heads_new[head][0]) for head in sparse):
        if before != after:
            changes.append(_ranges_change(before, after))
    modulus = {
        head: math.lcm(*(stride for ranges in (heads_old[head][0], heads_new[head][0]) for _, stride in ranges))
        for head in sparse
    }
    moved = [head for head in sparse if (heads_old[head][1] - heads_new[head][1]) % modulus[head]]
    if moved and not any(heads_old[head][0] != heads_new[head][0] for head in moved):
        first = moved[0]
        changes.append(f"offsets of {len(moved)} heads (head {first}: {heads_old[first][1]} -> {heads_new[first][1]})")
    return ", ".join(changes) or f"{_form_text(old)} -> {_form_text(new)}"


def _by_head(form: dict) -> dict[int, tuple]:
    return {
        head: (tuple(map(tuple, group["ranges"])), offset)
        for group in form["groups"]
        for head, offset in zip(group["heads"], group["offsets"])
    }


def _ranges_change(before: tuple, after: tuple) -> str:
    if len(before) != len(after):
        return f"{_ranges_text([*before])} -> {_ranges_text([*after])}"
    parts = []
    for index, ((end_old, stride_old), (end_new, stride_new)) in enumerate(zip(before, after)):
        if stride_old != stride_new:
            parts.append(f"stride {stride_old} -> {stride_new}")
        if end_old != end_new:
            name = "local" if index == 0 else "end"
            parts.append(f"{name} {_end_text(end_old)} -> {_end_text(end_new)}")
    return ", ".join(parts)


def _end_text(end: int | None) -> str:
    return "unlimited" if end is None else f"{end} blocks"
