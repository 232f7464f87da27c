"""Values of flags that a training refuses, those of S2-Attention in the same words as `inspect`; values that look like
those and are taken. {flag: value, None for a flag without one}, to be added to GOOD of bad_launches.py."""

Flags = dict[str, str | list[str] | None]

# Pairs of flags that Megatron refuses in its own words.
WRONG_PAIRS: dict[str, Flags] = {
    "fp16 and bf16": {"--fp16": None, "--bf16": None},
    "hidden_size": {"--hidden-size": "130"},
    "max_position_embeddings": {"--max-position-embeddings": "1023"},
    "mrope_section": {"--position-embedding-type": "mrope"},
    "full recomputation without a method": {"--recompute-granularity": "full", "--recompute-num-layers": "1"},
    "full recomputation without layers": {"--recompute-granularity": "full", "--recompute-method": "block"},
    "selective recomputation and recompute_method": {
        "--recompute-activations": None, "--recompute-granularity": "full", "--recompute-method": "uniform",
    },
    "selective recomputation and recompute_num_layers": {
        "--recompute-granularity": "selective", "--recompute-num-layers": "1",
    },
    "cp_comm_type of two levels": {"--cp-comm-type": "a2a+p2p"},
    "hierarchical_context_parallel_sizes": {"--hierarchical-context-parallel-sizes": ["2", "2"]},
    "virtual stages twice": {
        "--num-layers-per-virtual-pipeline-stage": "1", "--num-virtual-stages-per-pipeline-rank": "2",
    },
    "virtual stages without a pipeline": {"--num-virtual-stages-per-pipeline-rank": "2"},
}  # fmt: skip

# Of every entry of megatron/refusals/flags.py: (flags that it refuses beside --s2-config, words of the line).
REFUSED_FLAGS: dict[str, tuple[Flags, str]] = {
    "attention_dropout": (
        {"--attention-dropout": "0.1"}, "attention_dropout=0.1, but S2 attention has no dropout; add"),
    "window_size": (
        {"--window-size": "128,0"}, "--window-size 128,0 beside the sparsity"),
    "position_embedding_type": (
        {"--position-embedding-type": "relative", "--transformer-impl": "transformer_engine"},
        "--position-embedding-type relative adds an attention bias"),
    "kv_channels": ({"--kv-channels": "512"}, "--kv-channels 512: S2 attention computes head dims up to 256; use"),
    "kv_channels, from the hidden size": (
        {"--hidden-size": "2048"}, "--kv-channels 512: S2 attention computes head dims up to 256; use"),
    "transformer_impl": (
        {"--transformer-impl": "inference_optimized"},
        "--transformer-impl inference_optimized brings its own layer spec; use"),
    "s2_keep_attention_output": (
        {"--s2-keep-attention-output": None}, "--s2-keep-attention-output stores the attention's output"),
    "s2_keep_attention_output, other parts": (
        {"--s2-keep-attention-output": None, "--recompute-activations": None, "--recompute-modules": "mlp"},
        "--s2-keep-attention-output stores the attention's output"),
    "s2_cp_comm_type": (
        {"--s2-cp-comm-type": ["sparse", "a2a"]},
        "--s2-cp-comm-type sparse a2a: expected sparse, all_gather, a2a, one for all layers or one for each of the 4"),
}  # fmt: skip

TAKEN: dict[str, Flags] = {
    "all dropped": {"--hidden-dropout": "1"},
    "words of no exchange": {"--cp-comm-type": ["ring", "x"]},
    "parts of no recomputation": {"--recompute-modules": "x", "--recompute-method": "uniform"},
    "no layer of no recomputation": {"--recompute-method": "uniform", "--recompute-num-layers": "0"},
    "parts of a full recomputation": {
        "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "9",
        "--recompute-modules": "x",
    },
    "no layer of a full recomputation": {
        "--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": "0",
    },
    "an older flag that wins": {
        "--recompute-granularity": "full", "--recompute-activations": None, "--s2-keep-attention-output": None,
    },
    "every part": {
        "--recompute-granularity": "selective",
        "--recompute-modules": ["core_attn", "layernorm", "mlp", "moe", "shared_experts"],
    },
    "Megatron's spelling": {"--s2-cp-comm-type": ["allgather", "a2a", "sparse", "all_gather"]},
    "one virtual stage": {"--num-virtual-stages-per-pipeline-rank": "1"},
    "all layers in a virtual stage": {"--num-layers-per-virtual-pipeline-stage": "4"},
    "as many positions": {"--max-position-embeddings": "1024"},
    "heads that do not share": {"--hidden-size": "130", "--kv-channels": "32"},
    "odd heads without RoPE": {"--hidden-size": "132", "--position-embedding-type": "none"},
    "the largest heads": {"--kv-channels": "256"},
    "a wide model": {"--ffn-hidden-size": "2097152"},
    "a large batch": {"--global-batch-size": "33554432"},
    "a choice of fusion without fusion": {"--cross-entropy-fusion-impl": "te"},
}  # fmt: skip
