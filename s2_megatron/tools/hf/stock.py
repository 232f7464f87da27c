"""export-hf --stock: a model whose layers are dense or have one exact window, as an architecture that transformers and
other engines have. What transformers computes from the config is read from its own masks and compared with the plan."""

from __future__ import annotations

from s2_megatron.config.head_windows import head_windows
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.tools.hf.architecture import config_as_read
from s2_megatron.tools.hf.config_keys import CLASSES, TRANSFORMERS_CLASS
from s2_megatron.tools.hf.source_windows import source_windows
from s2_megatron.tools.hf.weights import Shape

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
    reads other windows from the config.
    """
    families = {(False, False): "llama", (True, False): "qwen2", (False, True): "qwen3"}
    family = families.get((shape.qkv_bias, shape.qk_norm))
    of_its_own = {
        "biases and norms of query and key": family is None,
        f"softmax_scale={scale}": scale not in (None, shape.head_dim**-0.5),
        f"softmax_type={shape.softmax_type} in every layer and head": shape.softmax_type != "vanilla",
    }
    for what in (words for words, here in of_its_own.items() if here):
        raise ValueError(f"{flag}: a model with {what} has no plain Llama or Qwen form; leave {flag} out")
    if family == "qwen2" and shape.head_dim * shape.num_heads != shape.hidden_size:
        raise ValueError(f"{flag}: Qwen2 wants hidden_size / heads as its head dim; leave {flag} out")
    name, keys = CLASSES[family][0], {}
    window = next((window for window in windows if window is not None), None)
    if window is not None:
        kinds = ["full_attention" if one is None else "sliding_attention" for one in windows]
        keys = {"sliding_window": window, "layer_types": kinds}
        if family == "llama":
            family, name = "ministral", CLASSES["ministral"][0]  # engines have no code of their own for it
        else:
            # Engines' own Qwen code reads no layer_types: llama.cpp's is dense, vLLM's refuses mixed layers unless
            # max_window_layers is the number of layers, with which they are dense. Beside layer_types transformers does
            # not read max_window_layers.
            name = TRANSFORMERS_CLASS
            keys |= {"use_sliding_window": True, "max_window_layers": windows.index(window)}
    config = {"architectures": [name], "model_type": family} | content | keys
    _check(config, windows, flag)
    return config


def _check(config: dict, windows: Windows, flag: str) -> None:
    """Raises ValueError unless transformers makes masks of these windows from a config."""
    read = source_windows(config_as_read(config, flag), flag)
    for layer, (found, wanted) in enumerate(zip(read, windows, strict=True)):
        if found != wanted:
            raise ValueError(
                f"{flag}: transformers' mask in layer {layer} of the {config['model_type']} that would be written has "
                f"the window {found}, the checkpoint has {wanted} (None: all keys); expected the same; use another "
                f"release of transformers, or leave {flag} out"
            )
