"""The studies that go on from a dense model, before any run: their dense models, arms, tokens and chosen heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from studies import continued
from studies.continuations import CONTINUATIONS, token_flops, tokens_from_scratch
from studies.continued import make_jobs
from studies.corpus import Corpus
from studies.launch import chosen_yaml
from studies.run import parse_arguments

TINY = CONTINUATIONS["from-dense-tiny"]


def test_runs_from_random_weights_take_the_same_flops():
    start, vocabulary = TINY.start, 512
    tokens = tokens_from_scratch(TINY, "s2", 60_000, 30_000, vocabulary)
    spent = 60_000 * token_flops(start.study, "dense", vocabulary) + 30_000 * token_flops(TINY, "s2", vocabulary)
    assert tokens * token_flops(TINY, "s2", vocabulary) == pytest.approx(spent, rel=1e-4)
    assert tokens > 90_000
    # What Megatron logs for this model, vocabulary as padded, but for the diagonal.
    assert token_flops(start.study, "dense", vocabulary) == pytest.approx(741888, rel=2e-3)


def test_every_study_goes_on_in_whole_steps():
    for study in CONTINUATIONS.values():
        start = study.start
        assert study.iterations(study.tokens) >= 20 and start.study.iterations(start.tokens) >= 20
        assert replace(study.model, seq_length=0) == replace(start.study.model, seq_length=0)
        assert study.model.seq_length % start.study.model.seq_length == 0


def test_studies_of_one_dense_model_cut_the_text_alike():
    """Its folder has their name, not what they are."""
    found: dict[tuple, list] = {}
    for study in CONTINUATIONS.values():
        start = replace(study.start, from_scratch=())
        name = (start.study.name, start.text_share, start.study.corpus)
        found.setdefault(name, []).append(start)
    assert len(found) == 5 and all(start == starts[0] for starts in found.values() for start in starts)


def test_heads_are_chosen_once_for_all_studies_that_ask_the_same(tmp_path):
    """The same number of heads beside the same sparsity on the same dense run; windows of as many pairs as `s2` are
    wider in a longer context."""
    made = {}
    for name in ("from-dense-rules8k", "extend-rules32k"):
        study = CONTINUATIONS[name]
        arms = [arm.name for arm in study.arms if arm.chosen]
        corpora = {continued.START: Corpus(tmp_path, {"sha256": "ab" * 32})}
        place = continued.ContinuedPlace(
            study, corpora[continued.START], study.tokens, tmp_path, tmp_path, study.start.tokens, corpora
        )
        jobs = make_jobs(place, ["dense", *arms], [1], {"dense": 3e-3})
        made[name] = {job.arm: chosen_yaml(job) for job in jobs if job.study.arm(job.arm).chosen}
    here, longer = made.values()
    same = {arm for arm in here if here[arm] == longer[arm]}
    assert same == {"chosen-heads", "chosen-few", "chosen-wide"} and len(set(here.values())) == 5


def test_start_tokens_belong_to_a_study_that_goes_on(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["lm8k", "--start-tokens", "1e6"])
    assert "--start-tokens: lm8k goes on from no other run" in capsys.readouterr().err


def test_results_of_tasks_after_two_texts_are_apart(tmp_path):
    """The tasks are the same on every machine, the text before them is not."""
    study = CONTINUATIONS["from-dense-recall8k"]
    tasks = Corpus(tmp_path, {"sha256": "cd" * 32})
    found = set()
    for text in ("ab", "ef"):
        corpora = {continued.START: Corpus(tmp_path, {"sha256": text * 32})}
        place = continued.ContinuedPlace(study, tasks, study.tokens, tmp_path, tmp_path, study.start.tokens, corpora)
        found |= {place.scale, place.start_folder(1, 1e-3)}
    assert len(found) == 4
