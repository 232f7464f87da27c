"""Refused: other versions of Megatron, other models than a GPT, and whatever else says which layer spec to build."""

from __future__ import annotations

from argparse import Namespace

from packaging.version import Version

from s2_megatron.megatron.refusals.refusal import Refusal, is_set

MEGATRON_MINIMUM, MEGATRON_LIMIT = Version("0.19.2"), Version("0.21")


def megatron_version() -> str:
    """The version of the megatron-core that is imported, without a commit's suffix."""
    from megatron.core.package_info import __version__

    return __version__.partition("+")[0]


def _unsupported_megatron(args: Namespace) -> bool:
    # A pre-release counts as the release it leads to: 0.20.0rc1 is inside, 0.21.0rc0 is not.
    release = Version(Version(megatron_version()).base_version)
    return not MEGATRON_MINIMUM <= release < MEGATRON_LIMIT


# The other refusals are not looked at when this one applies: the arguments of another Megatron have other names.
VERSION = Refusal(
    "megatron_version",
    _unsupported_megatron,
    f"megatron-core {{megatron}} is installed; supported are >={MEGATRON_MINIMUM},<{MEGATRON_LIMIT}",
    f"pip install 'megatron-core[training]>={MEGATRON_MINIMUM},<{MEGATRON_LIMIT}', or a checkout of such a version",
    lambda args: {"megatron": megatron_version()},
)


def _l2_norm_is_dropped(args: Namespace) -> bool:
    others = args.num_experts or getattr(args, "hybrid_layer_pattern", None)
    return bool(args.qk_l2_norm and args.transformer_impl == "local" and not others)


REFUSALS = (
    Refusal(
        "mla_down_proj_fusion",
        lambda args: args.mla_down_proj_fusion and args.transformer_impl != "local",  # which ignores the flag
        "--mla-down-proj-fusion makes Megatron build another module than the multi-latent attention that S2 replaces",
        "remove --mla-down-proj-fusion",
    ),
    Refusal(
        "cache_mla_latents",
        is_set("cache_mla_latents"),
        "--cache-mla-latents is for the dynamic inference engine, which goes around the core attention",
        "remove --cache-mla-latents",
    ),
    Refusal(
        "mla_tensor_parallel",
        lambda args: (
            args.multi_latent_attention and args.transformer_impl == "local" and args.tensor_model_parallel_size > 1
        ),
        "--multi-latent-attention with --transformer-impl local and --tensor-model-parallel-size "
        "{args.tensor_model_parallel_size}: Megatron does not add up the gradients of the keys' RoPE part, which all "
        "heads share, over the ranks (core/transformer/multi_latent_attention.py), and trains otherwise than one rank",
        "use --tensor-model-parallel-size 1, and --context-parallel-size for longer sequences",
    ),
    Refusal(
        "mla_rope_scaling",
        lambda args: args.multi_latent_attention and args.use_rope_scaling,
        "--use-rope-scaling with --multi-latent-attention, which makes its own RoPE without that scaling",
        "remove --use-rope-scaling; --rope-type yarn with --rotary-scaling-factor stretches the positions",
    ),
    Refusal(
        "experimental_attention_variant",
        is_set("experimental_attention_variant"),
        "--experimental-attention-variant {args.experimental_attention_variant} replaces the attention that S2 would "
        "replace",
        "remove --experimental-attention-variant",
    ),
    Refusal(
        "linear_attention_freq",
        is_set("linear_attention_freq"),
        "--linear-attention-freq {args.linear_attention_freq}: linear attention layers have no attention pattern",
        "remove --linear-attention-freq",
    ),
    Refusal(
        "decoder_num_layers",
        is_set("decoder_num_layers"),
        "--decoder-num-layers {args.decoder_num_layers} makes an encoder-decoder model; S2 attention is causal "
        "self-attention only, neither cross attention nor an encoder's",
        "remove --decoder-num-layers and train a GPT",
    ),
    Refusal(
        "vision_pretraining",
        is_set("vision_pretraining"),
        "--vision-pretraining attends in both directions; S2 attention is causal",
        "remove --vision-pretraining",
    ),
    Refusal(
        "ict_head_size",
        is_set("ict_head_size"),
        "--ict-head-size {args.ict_head_size} makes a BERT retriever, which attends in both directions; S2 attention "
        "is causal",
        "remove --ict-head-size",
    ),
    Refusal(
        "spec",
        is_set("spec"),
        "--spec {args.spec} and --s2-config both say which layer spec to build",
        "remove --spec, or --s2-config",
    ),
    Refusal(
        "qk_l2_norm",
        _l2_norm_is_dropped,
        "--qk-l2-norm with --transformer-impl local: Megatron leaves it out of a GPT's layers without experts "
        "(_te_or_local_layer_spec in training/models/gpt.py), and the queries and keys would not be normalised",
        "use --qk-layernorm, or --transformer-impl transformer_engine",
    ),
    Refusal(
        "is_hybrid_model",
        is_set("is_hybrid_model"),
        "--is-hybrid-model: hybrid and Mamba models have their own layer specs",
        "remove --is-hybrid-model",
    ),
    Refusal(
        "heterogeneous_layers_config_path",
        lambda args: bool(args.heterogeneous_layers_config_path or args.heterogeneous_layers_config_encoded_json),
        "a heterogeneous layer config leaves some layers without attention and brings its own layer specs",
        "remove --heterogeneous-layers-config-path and --heterogeneous-layers-config-encoded-json",
    ),
    Refusal(
        "use_kitchen_attention",
        lambda args: bool(
            args.use_kitchen_attention
            or getattr(args, "kitchen_config_file", None)
            or getattr(args, "kitchen_recipe_number", None) is not None
        ),
        "Kitchen brings its own layer spec and its own attention",
        "remove --use-kitchen-attention, --kitchen-config-file and --kitchen-recipe-number",
    ),
    Refusal(
        "yaml_cfg",
        is_set("yaml_cfg"),
        "--yaml-cfg makes Megatron drop every command line argument, --s2-config among them",
        "remove --yaml-cfg and give Megatron's settings as flags",
    ),
)
