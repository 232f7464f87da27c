"""The same model as Megatron's arguments and as a Hugging Face config; and which models have both forms."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.config.load import load_config
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity, diff_sparsity
from s2_megatron.config.stored import MODEL_TYPE, sparsity_from_stored, stored_sparsity
from s2_megatron.megatron.checkpoints.translation import pattern_of
from s2_megatron.megatron.model.rope_scaling import computed_factor
from s2_megatron.megatron.sparsity import resolve_windows
from s2_megatron.tools.hf.config_keys import CLASSES, LLAMA3_ROPE, resolved_config, rope_of
from s2_megatron.tools.hf.config_types import check_types
from s2_megatron.tools.hf.experts import TAKERS, expert_flags, experts_of_arguments, experts_of_config
from s2_megatron.tools.hf.weights import Shape

FORM = "a Llama- or Qwen-shaped model (RoPE, RMSNorm, SwiGLU, grouped-query attention)"

# Megatron's arguments that change what the model computes, and the one value that a Llama or Qwen has.
_WANTED = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
    "rotary_percent": 1.0, "rotary_interleaved": False, "rotary_seq_len_interpolation_factor": None,
    "multi_latent_attention": False, "mtp_num_layers": None, "is_hybrid_model": False,
    "layernorm_zero_centered_gamma": False, "attention_output_gate": False,
    "apply_residual_connection_post_layernorm": False,
    "qk_l2_norm": False, "no_rope_freq": None, "use_mup": False,
    "experimental_attention_variant": None, "heterogeneous_layers_config_path": None, "glu_linear_offset": 0.0,
    "heterogeneous_layers_config_encoded_json": None, "activation_func_clamp_value": None, "mup_embedding_mult": 1.0,
}  # fmt: skip


def _is(value, wanted) -> bool:
    """Whether an argument is as wanted. None, False, 0 and nothing are the same; 0.0 is a number, such as a clamp at
    0.0, and is not None."""
    if wanted is None and isinstance(value, float):
        return False
    return (value or None) == (wanted or None)


def shape_of_arguments(args: Namespace, where: str, vocab_size: int | None, *, drop_mtp: bool = False) -> Shape:
    """The model that was trained with these arguments. vocab_size: words of the tokenizer; None: all rows of the
    embedding. drop_mtp: whether a GPT's multi-token prediction is left out, and not refused.

    Raises one ValueError that names every setting which no Llama or Qwen has. A HybridModel is one where an attention
    layer and a dense MLP, or experts, take turns (`*-`, `*E`).
    """
    missing = object()
    other = {
        name: value
        for name, wanted in _WANTED.items()
        if not (drop_mtp and name == "mtp_num_layers")
        and (value := getattr(args, name, missing)) is not missing
        and not _is(value, wanted)
    }
    if other:
        found = ", ".join(f"{name}={value!r}" for name, value in other.items())
        raise ValueError(f"{where}: {found}; only {FORM}, which has none of it, is taken by {TAKERS}")
    pattern, num_layers, kinds = pattern_of(args), args.num_layers, None
    if pattern is not None:
        symbols, halves = pattern.replace("|", ""), ("*-", "*E")
        num_layers, kinds = len(symbols) // 2, symbols[1::2]
        if len(symbols) % 2 or any(symbols[start : start + 2] not in halves for start in range(0, len(symbols), 2)):
            raise ValueError(
                f"{where}: --hybrid-layer-pattern {pattern}; expected {' or '.join(halves)} repeated; only {FORM}, "
                f"which has no other layers, is taken by {TAKERS}"
            )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    padded = args.padded_vocab_size
    if vocab_size is not None and vocab_size > padded:
        raise ValueError(
            f"the tokenizer has {vocab_size} words, the model's embedding {padded} rows; expected the tokenizer that "
            "the model was trained with; give it with --tokenizer"
        )
    return Shape(
        num_layers=num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_heads=args.num_attention_heads,
        num_kv_heads=groups,
        head_dim=args.kv_channels,
        vocab_size=padded if vocab_size is None else vocab_size,
        padded_vocab_size=padded,
        qkv_bias=bool(args.add_qkv_bias),
        qk_norm=bool(args.qk_layernorm),
        tied=not args.untie_embeddings_and_output_weights,
        softmax_type=getattr(args, "softmax_type", "vanilla"),
        experts=experts_of_arguments(args, where, num_layers, kinds),
    )


def sparsity_of_arguments(args: Namespace, shape: Shape, config: Path | None) -> ResolvedSparsity:
    """The sparsity that a checkpoint's decoder was trained with. config: the YAML, needed for block masks, of which a
    checkpoint has only the hashes; compared when it is given without need.

    Raises ValueError when the YAML is missing or says something else than the checkpoint.
    """
    stored = getattr(args, "s2_sparsity", None)
    content = None if stored is None else json.loads(stored)
    masked = content is not None and any(form["kind"] == "block_mask" for form in content["patterns"])
    if config is not None and not config.is_file():
        raise ValueError(
            f"--s2-config {config} does not exist or is no file; expected the YAML that the checkpoint was trained "
            "with; correct the path" + ("" if masked else ", or leave --s2-config out")
        )
    if masked:
        path = config or Path(getattr(args, "s2_config", None) or "")
        if not path.is_file():
            raise ValueError(
                f"the checkpoint has a block mask, of which it stores only the hash, and its config {path} does not "
                "exist; give the YAML that it was trained with: --s2-config FILE"
            )
        return _given(path, args, shape, stored)
    if content is None:
        scale = getattr(args, "softmax_scale", None)
        if getattr(args, "window_size", None) is not None:  # Megatron's own windows
            sparsity = replace(resolve_windows(args), softmax_scale=scale)
        else:
            sparsity = _dense(shape, scale, args.seq_length)
    else:
        content |= dict(
            num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, seq_length=args.seq_length,
            block_size=next((form["block_size"] for form in content["patterns"] if form["kind"] != "dense"), 64),
        )  # fmt: skip
        sparsity = sparsity_from_stored(content)
    if config is not None:
        _given(config, args, shape, stored or sparsity.canonical_json())
    return replace(sparsity, mtp_layers=())


def _given(config: Path, args: Namespace, shape: Shape, stored: str) -> ResolvedSparsity:
    """The decoder's sparsity by a YAML. Raises ValueError unless the YAML is the one that is stored in the
    checkpoint."""
    depths = len(json.loads(stored)["mtp_layers"])
    runs = depths if depths and getattr(args, "mtp_use_repeated_layer", False) else 1  # of one layer
    sparsity = load_config(config, allow_python_patterns=getattr(args, "s2_allow_python_patterns", False)).resolve(
        num_layers=shape.num_layers, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        seq_length=args.seq_length, mtp_num_layers=depths // runs,
    )  # fmt: skip
    sparsity = replace(sparsity, mtp_layers=sparsity.mtp_layers * runs)
    differences = diff_sparsity(stored, sparsity.canonical_json())
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ValueError(
            f"--s2-config {config} is another sparsity than that of the checkpoint ({'; '.join(differences[:3])}"
            f"{more}); expected no difference; give the YAML that it was trained with"
        )
    return replace(sparsity, mtp_layers=())


def _dense(shape: Shape, scale: float | None, seq_length: int) -> ResolvedSparsity:
    layers = (LayerSparsity("D", None),) * shape.num_layers
    return ResolvedSparsity(layers, (), scale, 64, shape.num_heads, shape.num_kv_heads, seq_length)


def plain_config(args: Namespace, shape: Shape, dtype: str) -> dict:
    """What the config.json of every Llama-shaped model says of a trained one: all but its type and its attention."""
    rope = {"rope_type": "default", "rope_theta": float(args.rotary_base)}
    if (factor := computed_factor(args)) is not None:
        rope |= {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": args.max_position_embeddings,
        "rms_norm_eps": args.layernorm_epsilon,
        "initializer_range": args.init_method_std,
        "rope_parameters": rope,
        "attention_bias": False,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        "use_cache": True,
    }


def hf_config(args: Namespace, shape: Shape, sparsity: ResolvedSparsity, dtype: str) -> dict:
    """The content of config.json, of our own model type."""
    own = {"architectures": ["S2GPTForCausalLM"], "model_type": MODEL_TYPE}
    options = {"qkv_bias": shape.qkv_bias, "qk_norm": shape.qk_norm, "softmax_type": shape.softmax_type}
    if (experts := shape.experts) is not None:
        options |= {
            "num_experts": experts.count, "num_experts_per_tok": experts.top, "moe_intermediate_size": experts.hidden,
            "norm_topk_prob": experts.normalized,
            "mlp_only_layers": [layer for layer, has in enumerate(experts.layers) if not has],
        }  # fmt: skip
    return own | plain_config(args, shape, dtype) | options | {"s2_sparsity": stored_sparsity(sparsity)}


def config_as_read(content: dict, where: str) -> dict:
    """A config.json as transformers understands it. Raises one ValueError for whatever a Megatron Llama or Qwen does
    not have, and for a key that nobody here knows."""
    family = content.get("model_type")
    if not isinstance(family, str) or family not in CLASSES:
        raise ValueError(
            f"{where}: model_type={printable(repr(family))}; expected one of {', '.join(CLASSES)}; only {FORM} can be "
            "imported"
        )
    check_types(content, where)
    sparsity_of_config(content, where)
    resolved = resolved_config(content, where)
    experts_of_config(resolved, where)
    return resolved


def shape_of_config(content: dict, divisor: int) -> Shape:
    """The model of a config. content: of config_as_read. divisor: the embedding's rows become a multiple of it."""
    heads, words, family = content["num_attention_heads"], content["vocab_size"], content["model_type"]
    return Shape(
        num_layers=content["num_hidden_layers"],
        hidden_size=content["hidden_size"],
        ffn_hidden_size=content["intermediate_size"],
        num_heads=heads,
        num_kv_heads=content["num_key_value_heads"],
        head_dim=content.get("head_dim") or content["hidden_size"] // heads,
        vocab_size=words,
        padded_vocab_size=-(-words // divisor) * divisor,
        qkv_bias=family == "qwen2" or bool(content.get("qkv_bias")),
        qk_norm=family in ("qwen3", "qwen3_moe", "mellum") or bool(content.get("qk_norm")),
        tied=bool(content["tie_word_embeddings"]),
        softmax_type=content.get("softmax_type", "vanilla") if family == MODEL_TYPE else "vanilla",
        experts=experts_of_config(content, "--input"),
        mixtral=family == "mixtral",
    )


def sparsity_of_config(content: dict, where: str) -> ResolvedSparsity | None:
    """The sparsity in a config.json whose types are right, None for a dense model. Raises ValueError for one that is
    missing, null, damaged or of another model."""
    stored, layers, heads = (content.get(name) for name in ("s2_sparsity", "num_hidden_layers", "num_attention_heads"))
    if stored is None:
        if "s2_sparsity" not in content and content["model_type"] != MODEL_TYPE:
            return None
        raise ValueError(
            f"{where}: config.json has no s2_sparsity, or null; expected the sparsity of every layer; export the model "
            "again, or, if it is dense, give it the model_type of a dense one"
        )
    try:
        sparsity = sparsity_from_stored(stored)
        found = (len(sparsity.layers), sparsity.num_heads, sparsity.num_kv_heads)
        wanted = (layers, heads, content.get("num_key_value_heads") or heads)
        if found != wanted:
            raise ValueError(f"it is of {found} layers, heads and KV heads, the model of {wanted}")
        sparsity.canonical_json()
    except (ValueError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"{where}: s2_sparsity in config.json cannot be read ({printable(' '.join(str(error).split()), 200)}); "
            "expected what export-hf writes; export the model again"
        ) from error
    return sparsity


def megatron_flags(content: dict, shape: Shape) -> list[str]:
    """The flags of Megatron that make this model, dropouts included. content: of config_as_read or hf_config."""
    rope = rope_of(content)
    flags = [
        f"--num-layers={shape.num_layers}", f"--hidden-size={shape.hidden_size}",
        f"--ffn-hidden-size={shape.ffn_hidden_size}", f"--num-attention-heads={shape.num_heads}",
        "--group-query-attention", f"--num-query-groups={shape.num_kv_heads}", f"--kv-channels={shape.head_dim}",
        f"--max-position-embeddings={content['max_position_embeddings']}", "--position-embedding-type=rope",
        f"--rotary-base={int(rope['rope_theta'])}", "--normalization=RMSNorm",
        f"--norm-epsilon={content['rms_norm_eps']}", "--swiglu", "--disable-bias-linear",
        f"--padded-vocab-size={shape.padded_vocab_size}", f"--init-method-std={content['initializer_range']}",
        "--attention-dropout=0", "--hidden-dropout=0",
    ]  # fmt: skip
    flags += ["--add-qkv-bias"] * shape.qkv_bias + ["--qk-layernorm"] * shape.qk_norm
    flags += [] if shape.tied else ["--untie-embeddings-and-output-weights"]
    flags += [] if shape.softmax_type == "vanilla" else [f"--softmax-type={shape.softmax_type}"]
    flags += [] if shape.experts is None else expert_flags(shape.experts)
    if rope["rope_type"] == "llama3":
        flags += ["--use-rope-scaling", f"--rope-scaling-factor={rope['factor']}"]
    return flags
