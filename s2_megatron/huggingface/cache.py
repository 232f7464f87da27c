"""S2Cache: a KV cache for transformers that keeps, for each KV head, its window and its own blocks, nothing else.

Strides count from the start of a text, so a block that left the window and is none of the head's never comes back: it
is dropped for good. Decoding is ordinary SDPA over what is kept, with a mask; several tokens at once are the S2
forward.

B batch, H query heads, G KV heads, R = H / G, D head dim, T tokens of a forward, S kept tokens of a KV head.
"""

from __future__ import annotations

import inspect

import torch
import transformers
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.huggingface.attention import attend, rows_by_start
from s2_megatron.huggingface.configuration import resolved_sparsity
from s2_megatron.huggingface.decoding import decode_attention, decode_mask
from s2_megatron.huggingface.slots import Slots, kept_slots
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import Pattern, RangePattern
from s2_megatron.printing import print_once

# What transformers calls the cache that a model takes, and returns: `cache` since 5.24, before it `past_key_values`.
_CACHE_NAMES = ("cache", "past_key_values")
_read = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE_ARGUMENT = next((name for name in _CACHE_NAMES if name in _read), "")
if not CACHE_ARGUMENT:
    raise ImportError(
        f"transformers {transformers.__version__} calls a model's cache neither {' nor '.join(_CACHE_NAMES)}; "
        "pip install 'transformers==5.24'"
    )
SPARE = 8  # without a max_length, a cache that is full grows by one part in so many


def kept_tokens(sparsity: ResolvedSparsity, seq_length: int) -> list[list[int]]:
    """How many tokens of a text of seq_length the cache has room for: [layer][KV head]."""
    per_pattern = {}
    for layer in sparsity.layers:
        if layer.pattern not in per_pattern:
            pattern = _kept_pattern(layer.pattern, sparsity)
            kept = [0] * sparsity.num_kv_heads
            for slots in kept_slots(pattern, -(-seq_length // pattern.block_size)):
                for head in slots.kv_heads:
                    kept[head] = slots.n_slots * slots.block_size
            per_pattern[layer.pattern] = kept
    return [per_pattern[layer.pattern] for layer in sparsity.layers]


def cache_summary(sparsity: ResolvedSparsity, seq_length: int) -> str:
    """What the cache keeps of a text, in words."""
    kept = kept_tokens(sparsity, seq_length)
    total = sum(map(sum, kept)) / (seq_length * sparsity.num_kv_heads * len(kept))
    forms: dict[str, int] = {}
    for heads in kept:
        low, high = min(heads), max(heads)
        text = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        forms[text] = forms.get(text, 0) + 1
    layers = ", ".join(f"{text} tokens a KV head in {count} layer{'s' * (count > 1)}" for text, count in forms.items())
    return f"S2 cache at {seq_length:,} tokens: {total:.1%} of a full one ({layers})"


def _kept_pattern(pattern: Pattern | None, sparsity: ResolvedSparsity) -> Pattern:
    if pattern is None:
        return RangePattern.dense(sparsity.block_size, sparsity.num_heads, sparsity.num_kv_heads)
    return pattern


class S2CacheLayer(CacheLayerMixin):
    """What one layer keeps. keys, values: a tensor [B, K, S, D] for each group of K KV heads that keep as much."""

    is_sliding = False

    def __init__(self, pattern: Pattern | None, kept_pattern: Pattern):
        super().__init__()
        self.pattern, self.kept_pattern = pattern, kept_pattern
        self.groups: list[Slots] = []
        self.keys, self.values, self.seen = [], [], 0

    def _take_memory(self, key) -> None:
        """For this batch, unless it is there."""
        if not self.is_initialized or (self.seen == 0 and len(self.keys[0]) != len(key)):
            self.lazy_initialization(key)

    def lazy_initialization(self, key_states, value_states=None) -> None:
        batch, _, _, dim = key_states.shape
        for store in (self.keys, self.values):
            store[:] = [
                key_states.new_zeros(batch, len(slots.kv_heads), slots.n_slots * slots.block_size, dim)
                for slots in self.groups
            ]
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def fit(self, groups: list[Slots], places: list[torch.Tensor]) -> None:
        """Takes slots for longer texts; what is kept moves to its new places."""
        old, self.groups = [*self.keys, *self.values], groups
        if not self.is_initialized:
            return
        inside = torch.arange(groups[0].block_size)
        for index, tensor in enumerate(old):
            slots, place = groups[index % len(groups)], places[index % len(groups)]
            larger = tensor.new_zeros(*tensor.shape[:2], slots.n_slots * slots.block_size, tensor.shape[3])
            tokens = (place[:, None] * slots.block_size + inside).flatten().to(tensor.device)
            (self.keys if index < len(groups) else self.values)[index % len(groups)] = larger.index_copy_(
                2, tokens, tensor
            )

    def extend(self, query, key, value, starts, scale: float) -> torch.Tensor:
        """Attention of T tokens to what is kept and to each other; keeps of them what will be needed. [B, H, T, D]."""
        self._take_memory(key)
        length, after = query.shape[2], self.seen + query.shape[2]
        whole = [(slice(None), 0)] if starts is None else rows_by_start(starts, query.device)
        out = torch.zeros_like(query)
        for rows, start in whole:
            new, past = min(length, after - start), max(0, self.seen - start)
            if new <= 0:
                continue
            parts = [tensor[rows, :, length - new :] for tensor in (query, key, value)]
            keys, values = (
                self._assembled(store, rows, past, part)
                for store, part in ((self.keys, parts[1]), (self.values, parts[2]))
            )
            part = attend(parts[0], keys, values, self.pattern, scale)
            out = part if new == length and starts is None else _placed(out, rows, part, length - new)
            with torch.no_grad():
                self._store(rows, keys, values, past + new)
        return out

    def _assembled(self, store, rows, past: int, new: torch.Tensor) -> torch.Tensor:
        """[rows, G, past + new tokens, D]: what is kept at its positions, zeros where a head dropped its blocks."""
        if past == 0:
            return new
        batch, heads, length, dim = new.shape
        # One more place, for slots that hold nothing.
        full = new.new_zeros(batch, heads, past + length + 1, dim)
        for slots, tensor in zip(self.groups, store):
            position, there = slots.held_tokens(past, new.device)
            place = position.where(there, past + length)[None, :, :, None].expand(batch, len(slots.kv_heads), -1, dim)
            heads_here = slots.head_index(new.device)
            full.index_copy_(1, heads_here, full.index_select(1, heads_here).scatter(2, place, tensor[rows]))
        return torch.cat([full[:, :, :past], new], 2)

    def _store(self, rows, keys, values, n_tokens: int) -> None:
        for index, slots in enumerate(self.groups):
            position, _ = slots.held_tokens(n_tokens, keys.device)
            for store, source in ((self.keys, keys), (self.values, values)):
                source = self._heads(source, slots)
                place = position[None, :, :, None].expand(source.shape[0], source.shape[1], -1, source.shape[3])
                store[index][rows] = source.gather(2, place)

    def _heads(self, tensor, slots: Slots):
        """Of a tensor [B, G, ...] the heads of one group."""
        return tensor if len(self.groups) == 1 else tensor.index_select(1, slots.head_index(tensor.device))

    def decode(self, query, key, value, steps, scale: float) -> torch.Tensor:
        """Attention of one token a row to what is kept, itself included. steps: for each group (places, mask).
        [B, H, 1, D]."""
        self._take_memory(key)
        if torch.is_grad_enabled() and key.requires_grad:
            raise ValueError(
                "a decoding step of S2Cache has no gradient; use torch.no_grad(), or use_cache=False to train"
            )
        batch, heads, _, dim = query.shape
        kv_heads = key.shape[1]
        query = query.view(batch, kv_heads, heads // kv_heads, dim)
        parts = []
        for index, (slots, (place, mask)) in enumerate(zip(self.groups, steps)):
            for store, new in ((self.keys, key), (self.values, value)):
                new = self._heads(new, slots)
                places = place[..., None].expand(batch, new.shape[1], -1, dim)
                store[index].scatter_(2, places, new.expand(-1, -1, places.shape[2], -1))
            here = self._heads(query, slots).flatten(1, 2)[:, :, None]
            parts.append(decode_attention(here, self.keys[index], self.values[index], mask, scale))
        if len(parts) == 1:
            return parts[0]
        out = torch.empty_like(query)
        for slots, part in zip(self.groups, parts):
            out.index_copy_(1, slots.head_index(query.device), part.view(batch, -1, heads // kv_heads, dim))
        return out.reshape(batch, heads, 1, dim)

    def update(self, key_states, value_states, *args, **kwargs):
        raise ValueError(
            "S2Cache does not return keys: each head has kept its own blocks; it works with models of type s2_gpt "
            "(attn_implementation='s2'); give other models a DynamicCache"
        )

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.17

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"S2Cache cannot go back by {abs(tokens_to_remove)} tokens: blocks that left the window are gone; "
                f"for assisted decoding give {CACHE_ARGUMENT}=DynamicCache() (the full cache)"
            )

    def reset(self) -> None:
        self.seen = 0  # what is kept is overwritten before a mask shows it

    def choose_rows(self, choose) -> None:
        """Replaces the rows by choose(tensor [B, ...])."""
        for store in (self.keys, self.values):
            store[:] = [choose(tensor) for tensor in store]

    def reorder_cache(self, beam_idx) -> None:
        self.choose_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.choose_rows(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices) -> None:
        self.choose_rows(lambda tensor: tensor[indices.to(tensor.device)])


def _placed(out, rows, part, skipped: int):
    """out with the part's rows in it; not in place, for the gradient goes through."""
    return out.index_copy(0, rows, torch.nn.functional.pad(part, (0, 0, skipped, 0)))


class S2Cache(Cache):
    """The compact cache of a model of type s2_gpt.

    config: the model's. max_length: tokens of the longest text, padding not counted; then all memory is taken at the
    first forward, shapes never change and a decoding step can be captured in a CUDA graph; without it the cache grows.
    Raises ValueError for texts that are longer, and for block masks shorter than max_length.
    """

    def __init__(self, config, max_length: int | None = None):
        sparsity = resolved_sparsity(config)
        shared: dict[Pattern, Pattern] = {}  # equal layers share the object, by which the rest is looked up
        patterns = [_kept_pattern(layer.pattern, sparsity) for layer in sparsity.layers]
        patterns = [shared.setdefault(pattern, pattern) for pattern in patterns]
        super().__init__(layers=[S2CacheLayer(layer.pattern, kept) for layer, kept in zip(sparsity.layers, patterns)])
        self.max_length = max_length
        self.seen = 0  # columns, padding included
        self.starts: torch.Tensor | None = None  # first column of each row that is text; None: 0 everywhere
        self.position: torch.Tensor | None = None  # int64 [B], of the newest token in its text
        self._slots: dict[int, list[Slots]] = {}  # by the identity of the pattern
        self._capacity = 0
        self._steps: dict = {}
        if max_length is not None:
            self._make_room(max_length)
        print_once(cache_summary(sparsity, max_length or sparsity.seq_length))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on the device."""
        return sum(tensor.nbytes for layer in self.layers for tensor in (*layer.keys, *layer.values))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx].seen

    def attend(self, layer_idx: int, query, key, value, starts: torch.Tensor | None, scale: float) -> torch.Tensor:
        """Adds T tokens to a layer and computes their attention.

        query [B, H, T, D], key and value [B, G, T, D]; starts: int64 [B] or None, the first column of every row's text.
        Returns [B, H, T, D]. Raises ValueError when starts differ from those before, and beyond max_length.
        """
        layer, length = self.layers[layer_idx], query.shape[2]
        if layer.seen == self.seen:  # the first layer of a forward
            self._begin(length, query, starts)
        assert layer.seen + length == self.seen, f"layer {layer_idx} saw {layer.seen} tokens, the cache {self.seen}"
        one_each = length == 1 and (self.starts is None or int(self.starts.max()) < self.seen)
        if one_each:
            out = layer.decode(query, key, value, self._step(layer, query, key.shape[1]), scale)
        else:
            out = layer.extend(query, key, value, self.starts, scale)
        layer.seen = self.seen
        return out

    def _begin(self, length: int, query, starts) -> None:
        self._check_starts(starts)
        # The start of a row that is all padding so far moves with the columns.
        moved = starts is not None and self.starts is not None and not torch.equal(starts, self.starts)
        self.starts = starts
        self.seen += length
        self._steps.clear()
        self._make_room(self._longest())
        if length == 1 and self.seen > 1 and not moved:
            self.position.add_(1)  # in place, so that a captured step counts
            return
        first = torch.zeros(query.shape[0], dtype=torch.int64) if starts is None else starts
        position = (self.seen - 1 - first).to(query.device)
        if self.position is not None and self.position.shape == position.shape:
            self.position.copy_(position)  # a captured step reads this tensor
        else:
            self.position = position

    def _longest(self) -> int:
        """Tokens of the longest text, padding not counted; at least one, so that there are slots."""
        return max(1, self.seen - (0 if self.starts is None else int(self.starts.min())))

    def _check_starts(self, starts) -> None:
        if self.seen == 0:
            return
        known, given = ("none" if rows is None else rows.tolist() for rows in (self.starts, starts))
        if known == given:
            return
        begun = None if self.starts is None or starts is None else self.starts < self.seen
        if begun is None or not torch.equal(self.starts[begun], starts[begun]) or (starts[~begun] < self.seen).any():
            raise ValueError(
                f"attention_mask: the rows' padding is {given} columns, and was {known} in the forwards before; "
                "expected the mask of all tokens so far, the cached ones included; pass it in every forward"
            )

    def _make_room(self, n_tokens: int) -> None:
        """Slots for texts of n_tokens in every layer."""
        block = self.layers[0].kept_pattern.block_size
        needed = -(-n_tokens // block)
        if self.max_length is not None and n_tokens > self.max_length:
            raise ValueError(
                f"S2Cache(max_length={self.max_length}) got {n_tokens} tokens; expected fewer; make it longer"
            )
        if needed <= self._capacity:
            return
        self._capacity = needed if self.max_length is not None else needed + needed // SPARE + 1
        moved: dict[int, list[torch.Tensor]] = {}  # old slots' places among the new ones
        for layer in self.layers:
            pattern = layer.kept_pattern
            if id(pattern) not in moved:
                moved[id(pattern)] = self._grow(pattern, needed)
            if layer.groups is not self._slots[id(pattern)]:
                layer.fit(self._slots[id(pattern)], moved[id(pattern)])

    def _grow(self, pattern: Pattern, needed: int) -> list[torch.Tensor]:
        old = self._slots.get(id(pattern))
        if isinstance(pattern, BlockMaskPattern):
            pattern.check_length(needed * pattern.block_size)
            if old is None:
                # Without a max_length for the whole mask, as its slots cannot grow.
                self._slots[id(pattern)] = kept_slots(pattern, needed if self.max_length else pattern.num_blocks)
            return []
        if old is None:
            self._slots[id(pattern)] = kept_slots(pattern, self._capacity)
            return []
        larger, places = zip(*(slots.grown(self._capacity) for slots in old))
        self._slots[id(pattern)] = list(larger)
        return list(places)

    def _step(self, layer: S2CacheLayer, query, kv_heads: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each group of a layer's heads, where the newest tokens go and what they attend; once a forward for equal
        layers."""
        key = (id(layer.kept_pattern), query.device)
        if key not in self._steps:
            position = self.position.to(query.device)
            steps = []
            for slots in layer.groups:
                group = query.shape[1] // kv_heads
                mask = decode_mask(slots.token_mask(position), len(slots.kv_heads), group, query.dtype)
                steps.append((slots.write_tokens(position), mask))
            self._steps[key] = steps
        return self._steps[key]

    def count_replay(self) -> None:
        """After the replay of a captured decoding step: counts the token that the graph has added."""
        self.seen += 1
        for layer in self.layers:
            layer.seen += 1
        self._make_room(self._longest())

    def reset(self) -> None:
        super().reset()
        self.seen, self.starts = 0, None
        self._steps.clear()

    def _choose_rows(self, choose) -> None:
        self.starts = None if self.starts is None else choose(self.starts)
        self.position = None if self.position is None else choose(self.position)
        self._steps.clear()

    def reorder_cache(self, beam_idx) -> None:
        super().reorder_cache(beam_idx)
        self._choose_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._choose_rows(lambda rows: rows.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices) -> None:
        super().batch_select_indices(indices)
        self._choose_rows(lambda rows: rows[indices.to(rows.device)])
