"""The spec of Megatron's HybridModel with S2-Attention in its attention layers (`*`), and its model config.

HybridStack has one spec for all layers of a symbol, and tells a layer its number when it builds it:
HybridAttentionLayer looks up what stands in that layer.
"""

from __future__ import annotations

import copy
from argparse import Namespace

from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

from s2_megatron.megatron.layer_cores import core_specs, uses_transformer_engine, with_core
from s2_megatron.megatron.model.expert_metrics import log_experts_of_all_stages
from s2_megatron.megatron.model.hybrid_stack import is_local_stack, local_stack_spec, require_layers
from s2_megatron.megatron.settings import S2Run
from s2_megatron.megatron.sparsity import ATTENTION, layer_symbols


class HybridAttentionLayer(TransformerLayer):
    """An attention layer of a HybridModel. by_place: what stands in each of them, by its index among all layers of the
    model; submodules: of the spec, not used. The other arguments as Megatron passes them."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int,
        *,
        by_place: dict[int, TransformerLayerSubmodules],
        **named,
    ):
        assert not named.get("is_mtp_layer"), "by_place holds the decoder's layers alone"
        super().__init__(config, by_place[layer_number - 1], layer_number, **named)


def s2_stack_spec(
    config: TransformerConfig, run: S2Run, pattern: str, *, stock: ModuleSpec | None = None
) -> ModuleSpec:
    """The spec of all layers of a HybridModel, each `*` with the core attention that run.sparsity gives it.

    pattern: --hybrid-layer-pattern. stock: the spec to start from; default Megatron's, or that of its local modules, as
    config.transformer_impl says.
    Raises ValueError when the sparsity was resolved for other layers, for layers that a local stack does not have, and
    as resolve_dense_core does.
    """
    places = tuple(place for place, symbol in enumerate(layer_symbols(pattern)) if symbol == ATTENTION)
    if run.sparsity.places != places:
        raise ValueError(
            f"hybrid_layer_pattern={pattern!r} has attention in layers {list(places)} (counted from 0), but the S2 "
            f"config was resolved for {list(run.sparsity.places)}; expected the same; give the pattern by "
            "--hybrid-layer-pattern"
        )
    if stock is None:
        stock = hybrid_stack_spec if uses_transformer_engine(config) else local_stack_spec(config)
    if is_local_stack(stock):
        require_layers(stock.submodules, layer_symbols(pattern))
    attention = stock.submodules.attention_layer
    by_place = {
        place: with_core(attention, config, core, f"layer {place} (counted from 0)").submodules
        for place, core in zip(places, core_specs(config, run))
    }
    submodules = copy.copy(stock.submodules)
    submodules.attention_layer = ModuleSpec(
        module=HybridAttentionLayer, params={"by_place": by_place}, submodules=attention.submodules
    )
    return ModuleSpec(module=stock.module, params=dict(stock.params), submodules=submodules)


def model_config_from_args(args: Namespace):
    """Megatron's GPTModelConfig, or its HybridModelConfig where args has a hybrid_layer_pattern: of local modules with
    --transformer-impl local, where Megatron takes Transformer Engine's all the same.

    args: Megatron's. Raises ValueError for what Megatron would leave out of a HybridModel in silence: RoPE scaling, and
    layers that a local stack does not have.
    """
    if args.hybrid_layer_pattern is None:
        return gpt_config_from_args(args)
    if args.use_rope_scaling:
        raise ValueError(
            "--use-rope-scaling with --hybrid-layer-pattern: Megatron's HybridModel has none, and would be trained "
            "without; expected one of the two; leave --use-rope-scaling out"
        )
    model_config = hybrid_config_from_args(args)
    log_experts_of_all_stages(model_config.transformer)
    if args.transformer_impl == "local" and model_config.hybrid_stack_spec is None:
        model_config.hybrid_stack_spec = spec = local_stack_spec(model_config.transformer)
        require_layers(spec.submodules, layer_symbols(args.hybrid_layer_pattern))
    return model_config
