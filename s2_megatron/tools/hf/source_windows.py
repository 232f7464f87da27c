"""Which keys the layers of a Hugging Face model see, as the installed transformers computes them, and the plan YAML
that says the same.

Families read sliding_window, use_sliding_window, max_window_layers and layer_types each in a way of its own (Mistral
does not read layer_types). So a small model of the same config runs once, and the masks that its code makes are asked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from s2_megatron.config.errors import printable
from s2_megatron.tools.hf.config_keys import quiet_transformers
from s2_megatron.tools.hf.config_types import LAYER_KINDS, MOST

BLOCK_SIZE = 64
_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_NAME = "s2_asks_for_the_mask"  # the attention of the small model
_SMALL = dict(
    hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8, vocab_size=8,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
_SMALL_EXPERTS = dict(num_experts=2, num_local_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
_QUERIES = (4 * MOST, 4 * MOST + 1)  # places in the text behind any window; neighbours see chunks of unlike lengths


def source_windows(content: dict, where: str) -> tuple[int | None, ...]:
    """For each layer how many keys a query sees, its own included; None: all of them.

    content: of config_as_read, of a family of transformers, or a config with experts that stock.py makes. Raises
    ValueError where transformers refuses the config, its masks are no windows, or its layer_types say something else
    than it computes.
    """
    family = content["model_type"]
    said = ", ".join(f"{key}={printable(repr(content[key]))}" for key in _KEYS if key in content)
    try:
        asked = _masks(content)
        windows = tuple(_window(visible) for visible, _ in asked)
    except Exception as error:  # whatever its model code raises
        raise ValueError(
            f"{where}: transformers cannot run a {family} with {said} ({printable(' '.join(str(error).split()), 200)})"
            "; expected windows that it computes; correct these keys to what the weights were trained with"
        ) from error
    for layer, (window, (_, handed)) in enumerate(zip(windows, asked, strict=True)):
        if handed != window:
            raise ValueError(
                f"{where}: in layer {layer} of a {family} with {said} transformers' mask has the window {window}, its "
                f"attention is handed {handed}; expected the same; use another release of transformers"
            )
    kinds = content.get("layer_types") or [None] * len(windows)
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if kind is not None and LAYER_KINDS[kind] != (window is not None):
            computes = "all keys" if window is None else f"a window of {window}"
            raise ValueError(
                f"{where}: layer_types[{layer}]={kind!r}, and transformers' {family} computes {computes} in this "
                "layer, whatever layer_types say (other engines read them); expected the same of both; leave "
                "layer_types out if the weights were trained so, else set model_type to one that reads them, e.g. "
                "ministral"
            )
    if len({*windows} - {None}) > 1:
        raise ValueError(f"{where}: layers with several windows ({said}); expected one, which is what transformers has")
    return windows


def plan_data(windows: tuple[int | None, ...]) -> dict:
    """The YAML of such layers as data. windows: of source_windows, at least one of which is not None."""
    letters = "".join("D" if window is None else "W" for window in windows)
    part = next(letters[:end] for end in range(1, len(letters) + 1) if letters[:end] * (len(letters) // end) == letters)
    window = next(window for window in windows if window is not None)
    return {"block_size": BLOCK_SIZE, "layers": part, "specs": {"W": {"window": window}}}


def plan_text(data: dict) -> str:
    """The file's text. data: of plan_data."""
    import yaml

    return (
        "# Which keys the layers of the imported model see; s2-megatron import-hf read it from transformers' masks.\n"
        + yaml.safe_dump(data, sort_keys=False)
    )


def _masks(content: dict) -> list[tuple[Callable, int | None]]:
    """For each layer the function of its mask, and the window that its attention is handed."""
    from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    found = {}

    def attention(module, query, key, value, attention_mask, sliding_window=None, **kwargs):
        found[module.layer_idx] = attention_mask, sliding_window
        return torch.zeros_like(query).transpose(1, 2).contiguous(), None

    AttentionMaskInterface.register(_NAME, lambda *args, mask_function, **kwargs: mask_function)
    AttentionInterface.register(_NAME, attention)
    with torch.no_grad(), quiet_transformers(), torch.random.fork_rng(devices=()):
        small = _SMALL | {key: size for key, size in _SMALL_EXPERTS.items() if key in content}
        config = CONFIG_MAPPING[content["model_type"]].from_dict(copy.deepcopy(content) | small)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=_NAME, dtype=torch.float32)
        model.eval()(torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    return [found[layer] for layer in range(content["num_hidden_layers"])]


def _window(visible: Callable) -> int | None:
    """How many keys a mask lets every query see; None: all. visible: of transformers, by batch, head, query and key.
    Raises ValueError for a mask that is no causal window."""
    found = {_window_of_query(visible, query) for query in _QUERIES}
    if len(found) > 1:
        raise ValueError("its masks are no windows")
    return found.pop()


def _window_of_query(visible: Callable, place: int) -> int | None:
    zero, query = torch.tensor(0), torch.tensor(place)

    def sees(distance: int) -> bool:
        return bool(visible(zero, zero, query, query - distance))

    if sees(-1) or not sees(0):
        raise ValueError("its masks are not causal")
    first_hidden = MOST + 1
    if not sees(MOST):
        seen, first_hidden = 0, MOST
        while first_hidden - seen > 1:
            middle = (seen + first_hidden) // 2
            seen, first_hidden = (middle, first_hidden) if sees(middle) else (seen, middle)
    for power in range(MOST.bit_length()):
        for distance in (2**power - 1, 2**power):
            if distance <= MOST and sees(distance) != (distance < first_hidden):
                raise ValueError("its masks are no windows")
    return None if first_hidden > MOST else first_hidden
