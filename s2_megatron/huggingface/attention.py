"""S2-Attention as transformers' attention implementation "s2", and the mask of the same name.

Without a mask function of the same name transformers gives an attention no mask at all, and many models then attend
acausally. S2-Attention is causal by itself; what it needs of a mask is where each row's text starts (left padding).

B batch, H query heads, G KV heads, D head dim, T tokens of this forward, N tokens with those before them.
"""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from s2_megatron.huggingface.configuration import resolved_sparsity
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.checks import softmax_scale_of
from s2_megatron.ops.layout import Layout, build_layout
from s2_megatron.patterns.ranges import Pattern

NAME = "s2"
_patterns: WeakKeyDictionary[torch.nn.Module, Pattern | None] = WeakKeyDictionary()


def register_attention() -> None:
    """Makes attn_implementation="s2" known to transformers."""
    AttentionInterface.register(NAME, s2_attention_forward)
    AttentionMaskInterface.register(NAME, row_starts_mask)


@lru_cache(maxsize=256)
def shared_layout(pattern: Pattern) -> Layout:
    """The block geometry of a pattern; layers with the same pattern share it."""
    return build_layout(pattern)


def layer_pattern(module: torch.nn.Module) -> Pattern | None:
    """The pattern of an attention module, by its layer_idx; None: dense. Raises ValueError for a config without
    sparsity."""
    if module not in _patterns:
        _patterns[module] = resolved_sparsity(module.config).layers[module.layer_idx].pattern
    return _patterns[module]


def row_starts_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset=0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """The "mask" that the attention `s2` takes: the first column of every row that is no padding, int64 [B] on the CPU;
    None when every row starts at 0.

    attention_mask: bool [B, columns], padding on the left (on the right too where no tokens follow, as in training).
    Raises ValueError for packed rows, holes, and caches that return more keys than were written (static ones).
    """
    if mask_function is not causal_mask_function:
        raise ValueError(
            "attn_implementation='s2' got a mask that is not the plain causal one (packed rows through position_ids, a "
            "sliding window or an overlay); expected causal attention over one text a row; "
            "give each text a row of its own"
        )
    if isinstance(kv_length, int) and isinstance(q_offset, int) and kv_length != q_offset + q_length:
        raise ValueError(
            f"attn_implementation='s2' got a cache with {kv_length} keys for {q_offset + q_length} tokens; "
            "expected as many keys as tokens; use S2Cache(config, max_length=...) for static shapes, not StaticCache"
        )
    return None if attention_mask is None else row_starts(attention_mask, kv_length)


def row_starts(attention_mask: torch.Tensor, columns: int) -> torch.Tensor | None:
    """See row_starts_mask. columns: how many of the mask's columns exist so far."""
    mask = attention_mask[:, :columns].to("cpu", torch.bool)
    if mask.all():
        return None
    # A row without text starts after its last column.
    starts = torch.where(mask.any(1), mask.int().argmax(1), mask.shape[1])
    lengths = mask.sum(1)
    inside = torch.arange(mask.shape[1])
    expected = (inside >= starts[:, None]) & (inside < (starts + lengths)[:, None])
    if not torch.equal(mask, expected):
        row = int((mask != expected).any(1).nonzero()[0])
        raise ValueError(
            f"attention_mask has a hole in row {row}: a padded column between two tokens; expected padding on the left "
            "only, for strides count from the start of a text; use tokenizer.padding_side='left', also for texts that "
            "continue a cache"
        )
    return None if not starts.any() else starts


def s2_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    compact_cache=None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, in transformers' form.

    query [B, H, T, D]; key, value [B, G, N, D], the last T of them the query's own (compact_cache: these T alone, the
    S2Cache has the others). attention_mask: what row_starts_mask returned. scaling: the model's own, which the
    sparsity's softmax_scale overrides.
    Returns ([B, T, H, D], None): probabilities do not exist. Raises ValueError for a dropout and for foreign masks.
    """
    if dropout:
        raise ValueError(
            f"attention dropout {dropout} with attn_implementation='s2'; expected 0; set attention_dropout=0.0"
        )
    if attention_mask is not None and (attention_mask.ndim != 1 or attention_mask.dtype != torch.int64):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)} and {attention_mask.dtype} in "
            "attn_implementation='s2'; expected the 2-D mask of tokenizers, [batch, tokens]; "
            "a mask per pair of tokens is not supported"
        )
    pattern = layer_pattern(module)
    stored_scale = resolved_sparsity_scale(module)
    scale = softmax_scale_of(stored_scale if stored_scale is not None else scaling, query.shape[-1])
    if compact_cache is not None:
        out = compact_cache.attend(module.layer_idx, query, key, value, attention_mask, scale)
    else:
        out = attend_rows(query, key, value, pattern, attention_mask, scale)
    return out.transpose(1, 2).contiguous(), None


def resolved_sparsity_scale(module) -> float | None:
    """The softmax scale that was stored with the sparsity; None: the usual one."""
    return module.config.s2_sparsity["softmax_scale"]


def attend_rows(query, key, value, pattern: Pattern | None, starts: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Attention of [B, H, T, D] queries to [B, G, N, D] keys whose rows start at different columns; [B, H, T, D].

    Rows with the same start are computed together, each over its own text, as strides count from there. Padding gives
    0.
    """
    if starts is None:
        return attend(query, key, value, pattern, scale)
    total, length = key.shape[2], query.shape[2]
    out = torch.zeros_like(query)
    for rows, start in rows_by_start(starts, query.device):
        if start >= total:
            continue
        own = min(length, total - start)  # of the queries, those that are text
        part = attend(query[rows, :, length - own :], key[rows, :, start:], value[rows, :, start:], pattern, scale)
        # Not in place: the gradient goes through.
        out = out.index_copy(0, rows, torch.nn.functional.pad(part, (0, 0, length - own, 0)))
    return out


def rows_by_start(starts: torch.Tensor, device) -> list[tuple[torch.Tensor, int]]:
    """[(rows, int64 on the device; their common start)]."""
    return [((starts == start).nonzero().flatten().to(device), start) for start in dict.fromkeys(starts.tolist())]


def attend(query, key, value, pattern: Pattern | None, scale: float) -> torch.Tensor:
    """Attention of [B, H, T, D] queries to [B, G, N, D] keys, the last T of which are theirs; [B, H, T, D]. None:
    dense."""
    if pattern is not None:
        return s2_attention(query, key, value, shared_layout(pattern), softmax_scale=scale, tensor_format="bhsd")
    grouped = query.shape[1] != key.shape[1]
    mask, causal = None, query.shape[2] == key.shape[2]
    if not causal and query.shape[2] > 1:
        mask = causal_lower_right(query.shape[2], key.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
