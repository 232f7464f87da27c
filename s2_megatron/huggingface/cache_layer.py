"""What one layer of an S2Cache keeps, and how its attention reads it.

Keys and values are made outside of inference mode: what an evaluation has filled, a training may go on with.

B batch, H query heads, G KV heads, K of them in a group, R = H / G, P groups, D head dim, T tokens of a forward, S kept
tokens of a KV head, W places that a token is written to.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
import transformers
from transformers import LlamaForCausalLM
from transformers.cache_utils import CacheLayerMixin

from s2_megatron.huggingface.attention import attend, rows_by_start
from s2_megatron.huggingface.decoding import decode_attention, mask_with_offset
from s2_megatron.huggingface.slots import Slots, kept_slots
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import Pattern

# What transformers calls the cache that a model takes, and returns: `cache` since 5.24, before it `past_key_values`.
_CACHE_NAMES = ("cache", "past_key_values")
_read = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE_ARGUMENT = next((name for name in _CACHE_NAMES if name in _read), "")
if not CACHE_ARGUMENT:
    raise ImportError(
        f"transformers {transformers.__version__} calls a model's cache neither {' nor '.join(_CACHE_NAMES)}; "
        "pip install 'transformers==5.24'"
    )


class SharedSlots:
    """The slots of all layers of one pattern. The layers hold this object; a copy of the cache has one copy of it."""

    def __init__(self, pattern: Pattern):
        self.pattern = pattern
        self.groups: list[Slots] = []

    def check_length(self, n_blocks: int) -> None:
        """Raises ValueError for a block mask that is shorter."""
        if isinstance(self.pattern, BlockMaskPattern):
            self.pattern.check_length(n_blocks * self.pattern.block_size)

    def grow(self, needed: int, capacity: int, grows_later: bool) -> list[torch.Tensor]:
        """Makes slots for texts of `capacity` blocks, of which `needed` are wanted now; returns, for each group, the
        places of the slots before among them."""
        if isinstance(self.pattern, BlockMaskPattern):
            if not self.groups:
                # For the whole mask where the text grows, as its slots cannot.
                self.groups = kept_slots(self.pattern, self.pattern.num_blocks if grows_later else needed)
            return []
        if not self.groups:
            self.groups = kept_slots(self.pattern, capacity)
            return []
        larger, places = zip(*(slots.grown(capacity) for slots in self.groups))
        self.groups = list(larger)
        return list(places)


class JoinedSlots:
    """Slots of several groups, computed at once: where the newest token of a row goes, and what it attends.

    The layers of a model often differ in their residues alone. One after the other, the small kernels of 16 patterns
    took longer than the attention of 30 layers (benchmarks/NOTES.md).
    """

    def __init__(self, members: Sequence[Slots]):
        """members: of one form, [P]."""
        self.members = members
        self.slots = members[0].joined(members) if len(members) > 1 else members[0]

    def write_tokens(self, position: torch.Tensor) -> torch.Tensor:
        """Of every member, int64 [B, P, K or 1, W]."""
        return self._apart(self.slots.write_tokens(position))

    def token_mask(self, position: torch.Tensor) -> torch.Tensor:
        """Of every member, bool [B, P, K or 1, R or 1, S]."""
        return self._apart(self.slots.token_mask(position))

    def _apart(self, tensor: torch.Tensor) -> torch.Tensor:
        count = len(self.members)
        if tensor.shape[1] == 1:  # all heads are equal
            return tensor[:, None].expand(-1, count, *tensor.shape[1:])
        return tensor.unflatten(1, (count, -1))


def joined_slots(groups: Sequence[Slots]) -> list[JoinedSlots]:
    """For a step of all groups: those of one form together."""
    by_form: dict[object, list[Slots]] = {}
    for slots in groups:
        by_form.setdefault(slots.form or slots, []).append(slots)
    return [JoinedSlots(members) for members in by_form.values()]


class S2CacheLayer(CacheLayerMixin):
    """What one layer keeps. keys, values: a tensor [B, K, S, D] for each group of K KV heads that keep as much.

    pattern: None: dense. shared: of the pattern that says what is kept. room: zeros behind the S tokens of each tensor,
    for a softmax offset. has_graph: whether a gradient could go back to what is kept, which the cache does not hold.
    """

    is_sliding = False

    def __init__(self, pattern: Pattern | None, shared: SharedSlots | None, room: int = 0):
        super().__init__()
        self.pattern, self.shared, self.room = pattern, shared, room
        self.groups: list[Slots] = []
        self.keys, self.values, self.seen, self.has_graph = [], [], 0, False

    def _take_memory(self, key, value) -> None:
        """For this batch and dtype, unless it is there."""
        other = self.is_initialized and (len(self.keys[0]) != len(key) or self.dtype != key.dtype)
        if not self.is_initialized or (self.seen == 0 and other):
            self.lazy_initialization(key, value)

    @torch.inference_mode(False)
    def lazy_initialization(self, key_states, value_states=None) -> None:
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            batch, _, _, dim = (key_states if states is None else states).shape
            store[:] = [
                key_states.new_zeros(batch, len(slots.kv_heads), slots.n_slots * slots.block_size + self.room, dim)
                for slots in self.groups
            ]
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    @torch.inference_mode(False)
    def fit(self, groups: list[Slots], places: list[torch.Tensor]) -> None:
        """Takes slots for longer texts; what is kept moves to its new places."""
        old, self.groups = [*self.keys, *self.values], groups
        if not self.is_initialized:
            return
        inside = torch.arange(groups[0].block_size)
        for index, tensor in enumerate(old):
            slots, place = groups[index % len(groups)], places[index % len(groups)]
            size = slots.n_slots * slots.block_size + self.room
            larger = tensor.new_zeros(*tensor.shape[:2], size, tensor.shape[3])
            tokens = (place[:, None] * slots.block_size + inside).flatten().to(tensor.device)
            (self.keys if index < len(groups) else self.values)[index % len(groups)] = larger.index_copy_(
                2, tokens, tensor[:, :, : len(tokens)]
            )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises ValueError for keys and values of another dtype than those that are kept, which would be rounded."""
        if self.seen > 0 and dtype != self.dtype:
            raise ValueError(
                f"this S2Cache holds {self.dtype} and got {dtype}; expected one dtype for all of a text; give the "
                "model (and torch.autocast) the same dtype in every forward, or call reset() and give the whole text "
                "again"
            )

    def check_gradient(self, key, value) -> None:
        """Raises ValueError where a gradient would have to go back into what is kept."""
        if not torch.is_grad_enabled():
            return
        wanted = key.requires_grad or value.requires_grad
        if key.shape[2] == 1 and wanted:
            raise ValueError(
                "a decoding step of S2Cache has no gradient; use torch.no_grad(), or use_cache=False to train"
            )
        if self.seen and self.has_graph:
            raise ValueError(
                "S2Cache has no gradient of the tokens that it was given before, and these were computed with one; "
                "use torch.no_grad() at least for what comes before; to train through several pieces of a text give "
                f"{CACHE_ARGUMENT}=DynamicCache()"
            )
        self.has_graph |= wanted

    def extend(self, query, key, value, starts, scale: float, offset=None) -> torch.Tensor:
        """Attention of T tokens to what is kept and to each other; keeps of them what will be needed. offset: of the
        softmax, [H]. [B, H, T, D]."""
        self._take_memory(key, value)
        pattern = self.pattern if offset is None else self.shared.pattern
        length, after = query.shape[2], self.seen + query.shape[2]
        whole = [(slice(None), 0)] if starts is None else rows_by_start(starts, query.device)
        out = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for rows, start in whole:
            new, past = min(length, after - start), max(0, self.seen - start)
            if new <= 0:
                continue
            parts = [tensor[rows, :, length - new :] for tensor in (query, key, value)]
            keys, values = (
                self._assembled(store, rows, past, part)
                for store, part in ((self.keys, parts[1]), (self.values, parts[2]))
            )
            part = attend(parts[0], keys, values, pattern, scale, offset)
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
                store[index][rows, :, : place.shape[2]] = source.gather(2, place)

    def _heads(self, tensor, slots: Slots):
        """Of a tensor [B, G, ...] the heads of one group."""
        return tensor if len(self.groups) == 1 else tensor.index_select(1, slots.head_index(tensor.device))

    def decode(self, query, key, value, steps, scale: float, offset=None) -> torch.Tensor:
        """Attention of one token a row to what is kept, itself included. steps: for each group (places, mask). offset:
        of the softmax, [H]. [B, H, 1, D]."""
        self._take_memory(key, value)
        batch, heads, _, dim = query.shape
        kv_heads = key.shape[1]
        query = query.view(batch, kv_heads, heads // kv_heads, dim)
        parts = []
        for index, (slots, (place, mask)) in enumerate(zip(self.groups, steps)):
            for store, new in ((self.keys, key), (self.values, value)):
                new = self._heads(new, slots)
                places = place[..., None].expand(batch, new.shape[1], -1, new.shape[3])
                store[index].scatter_(2, places, new.expand(-1, -1, places.shape[2], -1))
            here = self._heads(query, slots).flatten(1, 2)[:, :, None]
            if offset is not None:
                mask = mask_with_offset(mask, self._heads(offset.view(1, kv_heads, -1), slots).flatten(1))
            parts.append(decode_attention(here, self.keys[index], self.values[index], mask, scale))
        if len(parts) == 1:
            return parts[0]
        out = query.new_empty(*query.shape[:3], value.shape[3])
        for slots, part in zip(self.groups, parts):
            out.index_copy_(1, slots.head_index(query.device), part.view(batch, -1, *out.shape[2:]))
        return out.reshape(batch, heads, 1, -1)

    def decode_in_kernel(self, query, key, value, steps, scale: float, offset=None, rotary=None) -> torch.Tensor:
        """The same by the kernel; rotary: of a query and a key that have not been through RoPE."""
        from s2_megatron.huggingface import decode_kernel  # needs Triton, which not every machine has

        self._take_memory(key.to(value.dtype), value)
        kept = [
            decode_kernel.Kept(keys, values, mask, place, slots.head_index(query.device))
            for keys, values, (place, mask), slots in zip(self.keys, self.values, steps, self.groups)
        ]
        return decode_kernel.decode(query, key, value, kept, scale, rotary, offset)[0]

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
        self.seen, self.has_graph = 0, False  # what is kept is overwritten before a mask shows it

    @torch.inference_mode(False)
    def choose_rows(self, choose) -> None:
        """Replaces the rows by choose(tensor [B, ...])."""
        for store in (self.keys, self.values):
            store[:] = [choose(tensor) for tensor in store]


def _placed(out, rows, part, skipped: int):
    """A copy of out with the part's rows in it. Not in place, because the gradient has to pass through."""
    return out.index_copy(0, rows, torch.nn.functional.pad(part, (0, 0, skipped, 0)))
