"""Where a trained language model's loss lies: on tokens that continue what stood before, near or far, or on others.

    python -m studies.copies lm8k --data runs/quality/corpus/<key> --load .../checkpoints --json copies.json

The group of a prediction is the longest of the 8-gram, 4-gram and 2-gram in front of it that has stood in the same
sequence before, and how far back it stood last: near, within as many tokens as the window of the study's `s2` has, or
far. A model that looks up what followed there may predict the token. Without any of them it is "new". The sequences are
of documents that training never sees.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from s2_megatron.tools.losses import evenly_chosen, token_losses
from studies.corpus import Corpus
from studies.studies import Study
from studies.trained import TOKENS_AT_ONCE, load_trained, text_test

ORDERS = (2, 4, 8)  # of n-grams; each twice the one before
GROUPS = ("new", *(f"{order} {where}" for order in ORDERS for where in ("near", "far")))
SEQUENCES = 64


def last_distances(codes: np.ndarray) -> np.ndarray:
    """How far back every code stood last, int64 [n]; 0 where it had not been there. codes: int64 [n]."""
    order = np.argsort(codes, kind="stable")
    same = codes[order[1:]] == codes[order[:-1]]
    distances = np.zeros(len(codes), np.int64)
    distances[order[1:][same]] = (order[1:] - order[:-1])[same]
    return distances


def groups_of(ids: np.ndarray, near: int) -> np.ndarray:
    """The group, an index into GROUPS, of the prediction behind every token, int64 [n]. ids: int [n]. near: tokens."""
    groups = np.zeros(len(ids), np.int64)
    codes, length = np.unique(ids, return_inverse=True)[1].astype(np.int64), 1
    for index, order in enumerate(ORDERS):
        while length < order:  # exact: equal codes are equal n-grams of twice as many tokens
            pairs = codes[:-length] * (codes.max() + 1) + codes[length:]
            codes, length = np.unique(pairs, return_inverse=True)[1].astype(np.int64), 2 * length
        distances = np.concatenate([np.zeros(order - 1, np.int64), last_distances(codes)])
        groups[distances > 0] = 1 + 2 * index
        groups[distances > near] = 2 + 2 * index
    return groups


def validation_sequences(study: Study, corpus: Corpus, most: int = SEQUENCES) -> np.ndarray:
    """int64 [sequences, seq_length + 1]: of the documents one after the other, at most `most`, evenly chosen. Raises
    ValueError for a corpus with less than one."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = len(IndexedDataset(str(corpus.data_prefix)))
    shares = [float(share) for share in corpus.split.split(",")]
    unseen = range(round(shares[0] / sum(shares) * documents), documents)
    return evenly_chosen(corpus.data_prefix, unseen, study.model.seq_length + 1, most)


def score(losses: np.ndarray, groups: np.ndarray) -> dict:
    """{"tokens", "losses"}: one value a group, the mean loss None without tokens. losses, groups: [predictions]."""
    counts = np.bincount(groups, minlength=len(GROUPS))
    sums = np.bincount(groups, weights=losses, minlength=len(GROUPS))
    means = [round(float(total / count), 5) if count else None for total, count in zip(sums, counts)]
    return {"tokens": counts.tolist(), "losses": means}


def score_checkpoint(study: Study, corpus: Corpus, checkpoints: Path) -> dict:
    """The score of the newest checkpoint. Raises ValueError where there is none."""
    model = load_trained(checkpoints)
    sequences = validation_sequences(study, corpus)
    at_once = max(1, TOKENS_AT_ONCE // study.model.seq_length)
    losses = token_losses(model, sequences, at_once).double().flatten().numpy()
    groups = np.concatenate([groups_of(row[:-1], study.local_tokens) for row in sequences])
    about = {"sequences": len(sequences), "near": study.local_tokens, "corpus": corpus.sha256[:12]}
    return about | score(losses, groups)


if __name__ == "__main__":
    text_test("copies", __doc__.splitlines()[0], score_checkpoint)
