"""The corpus as Megatron reads it: a byte-level BPE tokenizer trained on it, and an indexed dataset.

A prepared corpus lives in `<root>/<key>/`, the key made of the documents' hashes, the seed and the vocabulary size, and
is made once:

    tokenizer/tokenizer.json, tokenizer_config.json    for --tokenizer-type HuggingFaceTokenizer
    text.bin, text.idx                                 for --data-path <folder>/text
    corpus.json                                        documents, hashes, sizes, seed
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.quickstart.corpus import Document, collect_documents, corpus_hash, document_hashes
from s2_megatron.tools.dataset.write import write_dataset

VOCABULARY_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
# Validation gets the last 5 % of the documents in the seeded order: whole files that training never sees.
SPLIT = "95,5,0"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class PreparedCorpus:
    """Where the prepared corpus is, and what it was made of (`description` is corpus.json)."""

    folder: Path
    description: dict

    @property
    def data_prefix(self) -> Path:
        return self.folder / "text"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"


def shuffled(documents: list[Document], seed: int) -> list[Document]:
    """The documents in an order that only the seed decides."""
    documents = sorted(documents, key=lambda document: document.name)
    random.Random(seed).shuffle(documents)
    return documents


def train_byte_pairs(texts: Iterable[str], vocabulary: int):
    """A byte-level BPE of the package `tokenizers`, trained on the texts; END_OF_TEXT is id 0. Raises ValueError when
    the texts are too few for the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(
            f"vocabulary {vocabulary}: the corpus gave {tokenizer.get_vocab_size()} tokens; expected more text; use "
            "a smaller vocabulary"
        )
    return tokenizer


def train_tokenizer(documents: list[Document], folder: Path, vocabulary_size: int):
    """Train a byte-level BPE tokenizer and write it as transformers' AutoTokenizer reads it; the `tokenizers`
    object."""
    from tokenizers import decoders

    tokenizer = train_byte_pairs((document.text for document in documents), vocabulary_size)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END_OF_TEXT,
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        )
        + "\n"
    )
    return tokenizer


def encoded(tokenizer, documents: list[Document]) -> Iterator[np.ndarray]:
    """The ids of every document, each ended by END_OF_TEXT, uint16 [tokens]."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    for encoding in tokenizer.encode_batch([document.text for document in documents]):
        yield np.array([*encoding.ids, end_of_text], np.uint16)


def prepare_corpus(
    root: Path,
    seed: int,
    *,
    vocabulary_size: int = VOCABULARY_SIZE,
    documents: list[Document] | None = None,
    tell=print,
) -> PreparedCorpus:
    """Prepare the corpus under `root`, or find it there; `documents` default to the running Python's.

    Nothing is overwritten: the folder is made under another name and renamed when it is complete.
    """
    if documents is None:
        documents = collect_documents()
    hashes = document_hashes(documents)
    text_hash = corpus_hash(hashes)
    key = hashlib.sha256(f"{FORMAT_VERSION} {text_hash} {seed} {vocabulary_size}".encode()).hexdigest()[:12]
    folder = root / key
    if (folder / "corpus.json").exists():
        return PreparedCorpus(folder, json.loads((folder / "corpus.json").read_text()))

    size = sum(len(document.text.encode()) for document in documents)
    tell(
        f"corpus: {len(documents)} documents, {size / 1e6:.1f} MB, "
        f"of Python {sys.version.split()[0]}'s standard library"
    )
    unfinished = root / f"{key}.unfinished-{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)  # an earlier process of the same number
    unfinished.mkdir(parents=True)
    try:
        ordered = shuffled(documents, seed)
        tokenizer = train_tokenizer(ordered, unfinished / "tokenizer", vocabulary_size)
        tokens = write_dataset(unfinished / "text", encoded(tokenizer, ordered))
        tell(f"tokenizer: byte-level BPE, vocabulary {vocabulary_size}; dataset: {tokens:,} tokens")
        description = {
            "python": sys.version.split()[0],
            "seed": seed,
            "vocabulary_size": vocabulary_size,
            "documents": len(documents),
            "bytes": size,
            "tokens": tokens,
            "sha256": text_hash,
            "file_sha256": hashes,
        }
        (unfinished / "corpus.json").write_text(json.dumps(description, indent=1) + "\n")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return PreparedCorpus(folder, description)
