"""The datasets that a run will read: their files, their shares of a split, their tokens.

Nothing is written. Paths of other storage (s3://, msc://) are not looked at.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from s2_megatron.config.errors import printable
from s2_megatron.megatron.preflight.files import is_remote

DEFAULT_SPLIT = "969, 30, 1"  # Megatron's
INDEX_HEADER = b"MMIDIDX\x00\x00"
INDEX_FIELDS = struct.Struct("<9sQBQQ")  # header, version, dtype, sequences, documents
DTYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # of Megatron's codes
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # of the codes of integers
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


def weights(words: list[str]) -> list[float]:
    """Those of --data-path, as Megatron makes shares of them; none where it has no weights."""
    if prefixes(words) == words:
        return []
    numbers = np.array([float(word) for word in words[::2]])
    with np.errstate(all="ignore"):
        return (numbers / numbers.sum()).tolist()


def _lists(args: Namespace) -> Iterator[tuple[str, list[str]]]:
    """(flag, words) of every data flag that is given. Raises ValueError for lists in files that cannot be read."""
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if getattr(args, name):
            yield f"--{name.replace('_', '-')}", list(getattr(args, name))
    for name in ("data_args_path", "per_split_data_args_path"):
        path = getattr(args, name)
        if not path or is_remote(path):
            continue
        flag = f"--{name.replace('_', '-')}={printable(path, 200)}"
        try:
            text = Path(path).read_text(encoding="utf-8")
            lists = [text] if name == "data_args_path" else json.loads(text).values()
            found = [part.split() if isinstance(part, str) else list(map(str, part)) for part in lists if part]
        except (OSError, ValueError, AttributeError, TypeError) as error:
            why = getattr(error, "strerror", None) or "not in Megatron's form"
            raise ValueError(
                f"{flag}: {why}; expected a text of weights and prefixes (for --per-split-data-args-path JSON with "
                "train, valid and test); mend the file"
            ) from error
        yield from ((flag, part) for part in found)


def _data_flags(args: Namespace) -> Iterator[tuple[str, list[str]]]:
    """(flag, prefixes) of every list of _lists."""
    yield from ((flag, prefixes(words)) for flag, words in _lists(args))


def dataset_problem(prefix: str) -> str | None:
    """What is wrong with an indexed dataset, PREFIX.idx and PREFIX.bin: missing, unreadable, cut."""
    if "\0" in prefix:
        return "has a null byte in its name"
    try:
        for suffix in (".idx", ".bin"):
            file = Path(prefix + suffix)
            if not file.is_file():
                without = prefix.endswith((".idx", ".bin")) and Path(prefix).is_file()
                return f"{suffix} is missing" + ("; the prefix has no suffix" if without else "")
            if not os.access(file, os.R_OK):
                return f"{suffix} cannot be read by this user"
        with open(f"{prefix}.idx", "rb") as file:
            start = file.read(INDEX_FIELDS.size)
            if len(start) < INDEX_FIELDS.size or not start.startswith(INDEX_HEADER):
                return ".idx is no index of a Megatron dataset"
            _, version, code, sequences, documents = INDEX_FIELDS.unpack(start)
            least = INDEX_FIELDS.size + 12 * sequences + 8 * documents
            if version != 1 or code not in DTYPE_BYTES:
                return ".idx is of another version"
            size = os.fstat(file.fileno()).st_size
            if size < least:
                return f".idx was cut: it has {size} of {least} bytes"
            if sequences == 0:
                return "has no document"
            file.seek(INDEX_FIELDS.size + 4 * (sequences - 1))
            (length,) = struct.unpack("<i", file.read(4))
            file.seek(INDEX_FIELDS.size + 4 * sequences + 8 * (sequences - 1))
            (pointer,) = struct.unpack("<q", file.read(8))
        tokens, size = pointer + length * DTYPE_BYTES[code], Path(f"{prefix}.bin").stat().st_size
        if tokens == 0:
            return f"has {sequences} documents, and no token in any"
        return f".bin was cut: it has {size} of {tokens} bytes" if size < tokens else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def check_data(args: Namespace) -> None:
    """Raises ValueError when there is no data, or a part of it is missing or cut."""
    if args.mock_data:
        return
    given = list(_data_flags(args))
    if not given:
        raise ValueError(
            "no data: --data-path is not given; expected data; add --data-path PREFIX, or --mock-data for a trial"
        )
    for flag, found in given:
        wrong = []
        for prefix in found:
            if is_remote(prefix):
                continue
            if args.sft:
                problem = None if os.access(prefix, os.R_OK) else "cannot be read"
            else:
                problem = dataset_problem(prefix)
            if problem is not None:
                wrong.append(f"{flag}={printable(prefix, 200)}: {problem}")
        if wrong:
            more = f" (and {len(wrong) - 1} more of its {len(found)})" if len(wrong) > 1 else ""
            kind = "a file of conversations (--sft)" if args.sft else "an indexed dataset, PREFIX.idx and PREFIX.bin"
            raise ValueError(f"{wrong[0]}{more}; expected {kind}; correct the path, or write the file again")


def check_weights(args: Namespace) -> None:
    """Raises ValueError for weights of datasets that are no shares, and for a split of lists that are parts already:
    Megatron fails at both when it builds the datasets."""
    if args.mock_data or Path(sys.argv[0]).name != "pretrain_gpt_s2.py":
        return
    together = bool(args.data_path or args.data_args_path)  # all parts of one list; Megatron then reads no other
    for flag, words in _lists(args):
        of_part = not flag.startswith(("--data-path", "--data-args-path"))
        if of_part and (together or len(words) == 2):
            continue  # not read, or a single dataset, whose weight is not
        if not all(0 < share <= 1 for share in weights(words)):  # NaN is not, either
            raise ValueError(
                f"{flag}: the weights {printable(' '.join(words[::2]), 200)}; expected numbers above 0; correct them, "
                "or leave all of them out"
            )
    of_parts = ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
    given = next((name for name in of_parts if getattr(args, name)), None)
    if given and args.split is not None and not together:
        raise ValueError(
            f"--split={printable(args.split)} with --{given.replace('_', '-')}: there is one list of data for each "
            "part already; expected one of the two; leave --split out"
        )


def _header(prefix: str) -> tuple[int, int, int]:
    """(code of the tokens' type, sequences, documents with the end of the last) of a dataset that check_data passed."""
    with open(f"{prefix}.idx", "rb") as file:
        return INDEX_FIELDS.unpack(file.read(INDEX_FIELDS.size))[2:]


def _starts(prefix: str) -> np.ndarray:
    """Where each document begins in the .bin of a dataset that check_data passed, in bytes; and where the last ends.
    int64 [documents + 1]"""
    code, sequences, _ = _header(prefix)
    if sequences == 0:
        return np.zeros(1, np.int64)
    after = INDEX_FIELDS.size + 4 * sequences
    starts = np.fromfile(f"{prefix}.idx", "<i8", sequences, offset=after)
    (length,) = np.fromfile(f"{prefix}.idx", "<i4", 1, offset=after - 4)
    return np.append(starts, starts[-1] + int(length) * DTYPE_BYTES[code])


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
    """Raises ValueError for a part of --split that gets no token of a dataset: Megatron 0.19.2 then counts epochs of
    no tokens without end (core/datasets/gpt_dataset.py:693)."""
    other = Path(sys.argv[0]).name != "pretrain_gpt_s2.py"  # whose datasets may be others
    if other or args.mock_data or args.sft or getattr(args, "dataloader_fast_cache_load", False):
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


def check_sequences(args: Namespace) -> None:
    """Raises ValueError for a file of --per-dataset-sequences-path that is not of these datasets: {prefix: [sequences,
    documents]} as in their .idx, which Megatron then does not read."""
    path = getattr(args, "per_dataset_sequences_path", None)
    if path is None or is_remote(path) or Path(sys.argv[0]).name != "pretrain_gpt_s2.py":
        return
    flag = f"--per-dataset-sequences-path={printable(path, 200)}"
    remedy = "write it again with Megatron's tools/build_sequences_per_dataset.py, or leave the flag out"
    try:
        counts = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{flag}: no JSON; expected {{prefix: [sequences, documents]}}; {remedy}") from error
    if args.mock_data or args.sft or not counts:
        return  # which do not read it
    if not isinstance(counts, dict):
        raise ValueError(f"{flag}: no object of JSON; expected {{prefix: [sequences, documents]}}; {remedy}")
    for given, found in _data_flags(args):
        for prefix in found:
            if is_remote(prefix):
                continue
            if prefix not in counts:
                raise ValueError(
                    f"{flag}: has no entry for {printable(prefix, 200)} of {given}; expected one for each dataset, "
                    f"written as there; {remedy}"
                )
            of_file, of_index = counts[prefix], list(_header(prefix)[1:])
            if of_file and not (isinstance(of_file, list) and of_file[:2] == of_index):
                raise ValueError(
                    f"{flag}: has {printable(of_file)} for {printable(prefix, 200)}; expected {of_index}, the "
                    f"sequences and documents of its .idx; {remedy}"
                )


def _largest_token(prefix: str) -> int:
    """Of a dataset's first tokens; -1 where there is nothing to read."""
    try:
        tokens = np.fromfile(f"{prefix}.bin", TOKEN_TYPES[_header(prefix)[0]], TOKENS_LOOKED_AT)
    except (OSError, KeyError, struct.error):  # check_data speaks of those
        return -1
    return int(tokens.max()) if tokens.size else -1


def check_tokens(args: Namespace) -> None:
    """Raises ValueError for data of another tokenizer: with tokens that this run's vocabulary does not have, at which
    the embedding fails, on a GPU without a word about the reason. args: Megatron's, validated, its tokenizer built."""
    vocabulary = getattr(args, "padded_vocab_size", None)
    if not vocabulary or args.mock_data or args.sft:
        return
    counted = getattr(args, "per_dataset_sequences_path", None) is not None
    for flag, found in _data_flags(args):
        for prefix in found:
            width = DTYPE_BYTES[_header(prefix)[0]] if counted and not is_remote(prefix) else 0
            if width > 2 and vocabulary <= 2**16:
                raise ValueError(
                    f"--per-dataset-sequences-path with {flag}={printable(prefix, 200)}: its tokens have {width} "
                    f"bytes, and with that flag Megatron reads 2 for a vocabulary of {vocabulary}; expected tokens of "
                    "2 bytes; leave --per-dataset-sequences-path out"
                )
            token = -1 if is_remote(prefix) else _largest_token(prefix)
            if token >= vocabulary:
                raise ValueError(
                    f"{flag}={printable(prefix, 200)}: has the token {token}, and the vocabulary {vocabulary} tokens; "
                    "expected data of this run's tokenizer; give the tokenizer that the data was made with, or make "
                    "the data again"
                )


def check_datasets(args: Namespace) -> None:
    """Everything of this module that needs no tokenizer. Raises ValueError for what is wrong."""
    if args.split is not None:
        split_shares(args.split)
    check_data(args)
    check_weights(args)
    check_parts(args)
    check_sequences(args)
