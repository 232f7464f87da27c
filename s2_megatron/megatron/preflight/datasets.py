"""The datasets that a run will read: cut files, parts without a token, tokens of another vocabulary.

Megatron's own reader opens them; what it says of a file is said with the flag. Nothing is written. Paths of other
storage (s3://, msc://) are not looked at.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from s2_megatron.config.errors import printable
from s2_megatron.megatron.errors import is_of_the_machine
from s2_megatron.megatron.host.paths import is_remote

DEFAULT_SPLIT = "969, 30, 1"  # Megatron's
TOKENS_LOOKED_AT = 2**20  # of each dataset, its first ones


def split_shares(text: str) -> list[float]:
    """The numbers of --split, with commas, slashes or spaces between them; quotes around them, which a shell's array
    leaves there, are read over. Raises ValueError for what is no split, and where Megatron reads other numbers, such as
    of 1e-9: it takes every run of digits and points for a number."""
    try:
        shares = [float(part) for part in re.split(r"\s*[,/]\s*|\s+", text.strip("'\" \t"))]
        read = [float(part) for part in re.findall(r"[.0-9]+", text)]
    except ValueError:
        shares = read = []
    if not shares or shares != read or len(shares) > 3 or shares[0] == 0 or sum(shares) >= 1e12:
        raise ValueError(
            f"--split={printable(text)}: expected up to three numbers in plain digits, 0 or more, the first above 0; "
            "use --split 99,1,0"
        )
    return shares


def prefixes(words: list[str]) -> list[str]:
    """The dataset prefixes of --data-path, which may have a weight before each."""
    if len(words) % 2 == 0:
        try:
            [float(word) for word in words[::2]]
        except ValueError:
            return words
        return words[1::2]
    return words


def _data_flags(args: Namespace) -> Iterator[tuple[str, list[str]]]:
    """(flag, prefixes) of every data flag that is given. Lists in files that cannot be read are Megatron's to say."""
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if getattr(args, name):
            yield f"--{name.replace('_', '-')}", prefixes(list(getattr(args, name)))
    for name in ("data_args_path", "per_split_data_args_path"):
        path = getattr(args, name)
        try:
            text = Path(path).read_text(encoding="utf-8") if path and not is_remote(path) else ""
            lists = [text] if name == "data_args_path" else json.loads(text or "{}").values()
            found = [part.split() if isinstance(part, str) else list(map(str, part)) for part in lists if part]
        except (OSError, ValueError, AttributeError, TypeError):
            found = []
        yield from ((f"--{name.replace('_', '-')}={printable(path, 200)}", prefixes(part)) for part in found)


def dataset_problem(prefix: str) -> str | None:
    """What is wrong with an indexed dataset, PREFIX.idx and PREFIX.bin: Megatron's words, or that it was cut."""
    try:
        for suffix in (".idx", ".bin"):
            if not Path(prefix + suffix).is_file():
                without = prefix.endswith((".idx", ".bin")) and Path(prefix).is_file()
                return f"{suffix} is missing" + ("; the prefix has no suffix" if without else "")
        ends = _starts(prefix)
        size = Path(f"{prefix}.bin").stat().st_size
    except Exception as error:
        if is_of_the_machine(error):
            raise
        return f".idx cannot be read: {' '.join(str(error).split()) or type(error).__name__}"
    if ends[-1] == 0:
        return f"has {len(ends) - 1} documents, and no token in any"
    return f".bin was cut: it has {size} of {ends[-1]} bytes" if size < ends[-1] else None


def _index(prefix: str):
    """Megatron's reader of a dataset's .idx. Not its dataset: one that cannot be made leaves a traceback behind."""
    from megatron.core.datasets.indexed_dataset import _IndexReader

    return _IndexReader(f"{prefix}.idx", multimodal=False)


def _starts(prefix: str) -> np.ndarray:
    """Where each sequence of a dataset begins in the .bin, in bytes; and where the last ends. int64 [n + 1]"""
    index = _index(prefix)
    if len(index) == 0:
        return np.zeros(1, np.int64)
    end = index.sequence_pointers[-1] + int(index.sequence_lengths[-1]) * index.dtype_size
    return np.append(index.sequence_pointers, end)


def check_data(args: Namespace) -> None:
    """Raises ValueError when there is no data, for which Megatron takes random tokens without a word, or a dataset is
    missing or cut."""
    if args.mock_data:
        return
    given = list(_data_flags(args))
    if not given and not args.data_args_path and not args.per_split_data_args_path:
        raise ValueError(
            "no data: --data-path is not given; expected data; add --data-path PREFIX, or --mock-data for a trial"
        )
    for flag, found in [] if args.sft else given:
        problems = ((prefix, dataset_problem(prefix)) for prefix in found if not is_remote(prefix))
        wrong = [f"{flag}={printable(prefix, 200)}: {problem}" for prefix, problem in problems if problem is not None]
        if wrong:
            more = f" (and {len(wrong) - 1} more of its {len(found)})" if len(wrong) > 1 else ""
            raise ValueError(
                f"{wrong[0]}{more}; expected an indexed dataset, PREFIX.idx and PREFIX.bin; correct the path, or write "
                "the file again"
            )


def _empty_parts(split: str, starts: np.ndarray) -> list[str]:
    """The parts of a split that are to have data, and get no token of a dataset; by Megatron's own arithmetic. starts:
    of _starts."""
    from megatron.core.datasets import blended_megatron_dataset_config as config

    documents = len(starts) - 1
    ends = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    return [
        name
        for name, part in zip(("training", "validation", "test"), ends, strict=True)
        if part is not None and starts[round(part[0] * documents)] == starts[round(part[1] * documents)]
    ]


def check_parts(args: Namespace) -> None:
    """Raises ValueError for a part of --split that gets no token of a dataset: Megatron counts epochs of no tokens
    without end."""
    if args.mock_data or args.sft or getattr(args, "dataloader_fast_cache_load", False):
        return
    split = args.split or DEFAULT_SPLIT
    for flag, found in _data_flags(args):
        if not flag.startswith(("--data-path", "--data-args-path")):
            continue  # one list for each part
        for prefix in found:
            starts = np.zeros(1) if is_remote(prefix) else _starts(prefix)
            documents = len(starts) - 1
            empty = _empty_parts(split, starts) if documents else []
            if empty:
                better = [text for text in ("99,1,0", "90,10,0", "50,50,0") if not _empty_parts(text, starts)]
                use = f"--split {better[0]}" if better else "--split 100,0,0 and --eval-iters 0"
                default = "" if args.split else " (Megatron's default)"
                with_tokens = " that have tokens" if (starts[1:] == starts[:-1]).any() else ""
                raise ValueError(
                    f"--split={printable(split)}{default} with {flag}={printable(prefix, 200)}: its part for "
                    f"{empty[0]} gets none of the {documents} documents{with_tokens}, and Megatron fails or looks "
                    f"without end; expected one or more in each part that is not 0; use {use}"
                )


def check_tokens(args: Namespace) -> None:
    """Raises ValueError for data of another tokenizer: with tokens that this run's vocabulary does not have, at which
    the embedding fails, on a GPU without a word about the reason. args: Megatron's, validated, its tokenizer built."""
    vocabulary = getattr(args, "padded_vocab_size", None)
    if not vocabulary or args.mock_data or args.sft:
        return
    counted = getattr(args, "per_dataset_sequences_path", None) is not None
    for flag, found in _data_flags(args):
        for prefix in found:
            if is_remote(prefix) or dataset_problem(prefix) is not None:
                continue
            index = _index(prefix)
            if counted and index.dtype_size > 2 and vocabulary <= 2**16:
                raise ValueError(
                    f"--per-dataset-sequences-path with {flag}={printable(prefix, 200)}: its tokens have "
                    f"{index.dtype_size} bytes, and with that flag Megatron reads 2 for a vocabulary of {vocabulary}; "
                    "expected tokens of 2 bytes; leave --per-dataset-sequences-path out"
                )
            token = int(np.fromfile(f"{prefix}.bin", index.dtype, TOKENS_LOOKED_AT).max())
            if token >= vocabulary:
                raise ValueError(
                    f"{flag}={printable(prefix, 200)}: has the token {token}, and the vocabulary {vocabulary} tokens; "
                    "expected data of this run's tokenizer; give the tokenizer that the data was made with, or make "
                    "the data again"
                )


def check_datasets(args: Namespace, *, own_data: bool = True) -> None:
    """Everything of this module that needs no tokenizer. own_data: the datasets are those of pretrain_gpt_s2.py. Raises
    ValueError for what is wrong."""
    if args.split is not None:
        split_shares(args.split)
    check_data(args)
    if own_data:
        check_parts(args)
