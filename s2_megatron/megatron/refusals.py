"""What S2-Attention refuses of Megatron's command line, each refusal with the flag to change.

`REFUSALS` is checked when arguments are known and before a model is built; honoured.py names every other setting of
Megatron that reads like attention and says why it may stay. Together they are the support matrix of the README, and a
test compares them with Megatron's own parser, so that an attention flag of a new Megatron has to be decided.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from packaging.version import Version

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.context_parallel.attention import COMM_TYPES, ContextSettings
from s2_megatron.context_parallel.plan import check_block_count
from s2_megatron.ops.checks import HEAD_DIM_LIMIT

MEGATRON_MINIMUM, MEGATRON_LIMIT = Version("0.19.2"), Version("0.21")

# Above this length Megatron's default of a [b, 1, s, s] mask per micro-batch (64 MiB a sample here) is an accident
# rather than a choice.
ATTENTION_MASK_SEQ_LENGTH = 8192

# Elements that Transformer Engine's fused RoPE can address: its kernels count them in 32 bits (fused_rope.cu of 2.20,
# `int offset_block`).
FUSED_ROPE_ELEMENTS = 2**31


@dataclass(frozen=True)
class Refusal:
    """One setting that S2-Attention cannot honour.

    name: the argument's name in Megatron's namespace, or a made-up one. refused: whether these arguments ask for it.
    reason: what came and why it cannot be. fix: the flag to change. Both may refer to arguments as {args.name}, and to
    the installed version as {megatron}.
    """

    name: str
    refused: Callable[[Namespace], bool]
    reason: str
    fix: str

    def message(self, args: Namespace) -> str:
        known = dict(
            args=args, megatron=megatron_version(), comm_types=" ".join(args.s2_cp_comm_type), rope=_FusedRope(args)
        )
        return "; ".join(text.format(**known) for text in (self.reason, self.fix))


def _is_set(name: str) -> Callable[[Namespace], bool]:
    """Whether an argument is neither absent, None, False, 0 nor empty."""
    return lambda args: bool(getattr(args, name, None))


def _packed(args: Namespace) -> bool:
    return bool(args.sft or args.dataloader_inter_document_masking)


@dataclass(frozen=True)
class _FusedRope:
    args: Namespace

    @property
    def elements(self) -> int:
        """Of the tensor whose rows hold the queries and keys that a rank's fused RoPE reads: its offsets go up to
        there."""
        args, ranks = self.args, self.args.tensor_model_parallel_size
        kv_heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        if args.qk_layernorm:  # queries and keys are tensors of their own then, the queries the longer one
            heads = args.num_attention_heads // ranks
        else:  # a rank with a part of a KV head takes it from a row of all heads
            heads = args.num_attention_heads * (2 if args.attention_output_gate else 1) + 2 * kv_heads
            heads = heads // ranks if kv_heads >= ranks else heads
        return args.seq_length // args.context_parallel_size * args.micro_batch_size * heads * args.kv_channels


def _graphs_with_attention(args: Namespace) -> bool:
    """Whether CUDA graphs hold the attention: always with Megatron's own graphs, with Transformer Engine's unless the
    modules leave it out."""
    names = {getattr(module, "name", module) for module in args.cuda_graph_modules or ()}
    return args.cuda_graph_impl == "local" or (
        args.cuda_graph_impl == "transformer_engine" and (not names or "attn" in names)
    )


def _comm_types_are_wrong(args: Namespace) -> bool:
    given = args.s2_cp_comm_type
    return len(given) not in (1, args.num_layers) or not set(given) <= {*COMM_TYPES, "allgather"}


def _attention_is_recomputed(args: Namespace) -> bool:
    # Left out, the modules are still None here: TransformerConfig fills in its default, core_attn, when the model
    # config is made.
    modules = ["core_attn"] if args.recompute_modules is None else args.recompute_modules
    selected = args.recompute_granularity == "selective" and "core_attn" in modules
    return (args.recompute_granularity == "full" or selected) and not args.mtp_use_repeated_layer


def _resumes_optimizer(args: Namespace) -> bool:
    """Whether the optimizer's state is to be written for a resume, or read."""
    saves = args.save is not None and not args.no_save_optim
    loads = args.load is not None and not args.no_load_optim and not args.finetune
    return saves or loads


def _distributed_optimizer_cannot_resume(args: Namespace) -> bool:
    if not args.use_distributed_optimizer or not _resumes_optimizer(args):
        return False
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    return not HAVE_APEX_OR_TE


def _fused_softmax_is_missing(args: Namespace) -> bool:
    wanted = (
        args.masked_softmax_fusion
        and (args.bf16 or args.fp16)
        and args.transformer_impl == "local"
        and args.s2_dense_core != "s2"
    )
    return wanted and find_spec("scaled_masked_softmax_cuda") is None


def megatron_version() -> str:
    """The version of the megatron-core that is imported, without a commit's suffix."""
    from megatron.core.package_info import __version__

    return __version__.partition("+")[0]


def _unsupported_megatron(args: Namespace) -> bool:
    # A pre-release counts as the release it leads to: 0.20.0rc1 is inside, 0.21.0rc0 is not.
    release = Version(Version(megatron_version()).base_version)
    return not MEGATRON_MINIMUM <= release < MEGATRON_LIMIT


REFUSALS: tuple[Refusal, ...] = (
    # First, for the arguments of another Megatron have other names
    Refusal(
        "megatron_version",
        _unsupported_megatron,
        f"megatron-core {{megatron}} is installed; supported are >={MEGATRON_MINIMUM},<{MEGATRON_LIMIT}",
        f"pip install 'megatron-core[training]>={MEGATRON_MINIMUM},<{MEGATRON_LIMIT}'",
    ),
    # What the attention computes
    Refusal(
        "attention_dropout",
        _is_set("attention_dropout"),
        "attention_dropout={args.attention_dropout}, but S2 attention has no dropout",
        "add --attention-dropout 0 (Megatron's default is 0.1)",
    ),
    Refusal(
        "softmax_type",
        lambda args: args.softmax_type != "vanilla",
        "--softmax-type {args.softmax_type}: S2 attention has no attention sink and no off-by-one softmax",
        "use --softmax-type vanilla",
    ),
    Refusal(
        "window_size",
        lambda args: args.window_size is not None,
        "--window-size {args.window_size}: windows are part of the sparsity config",
        "remove --window-size and give the layers `local_tokens` in the YAML of --s2-config",
    ),
    Refusal(
        "reset_attention_mask",
        _is_set("reset_attention_mask"),
        "--reset-attention-mask puts document boundaries into an attention mask, which S2 attention does not read",
        "use --dataloader-inter-document-masking, which packs the documents (cu_seqlens)",
    ),
    Refusal(
        "create_attention_mask_in_dataloader",
        lambda args: args.create_attention_mask_in_dataloader and args.seq_length > ATTENTION_MASK_SEQ_LENGTH,
        "Megatron's dataloader would build a [{args.micro_batch_size}, 1, {args.seq_length}, {args.seq_length}] attention mask for every "
        "micro-batch, which causal attention does not need",
        "add --no-create-attention-mask-in-dataloader",
    ),
    Refusal(
        "position_embedding_type",
        lambda args: args.position_embedding_type == "relative",
        "--position-embedding-type relative adds an attention bias, which S2 attention does not have",
        "use --position-embedding-type rope",
    ),
    Refusal(
        "apply_rope_fusion",
        lambda args: args.apply_rope_fusion and _FusedRope(args).elements > FUSED_ROPE_ELEMENTS,
        "fused RoPE of {rope.elements} elements (--seq-length / --context-parallel-size x --micro-batch-size x the width of a row that "
        f"holds a rank's queries and keys), but Transformer Engine's kernel addresses {FUSED_ROPE_ELEMENTS} and would read other memory "
        "for the last tokens, without an error",
        "add --no-rope-fusion, or take a larger --context-parallel-size",
    ),
    Refusal(
        "kv_channels",
        lambda args: args.kv_channels > HEAD_DIM_LIMIT,
        f"--kv-channels {{args.kv_channels}}: S2 attention computes head dims up to {HEAD_DIM_LIMIT}",
        "use more heads (--num-attention-heads) or a smaller --kv-channels",
    ),
    Refusal(
        "multi_latent_attention",
        _is_set("multi_latent_attention"),
        "--multi-latent-attention (MLA) has other head dims for keys than for values, which S2 attention does not compute",
        "remove --multi-latent-attention",
    ),
    Refusal(
        "experimental_attention_variant",
        _is_set("experimental_attention_variant"),
        "--experimental-attention-variant {args.experimental_attention_variant} replaces the attention that S2 would replace",
        "remove --experimental-attention-variant",
    ),
    Refusal(
        "linear_attention_freq",
        _is_set("linear_attention_freq"),
        "--linear-attention-freq {args.linear_attention_freq}: linear attention layers have no attention pattern",
        "remove --linear-attention-freq",
    ),
    Refusal(
        "decoder_num_layers",
        _is_set("decoder_num_layers"),
        "--decoder-num-layers {args.decoder_num_layers} makes an encoder-decoder model; S2 attention is causal self-attention only, "
        "neither cross attention nor an encoder's",
        "remove --decoder-num-layers and train a GPT",
    ),
    Refusal(
        "vision_pretraining",
        _is_set("vision_pretraining"),
        "--vision-pretraining attends in both directions; S2 attention is causal",
        "remove --vision-pretraining",
    ),
    Refusal(
        "ict_head_size",
        _is_set("ict_head_size"),
        "--ict-head-size {args.ict_head_size} makes a BERT retriever, which attends in both directions; S2 attention is causal",
        "remove --ict-head-size",
    ),
    # Which model and which layer spec
    Refusal(
        "spec",
        _is_set("spec"),
        "--spec {args.spec} and --s2-config both say which layer spec to build",
        "remove --spec, or --s2-config",
    ),
    Refusal(
        "hybrid_layer_pattern",
        _is_set("hybrid_layer_pattern"),
        "--hybrid-layer-pattern {args.hybrid_layer_pattern}: hybrid and Mamba models have their own layer specs",
        "remove --hybrid-layer-pattern",
    ),
    Refusal(
        "is_hybrid_model",
        _is_set("is_hybrid_model"),
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
        "transformer_impl",
        lambda args: args.transformer_impl not in ("local", "transformer_engine"),
        "--transformer-impl {args.transformer_impl} brings its own layer spec",
        "use --transformer-impl transformer_engine, or local",
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
        _is_set("yaml_cfg"),
        "--yaml-cfg {args.yaml_cfg} makes Megatron drop every command line argument, --s2-config among them",
        "remove --yaml-cfg and give Megatron's settings as flags",
    ),
    # Precision, and what reads the attention's inside
    Refusal(
        "fp8_dot_product_attention",
        _is_set("fp8_dot_product_attention"),
        "fp8_dot_product_attention=True: S2 attention computes in bf16, fp16 or fp32 (fp8 linear layers are fine)",
        "set fp8_dot_product_attention=False",
    ),
    Refusal(
        "fp8_multi_head_attention",
        _is_set("fp8_multi_head_attention"),
        "fp8_multi_head_attention=True: S2 attention computes in bf16, fp16 or fp32 (fp8 linear layers are fine)",
        "set fp8_multi_head_attention=False",
    ),
    Refusal(
        "qk_clip",
        _is_set("qk_clip"),
        "--qk-clip needs the largest attention logit, which S2 attention does not keep",
        "remove --qk-clip",
    ),
    Refusal(
        "log_max_attention_logit",
        _is_set("log_max_attention_logit"),
        "--log-max-attention-logit needs the largest attention logit, which S2 attention does not keep",
        "remove --log-max-attention-logit",
    ),
    Refusal(
        "batch_invariant_mode",
        _is_set("batch_invariant_mode"),
        "--batch-invariant-mode demands FlashAttention 3 or 4 in every layer",
        "remove --batch-invariant-mode",
    ),
    # How it is run
    Refusal(
        "s2_cp_comm_type",
        _comm_types_are_wrong,
        f"--s2-cp-comm-type {{comm_types}}: expected {', '.join(COMM_TYPES)}, one for all layers or one for each of the "
        "{args.num_layers} layers",
        "use --s2-cp-comm-type sparse",
    ),
    Refusal(
        "s2_cp_mtp",
        lambda args: (
            args.context_parallel_size > 1
            and args.dataloader_inter_document_masking
            and not args.sft
            and args.mtp_num_layers
        ),
        "--mtp-num-layers with --dataloader-inter-document-masking and --context-parallel-size {args.context_parallel_size}: Megatron "
        "shifts the labels by documents, and the row was cut as one sequence",
        "use --context-parallel-size 1, or remove --mtp-num-layers",
    ),
    Refusal(
        "s2_keep_attention_output",
        lambda args: args.s2_keep_attention_output and not _attention_is_recomputed(args),
        "--s2-keep-attention-output keeps the attention's result for a recomputation, and this run recomputes no attention "
        "or runs a multi-token-prediction layer several times (--mtp-use-repeated-layer)",
        "remove --s2-keep-attention-output, or add --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    Refusal(
        "hierarchical_context_parallel_sizes",
        _is_set("hierarchical_context_parallel_sizes"),
        "--hierarchical-context-parallel-sizes: S2 layers exchange blocks among all context-parallel ranks at once",
        "remove --hierarchical-context-parallel-sizes and use --cp-comm-type p2p for dense layers",
    ),
    *(
        Refusal(
            f"{name}_context_parallel",
            _is_set(f"{name}_context_parallel"),
            f"--{name}-context-parallel (dynamic context parallelism) changes the ranks from batch to batch, and S2 plans the exchange once",
            f"remove --{name}-context-parallel",
        )
        for name in ("hybrid", "dynamic")
    ),  # Megatron 0.19's name, and the one of its development branch
    Refusal(
        "use_megatron_fsdp",
        _is_set("use_megatron_fsdp"),
        "--use-megatron-fsdp is not tested with S2 attention",
        "use --use-distributed-optimizer instead",
    ),
    Refusal(
        "use_torch_fsdp2",
        _is_set("use_torch_fsdp2"),
        "--use-torch-fsdp2 is not tested with S2 attention",
        "use --use-distributed-optimizer instead",
    ),
    Refusal(
        "cuda_graph_impl",
        lambda args: (
            args.cuda_graph_impl == "full_iteration"
            or (_graphs_with_attention(args) and args.context_parallel_size > 1)
        ),
        "--cuda-graph-impl {args.cuda_graph_impl} with --context-parallel-size {args.context_parallel_size}: tested are the graphs of "
        "layers (local, transformer_engine) without context parallelism",
        "use --cuda-graph-impl none, or local with --context-parallel-size 1",
    ),
    # The likely cause, from reading Megatron 0.19.2: its graphs keep a layer's input until the backward only where a
    # Python autograd function saves it, as in Transformer Engine's layers; PyTorch's norms, which the local layers
    # have, save it in C++.
    Refusal(
        "cuda_graph_local_layers",
        lambda args: _graphs_with_attention(args) and args.transformer_impl == "local",
        "--cuda-graph-impl {args.cuda_graph_impl} with --transformer-impl local: in a test, graphs of Megatron's local layers computed "
        "other gradients than the same run without graphs; with Transformer Engine's layers they did not",
        "use --transformer-impl transformer_engine, or --cuda-graph-impl none",
    ),
    # What changes when, or how often, the op runs; TP and DP do not.
    Refusal(
        "cuda_graph_untested",
        lambda args: (
            _graphs_with_attention(args)
            and bool(
                args.pipeline_model_parallel_size > 1
                or args.num_experts
                or args.mtp_num_layers
                or args.recompute_granularity
                or args.fine_grained_activation_offloading
                or args.cpu_offloading_num_layers
            )
        ),
        "--cuda-graph-impl {args.cuda_graph_impl} is not tested with S2 attention under pipeline parallelism, experts, MTP layers, "
        "recompute or activation offload",
        "use --cuda-graph-impl none, or run without these",
    ),
    Refusal(
        "cuda_graph_packed",
        lambda args: _graphs_with_attention(args) and _packed(args),
        "--cuda-graph-impl {args.cuda_graph_impl} with packed documents (--sft, --dataloader-inter-document-masking): a graph repeats the "
        "number of documents that it was captured with, and every batch has another one",
        "use --cuda-graph-impl none",
    ),
    Refusal(
        "cuda_graph_attention_mask",
        lambda args: (
            args.cuda_graph_impl == "transformer_engine"
            and _graphs_with_attention(args)
            and args.seq_length > ATTENTION_MASK_SEQ_LENGTH
        ),
        "--cuda-graph-impl transformer_engine: its graphs hold a [{args.micro_batch_size}, 1, {args.seq_length}, {args.seq_length}] mask "
        "for every layer, which causal attention does not need",
        "use --cuda-graph-impl local",
    ),
    Refusal(
        "overlap_moe_expert_parallel_comm",
        _is_set("overlap_moe_expert_parallel_comm"),
        "--overlap-moe-expert-parallel-comm: overlapped MoE schedules are not tested with S2 attention",
        "remove --overlap-moe-expert-parallel-comm",
    ),
    Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        _is_set("overlap_dispatch_backward_with_experts_wgrad"),
        "--overlap-dispatch-backward-with-experts-wgrad: overlapped MoE schedules are not tested with S2 attention",
        "remove --overlap-dispatch-backward-with-experts-wgrad",
    ),
    Refusal(
        "flash_decode",
        _is_set("flash_decode"),
        "--flash-decode goes around the core attention and would decode dense",
        "remove --flash-decode",
    ),
    Refusal(
        "inference_dynamic_batching",
        _is_set("inference_dynamic_batching"),
        "--inference-dynamic-batching goes around the core attention and would run dense",
        "remove --inference-dynamic-batching and add --use-legacy-static-engine",
    ),
    Refusal(
        "perform_rl_step",
        _is_set("perform_rl_step"),
        "--perform-rl-step generates with the dynamic inference engine, which goes around the core attention and would run dense",
        "remove --perform-rl-step",
    ),
    Refusal(
        "masked_softmax_fusion",
        _fused_softmax_is_missing,
        "--transformer-impl local in 16 bits: Megatron's dense layers want the fused softmax of NVIDIA Apex, which is not installed",
        "add --no-masked-softmax-fusion, or use --s2-dense-core s2",
    ),
    Refusal(
        "s2_dense_core",
        lambda args: (
            args.s2_dense_core == "stock"
            and args.transformer_impl == "local"
            and (_packed(args) or args.context_parallel_size > 1)
        ),
        "--s2-dense-core stock with --transformer-impl local: Megatron's local attention refuses packed documents (--sft, "
        "--dataloader-inter-document-masking) and context parallelism",
        "use --s2-dense-core auto",
    ),
    Refusal(
        "non_persistent_ckpt_type",
        lambda args: args.non_persistent_ckpt_type == "local",
        "--non-persistent-ckpt-type local: the sparsity stored in a local checkpoint cannot be compared before the model is built",
        "use --non-persistent-ckpt-type global",
    ),
    Refusal(
        "use_distributed_optimizer",
        _distributed_optimizer_cannot_resume,
        "--use-distributed-optimizer with --save or --load: Megatron cannot resume this optimizer's checkpoints when neither Transformer "
        "Engine nor NVIDIA Apex is installed",
        "install Transformer Engine or Apex, or remove --use-distributed-optimizer",
    ),
)


def refuse_unsupported(args: Namespace) -> None:
    """Raises ValueError that lists every setting in `args` that S2-Attention cannot honour, each with the flag to
    change."""
    found = []
    for refusal in REFUSALS:
        if refusal.refused(args):
            found.append(refusal.message(args))
            if refusal.name == "megatron_version":
                break
    if found:
        raise ValueError(_listed(found))


def _listed(found: list[str]) -> str:
    if len(found) == 1:
        return f"--s2-config: {found[0]}"
    return f"--s2-config: {len(found)} settings cannot be honoured" + "".join(f"\n  {text}" for text in found)


def refuse_yaml_command_line(argv: list[str] | None = None) -> None:
    """Raises ValueError when --s2-config and --yaml-cfg stand on one command line.

    It has to be asked before Megatron parses: with --yaml-cfg nothing of --s2-config is left afterwards, and the run
    would be dense.
    """
    given = {argument.partition("=")[0] for argument in (sys.argv if argv is None else argv)}
    if {"--s2-config", "--yaml-cfg"} <= given:
        refusal = next(item for item in REFUSALS if item.name == "yaml_cfg")
        raise ValueError(_listed([f"{refusal.reason.replace(' {args.yaml_cfg}', '')}; {refusal.fix}"]))


def refuse_exchanges(args: Namespace, sparsity: ResolvedSparsity) -> None:
    """Raises ValueError when S2 layers cannot exchange keys and values over context-parallel ranks as --s2-cp-comm-type
    says.

    Dense layers are not looked at: whether they follow that flag depends on what computes them, and start-up looks then
    (cp_report.py).
    """
    size, settings = args.context_parallel_size, ContextSettings(tuple(args.s2_cp_comm_type))
    used = {settings.comm_type(index) for index, layer in enumerate(sparsity.all_layers) if layer.pattern is not None}
    packed = _packed(args)
    heads = max(1, sparsity.num_kv_heads // args.tensor_model_parallel_size)
    found = []
    if size == 1 or not used:
        return
    if "a2a" in used and heads % size:
        found.append(
            f"--s2-cp-comm-type a2a deals the KV heads of a tensor-parallel rank out to {size} context-parallel ranks, and {heads} "
            "cannot be dealt out evenly; use --s2-cp-comm-type sparse"
        )
    if "sparse" in used and packed:
        found.append(
            "--s2-cp-comm-type sparse plans the exchange for one sequence, and packed documents (--sft, "
            "--dataloader-inter-document-masking) change from batch to batch; use --s2-cp-comm-type all_gather, or a2a"
        )
    if used != {"a2a"} and not packed:
        try:
            check_block_count(args.seq_length, size, sparsity.block_size)
        except ValueError as error:
            found.append(str(error))
    if found:
        raise ValueError(_listed(found))


def refuse_softmax_scale(args: Namespace, sparsity: ResolvedSparsity) -> None:
    """Raises ValueError when something else than the YAML already set another softmax scale for the model."""
    if sparsity.softmax_scale is None:
        return
    source, other = None, None
    if getattr(args, "softmax_scale", None) is not None:
        source, other = "args.softmax_scale", args.softmax_scale
    elif args.use_mup:
        # As TransformerConfig computes it.
        base = 1.0 if args.mup_base_head_dim is None else args.mup_base_head_dim**0.5
        source, other = "--use-mup", base / args.kv_channels**args.mup_attn_scale_power
    if source is not None and other != sparsity.softmax_scale:
        raise ValueError(
            f"--s2-config: softmax_scale is {sparsity.softmax_scale:g} in the YAML and {other:g} by {source}; one model has one "
            f"scale, so remove one of the two"
        )
