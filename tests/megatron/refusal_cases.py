"""Command lines that S2-Attention refuses, and such that are close to a refusal and accepted; for test_refusals.py.
Those with CUDA graphs: graph_cases.py. Those of refusals/unproven.py: unproven_cases.py; of refusals/hybrid.py:
hybrid_cases.py.

A case: flags (to add or change), without (flags to leave out), attributes (set after parsing), world_size, version,
connections (CUDA_DEVICE_MAX_CONNECTIONS), unreviewed (arguments that stand for those of a newer Megatron).
"""

from __future__ import annotations

ENGINE = {"--transformer-impl": "transformer_engine"}
ENGINE_MODEL = {
    **ENGINE,
    **dict.fromkeys(("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights")),
    "--normalization": "RMSNorm",
}
WHOLE_ITERATIONS = {"--cuda-graph-impl": "full_iteration", "--no-check-for-nan-in-loss-and-grad": None}
PADDED = {
    "--num-experts": "4",
    "--moe-token-dispatcher-type": "alltoall",
    "--moe-expert-capacity-factor": "1",
    "--moe-pad-expert-input-to-capacity": None,
}
OFFLOAD = {"--fine-grained-activation-offloading": None, "--offload-modules": "core_attn"}
GRAPHS = {**ENGINE, "--cuda-graph-impl": "local"}
ENGINE_GRAPHS = {**ENGINE, "--cuda-graph-impl": "transformer_engine"}
ROUTERS = {"--num-experts": "4", "--cuda-graph-modules": ["attn", "moe_router"]}
LATENT = {"--multi-latent-attention": None, "--rope-type": "rope"}
CP2 = {"--context-parallel-size": "2"}
FSDP2 = {"--use-torch-fsdp2": None, "--untie-embeddings-and-output-weights": None}
MEGATRON_FSDP = {"--use-megatron-fsdp": None, "--ckpt-format": "fsdp_dtensor"}
SAVED = {"--save": "run", "--save-interval": "5"}
OVERLAPPED = {
    "--num-experts": "4",
    "--expert-model-parallel-size": "2",
    "--moe-token-dispatcher-type": "alltoall",
    "--overlap-moe-expert-parallel-comm": None,
    "--bf16": None,
    "--no-masked-softmax-fusion": None,
}
UNREVIEWED = {"--no-rope-freq": "4", "--qk-layernorm": None}

# For every refusal: (what to change in a command line that is accepted, the flag that the message has to name).
CASES = {
    "megatron_version": (dict(version="0.18.3"), "pip install 'megatron-core"),
    "unknown_arguments": (
        dict(flags=UNREVIEWED, unreviewed=["no_rope_freq", "qk_layernorm", "rotary_base"]),
        "--qk-layernorm, --no-rope-freq 4: this version of s2_megatron was made for the flags of megatron-core 0.19.2",
    ),
    "attention_dropout": (dict(without=["--attention-dropout"]), "--attention-dropout 0"),
    "window_size": (
        dict(flags={"--window-size": "128,0"}),
        "--window-size 128,0 beside the sparsity",
    ),
    "reset_attention_mask": (dict(flags={"--reset-attention-mask": None}), "--dataloader-inter-document-masking"),
    "create_attention_mask_in_dataloader": (
        dict(flags={"--seq-length": "16384"}, without=["--no-create-attention-mask-in-dataloader"]),
        "--no-create-attention-mask-in-dataloader",
    ),
    "position_embedding_type": (
        dict(flags={"--position-embedding-type": "relative"}),
        "--position-embedding-type rope",
    ),
    # 4 + 2 * 2 heads of 32; with 8388608 tokens it is just what can be addressed.
    "apply_rope_fusion": (
        dict(
            flags={**ENGINE, "--seq-length": "8388672", "--max-position-embeddings": "8388672"},
            without=["--no-rope-fusion"],
        ),
        "fused RoPE of 2147500032 elements",
    ),
    "kv_channels": (dict(flags={"--kv-channels": "512"}), "--kv-channels"),
    "mla_down_proj_fusion": (
        # Without --multi-latent-attention, which is refused with Transformer Engine.
        dict(attributes={"mla_down_proj_fusion": True}, flags=ENGINE),
        "remove --mla-down-proj-fusion",
    ),
    "cache_mla_latents": (dict(flags={"--cache-mla-latents": None}), "remove --cache-mla-latents"),
    "mla_tensor_parallel": (
        dict(flags={**LATENT, "--tensor-model-parallel-size": "2"}, without=["--group-query-attention"], world_size=2),
        "use --tensor-model-parallel-size 1",
    ),
    "mla_without_sequence_parallel": (
        dict(
            flags={**LATENT, **ENGINE_MODEL, "--no-rope-fusion": None, "--tensor-model-parallel-size": "2"},
            without=["--group-query-attention"],
            world_size=2,
        ),
        "add --sequence-parallel",
    ),
    "mla_rope_scaling": (
        dict(flags={**LATENT, "--use-rope-scaling": None}, without=["--group-query-attention"]),
        "remove --use-rope-scaling",
    ),
    "experimental_attention_variant": (
        dict(flags={"--experimental-attention-variant": "dsa"}),
        "remove --experimental-attention-variant",
    ),
    "linear_attention_freq": (dict(flags={"--linear-attention-freq": "4"}), "remove --linear-attention-freq"),
    "decoder_num_layers": (dict(flags={"--decoder-num-layers": "4"}), "remove --decoder-num-layers"),
    "vision_pretraining": (dict(flags={"--vision-pretraining": None}), "remove --vision-pretraining"),
    "ict_head_size": (dict(flags={"--ict-head-size": "128"}), "remove --ict-head-size"),
    "spec": (dict(flags={"--spec": ["module", "function"]}), "remove --spec"),
    "qk_l2_norm": (dict(flags={"--qk-l2-norm": None}), "use --qk-layernorm"),
    "is_hybrid_model": (dict(flags={"--is-hybrid-model": None}), "remove --is-hybrid-model"),
    "heterogeneous_layers_config_path": (
        dict(attributes={"heterogeneous_layers_config_encoded_json": "{}"}),
        "remove --heterogeneous-layers-config-path",
    ),
    "transformer_impl": (
        dict(flags={"--transformer-impl": "inference_optimized"}),
        "--transformer-impl transformer_engine, or local",
    ),
    "use_kitchen_attention": (dict(flags={"--use-kitchen-attention": None}), "remove --use-kitchen-attention"),
    "yaml_cfg": (dict(attributes={"yaml_cfg": "model.yaml"}), "remove --yaml-cfg"),
    "fp8_dot_product_attention": (
        dict(attributes={"fp8_dot_product_attention": True}),
        "fp8_dot_product_attention=False",
    ),
    "fp8_multi_head_attention": (dict(attributes={"fp8_multi_head_attention": True}), "fp8_multi_head_attention=False"),
    "qk_clip": (dict(flags={"--qk-clip": None}), "remove --qk-clip"),
    "log_max_attention_logit": (dict(flags={"--log-max-attention-logit": None}), "remove --log-max-attention-logit"),
    "masked_softmax_fusion": (dict(flags={"--bf16": None}), "--no-masked-softmax-fusion"),
    "batch_invariant_mode": (dict(flags={"--batch-invariant-mode": None}), "remove --batch-invariant-mode"),
    "s2_cp_comm_type": (
        dict(flags={"--context-parallel-size": "2", "--s2-cp-comm-type": ["sparse", "a2a", "sparse"]}, world_size=2),
        "sparse a2a sparse: expected sparse, all_gather, a2a, one for all layers or one for each of the 4 layers; use "
        "--s2-cp-comm-type sparse",
    ),
    "s2_cp_mtp": (
        dict(
            flags={
                "--context-parallel-size": "2",
                "--dataloader-inter-document-masking": None,
                "--s2-cp-comm-type": "a2a",
                "--mtp-num-layers": "1",
            },
            world_size=2,
        ),
        "remove --mtp-num-layers",
    ),
    "s2_cp_mtp_masks": (
        dict(
            flags={"--context-parallel-size": "2", "--eod-mask-loss": None, "--mtp-num-layers": "1"},
            world_size=2,
        ),
        "add --calculate-per-token-loss",
    ),
    "s2_keep_attention_output": (dict(flags={"--s2-keep-attention-output": None}), "remove --s2-keep-attention-output"),
    "hierarchical_context_parallel_sizes": (
        dict(flags={"--context-parallel-size": "4", "--hierarchical-context-parallel-sizes": ["2", "2"]}, world_size=4),
        "remove --hierarchical-context-parallel-sizes",
    ),
    "hybrid_context_parallel": (
        dict(flags={"--hybrid-context-parallel": None, "--calculate-per-token-loss": None}),
        "remove --hybrid-context-parallel",
    ),
    "dynamic_context_parallel": (
        dict(attributes={"dynamic_context_parallel": True}),
        "remove --dynamic-context-parallel",
    ),
    "megatron_fsdp_version": (
        dict(attributes={"use_megatron_fsdp": True, "megatron_fsdp_version": 2}),
        "--megatron-fsdp-version 2 has not been run",
    ),
    "flash_decode": (dict(flags={"--flash-decode": None}), "remove --flash-decode"),
    "inference_dynamic_batching": (dict(flags={"--inference-dynamic-batching": None}), "--use-legacy-static-engine"),
    "perform_rl_step": (dict(flags={"--perform-rl-step": None}), "remove --perform-rl-step"),
    "async_strategy": (
        dict(
            flags={**SAVED, "--async-save": None, "--use-persistent-ckpt-worker": None, "--ckpt-format": "torch_dist"},
            missing="nvidia_resiliency_ext",
        ),
        "use --async-strategy mcore, or pip install 'nvidia-resiliency-ext>=0.6'",
    ),
    "ckpt_format": (
        dict(
            flags={**FSDP2, **SAVED, "--ckpt-format": "torch_dcp", "--no-save-optim": None},
            connections="8",
        ),
        "use --ckpt-format torch_dist",
    ),
    "use_megatron_fsdp": (
        # Without the optimizer's state, whose refusal without Transformer Engine would be a second one.
        dict(flags={**MEGATRON_FSDP, **SAVED, "--no-save-optim": None}, connections="8"),
        "use --use-distributed-optimizer instead of --use-megatron-fsdp",
    ),
    "use_torch_fsdp2": (
        dict(flags={**FSDP2, **SAVED}, connections="8"),
        "add --no-save-optim and --no-load-optim",
    ),
    "use_distributed_optimizer": (
        dict(flags={"--use-distributed-optimizer": None, "--save": "run", "--save-interval": "5"}),
        "install Transformer Engine or Apex, or remove --use-distributed-optimizer",
    ),
}

# Close to a refusal, and accepted.
ACCEPTED = {
    "unreviewed_defaults": dict(flags={"--rotary-base": "10000"}, unreviewed=["no_rope_freq", "rotary_base"]),
    "short_attention_mask": dict(without=["--no-create-attention-mask-in-dataloader"]),
    "packed": dict(flags={"--dataloader-inter-document-masking": None}),
    "latent": dict(
        # The head dim that Megatron would take without it is beyond the limit.
        flags={**LATENT, "--kv-channels": "512", "--qk-layernorm": None, "--mla-down-proj-fusion": None},
        without=["--group-query-attention"],
    ),
    "latent_engine": dict(
        flags={
            **LATENT,
            **ENGINE_MODEL,
            "--no-rope-fusion": None,
            "--tensor-model-parallel-size": "2",
            "--sequence-parallel": None,
        },
        without=["--group-query-attention"],
        world_size=2,
    ),
    "packed_own_core": dict(flags={"--dataloader-inter-document-masking": None, "--s2-dense-core": "s2"}),
    "reset_position_ids": dict(flags={"--reset-position-ids": None, "--eod-mask-loss": None}),
    "distributed_optimizer_unsaved": dict(flags={"--use-distributed-optimizer": None}),
    "distributed_optimizer_no_optim": dict(
        flags={"--use-distributed-optimizer": None, "--save": "run", "--save-interval": "5", "--no-save-optim": None}
    ),
    "context_parallel": dict(flags={"--context-parallel-size": "4"}, world_size=4),
    "context_parallel_types": dict(
        flags={"--context-parallel-size": "2", "--s2-cp-comm-type": ["sparse", "a2a", "all_gather", "allgather"]},
        world_size=2,
    ),
    "context_parallel_packed": dict(
        flags={
            "--context-parallel-size": "2",
            "--dataloader-inter-document-masking": None,
            "--s2-cp-comm-type": "all_gather",
        },
        world_size=2,
    ),
    # The first layer is dense; it follows the flag only where S2's op computes it.
    "context_parallel_dense_a2a": dict(
        flags={"--context-parallel-size": "4", "--s2-cp-comm-type": ["a2a", "sparse", "sparse", "sparse"]}, world_size=4
    ),
    "context_parallel_dense_length": dict(
        flags={
            "--context-parallel-size": "2",
            "--s2-cp-comm-type": ["sparse", "a2a", "a2a", "a2a"],
            "--seq-length": "1088",
        },
        world_size=2,
    ),
    "any_length": dict(flags={"--seq-length": "1000"}),
    "long": dict(flags={"--seq-length": "1048576"}),
    "mha": dict(without=["--group-query-attention"]),
    "moe": dict(flags={"--num-experts": "4"}),
    "qk_l2_norm_experts": dict(flags={"--qk-l2-norm": None, "--num-experts": "4"}),
    "mtp": dict(flags={"--mtp-num-layers": "2"}),
    "mtp_repeated": dict(flags={"--mtp-num-layers": "2", "--mtp-use-repeated-layer": None}),
    "torch_fsdp2": dict(flags=FSDP2, connections="8"),
    "torch_fsdp2_weights": dict(
        flags={**FSDP2, **SAVED, "--no-save-optim": None, "--load": "run", "--no-load-optim": None}, connections="8"
    ),
    "megatron_fsdp": dict(flags=MEGATRON_FSDP, connections="8"),
    "overlapped_experts": dict(flags=OVERLAPPED, world_size=2, connections="8"),
    "overlapped_experts_megatron_fsdp": dict(flags={**OVERLAPPED, **MEGATRON_FSDP}, world_size=2, connections="8"),
    "deterministic": dict(flags={"--deterministic-mode": None}),
    "recompute_kept": dict(
        flags={
            "--recompute-granularity": "selective",
            "--recompute-modules": "core_attn",
            "--s2-keep-attention-output": None,
        }
    ),
    "recompute_kept_default_modules": dict(
        flags={"--recompute-granularity": "selective", "--s2-keep-attention-output": None}
    ),
    "recompute": dict(flags={"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}),
    "megatron_prerelease": dict(version="0.20.0rc1"),
    "megatron_next": dict(version="0.20.4+abc"),
}


# Other ways to a refusal of CASES: name: (refusal, what to change), and the words of the message where they are others.
RECOMPUTED = {"--recompute-granularity": "selective", "--s2-keep-attention-output": None}
ALSO_REFUSED = {
    "head_dim_of_latent_keys": (
        "kv_channels",
        dict(flags={**LATENT, "--qk-head-dim": "256"}, without=["--group-query-attention"]),
        "--qk-head-dim + --qk-pos-emb-head-dim 320: S2 attention computes head dims up to 256; use a smaller "
        "--qk-head-dim",
    ),
    "head_dim_of_latent_values": (
        "kv_channels",
        dict(flags={**LATENT, "--v-head-dim": "264"}, without=["--group-query-attention"]),
        "--v-head-dim 264: S2 attention computes head dims up to 256; use a smaller --v-head-dim",
    ),
    "recompute_kept_other_modules": (
        "s2_keep_attention_output",
        dict(flags={**RECOMPUTED, "--recompute-modules": ["layernorm", "mlp"]}),
    ),
    "recompute_kept_modules_alone": (
        "s2_keep_attention_output",
        dict(flags={"--recompute-modules": "core_attn", "--s2-keep-attention-output": None}),
    ),
    "torch_fsdp2_loaded": (
        "use_torch_fsdp2",
        dict(flags={**FSDP2, "--load": "run"}, connections="8"),
    ),
    "megatron_fsdp_saved": (
        "use_distributed_optimizer",
        dict(flags={**MEGATRON_FSDP, **SAVED}, connections="8"),
    ),
    "megatron_fsdp_loaded": (
        "use_megatron_fsdp",
        dict(flags={**MEGATRON_FSDP, "--load": "run", "--no-load-optim": None}, connections="8"),
    ),
    "megatron_fsdp_begins_with_weights": (
        "use_megatron_fsdp",
        dict(flags={**MEGATRON_FSDP, "--pretrained-checkpoint": "run"}, connections="8"),
    ),
}

# What the layers of the YAML cannot do, however it is written: name: (what to change, the message's end).
LAYERS = {
    "dense_core_latent": (
        dict(flags={**LATENT, "--s2-dense-core": "stock"}, without=["--group-query-attention"]),
        "use --transformer-impl transformer_engine",
    ),
    "dense_core_packed": (
        dict(flags={"--s2-dense-core": "stock", "--dataloader-inter-document-masking": None}),
        "and packed documents (--sft, --dataloader-inter-document-masking): Megatron's local attention refuses that; "
        "use --s2-dense-core auto or s2, or install Transformer Engine and use --transformer-impl transformer_engine",
    ),
    "dense_core_context_parallel": (
        dict(flags={"--s2-dense-core": "stock", "--context-parallel-size": "2"}, world_size=2),
        "use --transformer-impl transformer_engine",
    ),
    "a2a": (
        dict(flags={"--context-parallel-size": "4", "--s2-cp-comm-type": "a2a"}, world_size=4),
        "s2_cp_comm_type='a2a' with 2 KV heads on a tensor-parallel rank and context_parallel_size=4; expected a "
        "multiple of 4; use --s2-cp-comm-type sparse",
    ),
    "a2a_one_layer": (
        dict(
            flags={"--context-parallel-size": "4", "--s2-cp-comm-type": ["sparse", "sparse", "a2a", "sparse"]},
            world_size=4,
        ),
        "use --s2-cp-comm-type sparse",
    ),
    "a2a_mtp": (  # follows the last of the types
        dict(
            flags={
                "--context-parallel-size": "4",
                "--mtp-num-layers": "1",
                "--s2-cp-comm-type": ["sparse", "sparse", "sparse", "a2a"],
            },
            world_size=4,
        ),
        "use --s2-cp-comm-type sparse",
    ),
    "packed": (
        dict(flags={"--context-parallel-size": "2", "--dataloader-inter-document-masking": None}, world_size=2),
        "(layers from 0: 0-3); use --s2-cp-comm-type all_gather, or a2a, for all layers or for these (one word a "
        "layer)",
    ),
    "packed_dense_layer": (
        dict(
            flags={
                "--context-parallel-size": "2",
                "--dataloader-inter-document-masking": None,
                "--s2-cp-comm-type": ["sparse", "all_gather", "a2a", "all_gather"],
            },
            world_size=2,
        ),
        "(layers from 0: 0); use --s2-cp-comm-type all_gather, or a2a, for all layers or for these (one word a layer)",
    ),
    "packed_one_layer": (
        dict(
            flags={
                "--context-parallel-size": "2",
                "--dataloader-inter-document-masking": None,
                "--s2-cp-comm-type": ["a2a", "a2a", "sparse", "all_gather"],
            },
            world_size=2,
        ),
        "takes windows and sinks; strides, masks, dense heads and layers see keys all over a document: nearly all "
        "would travel (layers from 0: 2); use --s2-cp-comm-type all_gather, or a2a, for all layers or for these (one "
        "word a layer)",
    ),
    "length": (
        dict(flags={"--context-parallel-size": "4", "--seq-length": "1088"}, world_size=4),
        "--seq-length 1088 with --context-parallel-size 4 and block_size 64: expected a multiple of 2 * "
        "context-parallel size * block_size = 512; use --seq-length 1024 or 1536, or a smaller block_size",
    ),
}
