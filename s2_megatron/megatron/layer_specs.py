"""GPT layer specs with S2-Attention: Megatron's own specs, deep-copied, with another `core_attention` in the layers
that want one.

    run = prepare_s2(args)                         # None without --s2-config
    model_config = gpt_config_from_args(args)
    apply_s2(model_config, run)                    # changes nothing when run is None

Layers are 0-based and global everywhere here; `global_layer_indices` is the one place that asks Megatron which layers a
pipeline stage holds.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training.models.hybrid import HybridModelConfig

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.hybrid_specs import s2_stack_spec
from s2_megatron.megatron.layer_cores import (
    core_specs,
    dense_core,
    require_repeatable,
    uses_transformer_engine,
    with_core,
)
from s2_megatron.megatron.model.check import CALL
from s2_megatron.megatron.model.expert_metrics import log_experts_of_all_stages
from s2_megatron.megatron.model.hybrid_stack import is_local_stack
from s2_megatron.megatron.model.norms import final_norm, stage_norm
from s2_megatron.megatron.patches import use_own_mtp_specs
from s2_megatron.megatron.records.report import report_layers
from s2_megatron.megatron.settings import S2Run

try:
    import megatron.training.models.gpt as megatron_gpt
except ModuleNotFoundError:  # a Megatron that has HybridModel alone
    megatron_gpt = None


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


def s2_block_spec(
    config: TransformerConfig,
    run: S2Run,
    *,
    stock: ModuleSpec | TransformerBlockSubmodules | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """The spec of this pipeline stage's decoder layers, each with the core attention that run.sparsity gives its global
    layer.

    stock: the spec to start from, of one layer or of the stage; default Megatron's get_gpt_decoder_block_spec, local or
    Transformer Engine's as config.transformer_impl says. vp_stage, pp_rank: as in global_layer_indices.
    Raises ValueError when the numbers of layers differ, when the stock layers are not self attention, and as
    resolve_dense_core does.
    """
    if len(run.sparsity.layers) != config.num_layers:
        raise ValueError(
            f"num_layers={config.num_layers}, but the S2 config was resolved for {len(run.sparsity.layers)}; expected "
            "the same"
        )
    cores = core_specs(config, run)
    whole_stage = _stock_block_spec(config, vp_stage, pp_rank)
    indices = global_layer_indices(config, vp_stage, pp_rank)
    if isinstance(stock, TransformerBlockSubmodules):
        whole_stage = stock
    stock_layers = [stock] * len(indices) if isinstance(stock, ModuleSpec) else whole_stage.layer_specs
    assert len(stock_layers) == len(indices), f"{len(stock_layers)} layer specs for the layers {indices}"
    layers = [
        with_core(spec, config, cores[index], f"layer {index} (counted from 0)")
        for index, spec in zip(indices, stock_layers)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm(whole_stage.layer_norm, config))


def _stock_block_spec(config, vp_stage, pp_rank) -> TransformerBlockSubmodules:
    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=uses_transformer_engine(config),
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )


def s2_mtp_block_spec(
    config: TransformerConfig,
    run: S2Run,
    *,
    stock: MultiTokenPredictionBlockSubmodules | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The spec of the multi-token-prediction layers with run.sparsity.mtp_layers; None on stages without them.

    stock: the spec to start from; default Megatron's, around its dense decoder layer. The other arguments as in
    s2_block_spec. Raises ValueError when the sparsity has another number of such layers, or, with
    --mtp-use-repeated-layer, layers that differ.
    """
    mtp_layers = run.sparsity.mtp_layers
    if get_mtp_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank) == 0:
        return None
    if len(mtp_layers) != config.mtp_num_layers:
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers}, but the S2 config says {len(mtp_layers)}; expected the same; "
            "give them in the S2 config's key mtp_layers"
        )
    require_repeatable(config, run.sparsity)
    if stock is None:
        engine, decoder = uses_transformer_engine(config), _stock_block_spec(config, vp_stage, pp_rank)
        stock = get_gpt_mtp_block_spec(config, decoder, engine, vp_stage=vp_stage, pp_rank=pp_rank)
    cores = core_specs(config, run)[-len(mtp_layers) :]
    layers = []
    for index, stock_layer in enumerate(stock.layer_specs):
        spec = copy.deepcopy(stock_layer)
        name = f"MTP layer {index} (counted from 0)"
        spec.submodules.mtp_model_layer = with_core(spec.submodules.mtp_model_layer, config, cores[index], name)
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(spec.submodules, name, stage_norm(getattr(spec.submodules, name), config))
        layers.append(spec)
    return MultiTokenPredictionBlockSubmodules(layer_specs=layers)


@dataclass(frozen=True)
class S2LayerSpecs:
    """Makes the specs of every pipeline stage; GPTModelConfig.transformer_layer_spec takes an instance as its
    callable."""

    run: S2Run

    def __call__(self, model_config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        """The decoder layers. model_config: Megatron's GPTModelConfig."""
        stock = megatron_gpt.default_layer_spec(model_config, vp_stage)
        return s2_block_spec(model_config.transformer, self.run, stock=stock, vp_stage=vp_stage)

    def mtp_block(self, model_config, stock: MultiTokenPredictionBlockSubmodules, vp_stage: int | None = None):
        """The multi-token-prediction layers, made from Megatron's; what use_own_mtp_specs calls."""
        return s2_mtp_block_spec(model_config.transformer, self.run, stock=stock, vp_stage=vp_stage)


def apply_s2(model_config, run: S2Run | None) -> None:
    """Makes Megatron build `model_config` with S2-Attention, and prints which attention runs in which layer.

    model_config: the GPTModelConfig of gpt_config_from_args, or the HybridModelConfig of hybrid_config_from_args; its
    spec and softmax scale are set. run: what prepare_s2 returned; None leaves everything as it is.
    Raises ValueError for other objects, when the model has a layer spec, a softmax scale or a builder of another source
    already, when Transformer Engine is asked for and missing, and when --s2-dense-core cannot be honoured.
    """
    if run is None:
        return
    transformer = getattr(model_config, "transformer", None)
    if not isinstance(run, S2Run) or transformer is None:
        raise ValueError(
            f"apply_s2 got a {type(model_config).__name__} and a {type(run).__name__}; expected the GPTModelConfig of "
            "gpt_config_from_args, or the HybridModelConfig of hybrid_config_from_args, and what prepare_s2 returned; "
            f"write {CALL}"
        )
    hybrid = isinstance(model_config, HybridModelConfig)
    if run.sparsity.places and not hybrid:
        raise ValueError(
            f"apply_s2 got a {type(model_config).__name__} under --hybrid-layer-pattern; expected the "
            "HybridModelConfig of hybrid_config_from_args; make that one, or leave --hybrid-layer-pattern out"
        )
    spec = model_config.hybrid_stack_spec if hybrid else model_config.transformer_layer_spec
    if spec is not None and not is_local_stack(spec):
        raise ValueError(f"the model has the layer spec {spec} and --s2-config; expected one of them; drop --spec")
    builder = model_config.builder
    known = HybridModelConfig.builder if hybrid else megatron_gpt and megatron_gpt.GPTModelConfig.builder
    if builder != known:
        raise ValueError(f"the model is built by {builder}; expected {known}; train a plain GPT or HybridModel")
    _require_transformer_impl(transformer)
    _set_softmax_scale(transformer, run.sparsity)
    if hybrid:
        log_experts_of_all_stages(transformer)
        model_config.hybrid_stack_spec = s2_stack_spec(transformer, run, model_config.hybrid_layer_pattern, stock=spec)
    else:
        use_own_mtp_specs()
        model_config.transformer_layer_spec = S2LayerSpecs(run)
    report_layers(run, *dense_core(transformer, run), transformer)


def _require_transformer_impl(transformer: TransformerConfig) -> None:
    implementation = transformer.transformer_impl
    if implementation not in ("local", "transformer_engine"):
        raise ValueError(
            f"transformer_impl={implementation!r}; expected 'local' or 'transformer_engine'; set --transformer-impl"
        )
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if uses_transformer_engine(transformer) and not HAVE_TE:
        raise ValueError(
            "transformer_impl='transformer_engine', but Transformer Engine is not installed; expected 'local'; add "
            "--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion, or "
            "pip install transformer-engine[pytorch]"
        )


def _set_softmax_scale(transformer: TransformerConfig, sparsity: ResolvedSparsity) -> None:
    """Writes the S2 config's softmax scale into the model's config: it holds for every layer, dense ones included."""
    scale = sparsity.softmax_scale
    if scale is None:
        return
    if transformer.softmax_scale not in (None, scale):
        raise ValueError(
            f"softmax_scale={scale} in the S2 config, but the model's is {transformer.softmax_scale} already (MuP sets "
            "one); expected one source; drop softmax_scale from the S2 config or --use-mup"
        )
    transformer.softmax_scale = scale
