"""Where the loss of a language model lies: the groups of predictions, and what a page says of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from examples.quality import run
from examples.quality.after_training import measure_text
from examples.quality.copies import GROUPS, ORDERS, groups_of, last_distances, score, validation_sequences
from examples.quality.copies_page import copies_lines, gaps
from examples.quality.corpus import Corpus
from examples.quality.launch import Job
from examples.quality.results import Place
from examples.quality.studies import STUDIES
from examples.quality.workers import CUT, FINISHED, Budget
from s2_megatron.tools.dataset.write import write_dataset
from tests.tools.logged_runs import write_loss_log

TINY = STUDIES["lm-tiny"]


def slowly(ids: list[int], near: int) -> list[str]:
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
                group = f"{order} {'near' if place - before[-1] <= near else 'far'}"
        found.append(group)
    return found


def test_groups_by_their_definition():
    rng = np.random.default_rng(0)
    seen = set()
    for alphabet in (3, 30):
        ids = rng.integers(0, alphabet, 300)
        ids[200:240], ids[100:110] = ids[20:60], ids[85:95]
        found = [GROUPS[group] for group in groups_of(ids, near=16)]
        assert found == slowly(ids.tolist(), 16)
        seen |= set(found)
    assert seen == set(GROUPS)


def test_distances():
    assert last_distances(np.array([5, 5, 7, 5, 7])).tolist() == [0, 1, 0, 2, 2]


def test_only_documents_that_training_never_sees(tmp_path):
    """Documents of one id each, 0 to 9: the last two of ten are for validation."""
    ids = (np.full(300, document, np.uint16) for document in range(10))
    write_dataset(tmp_path / "text", ids)
    corpus = Corpus(tmp_path, {"split": TINY.corpus.split, "sha256": "0" * 64})
    found = validation_sequences(TINY, corpus)
    assert TINY.corpus.split == "80,20,0" and set(np.unique(found)) == {8, 9}
    assert found.shape == (600 // (TINY.model.seq_length + 1), TINY.model.seq_length + 1)
    write_dataset(tmp_path / "text", (np.full(100, document, np.uint16) for document in range(10)))
    with pytest.raises(ValueError, match="200 tokens to validate with; expected 257 or more"):
        validation_sequences(TINY, corpus)


def scores(last: float) -> dict:
    about = {"sequences": 4, "near": 512, "corpus": "abc"}
    return about | score(np.array([1.0, 2.0, 3.0, last]), np.array([0, 0, 0, 6]))


def test_scores_and_gaps():
    dense, own = scores(4.0), scores(6.0)
    assert dense["tokens"] == [3, 0, 0, 0, 0, 0, 1] and dense["losses"] == [2.0, *[None] * 5, 4.0]
    # The groups' parts add up to the difference of the means over all tokens: 3.0 - 2.5.
    assert gaps([own], [dense]).tolist() == [0, 0, 0, 0, 0, 0, pytest.approx(0.5)]


def test_the_page(tmp_path):
    def write(arm, seed, content):
        (tmp_path / f"{arm}_seed{seed}.copies.json").write_text(json.dumps(content))

    def lines():
        return copies_lines(tmp_path, ("dense", "hybrid", "s2"), "dense", ["1"])

    write("s2", 1, scores(6.0))
    assert lines() == []
    write("dense", 2, scores(1.0))
    assert lines() == []  # no seed of both
    write("dense", 1, scores(4.0))
    found = lines()
    assert "| share of the tokens | 75.0 % | 0.0 % | 0.0 % | 0.0 % | 0.0 % | 0.0 % | 25.0 % |  |" in found
    assert any(line.startswith("| dense | 2.000 |") and line.endswith("| 4.000 | 2.500 |") for line in found)
    assert any(line.startswith("| s2 | 2.000 (+0.000) |") and line.endswith("| 6.000 (+0.500) | 3.000 (+0.500) |")
               for line in found)  # fmt: skip
    assert found[0].endswith("Left out, for not every seed has scores: `hybrid`.")
    write("hybrid", 1, scores(5.0))
    assert "Left out" not in lines()[0]
    write("s2", 1, scores(6.0) | {"near": 256})
    with pytest.raises(ValueError, match="the copies of s2 are not over the predictions of dense's"):
        lines()


def test_a_test_that_the_budget_cuts_comes_later(tmp_path):
    """The losses are kept at once, the checkpoint until the test has been made."""
    said, job = [], Job(TINY, "s2", 1, 1e-3, 20 * TINY.step_tokens, tmp_path / "run")
    job.folder.mkdir()
    corpus = Corpus(tmp_path, {"sha256": "0" * 64})
    paths = {test: tmp_path / f"s2.{test}.json" for test in ("copies", "needles")}
    assert measure_text(job, paths, corpus, None, Budget(1e-3), said.append) == CUT
    assert len(said) == 1 and "its test (copies); repeat the command to test it" in said[0]
    paths["copies"].write_text("{}")
    assert measure_text(job, paths, corpus, None, Budget(1e-3), said.append) == CUT
    assert len(said) == 2 and "its test (needles); repeat the command to test it" in said[1]
    paths["copies"].unlink()
    assert measure_text(job, paths, corpus, None, Budget(None), said.append) == FINISHED
    assert [line.split("its ")[1] for line in said[3::2]] == [f"result has no s2.{test}.json" for test in paths]
    assert "its test (copies) ended with status 2" in said[2] and "its test (needles) ended with status 2" in said[4]
    assert job.log.read_text().count("no corpus.json; expected the folder of a prepared corpus") == 2
    assert measure_text(job, dict.fromkeys(paths, job.log), corpus, None, Budget(1e-3), said.append) == FINISHED


def test_a_run_whose_test_was_cut_is_not_done(tmp_path, monkeypatch):
    corpus = Corpus(tmp_path, {"sha256": "0" * 64})
    place = Place(TINY, corpus, 20 * TINY.step_tokens, tmp_path, tmp_path)
    job = place.job("s2", 1, 1e-3)
    write_loss_log(place.result("s2", 1), [3.0, 2.0], lr=1e-3)
    assert run.has_result(place, job, losses_only=False)  # its checkpoint is gone
    monkeypatch.setattr(run, "checkpoint_iteration", lambda folder: job.iterations)
    monkeypatch.setattr(run, "final_evaluation", lambda job: {})
    for path in (place.copies("s2", 1), place.needles("s2", 1)):
        assert not run.has_result(place, job, losses_only=False) and run.has_result(place, job, losses_only=True)
        path.write_text("{}")
    assert run.has_result(place, job, losses_only=False)
