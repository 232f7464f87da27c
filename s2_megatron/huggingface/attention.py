"""S2-Attention as transformers' attention implementation "s2", and the mask of the same name.

Without a mask function of the same name transformers gives an attention no mask at all, and many models then attend
acausally. S2-Attention is causal by itself; what it needs to know is where the texts of each row lie (texts.py).

B batch, H query heads, G KV heads, D head dim, T tokens of this forward, N tokens with those before them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, masking_utils
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.models.llama.modeling_llama import rotate_half

from s2_megatron.config.stored import MODEL_TYPE
from s2_megatron.huggingface.layer_plans import LayerPlan, layer_plans
from s2_megatron.huggingface.texts import (
    PACKING_ARGUMENTS,
    Extent,
    Texts,
    check_columns,
    made_texts,
    row_extent,
    text_borders,
)
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.checks import softmax_scale_of
from s2_megatron.ops.layout import Layout, PackedSequence
from s2_megatron.patterns.ranges import Pattern

NAME = "s2"
Rotary = tuple[torch.Tensor, torch.Tensor]  # (cos, sin) of RoPE, [B or 1, T, D]
# What a model may hand to its attention beside the tensors: read in texts.py, or without a part in attention.
_ARGUMENTS = {
    "position_ids", *PACKING_ARGUMENTS, "max_length_q", "max_length_k", "use_cache", "cache_position", "return_dict",
    "output_hidden_states", "output_router_logits", "num_items_in_batch", "labels", "token_type_ids", "inputs_embeds",
}  # fmt: skip


def register_attention() -> None:
    """Makes attn_implementation="s2" known to transformers."""
    AttentionInterface.register(NAME, s2_attention_forward)
    AttentionMaskInterface.register(NAME, texts_mask)


@torch.compiler.disable
def read_texts(config, tokens: torch.Tensor, attention_mask, position_ids, arguments: dict) -> Texts:
    """Where the texts of a forward of a model of type s2_gpt lie.

    tokens [B, T, ...]; attention_mask [B, N], position_ids [B or 1, T], or None; arguments: the others of the forward.
    Raises ValueError for what row_extent, text_borders and made_texts refuse, and for static caches.
    """
    batch, length = tokens.shape[:2]
    cache = next((value for value in arguments.values() if isinstance(value, Cache)), None)
    seen = 0 if cache is None else int(cache.get_seq_length())
    if cache is not None:
        check_columns(int(cache.get_mask_sizes(length, 0)[0]), seen + length, attention_mask)
    extent = None
    if attention_mask is not None:
        extent = row_extent(attention_mask, batch, seen + length, may_be_empty=cache is not None)
    capturing = tokens.is_cuda and torch.cuda.is_current_stream_capturing()
    if length == 1 and capturing:  # nothing can be looked at; the steps before the capture were
        position_ids = None
    borders = text_borders(batch, length, seen, extent, arguments | dict(position_ids=position_ids))
    keeps = cache is not None or bool(arguments.get("use_cache"))
    return made_texts(layer_plans(config), seen, extent, borders, keeps, cache is None, tokens.device)


@dataclass(eq=False)
class StockMask:
    """What transformers tells a mask function of the rows: their padding, and of position_ids only where there is
    neither padding nor a cache. The layers hear the rest.

    text_numbers: int [B, T], of packed texts. plain: as in Texts.
    """

    plans: tuple[LayerPlan, ...]
    batch: int
    seen: int
    extent: Extent | None
    text_numbers: torch.Tensor | None
    plain: bool
    texts: Texts | None = None

    def finished(self, length: int, arguments: dict, device) -> Texts:
        """The texts of this forward: found with the first layer's arguments, the same for all layers."""
        if self.texts is None:
            arguments = arguments | dict(mask_function=self.text_numbers)
            borders = text_borders(self.batch, length, self.seen, self.extent, arguments)
            keeps = self.seen > 0 or bool(arguments.get("use_cache"))
            self.texts = made_texts(self.plans, self.seen, self.extent, borders, keeps, False, device)
        return self.texts


def texts_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset=0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config=None,
    **kwargs,
) -> StockMask | None:
    """The "mask" that the attention `s2` takes in a stock model of transformers; None for a model of type s2_gpt, which
    reads its arguments itself.

    attention_mask: bool [B, N]. Raises ValueError for what row_extent refuses, for mask functions other than the causal
    one and that of packed texts, and for caches that return more keys than were written (static ones).
    """
    if config.model_type == MODEL_TYPE:
        return None
    return _stock_mask(batch_size, q_length, kv_length, q_offset, mask_function, attention_mask, config)


@torch.compiler.disable
def _stock_mask(batch: int, length: int, columns, seen, mask_function, attention_mask, config) -> StockMask:
    numbers = _packed_by(mask_function)
    seen = int(seen)
    check_columns(int(columns), seen + length, attention_mask)
    extent = None
    if attention_mask is not None:
        extent = row_extent(attention_mask, batch, seen + length, may_be_empty=seen > 0)
    plain = numbers is not None and bool((numbers == numbers[:, :1]).all())  # torch.compile: made of all texts
    return StockMask(layer_plans(config), batch, seen, extent, None if plain else numbers, plain)


_and = masking_utils.and_masks(causal_mask_function).__code__
_packed = masking_utils.packed_sequence_mask_function(None).__code__
_remapped = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # since transformers 5.2x
_remapped = _remapped and _remapped(causal_mask_function, None).__code__


def _packed_by(mask_function) -> torch.Tensor | None:
    """The number of each token's text, [B, T], where transformers has packed the causal mask; None for the plain one.
    Raises ValueError for every other mask function."""
    parts = _captured(mask_function, "mask_functions") if _code(mask_function) is _and else (mask_function,)
    numbers = [_captured(part, "packed_sequence_mask") for part in parts if _code(part) is _packed]
    others = [part for part in parts if _code(part) is not _packed]
    others = [_captured(part, "mask_function") if _code(part) is _remapped else part for part in others]
    if others != [causal_mask_function] or len(numbers) > 1:
        raise ValueError(
            "attn_implementation='s2' got a mask that is not the plain causal one (a sliding window, an overlay, or "
            "attention in both directions); expected causal attention over texts; take a model without them"
        )
    return numbers[0] if numbers else None


def _code(function):
    return getattr(function, "__code__", None)


def _captured(function, name: str):
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def s2_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Texts | StockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    compact_cache=None,
    rotary: Rotary | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, in transformers' form.

    query [B, H, T, D]; key, value [B, G, N, D], the last T of them the query's own (compact_cache: these T alone, the
    S2Cache has the others; rotary: what they need of RoPE, as S2Cache.attend has it). attention_mask: what texts_mask
    returned, or the model's own Texts. scaling: the model's own, which the sparsity's softmax_scale overrides. s_aux:
    [H], transformers' name of softmax offsets (sinks). Returns ([B, T, H, D], None): probabilities do not exist. Raises
    ValueError for a dropout, for foreign masks, and for arguments that ask for something else than causal attention.
    """
    if dropout:
        raise ValueError(
            f"attention dropout {dropout} with attn_implementation='s2'; expected 0; set attention_dropout=0.0"
        )
    check_arguments(kwargs, module.config)
    packing = {name: kwargs.get(name) for name in PACKING_ARGUMENTS}
    plain = isinstance(attention_mask, (Texts, StockMask)) and attention_mask.plain
    if plain and all(value is None for value in packing.values()):
        plan = attention_mask.plans[module.layer_idx]
        layout = plan.layout if s_aux is None else plan.kept_layout
        out = attend(query, key, value, layout, _scale(plan, scaling, query), s_aux)
    else:
        arguments = packing | {name: kwargs.get(name) for name in ("position_ids", "use_cache")}
        compact = None if compact_cache is None else (compact_cache, rotary)
        out = _attend_texts(module, query, key, value, attention_mask, scaling, compact, s_aux, arguments)
    return out.transpose(1, 2).contiguous(), None


def rotated(query, key, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """query [B, T, H, D] and key [B, T, G, D] after RoPE, as transformers' Llama computes it."""
    cos, sin = (tensor.unsqueeze(2) for tensor in rotary)
    both = torch.cat((query, key), 2)  # half the kernels
    return (both * cos + rotate_half(both) * sin).split((query.shape[2], key.shape[2]), 2)


def check_arguments(arguments: dict, config) -> None:
    """Raises ValueError for an argument that asks for something else than causal attention without its
    probabilities."""
    if arguments.get("output_attentions") or getattr(config, "output_attentions", False):
        raise ValueError(
            "output_attentions=True with attn_implementation='s2', which never has the probabilities; expected False; "
            "leave it out"
        )
    # transformers hands config.is_causal=False on as an argument.
    arguments = dict(is_causal=getattr(config, "is_causal", None)) | arguments
    for name, value in arguments.items():
        harmless = value is None or value is (name == "is_causal")
        if not harmless and name not in _ARGUMENTS:
            raise ValueError(
                f"attn_implementation='s2' got the argument {name}={value}, which it does not know; expected causal "
                "attention over texts, without windows, biases, sinks or caps of the scores; leave it out, or take a "
                "model without it"
            )


def _scale(plan: LayerPlan, scaling: float | None, query) -> float:
    return softmax_scale_of(plan.scale if plan.scale is not None else scaling, query.shape[-1])


@torch.compiler.disable
def _attend_texts(module, query, key, value, mask, scaling, compact, offset, arguments: dict) -> torch.Tensor:
    """Attention in all other forms, [B, H, T, D]: padding, packed texts, caches. compact: (S2Cache, rotary) or None."""
    length, seen = query.shape[2], key.shape[2] - query.shape[2]
    if mask is None:  # the module is called without its model
        mask = StockMask(layer_plans(module.config), len(query), seen, None, None, False)
    if not isinstance(mask, (Texts, StockMask)):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} and {mask.dtype} in "
            "attn_implementation='s2'; expected the 2-D mask of tokenizers, [batch, tokens]; "
            "a mask per pair of tokens is not supported"
        )
    texts = mask if isinstance(mask, Texts) else mask.finished(length, arguments, query.device)
    plan = texts.plans[module.layer_idx]
    scale = _scale(plan, scaling, query)
    if compact is not None:
        cache, rotary = compact
        return cache.attend(module.layer_idx, query, key, value, texts.starts, scale, plan.pattern, offset, rotary)
    if texts.packed is not None:
        return attend_packed(query, key, value, plan.kept_layout, texts.packed, scale, offset)
    pattern = plan.pattern if offset is None else plan.kept_pattern
    return attend_rows(query, key, value, pattern, texts.starts, scale, offset)


def attend_packed(query, key, value, layout: Layout, packed: PackedSequence, scale: float, offset=None) -> torch.Tensor:
    """Attention of [B, H, T, D] queries to [B, G, T, D] keys of the same text; [B, H, T, D]. packed: the texts among
    the B * T tokens; others give 0."""
    batch = len(query)
    packed = PackedSequence(*(part.to(query.device) if isinstance(part, torch.Tensor) else part for part in packed))
    parts = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = s2_attention(*parts, layout, softmax_scale=scale, tensor_format="thd", packed=packed, softmax_offset=offset)
    return out.unflatten(0, (batch, -1)).transpose(1, 2)


def attend_rows(
    query, key, value, pattern: Pattern | None, starts: torch.Tensor | None, scale: float, offset=None
) -> torch.Tensor:
    """Attention of [B, H, T, D] queries to [B, G, N, D] keys whose rows start at different columns; [B, H, T, D].

    Rows with the same start are computed together, each over its own text, as strides count from there. Padding gives
    0.
    """
    if starts is None:
        return attend(query, key, value, pattern, scale, offset)
    total, length = key.shape[2], query.shape[2]
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    for rows, start in rows_by_start(starts, query.device):
        if start >= total:
            continue
        own = min(length, total - start)  # of the queries, those that are text
        texts = query[rows, :, length - own :], key[rows, :, start:], value[rows, :, start:]
        part = attend(*texts, pattern, scale, offset)
        # Not in place: the gradient goes through.
        out = out.index_copy(0, rows, torch.nn.functional.pad(part, (0, 0, length - own, 0)))
    return out


def rows_by_start(starts: torch.Tensor, device) -> list[tuple[torch.Tensor, int]]:
    """[(rows, int64 on the device; their common start)]."""
    return [((starts == start).nonzero().flatten().to(device), start) for start in dict.fromkeys(starts.tolist())]


def attend(
    query, key, value, pattern: Pattern | Layout | None, scale: float, offset: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of [B, H, T, D] queries to [B, G, N, D] keys, the last T of which are theirs; [B, H, T, D]. None:
    dense. offset: of the softmax, [H]; with a pattern, for torch's attention has none."""
    if pattern is not None:
        options = dict(softmax_scale=scale, tensor_format="bhsd", softmax_offset=offset)
        return s2_attention(query, key, value, pattern, **options)
    assert offset is None
    grouped = query.shape[1] != key.shape[1]
    mask, causal = None, query.shape[2] == key.shape[2]
    if not causal and query.shape[2] > 1:
        mask = causal_lower_right(query.shape[2], key.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
