"""Blocks that are copied into the memory of other ranks arrive whole, once, and not before they may; what is chosen where, and said."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from s2_megatron import cp_copies
from tests.context_parallel.cases import CASES

EXACT = 1e-12
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_copied_blocks_are_those_of_the_collective(found, ranks):
    """In processes that share memory. Arenas grow from case to case; ranks are shaken apart; what was released is poisoned."""
    for results in found(ranks):
        copies = results["copies"]
        assert copies["watched"] > 2 * len(CASES), "every arrival is noted"
        assert not copies["broken promises"], "a buffer was written to while it was read"
        for name, case in CASES.items():
            assert max(copies[name][part] for part in ("out", "dq", "dk", "dv")) <= EXACT, (name, copies[name])
            assert copies[name]["same"] and copies[name]["repeats"], name
            assert [copies[name]["forward bytes"], copies[name]["backward bytes"]] == copies[name]["plan"]
            assert copies[name]["calls"] == [1, 1 if case.keep_received else 2]
            assert copies[name]["handed over"] == [[], []], "nothing goes through torch's collectives"
        arenas = copies["arenas"]
        assert arenas[0] == [0, 0] and arenas == found(ranks)[0]["copies"]["arenas"], "of one size on all ranks"
        for before, after in pairwise(arenas):
            assert before != after and all(a <= b for a, b in zip(before, after))


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_copy_or_none_does(found, ranks):
    for results in found(ranks):
        assert results["copies"]["where it works"] == [True, None]
        assert results["copies"]["where it fails on rank 1"] == [False, "rank 1: RuntimeError: no peer access"]


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


class OneRank:
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
        copies = cp_copies.PeerCopies(OneRank(), lambda lane_bytes: arena_of(lambda operations: None), lambda: 1.0, None)
    assert copies.watch.progress.device.type == "cpu" and copies.watch.progress.tolist() == [0]


def test_the_trial(monkeypatch):
    monkeypatch.setattr(cp_copies, "TRIAL_SECONDS", 0.1)
    monkeypatch.setattr(cp_copies.dist, "get_rank", lambda: 0)
    monkeypatch.setattr("s2_megatron.cp_watch.threading.Thread.start", lambda thread: None)
    done, cpu = [], torch.device("cpu")

    def trial(enqueue, note):
        copies = cp_copies.PeerCopies(OneRank(), lambda lane_bytes: arena_of(lambda operations: enqueue), lambda: 1.0, note)
        done.append(copies)
        copies.try_out(0, 2, cpu)

    def refuses():
        raise RuntimeError("CUDA_ERROR_NOT_SUPPORTED")

    trial(lambda: None, lambda progress, number: progress.fill_(number))
    with pytest.raises(TimeoutError, match=r"rank 0: no flag of another GPU arrived in .* s; use --s2-cp-transport collective"):
        trial(lambda: None, lambda progress, number: None)
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        trial(refuses, None)
    assert not done[2].watch._issued, "or it would end the process"


def test_flags_of_an_arena_are_apart():
    indices = [cp_copies.flag_index(kind, lane, other, 8) for kind in range(2) for lane in range(cp_copies.LANES) for other in range(8)]
    assert len(set(indices)) == len(indices) and 4 * max(indices) < cp_copies.FLAG_BYTES
    assert len(cp_copies.free_flags(3, 8)) == 14
