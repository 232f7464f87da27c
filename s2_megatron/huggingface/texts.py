"""Where the texts of one forward lie: behind padding on the left, or several in a row (packed).

transformers has several ways to say so: a 2-D attention_mask, position_ids that begin again, cu_seq_lens_q and _k,
seq_idx, and the mask function that it makes of position_ids itself. They are read here, once a forward and never in
code that torch.compile traces: a compiled graph sees the finished `Texts`.

B batch, T tokens of this forward, N tokens with those before them (in a cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from s2_megatron.huggingface.layer_plans import LayerPlan
from s2_megatron.ops.layout import PackedSequence

# Of a model's keyword arguments, those that say where packed texts begin, beside position_ids.
PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


class Extent(NamedTuple):
    """The columns of each row's tokens, int64 [B] on the CPU: from starts to ends (not included)."""

    starts: torch.Tensor
    ends: torch.Tensor


@dataclass(eq=False)
class Texts:
    """What the layers of one forward have in common.

    plans: by layer_idx. starts: int64 [B] on the CPU, the first column of each row that is not padding; None: 0
    everywhere. packed: the texts among the B * T tokens, where a row has several. plain: each row is one text, no cache
    was given, and nothing else has to be checked: a compiled graph can compute this.
    """

    plans: tuple[LayerPlan, ...]
    starts: torch.Tensor | None
    packed: PackedSequence | None
    plain: bool


def check_columns(columns: int, tokens: int, attention_mask) -> None:
    """columns: the keys that a cache will return, or, without one, the mask's columns (as transformers counts).
    Raises ValueError for a cache with more keys than have been written."""
    if columns != tokens and (attention_mask is None or columns != attention_mask.shape[-1]):
        raise ValueError(
            f"attn_implementation='s2' got a cache with {columns} keys for {tokens} tokens; "
            "expected as many keys as tokens; use S2Cache(config, max_length=...) for static shapes, not StaticCache"
        )


def row_extent(attention_mask, batch: int, columns: int, may_be_empty: bool) -> Extent | None:
    """The tokens of every row; None when there is no padding.

    attention_mask: [batch, columns] of 1 and 0, padding on the left (on the right too where no tokens follow, as in
    training). may_be_empty: whether all rows may be padding so far. Raises ValueError for everything else.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
        kind = type(attention_mask).__name__
        form = list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else kind
        raise ValueError(
            f"attention_mask has shape {form} in attn_implementation='s2'; expected the 2-D mask of tokenizers, "
            "[batch, tokens]; a mask per pair of tokens is not supported"
        )
    if tuple(attention_mask.shape) != (batch, columns):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; expected [{batch}, {columns}]: a column for each "
            "token so far, the cached ones included; pass the tokenizer's mask, and in every forward that of all tokens"
        )
    mask = attention_mask.to("cpu")
    if mask.dtype != torch.bool:
        other = (mask != 0) & (mask != 1)
        if other.any():
            raise ValueError(
                f"attention_mask holds {mask[other][0].item()}; expected 1 for tokens and 0 for padding; for packed "
                "texts pass position_ids that begin again with each text"
            )
        mask = mask.bool()
    if mask.all():
        return None
    if not mask.any() and not may_be_empty:
        raise ValueError(
            "attention_mask is 0 everywhere, so there is no text; expected 1 for tokens and 0 for padding; "
            "pass the tokenizer's mask"
        )
    # A row without text starts after its last column.
    starts = torch.where(mask.any(1), mask.int().argmax(1), columns)
    ends = starts + mask.sum(1)
    inside = torch.arange(columns)
    expected = (inside >= starts[:, None]) & (inside < ends[:, None])
    if not torch.equal(mask, expected):
        row = int((mask != expected).any(1).nonzero()[0])
        raise ValueError(
            f"attention_mask has a hole in row {row}: a padded column between two tokens; expected padding on the left "
            "only, for strides count from the start of a text; use tokenizer.padding_side='left', also for texts that "
            "continue a cache"
        )
    return Extent(starts, ends)


def text_borders(batch: int, length: int, seen: int, extent: Extent | None, arguments: dict) -> torch.Tensor | None:
    """bool [B, T] on the CPU: the tokens before which another text of the same row ends; None when there are none.

    seen: N - T. arguments, as far as they are given: position_ids [B or 1, T], cu_seq_lens_q and _k [texts + 1],
    seq_idx [B or 1, T], and mask_function: the numbers of the texts, [B, T], in that of transformers.
    Raises ValueError when they contradict each other, for positions that jump, and for other shapes.
    """
    column = torch.arange(seen, seen + length)
    starts, ends = (None, None) if extent is None else extent
    inside = torch.ones(batch, length, dtype=torch.bool)
    follows = inside & (column > 0)  # has a token of the same row before it
    if extent is not None:
        inside = (column >= starts[:, None]) & (column < ends[:, None])
        follows = inside & (column > starts[:, None])
    found = {}
    if arguments.get("position_ids") is not None:
        positions = _of_tokens("position_ids", arguments["position_ids"], batch, length)
        borders = torch.zeros(batch, length, dtype=torch.bool)
        borders[:, 1:] = positions.diff() != 1
        if length and seen:
            borders[:, 0] = positions[:, 0] == 0
        borders &= follows
        if (borders & (positions != 0)).any():
            row, place = (borders & (positions != 0)).nonzero()[0].tolist()
            raise ValueError(
                f"position_ids jump from {positions[row, place - 1]} to {positions[row, place]} in row {row}; expected "
                "positions that run on inside a text and begin again at 0 with the next one; strides count from the "
                "start of a text, so none of its tokens may be left out"
            )
        if borders.any():
            found["position_ids"] = borders
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if arguments.get(name) is not None:
            found[name] = _borders_of_lengths(name, arguments[name], batch, length) & follows
    for name in ("seq_idx", "mask_function"):
        if arguments.get(name) is not None:
            numbers = _of_tokens(name, arguments[name], batch, length)
            found[name] = (numbers.diff(prepend=numbers[:, :1]) != 0) & follows
    names = list(found)
    for name in names[1:]:
        if not torch.equal(found[name], found[names[0]]):
            raise ValueError(
                f"{names[0]} and {name} say that different texts are packed; expected the same; pass one of them"
            )
    return found[names[0]] if names and found[names[0]].any() else None


def _of_tokens(name: str, tensor, batch: int, length: int) -> torch.Tensor:
    if tensor.ndim != 2 or tensor.shape[0] not in (1, batch) or tensor.shape[1] != length:
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; expected [{batch}, {length}]: one number for each token of this "
            "forward"
        )
    return tensor.to("cpu").expand(batch, -1)


def _borders_of_lengths(name: str, lengths, batch: int, length: int) -> torch.Tensor:
    ends = torch.as_tensor(lengths).to("cpu")
    numbers = ends.tolist()
    if batch != 1 or ends.ndim != 1 or len(numbers) < 2 or (numbers[0], numbers[-1]) != (0, length):
        raise ValueError(
            f"{name}={numbers} for {batch} rows of {length} tokens; expected one row of packed texts, and the columns "
            f"where they begin and end, from 0 to {length}; pass input_ids as [1, tokens]"
        )
    if (ends.diff() < 0).any():
        raise ValueError(f"{name}={numbers} decreases; expected the cumulative lengths of the packed texts")
    borders = torch.zeros(1, length, dtype=torch.bool)
    borders[0, ends[ends < length].long()] = True
    return borders


def made_texts(plans, seen: int, extent: Extent | None, borders, keeps: bool, plain: bool, device) -> Texts:
    """borders: of text_borders; bool [B, T]. keeps: whether a cache holds these tokens for later. plain: whether rows
    without padding are plain. Raises ValueError for packed texts that are kept."""
    starts = None if extent is None or not extent.starts.any() else extent.starts
    if borders is None:
        return Texts(plans, starts, None, plain and starts is None)
    if keeps:
        row, place = borders.nonzero()[0].tolist()
        raise ValueError(
            f"packed texts with a cache: another text begins in row {row} at token {seen + place}, and texts that go "
            "on in a cache must have a row of their own; expected use_cache=False for packed texts (training: "
            "model.config.use_cache = False); pass it, or give each text a row"
        )
    return Texts(plans, None, _packed(borders, extent, device), False)


def _packed(borders, extent: Extent | None, device) -> PackedSequence:
    """The texts among the B * T tokens, one row after the other."""
    batch, length = borders.shape
    starts, ends = (torch.zeros(batch, dtype=torch.int64), torch.full((batch,), length)) if extent is None else extent
    column = torch.arange(length)
    begins = borders | ((column == starts[:, None]) & (starts < ends)[:, None])
    first = begins.flatten().nonzero().flatten()
    if first[0] > 0:  # the kernels want a first text that begins with the first token
        first = torch.cat([first.new_zeros(1), first])
    row = first // length
    last = torch.minimum(row * length + ends[row], torch.cat([first[1:], first.new_tensor([batch * length])]))
    lengths = (last - first).where(begins.flatten()[first], 0)
    ends_packed = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    padded = torch.cat([first, first.new_tensor([batch * length])])
    cu_seqlens, cu_seqlens_padded = (tensor.to(device, torch.int32) for tensor in (ends_packed, padded))
    same = torch.equal(ends_packed, padded)
    return PackedSequence(cu_seqlens, int(lengths.max()), None if same else cu_seqlens_padded)
