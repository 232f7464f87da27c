"""The spec of Megatron's HybridModel with S2-Attention in its attention layers (`*`), and its model config.

HybridStack has one spec for all layers of a symbol, and tells a layer its number when it builds it:
HybridAttentionLayer looks up what stands in that layer.
"""

from __future__ import annotations

import copy
from argparse import Namespace

from megatron.core import package_info
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.training import argument_utils

from s2_megatron.megatron.layer_cores import core_specs, require_repeatable, uses_transformer_engine, with_core
from s2_megatron.megatron.model.expert_metrics import log_experts_of_all_stages
from s2_megatron.megatron.model.hybrid_stack import is_local_stack, local_stack_spec, require_layers
from s2_megatron.megatron.model.rope_scaling import refuse_dropped
from s2_megatron.megatron.settings import S2Run
from s2_megatron.megatron.sparsity import attention_in, layer_symbols, mtp_symbols


class HybridAttentionLayer(TransformerLayer):
    """An attention layer of a HybridModel. by_place: what stands in each of them, by its index among all layers of the
    model, or of one depth of the multi-token prediction (of_mtp); submodules: of the spec, not used. The other
    arguments as Megatron passes them."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int,
        *,
        by_place: dict[int, TransformerLayerSubmodules],
        of_mtp: bool = False,
        **named,
    ):
        assert bool(named.get("is_mtp_layer")) == of_mtp, "by_place is of other layers"
        super().__init__(config, by_place[layer_number - 1], layer_number, **named)


class HybridMTPLayer(MultiTokenPredictionLayer):
    """One depth of the multi-token prediction of a HybridModel. attention: the spec of its own attention layers, in
    place of the decoder's. The other arguments as Megatron passes them."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules,
        *,
        attention: ModuleSpec,
        hybrid_submodules: HybridStackSubmodules,
        **named,
    ):
        own = copy.copy(hybrid_submodules)
        own.attention_layer = attention
        super().__init__(config, submodules, hybrid_submodules=own, **named)


def s2_stack_spec(
    config: TransformerConfig, run: S2Run, pattern: str, *, stock: ModuleSpec | None = None
) -> ModuleSpec:
    """The spec of all layers of a HybridModel, each `*` with the core attention that run.sparsity gives it, those of
    multi-token prediction, too.

    pattern: --hybrid-layer-pattern. stock: the spec to start from; default Megatron's, or that of its local modules, as
    config.transformer_impl says.
    Raises ValueError when the sparsity was resolved for other layers, for layers that a local stack does not have, for
    different layers of multi-token prediction with --mtp-use-repeated-layer, and as resolve_dense_core does.
    """
    places, per_depth = (attention_in(symbols) for symbols in (layer_symbols(pattern), mtp_symbols(pattern)))
    if run.sparsity.places != places:
        raise ValueError(
            f"hybrid_layer_pattern={pattern!r} has attention in layers {list(places)} (counted from 0), but the S2 "
            f"config was resolved for {list(run.sparsity.places)}; expected the same; give the pattern by "
            "--hybrid-layer-pattern"
        )
    if stock is None:
        stock = hybrid_stack_spec if uses_transformer_engine(config) else local_stack_spec(config)
    if is_local_stack(stock):
        require_layers(stock.submodules, layer_symbols(pattern) + mtp_symbols(pattern))
    attention, cores = stock.submodules.attention_layer, core_specs(config, run)
    submodules = copy.copy(stock.submodules)
    submodules.attention_layer = _attention_spec(attention, config, dict(zip(places, cores)), "layer")
    if per_depth:
        of_mtp, depths = cores[len(places) :], config.mtp_num_layers
        if run.sparsity.mtp_places != per_depth * depths:
            raise ValueError(
                f"mtp_num_layers={depths} of {mtp_symbols(pattern)!r}, but the S2 config was resolved for "
                f"{len(run.sparsity.mtp_layers)} layers; expected the same; give the depths by --hybrid-layer-pattern"
            )
        by_depth = [of_mtp[depth * len(per_depth) :][: len(per_depth)] for depth in range(depths)]
        specs = [
            _attention_spec(attention, config, dict(zip(per_depth, found)), f"MTP depth {depth}, layer", of_mtp=True)
            for depth, found in enumerate(by_depth)
        ]
        require_repeatable(config, run.sparsity, len(per_depth))
        submodules.mtp_block_spec = _mtp_spec(stock.submodules.mtp_block_spec, specs)
    return ModuleSpec(module=stock.module, params=dict(stock.params), submodules=submodules)


def _attention_spec(stock: ModuleSpec, config: TransformerConfig, cores: dict, name: str, of_mtp=False) -> ModuleSpec:
    """The spec of the attention layers with `cores`, by their places."""
    by_place = {
        place: with_core(stock, config, core, f"{name} {place} (counted from 0)").submodules
        for place, core in cores.items()
    }
    params = {"by_place": by_place, "of_mtp": of_mtp}
    return ModuleSpec(module=HybridAttentionLayer, params=params, submodules=stock.submodules)


def _mtp_spec(stock: ModuleSpec, attention: list[ModuleSpec]) -> ModuleSpec:
    """The spec of all depths of the multi-token prediction, with the attention layers of each."""
    depth = stock.submodules.layer_specs[0]  # of which Megatron makes every depth
    layers = [
        ModuleSpec(module=HybridMTPLayer, params={"attention": spec}, submodules=depth.submodules) for spec in attention
    ]
    block = MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    return ModuleSpec(module=stock.module, params=dict(stock.params), submodules=block)


def _pattern_of_gpt(args: Namespace) -> str:
    """The --hybrid-layer-pattern with the layers of a GPT."""
    every = args.moe_layer_freq if args.num_experts else [0] * args.num_layers
    if isinstance(every, int):  # the first layer, and every Nth from there
        every = [int(layer % every == 0) for layer in range(args.num_layers)]
    return "".join("*E" if experts else "*-" for experts in every)


def model_config_from_args(args: Namespace):
    """Megatron's GPTModelConfig, or its HybridModelConfig where args has a hybrid_layer_pattern: of local modules with
    --transformer-impl local, where Megatron takes Transformer Engine's all the same.

    args: Megatron's. Raises ValueError as refuse_dropped does, for layers that a local stack does not have, and for a
    GPT where Megatron has no GPTModel.
    """
    if args.hybrid_layer_pattern is None:
        if not hasattr(argument_utils, "gpt_config_from_args"):
            raise ValueError(
                f"--hybrid-layer-pattern is not given, and Megatron {package_info.__version__} has no GPTModel; "
                f"expected a pattern, in which *- stands for a layer of a GPT, *E for one with experts; add "
                f"--hybrid-layer-pattern '{_pattern_of_gpt(args)}'"
            )
        return argument_utils.gpt_config_from_args(args)
    refuse_dropped(args)
    model_config = argument_utils.hybrid_config_from_args(args)
    log_experts_of_all_stages(model_config.transformer)
    if args.transformer_impl == "local" and model_config.hybrid_stack_spec is None:
        model_config.hybrid_stack_spec = spec = local_stack_spec(model_config.transformer)
        symbols = layer_symbols(args.hybrid_layer_pattern) + mtp_symbols(args.hybrid_layer_pattern)
        require_layers(spec.submodules, symbols)
    return model_config
