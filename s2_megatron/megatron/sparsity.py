"""From Megatron's arguments to the sparsity of every layer: that of a YAML, or Megatron's own windows.

    --s2-config sparsity.yaml
    --s2-config window-size --window-size 1023,0 --window-attn-skip-freq 4

Megatron is imported only to ask it which layers have the window: `s2-megatron inspect` needs it for nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
from argparse import Namespace

from s2_megatron.config.errors import Source, printable
from s2_megatron.config.load import SparsityConfig, load_config
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.patterns.ranges import Pattern, RangePattern, make_range_pattern

FROM_FLAGS = "window-size"  # of --s2-config
BLOCK_SIZE = 64
ATTENTION = "*"  # in Megatron's --hybrid-layer-pattern


def layer_symbols(pattern: str) -> str:
    """One symbol for each layer of the decoder in --hybrid-layer-pattern, without its pipeline stages (|) and its
    multi-token-prediction layers (/). Raises ValueError for what argparse makes of --hybrid-layer-pattern=--."""
    if not isinstance(pattern, str):
        raise ValueError("--hybrid-layer-pattern=-- has no attention layer (*); expected one or more; add one")
    return pattern.partition("/")[0].replace("|", "")


def mtp_symbols(pattern: str) -> str:
    """The same of one depth of the multi-token prediction; all depths have the same layers."""
    return pattern.partition("/")[2].partition("/")[0]


def attention_in(symbols: str) -> tuple[int, ...]:
    """Where the attention layers stand in symbols without stages and depths."""
    return tuple(place for place, symbol in enumerate(symbols) if symbol == ATTENTION)


def attention_places(args: Namespace) -> tuple[int, ...]:
    """The decoder layers with attention, counted from 0 over all layers: those of `*` in a HybridModel, and all of a
    GPT. args: Megatron's, also those that a checkpoint has stored."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is None:
        return tuple(range(args.num_layers or 0))
    return attention_in(layer_symbols(pattern))


def check_windows(args: Namespace) -> None:
    """Raises ValueError where --window-size and --window-attn-skip-freq are no causal windows of this model's layers.
    args: Megatron's, or another object with window_size, window_attn_skip_freq and num_layers."""
    window, skipped = args.window_size, args.window_attn_skip_freq
    if window is None:
        raise ValueError(
            f"--s2-config {FROM_FLAGS} without --window-size; expected the window in Megatron's flag; add "
            "--window-size 1023,0 (a query then sees 1024 keys), or name a YAML"
        )
    given = f"--window-size {','.join(map(str, window))}"
    if window[0] < 0:
        raise ValueError(
            f"{given}: no window, every layer attends everything; expected 0 or more keys before the query's own; use "
            "--window-size 1023,0, or leave out this flag and --s2-config"
        )
    if len(window) != 2 or window[1] != 0:
        raise ValueError(
            f"{given}: expected two numbers, how many keys a query sees before its own, and 0 for those behind it; use "
            f"--window-size {window[0]},0"
        )
    given = f"--window-attn-skip-freq {printable(skipped)}"
    if isinstance(skipped, list) and all(type(item) is int for item in skipped):
        if len(skipped) != args.num_layers:
            raise ValueError(
                f"{given}: {len(skipped)} entries; expected one for each of the {args.num_layers} layers; "
                "use a number N (every N-th layer sees all keys), or a list of that length"
            )
        if max(_mtp_layers(args)[0], default=-1) >= len(skipped):
            raise ValueError(
                f"--mtp-num-layers {args.mtp_num_layers} with {given}: {len(skipped)} entries, which Megatron reads "
                "from the first one again for these layers; expected at most as many layers; use a number N"
            )
    elif skipped is not None and (type(skipped) is not int or skipped < 1):
        raise ValueError(
            f"{given}: expected a number N from 1 (every N-th layer sees all keys), or a list with a 1 for each layer "
            "with the window and a 0 for each other one; use --window-attn-skip-freq 4"
        )


def layer_window(flags, layer: int) -> int | None:
    """How many keys a query of a layer sees by Megatron's --window-size, its own included; None: all of them.

    flags: arguments or a TransformerConfig, with windows that check_windows takes. layer: counted from 0; those of
    multi-token prediction from 0 again, as Megatron does.
    """
    from megatron.core.transformer.utils import is_layer_window_attention

    if not is_layer_window_attention(flags.window_size, flags.window_attn_skip_freq, layer + 1):
        return None
    return flags.window_size[0] + 1


def check_layer_window(pattern: Pattern, config, layer_number: int, name: str) -> None:
    """Raises ValueError where a model config has a --window-size, and a layer's pattern is not what it says.

    pattern: of all heads. config: a TransformerConfig. layer_number: counted from 1. name: of the layer.
    """
    if getattr(config, "window_size", None) is None:
        return
    check_windows(config)
    shape = dict(block_size=pattern.block_size, num_heads=pattern.num_heads, num_kv_heads=pattern.num_kv_heads)
    window = layer_window(config, layer_number - 1)
    same = RangePattern.dense(**shape) if window is None else make_range_pattern(**shape, ranges=(), window=window)
    if pattern.canonical() != same.canonical():
        raise ValueError(
            f"{name}: window_size={config.window_size} asks for {same.describe()}, and the layer's pattern is "
            f"{pattern.describe()}; expected the same; use --s2-config {FROM_FLAGS}, or drop --window-size"
        )


def _mtp_layers(args: Namespace) -> tuple[tuple[int, ...], int]:
    """(the multi-token-prediction layers with attention, each as Megatron counts it from 0, how often each is run)."""
    runs = getattr(args, "mtp_num_layers", None) or 0
    pattern = getattr(args, "hybrid_layer_pattern", None)
    repeated = bool(runs and getattr(args, "mtp_use_repeated_layer", False))
    if pattern is None:
        return ((0,), runs) if repeated else (tuple(range(runs)), 1)
    places = attention_in(mtp_symbols(pattern))  # Megatron counts each depth anew
    return (places, runs) if repeated else (places * runs, 1)


def _window_config(args: Namespace) -> SparsityConfig:
    """Megatron's windows as a sparsity. Raises ValueError as check_windows does."""
    check_windows(args)
    places, of_mtp = attention_places(args), _mtp_layers(args)[0]
    windows, of_mtp = ([layer_window(args, layer) for layer in layers] for layers in (places, of_mtp))
    data: dict = {"block_size": BLOCK_SIZE, "layers": _plan(windows)}
    if of_mtp:
        data["mtp_layers"] = _plan(of_mtp)
    if {*windows, *of_mtp} != {None}:
        data["specs"] = {"W": {"window": args.window_size[0] + 1}}
    return SparsityConfig.from_data(data, Source(f"--window-size {args.window_size[0]},0"))


def _plan(windows: list[int | None]) -> list[str]:
    return ["D" if window is None else "W" for window in windows]


def resolve_layers(config: SparsityConfig, args: Namespace) -> ResolvedSparsity:
    """The sparsity of every layer from a config, for the model of `args`. Raises ValueError when they do not fit."""
    of_mtp, runs = _mtp_layers(args)  # --mtp-use-repeated-layer runs one layer several times
    places, pattern = attention_places(args), getattr(args, "hybrid_layer_pattern", None)
    names = {}
    if pattern is not None:
        flag = f"--hybrid-layer-pattern {pattern}:"
        names["layers_flag"] = (
            f"attention layers ({ATTENTION}) among the {len(layer_symbols(pattern))} layers of {flag}"
        )
        names["mtp_flag"] = f"attention layers ({ATTENTION}) behind the first / of {flag}"
    sparsity = config.resolve(
        num_layers=len(places),
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        seq_length=args.seq_length,
        mtp_num_layers=len(of_mtp),
        **names,
    )
    sparsity = dataclasses.replace(sparsity, mtp_layers=sparsity.mtp_layers * runs)
    if pattern is None:
        return sparsity
    return dataclasses.replace(sparsity, places=places, mtp_places=of_mtp * runs)


def resolve_windows(args: Namespace) -> ResolvedSparsity:
    """The sparsity of every layer by --window-size and --window-attn-skip-freq: exact windows, and dense layers where
    Megatron has none. Raises ValueError as check_windows does, and when they do not fit the model."""
    sparsity = resolve_layers(_window_config(args), args)
    if all(layer.pattern is None for layer in sparsity.all_layers):
        note = f"--window-attn-skip-freq {args.window_attn_skip_freq} leaves no layer a window: the model is DENSE"
        sparsity = dataclasses.replace(sparsity, notes=(note,))
    return sparsity


def resolve_sparsity(args: Namespace) -> ResolvedSparsity:
    """The sparsity of every layer from --s2-config, for the model of `args`. Raises ValueError when they do not fit."""
    if args.s2_config == FROM_FLAGS:
        return resolve_windows(args)
    return resolve_layers(load_config(args.s2_config, allow_python_patterns=args.s2_allow_python_patterns), args)


def stock_sparsity(args: Namespace) -> ResolvedSparsity:
    """What a model without --s2-config computes: Megatron's windows, or dense layers. args: Megatron's, also those that
    a checkpoint has stored.

    Causal attention of Transformer Engine makes a window of W,R one of W,0 (check_set_window_size). Other windows that
    S2 refuses count as dense; on Megatron's local layers W,R shows later tokens, which no sparsity says.
    """
    window = getattr(args, "window_size", None)
    if window is not None:
        if len(window) == 2 and getattr(args, "transformer_impl", "transformer_engine") == "transformer_engine":
            args = Namespace(**{**vars(args), "window_size": (window[0], 0)})
        with contextlib.suppress(ValueError):
            scale = getattr(args, "softmax_scale", None)
            return dataclasses.replace(resolve_windows(args), softmax_scale=scale)
    return dense_sparsity(args)


def dense_sparsity(args: Namespace) -> ResolvedSparsity:
    """That of a model of `args` whose layers are all dense."""
    dense, (of_mtp, runs) = LayerSparsity("D", None), _mtp_layers(args)
    return ResolvedSparsity(
        layers=(dense,) * len(attention_places(args)),
        mtp_layers=(dense,) * (len(of_mtp) * runs),
        softmax_scale=getattr(args, "softmax_scale", None),
        block_size=BLOCK_SIZE,  # plays no part in dense layers' canonical form
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_attention_heads,
        seq_length=args.seq_length,
    )
