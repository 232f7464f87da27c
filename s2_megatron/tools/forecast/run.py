"""One training run as the forecast sees it: shape, parallel sizes, batch, memory settings."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from functools import cached_property

from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.context_parallel.plan import check_comm_type
from s2_megatron.megatron.model.engine import engine_refuses
from s2_megatron.megatron.sparsity import ATTENTION, layer_symbols, resolve_layers
from s2_megatron.patterns.ranges import Pattern, RangePattern
from s2_megatron.tools.forecast.flags import vocabulary
from s2_megatron.tools.forecast.hybrid import HybridSizes, hybrid_sizes

# As in megatron/model/dense_core.py: up to this length `auto` leaves dense layers to Megatron's local attention.
STOCK_LOCAL_LENGTH = 4096


@dataclass(frozen=True)
class TrainingRun:
    """Sizes are those of the whole model; a GPU's share follows from the parallel sizes.

    vocabulary: padded. gated: SwiGLU. itemsize: bytes of weights and activations. microbatches: of one step and
    data-parallel rank. virtual: pipeline chunks of a stage. recompute: none, full or selective; recompute_layers:
    of a pipeline stage (full, method block), else the layers of one checkpoint. s2_dense: whether S2's op computes
    the dense layers. fused_loss: the implementation of the fused cross entropy, or nothing. transformer_engine: else
    Megatron's local layers. symbols: one for each layer of a HybridModel, nothing for a GPT, whose layers have
    attention and MLP each. hybrid: sizes of a HybridModel's layers E, M and G.
    """

    sparsity: ResolvedSparsity
    hidden: int
    ffn: int
    head_dim: int
    vocabulary: int
    gated: bool
    tied: bool
    rope: bool
    learned_positions: int
    dropout: bool
    itemsize: int
    micro_batch: int
    microbatches: int
    dp: int
    tp: int
    cp: int
    pp: int
    virtual: int
    sequence_parallel: bool
    recompute: str
    recompute_method: str
    recompute_layers: int
    recompute_modules: tuple[str, ...]
    keep_attention_output: bool
    keep_received: bool
    cp_comm_types: tuple[str, ...]
    dense_comm_types: tuple[str, ...]
    s2_dense: bool
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    fused_gradients: bool
    fused_rope: bool
    fused_loss: str
    transformer_engine: bool
    symbols: str = ""
    hybrid: HybridSizes | None = None

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def rank_tokens(self) -> int:
        """Tokens of one microbatch on one context-parallel rank."""
        return self.micro_batch * self.sparsity.seq_length // self.cp

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, of all GPUs."""
        return self.micro_batch * self.sparsity.seq_length * self.microbatches * self.dp

    @property
    def qkv_width(self) -> int:
        """Rows of Q, K and V of one tensor-parallel rank, in numbers a token; with fewer KV heads than ranks several
        ranks hold one."""
        heads, groups = self.sparsity.num_heads, self.sparsity.num_kv_heads
        return (heads // self.tp + 2 * max(1, groups // self.tp)) * self.head_dim

    @property
    def attention_width(self) -> int:
        """Rows of the attention's output of one tensor-parallel rank."""
        return self.sparsity.num_heads * self.head_dim // self.tp

    @property
    def mlp_weights(self) -> int:
        """Parameters of one dense MLP's matrices on one tensor-parallel rank."""
        return (3 if self.gated else 2) * self.hidden * self.ffn // self.tp

    @property
    def attention_weights(self) -> int:
        """The same of the matrices around one core attention."""
        return self.hidden * (self.qkv_width + self.attention_width)

    @property
    def layer_weights(self) -> int:
        """The same of one layer of a GPT."""
        return self.attention_weights + self.mlp_weights

    @property
    def depth(self) -> int:
        """The layers of the model."""
        return len(self.symbols) or len(self.sparsity.layers)

    def attention(self, layer: int) -> int | None:
        """Which of sparsity.layers a layer of the model is; None for one without attention."""
        if not self.symbols:
            return layer
        return self.symbols[:layer].count(ATTENTION) if self.symbols[layer] == ATTENTION else None

    def has_mlp(self, layer: int) -> bool:
        return not self.symbols or self.symbols[layer] == "-"

    def halves(self, layer: int) -> int:
        """Attention and MLP of a layer, each with its norm and its residual: 2 or 1."""
        return (self.attention(layer) is not None) + self.has_mlp(layer)

    def weights(self, layer: int) -> int:
        """Parameters of a layer's matrices on one tensor-parallel rank."""
        attention = self.attention_weights if self.attention(layer) is not None else 0
        return attention + (self.mlp_weights if self.has_mlp(layer) else 0)

    @property
    def vocabulary_weights(self) -> int:
        """Parameters of the embedding, or of the output layer, on one tensor-parallel rank."""
        return self.hidden * self.vocabulary // self.tp

    def comm_type(self, layer: int) -> str:
        """How the context-parallel ranks exchange keys and values in a layer; of Megatron's own attention with "te:" in
        front."""
        if self.by_s2(layer):
            return self.cp_comm_types[min(layer, len(self.cp_comm_types) - 1)]
        return (
            f"te:{self.dense_comm_types[min(layer, len(self.dense_comm_types) - 1)].replace('allgather', 'all_gather')}"
        )

    def by_s2(self, layer: int) -> bool:
        """Whether S2's op computes a layer's attention."""
        return self.sparsity.layers[layer].pattern is not None or self.s2_dense

    def pattern(self, layer: int) -> Pattern:
        """Of all heads; a dense layer's is dense."""
        found = self.sparsity.layers[layer].pattern
        return self._dense_pattern if found is None else found

    @cached_property
    def _dense_pattern(self) -> RangePattern:
        sparsity = self.sparsity
        return RangePattern.dense(sparsity.block_size, sparsity.num_heads, sparsity.num_kv_heads)

    @property
    def chunk_layers(self) -> int:
        """Layers of a pipeline stage, or of each of its chunks."""
        return self.depth // (self.pp * self.virtual)

    def stage_layers(self, stage: int) -> list[int]:
        """The layers of a pipeline stage."""
        chunk = self.chunk_layers
        starts = [(part * self.pp + stage) * chunk for part in range(self.virtual)]
        return [layer for start in starts for layer in range(start, start + chunk)]

    def recomputed(self, stage: int) -> set[int]:
        """The layers of a stage that full recomputation computes twice."""
        if self.recompute != "full":
            return set()
        layers = self.stage_layers(stage)
        if self.recompute_method == "uniform":
            return set(layers)
        return {layer for at, layer in enumerate(layers) if at % self.chunk_layers < self.recompute_layers}

    def dense(self) -> TrainingRun:
        """The same run with Megatron's dense attention in every layer, without S2's flags."""
        sparsity = replace(
            self.sparsity,
            layers=(LayerSparsity("D", None),) * len(self.sparsity.layers),
            mtp_layers=(LayerSparsity("D", None),) * len(self.sparsity.mtp_layers),
        )
        return replace(self, sparsity=sparsity, keep_attention_output=False, keep_received=False, s2_dense=False)


def dense_sparsity(args: Namespace) -> ResolvedSparsity:
    """Of a launch line without --s2-config: all layers dense."""
    config = SparsityConfig.from_data(
        {"block_size": 64, "layers": "D"} | ({"mtp_layers": "D"} if args.mtp_num_layers else {})
    )
    return sparsity_of(config, args)


def sparsity_of(config: SparsityConfig, args: Namespace) -> ResolvedSparsity:
    """Of the model of a launch line. Raises ValueError as require_sizes does, and for a config that does not fit."""
    require_sizes(args)
    return resolve_layers(config, args)


def require_sizes(args: Namespace) -> None:
    """Raises ValueError for the sizes of the model that are missing."""
    missing = [
        f"--{name.replace('_', '-')}"
        for name in ("num_layers", "num_attention_heads", "seq_length")
        if getattr(args, name) is None
    ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: not given; expected the sizes of the model; give them as flags, for example "
            "s2-megatron inspect configs/s2_7b_mixed.yaml --num-layers 32 --num-attention-heads 32 --seq-length 8192, "
            "or a training's launch line behind --"
        )


def missing_sizes(args: Namespace) -> list[str]:
    """The flags without which there are no FLOPs, no memory and no time."""
    found = {"--hidden-size": args.hidden_size, "--vocab-size": vocabulary(args)}
    return [flag for flag, value in found.items() if value is None]


def training_run(
    args: Namespace, sparsity: ResolvedSparsity, world_size: int | None = None, *, even: bool = True
) -> TrainingRun:
    """The run of the flags (flags.read_flags) with this sparsity. world_size: GPUs; None: one model. even: whether all
    pipeline stages have as many layers; otherwise nothing may be asked of the stages.

    Raises ValueError for sizes that do not divide each other as Megatron demands.
    """
    tp, cp, pp = args.tensor_model_parallel_size, args.context_parallel_size, args.pipeline_model_parallel_size
    model = tp * cp * pp
    world_size = model if world_size is None else world_size
    if world_size % model:
        raise ValueError(
            f"{world_size} processes with tensor x context x pipeline = {tp} x {cp} x {pp}: expected a multiple of "
            f"{model}; use {-(-world_size // model) * model} processes"
        )
    pattern = args.hybrid_layer_pattern
    symbols = "" if pattern is None else layer_symbols(pattern)
    dp, layers, micro = world_size // model, len(symbols) or len(sparsity.layers), args.micro_batch_size or 1
    batch = args.global_batch_size or micro * dp
    if batch % (micro * dp):
        raise ValueError(
            f"--global-batch-size {batch} with --micro-batch-size {micro} and {dp} data-parallel ranks: expected a "
            f"multiple of {micro * dp}; use {-(-batch // (micro * dp)) * micro * dp}"
        )
    virtual = args.num_virtual_stages_per_pipeline_rank or 1
    if args.num_layers_per_virtual_pipeline_stage:
        virtual = max(1, layers // pp // args.num_layers_per_virtual_pipeline_stage)
    if pattern is not None:
        virtual = max(1, (pattern.count("|") + 1) // pp)
    if even and layers % (pp * virtual):
        raise ValueError(
            f"--num-layers {layers} with {pp} pipeline stages of {virtual} chunks: expected a multiple of "
            f"{pp * virtual}; use --num-layers {-(-layers // (pp * virtual)) * pp * virtual}"
        )
    for name, size in (("--hidden-size", args.hidden_size), ("--num-attention-heads", sparsity.num_heads)):
        if size % tp:
            raise ValueError(
                f"{name} {size} with --tensor-model-parallel-size {tp}: expected a multiple of it; use "
                f"{-(-size // tp) * tp}"
            )
    if any(layer.pattern is not None for layer in sparsity.layers):
        for comm_type in args.s2_cp_comm_type:
            check_comm_type(comm_type, max(1, sparsity.num_kv_heads // tp), cp)
    hidden = args.hidden_size
    head_dim = args.kv_channels or max(1, hidden // sparsity.num_heads)
    ffn = args.ffn_hidden_size or (int(4 * hidden * 2 / 3) // 64 * 64 if args.swiglu else 4 * hidden)
    engine = args.transformer_impl == "transformer_engine"
    softmax_type = getattr(args, "softmax_type", "vanilla")
    if engine:
        not_stock = engine_refuses(softmax_type, False, cp, args.cp_comm_type) is not None
    else:
        not_stock = cp > 1 or sparsity.seq_length > STOCK_LOCAL_LENGTH
    granularity = "selective" if args.recompute_activations else args.recompute_granularity
    recomputed = 1 if args.recompute_num_layers is None else args.recompute_num_layers  # 0: of method block, none
    return TrainingRun(
        sparsity=sparsity,
        hidden=hidden,
        ffn=ffn,
        head_dim=head_dim,
        vocabulary=vocabulary(args),
        gated=args.swiglu,
        tied=not args.untie_embeddings_and_output_weights,
        rope=args.position_embedding_type in ("rope", "yarn", "mrope"),
        learned_positions=(
            args.max_position_embeddings or sparsity.seq_length
            if args.position_embedding_type == "learned_absolute"
            else 0
        ),
        dropout=args.hidden_dropout > 0,
        itemsize=2 if args.bf16 or args.fp16 else 4,
        micro_batch=micro,
        microbatches=batch // (micro * dp),
        dp=dp,
        tp=tp,
        cp=cp,
        pp=pp,
        virtual=virtual,
        sequence_parallel=args.sequence_parallel and tp > 1,
        recompute=granularity or "none",
        recompute_method=args.recompute_method or "uniform",
        recompute_layers=recomputed if args.recompute_method == "block" else max(1, recomputed),
        recompute_modules=tuple(args.recompute_modules or ("core_attn",)),
        keep_attention_output=args.s2_keep_attention_output,
        keep_received=args.s2_cp_keep_received,
        cp_comm_types=tuple(args.s2_cp_comm_type),
        dense_comm_types=tuple(args.cp_comm_type),
        s2_dense=args.s2_dense_core == "s2" or (args.s2_dense_core == "auto" and not_stock),
        distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        fused_gradients=not args.no_gradient_accumulation_fusion,
        fused_rope=not args.no_rope_fusion,
        fused_loss=args.cross_entropy_fusion_impl if args.cross_entropy_loss_fusion else "",
        transformer_engine=engine,
        symbols=symbols,
        hybrid=hybrid_sizes(args, ffn) if symbols else None,
    )
