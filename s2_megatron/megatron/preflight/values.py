"""Values of flags that no training can have, alone or beside each other.

Megatron 0.19.2 parses them; some it refuses when it validates its arguments, on others it fails later. The start of a
training looks here, and so do `s2-megatron check` and `inspect`, which say it in the same words. inspect reads
some of Megatron's flags, without Megatron and torch: neither is imported here, and what `args` lacks was not given.
"""

from __future__ import annotations

import math
from argparse import Namespace

from s2_megatron.config.errors import printable
from s2_megatron.config.resolve import MOST_HEADS, MOST_LAYERS, MOST_SEQ_LENGTH
from s2_megatron.megatron.preflight.mistake import Mistake, refuse_first

LARGE = 2**31 - 1
# Integer flags -> (least, most). What most is for: a number above it is a slip, and no model or job has it.
RANGES = {
    "num_layers": (1, MOST_LAYERS),
    "hidden_size": (1, 2**20),
    "ffn_hidden_size": (1, 2**24),
    "num_attention_heads": (1, MOST_HEADS),
    "num_query_groups": (1, MOST_HEADS),
    "kv_channels": (1, 2**16),
    "seq_length": (1, MOST_SEQ_LENGTH),
    "max_position_embeddings": (1, MOST_SEQ_LENGTH),
    "mtp_num_layers": (0, MOST_LAYERS),
    "num_layers_per_virtual_pipeline_stage": (1, MOST_LAYERS),
    "num_virtual_stages_per_pipeline_rank": (1, MOST_LAYERS),
    "rotary_base": (1, 10**12),
    "rotary_seq_len_interpolation_factor": (1, MOST_SEQ_LENGTH),
    "moe_layer_freq": (1, MOST_LAYERS),
    "vocab_size": (1, LARGE),
    "make_vocab_size_divisible_by": (1, 2**20),
    "tensor_model_parallel_size": (1, 2**16),
    "pipeline_model_parallel_size": (1, 2**16),
    "context_parallel_size": (1, 2**16),
    "expert_model_parallel_size": (1, 2**16),
    "expert_tensor_parallel_size": (1, 2**16),
    "micro_batch_size": (1, 2**20),
    "global_batch_size": (1, LARGE),
    "train_iters": (1, 10**12),
    "train_samples": (1, 10**15),
    "lr_warmup_iters": (0, 10**12),
    "lr_warmup_samples": (0, 10**15),
    "lr_decay_iters": (1, 10**12),
    "lr_decay_samples": (1, 10**15),
    "lr_wsd_decay_iters": (0, 10**12),
    "lr_wsd_decay_samples": (0, 10**15),
    "eval_iters": (0, 10**12),
    "eval_interval": (1, 10**12),
    "save_interval": (1, 10**12),
    "save_params_interval": (1, 10**12),
    "save_activations_interval": (1, 10**12),
    "save_tokens_per_expert_interval": (1, 10**12),
    "save_wgrads_interval": (1, 10**12),
    "save_dgrads_interval": (1, 10**12),
    "check_weight_hash_across_dp_replicas_interval": (1, 10**12),
    "gpu_sniff_test_interval": (1, 10**12),
    "log_memory_interval": (1, 10**12),
    "log_interval": (1, 10**12),
    "tensorboard_log_interval": (1, 10**12),
    "exit_interval": (1, 10**12),
    "exit_duration_in_mins": (1, LARGE),
    "distributed_timeout_minutes": (1, LARGE),
    "distributed_timeout_seconds_after_init": (1, LARGE),
    "num_workers": (0, 2**16),
    "ckpt_step": (1, 10**12),
    "seed": (1, LARGE),
    "s2_position_loss": (1, MOST_SEQ_LENGTH),
}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_ranges(args: Namespace) -> None:
    """Raises ValueError for an integer outside of RANGES."""
    for name, (least, most) in RANGES.items():
        value = getattr(args, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= most:
            near = min(max(value, least), most)
            shown = value if abs(value) < 10**18 else printable(str(value)[:30] + "...")
            raise ValueError(
                f"{flag_of(name)}={shown}: expected {least} to {most}; use {flag_of(name)} {near}, or leave it out"
            )


# Numbers with a fraction -> (what is taken, in words, one that is). Megatron and torch's optimizers fail on others once
# the model is built.
NUMBERS = {
    "adam_beta1": (lambda value: 0 <= value < 1, "0 or more and less than 1", 0.9),
    "adam_beta2": (lambda value: 0 <= value < 1, "0 or more and less than 1", 0.95),
    "adam_eps": (lambda value: value > 0, "above 0", 1e-8),  # 0 / 0 for every row of weights without a gradient
    "sgd_momentum": (lambda value: value >= 0, "0 or more", 0.9),
    "init_method_std": (lambda value: value >= 0, "0 or more", 0.02),
    "embedding_init_method_std": (lambda value: value >= 0, "0 or more", 0.02),
    "hidden_dropout": (lambda value: 0 <= value <= 1, "0 to 1", 0.1),
    "attention_dropout": (lambda value: 0 <= value <= 1, "0 to 1", 0.0),
    "rotary_percent": (lambda value: 0 < value <= 1, "above 0 and up to 1", 1.0),
}


def check_numbers(args: Namespace) -> None:
    """Raises ValueError for a floating-point flag that is no number, or outside of NUMBERS."""
    for name, value in vars(args).items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{flag_of(name)}=nan: expected a number; correct it, or leave it out")
    for name, (taken, words, example) in NUMBERS.items():
        value = getattr(args, name, None)
        if value is not None and not taken(value):
            raise ValueError(
                f"{flag_of(name)}={value:g}: out of its range; expected {words}; use {flag_of(name)} {example:g}"
            )


# What Transformer Engine's attention knows.
EXCHANGES = ("p2p", "a2a", "all_gather", "a2a+p2p")


def is_selective(args: Namespace) -> bool:
    """Whether parts of layers are recomputed. Megatron lets --recompute-activations win."""
    return bool(args.recompute_activations) or args.recompute_granularity == "selective"


def _is_full(args: Namespace) -> bool:
    return args.recompute_granularity == "full" and not args.recompute_activations


def _unknown_exchange(args: Namespace) -> bool:
    """Whether Transformer Engine would be told to exchange keys and values in a way that it does not know: in the first
    step a dense layer fails. Without one nothing reads the flag, but who gave it meant another one."""
    its_own = args.transformer_impl == "transformer_engine" and args.s2_dense_core != "s2"
    return its_own and _ranks(args) > 1 and not set(args.cp_comm_type or ()) <= set(EXCHANGES)


def _ranks(args: Namespace) -> int:
    return args.context_parallel_size or 1


def _shapeless(args: Namespace) -> bool:
    """Whether the model's shape comes from elsewhere than its flags."""
    layers = args.heterogeneous_layers_config_path or args.heterogeneous_layers_config_encoded_json
    return bool(args.use_checkpoint_args or args.hybrid_layer_pattern or layers)


def _dealt_layers(args: Namespace) -> int:
    """The layers that are dealt to the stages, with what is counted as one."""
    counted = bool(args.account_for_embedding_in_pipeline_split) + bool(args.account_for_loss_in_pipeline_split)
    return args.num_layers + counted


def _stages_without_a_pipeline(args: Namespace) -> bool:
    """Whether the one stage of a model is to be cut into several virtual ones."""
    if args.pipeline_model_parallel_size != 1 or _shapeless(args):
        return False
    stages, each = args.num_virtual_stages_per_pipeline_rank, args.num_layers_per_virtual_pipeline_stage
    cut = each is not None and args.num_layers is not None and each != _dealt_layers(args)
    return stages not in (None, 1) or cut


def _uneven_virtual_stages(args: Namespace) -> bool:
    """Whether the layers cannot be dealt to the virtual stages, which all get as many."""
    stages, pipeline = args.num_virtual_stages_per_pipeline_rank, args.pipeline_model_parallel_size
    own = args.decoder_first_pipeline_num_layers is not None or args.decoder_last_pipeline_num_layers is not None
    if None in (stages, pipeline, args.num_layers) or own or _shapeless(args):
        return False
    return _dealt_layers(args) % (pipeline * stages) != 0


def _odd_heads(args: Namespace) -> bool:
    """Whether RoPE, which turns pairs of channels, gets heads of an odd number of them."""
    if not (args.hidden_size and args.num_attention_heads) or args.use_checkpoint_args:
        return False  # a checkpoint brings them
    channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    part = channels if args.position_embedding_type == "yarn" else int(channels * (args.rotary_percent or 1))
    turned = args.position_embedding_type in ("rope", "yarn") and not args.multi_latent_attention
    return turned and part % 2 == 1 and part == channels


PAIRS: dict[str, Mistake] = {
    "fp16 and bf16": Mistake(
        lambda args: args.fp16 and args.bf16,
        "--fp16 with --bf16: two precisions for one model; expected one of them; leave --fp16 out",
    ),
    "hidden_size": Mistake(
        lambda args: (
            bool(args.hidden_size and args.num_attention_heads)
            and args.kv_channels is None
            and not _shapeless(args)
            and args.hidden_size % args.num_attention_heads != 0
        ),
        "--hidden-size={hidden_size} with --num-attention-heads={num_attention_heads}: the heads share it where "
        "--kv-channels is not given; expected a multiple of their number; change one of the two, or add --kv-channels "
        "128",
    ),
    "kv_channels": Mistake(
        _odd_heads,
        "--kv-channels={kv_channels} with --hidden-size={hidden_size} and --num-attention-heads={num_attention_heads}: "
        "heads of an odd number of channels, and RoPE turns pairs; expected an even number; use --kv-channels 64, or "
        "128",
    ),
    "max_position_embeddings": Mistake(
        lambda args: (
            bool(args.max_position_embeddings and args.seq_length)
            and not _shapeless(args)
            and args.max_position_embeddings < args.seq_length
        ),
        "--max-position-embeddings={max_position_embeddings} with --seq-length={seq_length}: expected as many "
        "positions as tokens, or more; use --max-position-embeddings {seq_length}",
    ),
    "mrope_section": Mistake(
        lambda args: args.position_embedding_type == "mrope" and args.mrope_section is None and not _shapeless(args),
        "--position-embedding-type=mrope without --mrope-section: how the channels are dealt to time, height and "
        "width; expected both; add --mrope-section, or use --position-embedding-type rope",
    ),
    "full recomputation without a method": Mistake(
        lambda args: _is_full(args) and args.recompute_method is None,
        "--recompute-granularity=full without --recompute-method: which layers are computed twice; expected both; add "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "full recomputation without layers": Mistake(
        lambda args: _is_full(args) and args.recompute_num_layers is None,
        "--recompute-granularity=full without --recompute-num-layers: how many layers are computed twice, or from one "
        "stored input; expected both; add --recompute-num-layers 1",
    ),
    "recompute_num_layers": Mistake(
        lambda args: (
            _is_full(args)
            and args.recompute_method == "uniform"
            and args.recompute_num_layers < 1
            and not args.skip_train
        ),
        "--recompute-num-layers={recompute_num_layers} with --recompute-method uniform: Megatron 0.19.2 never comes to "
        "the last layer (core/recompute.py:166); expected 1 or more; use --recompute-num-layers 1",
    ),
    **{
        f"selective recomputation and {name}": Mistake(
            lambda args, name=name: is_selective(args) and getattr(args, name) is not None,
            f"--{name.replace('_', '-')}={{{name}}} with --recompute-granularity selective or --recompute-activations: "
            "it is for the recomputation of whole layers; expected one of the two; leave it out, or use "
            "--recompute-granularity full alone",
        )
        for name in ("recompute_method", "recompute_num_layers")
    },
    "cp_comm_type": Mistake(
        _unknown_exchange,
        "--cp-comm-type={cp_comm_type}: Transformer Engine knows no such exchange for dense layers (S2's take "
        f"--s2-cp-comm-type); expected {', '.join(EXCHANGES)}; use --cp-comm-type p2p",
    ),
    "cp_comm_type of each layer": Mistake(
        lambda args: (
            _ranks(args) > 1
            and args.num_layers is not None
            and not _shapeless(args)
            and len(args.cp_comm_type or (None,)) not in (1, args.num_layers)
        ),
        "--cp-comm-type={cp_comm_type} with --num-layers={num_layers}: expected one exchange for all layers, or one "
        "for each; use --cp-comm-type p2p",
    ),
    "cp_comm_type of two levels": Mistake(
        lambda args: "a2a+p2p" in (args.cp_comm_type or ()) and not args.hierarchical_context_parallel_sizes,
        "--cp-comm-type={cp_comm_type} without --hierarchical-context-parallel-sizes: which ranks do a2a and which "
        "p2p; expected both; use --cp-comm-type p2p, or add the sizes",
    ),
    "hierarchical_context_parallel_sizes": Mistake(
        lambda args: (
            bool(args.hierarchical_context_parallel_sizes)
            and math.prod(args.hierarchical_context_parallel_sizes) != args.context_parallel_size
        ),
        "--hierarchical-context-parallel-sizes={hierarchical_context_parallel_sizes} with --context-parallel-size="
        "{context_parallel_size}: expected sizes whose product it is; correct one of the two",
    ),
    "virtual stages twice": Mistake(
        lambda args: (
            args.num_layers_per_virtual_pipeline_stage is not None
            and args.num_virtual_stages_per_pipeline_rank is not None
        ),
        "--num-layers-per-virtual-pipeline-stage={num_layers_per_virtual_pipeline_stage} with "
        "--num-virtual-stages-per-pipeline-rank={num_virtual_stages_per_pipeline_rank}: each says how the stages are "
        "cut; expected one of them; leave one out",
    ),
    "virtual stages without a pipeline": Mistake(
        _stages_without_a_pipeline,
        "virtual pipeline stages with --pipeline-model-parallel-size={pipeline_model_parallel_size}: they are parts of "
        "a pipeline's stages; expected 2 stages or more; leave --num-layers-per-virtual-pipeline-stage and "
        "--num-virtual-stages-per-pipeline-rank out",
    ),
    "virtual stages of layers": Mistake(
        _uneven_virtual_stages,
        "--num-virtual-stages-per-pipeline-rank={num_virtual_stages_per_pipeline_rank} with --num-layers={num_layers} "
        "and --pipeline-model-parallel-size={pipeline_model_parallel_size}: expected as many layers for every virtual "
        "stage of every pipeline stage; change one of the three",
    ),
}


def check_values(args: Namespace) -> None:
    """Everything of this module. args: as Megatron's parser left them, or some of them. Raises ValueError."""
    check_ranges(args)
    check_numbers(args)
    refuse_first(args, PAIRS.values())
