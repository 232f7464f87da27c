"""Every key of an imported config.json: read, known to change nothing, or refused unless it says what a Llama or Qwen
has. A key that is not known is refused, too: what it stands for would be lost."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping

from s2_megatron.config.errors import printable
from s2_megatron.config.stored import MODEL_TYPE

# In `architectures`: engines run transformers' own model code, whichever model_type names it.
TRANSFORMERS_CLASS = "TransformersForCausalLM"
TRANSFORMERS_MOE_CLASS = "TransformersMoEForCausalLM"
CLASSES = {
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM", TRANSFORMERS_CLASS),
    "qwen3": ("Qwen3ForCausalLM", TRANSFORMERS_CLASS),
    "mistral": ("MistralForCausalLM",),
    "ministral": ("MinistralForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM", TRANSFORMERS_MOE_CLASS),
    "mixtral": ("MixtralForCausalLM", TRANSFORMERS_MOE_CLASS),
    "mellum": ("MellumForCausalLM", TRANSFORMERS_MOE_CLASS),
    MODEL_TYPE: ("S2GPTForCausalLM",),
}

_READ = {
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "initializer_range",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "original_max_position_embeddings", "s2_sparsity",
}  # fmt: skip
# What each family says of its windows. source_windows.py compares layer_types, which transformers' Mistral does not
# read and other engines do.
WINDOW_KEYS = {
    "qwen2": {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
    "qwen3": {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
    "mistral": {"sliding_window", "layer_types"},
    "ministral": {"sliding_window", "layer_types"},
    "qwen3_moe": {"sliding_window", "max_window_layers"},
    "mixtral": {"sliding_window", "layer_types"},
    "mellum": {"sliding_window", "layer_types"},
}
# What each family with experts says of them. transformers 5.24 writes num_experts as num_local_experts.
ROUTER_LOSS = "router_aux_loss_coef"  # of a loss in training, which transformers adds with output_router_logits
_MIXTRAL = {"num_local_experts", "num_experts_per_tok", ROUTER_LOSS, "output_router_logits"}
_QWEN = _MIXTRAL | {"num_experts", "moe_intermediate_size", "norm_topk_prob"}
EXPERT_KEYS = {
    "qwen3_moe": _QWEN | {"decoder_sparse_step", "mlp_only_layers"},
    "mixtral": _MIXTRAL,
    "mellum": _QWEN | {"mlp_layer_types"},
    MODEL_TYPE: {
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers",
    },
}  # fmt: skip
_READ_OF = {MODEL_TYPE: {"qkv_bias", "qk_norm", "softmax_type"} | EXPERT_KEYS[MODEL_TYPE]} | {
    family: keys | EXPERT_KEYS.get(family, set()) for family, keys in WINDOW_KEYS.items()
}

# What the logits of one text do not depend on: names and versions, tokens, how a text is generated, what is returned.
_WITHOUT_EFFECT = {
    "_name_or_path", "_model_name_or_path", "name_or_path", "transformers_version", "transformers.js_config",
    "unsloth_version", "unsloth_fixed", "is_llama_config", "torch_dtype", "dtype", "tokenizer_class", "finetuning_task",
    "problem_type", "id2label", "label2id", "num_labels", "task_specific_params", "bos_token_id", "eos_token_id",
    "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "use_cache", "is_decoder",
    "output_attentions", "output_hidden_states", "return_dict", "use_return_dict", "torchscript",
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "pretraining_tp",
    "max_length", "min_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "num_beams",
    "repetition_penalty", "num_return_sequences",
}  # fmt: skip

# What changes the logits, and the one value that a Llama or Qwen has.
_NEUTRAL = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0, "hidden_dropout": 0,
    "rope_interleaved": False, "is_encoder_decoder": False, "add_cross_attention": False,
    "chunk_size_feed_forward": 0, "tie_encoder_decoder": False, "pruned_heads": {}, "embedding_multiplier": 1,
    "residual_multiplier": 1, "logits_scaling": 1, "logit_scale": 1,
}  # fmt: skip
_NEUTRAL_OF = {family: {"use_sliding_window": False} for family in ("llama", "qwen3_moe", MODEL_TYPE)} | {
    "mixtral": {"router_jitter_noise": 0},
    "mellum": {"num_mtp_layers": 0, "num_nextn_predict_layers": 0},
}

# By rope_type, and what each has to be (None: any number).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE = {"rope_type": None, "type": None, "rope_theta": None, "partial_rotary_factor": 1.0}
_ROPES = {"default": _ROPE, "llama3": _ROPE | {"factor": None} | LLAMA3_ROPE}


def refused_keys(content: Mapping, family: str) -> dict[str, str]:
    """The keys of a config.json whose meaning would be lost, with what was expected. Null is as if a key was left
    out, where it is not read."""
    found = {}
    read, neutral = _READ | _READ_OF.get(family, set()), _NEUTRAL | _NEUTRAL_OF.get(family, {})
    for key, value in content.items():
        if value is None or key in read or key in _WITHOUT_EFFECT:
            continue
        if key == "layer_types":
            if value != ["full_attention"] * content["num_hidden_layers"]:
                found[key] = "full_attention in every layer"
        elif key == "architectures":
            if not isinstance(value, list) or any(name not in CLASSES[family] for name in value):
                found[key] = CLASSES[family][0]
        elif key not in neutral:
            found[key] = "no such key"
        elif value != neutral[key] or isinstance(value, bool) != isinstance(neutral[key], bool):
            found[key] = str(neutral[key]).lower()
    return found


def refused_rope(rope: Mapping) -> dict[str, str]:
    """The same of rope_parameters, as transformers understands them."""
    kind = rope.get("rope_type")
    if not isinstance(kind, str) or kind not in _ROPES:
        return {"rope_type": " or ".join(_ROPES)}
    return {
        key: "no such key" if key not in _ROPES[kind] else f"{_ROPES[kind][key]:g}"
        for key, value in rope.items()
        if value is not None and (key not in _ROPES[kind] or _ROPES[kind][key] not in (None, value))
    }


def rope_of(content: Mapping) -> Mapping:
    """rope_parameters, of which a Mellum has some for each kind of layer: those of its dense layers."""
    rope = content["rope_parameters"]
    return rope.get("full_attention") or {} if content.get("model_type") == "mellum" else rope


def _refused_ropes(resolved: Mapping) -> dict[str, tuple[object, str]]:
    """What of rope_parameters would be lost: (what is there, what was expected)."""
    rope = rope_of(resolved)
    lost = {f"rope_parameters.{key}": (rope.get(key), expected) for key, expected in refused_rope(rope).items()}
    if resolved["model_type"] == "mellum" and (other := resolved["rope_parameters"].get("sliding_attention")) != rope:
        lost["rope_parameters.sliding_attention"] = other, f"that of full_attention ({printable(repr(rope))})"
    return lost


@contextlib.contextmanager
def quiet_transformers():
    """Without what transformers warns of in a config: all that matters here is refused."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def resolved_config(content: dict, where: str) -> dict:
    """The config as transformers understands it: its defaults for what is left out, and its choice where two keys say
    the same. content: checked by check_types. Raises one ValueError for what would be lost, or what transformers
    refuses."""
    from transformers import CONFIG_MAPPING

    import s2_megatron.huggingface  # noqa: F401, which registers the model type s2_gpt

    family = content["model_type"]
    lost = {key: (content[key], expected) for key, expected in refused_keys(content, family).items()}
    if not lost:
        try:
            with quiet_transformers():  # a copy, for transformers writes into what it is given
                resolved = CONFIG_MAPPING[family].from_dict(copy.deepcopy(content)).to_dict()
        except Exception as error:  # whatever its checks raise
            raise ValueError(
                f"{where}: transformers refuses config.json ({printable(' '.join(str(error).split()), 200)}); expected "
                "one that it loads; save the model again with save_pretrained"
            ) from error
        lost = _refused_ropes(resolved)
    if lost:
        texts = [f"{printable(key)}={printable(repr(value))}, expected {text}" for key, (value, text) in lost.items()]
        more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
        raise ValueError(
            f"{where}: config.json has what a Llama or Qwen in Megatron does not compute: {'; '.join(texts[:3])}"
            f"{more}; only models without it can be imported; remove a key only if the weights were trained without it"
        )
    return resolved
