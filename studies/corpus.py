"""The corpus of the studies: the machine's own text as an indexed dataset of Megatron.

    python -m studies.corpus --runs runs/quality

A prepared corpus lies in `<runs>/corpus/<key>/`, is made once, and is found again by its settings:

    text.bin, text.idx   for --data-path <folder>/text, token ids as uint16, one directory of the machine a document
    tokenizer.json       the byte-level BPE that made them
    documents.json       SHA-256 of every document
    corpus.json          what it was made of, and `sha256`, one hash of all documents and of the tokenizer

Results are pooled only over equal hashes. Two machines of the same image have the same one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from examples.quickstart.dataset import train_byte_pairs
from s2_megatron.tools.dataset.write import write_dataset
from studies.files import Document, Root, file_texts, find_files, machine_roots, make_documents, scan

FORMAT_VERSION = 1
ORDER_SEED = 17  # of the documents; the seed of a run only decides how Megatron reads them
FEWEST_DOCUMENTS = 10


@dataclass(frozen=True)
class CorpusSettings:
    """vocabulary: of the BPE. training_megabytes: text that the BPE is trained on. megabytes: text at most, None for
    all of it. split: shares of training, validation and test, of the documents in their shuffled order: whole
    directories that training never sees. only: labels of the roots, empty for all of them. tokenizer: of a public
    model, <runs>/imported/<tokenizer>/tokenizer.json, in place of a BPE of its own; `vocabulary` is its."""

    vocabulary: int = 16384
    training_megabytes: float = 32
    megabytes: float | None = None
    split: str = "98,2,0"
    only: tuple[str, ...] = ()
    tokenizer: str = ""


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus; description is corpus.json."""

    folder: Path
    description: dict

    @property
    def data_prefix(self) -> Path:
        return self.folder / "text"

    @property
    def vocabulary(self) -> int:
        return self.description["vocabulary"]

    @property
    def split(self) -> str:
        return self.description["split"]

    @property
    def sha256(self) -> str:
        return self.description["sha256"]


class BytePairs:
    """A byte-level BPE of the package `tokenizers`."""

    def __init__(self, file: Path):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(file))

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """The ids of the texts one after the other, uint16 [tokens]."""
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return np.concatenate([np.array(each.ids, np.uint16) for each in encoded])


class Bytes:
    """One token a byte, ids 1 to 256: where `tokenizers` is not installed."""

    VOCABULARY = 257

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return np.frombuffer("".join(texts).encode(), np.uint8).astype(np.uint16) + 1


def sample_texts(documents: Sequence[Document], megabytes: float) -> Iterable[str]:
    """Files of every n-th document until there are `megabytes` of text."""
    total = sum(document.size for document in documents)
    step = max(1, int(total / (megabytes * 1e6)))
    for document in documents[::step]:
        yield from file_texts(document)


_tokenizer: BytePairs | Bytes | None = None


def _encode(task: tuple[Document, str | None]) -> tuple[str, np.ndarray]:
    """(SHA-256 of the document's text, its ids and a 0, which ends it). In a worker, which loads the tokenizer once."""
    global _tokenizer
    document, file = task
    if _tokenizer is None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker has one core
        _tokenizer = Bytes() if file is None else BytePairs(Path(file))
    texts = file_texts(document)
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    return digest, np.append(_tokenizer.encode(texts), np.uint16(0))


def shuffled(documents: Sequence[Document], megabytes: float | None) -> list[Document]:
    """The documents in an order that depends on their names alone; the first of them that have `megabytes`."""
    ordered = sorted(documents, key=lambda document: document.name)
    random.Random(ORDER_SEED).shuffle(ordered)
    if megabytes is None:
        return ordered
    ends = np.cumsum([document.size for document in ordered])
    return ordered[: int(np.searchsorted(ends, megabytes * 1e6)) + 1]


def _settings_key(settings: CorpusSettings, roots: Sequence[Root], byte_pairs: bool) -> str:
    parts = [FORMAT_VERSION, asdict(settings), [(root.label, str(root.folder)) for root in roots], byte_pairs]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def has_tokenizers() -> bool:
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        return False
    return True


def prepare_corpus(runs: Path, settings: CorpusSettings, roots: Sequence[Root] | None = None, tell=print) -> Corpus:
    """Prepare the corpus of this machine under `runs`, or find it there.

    Nothing is overwritten: the folder is made under another name and renamed when it is complete. Raises ValueError for
    a machine with too little text.
    """
    roots = machine_roots() if roots is None else roots
    roots = [root for root in roots if not settings.only or root.label in settings.only]
    byte_pairs = has_tokenizers()
    folder = runs.resolve() / "corpus" / _settings_key(settings, roots, byte_pairs)
    if (folder / "corpus.json").exists():
        return Corpus(folder, json.loads((folder / "corpus.json").read_text()))
    given = runs.resolve() / "imported" / settings.tokenizer / "tokenizer.json" if settings.tokenizer else None
    if given is not None and not (byte_pairs and given.is_file()):
        raise ValueError(f"{given}: is not there, or the package tokenizers is not; expected both; see public_model.md")
    if not byte_pairs:
        tell("corpus: the package tokenizers cannot be imported; one token a byte takes the place of the BPE")
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)  # an earlier process of the same number
    unfinished.mkdir(parents=True)
    try:
        description = _build(unfinished, settings, roots, byte_pairs, given, tell)
        (unfinished / "corpus.json").write_text(json.dumps(description, indent=1) + "\n")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Corpus(folder, description)


def _build(folder: Path, settings: CorpusSettings, roots: Sequence[Root], byte_pairs: bool, given, tell) -> dict:
    began = time.monotonic()

    def step(text: str) -> None:
        tell(f"corpus: {text} ({time.monotonic() - began:.0f} s)")

    # Before any thread is started: the workers are forks.
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        found = find_files(roots)
        documents, dropped = make_documents(pool.map(scan, found, chunksize=64))
        documents = shuffled(documents, settings.megabytes)
        size = sum(document.size for document in documents)
        step(f"{len(documents)} documents, {size / 1e6:.0f} MB of the {len(found)} files found")
        if len(documents) < FEWEST_DOCUMENTS:
            folders = ", ".join(str(root.folder) for root in roots)
            raise ValueError(
                f"corpus: {len(documents)} documents of text under {folders}; expected {FEWEST_DOCUMENTS} or more; run "
                "on a machine with more packages, or give other roots"
            )
        file = folder / "tokenizer.json" if byte_pairs else None
        if given is not None:
            shutil.copy(given, file)
        elif file is not None:
            texts = sample_texts(documents, settings.training_megabytes)
            train_byte_pairs(texts, settings.vocabulary).save(str(file))
            step(f"BPE of {settings.vocabulary} tokens")
        tasks = [(document, None if file is None else str(file)) for document in documents]
        hashes: dict[str, str] = {}

        def encoded() -> Iterable[np.ndarray]:
            for document, (digest, ids) in zip(documents, pool.imap(_encode, tasks, chunksize=4)):
                hashes[document.name] = digest
                yield ids

        tokens = write_dataset(folder / "text", encoded())
    step(f"{tokens:,} tokens, {size / tokens:.2f} bytes a token")
    vocabulary = settings.vocabulary if byte_pairs else Bytes.VOCABULARY
    (folder / "documents.json").write_text(json.dumps(hashes, indent=0) + "\n")
    tokenizer_hash = hashlib.sha256(file.read_bytes() if file is not None else b"bytes").hexdigest()
    parts = json.dumps([FORMAT_VERSION, sorted(hashes.items()), tokenizer_hash, ORDER_SEED])
    return {
        "sha256": hashlib.sha256(parts.encode()).hexdigest(),
        "roots": [root.label for root in roots],
        "documents": len(documents),
        "files": sum(len(document.files) for document in documents),
        "bytes": size,
        "tokens": tokens,
        "tokenizer": "byte-level BPE" if byte_pairs else "bytes",
        "vocabulary": vocabulary,
        "left_out": dict(sorted(dropped.items())),
        "split": settings.split,
        "python": sys.version.split()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.corpus", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/quality"), help="folder of corpus and runs")
    corpus = prepare_corpus(parser.parse_args().runs, CorpusSettings())
    print(json.dumps({"folder": str(corpus.folder), **corpus.description}, indent=1))


if __name__ == "__main__":
    main()
