"""Whether the model that a script built has the S2 layers of its --s2-config: without apply_s2 it would be dense."""

from __future__ import annotations

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import Module

from s2_megatron.config.errors import joined
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.model.core_attention import S2Attention

CALL = "apply_s2(model_config, run)"


def check_model(config: str | None, sparsity: ResolvedSparsity | None, model: list[Module]) -> None:
    """Raises ValueError for a model that was built without the S2 layers of --s2-config.

    config: --s2-config. sparsity: what prepare_s2 made of it; None when the script has not called prepare_s2. model:
    the chunks of this pipeline stage, as Megatron wraps them.
    """
    if config is None:
        return
    if sparsity is None:
        raise ValueError(
            f"--s2-config={config}, and the script has not called prepare_s2: the model is dense; expected "
            f"run = prepare_s2(args); add it behind parse_and_validate_args, and {CALL} behind gpt_config_from_args"
        )
    others = {
        module.layer_number - 1
        for chunk in model
        for name, module in chunk.named_modules()
        if isinstance(module, TransformerLayer) and not isinstance(module.self_attention, S2Attention)
        if "mtp" not in name.split(".")  # made by the same specs, and counted from the start again
    }
    layers = enumerate(sparsity.layers)
    dense = [layer for layer, found in layers if found.pattern is not None and sparsity.place(layer) in others]
    if dense:
        raise ValueError(
            f"--s2-config={config}, and layers {joined(dense, 8)} (counted from 0) were built without S2 "
            f"attention; expected it; call {CALL} with the model config that goes to pretrain"
        )
