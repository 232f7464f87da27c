"""Which experts of Megatron's have a form in transformers, whose own code runs them in stock models and in ours: each
token's are chosen by a softmax router, and nothing else is added, dropped or scaled."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping

from s2_megatron.config.errors import printable
from s2_megatron.config.stored import MODEL_TYPE
from s2_megatron.tools.hf.config_keys import EXPERT_KEYS
from s2_megatron.tools.hf.weights import Experts

TAKERS = "export-hf, generate and choose-dense"  # of a Megatron checkpoint

# Read here.
_READ = {"moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax"}

# What changes the outputs, and the values with which it does not.
_NEUTRAL: dict[str, Collection] = {
    "moe_router_score_function": ("softmax",),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_dispatch_fwd_dtype": ("bf16",),
}

# What the outputs do not depend on: losses, which of several equal computations runs and in what precision the router
# adds, how training began, what is logged, and settings of those above that are off.
_WITHOUT_EFFECT = {
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_dtype", "moe_router_fusion", "moe_router_bias_update_rate",
    "moe_router_quantile_balancing_ema", "moe_token_drop_policy", "moe_use_upcycling", "moe_upcycling_granularity",
    "moe_grouped_gemm", "moe_token_dispatcher_type",
    "moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms", "moe_deepep_num_sms",
    "moe_hybridep_num_sms", "moe_hybridep_num_blocks_permute", "moe_hybridep_num_blocks_unpermute",
    "moe_hybridep_num_sms_preprocessing", "moe_hybridep_pad_uneven_dispatch_inputs", "moe_permute_fusion",
    "moe_permute_fusion_into_hybridep", "moe_ncclep_static_shape", "moe_ncclep_zero_copy", "moe_layer_recompute",
    "moe_combine_bwd_dtype",
    "moe_per_layer_logging", "moe_paged_stash", "moe_paged_stash_page_size", "moe_paged_stash_buffer_size_factor_cuda",
    "moe_paged_stash_buffer_size_factor_cpu", "moe_shared_expert_overlap", "moe_shared_expert_gate",
    "moe_shared_expert_glu_interleave_size", "moe_pad_experts_for_cuda_graph_inference",
    "moe_routing_trace_path", "moe_routing_trace_max_training_iters", "moe_routing_trace_capture_logits",
    "moe_routing_trace_capture_hidden_states", "moe_routing_trace_dump_weights",
}  # fmt: skip


def experts_of_arguments(args: Namespace, where: str, layers: int, kinds: str | None) -> Experts | None:
    """The experts of a model that was trained with these arguments; None where no layer has some.

    layers: how many the model has. kinds: of a HybridModel, what follows the attention in each (`-` or `E`); None of a
    GPT. Raises one ValueError that names every setting of experts which no such architecture has; a setting that is
    not known is one, unless it is off.
    """
    count = getattr(args, "num_experts", None)
    has = _layers_with_experts(args, where, layers) if kinds is None else tuple(kind == "E" for kind in kinds)
    if not count or not any(has):
        return None
    other = {
        name: value for name, value in vars(args).items() if name.startswith("moe_") and not _is_neutral(name, value)
    }
    if other:
        found = ", ".join(f"{name}={printable(repr(value))} ({_expected(name)})" for name, value in other.items())
        raise ValueError(
            f"{where}: {found}; {TAKERS} take experts only where a softmax router chooses them for each token and "
            "nothing is computed beside them, as in stock architectures; train with the expected values"
        )
    return Experts(
        layers=has,
        count=count,
        hidden=getattr(args, "moe_ffn_hidden_size", None) or args.ffn_hidden_size,
        top=args.moe_router_topk,
        normalized=not getattr(args, "moe_router_pre_softmax", False),
    )


def _expected(name: str) -> str:
    return f"expected {' or '.join(map(str, _NEUTRAL[name]))}" if name in _NEUTRAL else "expected off, its default"


def _is_neutral(name: str, value) -> bool:
    if name in _READ or name in _WITHOUT_EFFECT:
        return True
    if name not in _NEUTRAL:
        return value is None or value is False  # 0 is not off: --moe-router-force-biased 0 still draws the experts
    return all(one in _NEUTRAL[name] for one in (value if isinstance(value, list) else [value]))


def _layers_with_experts(args: Namespace, where: str, layers: int) -> tuple[bool, ...]:
    """By --moe-layer-freq, as Megatron reads it: a list, or N for every Nth layer, the first one included."""
    every = getattr(args, "moe_layer_freq", 1)
    if isinstance(every, int):
        return tuple(layer % every == 0 for layer in range(layers))
    if len(every) != layers:
        raise ValueError(
            f"{where}: moe_layer_freq={every} has {len(every)} entries; expected one for each of the {layers} layers; "
            "the checkpoint's arguments are damaged, load another one"
        )
    return tuple(bool(one) for one in every)


def experts_of_config(content: Mapping, where: str) -> Experts | None:
    """The experts of a Hugging Face config, of config_as_read; None where no layer has some. Raises ValueError for
    those that Megatron cannot route."""
    family, layers = content["model_type"], content["num_hidden_layers"]
    if family not in EXPERT_KEYS or (family == MODEL_TYPE and content["num_experts"] is None):
        return None
    has = (True,) * layers
    if family in ("qwen3_moe", MODEL_TYPE):
        dense, every = content["mlp_only_layers"] or [], content.get("decoder_sparse_step", 1)
        has = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
    elif family == "mellum":
        has = tuple(kind == "sparse" for kind in content["mlp_layer_types"])
    if not any(has):
        return None
    count = content.get("num_local_experts") or content["num_experts"]
    top, normalized = content["num_experts_per_tok"], family == "mixtral" or content["norm_topk_prob"]
    if not (2 if normalized else 1) <= top <= count:
        least = "2 or more, for Megatron scales no single expert to 1, and " if normalized else ""
        raise ValueError(
            f"{where}: config.json has num_experts_per_tok={top}; expected {least}at most its {count} experts; "
            "such a model cannot be imported"
        )
    hidden = content["intermediate_size" if family == "mixtral" else "moe_intermediate_size"]
    return Experts(layers=has, count=count, hidden=hidden, top=top, normalized=normalized)


def expert_flags(experts: Experts) -> list[str]:
    """The flags of Megatron that make these experts in a GPT; in a HybridModel its pattern says which layers have
    some."""
    flags = [
        f"--num-experts={experts.count}", f"--moe-ffn-hidden-size={experts.hidden}",
        f"--moe-router-topk={experts.top}", "--moe-router-load-balancing-type=none",
    ]  # fmt: skip
    flags += [] if experts.normalized else ["--moe-router-pre-softmax"]
    return flags if all(experts.layers) else [*flags, layers_flag(experts.layers)]


def layers_flag(layers: Collection[bool]) -> str:
    """The flag that says which layers have experts; their weights are not stacked then."""
    return f"--moe-layer-freq=[{','.join(str(int(has)) for has in layers)}]"
