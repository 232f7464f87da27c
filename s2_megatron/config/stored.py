"""A model's resolved sparsity as JSON-able data that is complete, and back: what an exported model carries.

It is the content of `ResolvedSparsity.canonical_json()`, which checkpoints store, and what that leaves out: the rows
of block masks (the canonical form has only their hashes), the number of heads and the length that masks were made for.
"""

from __future__ import annotations

import json

from s2_megatron.config.sparsity import FORMAT, LayerSparsity, ResolvedSparsity, canonical_pattern
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.checks import MOST_TOKENS, check_block_size, check_integer
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import Pattern, RangePattern
from s2_megatron.patterns.text import packed_table, unpacked_table

MODEL_TYPE = "s2_gpt"  # in the config.json of exported models
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")  # Megatron's --softmax-type


def stored_sparsity(sparsity: ResolvedSparsity) -> dict:
    """The sparsity of the decoder's layers as data for a JSON file.

    Raises ValueError for a model with multi-token-prediction layers, which no exported model has.
    """
    if sparsity.mtp_layers:
        raise ValueError(
            f"the model has {len(sparsity.mtp_layers)} multi-token-prediction layers; expected none; "
            "only the decoder's layers can be stored"
        )
    content = json.loads(sparsity.canonical_json())
    del content["mtp_layers"]
    by_form = {json.dumps(canonical_pattern(layer.pattern), sort_keys=True): layer.pattern for layer in sparsity.layers}
    for form in content["patterns"]:
        if form["kind"] == "block_mask":
            pattern = by_form[json.dumps(form, sort_keys=True)]
            form["tables"] = [packed_table(*table) for table in pattern.tables]
    return content | {
        "num_heads": sparsity.num_heads,
        "num_kv_heads": sparsity.num_kv_heads,
        "block_size": sparsity.block_size,
        "seq_length": sparsity.seq_length,
    }


def sparsity_from_stored(content: dict) -> ResolvedSparsity:
    """The sparsity that stored_sparsity was given; equal layers share one Pattern object.

    Raises ValueError when the content is not complete or does not describe the number of heads that it names.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"stored sparsity has format {found!r}; expected {FORMAT}; export the model again")
    try:
        heads, kv_heads = content["num_heads"], content["num_kv_heads"]
        patterns = [_pattern(form, heads, kv_heads) for form in content["patterns"]]
        fix = "export the model again"
        if not content["layers"]:
            raise ValueError(f"stored sparsity has no layers; expected one or more; {fix}")
        for index in content["layers"]:
            check_integer("the pattern of a layer of the stored sparsity", index, 0, len(patterns) - 1, fix)
        check_integer("seq_length of the stored sparsity", content["seq_length"], 1, MOST_TOKENS, fix)
        check_block_size(content["block_size"])
        layers = tuple(
            LayerSparsity("D" if patterns[index] is None else "S", patterns[index]) for index in content["layers"]
        )
        return ResolvedSparsity(
            layers, (), content["softmax_scale"], content["block_size"], heads, kv_heads, content["seq_length"]
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"stored sparsity is incomplete ({type(error).__name__}: {error}); export the model again"
        ) from error


def _pattern(form: dict, num_heads: int, num_kv_heads: int) -> Pattern | None:
    if form["kind"] == "dense":
        return None
    if form["kv_heads"] != num_kv_heads:
        raise ValueError(f"stored sparsity has {form['kv_heads']} KV heads in a layer; expected {num_kv_heads}")
    if form["kind"] == "ranges":
        named = sorted(head for group in form["groups"] for head in group["heads"])
        if named != list(range(num_heads)):
            raise ValueError(f"stored sparsity names the heads {named}; expected 0 to {num_heads - 1}")
        return range_pattern(form)
    if form["kind"] == "block_mask":
        tables = [unpacked_table(text) for text in form["tables"]]
        pattern = BlockMaskPattern.from_csr(form["block_size"], num_heads, num_kv_heads, *zip(*tables))
        if pattern.canonical()["sha256"] != form["sha256"]:
            raise ValueError("a stored block mask does not have the hash that stands beside it; export the model again")
        return pattern
    raise ValueError(f"stored sparsity has a pattern of kind {form['kind']!r}; expected dense, ranges or block_mask")


def range_pattern(form: dict) -> RangePattern:
    """The pattern that a RangePattern.canonical stands for."""
    size = form["block_size"]
    rules = {
        head: (tuple((end, stride) for end, stride in group["ranges"]), offset, group)
        for group in form["groups"]
        for head, offset in zip(group["heads"], group["offsets"], strict=True)
    }
    ratio = max(1, len(rules) // form["kv_heads"])
    heads = []
    for first in range(0, len(rules), ratio):
        members = [rules[head] for head in range(first, min(first + ratio, len(rules)))]
        # The canonical form leaves both out where a head's ranges see as much; they are those of the KV head.
        window = max((group["window"] for *_, group in members if "window" in group), default=None)
        sink_tokens = max(group.get("sink_tokens", 0) for *_, group in members)
        tokens = (window, sink_tokens, None if window is None and not sink_tokens else size)
        heads += [HeadPattern(ranges, offset, *tokens) for ranges, offset, _ in members]
    return RangePattern(size, form["kv_heads"], tuple(heads))
