"""Settings of Megatron that read like attention and may stay, with the reason. The others are in refusals.py."""

from __future__ import annotations

HONOURED: dict[str, str] = {
    # Heads, scale, normalisation: applied before or after the core attention, or handed to it
    "num_attention_heads": "resolved into the pattern",
    "num_query_groups": "native GQA and MQA, also fewer groups than tensor-parallel ranks",
    "group_query_attention": "native GQA and MQA",
    "kv_channels": "head dims up to 256",
    "qk_layernorm": "applied before the core attention",
    "qk_l2_norm": "applied before the core attention",
    "attention_output_gate": "applied after the core attention",
    "add_bias_linear": "a bias of the projections, not of the attention",
    "add_qkv_bias": "a bias of the projections, not of the attention",
    "use_mup": "its softmax scale is used; refused beside a different softmax_scale in the YAML",
    "mup_attn_scale_power": "its softmax scale is used; refused beside a different softmax_scale in the YAML",
    "mup_base_head_dim": "its softmax scale is used; refused beside a different softmax_scale in the YAML",
    "apply_query_key_layer_scaling": "divides before and multiplies after the mask, so the result is the same; the softmax is in fp32 anyway",
    "attention_softmax_in_fp32": "always so in S2 layers; Megatron's own dense layers follow the flag",
    "window_attn_skip_freq": "read only with --window-size, which is refused",
    "no_rope_freq": "applied before the core attention",
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
    "fine_grained_activation_offloading": "core_attn included; tensors for the backward go through autograd's saved tensors",
    "offload_modules": "core_attn included",
    "activation_offload_fraction": "see fine_grained_activation_offloading",
    "delta_offload_bytes_across_pp_ranks": "see fine_grained_activation_offloading",
    "delay_offload_until_cuda_graph": "no effect without CUDA graphs, which are refused with offloading",
    "ep_overlap_early_attn_memory_release": "no effect without --overlap-moe-expert-parallel-comm, which is refused",
    "moe_shared_expert_overlap": "inside the MoE layer",
    "deterministic_mode": "selects the deterministic backward",
    "cuda_graph_modules": "graphs without the attention are not looked at; with it, see the refusals of cuda_graph_impl",
    "optimizer_cuda_graph": "captures the optimizer's step only",
    "context_parallel_size": "S2 layers exchange what --s2-cp-comm-type says",
    "cp_comm_type": "read by Megatron's own dense layers; S2 layers follow --s2-cp-comm-type",
    "max_seqlen_per_dp_cp_rank": "no effect without --hybrid-context-parallel, which is refused",
    "use_legacy_static_engine": "static inference goes through the core attention",
}
