"""Whether a trained language model copies a needle, random tokens in text that only looking up predicts, from far back.

    python -m studies.needles lm8k --data runs/quality/corpus/<key> --load .../checkpoints --json needles.json

A sequence is of documents that training never sees. PASSAGE random tokens stand inside of one attention block, and
again at the end of the sequence: the first half there is the question, the model's best guesses of the second half are
right or wrong. Most needles lie beyond the window of the study's `s2`, evenly over all depths; NEAR of them lie within
it, as a control. The residue is that of the needle's block modulo the stride, as in recall.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from studies import recall
from studies.copies import validation_sequences
from studies.corpus import Corpus
from studies.studies import Study
from studies.tasks import Sequence
from studies.trained import load_trained, text_test

PASSAGE = 32  # tokens; of a study whose blocks are shorter, a block
SEQUENCES, NEAR = 256, 32
END_OF_DOCUMENT = 0
SEED = 3


def needle_blocks(study: Study) -> tuple[range, range]:
    """(far, near): the blocks beyond the window of the last block, where the needles are asked for, and those within,
    without the last one."""
    last = study.model.seq_length // study.block_size - 1
    within = last + 1 - study.local_tokens // study.block_size
    return range(within), range(within, last)


def hide(study: Study, text: np.ndarray, block: int, tokens: np.ndarray, rng: np.random.Generator) -> Sequence:
    """The text with a needle in this block and at its end; its ids are int64 [seq_length + 1], its questions those of
    the second half of the needle. text: int64 [seq_length + 1]. tokens: int64 [n], which the needle is drawn from, none
    twice."""
    size = min(PASSAGE, study.block_size)
    start = block * study.block_size + int(rng.integers(study.block_size - size + 1))
    ids = text.copy()
    ids[start : start + size] = ids[-size:] = rng.choice(tokens, size, replace=False)
    asked = np.arange(size // 2, size)
    return Sequence(ids, np.stack([len(ids) - size + asked - 1, start + asked, np.zeros_like(asked)], axis=1))


def make_sequences(study: Study, texts: np.ndarray) -> tuple[list[Sequence], list[Sequence]]:
    """(far, near): SEQUENCES in all, NEAR of them near, the same for all models. texts: int64 [n, seq_length + 1]; with
    fewer than SEQUENCES a text comes again with another needle."""
    rng = np.random.default_rng(SEED)
    tokens = np.setdiff1d(texts, [END_OF_DOCUMENT])
    texts = np.resize(texts, (SEQUENCES, texts.shape[1]))
    found = []
    for blocks, own in zip(needle_blocks(study), (texts[NEAR:], texts[:NEAR])):
        evenly = ((np.arange(len(own)) + rng.random(len(own))) * len(blocks) / len(own)).astype(int)
        found.append([hide(study, text, blocks[at], tokens, rng) for text, at in zip(own, evenly)])
    return found[0], found[1]


def score(study: Study, far: list[Sequence], near: list[Sequence], answers: list[np.ndarray]) -> dict:
    """{"questions", "accuracy", "whole", "near", "by_depth", "by_residue", "sequences"}: questions and sequences of
    all, the rest but "near" of the far needles. answers: of every sequence, the far ones first, the ids that the model
    gave to its questions."""
    own, control = answers[: len(far)], answers[len(far) :]
    whole = [np.array_equal(given, sequence.answers) for given, sequence in zip(own, far)]
    return recall.score(study, far, own) | {
        "questions": sum(map(len, answers)),
        "whole": round(float(np.mean(whole)), 4),
        "near": recall.score(study, near, control)["accuracy"],
        "sequences": len(answers),
    }


def score_checkpoint(study: Study, corpus: Corpus, checkpoints: Path) -> dict:
    """The score of the newest checkpoint. Raises ValueError where there is none."""
    model = load_trained(checkpoints)
    far, near = make_sequences(study, validation_sequences(study, corpus, SEQUENCES))
    answers = recall.ask(model, [*far, *near], study.model.seq_length, range(corpus.vocabulary))
    return {"corpus": corpus.sha256[:12]} | score(study, far, near, answers)


if __name__ == "__main__":
    text_test("needles", __doc__.splitlines()[0], score_checkpoint)
