"""Synthetic sequences whose answers are far back: pairs to recall, a needle, and variables to track.

A sequence is noise, random tokens, in which slots of two tokens hold something:

    recall     (key, value) at many places; at the end, or anywhere in the second half, (key, answer)
    needle     the same with one pair and one question
    tracking   (key0, value), (key1, key0), (key2, key1) ...; at the end (key2, answer): the answer of key0's value
    short      in training alone: problems of 64 tokens, of pairs with their questions and of values beside their
               answers

An answer is the value in another range of ids, so that `--s2-loss-from-token` counts the answers alone. No key is asked
twice, hence no answer of a tested task stands near its question. Without short problems small models learn nothing for
long: what a value's answer is and that a key is to be looked for would have to come together, from questions far away.
Every sequence is one document of exactly the model's length, so that Megatron's samples are these sequences.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from s2_megatron.tools.dataset.write import write_dataset
from studies.corpus import Corpus

FORMAT_VERSION = 2
TASKS = ("recall", "needle", "tracking")
FORMS = ("recall", "recall, spread", "needle", "tracking")  # of training sequences, beside short ones
SHORT, SHORT_PAIRS, SHORT_ECHOES = 64, 2, 1  # tokens of a short problem; pairs; values with answers, in each half
START = 0
NOISE, KEYS, VALUES, ANSWERS = (16, 256), (272, 1024), (1296, 256), (1792, 256)  # first id, number
VOCABULARY = 2048
SPLIT, TRAINING_SHARE = "98,2,0", 0.98
TRAINING_SEED, EVALUATION_SEED = 1, 2


@dataclass(frozen=True)
class TaskSettings:
    """sequences: of the data set. pairs: in a sequence to recall, and questions as many. needles: in a training
    sequence of the needle task; its test has one. chains, hops: of the variables; a chain has hops + 1 of them and one
    question. tests: sequences of each task that a trained model is tested with."""

    sequences: int
    pairs: int = 64
    needles: int = 4
    chains: int = 16
    hops: int = 3
    tests: int = 256


class Sequence(NamedTuple):
    """ids: uint16 [length]. questions: int64 [n, 3], of each its position, the position of the value that answers it,
    and the number of hops to there. The answer is the token after the question."""

    ids: np.ndarray
    questions: np.ndarray

    @property
    def answers(self) -> np.ndarray:
        """Of the questions, [n]."""
        return self.ids[self.questions[:, 0] + 1]


def _draw(rng: np.random.Generator, ids: tuple[int, int], count: int, distinct: bool = False) -> np.ndarray:
    first, number = ids
    return first + (rng.permutation(number)[:count] if distinct else rng.integers(0, number, count))


def _noise(rng: np.random.Generator, length: int) -> np.ndarray:
    ids = _draw(rng, NOISE, length)
    ids[0] = START
    return ids


def _write(ids: np.ndarray, slots: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    ids[2 * slots], ids[2 * slots + 1] = first, second


def _answer(values: np.ndarray) -> np.ndarray:
    return values - VALUES[0] + ANSWERS[0]


def recall(
    rng: np.random.Generator, length: int, pairs: int, *, spread: bool = False, slots: np.ndarray | None = None
) -> Sequence:
    """`pairs` pairs, each asked for once. spread: pairs anywhere in the first half, questions anywhere in the second;
    otherwise all questions at the end. slots: of the pairs, drawn where it is None."""
    ids, count = _noise(rng, length), length // 2
    if spread:
        places = 1 + rng.permutation(count // 2 - 1)[:pairs]
        asked = count // 2 + rng.permutation(count - count // 2)[:pairs]
    else:
        places = 1 + rng.permutation(count - pairs - 1)[:pairs] if slots is None else slots
        asked = np.arange(count - pairs, count)
    keys, values = _draw(rng, KEYS, pairs, distinct=True), _draw(rng, VALUES, pairs)
    _write(ids, places, keys, values)
    _write(ids, asked, keys, _answer(values))
    return Sequence(ids.astype(np.uint16), np.stack([2 * asked, 2 * places + 1, np.zeros_like(asked)], axis=1))


def short(rng: np.random.Generator, length: int, answers: int) -> np.ndarray:
    """uint16 [length]: as many problems as give `answers` answers, anywhere; their pairs in the first half of each,
    their questions in the second, and in both halves values with their answers."""
    ids, half = _noise(rng, length), SHORT // 4
    count = min(length // SHORT, max(1, answers // (SHORT_PAIRS + 2 * SHORT_ECHOES)))
    keys = _draw(rng, KEYS, SHORT_PAIRS * count, distinct=True).reshape(count, SHORT_PAIRS)
    for begin, key in zip(2 * half * rng.permutation(length // SHORT)[:count], keys):
        values = _draw(rng, VALUES, SHORT_PAIRS)
        for slots, second in ((begin, values), (begin + half, _answer(values))):
            places = slots + 1 + rng.permutation(half - 1)[: SHORT_PAIRS + SHORT_ECHOES]
            echoed = _draw(rng, VALUES, SHORT_ECHOES)
            _write(ids, places[:SHORT_PAIRS], key, second)
            _write(ids, places[SHORT_PAIRS:], echoed, _answer(echoed))
    return ids.astype(np.uint16)


def tracking(rng: np.random.Generator, length: int, chains: int, hops: int) -> Sequence:
    """`chains` values, each handed on `hops` times from variable to variable; of each chain one variable is asked
    for."""
    ids, count = _noise(rng, length), length // 2
    places = np.sort((1 + rng.permutation(count - chains - 1)[: chains * (hops + 1)]).reshape(chains, hops + 1), axis=1)
    keys = _draw(rng, KEYS, chains * (hops + 1), distinct=True).reshape(chains, hops + 1)
    values = _draw(rng, VALUES, chains)
    _write(ids, places[:, 0], keys[:, 0], values)
    _write(ids, places[:, 1:], keys[:, 1:], keys[:, :-1])
    hop, asked = rng.integers(0, hops + 1, chains), np.arange(count - chains, count)
    _write(ids, asked, keys[np.arange(chains), hop], _answer(values))
    return Sequence(ids.astype(np.uint16), np.stack([2 * asked, 2 * places[:, 0] + 1, hop], axis=1))


def training_sequence(index: int, length: int, settings: TaskSettings) -> np.ndarray:
    """uint16 [length]; the tasks and short problems alternate, and recall comes in both its forms. Behind the share for
    training, in what Megatron validates with, there are no short problems."""
    rng = np.random.default_rng([TRAINING_SEED, index])
    forms = (*FORMS, "short") if index < TRAINING_SHARE * settings.sequences else FORMS
    form = forms[index % len(forms)]
    if form == "short":
        return short(rng, length, settings.pairs)
    if form == "tracking":
        return tracking(rng, length, settings.chains, settings.hops).ids
    pairs = settings.needles if form == "needle" else settings.pairs
    return recall(rng, length, pairs, spread=form == "recall, spread").ids


def held_out_sequence(task: str, index: int, length: int, settings: TaskSettings) -> Sequence:
    """One of settings.tests sequences of a task, none of them in the training data. The needles lie at all depths."""
    rng = np.random.default_rng([EVALUATION_SEED, TASKS.index(task), index])
    if task == "tracking":
        return tracking(rng, length, settings.chains, settings.hops)
    if task == "recall":
        return recall(rng, length, settings.pairs)
    slots = length // 2 - 2
    slot = 1 + int((index + rng.random()) * slots / settings.tests)
    return recall(rng, length, 1, slots=np.array([slot]))


def _training_sequences(task: tuple[range, int, TaskSettings]) -> list[np.ndarray]:
    indices, length, settings = task
    return [training_sequence(index, length, settings) for index in indices]


def prepare_tasks(runs: Path, length: int, settings: TaskSettings, tell=print) -> Corpus:
    """The training data under `runs`, or found there: an indexed dataset like that of the text."""
    parts = json.dumps([FORMAT_VERSION, length, vars(settings)])
    folder = runs.resolve() / "corpus" / f"tasks-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"
    if (folder / "corpus.json").exists():
        return Corpus(folder, json.loads((folder / "corpus.json").read_text()))
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)  # an earlier process of the same number
    unfinished.mkdir(parents=True)
    try:
        digest = hashlib.sha256(parts.encode())
        chunks = [range(start, min(start + 64, settings.sequences)) for start in range(0, settings.sequences, 64)]
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            made = pool.imap(_training_sequences, [(chunk, length, settings) for chunk in chunks])

            def hashed() -> Iterator[np.ndarray]:
                for ids in chain.from_iterable(made):
                    digest.update(ids.tobytes())
                    yield ids

            write_dataset(unfinished / "text", hashed())
        description = {
            "sha256": digest.hexdigest(),
            "documents": settings.sequences,
            "tokens": settings.sequences * length,
            "tokenizer": "synthetic",
            "vocabulary": VOCABULARY,
            "split": SPLIT,
        }
        (unfinished / "corpus.json").write_text(json.dumps(description, indent=1) + "\n")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    tell(f"tasks: {settings.sequences} sequences of {length} tokens")
    return Corpus(folder, description)
