"""export-hf --stock: a model whose layers are dense or have one exact window, as an architecture that transformers and
other engines have. What transformers computes from the config is read from its own masks and compared with the plan."""

from __future__ import annotations

import copy

from s2_megatron.config.head_windows import head_windows
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.tools.hf.architecture import config_as_read
from s2_megatron.tools.hf.config_keys import CLASSES, TRANSFORMERS_CLASS, TRANSFORMERS_MOE_CLASS, quiet_transformers
from s2_megatron.tools.hf.source_windows import source_windows
from s2_megatron.tools.hf.weights import Shape

# What a class of transformers has to know by name; its model code reads others, such as head_dim, unnamed.
_ROUTING = {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers", "mlp_layer_types", "num_mtp_layers",
}  # fmt: skip
Windows = tuple[int | None, ...]  # of the layers: how many keys a query sees, its own included; None: all


def plan_windows(sparsity: ResolvedSparsity) -> Windows:
    """The windows of a plan. Raises ValueError where a layer is neither dense nor has one exact window for all heads,
    the same in all window layers; it names the layer (as the layer table does), the head and what it has."""
    windows: list[int | None] = []
    for layer, of_heads in enumerate(head_windows(sparsity, _refused)):
        window = _layer_window(of_heads, layer)
        other = next((place for place, seen in enumerate(windows) if seen not in (None, window)), None)
        if window is not None and other is not None:
            raise _refused(
                layer, 0, f"window {window}, layer {other} has {windows[other]}", "with the same window in both"
            )
        windows.append(window)
    return tuple(windows)


def _layer_window(windows: tuple[int | None, ...], layer: int) -> int | None:
    for place, window in enumerate(windows):
        if window == 1:
            what = "window 1, with which transformers' cache keeps all keys"
            raise _refused(layer, place, what, "with `window: 2` or more")
        if window != windows[0]:
            mine, first = ("all keys" if one is None else f"window {one}" for one in (window, windows[0]))
            raise _refused(layer, place, f"{mine}, head 0 has {first}", "with the same window for all heads of a layer")
    return windows[0]


def _refused(layer: int, head: int, what: str, fix: str) -> ValueError:
    return ValueError(
        f"--stock: layer {layer}, head {head} has {what}; expected dense layers, or one exact window for all heads and "
        f"window layers, which is what stock architectures compute; train {fix}, or export without --stock"
    )


def stock_config(content: dict, shape: Shape, scale: float | None, windows: Windows, flag: str) -> dict:
    """The config.json of a stock model. content: of plain_config. scale: the model's softmax scale, or None. flag: what
    asks for it, for messages.

    Raises ValueError for a model that no stock architecture computes, whatever its windows, and where transformers
    reads other windows, or other experts, from the config.
    """
    of_its_own = {
        "biases and norms of query and key": shape.qkv_bias and shape.qk_norm,
        f"softmax_scale={scale}": scale not in (None, shape.head_dim**-0.5),
        f"softmax_type={shape.softmax_type} in every layer and head": shape.softmax_type != "vanilla",
    }
    for what in (words for words, here in of_its_own.items() if here):
        raise ValueError(f"{flag}: a model with {what} has no plain Llama or Qwen form; leave {flag} out")
    if shape.experts is None:
        config = content | _plain(content, shape, windows, flag)
    else:
        config = content | _with_experts(content, shape, windows, flag)
    names = {name: config.pop(name) for name in ("architectures", "model_type")}
    config = names | config
    _check(config, windows, flag, shape.experts is not None)
    return config


def _window_keys(windows: Windows) -> dict:
    """What every architecture says that reads layer_types; nothing of a dense model."""
    window = next((window for window in windows if window is not None), None)
    if window is None:
        return {}
    kinds = ["full_attention" if one is None else "sliding_attention" for one in windows]
    return {"sliding_window": window, "layer_types": kinds}


def _rope_is_scaled(content: dict) -> bool:
    """llama.cpp's converter loses it without a word, but in a Llama or Mixtral."""
    return content["rope_parameters"]["rope_type"] != "default"


def _plain(content: dict, shape: Shape, windows: Windows, flag: str) -> dict:
    family = "qwen2" if shape.qkv_bias else "qwen3" if shape.qk_norm else "llama"
    if family == "qwen2" and shape.head_dim * shape.num_heads != shape.hidden_size:
        raise ValueError(f"{flag}: Qwen2 wants hidden_size / heads as its head dim; leave {flag} out")
    name, keys = CLASSES[family][0], _window_keys(windows)
    if keys and family == "llama":
        family, name = "ministral", CLASSES["ministral"][0]  # engines have no code of their own for it
    elif keys:
        # Engines' own Qwen code reads no layer_types: llama.cpp's is dense, vLLM's refuses mixed layers unless
        # max_window_layers is the number of layers, with which they are dense. Beside layer_types transformers does
        # not read max_window_layers.
        name = TRANSFORMERS_CLASS
        first = next(layer for layer, window in enumerate(windows) if window is not None)
        keys |= {"use_sliding_window": True, "max_window_layers": first}
    elif family != "llama" and _rope_is_scaled(content):
        name = TRANSFORMERS_CLASS
    return keys | {"architectures": [name], "model_type": family}


def _with_experts(content: dict, shape: Shape, windows: Windows, flag: str) -> dict:
    """Of a model with experts: Qwen3-MoE, whose layers are dense; Mellum, which is that with layer_types; or, without
    norms of query and key, Mixtral, which has one window for all layers or none."""
    experts, windowed = shape.experts, [window for window in windows if window is not None]
    if shape.qkv_bias:
        raise ValueError(
            f"{flag}: experts beside --add-qkv-bias; expected none of it, or --qk-layernorm in its place, which stock "
            f"architectures have; leave {flag} out, or train so"
        )
    keys = {"num_experts_per_tok": experts.top, "output_router_logits": False, "router_aux_loss_coef": 0.0}
    if not shape.qk_norm:
        of_qwen = {
            "layers without experts (--moe-layer-freq)": not all(experts.layers),
            "--moe-router-pre-softmax": not experts.normalized,
            "windows in some layers only": 0 < len(windowed) < shape.num_layers,
        }
        for what in (words for words, here in of_qwen.items() if here):
            raise ValueError(
                f"{flag}: experts, {what} and no norms of query and key; expected --qk-layernorm beside it, as "
                f"Qwen3-MoE and Mellum have it (a Mixtral computes something else); leave {flag} out, or train with it"
            )
        keys |= {"num_local_experts": experts.count, "intermediate_size": experts.hidden, "router_jitter_noise": 0.0}
        keys |= {"sliding_window": windowed[0] if windowed else None}
        name = TRANSFORMERS_MOE_CLASS if windowed else "MixtralForCausalLM"  # llama.cpp's is dense
        return keys | {"architectures": [name], "model_type": "mixtral"}
    keys |= {"num_experts": experts.count, "moe_intermediate_size": experts.hidden}
    keys |= {"norm_topk_prob": experts.normalized}
    # llama.cpp reads no norm_topk_prob.
    name = None if experts.normalized and not _rope_is_scaled(content) else TRANSFORMERS_MOE_CLASS
    if not windowed:
        dense = [layer for layer, has in enumerate(experts.layers) if not has]
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": dense, "use_sliding_window": False}
        return keys | {"architectures": [name or "Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    keys |= {"mlp_layer_types": ["sparse" if has else "dense" for has in experts.layers], "num_mtp_layers": 0}
    rope = content["rope_parameters"]
    keys |= {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}
    return keys | _window_keys(windows) | {"architectures": [name or "MellumForCausalLM"], "model_type": "mellum"}


def _check(config: dict, windows: Windows, flag: str, experts: bool) -> None:
    """Raises ValueError unless transformers makes masks of these windows from a config, and, where it is of a model
    with experts, reads every key as it was written."""
    read = source_windows(_as_read(config, flag) if experts else config_as_read(config, flag), flag)
    for layer, (found, wanted) in enumerate(zip(read, windows, strict=True)):
        if found != wanted:
            raise ValueError(
                f"{flag}: transformers' mask in layer {layer} of the {config['model_type']} that would be written has "
                f"the window {found}, the checkpoint has {wanted} (None: all keys); expected the same; use another "
                f"release of transformers, or leave {flag} out"
            )


def _as_read(config: dict, flag: str) -> dict:
    """A config with experts as transformers reads it. Raises ValueError where transformers does not have the
    architecture, or reads something else."""
    from transformers import CONFIG_MAPPING, __version__

    family = config["model_type"]
    if family not in CONFIG_MAPPING:
        raise ValueError(
            f"{flag}: transformers {__version__} has no {family}; expected a release with it, e.g. 5.24; upgrade it"
        )
    with quiet_transformers():
        read, known = CONFIG_MAPPING[family].from_dict(copy.deepcopy(config)), CONFIG_MAPPING[family]()
    for key, value in config.items():
        named = key not in _ROUTING or hasattr(known, key)  # a config keeps keys that it does not know
        found = getattr(read, key, None) if named else None
        if key not in ("architectures", "model_type", "dtype") and found != value:
            raise ValueError(
                f"{flag}: transformers {__version__} reads {key}={found!r} from the {family} that would be written "
                f"with {value!r}; expected the same; use another release of transformers, or leave {flag} out"
            )
    return config
