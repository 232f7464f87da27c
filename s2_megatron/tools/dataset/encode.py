"""Documents become token ids, by the tokenizer that Megatron's launch builds, over several processes and in order."""

from __future__ import annotations

import codecs
import json
import logging
import os
import signal
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from s2_megatron.config.errors import printable
from s2_megatron.megatron.host.processes import signal_when_parent_ends
from s2_megatron.tools.dataset.texts import Batch
from s2_megatron.tools.dataset.write import quiet_import

TOKENIZER_TYPE = "HuggingFaceTokenizer"  # Megatron's name of one in a Hugging Face folder
WAITING = 4  # batches for each worker, so that none waits and few are in memory


class Encoded(NamedTuple):
    """documents: int32 arrays, each ended by the end-of-document token. bytes: of their texts. empty: documents without
    a character, which are left out."""

    documents: list[np.ndarray]
    bytes: int
    empty: int


def tokenizer_arguments(folder: Path) -> Namespace:
    """What Megatron's build_tokenizer reads of a launch with this folder as its --tokenizer-model and no other flag of
    tokenizers."""
    with quiet_import():
        from megatron.training.config.training_config import TokenizerConfig

    given = dict(tokenizer_type=TOKENIZER_TYPE, tokenizer_model=str(folder), pad_vocab_size=False)
    return Namespace(**vars(TokenizerConfig(**given)))


class Encoder:
    """A tokenizer, and what ends a document.

    folder: of Hugging Face. key: of the text in an object of JSON. Raises ValueError for a folder without a tokenizer
    and for one that has no token to end a document with.
    """

    def __init__(self, folder: Path, key: str):
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker has one core
        with quiet_import():
            from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        logging.getLogger("transformers").setLevel(logging.ERROR)  # "sequence length is longer than the maximum"
        shown = f"--tokenizer {printable(folder, 200)}"
        if not folder.is_dir():
            raise ValueError(f"{shown}: no such folder; expected a Hugging Face tokenizer's; correct the path")
        try:
            self.tokenizer = build_tokenizer(tokenizer_arguments(folder))
        except Exception as error:  # whatever the libraries raise for files that are no tokenizer
            raise ValueError(
                f"{shown}: cannot be loaded ({printable(' '.join(str(error).split()), 200)}); expected a folder with "
                "tokenizer.json; name the one that save_pretrained wrote"
            ) from error
        self.eod = self.tokenizer.eod
        if self.eod is None:
            raise ValueError(
                f"{shown}: has no eos_token, by which Megatron ends a document; expected one; name it in "
                "tokenizer_config.json"
            )
        self.vocabulary, self.key = self.tokenizer.vocab_size, key

    def __call__(self, batch: Batch) -> Encoded:
        """Raises ValueError for a document that is no text."""
        documents, size, empty = [], 0, 0
        for number, content in enumerate(batch.documents):
            place = printable(batch.path, 200) + (f", line {batch.first + number}" if batch.first else "")
            if batch.json and not content.strip():
                continue
            if batch.first + number <= 1:
                content = content.removeprefix(codecs.BOM_UTF8)
            text = self._text(content, batch.json, place)
            if batch.first and not batch.json:
                text = text.rstrip("\r\n")
            if not text.strip():
                empty += 1
                continue
            ids = np.array(self.tokenizer.tokenize(text), np.int64)
            if len(ids) == 0 or ids[-1] != self.eod:  # some tokenizers end a text with it themselves
                ids = np.append(ids, self.eod)
            if not 0 <= ids.min() <= ids.max() < self.vocabulary:
                raise ValueError(
                    f"{place}: the tokenizer made the token {ids.max()}, and says that it has {self.vocabulary}; "
                    "expected less; mend its files"
                )
            documents.append(ids.astype(np.int32))
            size += len(text.encode())
        return Encoded(documents, size, empty)

    def _text(self, content: bytes, is_json: bool, place: str) -> str:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{place}: no UTF-8 (byte {error.start}: 0x{content[error.start]:02x}); expected text; convert it, "
                "with iconv for example, or leave the file out"
            ) from error
        if not is_json:
            return text
        try:
            found = json.loads(text)[self.key]
            found.encode()
        except (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{place}: {printable(text)}: expected an object of JSON with a text under {self.key!r}; mend the "
                "line, or give --text-key"
            ) from error
        return found


_encoder: Encoder | None = None  # of a worker, which is a fork


def _start(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's
    signal_when_parent_ends()


def _encode(batch: Batch) -> Encoded:
    return _encoder(batch)


def encoded(encoder: Encoder, batches: Iterable[Batch], workers: int) -> Iterator[Encoded]:
    """The batches in their order, whatever the number of workers. Raises what `encoder` does for the first bad one."""
    if workers == 1:
        yield from map(encoder, batches)
        return
    with ProcessPoolExecutor(workers, get_context("fork"), _start, (encoder,)) as pool:
        waiting: deque = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_encode, batch))
                if len(waiting) >= WAITING * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise ValueError(
                "a worker was killed; expected memory for the largest document in each; give a smaller --workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
