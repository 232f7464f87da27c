"""A trained model's loss on all validation text, by position, and what it copies from far back.

    python -m studies.passages smollm2-8k --data runs/quality/corpus/<key> --load .../checkpoints --json passages.json

The sequences are those of the documents that training never sees, one after the other, the same for all models. For the
copies a passage of another sequence stands `distance` tokens before the end, and its repetition ends the text: its
first GIVEN tokens say which, of the rest those count that the model gives half of the probability or more. Some are
given that much without a copy: "uncopied" is the share where the passage stands at the end alone.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from s2_megatron.tools.losses import token_losses
from studies.copies import validation_sequences
from studies.corpus import Corpus
from studies.studies import Study
from studies.trained import TOKENS_AT_ONCE, load_trained, text_test

PASSAGE, GIVEN = 64, 16  # tokens
TEXTS = 64  # for each distance
BUCKETS = 16
SEED = 5


def distances(length: int) -> list[int]:
    """From one beginning to the other, in tokens: 512 to 7168 of 8192."""
    return [length // 16, length // 8, length // 4, length // 2, 7 * length // 8]


def copying(texts: np.ndarray, distance: int | None, passage: int = PASSAGE) -> np.ndarray:
    """The texts, each with a passage of another one at its end and `distance` before. texts: int64 [n, length + 1], two
    or more; distance: at least `passage`, None for a passage that stands at the end alone."""
    rng = np.random.default_rng(SEED)
    found, end = texts.copy(), texts.shape[1]
    for at, row in enumerate(found):
        source = texts[(at + 1 + rng.integers(len(texts) - 1)) % len(texts)]
        start = rng.integers(end - passage + 1)
        row[end - passage :] = source[start : start + passage]
        if distance is not None:
            row[end - passage - distance : end - distance] = row[end - passage :]
    return found


def score(model, study: Study, texts: np.ndarray, most: int = TEXTS) -> dict:
    """{"loss": the mean of all predictions, "by_position": that of BUCKETS equal parts, "copied": {distance: share},
    "uncopied": share}. texts: int64 [n, length + 1]."""
    at_once, length = max(1, TOKENS_AT_ONCE // study.model.seq_length), texts.shape[1] - 1
    losses = token_losses(model, texts, at_once).double().numpy()
    passage = min(PASSAGE, study.block_size)
    chosen = texts[np.linspace(0, len(texts) - 1, min(most, len(texts))).astype(int)]

    def share(distance: int | None) -> float:
        asked = token_losses(model, copying(chosen, distance, passage), at_once)
        counted = asked[:, -(passage - passage * GIVEN // 64) :]
        return round(float((counted <= math.log(2)).double().mean()), 4)

    copied = {str(distance): share(distance) for distance in distances(length)}
    by_position = losses.reshape(len(texts), BUCKETS, -1).mean(axis=(0, 2))
    found = {"loss": float(losses.mean()), "by_position": by_position.round(6).tolist()}
    return found | {"copied": copied, "uncopied": share(None)}


def score_checkpoint(study: Study, corpus: Corpus, checkpoints: Path) -> dict:
    """The score of the newest checkpoint. Raises ValueError where there is none."""
    model = load_trained(checkpoints)  # first: without a GPU Megatron may not be imported before
    texts = validation_sequences(study, corpus, most=1 << 30)
    return {"sequences": len(texts), "corpus": corpus.sha256[:12]} | score(model, study, texts)


if __name__ == "__main__":
    text_test("passages", __doc__.splitlines()[0], score_checkpoint)
