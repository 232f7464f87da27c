"""The transport of context parallelism: collectives that are counted, buffers of blocks, and the order of tokens over the ranks.

S/c tokens of one of c ranks, B batch, G KV heads, D head dim. A slot is one block of one KV head; a buffer of slots is
[slots, block, 2 (K, V), B, D], so that the rows of all slots have one stride.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
import torch.distributed as dist

from s2_megatron.cp_plan import ExchangePlan
from s2_megatron.layout import PackedSequence


@dataclass
class Traffic:
    """What this rank gave to its collectives for other ranks."""

    calls: int = 0
    bytes_sent: int = 0


_listeners: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts, at the collectives themselves, what this rank sends to others while the context is open."""
    traffic = Traffic()
    _listeners.append(traffic)
    try:
        yield traffic
    finally:
        _listeners.remove(traffic)


def _count(n_bytes: int) -> None:
    for traffic in _listeners:
        traffic.calls += 1
        traffic.bytes_sent += n_bytes


GRACE_SECONDS = 3.0  # ranks that wait for the same one give up a little apart


def _run(collective, group, *args) -> None:
    """collective(*args, group=group). Where it raises, as gloo does when a rank has died or has not come before the timeout, RuntimeError names
    the ranks of the group that did not come; under NCCL torch's watchdog ends the process instead, and its flight recorder knows."""
    try:
        collective(*args, group=group)
    except RuntimeError as error:
        raise RuntimeError(f"rank {dist.get_rank()}: context-parallel exchange failed; {_absent(group)}") from error


def _absent(group) -> str:
    """Which ranks did not come to a collective that failed here: the others fail there too, and all say so where all can read it."""
    ranks = dist.get_process_group_ranks(group)
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"s2_exchange_failed/{dist.get_rank()}", "1")
        time.sleep(GRACE_SECONDS)
        missing = [rank for rank in ranks if not store.check([f"s2_exchange_failed/{rank}"])]
    except RuntimeError:
        return f"one of the ranks {ranks} ended first"
    return f"did not come: rank {', '.join(map(str, missing))}" if missing else f"all of the ranks {ranks} came"


def all_to_all(received: torch.Tensor, sent: torch.Tensor, receive_counts, send_counts, group) -> None:
    """torch's all_to_all_single over dim 0, counted. Enqueued on the current stream; both tensors contiguous."""
    per_row = sent.numel() // sent.shape[0] * sent.itemsize if sent.shape[0] else 0
    _count(per_row * (sum(send_counts) - send_counts[group.rank()]))
    _run(dist.all_to_all_single, group, received, sent, list(receive_counts), list(send_counts))


def all_gather(tensor: torch.Tensor, group) -> torch.Tensor:
    """[size, *tensor.shape], counted."""
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    _count(tensor.numel() * tensor.itemsize * (group.size() - 1))
    _run(dist.all_gather_into_tensor, group, gathered.flatten(0, 1), tensor.contiguous())
    return gathered


def one_host(group) -> bool:
    """Whether the ranks of a group are on one host, by torchrun's numbering (or that of one process for each GPU)."""
    ranks_a_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(torch.cuda.device_count(), 1)
    return len({rank // ranks_a_host for rank in dist.get_process_group_ranks(group)}) == 1


@cache
def _side_stream(device: torch.device):
    return torch.cuda.Stream(device)


class Pending:
    """A collective that runs beside what is enqueued next. `result()` makes the current stream wait for it.

    It runs on a stream of its own, which first waits for what the current stream holds. All memory comes from the current stream's pool and is
    held here until the current stream waits, so that nothing of it is used again too early. On a CPU it has run when the constructor is back.
    received: the result, in which there is nothing before `result()`.
    """

    def __init__(self, received: torch.Tensor, held: tuple, collective: Callable[[], None]):
        self.received, self._held = received, held
        self._stream = _side_stream(received.device) if received.is_cuda else None
        if self._stream is None:
            collective()
            return
        self._stream.wait_stream(torch.cuda.current_stream(received.device))
        with torch.cuda.stream(self._stream):
            collective()

    def result(self) -> torch.Tensor:
        if self._stream is not None:
            torch.cuda.current_stream(self.received.device).wait_stream(self._stream)
        self._held = None
        return self.received


class BlockExchange:
    """An ExchangePlan on a device: sends blocks of K and V, and gradients back. group: the context-parallel process group.

    backend, where it is asked for: 'reference' copies with PyTorch, the others with a kernel.
    """

    def __init__(self, plan: ExchangePlan, group, device):
        self.plan, self.group = plan, group
        self.heads, self.blocks = (torch.from_numpy(index).to(device) for index in (plan.send_heads, plan.send_blocks))
        place = plan.send_blocks * plan.num_kv_heads + plan.send_heads
        order = np.argsort(place, kind="stable")  # a block's slots stay in the order of ranks
        starts = np.searchsorted(place[order], np.arange(len(plan.query_blocks) * plan.num_kv_heads + 1))
        # At least one entry: a kernel takes its address.
        parts = (starts, np.append(order, 0))
        self.return_starts, self.return_entries = (torch.as_tensor(part, dtype=torch.int32).to(device) for part in parts)

    def _buffer(self, like: torch.Tensor, slots: int, dtype=None) -> torch.Tensor:
        return like.new_empty((slots, self.plan.block_size, 2, like.shape[1], like.shape[3]), dtype=dtype or like.dtype)

    def start(self, key: torch.Tensor, value: torch.Tensor, backend: str) -> Pending:
        """Sends the blocks that other ranks need of key and value [S/c, B, G, D], any strides; the result is the buffer of received slots."""
        plan = self.plan
        sent, received = self._buffer(key, len(self.heads)), self._buffer(key, sum(plan.receive_counts))

        def collective():
            self._pack(key, value, sent, backend)
            all_to_all(received, sent, plan.receive_counts, plan.send_counts, self.group)

        return Pending(received, (key, value, sent), collective)

    def _pack(self, key, value, sent, backend) -> None:
        if backend != "reference":
            from s2_megatron.kernels import exchange

            exchange.pack(key, value, sent, self.heads, self.blocks)
            return
        for part, tensor in enumerate((key, value)):
            sent[:, :, part] = tensor.unflatten(0, (-1, self.plan.block_size))[self.blocks, :, :, self.heads]

    def start_return(self, gradients: torch.Tensor) -> Pending:
        """Sends the gradients of received slots back; the result has the gradients of the slots that were sent."""
        plan = self.plan
        returned = gradients.new_empty((len(self.heads), *gradients.shape[1:]))

        def collective():
            all_to_all(returned, gradients, plan.send_counts, plan.receive_counts, self.group)

        return Pending(returned, (gradients,), collective)

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
    """int64 [tokens]: where each token lies after the ranks' rows are joined, when every document was cut in zigzag by itself.

    borders: int32 [documents + 1], the documents with their padding, all lengths multiples of 2 * size. Computed on the device of `borders`,
    without waiting for it. Tokens after the last border count as one more document.
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
    """The part of packed documents that a rank's queries need, when the whole row was cut in zigzag as one sequence: documents without a
    query of this rank are empty, the others end with its last query. Without waiting for the device."""
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
    """This rank's rows of the sum over ranks of grad [S, ...], in fp32 (or wider) and in the order of ranks: a reduce-scatter whose result
    does not depend on how the library reduces. order: see cut_order."""
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
