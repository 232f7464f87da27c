"""S2Cache: a KV cache for transformers that keeps, for each KV head, its window and its own blocks, nothing else.

Strides count from the start of a text. So a block that has left the window, and is not one that the head attends by its
stride, is never needed again, and is dropped. Decoding is ordinary SDPA over what is kept, with a mask, or on
request a kernel (decode_kernel.py); several tokens at once use the S2 forward.

B batch, H query heads, G KV heads, R = H / G, D head dim, T tokens of a forward, S kept tokens of a KV head.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from s2_megatron.config.sparsity import ResolvedSparsity, canonical_pattern
from s2_megatron.huggingface.attention import Rotary, rotated
from s2_megatron.huggingface.cache_layer import CACHE_ARGUMENT, JoinedSlots, S2CacheLayer, SharedSlots, joined_slots
from s2_megatron.huggingface.decoding import DECODE_BACKENDS, OFFSET_ROOM, decode_mask, takes_kernel
from s2_megatron.huggingface.layer_plans import kept_pattern, layer_plans, resolved_sparsity
from s2_megatron.huggingface.slots import Slots, kept_slots
from s2_megatron.patterns.checks import shown
from s2_megatron.patterns.ranges import Pattern
from s2_megatron.printing import print_once

__all__ = ["CACHE_ARGUMENT", "S2Cache", "S2CacheLayer", "cache_summary", "kept_tokens"]
SPARE = 8  # without a max_length, a cache that is full grows by one part in so many


def kept_tokens(sparsity: ResolvedSparsity, seq_length: int) -> list[list[int]]:
    """How many tokens of a text of seq_length the cache has room for: [layer][KV head]."""
    per_pattern = {}
    for layer in sparsity.layers:
        if layer.pattern not in per_pattern:
            pattern = kept_pattern(layer.pattern, sparsity)
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


class S2Cache(Cache):
    """The compact cache of a model of type s2_gpt.

    config: the model's. max_length: tokens of the longest text, padding not counted; then all memory is taken at the
    first forward, shapes never change and a decoding step can be captured in a CUDA graph; without it the cache grows.
    decode_backend: of steps of one token: "reference" (torch's SDPA with a mask), "triton" (one kernel for RoPE, the
    write and the attention), or "auto", the kernel on a GPU and the reference elsewhere.
    Raises ValueError for texts that are longer, for block masks shorter than max_length, and for other backends.
    """

    def __init__(self, config, max_length: int | None = None, decode_backend: str = "reference"):
        if decode_backend not in DECODE_BACKENDS:
            raise ValueError(
                f"decode_backend={shown(decode_backend)}; expected one of {', '.join(DECODE_BACKENDS)}; use auto"
            )
        self.decode_backend = decode_backend
        sparsity = resolved_sparsity(config)
        shared: dict[Pattern, SharedSlots] = {}
        for plan in layer_plans(config):
            shared.setdefault(plan.kept_pattern, SharedSlots(plan.kept_pattern))
        room = OFFSET_ROOM if getattr(config, "softmax_type", "vanilla") != "vanilla" else 0
        super().__init__(
            layers=[S2CacheLayer(plan.pattern, shared[plan.kept_pattern], room) for plan in layer_plans(config)]
        )
        self.max_length = max_length
        self.seen = 0  # columns, padding included
        self.starts: torch.Tensor | None = None  # first column of each row that is text; None: 0 everywhere
        self.position: torch.Tensor | None = None  # int64 [B], of the newest token in its text
        self._capacity = 0
        self._joined: list[JoinedSlots] = []  # of the groups of all layers; made when they are first needed
        # By device and dtype of masks (None: bool), where the newest tokens go and what they attend.
        self._steps: dict[tuple[torch.device, torch.dtype | None], dict[Slots, tuple[torch.Tensor, torch.Tensor]]] = {}
        if max_length is not None:
            self._make_room(max_length)
        print_once(cache_summary(sparsity, max_length or sparsity.seq_length))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on the device."""
        return sum(tensor.nbytes for layer in self.layers for tensor in (*layer.keys, *layer.values))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.layers[layer_idx].seen < 0:
            raise self._torn()
        return self.layers[layer_idx].seen

    def attend(
        self,
        layer_idx: int,
        query,
        key,
        value,
        starts: torch.Tensor | None,
        scale: float,
        pattern: Pattern | None,
        offset: torch.Tensor | None = None,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Adds T tokens to a layer and computes their attention.

        query [B, H, T, D], key and value [B, G, T, D]; starts: int64 [B] or None, the first column of every row's text;
        pattern: what the layer attends, by the model's config. offset: of its softmax, [H], where the config has a
        softmax_type with one. rotary: of RoPE, where query and key have not been through it (one token, T = 1).
        Returns [B, H, T, D].
        Raises ValueError when starts, rows, the pattern or the dtype differ from those before, when the text exceeds
        max_length, when the last forward did not reach every layer, when a gradient would have to go back into the
        cache, and when decode_backend cannot compute the step.
        """
        layer, length = self.layers[layer_idx], query.shape[2]
        if layer.pattern is not pattern and canonical_pattern(layer.pattern) != canonical_pattern(pattern):
            raise ValueError(
                f"this S2Cache was made for another sparsity than the model's in layer {layer_idx}: it has kept other "
                "blocks than will be attended; make a new S2Cache(model.config) when config.s2_sparsity has changed"
            )
        if (offset is not None) != (layer.room > 0):
            raise ValueError(
                f"this S2Cache was made for another softmax_type than the model's in layer {layer_idx}; expected the "
                "same; make a new S2Cache(model.config)"
            )
        layer.pattern = pattern  # the same object, to compare faster
        layer.check_dtype(value.dtype)
        layer.check_gradient(key, value)
        if layer.seen == self.seen:  # the first layer of a forward
            self._begin(length, query, starts)
        elif layer.seen + length != self.seen:
            raise self._torn()
        try:
            one_each = length == 1 and (self.starts is None or int(self.starts.max()) < self.seen)
            kernel = one_each and takes_kernel(
                self.decode_backend, query.device.type, value.dtype, max(query.shape[3], value.shape[3])
            )
            if rotary is not None and not kernel:
                both = rotated(query.transpose(1, 2), key.transpose(1, 2), rotary)
                query, key = (tensor.to(value.dtype).transpose(1, 2) for tensor in both)
            if not one_each:
                out = layer.extend(query, key, value, self.starts, scale, offset)
            elif kernel:
                steps = self._step(layer, query, key.shape[1], True)
                out = layer.decode_in_kernel(query, key, value, steps, scale, offset, rotary)
            else:
                out = layer.decode(query, key, value, self._step(layer, query, key.shape[1], False), scale, offset)
        except BaseException:
            layer.seen = -1  # half-written: no forward goes on from here
            raise
        layer.seen = self.seen
        return out

    def _torn(self) -> ValueError:
        seen = [layer.seen for layer in self.layers]
        return ValueError(
            f"this S2Cache is torn: a forward before this one ended in the middle (its layers have seen {seen} tokens, "
            "-1: an unknown number); expected complete forwards; call reset() and give the whole text again"
        )

    def _begin(self, length: int, query, starts) -> None:
        if any(layer.seen != self.seen for layer in self.layers):
            raise self._torn()
        self._check_rows(len(query), starts)
        # The start of a row that is all padding so far moves with the columns.
        moved = starts is not None and self.starts is not None and not torch.equal(starts, self.starts)
        self._make_room(_longest(self.seen + length, starts))
        self.starts = starts
        self.seen += length
        self._steps.clear()
        if length > 1:
            for joined in self._all_joined():
                joined.slots.head_index(query.device)  # with all tables: a captured step cannot copy them there
        if length == 1 and self.seen > 1 and not moved:
            self.position.add_(1)  # in place, so that a captured step counts
            return
        with torch.inference_mode(False):  # a training may go on with it
            first = torch.zeros(len(query), dtype=torch.int64) if starts is None else starts
            position = (self.seen - 1 - first).to(query.device)
            if self.position is not None and self.position.shape == position.shape:
                self.position.copy_(position)  # a captured step reads this tensor
            else:
                self.position = position

    def _check_rows(self, rows: int, starts) -> None:
        if self.seen == 0:
            return
        if rows != len(self.position):
            raise ValueError(
                f"this S2Cache holds {len(self.position)} rows and got {rows}; expected the same; choose rows with "
                "batch_select_indices or batch_repeat_interleave, or reset() it for other texts"
            )
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
        block = self.layers[0].shared.pattern.block_size
        needed = -(-n_tokens // block)
        if self.max_length is not None and n_tokens > self.max_length:
            raise ValueError(
                f"S2Cache(max_length={self.max_length}) got {n_tokens} tokens; expected fewer; make it longer"
            )
        if needed <= self._capacity:
            return
        capacity = needed if self.max_length is not None else needed + needed // SPARE + 1
        shared: dict[SharedSlots, list[torch.Tensor]] = {layer.shared: [] for layer in self.layers}
        for slots in shared:
            slots.check_length(needed)
        for slots in shared:
            shared[slots] = slots.grow(needed, capacity, self.max_length is None)
        for layer in self.layers:
            if layer.groups is not layer.shared.groups:
                layer.fit(layer.shared.groups, shared[layer.shared])
        self._capacity, self._joined = capacity, []

    def _all_joined(self) -> list[JoinedSlots]:
        if not self._joined:
            self._joined = joined_slots(list(dict.fromkeys(slots for layer in self.layers for slots in layer.groups)))
        return self._joined

    def _step(self, layer: S2CacheLayer, query, kv_heads: int, kernel: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each group of a layer's heads, where the newest tokens go and what they attend: bool for the kernel, what
        is added to scores for SDPA. Once a forward for the groups of all layers."""
        found = (query.device, None if kernel else query.dtype)
        if found not in self._steps:
            position, group = self.position.to(query.device), query.shape[1] // kv_heads
            steps = self._steps[found] = {}
            for joined in self._all_joined():
                masks = joined.token_mask(position).transpose(0, 1)
                if not kernel:
                    masks = decode_mask(masks, len(joined.members[0].kv_heads), group, query.dtype)
                steps.update(zip(joined.members, zip(joined.write_tokens(position).unbind(1), masks)))
        return [self._steps[found][slots] for slots in layer.groups]

    def count_replay(self) -> None:
        """After the replay of a captured decoding step: counts the token that the graph has added."""
        self.seen += 1
        for layer in self.layers:
            layer.seen += 1
        self._make_room(_longest(self.seen, self.starts))

    def reset(self) -> None:
        super().reset()
        self.seen, self.starts = 0, None
        self._steps.clear()

    def _choose_rows(self, choose) -> None:
        """Replaces the rows by choose(tensor [B, ...])."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.choose_rows(choose)
        with torch.inference_mode(False):
            starts = None if self.starts is None else choose(self.starts)
            self.position = None if self.position is None else choose(self.position)
        self.starts = starts if starts is not None and starts.any() else None  # as a mask of these rows says it
        self._steps.clear()

    def reorder_cache(self, beam_idx) -> None:
        self._choose_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose_rows(lambda rows: rows.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices) -> None:
        self._choose_rows(lambda rows: rows[indices.to(rows.device)])


def _longest(seen: int, starts) -> int:
    """Tokens of the longest text, padding not counted; at least one, so that there are slots."""
    return max(1, seen - (0 if starts is None else int(starts.min())))
