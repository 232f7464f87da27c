"""The synthetic tasks: each question has one answer and it can be found; scores by depth, residue and hops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from studies import recall
from studies.continuations import CONTINUATIONS
from studies.continued import require_new_sequences
from studies.corpus import Corpus
from studies.recall import DEPTHS, held_out_sequences, longer_sequences, score
from studies.tasks import (
    ANSWERS,
    KEYS,
    NOISE,
    SHORT,
    SHORT_ECHOES,
    SHORT_PAIRS,
    TASKS,
    VALUES,
    VOCABULARY,
    prepare_tasks,
    training_sequence,
)

STUDIES = [study for study in CONTINUATIONS.values() if study.tasks is not None]
TINY, FULL, LONG = (CONTINUATIONS[name] for name in ("extend-recall-tiny", "from-dense-recall8k", "extend-recall32k"))


def within(ids, group):
    return (ids >= group[0]) & (ids < group[0] + group[1])


def solve(ids: np.ndarray, question: int) -> tuple[int, int, int]:
    """(answer, position of the value, hops) of a question, found as a reader of the sequence would."""
    key, hops = ids[question], 0
    while True:
        # Assignments stand in slots of two; a key in a second place is what a variable is assigned from.
        slots = np.flatnonzero(ids[0:question:2] == key) * 2
        assert len(slots) == 1
        held = ids[slots[0] + 1]
        if within(held, VALUES):
            return int(held - VALUES[0] + ANSWERS[0]), int(slots[0] + 1), hops
        key, hops = held, hops + 1


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
@pytest.mark.parametrize("task", TASKS)
def test_every_question_has_its_answer_in_the_sequence(study, task):
    settings = replace(study.tasks, tests=4)
    for ids, questions in held_out_sequences(replace(study, tasks=settings), task):
        assert ids.shape == (study.model.seq_length,) and ids.dtype == np.uint16 and ids.max() < VOCABULARY
        ids = ids.astype(int)
        for question, place, hops in questions.tolist():
            assert solve(ids, question) == (ids[question + 1], place, hops)
        assert len(questions) == {"needle": 1, "recall": settings.pairs, "tracking": settings.chains}[task]
        asked = questions[:, 0]
        assert len(set(ids[asked])) == len(asked)
        # What counts for the loss are the answers, and nothing else has their ids.
        assert np.flatnonzero(within(ids, ANSWERS)).tolist() == sorted(asked + 1)


def test_answers_are_as_dense_at_every_length():
    short, long = (np.array([study.tasks.pairs, study.tasks.chains]) / study.model.seq_length for study in (FULL, LONG))
    assert short.tolist() == long.tolist()


def test_groups_of_ids_are_apart():
    ends = [0, *(end for first, number in (NOISE, KEYS, VALUES, ANSWERS) for end in (first, first + number))]
    assert ends == sorted(ends) and ends[-1] == VOCABULARY


def test_needles_lie_at_every_depth_and_residue():
    for study in (FULL, LONG):
        places = np.concatenate([each.questions[:, 1] for each in held_out_sequences(study, "needle")])
        depths = np.bincount(places * DEPTHS // study.model.seq_length, minlength=DEPTHS)
        residues = np.bincount(places // study.block_size % study.stride, minlength=study.stride)
        assert depths.min() >= 30 and residues.min() >= 15


def of_training(study, count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(sequences of the tasks, sequences of short problems), no two of them equal."""
    made = [training_sequence(index, study.model.seq_length, study.tasks) for index in range(count)]
    assert len({each.tobytes() for each in made}) == count
    return [each for index, each in enumerate(made) if index % 5 != 4], made[4::5]


def test_short_problems_hold_their_answers():
    """Every answer stands beside its value, or behind a key that stands earlier in the same 64 tokens."""
    for study in STUDIES:
        for ids in of_training(study, 10)[1]:
            ids, asked = ids.astype(int), 0
            for place in np.flatnonzero(within(ids, ANSWERS)):
                before = ids[place - 1]
                if within(before, KEYS):
                    answer, value, hops = solve(ids, place - 1)
                    assert answer == ids[place] and hops == 0 and value // SHORT == place // SHORT
                    asked += 1
                else:
                    assert ids[place] - ANSWERS[0] == before - VALUES[0]
            problems = study.tasks.pairs // (SHORT_PAIRS + 2 * SHORT_ECHOES)
            assert asked == SHORT_PAIRS * problems and ids[0] == 0
            assert within(ids, ANSWERS).sum() == study.tasks.pairs  # as many as recall has


def test_no_short_problem_validates():
    """Megatron's split of 98,2 begins at the same sequence."""
    first = round(FULL.tasks.sequences * 0.98)
    early = [
        within(training_sequence(index, FULL.model.seq_length, FULL.tasks).astype(int), ANSWERS)[: 8192 // 2].any()
        for index in range(first - 20, FULL.tasks.sequences)
    ]
    assert sum(early[:20]) == 4 and not any(early[20:])


def test_training_asks_in_the_second_half_alone():
    sequences, _ = of_training(TINY, 40)
    answers = np.stack([within(each.astype(int), ANSWERS) for each in sequences])
    half = TINY.model.seq_length // 2
    assert not answers[:, :half].any() and (answers.sum(axis=1) > 0).all()
    assert (np.stack(sequences)[:, 0] == 0).all()


def test_scores_by_depth_residue_and_hops():
    sequences = held_out_sequences(TINY, "tracking")
    answers = [each.ids[each.questions[:, 0] + 1] for each in sequences]
    assert score(TINY, sequences, answers)["by_hops"] == [1.0] * (TINY.tasks.hops + 1)
    wrong = [
        np.where(each.questions[:, 1] // TINY.block_size % TINY.stride == 2, 0, own)
        for each, own in zip(sequences, answers)
    ]
    result = score(TINY, sequences, wrong)
    assert result["by_residue"] == [1.0, 1.0, 0.0, 1.0] and 0 < result["accuracy"] < 1


def test_needles_beyond_the_length_of_the_training():
    """A quarter as many, in twice the length, at all of its depths."""
    sequences = longer_sequences(TINY)
    length = 2 * TINY.model.seq_length
    assert {len(each.ids) for each in sequences} == {length} and len(sequences) == TINY.tasks.tests // 4
    values = np.array([each.questions[0, 1] for each in sequences])
    assert sorted(values * 4 // length) == [0, 1, 2, 3]
    answers = [each.answers if value > length // 2 else [0] for each, value in zip(sequences, values)]
    found = score(TINY, sequences, answers, 2)["by_depth"]
    expected = {int(value * DEPTHS // length): float(value > length // 2) for value in values}
    assert found == [expected.get(depth) for depth in range(DEPTHS)] and len(expected) == 4


def test_equal_settings_give_equal_data(tmp_path):
    first, again = (prepare_tasks(tmp_path / name, 128, TINY.tasks, tell=lambda text: None) for name in ("one", "two"))
    other = prepare_tasks(tmp_path / "one", 128, replace(TINY.tasks, pairs=3), tell=lambda text: None)
    assert first.sha256 == again.sha256 != other.sha256 and first.description["tokens"] == 64 * 128


def test_without_memory_for_longer_needles_the_rest_is_kept(monkeypatch, capsys):
    import torch

    def answer(model, sequences, length, ids):
        if length > TINY.model.seq_length:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [sequence.answers for sequence in sequences]

    monkeypatch.setattr(recall, "load_trained", lambda checkpoints: None)
    monkeypatch.setattr(recall, "ask", answer)
    found = recall.score_checkpoint(TINY, "runs/x")
    assert found.keys() == set(TASKS) and found["needle"]["accuracy"] == 1.0
    assert capsys.readouterr().out.startswith("runs/x: no longer needle, for the GPU has no memory for 2048 tokens")


def test_no_sequence_is_trained_on_twice():
    for study in STUDIES:
        corpus = Corpus(None, {"tokens": study.tasks.sequences * study.model.seq_length})
        require_new_sequences(corpus, study.tokens)  # the sizes that a study has
        with pytest.raises(ValueError, match=r"tokens of training sequences; expected no sequence twice; use \d+"):
            require_new_sequences(corpus, corpus.description["tokens"])
