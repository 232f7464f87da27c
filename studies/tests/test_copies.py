"""Where the loss of a language model lies: the groups of predictions."""

from __future__ import annotations

import numpy as np
import pytest

from s2_megatron.tools.dataset.write import write_dataset
from studies import run
from studies.after_training import measure_text
from studies.copies import GROUPS, ORDERS, groups_of, last_distances, score, validation_sequences
from studies.corpus import Corpus
from studies.data import Run
from studies.launch import Job
from studies.results import Place, add_run
from studies.studies import STUDIES
from studies.workers import CUT, FINISHED, Budget

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


def test_scores():
    found = score(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 0, 0, 6]))
    assert found == {"tokens": [3, 0, 0, 0, 0, 0, 1], "losses": [2.0, *[None] * 5, 4.0]}


def test_a_test_that_the_budget_cuts_comes_later(tmp_path):
    """The losses are kept at once, the checkpoint until the test has been made."""
    said, job = [], Job(TINY, "s2", 1, 1e-3, 20 * TINY.step_tokens, tmp_path / "run")
    job.folder.mkdir()
    corpus = Corpus(tmp_path, {"sha256": "0" * 64})
    assert measure_text(job, corpus, None, Budget(1e-3), said.append) == CUT
    assert len(said) == 1 and "its test (copies); repeat the command to test it" in said[0]
    job.test_file("copies").write_text("{}")
    assert measure_text(job, corpus, None, Budget(1e-3), said.append) == CUT
    assert len(said) == 2 and "its test (needles); repeat the command to test it" in said[1]
    job.test_file("copies").unlink()
    assert measure_text(job, corpus, None, Budget(None), said.append) == FINISHED
    assert [line.split("its ")[1] for line in said[3::2]] == [f"result has no {test}" for test in TINY.text_tests]
    assert "its test (copies) ended with status 2" in said[2] and "its test (needles) ended with status 2" in said[4]
    assert job.log.read_text().count("no corpus.json; expected the folder of a prepared corpus") == 2
    for test in TINY.text_tests:
        job.test_file(test).write_text("{}")
    assert measure_text(job, corpus, None, Budget(1e-3), said.append) == FINISHED


def test_a_run_whose_test_was_cut_is_not_done(tmp_path, monkeypatch):
    corpus = Corpus(tmp_path, {"sha256": "0" * 64})
    place = Place(TINY, corpus, 20 * TINY.step_tokens, tmp_path, tmp_path / "results")
    job = place.job("s2", 1, 1e-3)
    job.folder.mkdir(parents=True)
    assert not run.has_result(place, job, losses_only=False)
    about = {"scale": place.scale, "role": "", "arm": "s2", "seed": 1, "settings": {"lr": 1e-3}}
    add_run(place.results, TINY.name, Run(about))
    assert run.has_result(place, job, losses_only=False)  # its checkpoint is gone
    monkeypatch.setattr(run, "checkpoint_iteration", lambda folder: job.iterations)
    monkeypatch.setattr(run, "final_evaluation", lambda job: {})
    for test in TINY.text_tests:
        assert not run.has_result(place, job, losses_only=False) and run.has_result(place, job, losses_only=True)
        job.test_file(test).write_text("{}")
    assert run.has_result(place, job, losses_only=False)
