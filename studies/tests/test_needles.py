"""Needles in text: where they lie, and how answers are scored."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from s2_megatron.config.load import SparsityConfig
from studies.needles import END_OF_DOCUMENT, NEAR, SEQUENCES, make_sequences, needle_blocks, score
from studies.recall import DEPTHS, ask
from studies.studies import STUDIES

TINY = STUDIES["lm-tiny"]
VOCABULARY = 64


def texts(study, count: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (count, study.model.seq_length + 1))


def places(sequences) -> np.ndarray:
    """The first token of every needle, int64 [n]."""
    return np.array([each.questions[0, 1] - len(each.questions) for each in sequences])


@pytest.fixture(params=["lm-tiny", "lm8k", "rules8k", "lm32k"])
def study(request):
    return STUDIES[request.param]


def test_a_needle_lies_in_one_block_and_comes_again_at_the_end(study):
    own, size = texts(study), min(32, study.block_size)
    far, near = make_sequences(study, own)
    assert len(far) == SEQUENCES - NEAR and len(near) == NEAR == SEQUENCES // 8
    again = [each for group in make_sequences(study, own) for each in group]
    assert all(np.array_equal(one.ids, other.ids) for one, other in zip(far + near, again))
    starts = places(far + near)
    assert (starts // study.block_size == (starts + size - 1) // study.block_size).all()
    assert size == study.block_size or len(set(starts % study.block_size)) > 20  # anywhere in it
    for which, (start, each) in enumerate(zip(starts, far + near)):
        needle = each.ids[start : start + size]
        assert len(set(needle)) == size and END_OF_DOCUMENT not in needle and needle.max() < VOCABULARY
        assert np.array_equal(needle, each.ids[-size:]) and len(each.ids) == study.model.seq_length + 1
        # The rest is text, and each text has had its turn before one comes again.
        changed = np.r_[start : start + size, study.model.seq_length + 1 - size : study.model.seq_length + 1]
        text = own[(which + NEAR) % SEQUENCES % len(own)]
        assert np.array_equal(np.delete(each.ids, changed), np.delete(text, changed))
        # The first half is given; the second half is asked for, token by token up to the last target.
        asked, value, hops = each.questions.T
        assert asked.tolist() == list(range(study.model.seq_length - size // 2, study.model.seq_length))
        assert value.tolist() == list(range(start + size // 2, start + size)) and not hops.any()
        assert np.array_equal(each.answers, needle[size // 2 :])
    assert len({tuple(each.answers) for each in far + near}) == SEQUENCES


def test_far_is_beyond_the_window_and_near_within(study):
    spec = {"block_size": study.block_size, "layers": "S", "specs": {"S": {"local_tokens": study.local_tokens}}}
    pattern = SparsityConfig.from_data(spec).resolve(**study.model.shape).layers[0].pattern
    last = study.model.seq_length // study.block_size - 1
    window = set(pattern.key_blocks(0, last).tolist())
    far, near = (set((places(each) // study.block_size).tolist()) for each in make_sequences(study, texts(study)))
    assert near == window - {last} and not far & window
    assert [set(blocks) for blocks in needle_blocks(study)] == [set(range(last)) - window, near]


def test_needles_lie_at_all_depths_and_residues_evenly(study):
    far, near = make_sequences(study, texts(study))
    blocks = places(far) // study.block_size
    # The context beyond the window in as many equal parts as there are needles, one in each.
    parts = np.arange(len(far) + 1) * len(needle_blocks(study)[0]) / len(far)
    assert (np.floor(parts[:-1]) <= blocks).all() and (blocks <= parts[1:]).all()
    residues = Counter((blocks % study.stride).tolist())
    assert set(residues) == set(range(study.stride)) and min(residues.values()) > len(far) / study.stride / 2
    assert len(set((places(near) // study.block_size).tolist())) == len(needle_blocks(study)[1])


class Copier(torch.nn.Module):
    """Predicts what followed the last four tokens where they stood before, within so many tokens; without that, the
    newest token again."""

    def __init__(self, reach: int):
        super().__init__()
        self.reach, self.weight = reach, torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids, positions, mask):
        assert mask is None and positions[0].tolist() == list(range(ids.shape[1]))
        guesses = ids.clone()
        for row, guess in zip(ids.tolist(), guesses):
            seen = {}
            for at in range(4, len(row) + 1):
                gram = tuple(row[at - 4 : at])
                if gram in seen and at - seen[gram] <= self.reach:
                    guess[at - 1] = row[seen[gram]]
                seen[gram] = at
        return torch.nn.functional.one_hot(guesses, VOCABULARY + 64).float()


def scored(reach: int) -> dict:
    far, near = make_sequences(TINY, texts(TINY))
    answers = ask(Copier(reach), [*far, *near], TINY.model.seq_length, range(VOCABULARY))
    return score(TINY, far, near, answers)


def test_scores_of_models_that_copy_everything_the_near_and_nothing():
    perfect, local, ignorant = scored(10**6), scored(TINY.local_tokens), scored(0)
    assert perfect == {
        "questions": SEQUENCES * 8, "accuracy": 1.0, "whole": 1.0, "near": 1.0, "by_depth": [1.0] * 7 + [None],
        "by_residue": [1.0] * TINY.stride, "sequences": SEQUENCES,
    }  # fmt: skip
    nothing = {"accuracy": 0.0, "whole": 0.0, "by_depth": [0.0] * 7 + [None], "by_residue": [0.0] * TINY.stride}
    assert local == perfect | nothing and ignorant == perfect | nothing | {"near": 0.0}


def test_answers_are_among_the_ids_that_count():
    far, _ = make_sequences(TINY, texts(TINY))
    found = ask(Copier(10**6), far[:20], TINY.model.seq_length, range(20, 40))
    given, wanted = np.concatenate(found), np.concatenate([each.answers for each in far[:20]])
    counts = (wanted >= 20) & (wanted < 40)
    assert given.min() >= 20 and given.max() < 40 and counts.any() and (given[counts] == wanted[counts]).all()


def test_scores_by_depth_and_residue():
    """Of a model that misses the needles of one residue, and in the first half of the context each last token."""
    far, near = make_sequences(TINY, texts(TINY))
    answers = [each.answers.copy() for each in (*far, *near)]
    for start, given in zip(places(far), answers):
        if start // TINY.block_size % TINY.stride == 2:
            given[:] = -1
        elif start < TINY.model.seq_length // 2:
            given[-1] = -1
    found = score(TINY, far, near, answers)
    blocks = places(far) // TINY.block_size
    right = np.array([np.mean(given == each.answers) for given, each in zip(answers, far)])
    assert found["by_residue"] == [round(float(right[blocks % TINY.stride == which].mean()), 4) for which in range(4)]
    depths = places(far) * DEPTHS // TINY.model.seq_length
    assert found["by_depth"][:7] == [round(float(right[depths == which].mean()), 4) for which in range(7)]
    assert found["by_residue"][2] == 0 < found["by_residue"][0] < 1 and found["near"] == 1.0
    assert found["whole"] == round(float(np.mean(right == 1)), 4) and 0 < found["whole"] < found["accuracy"] < 1
