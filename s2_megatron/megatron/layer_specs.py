"""GPT layer specs with S2-Attention: Megatron's own specs, deep-copied, with another `core_attention` in the layers
that want one.

    sparsity = prepare_s2(args)                     # None without --s2-config
    model_cfg = gpt_config_from_args(args)
    apply_s2(model_cfg, args, sparsity)             # changes nothing when sparsity is None

Layers are 0-based and global everywhere here; `global_layer_indices` is the one place that asks Megatron which layers a
pipeline stage holds.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import megatron.training.models.gpt as megatron_gpt
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.context_parallel.attention import ContextSettings, packed_cut
from s2_megatron.megatron.core_attention import S2CoreAttention, S2SelfAttention
from s2_megatron.megatron.norms import final_norm, stage_norm
from s2_megatron.megatron.report import core_names, report_context_parallel
from s2_megatron.patterns.ranges import Pattern, RangePattern
from s2_megatron.printing import print_once, print_table

DENSE_CORES = ("auto", "stock", "s2")
# Megatron's local core attention materialises the s x s scores; up to this length "auto" still takes it.
STOCK_LOCAL_LENGTH = 4096
ONE_RANK = ContextSettings()


def resolve_dense_core(
    choice: str,
    *,
    use_transformer_engine: bool,
    context_parallel_size: int,
    packed: bool,
    seq_length: int,
    packed_cut: str = "document",
) -> tuple[str, str]:
    """Who computes the dense layers of an S2 run: ('stock' or 's2', the reason in words).

    choice: --s2-dense-core. packed: whether batches hold several documents a sample. packed_cut: how they are cut over
    context-parallel ranks, as one 'sequence' or each 'document' by itself, which is what Transformer Engine expects.
    Raises ValueError for an unknown choice, and for 'stock' where Megatron's own attention cannot run.
    """
    if choice not in DENSE_CORES:
        raise ValueError(f"s2_dense_core={choice!r}; expected one of {', '.join(DENSE_CORES)}; set --s2-dense-core")
    if choice == "s2":
        return "s2", "--s2-dense-core s2"
    if use_transformer_engine and packed and context_parallel_size > 1 and packed_cut == "sequence":
        if choice == "stock":
            raise ValueError(
                f"s2_dense_core='stock' with packed rows that are cut over context_parallel_size={context_parallel_size} ranks as one "
                "sequence: Transformer Engine's attention expects every document cut by itself; use --s2-dense-core s2 or auto"
            )
        return (
            "s2",
            "Transformer Engine's attention does not know packed rows cut as one sequence (context parallelism)",
        )
    if use_transformer_engine:
        return "stock", "Transformer Engine's attention" if choice == "auto" else "--s2-dense-core stock"
    obstacles = []
    if context_parallel_size > 1:
        obstacles.append(f"context_parallel_size={context_parallel_size}")
    if packed:
        obstacles.append("packed documents")
    if obstacles and choice == "stock":
        raise ValueError(
            f"s2_dense_core='stock' with {' and '.join(obstacles)}: Megatron's local attention refuses that; expected 's2' or 'auto'; "
            "use --s2-dense-core s2, or install Transformer Engine and use --transformer-impl transformer_engine"
        )
    if choice == "stock":
        return "stock", "--s2-dense-core stock"
    if seq_length > STOCK_LOCAL_LENGTH:
        obstacles.append(f"seq_length={seq_length} > {STOCK_LOCAL_LENGTH}, where its memory grows with the square")
    if obstacles:
        return "s2", f"Megatron's local attention does not suit {' and '.join(obstacles)}"
    return "stock", f"Megatron's local attention suits seq_length={seq_length}, one document a sample"


def global_layer_indices(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> list[int]:
    """The 0-based indices, within the whole model, of the decoder layers of one pipeline stage, in order.

    vp_stage: virtual stage, None without virtual stages. pp_rank: None asks Megatron's parallel state.
    """
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)))


@dataclass(frozen=True)
class _CoreChoice:
    """How the layers' core attention is chosen: dense_core is 'stock' or 's2'; the rest are settings of
    S2CoreAttention."""

    dense_core: str
    backend: str
    deterministic: bool
    dense_pattern: Pattern
    context: ContextSettings
    planned_length: int | None

    def spec(self, layer: LayerSparsity, layer_index: int, of_mtp: bool = False) -> ModuleSpec | None:
        """The core attention of one layer, None to keep Megatron's. of_mtp: layer_index counts the
        multi-token-prediction layers."""
        if layer.pattern is None and self.dense_core == "stock":
            return None
        pattern = self.dense_pattern if layer.pattern is None else layer.pattern
        settings = dict(
            pattern=pattern,
            layer_index=layer_index,
            backend=self.backend,
            deterministic=self.deterministic,
            s2_cp_comm_type=self.context.comm_types[-1] if of_mtp else self.context.comm_type(layer_index),
            keep_received=self.context.keep_received,
            keep_output=self.context.keep_output,
            packed_cut=self.context.packed_cut,
            seq_length=self.planned_length,
        )
        return ModuleSpec(module=S2CoreAttention, params=settings)


def _core_choice(
    config,
    sparsity: ResolvedSparsity,
    use_transformer_engine,
    dense_core,
    packed,
    backend,
    deterministic,
    seq_length,
    context,
):
    seq_length = sparsity.seq_length if seq_length is None else seq_length
    core, _ = resolve_dense_core(
        dense_core,
        use_transformer_engine=use_transformer_engine,
        context_parallel_size=config.context_parallel_size,
        packed=packed,
        seq_length=seq_length,
        packed_cut=context.packed_cut,
    )
    dense = RangePattern.dense(sparsity.block_size, config.num_attention_heads, config.num_query_groups)
    return _CoreChoice(core, backend, deterministic, dense, context, None if packed else seq_length)


def _with_core(stock: ModuleSpec, config: TransformerConfig, core: ModuleSpec | None, layer_name: str) -> ModuleSpec:
    """A deep copy of a transformer layer's spec, its core attention replaced unless core is None."""
    spec = copy.deepcopy(stock)
    attention = getattr(spec.submodules, "self_attention", None)
    is_layer = isinstance(spec.module, type) and issubclass(spec.module, TransformerLayer)
    if not is_layer or getattr(attention, "module", None) is not SelfAttention:
        raise ValueError(
            f"{layer_name}: its spec is {spec.module} around {getattr(attention, 'module', attention)}; expected TransformerLayer around "
            "SelfAttention; drop the flag that selects another attention (--multi-latent-attention, --experimental-attention-variant, "
            "--heterogeneous-layers-config-path)"
        )
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        setattr(spec.submodules, name, stage_norm(getattr(spec.submodules, name), config))
    for name in ("q_layernorm", "k_layernorm"):
        setattr(attention.submodules, name, stage_norm(getattr(attention.submodules, name), config))
    if core is not None:
        attention.module = S2SelfAttention
        attention.submodules.core_attention = core
    return spec


def s2_block_spec(
    config: TransformerConfig,
    sparsity: ResolvedSparsity,
    *,
    use_transformer_engine: bool,
    dense_core: str = "auto",
    packed: bool = False,
    backend: str = "auto",
    deterministic: bool = False,
    seq_length: int | None = None,
    context: ContextSettings = ONE_RANK,
    stock: ModuleSpec | TransformerBlockSubmodules | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """The spec of this pipeline stage's decoder layers, each with the core attention that `sparsity` gives its global
    layer.

    use_transformer_engine: whether the stock spec is Transformer Engine's or the local one. dense_core, packed: see
    resolve_dense_core. seq_length: default the one that the sparsity was resolved for. context: the flags of context
    parallelism. stock: the spec to start from, of one layer or of the stage; default Megatron's
    get_gpt_decoder_block_spec.
    Raises ValueError when the numbers of layers differ, or when the stock layers are not self attention.
    """
    if len(sparsity.layers) != config.num_layers:
        raise ValueError(
            f"num_layers={config.num_layers}, but the S2 config was resolved for {len(sparsity.layers)}; expected the same"
        )
    choice = _core_choice(
        config, sparsity, use_transformer_engine, dense_core, packed, backend, deterministic, seq_length, context
    )
    whole_stage = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_transformer_engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    indices = global_layer_indices(config, vp_stage, pp_rank)
    if isinstance(stock, TransformerBlockSubmodules):
        whole_stage = stock
    stock_layers = [stock] * len(indices) if isinstance(stock, ModuleSpec) else whole_stage.layer_specs
    assert len(stock_layers) == len(indices), f"{len(stock_layers)} layer specs for the layers {indices}"
    layers = [
        _with_core(spec, config, choice.spec(sparsity.layers[index], index), f"layer {index} (counted from 0)")
        for index, spec in zip(indices, stock_layers)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm(whole_stage.layer_norm, config))


def s2_mtp_block_spec(
    config: TransformerConfig,
    sparsity: ResolvedSparsity,
    *,
    use_transformer_engine: bool,
    dense_core: str = "auto",
    packed: bool = False,
    backend: str = "auto",
    deterministic: bool = False,
    seq_length: int | None = None,
    context: ContextSettings = ONE_RANK,
    stock: MultiTokenPredictionBlockSubmodules | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The spec of the multi-token-prediction layers with the sparsity of `sparsity.mtp_layers`; None on stages without
    them.

    stock: the spec to start from; default Megatron's, around its dense decoder layer. The other arguments as in
    s2_block_spec. Raises ValueError when the sparsity has another number of such layers, or, with
    --mtp-use-repeated-layer, layers that differ.
    """
    if get_mtp_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank) == 0:
        return None
    if len(sparsity.mtp_layers) != config.mtp_num_layers:
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers}, but the S2 config says {len(sparsity.mtp_layers)}; expected the same; "
            "give them in the S2 config's key mtp_layers"
        )
    if config.mtp_use_repeated_layer and len({layer.pattern for layer in sparsity.mtp_layers}) > 1:
        raise ValueError(
            "mtp_use_repeated_layer=True with different mtp_layers; expected one pattern; repeat one letter in mtp_layers"
        )
    if stock is None:
        decoder = get_gpt_decoder_block_spec(
            config, use_transformer_engine, config.normalization, config.qk_l2_norm, vp_stage=vp_stage, pp_rank=pp_rank
        )
        stock = get_gpt_mtp_block_spec(config, decoder, use_transformer_engine, vp_stage=vp_stage, pp_rank=pp_rank)
    choice = _core_choice(
        config, sparsity, use_transformer_engine, dense_core, packed, backend, deterministic, seq_length, context
    )
    layers = []
    for index, stock_layer in enumerate(stock.layer_specs):
        spec = copy.deepcopy(stock_layer)
        core = choice.spec(sparsity.mtp_layers[index], index, of_mtp=True)
        spec.submodules.mtp_model_layer = _with_core(
            spec.submodules.mtp_model_layer, config, core, f"MTP layer {index} (counted from 0)"
        )
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(spec.submodules, name, stage_norm(getattr(spec.submodules, name), config))
        layers.append(spec)
    return MultiTokenPredictionBlockSubmodules(layer_specs=layers)


@dataclass(frozen=True)
class S2LayerSpecs:
    """Makes the specs of every pipeline stage; GPTModelConfig.transformer_layer_spec takes an instance as its
    callable."""

    sparsity: ResolvedSparsity
    dense_core: str
    packed: bool
    backend: str
    deterministic: bool
    seq_length: int
    context: ContextSettings

    def _settings(self, model_config) -> dict:
        return dict(
            use_transformer_engine=model_config.transformer.transformer_impl == "transformer_engine",
            dense_core=self.dense_core,
            packed=self.packed,
            backend=self.backend,
            deterministic=self.deterministic,
            seq_length=self.seq_length,
            context=self.context,
        )

    def __call__(self, model_config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        """The decoder layers. model_config: Megatron's GPTModelConfig."""
        stock = megatron_gpt.default_layer_spec(model_config, vp_stage)
        return s2_block_spec(
            model_config.transformer, self.sparsity, stock=stock, vp_stage=vp_stage, **self._settings(model_config)
        )

    def mtp_block(self, stock_function, model_config, layer_spec, vp_stage: int | None = None):
        """The multi-token-prediction layers, in place of stock_function(model_config, layer_spec, vp_stage)."""
        stock = stock_function(model_config, layer_spec, vp_stage=vp_stage)
        if stock is None:
            return None
        return s2_mtp_block_spec(
            model_config.transformer, self.sparsity, stock=stock, vp_stage=vp_stage, **self._settings(model_config)
        )


class S2GPTModelBuilder(megatron_gpt.GPTModelBuilder):
    """Megatron's GPT builder, for models whose multi-token-prediction layers follow the S2 config too.

    The stock builder makes the spec of those layers itself, from its own dense layer, whatever spec the decoder has.
    """

    def build_model(self, *args, **kwargs):
        specs = self._model_config.transformer_layer_spec
        stock = megatron_gpt.mtp_block_spec
        megatron_gpt.mtp_block_spec = partial(specs.mtp_block, stock)
        try:
            return super().build_model(*args, **kwargs)
        finally:
            megatron_gpt.mtp_block_spec = stock


def apply_s2(model_config, args, sparsity: ResolvedSparsity | None) -> None:
    """Make Megatron build `model_config` with S2-Attention, and print which attention runs in which layer.

    model_config: the GPTModelConfig of gpt_config_from_args; its layer spec, softmax scale and builder are set. args:
    the parsed arguments. sparsity: what prepare_s2 returned; None leaves everything as it is.
    Raises ValueError when the model has a layer spec, a softmax scale or a builder of another source already, when
    Transformer Engine is asked for and missing, and when --s2-dense-core cannot be honoured.
    """
    if sparsity is None:
        return
    transformer = model_config.transformer
    if model_config.transformer_layer_spec is not None:
        raise ValueError(f"spec={args.spec}: a layer spec together with --s2-config; expected one of them; drop --spec")
    if model_config.builder != megatron_gpt.GPTModelConfig.builder:
        raise ValueError(
            f"the model is built by {model_config.builder}; expected {megatron_gpt.GPTModelConfig.builder}; train a plain GPT"
        )
    use_transformer_engine = _uses_transformer_engine(transformer)
    _set_softmax_scale(transformer, sparsity)
    packed = bool(args.sft or args.dataloader_inter_document_masking)
    cut = packed_cut(args)
    context = ContextSettings(tuple(args.s2_cp_comm_type), args.s2_cp_keep_received, cut, args.s2_keep_attention_output)
    core, reason = resolve_dense_core(
        args.s2_dense_core,
        use_transformer_engine=use_transformer_engine,
        context_parallel_size=transformer.context_parallel_size,
        packed=packed,
        seq_length=args.seq_length,
        packed_cut=cut,
    )
    model_config.transformer_layer_spec = S2LayerSpecs(
        sparsity=sparsity,
        dense_core=core,
        packed=packed,
        backend=args.s2_backend,
        deterministic=transformer.deterministic_mode,
        seq_length=args.seq_length,
        context=context,
    )
    model_config.builder = f"{S2GPTModelBuilder.__module__}.{S2GPTModelBuilder.__qualname__}"
    stock_core = "Transformer Engine" if use_transformer_engine else "Megatron local"
    ours = [layer.pattern is not None or core == "s2" for layer in sparsity.all_layers]
    print_table(sparsity.table(core_names(ours, stock_core, transformer, context)))
    if transformer.context_parallel_size > 1:
        report_context_parallel(sparsity, ours, transformer, context, packed)
    if any(layer.pattern is None for layer in sparsity.all_layers):
        print_once(f"S2 dense layers: computed by {'S2-Attention' if core == 's2' else stock_core} ({reason})")


def _uses_transformer_engine(transformer: TransformerConfig) -> bool:
    implementation = transformer.transformer_impl
    if implementation == "local":
        return False
    if implementation != "transformer_engine":
        raise ValueError(
            f"transformer_impl={implementation!r}; expected 'local' or 'transformer_engine'; set --transformer-impl"
        )
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise ValueError(
            "transformer_impl='transformer_engine', but Transformer Engine is not installed; expected 'local'; add --transformer-impl local "
            "--no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion, or pip install transformer-engine[pytorch]"
        )
    return True


def _set_softmax_scale(transformer: TransformerConfig, sparsity: ResolvedSparsity) -> None:
    """Write the S2 config's softmax scale into the model's config: it holds for every layer, dense ones included."""
    scale = sparsity.softmax_scale
    if scale is None:
        return
    if transformer.softmax_scale not in (None, scale):
        raise ValueError(
            f"softmax_scale={scale} in the S2 config, but the model's is {transformer.softmax_scale} already (MuP sets one); expected one "
            "source; drop softmax_scale from the S2 config or --use-mup"
        )
    transformer.softmax_scale = scale
