"""Which key blocks a KV head must keep while a text grows, and where they lie: the arithmetic of the compact cache.

A KV head keeps a block as long as one of its query heads, now or later, attends it. The memory of a head is a row of
slots of one block each. Positions, blocks and slots are computed on the device, without a look at their values, so that
a decoding step can be captured in a CUDA graph.

B batch, K the KV heads of one group of equal form, R query heads of a KV head, S slots, W places that one token is
written to. "Query block": that of the newest token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from s2_megatron.huggingface.rings import (
    Ring,
    assigned_slots,
    distinct,
    keep_everything,
    last_use,
    rings_of,
    rings_of_bounds,
    token_rings,
)
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import Pattern, RangePattern


class Slots:
    """The slots of KV heads that can be held in one tensor.

    kv_heads: the heads, ascending. n_blocks: of the longest text that fits. n_slots: S.
    """

    def __init__(self, block_size: int, kv_heads: Sequence[int], n_blocks: int, n_slots: int):
        self.block_size, self.kv_heads, self.n_blocks, self.n_slots = block_size, list(kv_heads), n_blocks, n_slots
        self._tables: dict[torch.device, dict[str, torch.Tensor]] = {}

    def _arrays(self) -> dict[str, np.ndarray]:
        """What the arithmetic reads."""
        raise NotImplementedError

    def head_index(self, device: torch.device) -> torch.Tensor:
        """kv_heads on a device. It is kept there, because a CUDA graph cannot capture a copy to the device."""
        return self._table(device)["kv_heads"]

    def _table(self, device: torch.device) -> dict[str, torch.Tensor]:
        if device not in self._tables:
            arrays = self._arrays() | {"kv_heads": np.array(self.kv_heads)}
            with torch.inference_mode(False):  # they stay, and a training may come after an evaluation
                # In order: otherwise what is computed of them is not, and masks are copied when they are flattened.
                tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
                self._tables[device] = {name: tensor.to(device) for name, tensor in tensors.items()}
        return self._tables[device]

    def held_blocks(self, query_block: torch.Tensor) -> torch.Tensor:
        """The key block in every slot, int64 [B, K or 1, S]; -1: none. query_block: int64 [B]."""
        raise NotImplementedError

    def attended_slots(self, query_block: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Whether a slot's block is attended, bool [B, K or 1, R or 1, S]. held: what held_blocks returned."""
        raise NotImplementedError

    def write_slots(self, query_block: torch.Tensor) -> torch.Tensor:
        """The slots that the query block itself lies in, int64 [B, K or 1, W]; repeated where they are fewer than W."""
        raise NotImplementedError

    def grown(self, n_blocks: int) -> tuple[Slots, torch.Tensor]:
        """Slots for a longer text, and where the present ones lie among them: int64 [S]."""
        raise NotImplementedError

    @property
    def form(self) -> tuple | None:
        """Equal for slots that can be joined; None: with no others."""
        return None

    def joined(self, members: Sequence[Slots]) -> Slots:
        """Slots of the heads of all members, which have this form: the K or 1 heads of one behind those of another."""
        raise NotImplementedError

    def token_mask(self, position: torch.Tensor) -> torch.Tensor:
        """Which of the kept tokens the token at `position` attends: bool [B, K or 1, R or 1, S * block_size]."""
        query_block = position // self.block_size
        held = self.held_blocks(query_block)
        # Numbers a slot, not a token: what is as large as the mask is written once.
        since = (position[:, None, None] - held * self.block_size)[:, :, None]
        until = since.where(self.attended_slots(query_block, held), -1)
        return (torch.arange(self.block_size, device=position.device) <= until[..., None]).flatten(-2)

    def write_tokens(self, position: torch.Tensor) -> torch.Tensor:
        """Where the token at `position` [B] is written: int64 [B, K or 1, W], places among S * block_size."""
        inside = (position % self.block_size)[:, None, None]
        return self.write_slots(position // self.block_size) * self.block_size + inside

    def held_tokens(self, n_tokens: int, device) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that are kept of a text of n_tokens: their positions, int64 [K or 1, S * block_size] (0 in an
        empty place), and bool of the same shape, False in an empty place."""
        held = self.held_blocks(torch.tensor([(n_tokens - 1) // self.block_size], device=device))[0]
        position = held[..., None] * self.block_size + torch.arange(self.block_size, device=device)
        there = (held[..., None] >= 0) & (position < n_tokens)
        return position.where(there, 0).flatten(-2), there.flatten(-2)


class RingSlots(Slots):
    """Slots of heads with ranges of distance. Every range (and every different offset among the query heads) has a ring
    of slots for the newest blocks of its stride; a block in two ranges' rings is held twice, as the range that it is
    attended by changes with the distance. Everything is arithmetic on a few numbers a ring."""

    def __init__(self, block_size: int, kv_heads: Sequence[int], rings: Sequence[Sequence[Ring]], applies, n_blocks):
        """rings: of every KV head, equal but for their residues; the first one has stride 1. applies: bool [R, rings],
        which of them a query head attends by."""
        self._rings = rings if any(list(of_head) != list(rings[0]) for of_head in rings) else rings[:1]
        self._applies, self._sizes = applies, np.array([ring.size(n_blocks) for ring in rings[0]])
        super().__init__(block_size, kv_heads, n_blocks, int(self._sizes.sum()))

    @property
    def form(self):
        rings = tuple(ring.form for ring in self._rings[0])
        sizes = (self.block_size, self.n_blocks, len(self.kv_heads), len(self._rings))
        return RingSlots, sizes, rings, self._applies.shape, self._applies.tobytes()

    def joined(self, members):
        rings = [of_head for slots in members for of_head in slots._rings]
        return RingSlots(self.block_size, range(len(rings)), rings, self._applies, self.n_blocks)

    def _arrays(self):
        sizes = self._sizes
        ring_of = np.repeat(np.arange(len(sizes)), sizes)
        first, limit, stride, _ = np.array([ring.numbers for ring in self._rings[0]]).T
        residues = np.array([[ring.residue for ring in of_head] for of_head in self._rings])
        base = np.cumsum(sizes) - sizes
        applies = self._applies[:1] if self._applies.all() else self._applies
        return dict(
            stride=stride,
            size=sizes,
            base=base,
            residue=residues,
            slot_stride=stride[ring_of],
            slot_size=sizes[ring_of],
            slot_index=np.arange(self.n_slots) - base[ring_of],
            slot_residue=residues[:, ring_of],
            slot_first=first[ring_of],
            slot_limit=limit[ring_of],
            slot_applies=applies[:, ring_of],
        )

    def held_blocks(self, query_block):
        table = self._table(query_block.device)
        last = (query_block[:, None, None] - table["slot_residue"]).div(table["slot_stride"], rounding_mode="floor")
        member = last - (last - table["slot_index"]) % table["slot_size"]
        # A residue is less than its stride, so what is before the text's start is less than 0.
        return (table["slot_residue"] + member * table["slot_stride"]).clamp(min=-1)

    def attended_slots(self, query_block, held):
        table = self._table(query_block.device)
        distance = query_block[:, None, None] - held
        attended = (held >= 0) & (distance >= table["slot_first"]) & (distance < table["slot_limit"])
        return attended[:, :, None] & table["slot_applies"]

    def write_slots(self, query_block):
        table = self._table(query_block.device)
        since = query_block[:, None, None] - table["residue"]
        slot = table["base"] + since.div(table["stride"], rounding_mode="floor") % table["size"]
        return slot.where(since % table["stride"] == 0, slot[..., :1])

    def grown(self, n_blocks):
        larger = RingSlots(self.block_size, self.kv_heads, self._rings, self._applies, n_blocks)
        starts = np.cumsum(larger._sizes) - larger._sizes
        places = [start + np.arange(size) for start, size in zip(starts, self._sizes)]
        return larger, torch.from_numpy(np.concatenate(places))


class WholeSlots(Slots):
    """Slots of heads whose query heads together attend every block, at whatever distance: one for each block."""

    def __init__(self, block_size: int, kv_heads: Sequence[int], ranges: Sequence[Sequence[Sequence[Ring]]], n_blocks):
        """ranges: [KV head][query head] of the group."""
        super().__init__(block_size, kv_heads, n_blocks, n_blocks)
        self._ranges = ranges
        self._dense = all(list(of_head) == [Ring(0, None, 1, 0)] for group in ranges for of_head in group)
        longest = max(len(of_head) for group in ranges for of_head in group)
        never = Ring(0, 0, 1, 0)
        padded = [[[*of_head, *[never] * (longest - len(of_head))] for of_head in group] for group in ranges]
        # [K, R, ranges, 4]
        fields = np.array([[[ring.numbers for ring in of_head] for of_head in group] for group in padded])
        for axis in (0, 1):
            if (fields == fields.take([0], axis)).all():
                fields = fields.take([0], axis)
        self._fields = fields

    @property
    def form(self):
        return WholeSlots, self.block_size, self.n_blocks, len(self.kv_heads), self._fields.shape[:2], self._dense

    def joined(self, members):
        ranges = [of_head for slots in members for of_head in slots._ranges[: len(self._fields)]]
        return WholeSlots(self.block_size, range(len(ranges)), ranges, self.n_blocks)

    def _arrays(self):
        names = ("first", "limit", "stride", "residue")
        return {name: self._fields[..., index, None] for index, name in enumerate(names)}

    def held_blocks(self, query_block):
        blocks = torch.arange(self.n_blocks, device=query_block.device)
        return blocks.where(blocks <= query_block[:, None, None], -1)

    def attended_slots(self, query_block, held):
        table = self._table(query_block.device)
        held = held[:, :, None, None]  # [B, 1, 1, 1, S] against [K, R, ranges, 1]
        distance = query_block[:, None, None, None, None] - held
        inside = (distance >= table["first"]) & (distance < table["limit"])
        return ((held >= 0) & inside & ((held - table["residue"]) % table["stride"] == 0)).any(3)

    def write_slots(self, query_block):
        return query_block[:, None, None]

    def write_tokens(self, position):
        return position[:, None, None]

    def token_mask(self, position):
        if not self._dense:
            return super().token_mask(position)
        # A sixth of the kernels, once for every new token.
        return torch.arange(self.n_slots * self.block_size, device=position.device) <= position[:, None, None, None]

    def grown(self, n_blocks):
        return WholeSlots(self.block_size, self.kv_heads, self._ranges, n_blocks), torch.arange(self.n_slots)


class TokenSlots(Slots):
    """Slots of heads with a window or a sink in tokens: rings for the blocks of which a token is attended, a slot more
    for each block of the sink that a text of n_blocks has, and a mask by token."""

    def __init__(self, block_size: int, kv_heads: Sequence[int], heads: Sequence[Sequence[HeadPattern]], n_blocks: int):
        """heads: [KV head][query head] of the group, of one form (`token_rings`)."""
        self._heads = heads
        self._seen, self._whole = (
            WholeSlots(block_size, kv_heads, [[rings_of_bounds(bounds(head), head) for head in of] for of in heads], 0)
            for bounds in (HeadPattern.touched_bounds, HeadPattern.bounds)
        )
        rings, applies, sinks = zip(*(token_rings(of) for of in heads))
        self._n_sink = min(sinks[0], n_blocks)
        self._rings = RingSlots(block_size, kv_heads, rings, applies[0], n_blocks)
        super().__init__(block_size, kv_heads, n_blocks, self._rings.n_slots + self._n_sink)

    @property
    def form(self):
        by_query_head = [slots._fields.shape[1] for slots in (self._seen, self._whole)]
        return TokenSlots, self._rings.form, self._n_sink, *by_query_head

    def joined(self, members):
        heads = [of_head for slots in members for of_head in slots._heads]
        return TokenSlots(self.block_size, range(len(heads)), heads, self.n_blocks)

    def _arrays(self):
        # One window and one sink for all query heads of a KV head.
        window, sink = ([getattr(of[0], name) or 0 for of in self._heads] for name in ("window", "sink_tokens"))
        window, sink = (np.array(tokens)[:, None, None] for tokens in (window, sink))
        return dict(window=window, sink=sink, sink_block=np.arange(self._n_sink))

    def held_blocks(self, query_block):
        rings, sink = self._rings.held_blocks(query_block), self._table(query_block.device)["sink_block"]
        sink = sink.where(sink <= query_block[:, None, None], -1).expand(-1, rings.shape[1], -1)
        return torch.cat([rings, sink], -1)

    def attended_slots(self, query_block, held):
        sink = self._table(query_block.device)["sink"]
        rings, first = held[..., : self._rings.n_slots], held[..., self._rings.n_slots :]
        shown = self._seen.attended_slots(query_block, rings) | (rings[:, :, None] * self.block_size < sink)
        shown = shown & self._rings.attended_slots(query_block, rings)
        # A block of the sink is shown by a ring as long as one has it.
        alone = (first >= 0)[:, :, None] & ~self._seen.attended_slots(query_block, first)
        shape = torch.broadcast_shapes(shown.shape[:3], alone.shape[:3])
        return torch.cat([part.expand(*shape, -1) for part in (shown, alone)], -1)

    def write_slots(self, query_block):
        rings, block = self._rings.write_slots(query_block), query_block[:, None, None]
        sink = (self._rings.n_slots + block).where(block < self._n_sink, rings[..., :1])
        return torch.cat([rings, sink], -1)

    def token_mask(self, position):
        table, query_block = self._table(position.device), position // self.block_size
        held = self.held_blocks(query_block)
        first = (held * self.block_size)[:, :, None]
        since = position[:, None, None, None] - first
        until = since.where(self.attended_slots(query_block, held), -1)[..., None]
        whole = self._whole.attended_slots(query_block, held)[..., None]
        inside = torch.arange(self.block_size, device=position.device)
        shown = whole | (inside > (since - table["window"])[..., None]) | (inside < (table["sink"] - first)[..., None])
        return (shown & (inside <= until)).flatten(-2)

    def grown(self, n_blocks):
        larger, (rings, places) = (
            TokenSlots(self.block_size, self.kv_heads, self._heads, n_blocks),
            self._rings.grown(n_blocks),
        )
        return larger, torch.cat([places, rings.n_slots + torch.arange(self._n_sink)])


class TableSlots(Slots):
    """Slots of a block mask: a block has its slot from when it is written until the last query block that attends it,
    by a table made once for a text of n_blocks. The text can be no longer than the mask."""

    def __init__(self, pattern: BlockMaskPattern, blocks: int):
        kv_heads = pattern.num_kv_heads
        ratio = pattern.num_heads // kv_heads
        until, slot = np.empty((kv_heads, blocks), np.int64), np.empty((kv_heads, blocks), np.int64)
        needed = 0
        for head in range(kv_heads):
            tables = {pattern.table_of(h) for h in range(head * ratio, (head + 1) * ratio)}
            until[head] = last_use(blocks, [pattern.tables[table] for table in tables])
            slot[head], count = assigned_slots(until[head])
            needed = max(needed, count)
        super().__init__(pattern.block_size, range(kv_heads), blocks, needed)
        by_query_head = len(pattern.tables) == pattern.num_heads and ratio > 1
        heads = range(0, pattern.num_heads, 1 if by_query_head else ratio)
        starts = np.cumsum([0, *(len(indices) for _, indices in pattern.tables)])
        # Where each head's rows start in the key blocks of all tables, one table after the other.
        rows = np.stack([pattern.tables[pattern.table_of(head)][0] + starts[pattern.table_of(head)] for head in heads])
        keys = np.concatenate([keys for _, keys in pattern.tables]).astype(np.int64)
        self._until, self._slot, self._rows, self._keys = until, slot, rows, keys
        self._query_heads = ratio if by_query_head else 1
        self._longest_row = int(np.diff(rows, axis=1).max())

    def _arrays(self):
        return dict(until=self._until, slot=self._slot, rows=self._rows, keys=self._keys)

    def held_blocks(self, query_block):
        table = self._table(query_block.device)
        blocks = torch.arange(self.n_blocks, device=query_block.device)
        query = query_block[:, None, None]
        alive = (blocks <= query) & (query <= table["until"])  # [B, K, blocks]
        held = query_block.new_full((len(query_block), len(self.kv_heads), self.n_slots + 1), -1)
        # Of the blocks that are not there, all go to one more slot, which is cut off.
        held.scatter_(2, table["slot"].where(alive, self.n_slots), blocks.expand_as(alive))
        return held[..., :-1]

    def attended_slots(self, query_block, held):
        table = self._table(query_block.device)
        first, end = (table["rows"][:, query_block + step].T for step in (0, 1))  # [B, heads]
        entry = first[..., None] + torch.arange(self._longest_row, device=query_block.device)
        inside = entry < end[..., None]
        # Behind the end of a row stand the keys of others, which may lie beyond the blocks that are kept.
        keys = table["keys"][entry.clamp(max=len(table["keys"]) - 1)].where(inside, 0)
        keys = keys.unflatten(1, (-1, self._query_heads))  # [B, K, R, row]
        slot = torch.gather(table["slot"].expand(len(keys), -1, -1), 2, keys.flatten(2)).view_as(keys)
        slot = slot.where(inside.view_as(keys), self.n_slots)
        attended = torch.zeros((*keys.shape[:3], self.n_slots + 1), dtype=torch.bool, device=keys.device)
        return attended.scatter_(3, slot, True)[..., :-1]

    def write_slots(self, query_block):
        return self._table(query_block.device)["slot"][:, query_block].T[..., None]


def kept_slots(pattern: Pattern, n_blocks: int) -> list[Slots]:
    """The slots of every KV head for texts of up to n_blocks blocks; heads that keep as much stand together.

    Raises ValueError for a block mask that is shorter.
    """
    if isinstance(pattern, BlockMaskPattern):
        pattern.check_length(n_blocks * pattern.block_size)
        return [TableSlots(pattern, n_blocks)]
    assert isinstance(pattern, RangePattern)
    ratio = pattern.num_heads // pattern.num_kv_heads
    groups: dict[tuple, list] = {}
    for kv_head in range(pattern.num_kv_heads):
        heads = pattern.heads[kv_head * ratio : (kv_head + 1) * ratio]
        if heads[0].by_token:
            rings, applies, n_sink = token_rings(heads)
            form = (tuple(ring.form for ring in rings), applies.shape, applies.tobytes(), n_sink)
            groups.setdefault(form, []).append((kv_head, heads))
            continue
        by_query_head = [rings_of(head) for head in heads]
        rings = distinct(by_query_head)
        if keep_everything(rings):
            groups.setdefault((), []).append((kv_head, by_query_head))
            continue
        applies = np.array([[ring in of_head for ring in rings] for of_head in by_query_head])
        form = (tuple(ring.form for ring in rings), applies.shape, applies.tobytes())
        groups.setdefault(form, []).append((kv_head, rings, applies))
    result: list[Slots] = []
    for form, members in groups.items():
        kv_heads, rings = [member[0] for member in members], [member[1] for member in members]
        if len(form) == 4:
            result.append(TokenSlots(pattern.block_size, kv_heads, rings, n_blocks))
        elif form:
            result.append(RingSlots(pattern.block_size, kv_heads, rings, members[0][2], n_blocks))
        else:
            result.append(WholeSlots(pattern.block_size, kv_heads, rings, n_blocks))
    return result
