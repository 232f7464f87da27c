"""The block geometry that kernels and the reference read: small integer tensors made from one layer's (tensor-parallel
local) Pattern.

A layout does not depend on the sequence length, and memory is O(heads) for range patterns and O(nonzeros) for block
masks. H query heads, P pattern heads of a block mask, R ranges of distance.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import count, pairwise
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from s2_megatron.ops.attended_blocks import split_blocks
from s2_megatron.ops.device_lists import DeviceSteps, KeyRuns, check_device, parts_of_block
from s2_megatron.ops.lasting import lasting, on_device
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.checks import check_integer, check_integers, shown
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import Pattern, RangePattern

NO_END = 1 << 30  # distance limit of a range without one; above any block index, and q - NO_END still fits in int32
_handles = count(1)
alive: WeakValueDictionary[str, Layout] = WeakValueDictionary()  # every layout of this process, by handle


class PackedSequence(NamedTuple):
    """Documents packed into one token dimension (thd).

    Document i holds the tokens starts[i] .. starts[i] + length[i] - 1 with length[i] = cu_seqlens[i+1] - cu_seqlens[i]
    and starts = cu_seqlens_padded, or cu_seqlens when there is no padding. Rows outside of every document give 0, LSE
    -inf (with a softmax offset: the offset, to whose gradient an LSE in the loss adds) and zero gradients.
    """

    cu_seqlens: torch.Tensor  # int32 [documents + 1], on the device of the query
    max_seqlen: int  # tokens of the longest document, or more (block masks refuse more than they have)
    cu_seqlens_padded: torch.Tensor | None = None  # int32 [documents + 1]

    @property
    def starts(self) -> torch.Tensor:
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded


@dataclass(frozen=True, eq=False)
class Placement:
    """Which global blocks the rows of query, key and value are, for context parallelism and for static inference. Whole
    blocks only.

    Query row r is token `query_block_ids[r // block_size] * block_size + r % block_size`. Key block k of KV head g lies
    in slot `key_slot[g, k]` (rows slot * block_size ...), -1 when it is absent; without key_slot, block k lies in slot
    k. The slots from own_slots on are those of a second key and value, counted from 0 there.
    """

    query_block_ids: torch.Tensor  # int32 [query blocks], ascending
    query_rank: torch.Tensor  # int32 [n_blocks + 1]: how many of query_block_ids are smaller
    key_slot: torch.Tensor | None  # int32 [KV heads, n_blocks]
    n_blocks: int  # blocks of the whole (global) sequence
    n_slots: int  # least slots of the key and value, of both pairs together where there are two
    own_slots: int  # how many of them are in the first key and value: all, if there is no second one
    tile_blocks: int  # so many query blocks, from every multiple of it on, are neighbours in the sequence
    runs: KeyRuns | None = None  # of key_slot, for the pattern that the placement was made for
    steps: DeviceSteps | None = None  # likewise

    @classmethod
    def make(
        cls, query_block_ids, n_blocks: int, key_slot=None, device="cpu", pattern: Pattern | None = None, own_slots=None
    ) -> Placement:
        """query_block_ids: ints, ascending. key_slot: int array [KV heads, n_blocks] or None. pattern: the one that it
        will be used with, for faster kernels. own_slots: where there is a second key and value. Raises ValueError when
        they are not integers or do not fit."""
        device = check_device(device)
        n_blocks = check_integer("n_blocks", n_blocks, 1, NO_END, "use the blocks of the whole sequence")
        ids = check_integers("query_block_ids", query_block_ids, 1, "use a list of blocks").astype(np.int64)
        if not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= n_blocks:
            raise ValueError(
                f"query_block_ids={shown(ids.tolist())}; expected strictly ascending blocks within 0..{n_blocks - 1}; "
                "sort them, each once"
            )
        if pattern is not None and not isinstance(pattern, Pattern):
            raise ValueError(f"pattern={shown(pattern)}; expected a pattern or None; use the layout's, layout.pattern")
        tile_blocks = 1
        while len(ids) % (2 * tile_blocks) == 0 and tile_blocks < 8:
            rows = ids.reshape(-1, 2 * tile_blocks)
            if (np.diff(rows, axis=1) != 1).any():
                break
            tile_blocks *= 2
        rank = np.searchsorted(ids, np.arange(n_blocks + 1))
        n_slots, runs, steps, slots = n_blocks, None, None, None
        if key_slot is not None:
            slots = check_integers("key_slot", key_slot, 2, "use an array [KV heads, n_blocks]")
            if slots.shape[1] != n_blocks:
                raise ValueError(f"key_slot has shape {list(slots.shape)}; expected [KV heads, n_blocks={n_blocks}]")
            if slots.size and not -1 <= slots.min() <= slots.max() < NO_END:
                wrong = int(slots.min() if slots.min() < -1 else slots.max())
                raise ValueError(
                    f"key_slot has the slot {wrong}; expected 0 to {NO_END - 1}, or -1 for an absent block"
                )
            slots = slots.astype(np.int32)
            n_slots = int(slots.max()) + 1
            if (
                isinstance(pattern, RangePattern) and own_slots is None
            ):  # only kernels that take steps know a second key
                runs = KeyRuns.make(pattern, slots, device)
        if own_slots is not None:
            fix = "use the slots of the first key, or None where there is one key"
            own_slots = check_integer("own_slots", own_slots, 1, n_slots, fix)
        if pattern is not None:
            split = parts_of_block(pattern.block_size)
            parts = (split_blocks(ids, split), None if slots is None else split_blocks(slots, split))
            steps = DeviceSteps(pattern, *parts, n_blocks * split, n_slots * split, device)
        return cls(
            *on_device(device, ids, rank),
            None if slots is None else on_device(device, slots)[0],
            n_blocks,
            n_slots,
            n_slots if own_slots is None else own_slots,
            tile_blocks,
            runs,
            steps,
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """Base of the two kinds of block geometry; `to` copies it to a device.

    handle: this object's name while torch.compile traces, which cannot call functions of objects. It stands in no graph
    (ops/stored_layouts.py).
    """

    pattern: Pattern

    def __post_init__(self):
        object.__setattr__(self, "handle", f"layout {next(_handles)}")
        object.__setattr__(self, "_copies", {})
        object.__setattr__(self, "passed_checks", set())  # kinds of calls, of ops.checks.check_once
        object.__setattr__(self, "chosen_kernels", {})  # by kind of call, of kernels.dispatch
        object.__setattr__(self, "known_forwards", {})  # by kind of call, of ops.repeated
        object.__setattr__(self, "known_backwards", {})
        object.__setattr__(self, "_steps", {})
        alive[self.handle] = self

    def __reduce__(self):  # a pickled or copied layout gets a handle of its own
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @property
    def block_size(self) -> int:
        return self.pattern.block_size

    @property
    def num_heads(self) -> int:
        return self.pattern.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.pattern.num_kv_heads

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def steps(self, n_blocks: int) -> DeviceSteps:
        """The step lists of a sequence of n_blocks blocks (of STEP_BLOCK tokens, where the pattern's are larger). They
        are kept for every length, because a captured graph reads them as long as it exists."""
        if n_blocks not in self._steps:
            self._steps[n_blocks] = DeviceSteps(
                self.pattern, np.arange(n_blocks), None, n_blocks, n_blocks, self.device
            )
        return self._steps[n_blocks]

    @property
    def heads_pair(self) -> bool:
        """Whether the query heads 2i and 2i + 1 share their KV head and their pattern."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def index_bytes(self) -> int:
        """Bytes of index data on the device."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def to(self, device) -> Layout:
        """This layout on a device; a copy is made once and stays with the original."""
        device = torch.device(device)
        if self.device == device:
            return self
        if device not in self._copies:
            with lasting():
                self._copies[device] = self._copy(device)
        return self._copies[device]

    def _copy(self, device: torch.device) -> Layout:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RangeLayout(Layout):
    """Ranges of distance: every loop bound of a kernel is arithmetic on this table."""

    ranges: (
        torch.Tensor
    )  # int32 [H, R, 4]: first distance, distance limit, stride, offset mod stride; unused ranges start at NO_END
    tokens: torch.Tensor | None  # int32 [H, 2]: window (0: none) and sink in tokens; None where no head has either
    tile_blocks: (
        int  # so many neighbouring query blocks may share one tile (1 unless the pattern is KV-cache efficient)
    )

    @property
    def tensors(self):
        return (self.ranges,) if self.tokens is None else (self.ranges, self.tokens)

    @cached_property
    def cache(self) -> dict:
        """What follows from the layout and is asked for again and again, launches too."""
        return {}

    def head_order(self, group: int) -> torch.Tensor | None:
        """int32 [H / group]: groups of neighbouring heads, those with the most work first. None when all heads have the
        same ranges."""
        if group not in self.cache:
            heads = self.pattern.heads
            order = None
            kinds = {replace(head, offset=0) for head in heads}
            if len(kinds) > 1:
                work = {head: int(head.key_block_counts(1024).sum()) for head in kinds}
                of_groups = np.array([work[replace(head, offset=0)] for head in heads]).reshape(-1, group).sum(1)
                (order,) = on_device(self.device, np.argsort(-of_groups, kind="stable"))
            self.cache[group] = order
        return self.cache[group]

    @cached_property
    def largest_stride(self) -> int:
        """In blocks, of all ranges of all heads."""
        return max(stride for head in self.pattern.heads for _, _, stride in head.bounds())

    @cached_property
    def heads_pair(self) -> bool:
        heads = self.pattern.heads
        return self.num_heads // self.num_kv_heads % 2 == 0 and all(
            heads[i] == heads[i + 1] for i in range(0, len(heads), 2)
        )

    @cached_property
    def _pair_distances(self) -> list[int] | None:
        ratio = self.num_heads // self.num_kv_heads
        groups = [self.pattern.heads[i : i + ratio] for i in range(0, self.num_heads, ratio)]
        if all(len(set(group)) == 1 for group in groups):
            return None
        last = [[head.bounds()[-1] for head in group] for group in groups]
        return [max((stride for _, end, stride in group if end is None), default=1) for group in last]

    @cached_property
    def pair_distances(self) -> torch.Tensor | None:
        """int32 [KV heads]: how far apart two key blocks lie that are attended by about the same query blocks, when the
        heads of a group have different patterns; None when no group has."""
        return None if self._pair_distances is None else on_device(self.device, self._pair_distances)[0]

    @cached_property
    def spare_columns(self) -> int:
        """How many pairs of key blocks a sequence may have beyond half of its blocks, because neighbours in a class
        have no partner."""
        return self.ranges.shape[1] if self._pair_distances is None else max(self._pair_distances)

    def key_columns(self, n_blocks: int) -> tuple[int, int]:
        """Pairs of key blocks of a KV head with n_blocks blocks, at most: (of the blocks of its last range, of all
        others)."""
        key = ("columns", n_blocks)
        if key not in self.cache:
            if self._pair_distances is not None:  # not read off the device: a new length must not wait for it
                rows = [(n_blocks // (2 * d) * d + min(d, n_blocks % (2 * d)), 0) for d in self._pair_distances]
            else:
                rows = [_columns_of_classes(head, n_blocks) for head in set(self.pattern.heads)]
            self.cache[key] = tuple(max(column) for column in zip(*rows))
        return self.cache[key]

    def _copy(self, device):
        tokens = None if self.tokens is None else self.tokens.to(device)
        return RangeLayout(self.pattern, self.ranges.to(device), tokens, self.tile_blocks)


@dataclass(frozen=True, eq=False)
class TableLayout(Layout):
    """A block mask as lists, by query block and by key block."""

    row_starts: torch.Tensor  # int64 [P, n + 1]: where the list of a query block begins in key_blocks
    key_blocks: torch.Tensor  # int32 [nonzeros], ascending in each row
    column_starts: torch.Tensor  # int64 [P, n + 1]: where the list of a key block begins in query_blocks
    query_blocks: torch.Tensor  # int32 [nonzeros], ascending in each column
    tile_blocks: int = 1

    @property
    def heads_pair(self) -> bool:
        ratio = self.num_heads // self.num_kv_heads
        return ratio % 2 == 0 and len(self.pattern.tables) <= self.num_kv_heads

    @property
    def tensors(self):
        return self.row_starts, self.key_blocks, self.column_starts, self.query_blocks

    def _copy(self, device):
        return TableLayout(self.pattern, *(tensor.to(device) for tensor in self.tensors))


def _shared_tile_blocks(pattern: RangePattern, most: int = 8) -> int:
    """Largest power of two T so that T neighbouring query blocks can share a tile: the tile's outer blocks then differ
    only at the ends of ranges, T - 1 key blocks each. Ranges shorter than that get smaller tiles, which is on the safe
    side."""
    if not pattern.is_kv_efficient:
        return 1
    tile = most
    for head in set(pattern.heads):
        ends = [end for _, end, _ in head.bounds() if end is not None]
        for previous, end in pairwise(ends):
            while tile > 1 and end - previous < tile - 1:
                tile //= 2
    return tile


def _columns_of_classes(head: HeadPattern, n_blocks: int) -> tuple[int, int]:
    """(pairs of members of the last stride, pairs of the members of each other stride that are not members of the
    next), summed."""
    members = [len(range(-head.offset % stride, n_blocks, stride)) for _, _, stride in head.bounds()]
    inner = [count - wider for count, wider in pairwise(members)]
    return -(-members[-1] // 2), sum(-(-count // 2) for count in inner)


def layout_for(pattern: Pattern) -> Layout:
    """build_layout at the first call; from then on the same one, which lives as long as the pattern. `Layout.to` has
    the copies on devices. Raises ValueError as build_layout."""
    return getattr(pattern, "_layout", None) or _first_layout(pattern)


@torch.compiler.assume_constant_result  # torch 2.11 cannot trace this call: a pattern is a frozen dataclass
def _first_layout(pattern: Pattern) -> Layout:
    layout = build_layout(pattern)
    object.__setattr__(pattern, "_layout", layout)
    return layout


@torch.compiler.assume_constant_result  # its tensors are not part of a graph
def build_layout(pattern: Pattern, device="cpu") -> Layout:
    """The layout of a pattern (already sliced for tensor parallelism) on a device.

    Raises ValueError for anything that is not a pattern, and for a device that torch does not know.
    """
    if not isinstance(pattern, RangePattern | BlockMaskPattern):
        raise ValueError(
            f"pattern={shown(pattern)}; expected a RangePattern or a BlockMaskPattern; use make_range_pattern(...), or "
            "BlockMaskPattern.from_csr or from_function"
        )
    device = check_device(device)
    if isinstance(pattern, RangePattern):
        most = max(len(head.bounds()) for head in pattern.heads)
        table = np.zeros((pattern.num_heads, most, 4), dtype=np.int32)
        table[:, :] = (NO_END, NO_END, 1, 0)
        for index, head in enumerate(pattern.heads):
            for position, (start, end, stride) in enumerate(head.bounds()):
                table[index, position] = (
                    min(start, NO_END),
                    NO_END if end is None else min(end, NO_END),
                    stride,
                    head.offset % stride,
                )
        tokens = [(head.window or 0, head.sink_tokens) for head in pattern.heads]
        tables = on_device(device, table, tokens)
        by_token = any(head.by_token for head in pattern.heads)
        return RangeLayout(pattern, tables[0], tables[1] if by_token else None, _shared_tile_blocks(pattern))
    row_starts, key_blocks, column_starts, query_blocks, base = [], [], [], [], 0
    for indptr, indices in pattern.tables:
        rows = np.repeat(np.arange(pattern.num_blocks, dtype=np.int32), np.diff(indptr))
        row_starts.append(indptr + base)
        key_blocks.append(indices)
        column_starts.append(
            base + np.concatenate([[0], np.cumsum(np.bincount(indices, minlength=pattern.num_blocks))])
        )
        query_blocks.append(rows[np.argsort(indices, kind="stable")])
        base += len(indices)
    blocks = on_device(device, np.concatenate(key_blocks), np.concatenate(query_blocks))
    starts = on_device(device, np.stack(row_starts), np.stack(column_starts), dtype=np.int64)
    return TableLayout(pattern, starts[0], blocks[0], starts[1], blocks[1])
