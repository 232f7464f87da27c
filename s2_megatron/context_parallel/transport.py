"""The transport of context parallelism: collectives that are counted, and work that runs beside what is enqueued
next."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist


class Route(NamedTuple):
    """Who sends how many rows to whom, as one rank sees it. Rows are sent in the order of the ranks that get them, and
    received in the order of those they come from."""

    rank: int
    sent: tuple[int, ...]  # to each rank
    received: tuple[int, ...]  # from each rank
    pieces: tuple[
        tuple[int, int, int, int], ...
    ]  # (rank, first row, rows, their place among those it receives) for each that gets any
    most: int  # rows that a rank receives, of all ranks

    @classmethod
    def of(cls, counts: np.ndarray, rank: int) -> Route:
        """counts: int[size, size], rows from each rank to each."""
        sent, received, places = (row.tolist() for row in (counts[rank], counts[:, rank], counts[:rank].sum(0)))
        others = [
            (rank + step) % len(sent) for step in range(1, len(sent))
        ]  # so that not all ranks send to the same one at a time
        pieces = tuple((peer, sum(sent[:peer]), sent[peer], places[peer]) for peer in others if sent[peer])
        return cls(rank, tuple(sent), tuple(received), pieces, int(counts.sum(0).max()))


@dataclass
class Traffic:
    """What this rank gave to its collectives, or copied, for other ranks."""

    calls: int = 0
    bytes_sent: int = 0


_listeners: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts, at the collectives and the copies themselves, what this rank sends to others while the context is
    open."""
    traffic = Traffic()
    _listeners.append(traffic)
    try:
        yield traffic
    finally:
        _listeners.remove(traffic)


def count_sent(n_bytes: int) -> None:
    for traffic in _listeners:
        traffic.calls += 1
        traffic.bytes_sent += n_bytes


GRACE_SECONDS = 3.0  # ranks that wait for the same one give up a little apart


def _run(collective, group, *args) -> None:
    """collective(*args, group=group). Where it raises, as gloo does when a rank has died or has not come before the
    timeout, RuntimeError names the ranks of the group that did not come; under NCCL torch's watchdog ends the process
    instead, and its flight recorder knows."""
    try:
        collective(*args, group=group)
    except RuntimeError as error:
        raise RuntimeError(f"rank {dist.get_rank()}: context-parallel exchange failed; {_absent(group)}") from error


def _absent(group) -> str:
    """Which ranks did not come to a collective that failed here: the others fail there too, and all say so where all
    can read it."""
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
    count_sent(per_row * (sum(send_counts) - send_counts[group.rank()]))
    _run(dist.all_to_all_single, group, received, sent, list(receive_counts), list(send_counts))


def all_gather(tensor: torch.Tensor, group) -> torch.Tensor:
    """[size, *tensor.shape], counted."""
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    count_sent(tensor.numel() * tensor.itemsize * (group.size() - 1))
    _run(dist.all_gather_into_tensor, group, gathered.flatten(0, 1), tensor.contiguous())
    return gathered


# Bytes a second that a rank receives. By copy engines through NVLink: 259e9 to 285e9 for 120 MB on four H200s
# (NOTES.md, version 40). By NCCL through NVLink, beside attention: 150e9 and 167e9 there (115 MB in 0.77 and 0.69 ms).
# Through a network of 400 Gb/s a GPU.
COPY_RATE, LINK_RATE, NETWORK_RATE = 260e9, 170e9, 40e9


def one_host(group) -> bool:
    """Whether the ranks of a group are on one host, by torchrun's numbering (or that of one process for each GPU)."""
    ranks_a_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(torch.cuda.device_count(), 1)
    return len({rank // ranks_a_host for rank in dist.get_process_group_ranks(group)}) == 1


@cache
def _side_stream(device: torch.device):
    return torch.cuda.Stream(device)


def _nothing() -> None:
    pass


class Pending:
    """A transfer that runs beside what is enqueued next: `work`, which fills `received`, on a stream of its own that
    first waits for what the current stream holds. On a CPU it has run when the constructor is back.

    received: the result, in which there is nothing before `early()` or `result()`. held: what must not be freed before.
    came_early: enqueued by `early()` on the current stream. arrived: enqueued there by `result()` when it has waited
    for the work. free: enqueued by `release()`.
    """

    def __init__(
        self,
        received: torch.Tensor,
        held: tuple,
        work: Callable[[], None],
        arrived=_nothing,
        free=_nothing,
        came_early=_nothing,
    ):
        self.received, self._held, self._arrived, self._free, self._came_early = (
            received,
            held,
            arrived,
            free,
            came_early,
        )
        self._stream = _side_stream(received.device) if received.is_cuda else None
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(received.device))
        with torch.cuda.stream(self._stream):
            work()

    def early(self) -> None:
        """What is enqueued on the current stream from now on may read what was to come first; nothing, where all comes
        at once."""
        self._came_early()
        self._came_early = _nothing

    def result(self) -> torch.Tensor:
        """The received rows, for what is enqueued on the current stream from now on. What is held, and what is received
        by a collective, comes from that stream's pool and has been held here until it waits, so that nothing of it is
        used again too early."""
        if self._stream is not None:
            torch.cuda.current_stream(self.received.device).wait_stream(self._stream)
        self.early()  # in any case: what it waits for must not be taken for that of the next transfer
        self._arrived()
        self._held = None
        return self.received

    def kept(self) -> torch.Tensor:
        """The result, for longer than until it is released."""
        return self.received if self._free is _nothing else self.received.clone()

    def release(self) -> None:
        """To be called when all that reads the result is enqueued, on the current stream. Another transfer may then
        write to its memory."""
        self._free()
