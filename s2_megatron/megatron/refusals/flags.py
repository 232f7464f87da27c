"""Refused: values of the flags that `s2-megatron inspect` reads as well. Neither Megatron nor torch is imported, and a
flag that inspect was not given is missing in `args`."""

from __future__ import annotations

from argparse import Namespace

from s2_megatron.context_parallel.plan import COMM_TYPES
from s2_megatron.megatron.refusals.refusal import Refusal, is_set, listed
from s2_megatron.megatron.sparsity import FROM_FLAGS, attention_places
from s2_megatron.patterns.checks import HEAD_DIM_LIMIT


def latent_head_dims(args: Namespace) -> tuple[int, int]:
    """Head dims of keys and of values in multi-latent attention; Megatron's defaults for what was not given."""
    given = {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128} | vars(args)
    return given["qk_head_dim"] + given["qk_pos_emb_head_dim"], given["v_head_dim"]


def head_dim(args: Namespace) -> int:
    """Of the model, before Megatron has filled in --kv-channels, too; 0 where the flags do not tell it. The larger one
    where keys and values have two."""
    if getattr(args, "multi_latent_attention", False):
        return max(latent_head_dims(args))
    return args.kv_channels or (args.hidden_size or 0) // args.num_attention_heads


def _words_of_head_dim(args: Namespace) -> dict[str, str]:
    if not getattr(args, "multi_latent_attention", False):
        return dict(flag="--kv-channels", fix="use more heads (--num-attention-heads) or a smaller --kv-channels")
    keys, values = latent_head_dims(args)
    flag = "--v-head-dim" if values > keys else "--qk-head-dim + --qk-pos-emb-head-dim"
    return dict(flag=flag, fix=f"use a smaller {flag.split(' ')[0]}")


def _attention_is_recomputed(args: Namespace) -> bool:
    # Left out, the modules are still None here: TransformerConfig fills in its default, core_attn, when the model
    # config is made.
    modules = ["core_attn"] if args.recompute_modules is None else args.recompute_modules
    # Megatron's validation makes the older flag into the newer one.
    selective = getattr(args, "recompute_activations", False) or args.recompute_granularity == "selective"
    return "core_attn" in modules if selective else args.recompute_granularity == "full"


REFUSALS = (
    Refusal(
        "attention_dropout",
        is_set("attention_dropout"),
        "attention_dropout={args.attention_dropout}, but S2 attention has no dropout",
        "add --attention-dropout 0 (Megatron's default is 0.1)",
    ),
    Refusal(
        "window_size",
        lambda args: getattr(args, "window_size", None) is not None and args.s2_config != FROM_FLAGS,
        "--window-size {window} beside the sparsity {args.s2_config}, and a model has its windows from one of them",
        f"use --s2-config {FROM_FLAGS}, or remove --window-size and give `window:` in the YAML (--window-size W,0 is "
        "`window:` W+1)",
        lambda args: {"window": ",".join(map(str, args.window_size))},
    ),
    Refusal(
        "position_embedding_type",
        lambda args: args.position_embedding_type == "relative",
        "--position-embedding-type relative adds an attention bias, which S2 attention does not have",
        "use --position-embedding-type rope",
    ),
    Refusal(
        "kv_channels",
        lambda args: head_dim(args) > HEAD_DIM_LIMIT,
        f"{{flag}} {{channels}}: S2 attention computes head dims up to {HEAD_DIM_LIMIT}",
        "{fix}",
        lambda args: {"channels": head_dim(args), **_words_of_head_dim(args)},
    ),
    Refusal(
        "transformer_impl",
        lambda args: args.transformer_impl not in ("local", "transformer_engine"),
        "--transformer-impl {args.transformer_impl} brings its own layer spec",
        "use --transformer-impl transformer_engine, or local",
    ),
    Refusal(
        "s2_keep_attention_output",
        lambda args: args.s2_keep_attention_output and not _attention_is_recomputed(args),
        "--s2-keep-attention-output stores the attention's output for a recomputation, and this run recomputes no "
        "attention",
        "remove --s2-keep-attention-output, or add --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    Refusal(
        "s2_cp_comm_type",
        lambda args: len(args.s2_cp_comm_type) not in (1, len(attention_places(args))),
        f"--s2-cp-comm-type {{comm_types}}: expected {', '.join(COMM_TYPES)}, one for all layers or one for each of "
        "the {layers} layers",
        "use --s2-cp-comm-type sparse",
        lambda args: {"comm_types": " ".join(args.s2_cp_comm_type), "layers": len(attention_places(args))},
    ),
)


def refuse_flags(args: Namespace) -> None:
    """Raises ValueError that lists every one of REFUSALS that applies."""
    found = [refusal.message(args) for refusal in REFUSALS if refusal.refused(args)]
    if found:
        raise ValueError(listed(found))
