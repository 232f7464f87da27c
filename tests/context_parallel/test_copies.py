"""Which way blocks of context parallelism take, what is said of it, and the trial of copies. What copies bring:
test_gradients.py."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from s2_megatron.context_parallel import copies as cp_copies
from s2_megatron.context_parallel.transport import Pending, Route

GPU = torch.device("cuda", 0)


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(cp_copies, "print_once", lines.append)
    monkeypatch.setattr(cp_copies, "_known", {})
    return lines


def test_which_transport(said, monkeypatch):
    group = object()
    monkeypatch.setattr(cp_copies, "_try_copies", lambda *_: ("copies", None))
    assert cp_copies.peer_copies(group, GPU, "collective") is None
    assert cp_copies.peer_copies(group, GPU, "auto") == cp_copies.peer_copies(group, GPU, "copies") == "copies"
    assert said == ["S2: context-parallel ranks exchange blocks by copy engines, into each other's memory"] * 2
    assert cp_copies.peer_copies(group, torch.device("cpu"), "auto") is None and len(said) == 2, (
        "a CPU has no other choice"
    )


def test_where_copies_are_not_possible(said, monkeypatch):
    monkeypatch.setattr(cp_copies, "one_host", lambda group: False)
    assert cp_copies.peer_copies("group", GPU, "auto") is None
    assert said == ["S2: context-parallel ranks exchange blocks by all_to_all_single (the ranks are on several hosts)"]
    with pytest.raises(
        ValueError,
        match=r"--s2-cp-transport copies: the ranks are on several hosts; expected GPUs of one host .*; use auto",
    ):
        cp_copies.peer_copies("group", GPU, "copies")
    with pytest.raises(ValueError, match="copies: there is no GPU"):
        cp_copies.peer_copies("group", torch.device("cpu"), "copies")


def arena_of(compiled, lane_bytes=(0,) * cp_copies.LANES):
    """Of rank 0 of two."""
    views = [torch.zeros(cp_copies.FLAG_BYTES + sum(lane_bytes), dtype=torch.uint8, device="cpu") for _ in range(2)]
    return cp_copies.Arena(0, views, lane_bytes, compiled)


class Seen:
    """Watches nothing."""

    def __init__(self):
        self.number, self.arrived_at = 0, ctypes.c_uint64(0)

    def issue(self):
        self.number += 1
        return self.number

    def arrived(self):
        return self.arrived_at.value


def test_the_trial(monkeypatch):
    monkeypatch.setattr(cp_copies, "TRIAL_SECONDS", 0.1)
    monkeypatch.setattr(cp_copies.dist, "get_rank", lambda: 0)

    def trial(note, watch):
        copies = cp_copies.PeerCopies(lambda lane_bytes: arena_of(lambda operations: lambda: None), watch, note)
        copies.try_out(0, 2, torch.device("cpu"))
        return watch

    def arrives(place, number):
        place.value = number

    def refuses(place, number):
        raise RuntimeError("CUDA_ERROR_NOT_SUPPORTED")

    assert trial(arrives, Seen()).number == cp_copies.LANES
    with pytest.raises(
        cp_copies.StreamsWait, match=r"rank 0: no flag of another GPU arrived in .* s; use --s2-cp-transport collective"
    ):
        trial(lambda place, number: None, Seen())
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        trial(refuses, Seen())


def test_what_the_ranks_tell_each_other(monkeypatch):
    monkeypatch.setattr(cp_copies.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        cp_copies.dist,
        "all_gather_object",
        lambda reasons, reason, group: reasons.__setitem__(slice(None), [reason, None]),
    )
    group = SimpleNamespace(size=lambda: 2)

    def fails(error):
        def make():
            raise error

        return make

    assert cp_copies._agreed(group, lambda: 5) == (5, None)
    assert cp_copies._agreed(group, fails(OSError("no room\nat all"))) == (None, "rank 0: OSError: no room")
    with pytest.raises(cp_copies.StreamsWait):
        cp_copies._agreed(group, fails(cp_copies.StreamsWait()))


def test_flags_of_an_arena_are_apart():
    indices = [
        cp_copies.flag_index(kind, lane, other, 8)
        for kind in range(3)
        for lane in range(cp_copies.LANES)
        for other in range(8)
    ]
    assert len(set(indices)) == len(indices) and 4 * max(indices) < cp_copies.FLAG_BYTES
    assert len(cp_copies.free_flags(3, 8)) == 14


def test_what_goes_first_is_there_when_its_flag_is_set():
    """Of three ranks, rank 0 sends 3 rows to rank 1, two of them first, and 4 to rank 2, none first; and the other way
    round."""
    for early in ((2, 0), (0, 4), (3, 4)):
        views = [torch.zeros(cp_copies.FLAG_BYTES + 2 * 64, dtype=torch.uint8, device="cpu") for _ in range(3)]
        lanes = [view[cp_copies.FLAG_BYTES :] for view in views]
        seen = []

        def compiled(operations, views=views, lanes=lanes, seen=seen):
            written = [address - view.data_ptr() for view in views for kind, address, _ in operations
                       if kind == cp_copies.WRITE and 0 <= address - view.data_ptr() < cp_copies.FLAG_BYTES]  # fmt: skip
            return lambda: seen.append((written, [lane.clone() for lane in lanes]))

        route = Route(0, (0, 3, 4), (0, 0, 0), ((1, 0, 3, 1), (2, 3, 4, 2)), 8)
        sent = torch.arange(1, 15, dtype=torch.uint8).view(7, 2)
        cp_copies.Arena(0, views, (64, 64), compiled).send(0, sent, route, early)
        (_, before), (first_flags, first), (last_flags, last) = seen
        assert not any(lane.any() for lane in before) and not set(first_flags) & set(last_flags)
        assert first_flags == [4 * cp_copies.flag_index(cp_copies.EARLY, 0, 0, 3)] * 2
        for (peer, start, rows, place), n in zip(route.pieces, early):
            whole = torch.zeros(64, dtype=torch.uint8)
            whole[2 * place : 2 * (place + rows)] = sent[start : start + rows].flatten()
            assert torch.equal(last[peer][:64], whole)
            whole[2 * place : 2 * (place + rows - n)] = 0
            assert torch.equal(first[peer][:64], whole), "neither less nor more"


@pytest.mark.parametrize("asked", [False, True])
def test_what_comes_early_is_waited_for_once(asked):
    """Whether somebody asks for it or not: its flag would be taken for that of the next transfer."""
    waited = []
    arrived, early = (lambda: waited.append("all")), (lambda: waited.append("early"))
    pending = Pending(torch.empty(0), (), lambda: None, arrived, came_early=early)
    if asked:
        pending.early()
        assert waited == ["early"]
    pending.result()
    assert waited == ["early", "all"]
