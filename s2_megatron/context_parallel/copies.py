"""The exchange of blocks by copy engines: every rank copies into the memory of the others, and no multiprocessor takes
part.

For ranks of one host whose GPUs reach each other's memory. NCCL's kernels hold multiprocessors for as long as they
send, which the attention beside them loses; a GPU's copy engines are idle. Ranks agree by flags in each other's memory,
which a stream writes and waits for (CUDA's stream memory operations), so neither the host nor a kernel waits;
cp_watch.py ends a process whose stream waits for too long.

Every rank has an arena that all see: flags, and two lanes, buffers for received blocks and for returned gradients. For
each lane and pair of ranks there is one permission to write:

free    in the sender's arena, set by the receiver once all that read its buffer is enqueued; taken back by the sender before it copies
full    in the receiver's arena, set by the sender behind its copies; taken back by the receiver when it has waited for it
early   likewise, set behind the copies of those rows that go first, where some do

A sender waits for all receivers, with or without rows for them, because buffers are laid out anew for each plan. A flag
that is written follows what its stream copied before (the driver's default: a fence of the whole system in front of the
write).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import numpy as np
import torch
import torch.distributed as dist

from s2_megatron.context_parallel.transport import Pending, Route, count_sent, one_host
from s2_megatron.context_parallel.watch import Board, Watch
from s2_megatron.printing import print_once

TRANSPORTS = ("auto", "copies", "collective")
FLAG_BYTES = 4096  # of an arena, before its lanes
LANES = 2  # blocks, gradients
WAIT, WRITE = "wait", "write"
FREE, FULL, EARLY = range(3)  # a lane may be written to; all rows are there; those that go first are there
TRIAL_SECONDS = 30
# (WAIT or WRITE, address of a 32-bit flag, value)
FlagOperation = tuple[str, int, int]


class Arena:
    """The memory of all ranks as one of them sees it.

    views: uint8 [FLAG_BYTES + all of lane_bytes] of every rank, the flags zero but those that free_flags names.
    compiled: makes of operations on flags what enqueues them on the current stream.
    """

    def __init__(
        self,
        rank: int,
        views: Sequence[torch.Tensor],
        lane_bytes: Sequence[int],
        compiled: Callable[[list[FlagOperation]], Callable],
    ):
        self.lane_bytes, size = tuple(lane_bytes), len(views)
        starts = [FLAG_BYTES + sum(lane_bytes[:lane]) for lane in range(LANES)]
        self.lanes = [[view[start : start + length] for view in views] for start, length in zip(starts, lane_bytes)]
        peers = [peer for peer in range(size) if peer != rank]

        def flag(owner: int, kind: int, lane: int, other: int) -> int:
            return views[owner].data_ptr() + 4 * flag_index(kind, lane, other, size)

        def await_own(kind: int, lane: int) -> list[FlagOperation]:
            mine = [flag(rank, kind, lane, peer) for peer in peers]
            return [(WAIT, address, 1) for address in mine] + [(WRITE, address, 0) for address in mine]

        def set_theirs(kind: int, lane: int) -> list[FlagOperation]:
            return [(WRITE, flag(peer, kind, lane, rank), 1) for peer in peers]

        self._await, self._set = (
            [[compiled(flags(kind, lane)) for lane in range(LANES)] for kind in (FREE, FULL, EARLY)]
            for flags in (await_own, set_theirs)
        )

    def send(self, lane: int, sent: torch.Tensor, route: Route, early_rows: Sequence[int] | None = None) -> None:
        """Copies the bytes of sent's rows to where other ranks expect them, when they may be written to; enqueued on
        the current stream. early_rows: of each piece of the route, how many of its last rows go before all others."""
        source, row_bytes = sent.view(-1).view(torch.uint8), _row_bytes(sent)
        pieces = route.pieces

        def copy(pieces):
            for peer, *rows in pieces:
                first, length, place = (row_bytes * number for number in rows)
                if length:
                    self.lanes[lane][peer][place : place + length].copy_(
                        source[first : first + length], non_blocking=True
                    )

        self._await[FREE][lane]()
        if early_rows is not None:
            left = [rows - early for (_, _, rows, _), early in zip(pieces, early_rows)]
            copy((peer, first + n, rows - n, place + n) for (peer, first, rows, place), n in zip(pieces, left))
            self._set[EARLY][lane]()
            pieces = [(peer, first, n, place) for (peer, first, _, place), n in zip(pieces, left)]
        copy(pieces)
        self._set[FULL][lane]()
        count_sent(row_bytes * sum(rows for _, _, rows, _ in route.pieces))

    def arrive(self, lane: int, kind: int) -> None:
        """The current stream waits until all ranks have sent all (FULL), or what goes first (EARLY)."""
        self._await[kind][lane]()

    def release(self, lane: int) -> None:
        """Others may write again, behind what the current stream holds."""
        self._set[FREE][lane]()


def flag_index(kind: int, lane: int, other: int, size: int) -> int:
    """Of a 32-bit flag among those of an arena. other: the rank it is about, of `size`."""
    return (kind * LANES + lane) * size + other


def free_flags(rank: int, size: int) -> list[int]:
    """The flags of a rank's new arena that are 1."""
    return [flag_index(FREE, lane, peer, size) for lane in range(LANES) for peer in range(size) if peer != rank]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.itemsize


class StreamsWait(Exception):
    """Streams wait for flags that do not come, so there is no other way from here."""


class PeerCopies:
    """Exchanges of one group through arenas that grow with what is sent.

    make_arena: (bytes of each lane) -> Arena, called by all ranks. watch: sees to it that none waits for ever. note:
    (address, number) enqueues on the current stream that the number is written to 64 bits of the host.
    """

    def __init__(self, make_arena: Callable[[Sequence[int]], Arena], watch: Watch, note: Callable[[int, int], None]):
        self._make_arena, self.watch, self._note = make_arena, watch, note
        self._arena = make_arena((0,) * LANES)
        self._reader = None

    def try_out(self, rank: int, size: int, device: torch.device) -> None:
        """An exchange of nothing on every lane. RuntimeError where a stream cannot write or wait for flags; StreamsWait
        where none arrives."""
        nothing, route = (
            torch.empty((0, 1), dtype=torch.uint8, device=device),
            Route.of(np.zeros((size, size), dtype=np.int64), rank),
        )
        for lane in range(LANES):
            pending = self.start(lane, nothing, (route,) * LANES, (), lambda: None)
            pending.result()
            pending.release()
        deadline = time.monotonic() + TRIAL_SECONDS
        while self.watch.arrived() < LANES:
            if time.monotonic() > deadline:
                who = f"rank {dist.get_rank()}: no flag of another GPU"
                raise StreamsWait(f"{who} arrived in {TRIAL_SECONDS} s; use --s2-cp-transport collective")
            time.sleep(1e-3)

    def reserve(self, row_bytes: int, routes: Sequence[Route]) -> Arena:
        """An arena with room for both lanes' rows of every rank, so of one size on all. A new one waits for the device
        and for all ranks."""
        needed = [-(-route.most * row_bytes // FLAG_BYTES) * FLAG_BYTES for route in routes]
        if any(more > length for more, length in zip(needed, self._arena.lane_bytes)):
            self._arena = self._make_arena([max(pair) for pair in zip(needed, self._arena.lane_bytes)])
        return self._arena

    def start(
        self,
        lane: int,
        sent: torch.Tensor,
        routes: Sequence[Route],
        held: tuple,
        prepare: Callable[[], None],
        early_rows=None,
    ) -> Pending:
        """Sends rows of sent [rows, ...], which `prepare` fills, along routes[lane]. routes: of both lanes, which
        follow each other. early_rows: as in Arena.send, None on all ranks or on none.

        The result's memory is the arena's: it has to be released, and read before that only.
        """
        route, row_bytes = routes[lane], _row_bytes(sent)
        arena = self.reserve(row_bytes, routes)
        rows = sum(route.received)
        received = arena.lanes[lane][route.rank][: rows * row_bytes].view(sent.dtype).view(rows, *sent.shape[1:])

        def work():
            prepare()
            arena.send(lane, sent, route, early_rows)

        free, early = (
            (lambda: arena.release(lane)),
            {} if early_rows is None else dict(came_early=lambda: self._arrive(arena, lane, EARLY)),
        )
        return Pending(received, (sent, *held), work, lambda: self._arrive(arena, lane, FULL), free, **early)

    def _arrive(self, arena: Arena, lane: int, kind: int) -> None:
        if torch.cuda.is_available():
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("an exchange by copies inside a CUDA graph; use --s2-cp-transport collective")
            stream = torch.cuda.current_stream()
            if self._reader is not None and self._reader != stream:
                stream.wait_stream(self._reader)  # exchanges of a lane arrive in their order
            self._reader = stream
        number = self.watch.issue()
        arena.arrive(lane, kind)
        self._note(self.watch.arrived_at, number)


def _stream_operations(operations: list[FlagOperation]) -> Callable[[], None]:
    """What enqueues operations on flags on the current stream, with RuntimeError where that is not possible.
    ImportError without bindings."""
    from cuda.bindings import driver

    kinds, batch = driver.CUstreamBatchMemOpType, []
    for kind, address, value in operations:
        parameters = driver.CUstreamBatchMemOpParams()
        name, flags, parameters.operation = (
            (
                "waitValue",
                int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ),
                kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32,
            )
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


def _note(address: int, number: int) -> None:
    """The current stream writes 64 bits to memory of the host that the GPU can reach."""
    from cuda.bindings import driver

    _checked(driver.cuStreamWriteValue64(torch.cuda.current_stream().cuda_stream, address, number, 0))


def _shareable(n_bytes: int, device: torch.device) -> torch.Tensor:
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.empty(n_bytes, dtype=torch.uint8, device=device)


def symmetric_arena(group, device: torch.device, lane_bytes: Sequence[int]) -> Arena:
    """An arena in CUDA memory that torch shares between processes. A collective call, which waits for the device."""
    import torch.distributed._symmetric_memory as symmetric_memory

    rank, size = group.rank(), group.size()
    torch.cuda.empty_cache()  # it is not torch's caching allocator that is asked
    memory = _shareable(FLAG_BYTES + sum(lane_bytes), device)
    flags = memory[:FLAG_BYTES].view(torch.int32).zero_()
    flags[free_flags(rank, size)] = 1
    torch.cuda.synchronize(device)  # the flags are there, and nothing reads an arena before, when others see this one
    handle = symmetric_memory.rendezvous(memory, group)
    views = [memory if peer == rank else handle.get_buffer(peer, memory.shape, torch.uint8) for peer in range(size)]
    return Arena(rank, views, lane_bytes, _stream_operations)


_known: dict = {}


def peer_copies(group, device: torch.device, transport: str) -> PeerCopies | None:
    """What copies blocks between the ranks of a group, or None where they travel by all_to_all_single. One for all
    layers. Says which, and why, where that was not the choice.

    transport: 'auto' copies where it can. A collective call, the first time. Raises ValueError for 'copies' where that
    is not possible, and StreamsWait where flags can be set but do not arrive.
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
        raise ValueError(
            f"--s2-cp-transport copies: {reason}; expected GPUs of one host that reach each other's memory; use auto "
            "or collective"
        )
    if device.type == "cuda" and transport != "collective":
        how = "copy engines, into each other's memory" if copies is not None else f"all_to_all_single ({reason})"
        print_once(f"S2: context-parallel ranks exchange blocks by {how}")
    return copies


def _try_copies(group, device: torch.device) -> tuple[PeerCopies | None, str | None]:
    """(copies, None), or (None, why not), on all ranks alike. Raises StreamsWait, which is the end of the run."""
    if not one_host(group):
        return None, "the ranks are on several hosts"
    # What a rank does alone is agreed on at once: the others would wait for one that does not come to the next step.
    _, reason = _agreed(group, lambda: (_stream_operations([]), _shareable(FLAG_BYTES, device)))
    board, reason = shared_board(group) if reason is None else (None, reason)
    if reason is not None:
        return None, reason
    undo = ExitStack()  # not a context: when streams wait, nothing of this can be undone
    undo.callback(board.close)

    def watched():
        watch = Watch(board, group.rank(), dist.get_process_group_ranks(group), lambda: timeout_of(group, device))
        undo.callback(watch.close)
        watch.wait_until_up(TRIAL_SECONDS)
        return watch

    def lock_memory():
        _lock(board)
        undo.callback(_unlock, board)

    def make():
        return PeerCopies(lambda lane_bytes: symmetric_arena(group, device, lane_bytes), watch, _note)

    watch, reason = _agreed(group, watched)
    if reason is None:
        _, reason = _agreed(group, lock_memory)
    if reason is None:
        copies, reason = _agreed(group, make)
    if reason is None:
        _, reason = _agreed(group, lambda: copies.try_out(group.rank(), group.size(), device))
    if reason is None:
        return copies, None
    undo.close()
    return None, reason


def shared_board(group) -> tuple[Board | None, str | None]:
    """(board of the ranks, None), or (None, why not), on all ranks alike."""
    first = group.rank() == 0
    path, reason = _agreed(group, lambda: Board.create(group.size()) if first else None)
    if reason is not None:
        return None, reason
    try:
        paths, boards = [path], []
        dist.broadcast_object_list(paths, group=group, group_src=0)
        _, reason = _agreed(group, lambda: boards.append(Board(paths[0])))
    finally:
        if first:
            os.unlink(path)
    if reason is None:
        return boards[0], None
    for board in boards:
        board.close()
    return None, reason


def _lock(board: Board) -> None:
    """Lets the GPU write to a board. Raises RuntimeError."""
    if error := int(torch.cuda.cudart().cudaHostRegister(board.address(), len(board.memory), 0)):
        _forget_error()
        raise RuntimeError(f"cudaHostRegister: error {error}")


def _unlock(board: Board) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(board.address())):
        _forget_error()


def _forget_error() -> None:
    """CUDA keeps it for the next one who asks, which would be a kernel that is right."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def timeout_of(group, device: torch.device) -> float:
    """Seconds until a collective of the group is given up, as it is now: Megatron shortens it after the first
    iteration."""
    return group._get_backend(device).options._timeout.total_seconds()


def _agreed(group, make: Callable):
    """(make(), None), or (None, why not) on all ranks where it fails on one."""
    made, reason = None, None
    try:
        made = make()
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        reason = f"rank {dist.get_rank()}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    reasons = [None] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    reason = next(filter(None, reasons), None)
    return (made, None) if reason is None else (None, reason)
