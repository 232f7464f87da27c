"""Where the loss of a language model lies: the groups of predictions, and what a page says of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from examples.quality.copies import GROUPS, ORDERS, groups_of, last_distances, score
from examples.quality.copies_page import copies_lines, gaps
from examples.quality.page import table


def slowly(ids: list[int], window: int) -> list[str]:
    """The groups by their definition."""
    found = []
    for place in range(len(ids)):
        group = "new"
        for order in ORDERS:
            gram = ids[place - order + 1 : place + 1]
            before = [
                at for at in range(order - 1, place) if place >= order - 1 and ids[at - order + 1 : at + 1] == gram
            ]
            if before:
                group = f"{order} {'in the window' if place - before[-1] <= window else 'beyond it'}"
        found.append(group)
    return found


def test_groups_by_their_definition():
    rng = np.random.default_rng(0)
    seen = set()
    for alphabet in (3, 30):
        ids = rng.integers(0, alphabet, 300)
        ids[200:240], ids[100:110] = ids[20:60], ids[85:95]
        found = [GROUPS[group] for group in groups_of(ids, window=16)]
        assert found == slowly(ids.tolist(), 16)
        seen |= set(found)
    assert seen == set(GROUPS)


def test_distances():
    assert last_distances(np.array([5, 5, 7, 5, 7])).tolist() == [0, 1, 0, 2, 2]


def test_scores_and_gaps():
    groups = np.array([0, 0, 0, 6])
    dense, own = score(np.array([1.0, 2.0, 3.0, 4.0]), groups), score(np.array([1.0, 2.0, 3.0, 6.0]), groups)
    assert dense["tokens"] == [3, 0, 0, 0, 0, 0, 1] and dense["losses"] == [2.0, *[None] * 5, 4.0]
    # The groups' parts add up to the difference of the means over all tokens: 3.0 - 2.5.
    assert gaps([(own, dense)]).tolist() == [0, 0, 0, 0, 0, 0, pytest.approx(0.5)]


def test_the_page(tmp_path):
    about, groups = {"sequences": 4, "window": 512}, np.array([0, 0, 0, 6])
    for arm, last in (("dense", 4.0), ("s2", 6.0)):
        content = about | score(np.array([1.0, 2.0, 3.0, last]), groups)
        (tmp_path / f"{arm}_seed1.copies.json").write_text(json.dumps(content))
    lines = copies_lines(tmp_path, ("dense", "hybrid", "s2"), "dense", table)
    assert "| new | 75.0 % | 2.0000 | 2.0000 | +0.0000 |" in lines
    assert "| 8-gram beyond it | 25.0 % | 4.0000 | 6.0000 | +0.5000 |" in lines
    assert "| all | 100 % |  |  | +0.5000 |" in lines
    (tmp_path / "dense_seed1.copies.json").rename(tmp_path / "dense_seed2.copies.json")
    assert copies_lines(tmp_path, ("dense", "hybrid", "s2"), "dense", table) == []
