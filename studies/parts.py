"""A corpus of text in two parts, for runs that go on from another run: what the first one saw and what is new to the
second.

    <corpus>/parts-<share>/first.bin, more.bin, all.bin (and .idx)

Each part is an indexed dataset of training documents followed by all validation documents, so that the evaluations of
all parts read the same sequences.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from s2_megatron.tools.dataset.write import write_dataset
from studies.corpus import Corpus

PARTS = ("first", "more", "all")


@dataclass(frozen=True)
class Part(Corpus):
    """One part of a corpus. name: of PARTS."""

    name: str = "all"

    @property
    def data_prefix(self) -> Path:
        return self.folder / self.name


def split_corpus(corpus: Corpus, share: float) -> dict[str, Part]:
    """{name: part}, made once. share: of the training tokens, for the first part; whole documents.

    `sha256` stays that of the whole corpus; `tokens`, `training_tokens` and `split` are those of the part.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(corpus.data_prefix))
    lengths = np.asarray(data.sequence_lengths)
    shares = [float(each) for each in corpus.split.split(",")]
    # As Megatron cuts them.
    ends = [round(sum(shares[: count + 1]) / sum(shares) * len(lengths)) for count in range(2)]
    tokens = np.cumsum(lengths[: ends[0]])
    middle = int(np.searchsorted(tokens, share * tokens[-1])) + 1
    training = {"first": range(middle), "more": range(middle, ends[0]), "all": range(ends[0])}
    validation = range(*ends)
    for name, documents in training.items():
        if not documents:
            raise ValueError(
                f"corpus of {ends[0]} training documents: none is left for the part {name!r}; expected one or more; "
                "use a larger corpus"
            )
    folder = corpus.folder / f"parts-{middle}"
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)  # an earlier process of the same number
        unfinished.mkdir()
        try:
            for name, documents in training.items():
                write_dataset(unfinished / name, (data[at] for at in (*documents, *validation)))
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    parts = {}
    for name, documents in training.items():
        training_tokens = int(lengths[list(documents)].sum())
        own = {
            "tokens": training_tokens + int(lengths[list(validation)].sum()),
            "training_tokens": training_tokens,
            "split": f"{len(documents)},{len(validation)},0",
        }
        parts[name] = Part(folder, corpus.description | own, name)
    return parts
