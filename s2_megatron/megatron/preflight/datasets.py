"""The datasets that a run will read: cut files, parts without a token, tokens of another vocabulary.

Megatron's own reader opens them; what it says of a file is said with the flag. Nothing is written. Paths of other
storage (s3://, msc://) are not looked at.
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import numpy as np

from s2_megatron.config.errors import printable
from s2_megatron.megatron.errors import is_of_the_machine
from s2_megatron.megatron.host.paths import is_remote
from s2_megatron.megatron.preflight.values import flag_of

DEFAULT_SPLIT = "969, 30, 1"  # Megatron's
NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
SPLIT = re.compile(rf"['\"\s]*{NUMBER}((?:\s*[,/]\s*|\s+){NUMBER}){{0,2}}['\"\s]*")
TOKENS_LOOKED_AT = 2**20  # of each dataset, its first ones


def split_shares(text: str) -> list[float]:
    """The numbers of --split, with commas, slashes or spaces between them; quotes around them, which a shell's array
    leaves there, are read over. Raises ValueError for anything else, such as 1e-9: Megatron takes every run of digits
    and points for a number."""
    shares = [float(number) for number in re.findall(NUMBER, text)] if SPLIT.fullmatch(text) else [0.0]
    if shares[0] == 0 or sum(shares) >= 1e12:
        raise ValueError(
            f"--split={printable(text)}: expected up to three numbers in plain digits, 0 or more, the first above 0; "
            "use --split 99,1,0"
        )
    return shares


def _data_lists(args: Namespace) -> list[tuple[str, list[str]]]:
    """(flag, prefixes) of every list of data, as Megatron reads them; what it raises for one that it cannot read."""
    from megatron.training.utils import get_blend_and_blend_per_split

    whole, parts = get_blend_and_blend_per_split(args)
    flags = ["--data-path"] if whole else ["--train-data-path", "--valid-data-path", "--test-data-path"]
    name = "data_args_path" if whole else "per_split_data_args_path"
    if getattr(args, name):
        flags = [f"{flag_of(name)}={printable(getattr(args, name), 200)}"] * len(flags)
    return [(flag, blend[0]) for flag, blend in zip(flags, [whole] if whole else parts or (), strict=False) if blend]


def dataset_problem(prefix: str) -> str | None:
    """What is wrong with an indexed dataset, PREFIX.idx and PREFIX.bin: Megatron's words, or that it was cut."""
    try:
        for suffix in (".idx", ".bin"):
            if not Path(prefix + suffix).is_file():
                without = prefix.endswith((".idx", ".bin")) and Path(prefix).is_file()
                return f"{suffix} is missing" + ("; the prefix has no suffix" if without else "")
        index = _read_index(prefix)
        end, size = _end(index), Path(f"{prefix}.bin").stat().st_size
    except Exception as error:
        if is_of_the_machine(error):
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        return f".idx cannot be read: {printable(reason, 200)}"
    if end == 0:
        return f"has {len(index)} documents, and no token in any"
    return f".bin was cut: it has {size} of {end} bytes" if size < end else None


def _read_index(prefix: str):
    """Megatron's reader of an index. Not its dataset: one that cannot be made leaves a traceback behind."""
    from megatron.core.datasets.indexed_dataset import _IndexReader

    return _IndexReader(f"{prefix}.idx", multimodal=False)


def _end(index) -> int:
    """Where the last sequence of a dataset ends in the .bin, in bytes."""
    if not len(index):
        return 0
    return int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size


def _empty_parts(split: str, starts: np.ndarray) -> list[str]:
    """The parts of a split that shall have data, and get no token, by Megatron's own arithmetic. starts: of the
    sequences in the .bin, in bytes, and the end of the last, int64 [n + 1]."""
    from megatron.core.datasets import blended_megatron_dataset_config as config

    documents = len(starts) - 1
    ends = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    return [
        name
        for name, part in zip(("training", "validation", "test"), ends, strict=True)
        if part is not None and starts[round(part[0] * documents)] == starts[round(part[1] * documents)]
    ]


def _check_parts(args: Namespace, flag: str, prefix: str) -> None:
    """Raises ValueError for a part of --split that gets no token of a dataset: Megatron counts epochs of no tokens
    without end."""
    split, index = args.split or DEFAULT_SPLIT, _read_index(prefix)
    starts = np.append(index.sequence_pointers, _end(index))
    empty = _empty_parts(split, starts)
    if empty:
        better = [text for text in ("99,1,0", "90,10,0", "50,50,0") if not _empty_parts(text, starts)]
        use = f"--split {better[0]}" if better else "--split 100,0,0 and --eval-iters 0"
        default = "" if args.split else " (Megatron's default)"
        with_tokens = " that have tokens" if (starts[1:] == starts[:-1]).any() else ""
        raise ValueError(
            f"--split={printable(split)}{default} with {flag}={printable(prefix, 200)}: its part for {empty[0]} gets "
            f"none of the {len(starts) - 1} documents{with_tokens}, and Megatron fails or looks without end; expected "
            f"one or more in each part that is not 0; use {use}"
        )


def check_tokens(args: Namespace) -> None:
    """Raises ValueError for data of another tokenizer: with tokens that this run's vocabulary does not have, at which
    the embedding fails, on a GPU without a word about the reason. args: Megatron's, validated, its tokenizer built."""
    vocabulary = getattr(args, "padded_vocab_size", None)
    if not vocabulary or args.mock_data or args.sft:
        return
    counted = getattr(args, "per_dataset_sequences_path", None) is not None
    for flag, found in _data_lists(args):
        for prefix in found:
            if is_remote(prefix) or dataset_problem(prefix) is not None:
                continue
            dtype = np.dtype(_read_index(prefix).dtype)
            if counted and dtype.itemsize > 2 and vocabulary <= 2**16:
                raise ValueError(
                    f"--per-dataset-sequences-path with {flag}={printable(prefix, 200)}: its tokens have "
                    f"{dtype.itemsize} bytes, and with that flag Megatron reads 2 for a vocabulary of {vocabulary}; "
                    "expected tokens of 2 bytes; leave --per-dataset-sequences-path out"
                )
            token = int(np.fromfile(f"{prefix}.bin", dtype, TOKENS_LOOKED_AT).max())
            if token >= vocabulary:
                raise ValueError(
                    f"{flag}={printable(prefix, 200)}: has the token {token}, and the vocabulary {vocabulary} tokens; "
                    "expected data of this run's tokenizer; give the tokenizer that the data was made with, or make "
                    "the data again"
                )


def check_datasets(args: Namespace, *, own_data: bool = True) -> None:
    """Everything of this module that needs no tokenizer. own_data: the datasets are those of pretrain_gpt_s2.py. Raises
    ValueError for a wrong --split; when there is no data, for which Megatron takes random tokens without a word; and
    for datasets that are missing, cut, or too small for their parts."""
    if args.split is not None:
        split_shares(args.split)
    if args.mock_data:
        return
    if not (lists := _data_lists(args)):
        raise ValueError(
            "no data: --data-path is not given; expected data; add --data-path PREFIX, or --mock-data for a trial"
        )
    in_parts = own_data and not getattr(args, "dataloader_fast_cache_load", False)
    for flag, found in [] if args.sft else lists:
        here = [prefix for prefix in found if not is_remote(prefix)]
        problems = ((prefix, dataset_problem(prefix)) for prefix in here)
        wrong = [f"{flag}={printable(prefix, 200)}: {problem}" for prefix, problem in problems if problem is not None]
        if wrong:
            more = f" (and {len(wrong) - 1} more of its {len(found)})" if len(wrong) > 1 else ""
            raise ValueError(
                f"{wrong[0]}{more}; expected an indexed dataset, PREFIX.idx and PREFIX.bin; correct the path, or write "
                "the file again"
            )
        if in_parts and flag.startswith(("--data-path", "--data-args-path")):  # others have one list for each part
            for prefix in here:
                _check_parts(args, flag, prefix)
