"""The layers of Megatron's HybridModel made of its local modules, for machines without Transformer Engine.

Megatron 0.19.2 makes them of Transformer Engine's modules alone, whatever --transformer-impl says
(core/models/hybrid/hybrid_layer_specs.py), and so the norm behind the last layer (hybrid_block.py:215). A layer of
which a stack has no spec it builds as one that does nothing (the defaults of HybridStackSubmodules).
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.models.gpt.gpt_layer_specs import LNImpl, get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from s2_megatron.megatron.model.norms import final_norm, stage_norm

# The specs of the layers of each symbol in HybridStackSubmodules.
FIELDS = {
    Symbols.ATTENTION: "attention_layer",
    Symbols.MLP: "mlp_layer",
    Symbols.MOE: "moe_layer",
    Symbols.MAMBA: "mamba_layer",
    Symbols.GDN: "gdn_layer",
    Symbols.DS_ATTENTION: "dsa_layer",
    Symbols.MLA: "mla_layer",
}


def require_layers(submodules: HybridStackSubmodules, symbols: Iterable[str]) -> None:
    """Raises ValueError for a layer of which a local stack has no spec. symbols: of the model's layers."""
    for symbol in dict.fromkeys(symbols):
        if getattr(submodules, FIELDS[symbol]) is not IdentityOp:
            continue
        if symbol == Symbols.MOE:
            raise ValueError("--hybrid-layer-pattern has layers E, without --num-experts; expected both; add it")
        raise ValueError(
            f"--hybrid-layer-pattern has layers {symbol} with --transformer-impl local, which has *, - and E alone; "
            "expected these; use --transformer-impl transformer_engine"
        )


class LocalHybridStack(HybridStack):
    """Megatron's HybridStack with another norm behind the last layer. final_norm: what builds it, a class or a
    function; the other arguments as Megatron passes them. Raises ValueError as require_layers does."""

    def __init__(self, config: TransformerConfig, submodules: HybridStackSubmodules, *, final_norm, **named):
        require_layers(submodules, named["layer_type_list"])
        wanted = named.pop("post_layer_norm", True)
        super().__init__(config, submodules, post_layer_norm=False, **named)
        self.post_layer_norm = wanted
        if self.post_process and wanted:
            # Not by build_module, which hands functions back uncalled.
            self.final_norm = final_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)


def is_local_stack(spec) -> bool:
    """Whether a spec is of local_stack_spec."""
    return isinstance(spec, ModuleSpec) and spec.module is LocalHybridStack


def local_stack_spec(config: TransformerConfig) -> ModuleSpec:
    """The spec of a HybridModel of Megatron's local modules, with attention (`*`), dense MLP (`-`) and, where config
    has experts, MoE layers (`E`).

    Each is one half of Megatron's local GPT layer, so that a model of `*-` repeated N times computes what the GPT of N
    layers does, and so for multi-token prediction. Other layers (`M`, `G`, `D`, `+`) have no local modules, and are
    refused where a stack is built.
    """
    layer = _gpt_layer(config, num_experts=None)
    attention = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=layer.input_layernorm,
            self_attention=layer.self_attention,
            self_attn_bda=layer.self_attn_bda,
            sharded_state_dict_keys_map=_keys_of(layer, "input_layernorm."),
        ),
    )
    layers = dict(attention_layer=attention, mlp_layer=_mlp_spec(MLPLayer, layer))
    if config.num_moe_experts:
        experts = _gpt_layer(config, num_experts=config.num_moe_experts)
        layers["moe_layer"] = _mlp_spec(MoETransformerLayer, experts)
    depth = get_mtp_layer_spec(None, use_transformer_engine=False)  # Megatron adds the layers of the pattern
    for name in ("enorm", "hnorm", "layer_norm"):
        setattr(depth.submodules, name, stage_norm(getattr(depth.submodules, name), config))
    layers["mtp_block_spec"] = ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[depth])
    )
    params = {"final_norm": final_norm(LNImpl, config)}
    return ModuleSpec(module=LocalHybridStack, params=params, submodules=HybridStackSubmodules(**layers))


def _gpt_layer(config: TransformerConfig, num_experts: int | None) -> TransformerLayerSubmodules:
    layer = get_gpt_layer_local_submodules(
        num_experts=num_experts,
        moe_grouped_gemm=num_experts is not None and config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    layer.input_layernorm = stage_norm(layer.input_layernorm, config)
    layer.pre_mlp_layernorm = stage_norm(layer.pre_mlp_layernorm, config)
    return layer


def _mlp_spec(module: type, layer: TransformerLayerSubmodules) -> ModuleSpec:
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=layer.pre_mlp_layernorm,
            mlp=layer.mlp,
            mlp_bda=layer.mlp_bda,
            sharded_state_dict_keys_map=_keys_of(layer, "pre_mlp_layernorm."),
        ),
    )


def _keys_of(layer: TransformerLayerSubmodules, norm: str) -> dict[str, str]:
    """What the norm of one half is called in checkpoints: as Transformer Engine's fused layers call it."""
    return {norm: layer.sharded_state_dict_keys_map[norm]}
