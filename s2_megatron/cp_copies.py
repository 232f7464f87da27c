"""The exchange of blocks by copy engines: every rank copies into the memory of the others, and no multiprocessor takes part.

For ranks of one host whose GPUs reach each other's memory. NCCL's kernels hold multiprocessors for as long as they send, which the attention
beside them loses; a GPU's copy engines are idle. Ranks agree by flags in each other's memory, which a stream writes and waits for (CUDA's
stream memory operations), so neither the host nor a kernel waits; cp_watch.py ends a process whose stream waits for too long.

Every rank has an arena that all see: flags, and two lanes, buffers for received blocks and for returned gradients. For each lane and pair of
ranks there is one permission to write:

free    in the sender's arena, set by the receiver once all that read its buffer is enqueued; taken back by the sender before it copies
full    in the receiver's arena, set by the sender behind its copies; taken back by the receiver when it has waited for it

A sender waits for all receivers, with or without rows for them, because buffers are laid out anew for each plan. A flag that is written follows
what its stream copied before (the driver's default: a fence of the whole system in front of the write).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist

from s2_megatron.cp_transport import Pending, Route, count_sent, one_host
from s2_megatron.cp_watch import Watch, timeout_of
from s2_megatron.printing import print_once

TRANSPORTS = ("auto", "copies", "collective")
FLAG_BYTES = 4096  # of an arena, before its lanes
LANES = 2  # blocks, gradients
WAIT, WRITE = "wait", "write"
FREE, FULL = range(2)
TRIAL_SECONDS = 30
# (WAIT or WRITE, address of a 32-bit flag, value)
FlagOperation = tuple[str, int, int]


class Arena:
    """The memory of all ranks as one of them sees it.

    views: uint8 [FLAG_BYTES + all of lane_bytes] of every rank, the flags zero but those that free_flags names. compiled: makes of operations
    on flags what enqueues them on the current stream.
    """

    def __init__(
        self, rank: int, views: Sequence[torch.Tensor], lane_bytes: Sequence[int], compiled: Callable[[list[FlagOperation]], Callable]
    ):
        self.lane_bytes, size = tuple(lane_bytes), len(views)
        starts = [FLAG_BYTES + sum(lane_bytes[:lane]) for lane in range(LANES)]
        self.lanes = [[view[start : start + length] for view in views] for start, length in zip(starts, lane_bytes)]
        peers = [peer for peer in range(size) if peer != rank]

        def flag(owner: int, kind: int, lane: int, other: int) -> int:
            return views[owner].data_ptr() + 4 * flag_index(kind, lane, other, size)

        def await_own(kind: int, lane: int) -> list[FlagOperation]:
            mine = [flag(rank, kind, lane, peer) for peer in peers]
            # Taken back when all are there: until then they say who has come.
            return [(WAIT, address, 1) for address in mine] + [(WRITE, address, 0) for address in mine]

        def set_theirs(kind: int, lane: int) -> list[FlagOperation]:
            return [(WRITE, flag(peer, kind, lane, rank), 1) for peer in peers]

        self._rank, self._flags = rank, views[rank][:FLAG_BYTES]
        self._take = [compiled(await_own(FREE, lane)) for lane in range(LANES)]
        self._hand_over = [compiled(set_theirs(FULL, lane)) for lane in range(LANES)]
        self._await = [compiled(await_own(FULL, lane)) for lane in range(LANES)]
        self._release = [compiled(set_theirs(FREE, lane)) for lane in range(LANES)]

    def send(self, lane: int, sent: torch.Tensor, route: Route) -> None:
        """Copies the bytes of sent's rows to where other ranks expect them, when they may be written to; enqueued on the current stream."""
        source, n_bytes = sent.view(-1).view(torch.uint8), 0
        self._take[lane]()
        for peer, *rows in route.pieces:
            first, length, place = (_row_bytes(sent) * number for number in rows)
            self.lanes[lane][peer][place : place + length].copy_(source[first : first + length], non_blocking=True)
            n_bytes += length
        self._hand_over[lane]()
        count_sent(n_bytes)

    def arrive(self, lane: int) -> None:
        """The current stream waits until all ranks have sent."""
        self._await[lane]()

    def missing(self, lane: int) -> list[int]:
        """The ranks that a stream waits for: those that keep others from sending because they have not released what they received before, or
        else those that have not sent. Asked beside all streams."""
        size = len(self.lanes[lane])
        with torch.cuda.stream(torch.cuda.Stream(self._flags.device)) if self._flags.is_cuda else nullcontext():
            flags = self._flags.view(torch.int32).tolist()
        down = [[peer for peer in range(size) if peer != self._rank and not flags[flag_index(kind, lane, peer, size)]] for kind in (FREE, FULL)]
        # All down: this rank has taken them, and sent.
        return down[FREE] if 0 < len(down[FREE]) < size - 1 else down[FULL]

    def release(self, lane: int) -> None:
        """Others may write again, behind what the current stream holds."""
        self._release[lane]()


def flag_index(kind: int, lane: int, other: int, size: int) -> int:
    """Of a 32-bit flag among those of an arena. other: the rank it is about, of `size`."""
    return (kind * LANES + lane) * size + other


def free_flags(rank: int, size: int) -> list[int]:
    """The flags of a rank's new arena that are 1."""
    return [flag_index(FREE, lane, peer, size) for lane in range(LANES) for peer in range(size) if peer != rank]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.itemsize


class PeerCopies:
    """Exchanges of one group through arenas that grow with what is sent.

    make_arena: (bytes of each lane) -> Arena, called by all ranks. watch: sees to it that none waits for ever. note: enqueues on the current
    stream that watch.progress becomes a number.
    """

    def __init__(self, group, make_arena: Callable[[Sequence[int]], Arena], timeout: Callable[[], float], note: Callable):
        self._make_arena, self._note = make_arena, note
        self._arena = make_arena((0,) * LANES)
        progress = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=torch.cuda.is_available())

        def missing(lane):
            return [dist.get_global_rank(group, peer) for peer in self._arena.missing(lane)]

        self.watch, self._reader = Watch(progress, timeout, missing), None

    def try_out(self, rank: int, size: int, device: torch.device) -> None:
        """An exchange of nothing on every lane. RuntimeError where a stream cannot write or wait for flags; TimeoutError where none arrives,
        when streams wait that all else needs."""
        nothing, route = torch.empty((0, 1), dtype=torch.uint8, device=device), Route.of(np.zeros((size, size), dtype=np.int64), rank)
        try:
            for lane in range(LANES):
                pending = self.start(lane, nothing, (route,) * LANES, (), lambda: None)
                pending.result()
                pending.release()
        except RuntimeError:
            self.watch.forget()
            raise
        deadline = time.monotonic() + TRIAL_SECONDS
        while int(self.watch.progress[0]) < LANES:
            if time.monotonic() > deadline:
                who = f"rank {dist.get_rank()}: no flag of another GPU"
                raise TimeoutError(f"{who} arrived in {TRIAL_SECONDS} s; use --s2-cp-transport collective")
            time.sleep(1e-3)

    def reserve(self, row_bytes: int, routes: Sequence[Route]) -> Arena:
        """An arena with room for both lanes' rows of every rank, so of one size on all. A new one waits for the device and for all ranks."""
        needed = [-(-route.most * row_bytes // FLAG_BYTES) * FLAG_BYTES for route in routes]
        if any(more > length for more, length in zip(needed, self._arena.lane_bytes)):
            self._arena = self._make_arena([max(pair) for pair in zip(needed, self._arena.lane_bytes)])
        return self._arena

    def start(self, lane: int, sent: torch.Tensor, routes: Sequence[Route], held: tuple, prepare: Callable[[], None]) -> Pending:
        """Sends rows of sent [rows, ...], which `prepare` fills, along routes[lane]. routes: of both lanes, which follow each other.

        The result's memory is the arena's: it has to be released, and read before that only.
        """
        route, row_bytes = routes[lane], _row_bytes(sent)
        arena = self.reserve(row_bytes, routes)
        rows = sum(route.received)
        received = arena.lanes[lane][route.rank][: rows * row_bytes].view(sent.dtype).view(rows, *sent.shape[1:])

        def work():
            prepare()
            arena.send(lane, sent, route)

        return Pending(received, (sent, *held), work, lambda: self._arrive(arena, lane), lambda: arena.release(lane))

    def _arrive(self, arena: Arena, lane: int) -> None:
        if torch.cuda.is_available():
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("an exchange by copies inside a CUDA graph; use --s2-cp-transport collective")
            stream = torch.cuda.current_stream()
            if self._reader is not None and self._reader != stream:
                stream.wait_stream(self._reader)  # exchanges of a lane arrive in their order
            self._reader = stream
        number = self.watch.issue(lane)
        arena.arrive(lane)
        self._note(self.watch.progress, number)


def _stream_operations(operations: list[FlagOperation]) -> Callable[[], None]:
    """What enqueues operations on flags on the current stream, with RuntimeError where that is not possible. ImportError without bindings."""
    from cuda.bindings import driver

    kinds, batch = driver.CUstreamBatchMemOpType, []
    for kind, address, value in operations:
        parameters = driver.CUstreamBatchMemOpParams()
        name, flags, parameters.operation = (
            ("waitValue", int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ), kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32)
            if kind == WAIT
            else ("writeValue", 0, kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32)
        )
        part = getattr(parameters, name)
        part.operation, part.flags = parameters.operation, flags
        part.address, part.value = driver.CUdeviceptr(address), driver.cuuint32_t(value)
        setattr(parameters, name, part)
        batch.append(parameters)

    def enqueue():
        _checked(driver.cuStreamBatchMemOp(torch.cuda.current_stream().cuda_stream, len(batch), batch, 0))

    return enqueue


def _checked(result: tuple) -> None:
    """Raises RuntimeError when a driver's function did not succeed."""
    if int(result[0]):
        raise RuntimeError(f"CUDA driver: {result[0].name}")


def _note(progress: torch.Tensor, number: int) -> None:
    """The current stream writes a number to pinned memory of the host."""
    from cuda.bindings import driver

    _checked(driver.cuStreamWriteValue32(torch.cuda.current_stream().cuda_stream, progress.data_ptr(), number, 0))


def symmetric_arena(group, device: torch.device, lane_bytes: Sequence[int]) -> Arena:
    """An arena in CUDA memory that torch shares between processes. A collective call, which waits for the device."""
    import torch.distributed._symmetric_memory as symmetric_memory

    rank, size = group.rank(), group.size()
    torch.cuda.empty_cache()  # it is not torch's caching allocator that is asked
    memory = symmetric_memory.empty(FLAG_BYTES + sum(lane_bytes), dtype=torch.uint8, device=device)
    flags = memory[:FLAG_BYTES].view(torch.int32).zero_()
    flags[free_flags(rank, size)] = 1
    torch.cuda.synchronize(device)  # the flags are there, and nothing reads an arena before, when others see this one
    handle = symmetric_memory.rendezvous(memory, group)
    views = [memory if peer == rank else handle.get_buffer(peer, memory.shape, torch.uint8) for peer in range(size)]
    return Arena(rank, views, lane_bytes, _stream_operations)


_known: dict = {}


def peer_copies(group, device: torch.device, transport: str) -> PeerCopies | None:
    """What copies blocks between the ranks of a group, or None where they travel by all_to_all_single. One for all layers. Says which, and why,
    where that was not the choice.

    transport: 'auto' copies where it can. A collective call, the first time. Raises ValueError for 'copies' where that is not possible.
    """
    if transport == "collective":
        copies, reason = None, "--s2-cp-transport collective"
    elif device.type != "cuda":
        copies, reason = None, "there is no GPU"
    else:
        if (group, device) not in _known:
            _known[group, device] = _try_copies(group, device)
        copies, reason = _known[group, device]
    if transport == "copies" and copies is None:
        raise ValueError(f"--s2-cp-transport copies: {reason}; expected GPUs of one host that reach each other's memory; use auto "
                         "or collective")
    if device.type == "cuda" and transport != "collective":
        how = "copy engines, into each other's memory" if copies is not None else f"all_to_all_single ({reason})"
        print_once(f"S2: context-parallel ranks exchange blocks by {how}")
    return copies


def _try_copies(group, device: torch.device) -> tuple[PeerCopies | None, str | None]:
    """(copies, None), or (None, why not), on all ranks alike."""
    if not one_host(group):
        return None, "the ranks are on several hosts"
    # First what a rank finds out alone: the arenas are made together, and would wait for a rank that does not come.
    _, reason = _agreed(group, lambda: _stream_operations([]))
    if reason is not None:
        return None, reason

    def make():
        return PeerCopies(group, lambda lane_bytes: symmetric_arena(group, device, lane_bytes), lambda: timeout_of(group, device), _note)

    copies, reason = _agreed(group, make)
    if reason is None:
        _, reason = _agreed(group, lambda: copies.try_out(group.rank(), group.size(), device))
    return (copies, None) if reason is None else (None, reason)


def _agreed(group, make: Callable):
    """(make(), None), or (None, why not) on all ranks where it fails on one."""
    made, reason = None, None
    try:
        made = make()
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = f"rank {dist.get_rank()}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    reasons = [None] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    reason = next(filter(None, reasons), None)
    return (made, None) if reason is None else (None, reason)
