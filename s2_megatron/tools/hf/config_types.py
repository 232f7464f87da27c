"""Whether the settings of a config.json that import-hf reads are there, and of the types that it computes with."""

from __future__ import annotations

import math

from s2_megatron.config.errors import printable
from s2_megatron.config.stored import MODEL_TYPE, SOFTMAX_TYPES
from s2_megatron.tools.hf.config_keys import EXPERT_KEYS, ROUTER_LOSS, WINDOW_KEYS

_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_COUNTS = (*_NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")
_NUMBERS = ("rms_norm_eps", "initializer_range")
_SWITCHES = ("qkv_bias", "qk_norm", "tie_word_embeddings")
_NULLABLE = ("num_key_value_heads", "head_dim")  # null is as if it was left out
_ROPES = ("rope_parameters", "rope_scaling")
MOST_LAYERS = 10_000  # more than any model has: nothing is made for each of a number that a mistake wrote
MOST = 2**31 - 1
LAYER_KINDS = {"full_attention": False, "sliding_attention": True}  # whether the layer has a window
THETA = "expected a whole number above 0, which is what Megatron's --rotary-base takes"


def is_count(value) -> bool:
    """A whole number above 0 that Megatron's arithmetic holds."""
    return type(value) is int and 0 < value <= MOST


def _is_number(value) -> bool:
    return type(value) in (int, float) and 0 < value < 1e18 and math.isfinite(value)


def _is_theta(value) -> bool:
    """Megatron's --rotary-base takes whole numbers alone."""
    return _is_number(value) and value == int(value)


def _rope_mistakes(content: dict) -> list[str]:
    found = []
    for name in _ROPES:
        rope = content.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            found.append(f"{name}={printable(repr(rope))}, expected an object")
            continue
        if content.get("model_type") == "mellum":  # one for each kind of layer
            for kind in LAYER_KINDS:
                found += [f"{name}.{kind}: {mistake}" for mistake in _rope_mistakes({name: rope.get(kind)})]
            continue
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "llama3" and "factor" not in rope:
            found.append(f"{name} has no factor")
        if "factor" in rope and not _is_number(rope["factor"]):
            found.append(f"{name}.factor={printable(repr(rope['factor']))}, expected a number above 0")
        if "rope_theta" in rope and not _is_theta(rope["rope_theta"]):
            found.append(f"{name}.rope_theta={printable(repr(rope['rope_theta']))}, {THETA}")
    if "rope_theta" in content and not _is_theta(content["rope_theta"]):
        found.append(f"rope_theta={printable(repr(content['rope_theta']))}, {THETA}")
    return found


def _window_mistakes(content: dict) -> list[str]:
    """Of a family that has windows."""
    layers, kinds = content["num_hidden_layers"], " or ".join(LAYER_KINDS)
    checks = {
        "sliding_window": (is_count, "a whole number above 0 (and below 2^31)"),
        "use_sliding_window": (lambda value: type(value) is bool, "true or false"),
        "max_window_layers": (lambda value: type(value) is int and 0 <= value <= MOST, "a whole number from 0"),
        "layer_types": (
            lambda value: (
                isinstance(value, list) and len(value) == layers and all(kind in list(LAYER_KINDS) for kind in value)
            ),
            f"{kinds} for each of {layers} layers",
        ),
    }
    return [
        f"{name}={printable(repr(content[name]), 200)}, expected {expected}"
        for name, (is_right, expected) in checks.items()
        if content.get(name) is not None and not is_right(content[name])
    ]


def _expert_mistakes(content: dict) -> list[str]:
    """Of a family that has experts."""
    layers = content["num_hidden_layers"]

    def some_layers(value) -> bool:
        return isinstance(value, list) and all(type(one) is int and 0 <= one < layers for one in value)

    def kinds(value) -> bool:
        return isinstance(value, list) and len(value) == layers and all(kind in ("dense", "sparse") for kind in value)

    count = (is_count, "a whole number above 0 (and below 2^31)")
    checks = {
        "num_experts": count, "num_local_experts": count, "num_experts_per_tok": count, "moe_intermediate_size": count,
        "decoder_sparse_step": count, "norm_topk_prob": (lambda value: type(value) is bool, "true or false"),
        ROUTER_LOSS: (lambda value: value == 0 or _is_number(value), "a number from 0"),
        "output_router_logits": (lambda value: type(value) is bool, "true or false"),
        "mlp_only_layers": (some_layers, f"numbers of some of the {layers} layers, from 0"),
        "mlp_layer_types": (kinds, f"dense or sparse for each of {layers} layers"),
    }  # fmt: skip
    found = [
        f"{name}={printable(repr(content[name]), 200)}, expected {checks[name][1]}"
        for name in checks
        if name in EXPERT_KEYS[content["model_type"]]
        and content.get(name) is not None
        and not checks[name][0](content[name])
    ]
    counts = {name: content[name] for name in ("num_experts", "num_local_experts") if content.get(name) is not None}
    if not found and len(set(counts.values())) > 1:
        found.append(", ".join(f"{name}={value}" for name, value in counts.items()) + ", expected one number of both")
    return found


def check_types(content: dict, where: str) -> None:
    """Raises one ValueError that names what is missing in a config.json and what has another type."""
    found = [f"{name} is missing" for name in _NEEDED if name not in content]
    for names, is_right, expected in (
        (_COUNTS, is_count, "a whole number above 0 (and below 2^31)"),
        (_NUMBERS, _is_number, "a number above 0"),
        (_SWITCHES, lambda value: type(value) is bool, "true or false"),
    ):
        for name in names:
            value = content.get(name)
            if name in content and not is_right(value) and not (value is None and name in _NULLABLE):
                found.append(f"{name}={printable(repr(value))}, expected {expected}")
    if content.get("model_type") == MODEL_TYPE and content.get("softmax_type", "vanilla") not in SOFTMAX_TYPES:
        given = printable(repr(content["softmax_type"]))
        found.append(f"softmax_type={given}, expected one of {', '.join(SOFTMAX_TYPES)}")
    found += _rope_mistakes(content)
    if not found and content["num_hidden_layers"] > MOST_LAYERS:
        found = [f"num_hidden_layers={content['num_hidden_layers']}, expected {MOST_LAYERS} at most"]
    if not found and content.get("model_type") in WINDOW_KEYS:
        found = _window_mistakes(content)
    if not found and content.get("model_type") in EXPERT_KEYS:
        found = _expert_mistakes(content)
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
