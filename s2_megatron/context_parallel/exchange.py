"""The blocks of context parallelism on a device, on their way and back, and the order of tokens over the ranks.

S/c tokens of one of c ranks, B batch, G KV heads, D head dim. A slot is one block of one KV head; a buffer of slots is
[slots, block, 2 (K, V), B, D], so that the rows of all slots have one stride.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from s2_megatron.context_parallel.copies import PeerCopies
from s2_megatron.context_parallel.plan import ExchangePlan
from s2_megatron.context_parallel.transport import Pending, Route, all_to_all
from s2_megatron.ops.layout import PackedSequence


class BlockExchange:
    """An ExchangePlan on a device: sends blocks of K and V, and gradients back. group: the context-parallel process
    group. copies: what copies them into the memory of other ranks, None for all_to_all_single.

    backend, where it is asked for: 'reference' copies with PyTorch, the others with a kernel.
    """

    def __init__(self, plan: ExchangePlan, group, device, copies: PeerCopies | None = None):
        self.plan, self.group, self.copies = plan, group, copies
        self.routes = Route.of(plan.counts, plan.rank), Route.of(plan.counts.T, plan.rank)  # there and back
        self._early: dict[int, tuple[int, ...]] = {}
        self.heads, self.blocks = (torch.from_numpy(index).to(device) for index in (plan.send_heads, plan.send_blocks))
        place = plan.send_blocks * plan.num_kv_heads + plan.send_heads
        order = np.argsort(place, kind="stable")  # a block's slots stay in the order of ranks
        starts = np.searchsorted(place[order], np.arange(len(plan.query_blocks) * plan.num_kv_heads + 1))
        # At least one entry: a kernel takes its address.
        parts = (starts, np.append(order, 0))
        self.return_starts, self.return_entries = (
            torch.as_tensor(part, dtype=torch.int32).to(device) for part in parts
        )

    def start(self, key: torch.Tensor, value: torch.Tensor, backend: str, early_heads: int = 0) -> Pending:
        """Sends the blocks that other ranks need of key and value [S/c, B, G, D], any strides; the result is the buffer
        of received slots.

        early_heads: KV heads, the last ones, whose blocks go first, so that they are there before the result is
        (Pending.early); the same on all ranks. For blocks that are copied.
        """
        sent = key.new_empty((len(self.heads), self.plan.block_size, 2, key.shape[1], key.shape[3]))
        return self._travel(
            0, sent, (key, value), lambda: self._pack(key, value, sent, backend), self._early_rows(early_heads)
        )

    def start_return(self, gradients: torch.Tensor) -> Pending:
        """Sends the gradients of received slots back; the result has the gradients of the slots that were sent."""
        return self._travel(1, gradients, (), lambda: None, None)

    def _early_rows(self, heads: int) -> tuple[int, ...] | None:
        """Of each piece of the route, how many of its last rows go first; None where all go at once. A piece is ordered
        by KV head."""
        if heads and heads not in self._early:
            first_head, all_heads = self.plan.num_kv_heads - heads, self.plan.send_heads
            self._early[heads] = tuple(
                rows - int(np.searchsorted(all_heads[first : first + rows], first_head))
                for _, first, rows, _ in self.routes[0].pieces
            )
        return self._early[heads] if heads else None

    def reserve(self, head_dim: int, itemsize: int, batch: int = 1) -> None:
        """Makes room for what tensors of this kind will need, where blocks are copied; a collective call then."""
        if self.copies is not None:
            self.copies.reserve(self.plan.slot_bytes(head_dim, itemsize, batch), self.routes)

    def _travel(self, lane, sent, held, prepare, early_rows) -> Pending:
        """prepare: fills `sent`, on the stream of the transfer."""
        route = self.routes[lane]
        if self.copies is not None:
            return self.copies.start(lane, sent, self.routes, held, prepare, early_rows)
        assert early_rows is None, "a collective brings all at once"
        received = sent.new_empty((sum(route.received), *sent.shape[1:]))

        def work():
            prepare()
            all_to_all(received, sent, route.received, route.sent, self.group)

        return Pending(received, (sent, *held), work)

    def _pack(self, key, value, sent, backend) -> None:
        if backend != "reference":
            from s2_megatron.kernels.triton import exchange

            exchange.pack(key, value, sent, self.heads, self.blocks)
            return
        for part, tensor in enumerate((key, value)):
            sent[:, :, part] = tensor.unflatten(0, (-1, self.plan.block_size))[self.blocks, :, :, self.heads]

    def returned(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What attention_backward_dkdv adds of a buffer that came back: the slots of every block, rank after rank."""
        return (buffer, self.return_starts, self.return_entries) if len(buffer) else None


def slot_views(buffer: torch.Tensor, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a buffer of slots as sbhd tensors [slots * block, B, G, D], whose heads share memory."""
    rows = buffer.flatten(0, 1)
    return tuple(rows[:, part].unsqueeze(2).expand(-1, -1, num_kv_heads, -1) for part in range(2))


@lru_cache(maxsize=16)
def sequence_order(tokens: int, size: int, device: torch.device) -> torch.Tensor:
    """int64 [tokens]: where each token lies after the ranks' rows are joined, when one sequence was cut in zigzag."""
    return cut_order(torch.tensor([0, tokens], dtype=torch.int32), tokens, size).to(device)


def cut_order(borders: torch.Tensor, tokens: int, size: int) -> torch.Tensor:
    """int64 [tokens]: where each token lies after the ranks' rows are joined, when every document was cut in zigzag by
    itself.

    borders: int32 [documents + 1], the documents with their padding, all lengths multiples of 2 * size. Computed on the
    device of `borders`, without waiting for it. Tokens after the last border count as one more document.
    """
    position = torch.arange(tokens, device=borders.device)
    ends = torch.cat([borders[1:].long(), torch.full((1,), tokens, device=borders.device)])
    document = torch.searchsorted(ends, position, right=True).clamp(max=len(ends) - 1)
    start = torch.cat([borders.long(), ends[-1:]])[document]
    length = ends[document] - start
    chunk_length = (length // (2 * size)).clamp(min=1)
    inside = position - start
    chunk = inside // chunk_length
    second = chunk >= size
    rank = torch.where(second, 2 * size - 1 - chunk, chunk)
    local = start // size + torch.where(second, chunk_length, 0) + inside % chunk_length
    return rank * (tokens // size) + local


def documents_of_rank(packed: PackedSequence, rank: int, size: int, tokens: int) -> PackedSequence:
    """The part of packed documents that a rank's queries need, when the whole row was cut in zigzag as one sequence:
    documents without a query of this rank are empty, the others end with its last query. Without waiting for the
    device."""
    starts, lengths = packed.starts[:-1].long(), packed.cu_seqlens.diff().long()
    chunk = tokens // (2 * size)
    kept = torch.zeros_like(lengths)
    for number in (rank, 2 * size - 1 - rank):
        first, end = number * chunk, (number + 1) * chunk
        last = torch.minimum(starts + lengths, torch.full_like(starts, end))
        kept = torch.where((starts < end) & (starts + lengths > first), torch.maximum(kept, last - starts), kept)
    ends = torch.cat([kept.new_zeros(1), kept.cumsum(0)]).to(torch.int32)
    return PackedSequence(ends, packed.max_seqlen, packed.starts)


def returned_sum(grad: torch.Tensor, order: torch.Tensor, group) -> torch.Tensor:
    """This rank's rows of the sum over ranks of grad [S, ...], in fp32 (or wider) and in the order of ranks: a
    reduce-scatter whose result does not depend on how the library reduces. order: see cut_order."""
    size = group.size()
    by_rank = torch.empty_like(grad, memory_format=torch.contiguous_format)
    by_rank[order] = grad
    parts = torch.empty_like(by_rank)
    counts = [len(grad) // size] * size
    all_to_all(parts, by_rank, counts, counts, group)
    parts = parts.unflatten(0, (size, -1))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
