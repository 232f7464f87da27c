"""Refused: other versions of Megatron, other models than a GPT, and whatever else says which layer spec to build."""

from __future__ import annotations

import argparse
import dataclasses
from argparse import Action, Namespace
from enum import Enum
from functools import cache
from typing import NamedTuple

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


# Megatron's arguments that make a model, those of megatron-core 0.19.2. What a newer Megatron adds is refused unless it
# has Megatron's default, until somebody has looked at what it does to attention and written its name here.
_NAMES = """
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split activation_func_clamp_value
activation_offload_fraction add_bias_linear add_qkv_bias apply_query_key_layer_scaling
apply_residual_connection_post_layernorm apply_rope_fusion attention_backend attention_dropout attention_output_gate
attention_softmax_in_fp32 barrier_with_L1_time batch_invariant_mode bf16 bias_dropout_fusion bias_swiglu_fusion
cache_mla_latents calculate_per_token_loss clone_scatter_output_in_embedding config_logger_dir context_parallel_size
cp_comm_type cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers cross_entropy_fusion_impl
cross_entropy_loss_fusion cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps defer_embedding_wgrad_compute
delay_offload_until_cuda_graph delay_wgrad_compute delta_offload_bytes_across_pp_ranks deterministic_mode
disable_bf16_reduced_precision_matmul distribute_saved_activations dsa_indexer_head_dim dsa_indexer_k_norm_epsilon
dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_rope_interleaved
dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk
dsa_indexer_topk_freq dsa_indexer_use_sparse_loss dsa_kernel_backend embedding_init_method_std enable_cuda_graph
ep_overlap_early_attn_memory_release experimental_attention_variant expert_model_parallel_size
expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size external_cuda_graph ffn_hidden_size
fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads first_last_layers_bf16
flash_attention_version flash_decode fp16 fp16_lm_cross_entropy fp32_residual_connection fp4 fp4_quantizer_factory
fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin fp8_output_proj fp8_quantizer_factory
fp8_recipe fp8_wgrad fused_residual_rmsnorm glu_linear_offset gradient_accumulation_fusion hidden_dropout hidden_size
hierarchical_context_parallel_sizes high_priority_a2a_comm_stream hybrid_context_parallel hybrid_layer_pattern
hybrid_override_pattern inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_fuse_tp_communication
inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
inference_rng_tracker init_method_std init_method_xavier_uniform init_model_with_meta_device is_hybrid_model
kitchen_attention_backend kv_channels kv_lora_rank layernorm_epsilon layernorm_zero_centered_gamma linear_attention_freq
linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
log_max_attention_logit make_vocab_size_divisible_by mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim
mamba_training_ssm_states_dtype masked_softmax_fusion max_seqlen_per_dp_cp_rank microbatch_group_size_per_vp_stage
min_offloaded_tensor_size mla_down_proj_fusion mlp_chunks_for_prefill mlp_chunks_for_training moe_apply_probs_on_input
moe_aux_loss_coeff moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay moe_expert_capacity_factor
moe_expert_rank_capacity_factor moe_ffn_hidden_size moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
moe_grouped_gemm moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_input_jitter_eps moe_latent_size
moe_layer_freq moe_layer_recompute moe_mlp_glu_interleave_size moe_ncclep_static_shape moe_ncclep_zero_copy
moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_paged_stash
moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
moe_per_layer_logging moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_bias_update_rate moe_router_dtype
moe_router_enable_expert_bias moe_router_force_biased moe_router_force_load_balancing moe_router_fusion
moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups moe_router_padding_for_fp8
moe_router_padding_for_quantization moe_router_pre_softmax moe_router_quantile_balancing_ema moe_router_score_function
moe_router_topk moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_glu_interleave_size
moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_single_grouped_bias moe_single_grouped_weight
moe_token_dispatcher_type moe_token_drop_policy moe_use_upcycling moe_z_loss_coeff mrope_section mscale mscale_all_dim
mtp_detach_heads mtp_hybrid_override_pattern mtp_loss_scaling_factor mtp_num_layers mtp_standalone
mtp_use_repeated_layer multi_latent_attention mup_attn_scale_power mup_base_head_dim mup_base_hidden_size
mup_embedding_mult mup_output_mult mup_width_mult nccl_all_reduce_for_prefill no_rope_freq normalization
num_attention_heads num_experts num_layers num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_query_groups
offload_modules openai_gelu overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm
overlap_p2p_comm overlap_p2p_comm_warmup_flush perform_initialization pipeline_model_parallel_comm_backend
pipeline_model_parallel_layout pipeline_model_parallel_size position_embedding_type q_lora_rank qk_clip qk_clip_alpha
qk_clip_threshold qk_head_dim qk_l2_norm qk_layernorm qk_pos_emb_head_dim quick_geglu recompute_granularity
recompute_method recompute_modules recompute_num_layers rope_scaling_factor rope_type rotary_base rotary_interleaved
rotary_percent rotary_scaling_factor rotary_seq_len_interpolation_factor seq_length sequence_parallel softmax_type
squared_relu swiglu symmetric_ar_type te_precision_config_file tensor_model_parallel_size
tensor_parallel_num_weight_shards test_mode tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad
tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_cfg tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
tp_comm_split_rs transformer_impl untie_embeddings_and_output_weights use_cpu_initialization
use_fused_weighted_squared_relu use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_kitchen_attention
use_mamba_mem_eff_path use_mup use_ring_exchange_p2p use_te_activation_func use_transformer_engine_op_fuser v_head_dim
vocab_size wgrad_deferral_limit window_attn_skip_freq window_size
"""
REVIEWED = frozenset(_NAMES.split())
# What makes the model and is in none of Megatron's configs of it, or under another name.
MODEL_ARGUMENTS = (
    *("num_experts", "swiglu", "squared_relu", "quick_geglu", "openai_gelu", "moe_use_upcycling"),
    *("untie_embeddings_and_output_weights", "rotary_seq_len_interpolation_factor", "init_method_xavier_uniform"),
    *("te_precision_config_file", "bias_swiglu_fusion"),
)
MISSING = "without "  # what a switch begins with that is not given


class ModelArgument(NamedTuple):
    """An argument of Megatron's that makes the model. action: the parser's. defaults: the parser's, and the config's
    or None."""

    action: Action
    defaults: list

    def written(self, value) -> str:
        """As it stands on a command line; a switch that is not given as `without --switch`."""
        option = self.action.option_strings[0]
        if self.action.nargs == 0:
            return f"{MISSING}{option}" if value == self.action.default else option
        values = value if isinstance(value, (list, tuple)) else [value]
        return " ".join([option, *(str(getattr(item, "name", item)) for item in values)])


@cache
def _actions() -> dict[str, Action]:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {action.dest: action for action in parser._actions}


def _fields(config: type, *more: type) -> dict[str, ModelArgument]:
    """Megatron's arguments that are fields of one of these dataclasses, and MODEL_ARGUMENTS, by their names. config:
    the one whose defaults count."""
    actions, defaults = _actions(), {field.name: field.default for field in dataclasses.fields(config)}
    others = (field.name for each in more for field in dataclasses.fields(each))
    return {
        name: ModelArgument(actions[name], [actions[name].default, defaults.get(name)])
        for name in (*defaults, *others, *MODEL_ARGUMENTS)
        if name in actions
    }


def is_one_of(value, allowed: list) -> bool:
    """Whether an argument has one of these values. 0, False, None and nothing are the same, but 0.0 is a number, such
    as a clamp at 0.0; an Enum's member is its name."""
    allowed = [*allowed, *(each.name for each in allowed if isinstance(each, Enum))]
    known = (value.name if isinstance(value, Enum) else value) in allowed
    return known or not (value or isinstance(value, float) or any(allowed))


@cache
def hybrid_arguments() -> dict[str, ModelArgument]:
    """Those that hybrid.py has a list for."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.models.hybrid import HybridModelConfig

    found = _fields(TransformerConfig, HybridModelConfig)
    return {name: argument for name, argument in found.items() if not name.startswith("inference_")}


@cache
def model_arguments() -> dict[str, ModelArgument]:
    """Those of HybridModels and, where Megatron has one, of GPTs."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from megatron.training import models
    from megatron.training.models.hybrid import HybridModelConfig

    of_gpts = [models.GPTModelConfig] if hasattr(models, "GPTModelConfig") else []
    return _fields(MLATransformerConfig, HybridModelConfig, *of_gpts)


def _unknown(args: Namespace) -> list[str]:
    """What of args nobody has looked at, as it stands on the command line."""
    decided = REVIEWED.union(() if getattr(args, "hybrid_layer_pattern", None) is None else hybrid_arguments())
    new = {name: argument for name, argument in model_arguments().items() if name not in decided}
    values = {name: getattr(args, name, None) for name in new}
    return [new[name].written(value) for name, value in values.items() if not is_one_of(value, new[name].defaults)]


def _l2_norm_is_dropped(args: Namespace) -> bool:
    others = args.num_experts or getattr(args, "hybrid_layer_pattern", None)
    return bool(args.qk_l2_norm and args.transformer_impl == "local" and not others)


REFUSALS = (
    Refusal(
        "unknown_arguments",
        lambda args: bool(_unknown(args)),
        f"{{found}}: this version of s2_megatron was made for the flags of megatron-core {MEGATRON_MINIMUM}, and has "
        "not been looked at with this",
        f"leave it out, or use megatron-core {MEGATRON_MINIMUM}",
        lambda args: {"found": ", ".join(_unknown(args))},
    ),
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
