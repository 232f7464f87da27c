"""Sequences that dense heads are ranked on: code, prose, and passages copied from far back.

    <corpus>/ranked/code.bin, prose.bin, copies.bin, few.bin (and .idx)

They are of documents that the dense model does not read, each sequence of another one, if there are enough: the
beginning of what a directory has of that kind. Each dataset has a sequence a document, the first one spare, because a
split begins with a training part. `copies` are the sequences of `code`, but that they end with passages that stood in
the same sequence, farther back than any window here; only these count. `few` is code of as few directories as have
enough of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from s2_megatron.tools.dataset.write import write_dataset
from studies.chosen import SEQUENCES
from studies.corpus import BytePairs, Bytes, Corpus
from studies.files import Root, machine_roots, read_text, refusal_of_text

SUFFIXES = {"code": (".py", ".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".js"), "prose": (".md", ".rst", ".txt")}
REPEATED_SHARE = 8  # of a sequence one in so many tokens is copied
PASSAGE = 64  # tokens; in shorter sequences less
SEED = 7


def repeated_from(length: int) -> int:
    """The first position whose prediction counts in `copies`: it predicts the first copied token."""
    return length - length // REPEATED_SHARE


def with_copies(row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A sequence whose end is passages of its own text, in another order. row: int64 [length + 1]."""
    length = len(row) - 1
    size, first = min(PASSAGE, length // 64), repeated_from(length) + 1
    found, count = row.copy(), (length + 1 - first) // size
    # Evenly over all that is an eighth of the sequence or more before the copies, and not in the sink.
    starts = np.linspace(size, first - length // REPEATED_SHARE - size, count).astype(int)
    for at, start in enumerate(rng.permutation(starts)):
        found[first + at * size : first + (at + 1) * size] = row[start : start + size]
    return found


def make_ranked(
    corpus: Corpus, more: Corpus, length: int, kinds: Iterable[str], tell=print, roots: list[Root] | None = None
) -> None:
    """Make the datasets of these kinds, each once. more: the part of the corpus that the dense model does not read.
    length: tokens of a sequence. Raises ValueError where there is too little of a kind."""
    folder = corpus.folder / "ranked"
    for kind in sorted(kinds):
        if (folder / f"{kind}.idx").exists():
            continue
        folder.mkdir(exist_ok=True)
        of = "prose" if kind == "prose" else "code"
        rows = _sequences(corpus, more, length, of, kind == "few", roots or machine_roots())
        if kind == "copies":
            rng = np.random.default_rng(SEED)
            rows = [with_copies(row, rng) for row in rows]
        write_dataset(folder / kind, rows)
        tell(f"sequences to rank heads on: {kind}")


def _sequences(corpus: Corpus, more: Corpus, length: int, kind: str, of_few: bool, roots: list[Root]) -> np.ndarray:
    """uint16 [SEQUENCES + 1, length + 1], of the last documents first. of_few: of each document all that it has, where
    else a second one comes after all documents have given their first."""
    tokenizer = BytePairs(corpus.folder / "tokenizer.json") if (corpus.folder / "tokenizer.json").exists() else Bytes()
    wanted, count, found = SEQUENCES + 1, 0, []  # of each document its tokens
    for name in reversed(_unread(corpus, more)):
        texts = _texts(name, roots, SUFFIXES[kind])
        found.append(
            np.concatenate([[], *(np.append(tokenizer.encode([text]), 0) for text in texts)]).astype(np.uint16)
        )
        count += len(found[-1]) / (length + 1) if of_few else len(found[-1]) > length
        if count >= wanted:
            break
    if of_few:
        found = [np.concatenate(found)]
    whole = [own[: len(own) // (length + 1) * (length + 1)].reshape(-1, length + 1) for own in found]
    rows = [own[at] for at in range(wanted) for own in whole if at < len(own)]
    if len(rows) >= wanted:
        return np.stack(rows[:wanted])
    raise ValueError(
        f"{len(rows)} sequences of {length} tokens of {kind} that the dense model does not read; expected {wanted}; "
        "use a machine with more packages"
    )


def _unread(corpus: Corpus, more: Corpus) -> list[str]:
    """The names of that part's training documents, in their order."""
    names = list(json.loads((corpus.folder / "documents.json").read_text()))
    shares = [float(share) for share in corpus.split.split(",")]
    end = round(shares[0] / sum(shares) * len(names))
    return names[end - int(more.split.split(",")[0]) : end]


def _texts(name: str, roots: list[Root], suffixes: tuple[str, ...]) -> list[str]:
    """Of a document's directory the files of these kinds that are no tables. name: as in files.py."""
    if "#" in name:  # a further part of a directory
        return []
    root = next(root for root in roots if name == root.label or name.startswith(f"{root.label}/"))
    files = sorted((root.folder / name[len(root.label) + 1 :]).iterdir())
    texts = (read_text(file) for file in files if file.suffix.lower() in suffixes and file.is_file())
    return [text for text in texts if text is not None and refusal_of_text(text) is None]


def ranked_options(part: Corpus, kind: str, length: int) -> dict:
    """The options of choose-dense for a kind. part: of the corpus, beside which the datasets lie. length: tokens."""
    prefix = part.folder.parent / "ranked" / kind
    late = {"loss-from-position": repeated_from(length)} if kind == "copies" else {}
    return {"data-path": prefix, "split": f"1,{SEQUENCES},0"} | late
