"""Whether the settings of a config.json that import-hf reads are there, and of the types that it computes with."""

from __future__ import annotations

import math

from s2_megatron.config.errors import printable

_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_COUNTS = (*_NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")
_NUMBERS = ("rms_norm_eps", "initializer_range", "rope_theta")
_SWITCHES = ("qkv_bias", "qk_norm", "tie_word_embeddings")
_NULLABLE = ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings")  # null is as if it was left out
_ROPES = ("rope_parameters", "rope_scaling")


def _is_count(value) -> bool:
    return type(value) is int and value > 0


def _is_number(value) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def _rope_mistakes(content: dict) -> list[str]:
    found = []
    for name in _ROPES:
        rope = content.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            found.append(f"{name}={printable(repr(rope))}, expected an object")
            continue
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "llama3" and "factor" not in rope:
            found.append(f"{name} has no factor")
        for key in ("rope_theta", "factor"):
            if rope.get(key) is not None and not _is_number(rope[key]):
                found.append(f"{name}.{key}={printable(repr(rope[key]))}, expected a number above 0")
    return found


def check_types(content: dict, where: str) -> None:
    """Raises one ValueError that names what is missing in a config.json and what has another type."""
    found = [f"{name} is missing" for name in _NEEDED if name not in content]
    for names, is_right, expected in (
        (_COUNTS, _is_count, "a whole number above 0"),
        (_NUMBERS, _is_number, "a number above 0"),
        (_SWITCHES, lambda value: type(value) is bool, "true or false"),
    ):
        for name in names:
            value = content.get(name)
            if name in content and not is_right(value) and not (value is None and name in _NULLABLE):
                found.append(f"{name}={printable(repr(value))}, expected {expected}")
    found += _rope_mistakes(content)
    if not found:
        heads, groups = content["num_attention_heads"], content.get("num_key_value_heads")
        if groups and heads % groups:
            found = [f"num_key_value_heads={groups}, expected a divisor of num_attention_heads={heads}"]
    if found:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"{where}: config.json does not describe a model: {'; '.join(found[:3])}{more}; save the model again with "
            "save_pretrained, or correct the file"
        )
