"""Which of Megatron's arguments concern attention, and what becomes of those that are not refused.

HONOURED: argument -> why it may stay. ATTENTION: names that sound like attention; NOT_ATTENTION: those among them that
are not. SEEN_AND_REFUSED: arguments of Megatron's development branch (d98e8a6) that make a model and were left out of
REVIEWED (refusals/model.py). test_refusals.py compares them with Megatron's own parser.
"""

from __future__ import annotations

import re

HONOURED: dict[str, str] = {
    # Heads, scale, normalisation: applied before or after the core attention, or handed to it
    "num_attention_heads": "resolved into the pattern",
    "num_query_groups": "native GQA and MQA, also fewer groups than tensor-parallel ranks",
    "group_query_attention": "native GQA and MQA",
    "kv_channels": "head dims up to 256",
    "multi_latent_attention": "values of another head dim than queries and keys",
    "qk_layernorm": "applied before the core attention",
    "qk_l2_norm": "applied before the core attention",
    "attention_output_gate": "applied after the core attention",
    "add_bias_linear": "a bias of the projections, not of the attention",
    "add_qkv_bias": "a bias of the projections, not of the attention",
    "use_mup": "its softmax scale is used; refused beside a different softmax_scale in the YAML",
    "mup_attn_scale_power": "its softmax scale is used; refused beside a different softmax_scale in the YAML",
    "mup_base_head_dim": "its softmax scale is used; refused beside a different softmax_scale in the YAML",
    "apply_query_key_layer_scaling": "divides before and multiplies after the mask, so the result is the same; the "
    "softmax is in fp32 anyway",
    "attention_softmax_in_fp32": "always so in S2 layers; Megatron's own dense layers follow the flag",
    "window_attn_skip_freq": "read only with --window-size, as --s2-config window-size does",
    "no_rope_freq": "applied before the core attention",
    "softmax_type": "the core attention has the offset, under Megatron's name",
    "hidden_dropout": "outside of the core attention",
    "bias_dropout_fusion": "outside of the core attention",
    # Data
    "dataloader_inter_document_masking": "packed documents, in both directions",
    "sft": "packed documents, in both directions",
    "reset_position_ids": "changes position embeddings only; S2 blocks count from the start of the sample",
    "eod_mask_loss": "changes the loss only",
    "create_attention_mask_in_dataloader": "a causal mask, which is not read; refused above 8192 tokens for its size",
    # Which kernels Megatron's own dense layers use
    "attention_backend": "read by Transformer Engine's dense layers; `local` asks for --spec, which is refused",
    "flash_attention_version": "read by Transformer Engine's dense layers",
    "use_flash_attn": "read by Transformer Engine's dense layers",
    "use_transformer_engine_op_fuser": "fuses MLPs only",
    # Memory and schedules
    "recompute_granularity": "full and selective; the core attention can be run again",
    "recompute_modules": "core_attn included",
    "cpu_offloading_num_layers": "tensors for the backward go through autograd's saved tensors",
    "fine_grained_activation_offloading": "core_attn included; tensors for the backward go through autograd's saved "
    "tensors",
    "offload_modules": "core_attn included",
    "activation_offload_fraction": "see fine_grained_activation_offloading",
    "delta_offload_bytes_across_pp_ranks": "see fine_grained_activation_offloading",
    "delay_offload_until_cuda_graph": "see fine_grained_activation_offloading",
    "overlap_moe_expert_parallel_comm": "changes the order in which layers run, not what they compute",
    "ep_overlap_early_attn_memory_release": "see overlap_moe_expert_parallel_comm",
    "use_megatron_fsdp": "shards weights, that of a softmax offset too; refused with weights alone",
    "moe_shared_expert_overlap": "inside the MoE layer",
    "deterministic_mode": "selects the deterministic backward",
    "cuda_graph_impl": "every kind with Transformer Engine's layers, full_iteration with Megatron's local ones too; "
    "for the exceptions see the refusals whose names begin with cuda_graph",
    "cuda_graph_modules": "graphs without the attention are not looked at; with it, see the refusals "
    "whose names begin with cuda_graph",
    "optimizer_cuda_graph": "captures the optimizer's step only",
    "context_parallel_size": "S2 layers exchange what --s2-cp-comm-type says",
    "cp_comm_type": "read by Megatron's own dense layers; S2 layers follow --s2-cp-comm-type",
    "max_seqlen_per_dp_cp_rank": "no effect without --hybrid-context-parallel, which is refused",
    "use_legacy_static_engine": "static inference goes through the core attention",
}

# What an argument about attention is called, and what only sounds like it.
ATTENTION = re.compile(
    r"attn|attention|softmax|flash|window|(^|_)qk|kitchen|(reset|create)_.*(mask|ids)|inter_document|dropout|cuda_graph"
    r"|fsdp\d?$|context_parallel|cp_comm|(^|_)dp_cp_|^spec$|hybrid_layer|is_hybrid|heterogeneous_layers_config_path"
    r"|^transformer_impl$|_decode$|dynamic_batching$|offload|recompute|deterministic|batch_invariant|query|kv_channels"
    r"|rl_step|static_engine|overlap_moe|experts_wgrad|sft$|eod_mask|yaml_cfg"
)
NOT_ATTENTION = re.compile(
    r"^(apply_wd_to_qk_layernorm|qk_clip_(alpha|threshold)|qk_head_dim|qk_pos_emb_head_dim|kitchen_attention_backend"
    r"|loss_scale_window|moe_.*|rl_.*|relative_attention_.*|dsa_.*|linear_attention_.*"
    r"|cuda_graph_(warmup_steps|scope_deprecated)|enable_cuda_graph|external_cuda_graph|inference_.*cuda_graph.*"
    r"|decode_only_cuda_graphs|recompute_(method|num_layers|activations)|distribute_saved_activations"
    r"|optimizer_(cpu_offload|offload_fraction)|use_torch_optimizer_for_cpu_offload"
    r"|cpu_offloading_retain_pinned_cpu_buffers|fine_grained_offloading_max_inflight_offloads"
    r"|min_offloaded_tensor_size|delay_offload_until_cuda_graph|biencoder_shared_query_context_model"
    r"|batch_invariant_backend|gdp_.*|mhc_.*|query_in_block_prob|muon_split_qkv|high_priority_a2a_comm_stream|inference_dynamic_batching_.*)$"
)

SEEN_AND_REFUSED = frozenset(
    (
        *("batch_invariant_backend", "enable_mhc_connections", "mhc_init_gating_factor", "mhc_num_residual_streams"),
        *("mhc_recompute_layer_num", "mhc_sinkhorn_iterations", "gdp_cutedsl_kernel", "gdp_num_householder"),
        *("gdp_num_chunk_states_to_recompute", "gtp_remat_opt_in_modules", "logit_dtype", "moe_combine_bwd_dtype"),
        *("moe_dispatch_fwd_dtype", "moe_use_grouped_tensor", "mtp_hsm"),
    )
)
