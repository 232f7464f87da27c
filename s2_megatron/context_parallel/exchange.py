"""What travels between context-parallel ranks, and how it is enqueued: collectives that count their bytes, and the
exchange of blocks of K and V, which runs beside the attention that does not need them.

S/c tokens of one of c ranks, B batch, G KV heads, D head dim. A slot is one block of one KV head; a buffer of slots is
[slots, block, 2 (K, V), B, D], so that the rows of all slots have one stride.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.distributed as dist

from s2_megatron.context_parallel.plan import ExchangePlan
from s2_megatron.ops.attended_blocks import split_blocks
from s2_megatron.ops.device_lists import parts_of_block

# Bytes a second that a rank receives. Through NVLink, by NCCL beside attention: 150e9 and 167e9 measured on four H200s
# (115 MB in 0.77 and 0.69 ms). Between hosts: a network of 400 Gb/s a GPU, not measured.
NVLINK_RATE, NETWORK_RATE = 170e9, 40e9
GRACE_SECONDS = 3.0  # ranks that wait for the same one give up a little apart


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


def _run(collective, group, *args) -> None:
    """collective(*args, group=group). Where it raises, as gloo does when a rank has died or has not come before the
    timeout, RuntimeError names the ranks of the group that did not come; under NCCL torch's watchdog ends the process
    instead, and its flight recorder has what each rank waited for."""
    try:
        collective(*args, group=group)
    except RuntimeError as error:
        raise RuntimeError(f"rank {dist.get_rank()}: context-parallel exchange failed; {_absent(group)}") from error


def _absent(group) -> str:
    """Which ranks did not come to a collective that failed here: the others fail there too, and all write that into
    the store, which all can read."""
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
    """torch's all_to_all_single over dim 0, counted. Enqueued on the current stream; both tensors contiguous.

    receive_counts, send_counts: rows from and to every rank of the group. Raises RuntimeError as _run does.
    """
    per_row = sent.numel() // sent.shape[0] * sent.itemsize if sent.shape[0] else 0
    _count(per_row * (sum(send_counts) - send_counts[group.rank()]))
    _run(dist.all_to_all_single, group, received, sent, list(receive_counts), list(send_counts))


def all_gather(tensor: torch.Tensor, group) -> torch.Tensor:
    """[ranks, *tensor.shape], counted. Raises RuntimeError as _run does."""
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    _count(tensor.numel() * tensor.itemsize * (group.size() - 1))
    _run(dist.all_gather_into_tensor, group, gathered.flatten(0, 1), tensor.contiguous())
    return gathered


def one_host(group) -> bool:
    """Whether the ranks of a group are on one host, by torchrun's numbering (or that of one process for each GPU)."""
    ranks_a_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(torch.cuda.device_count(), 1)
    return len({rank // ranks_a_host for rank in dist.get_process_group_ranks(group)}) == 1


def receive_rate(group) -> float:
    """Bytes a second that a rank of the group is expected to receive."""
    return NVLINK_RATE if one_host(group) else NETWORK_RATE


@cache
def _side_stream(device: torch.device):
    return torch.cuda.Stream(device)


class Pending:
    """A transfer that runs beside what is enqueued next: `work`, which fills `received`, on a stream of its own that
    first waits for what the current stream holds. On a CPU it has run when the constructor returns.

    received: the result, which may be read after `result()`. held: tensors that must not be freed before.
    """

    def __init__(self, received: torch.Tensor, held: tuple, work: Callable[[], None]):
        self.received, self._held = received, held
        self._stream = _side_stream(received.device) if received.is_cuda else None
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(received.device))
        with torch.cuda.stream(self._stream):
            work()

    def result(self) -> torch.Tensor:
        """The received rows, for what is enqueued on the current stream from now on.

        `received` and what is held come from the current stream's memory pool. They are referenced here until that
        stream waits for the transfer, so the pool cannot hand out their memory too early.
        """
        if self._stream is not None:
            torch.cuda.current_stream(self.received.device).wait_stream(self._stream)
        self._held = None
        return self.received


class Exchange:
    """Slots of K and V that ranks send to each other, and gradients that come back. plan: has this `rank`, and
    `counts`, int [ranks, ranks], how many slots each sends to each. group: the context-parallel process group."""

    def __init__(self, plan, group):
        self.plan, self.group = plan, group

    def start_return(self, gradients: torch.Tensor) -> Pending:
        """Sends the gradients of received slots back; the result has the gradients of the slots that were sent."""
        return self._travel(self.plan.counts.T, gradients, (), lambda: None)

    def _travel(self, counts: np.ndarray, sent: torch.Tensor, held: tuple, prepare: Callable[[], None]) -> Pending:
        """counts: int[ranks, ranks], slots from each rank to each. prepare: fills `sent`, on the transfer's stream."""
        to_each, from_each = counts[self.plan.rank].tolist(), counts[:, self.plan.rank].tolist()
        received = sent.new_empty((sum(from_each), *sent.shape[1:]))

        def work():
            prepare()
            all_to_all(received, sent, from_each, to_each, self.group)

        return Pending(received, (sent, *held), work)


class BlockExchange(Exchange):
    """An ExchangePlan on a device: sends blocks of K and V, and gradients back.

    backend, where it is asked for: 'reference' packs with PyTorch, the others with a kernel.
    """

    def __init__(self, plan: ExchangePlan, group, device):
        super().__init__(plan, group)
        self.heads, self.blocks = (torch.from_numpy(index).to(device) for index in (plan.send_heads, plan.send_blocks))
        # Of what the kernels compute at once: parts of a large block, which lie one after the other in its slot.
        self.parts = parts_of_block(plan.block_size)
        place = split_blocks(plan.send_blocks, self.parts) * plan.num_kv_heads + plan.send_heads.repeat(self.parts)
        order = np.argsort(place, kind="stable")  # a block's slots stay in the order of ranks
        n_blocks = len(plan.query_blocks) * self.parts
        starts = np.searchsorted(place[order], np.arange(n_blocks * plan.num_kv_heads + 1))
        # At least one entry: a kernel takes its address.
        parts = (starts, np.append(order, 0))
        self.return_starts, self.return_entries = (
            torch.as_tensor(part, dtype=torch.int32).to(device) for part in parts
        )

    def start(self, key: torch.Tensor, value: torch.Tensor, backend: str) -> Pending:
        """Sends the blocks that other ranks need of key and value [S/c, B, G, D], any strides; the result is the buffer
        of received slots."""
        sent = key.new_empty((len(self.heads), self.plan.block_size, 2, key.shape[1], key.shape[3]))
        counts = self.plan.counts
        return self._travel(counts, sent, (key, value), lambda: self._pack(key, value, sent, backend))

    def _pack(self, key, value, sent, backend) -> None:
        if backend != "reference":
            from s2_megatron.kernels.triton import exchange

            exchange.pack(key, value, sent, self.heads, self.blocks)
            return
        for part, tensor in enumerate((key, value)):
            sent[:, :, part] = tensor.unflatten(0, (-1, self.plan.block_size))[self.blocks, :, :, self.heads]

    def returned(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What attention_backward_dkdv adds of a buffer that came back: the slots of every block, rank after rank."""
        slots = buffer.unflatten(1, (self.parts, -1)).flatten(0, 1)
        return (slots, self.return_starts, self.return_entries) if len(buffer) else None


def slot_views(buffer: torch.Tensor, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a buffer of slots as sbhd tensors [slots * block, B, G, D], whose heads share memory."""
    rows = buffer.flatten(0, 1)
    return tuple(rows[:, part].unsqueeze(2).expand(-1, -1, num_kv_heads, -1) for part in range(2))
