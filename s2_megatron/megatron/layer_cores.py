"""The core attention of every layer, and a layer's spec with it: what the specs of a GPT and of a HybridModel share."""

from __future__ import annotations

import copy

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.model.core_attention import ATTENTION_MODULES, S2CoreAttention
from s2_megatron.megatron.model.dense_core import resolve_dense_core
from s2_megatron.megatron.model.norms import stage_norm
from s2_megatron.megatron.patches import keep_attention_outputs
from s2_megatron.megatron.settings import S2Run
from s2_megatron.patterns.ranges import RangePattern


def uses_transformer_engine(config: TransformerConfig) -> bool:
    return config.transformer_impl == "transformer_engine"


def dense_core(config: TransformerConfig, run: S2Run) -> tuple[str, str]:
    """What resolve_dense_core says for a model's config."""
    names = ("transformer_impl", "context_parallel_size", "multi_latent_attention")
    return resolve_dense_core(run.settings, **{name: getattr(config, name) for name in names})


def core_specs(config: TransformerConfig, run: S2Run) -> list[ModuleSpec | None]:
    """The core attention of every layer of the model, those of multi-token prediction last; None to keep Megatron's."""
    sparsity, settings = run.sparsity, run.settings
    if settings.keep_attention_output:
        keep_attention_outputs()
    dense = None
    if dense_core(config, run)[0] == "s2":
        dense = RangePattern.dense(sparsity.block_size, config.num_attention_heads, config.num_query_groups)
    specs = []
    for layer, found in enumerate(sparsity.all_layers):
        pattern = dense if found.pattern is None else found.pattern
        index = sparsity.place(layer)
        params = dict(pattern=pattern, layer_index=index, settings=settings, s2_cp_comm_type=settings.comm_type(layer))
        specs.append(None if pattern is None else ModuleSpec(module=S2CoreAttention, params=params))
    return specs


def require_repeatable(config: TransformerConfig, sparsity: ResolvedSparsity, layers: int = 1) -> None:
    """Raises ValueError where --mtp-use-repeated-layer runs the same `layers` attention layers again, of which the
    sparsity says something else."""
    patterns = [layer.pattern for layer in sparsity.mtp_layers]
    if config.mtp_use_repeated_layer and patterns[layers:] != patterns[:-layers]:
        raise ValueError(
            "mtp_use_repeated_layer=True with different mtp_layers; expected one pattern; repeat one letter in "
            "mtp_layers"
        )


def with_core(stock: ModuleSpec, config: TransformerConfig, core: ModuleSpec | None, layer_name: str) -> ModuleSpec:
    """A deep copy of a transformer layer's spec, its core attention replaced unless core is None."""
    spec = copy.deepcopy(stock)
    attention = getattr(spec.submodules, "self_attention", None)
    is_layer = isinstance(spec.module, type) and issubclass(spec.module, TransformerLayer)
    if not is_layer or getattr(attention, "module", None) not in ATTENTION_MODULES:
        raise ValueError(
            f"{layer_name}: its spec is {spec.module} around {getattr(attention, 'module', attention)}; expected "
            "TransformerLayer around SelfAttention or MLASelfAttention; drop the flag that selects another attention "
            "(--mla-down-proj-fusion, --experimental-attention-variant, --heterogeneous-layers-config-path)"
        )
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        setattr(spec.submodules, name, stage_norm(getattr(spec.submodules, name), config))
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):  # the last one of multi-latent attention
        if hasattr(attention.submodules, name):
            setattr(attention.submodules, name, stage_norm(getattr(attention.submodules, name), config))
    if core is not None:
        attention.module = ATTENTION_MODULES[attention.module]
        attention.submodules.core_attention = core
    return spec
