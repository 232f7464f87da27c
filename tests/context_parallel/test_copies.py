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
    for rank, results in enumerate(found(ranks)):
        assert results["copies"]["where it works"] == [True, None]
        reason = "RuntimeError: no peer access" if rank == 1 else "not possible on another rank"
        assert results["copies"]["where it fails on rank 1"] == [False, reason]


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
    assert [line.partition("blocks by ")[2] for line in said] == [
        "all_to_all_single (--s2-cp-transport collective)", *["copy engines, into each other's memory"] * 2
    ]  # fmt: skip
    assert cp_copies.peer_copies(group, torch.device("cpu"), "auto") is None and len(said) == 3, "a CPU has no other choice"


def test_where_copies_are_not_possible(said, monkeypatch):
    monkeypatch.setattr(cp_copies, "one_host", lambda group: False)
    assert cp_copies.peer_copies("group", GPU, "auto") is None
    assert said == ["S2: context-parallel ranks exchange blocks by all_to_all_single (the ranks are on several hosts)"]
    with pytest.raises(ValueError, match=r"--s2-cp-transport copies: the ranks are on several hosts; expected GPUs of one host .*; use auto"):
        cp_copies.peer_copies("group", GPU, "copies")
    with pytest.raises(ValueError, match="copies: there is no GPU"):
        cp_copies.peer_copies("group", torch.device("cpu"), "copies")


def test_flags_of_an_arena_are_apart():
    indices = [cp_copies.flag_index(kind, lane, other, 8) for kind in range(2) for lane in range(cp_copies.LANES) for other in range(8)]
    assert len(set(indices)) == len(indices) and 4 * max(indices) < cp_copies.FLAG_BYTES
    assert len(cp_copies.free_flags(3, 8)) == 14
