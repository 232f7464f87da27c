"""Which way blocks of context parallelism take, what is said of it, and the trial of copies. What copies bring: test_gradients.py."""

from __future__ import annotations

import pytest
import torch

from s2_megatron import cp_copies

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
    assert cp_copies.peer_copies(group, torch.device("cpu"), "auto") is None and len(said) == 2, "a CPU has no other choice"


def test_where_copies_are_not_possible(said, monkeypatch):
    monkeypatch.setattr(cp_copies, "one_host", lambda group: False)
    assert cp_copies.peer_copies("group", GPU, "auto") is None
    assert said == ["S2: context-parallel ranks exchange blocks by all_to_all_single (the ranks are on several hosts)"]
    with pytest.raises(ValueError, match=r"--s2-cp-transport copies: the ranks are on several hosts; expected GPUs of one host .*; use auto"):
        cp_copies.peer_copies("group", GPU, "copies")
    with pytest.raises(ValueError, match="copies: there is no GPU"):
        cp_copies.peer_copies("group", torch.device("cpu"), "copies")


class FirstOfTwo:
    def rank(self):
        return 0

    def size(self):
        return 2


def arena_of(compiled, lane_bytes=(0,) * cp_copies.LANES):
    """Of rank 0 of two."""
    views = [torch.zeros(cp_copies.FLAG_BYTES + sum(lane_bytes), dtype=torch.uint8, device="cpu") for _ in range(2)]
    return cp_copies.Arena(0, views, lane_bytes, compiled)


def test_progress_is_in_host_memory():
    """Layers may be built with another default device."""
    with torch.device("meta"):
        copies = cp_copies.PeerCopies(FirstOfTwo(), lambda lane_bytes: arena_of(lambda operations: None), lambda: 1.0, None)
    assert copies.watch.progress.device.type == "cpu" and copies.watch.progress.tolist() == [0]


def test_the_trial(monkeypatch):
    monkeypatch.setattr(cp_copies, "TRIAL_SECONDS", 0.1)
    monkeypatch.setattr(cp_copies.dist, "get_rank", lambda: 0)
    monkeypatch.setattr("s2_megatron.cp_watch.threading.Thread.start", lambda thread: None)
    done, cpu = [], torch.device("cpu")

    def trial(enqueue, note):
        copies = cp_copies.PeerCopies(FirstOfTwo(), lambda lane_bytes: arena_of(lambda operations: enqueue), lambda: 1.0, note)
        done.append(copies)
        copies.try_out(0, 2, cpu)

    def refuses(*_):
        raise RuntimeError("CUDA_ERROR_NOT_SUPPORTED")

    trial(lambda: None, lambda progress, number: progress.fill_(number))
    with pytest.raises(TimeoutError, match=r"rank 0: no flag of another GPU arrived in .* s; use --s2-cp-transport collective"):
        trial(lambda: None, lambda progress, number: None)
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        trial(lambda: None, refuses)
    assert done[1].watch._issued and not done[2].watch._issued, "or the watch would end a process that goes on without copies"


def test_flags_of_an_arena_are_apart():
    indices = [cp_copies.flag_index(kind, lane, other, 8) for kind in range(2) for lane in range(cp_copies.LANES) for other in range(8)]
    assert len(set(indices)) == len(indices) and 4 * max(indices) < cp_copies.FLAG_BYTES
    assert len(cp_copies.free_flags(3, 8)) == 14
