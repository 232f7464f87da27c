"""Command lines with --hybrid-layer-pattern, as refusal_cases.py has them without."""

from __future__ import annotations

from tests.megatron.refusal_cases import ENGINE, ENGINE_MODEL

NOT_RUN = "hybrid_not_run"


def hybrid(pattern: str, *switches: str, **flags: str | list[str]) -> dict:
    """A case's flags; switches: names of those without a value. The names with _ for -."""
    given = {f"--{name.replace('_', '-')}": value for name, value in {**dict.fromkeys(switches), **flags}.items()}
    return {"--hybrid-layer-pattern": pattern, **given}


# What has been run on Transformer Engine's layers.
HYBRID_CASES = {
    "hybrid_layer_pattern": (dict(flags=hybrid("M*M-")), "has layers M (Mamba takes"),
    NOT_RUN: (dict(flags=hybrid("*-*-", mtp_num_layers="1")), "--mtp-num-layers 1 without its layers (/)"),
}
LATENT = dict(without=["--group-query-attention"])
SPLIT = dict(tensor_model_parallel_size="2", num_experts="4")
ALSO_REFUSED_HYBRIDS = {
    "hybrid_gated_delta_nets": ("hybrid_layer_pattern", dict(flags=hybrid("G*G-")), "G (gated delta nets take"),
    "hybrid_latent": (
        "hybrid_layer_pattern",
        dict(flags=hybrid("+-+-", rope_type="rope"), **LATENT),
        "+ (multi-latent attention",
    ),
    "hybrid_dsa": ("hybrid_layer_pattern", dict(flags=hybrid("D-D-", rope_type="rope"), **LATENT), "D (DSA chooses"),
    "hybrid_engine": (
        NOT_RUN,
        dict(flags={**ENGINE_MODEL, **hybrid("*E*-", num_experts="4")}),
        "with S2 attention, Transformer Engine's layers and experts (E); docs/",
    ),
    "hybrid_engine_defaults": (
        NOT_RUN,
        dict(flags={**ENGINE, **hybrid("*-*-")}),
        "without --swiglu, without --untie-embeddings-and-output-weights; docs/validation.md has what has; add "
        "--disable-bias-linear, --swiglu, --untie-embeddings-and-output-weights and leave out or change the rest, or",
    ),
    "hybrid_engine_fusion": (
        NOT_RUN,
        dict(flags={**ENGINE_MODEL, **hybrid("*-*-")}, without=["--no-gradient-accumulation-fusion"]),
        "layers and without --no-gradient-accumulation-fusion; docs/validation.md has what has; add "
        "--no-gradient-accumulation-fusion, or use --transformer-impl local, or train a GPT, without --hybrid",
    ),
    "hybrid_engine_several": (
        NOT_RUN,
        dict(
            flags={**ENGINE_MODEL, **hybrid("*E*-", **SPLIT, context_parallel_size="2", sequence_parallel=None)},
            world_size=4,
        ),
        "layers and experts (E), --context-parallel-size 2; docs/",
    ),
    "hybrid_engine_recipe": (
        NOT_RUN,
        dict(flags={**ENGINE_MODEL, **hybrid("*-*-", te_precision_config_file="recipe.yaml")}),
        "layers and --te-precision-config-file recipe.yaml; docs/",
    ),
    "hybrid_engine_interpolated": (
        NOT_RUN,
        dict(flags={**ENGINE_MODEL, **hybrid("*-*-", rotary_seq_len_interpolation_factor="4")}),
        "layers and --rotary-seq-len-interpolation-factor 4; docs/",
    ),
    "hybrid_engine_cp": (
        NOT_RUN,
        dict(flags={**ENGINE_MODEL, **hybrid("*-*-", context_parallel_size="2")}, world_size=2),
        "layers and --context-parallel-size 2; docs/",
    ),
    "hybrid_engine_stages": (
        NOT_RUN,
        dict(flags={**ENGINE_MODEL, **hybrid("*|-|*|-", pipeline_model_parallel_size="2")}, world_size=2),
        "virtual pipeline stages (more parts between | than --pipeline-model-parallel-size 2); docs/",
    ),
    "hybrid_engine_packed": (
        NOT_RUN,
        dict(flags={**ENGINE_MODEL, **hybrid("*-*-", "dataloader_inter_document_masking")}),
        "layers and packed documents; docs/",
    ),
    "hybrid_cut_experts": (
        NOT_RUN,
        dict(flags=hybrid("*E*E", **SPLIT, expert_tensor_parallel_size="2"), world_size=2),
        "and --expert-tensor-parallel-size 2; docs/",
    ),
    "hybrid_recomputed": (
        NOT_RUN,
        dict(flags=hybrid("*-*-", recompute_granularity="selective", recompute_modules=["core_attn", "layernorm"])),
        "and --recompute-modules core_attn layernorm; docs/",
    ),
    "hybrid_mtp_experts": (
        NOT_RUN,
        dict(flags=hybrid("*E*E/*E/*E", "mtp_use_repeated_layer", num_experts="4")),
        "and experts behind the / and --mtp-use-repeated-layer, of which Megatron adds",
    ),
    "hybrid_mtp_repeated": (
        NOT_RUN,
        dict(flags=hybrid("*-*-/*-/*-", "mtp_use_repeated_layer", tensor_model_parallel_size="2"), world_size=2),
        "and --mtp-use-repeated-layer in 2 processes; docs/",
    ),
    "hybrid_mtp_conversations": (
        NOT_RUN,
        dict(
            flags=hybrid("*-*-/*-", "calculate_per_token_loss", mtp_num_layers="1", context_parallel_size="2"),
            attributes={"sft": True},
            world_size=2,
        ),
        "and multi-token prediction (/) with --sft and context parallelism; docs/",
    ),
    # Megatron's HybridModel builds its RoPE without it, and its attention takes it.
    "hybrid_interleaved": (
        NOT_RUN,
        dict(flags=hybrid("*-*-", "rotary_interleaved")),
        "and --rotary-interleaved; docs/",
    ),
    # Of HybridModelConfig alone, as --output-logit-dtype of Megatron's development branch.
    "hybrid_logits": (
        NOT_RUN,
        dict(flags=hybrid("*-*-"), attributes={"fp16_lm_cross_entropy": True}),
        "and --fp16-lm-cross-entropy; docs/",
    ),
    "hybrid_without_positions": (
        NOT_RUN,
        dict(flags=hybrid("*-*-", position_embedding_type="none")),
        "and --position-embedding-type none; docs/",
    ),
    "hybrid_clamp": (  # 0.0 is a clamp, too
        NOT_RUN,
        dict(flags=hybrid("*-*-", activation_func_clamp_value="0")),
        "and --activation-func-clamp-value 0.0; docs/",
    ),
    "hybrid_unreviewed": (
        "unknown_arguments",
        dict(flags=hybrid("*-*-", q_lora_rank="8"), unreviewed=["q_lora_rank"]),
        "--q-lora-rank 8: this version of s2_megatron was made for",
    ),
    "hybrid_unreviewed_here": (  # told once
        NOT_RUN,
        dict(flags=hybrid("*-*-", no_rope_freq="4"), unreviewed=["no_rope_freq"]),
        "and --no-rope-freq 4; docs/",
    ),
    "hybrid_several": (
        NOT_RUN,
        dict(
            attributes={"fp8": "hybrid", "cuda_graph_impl": "full_iteration", "cpu_offloading_num_layers": 1},
            flags=hybrid("*-*-", "no_check_for_nan_in_loss_and_grad", no_rope_freq="4"),
        ),
        "--no-rope-freq 4, --fp8-format hybrid, --cuda-graph-impl full_iteration",
    ),
}
ACCEPTED_HYBRIDS = {
    "hybrid_on_engine": dict(flags={**ENGINE_MODEL, **hybrid("*-*-*-*-", "bf16")}),
    "hybrid_on_engine_layouts": dict(
        flags={
            **ENGINE_MODEL,
            **hybrid(
                "*-*-|*-*-",
                *("sequence_parallel", "use_distributed_optimizer"),
                tensor_model_parallel_size="2",
                pipeline_model_parallel_size="2",
                recompute_granularity="full",
                recompute_method="uniform",
                recompute_num_layers="1",
            ),
        },
        world_size=8,
    ),
    "hybrid": dict(flags=hybrid("*-*--*-*")),
    "hybrid_mtp": dict(flags=hybrid("*-*-*-*-/*-", recompute_granularity="selective")),
    "hybrid_experts_of_mtp": dict(
        flags=hybrid("*E*E*E*E/*E", num_experts="4", pipeline_model_parallel_size="2"), world_size=2
    ),
    "hybrid_experts": dict(flags=hybrid("*E*E*E*E", num_experts="4")),
    "hybrid_layouts": dict(
        flags=hybrid(
            "*-|*-|*E|*-",
            *("sequence_parallel", "use_distributed_optimizer", "disable_bias_linear", "swiglu"),
            **SPLIT,
            expert_tensor_parallel_size="1",
            pipeline_model_parallel_size="2",
            expert_model_parallel_size="2",
            context_parallel_size="2",
            moe_token_dispatcher_type="alltoall",
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers="1",
        ),
        world_size=8,
    ),
    # Megatron's validation gives --expert-tensor-parallel-size the value of the other one.
    "hybrid_without_experts": dict(flags=hybrid("*-*-*-*-", tensor_model_parallel_size="2"), world_size=2),
}
