"""Folders that a run will write, the data and the tokenizer that it will read, and the space that a checkpoint takes.

Nothing is written and no folder is made. Paths of other storage (s3://, msc://) are not looked at.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from s2_megatron.config.errors import printable

DEFAULT_TOKENIZER = "GPT2BPETokenizer"  # of pretrain_gpt_s2.py, as of Megatron's pretrain_gpt.py
INDEX_HEADER = b"MMIDIDX\x00\x00"
INDEX_FIELDS = struct.Struct("<9sQBQQ")  # header, version, dtype, sequences, documents
DTYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # of Megatron's codes
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # of the codes of integers
TOKENS_LOOKED_AT = 2**20  # of each dataset, its first ones
# Folders that are written, by the argument's name; of files, the folder that holds them.
WRITTEN_FOLDERS = (
    "save", "tensorboard_dir", "wandb_save_dir", "data_cache_path", "flight_recorder_dump_path",
    "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir",
)  # fmt: skip
WRITTEN_FILES = ("s2_loss_log",)
# Files that are read once the processes are up, by the argument's name.
READ_FILES = ("nccl_communicator_config_path", "per_dataset_sequences_path", "tp_comm_overlap_cfg")


def is_remote(path: str) -> bool:
    return "://" in path


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())


def check_written(args: Namespace) -> None:
    """Raises ValueError for a folder that cannot be made or written, and for a file where a folder belongs."""
    for name in (*WRITTEN_FOLDERS, *WRITTEN_FILES):
        value = getattr(args, name, None)
        if not value or is_remote(str(value)):
            continue
        flag, is_file = f"--{name.replace('_', '-')}={printable(value, 200)}", name in WRITTEN_FILES
        path = Path(value).absolute()
        if "\0" in str(value):
            raise ValueError(f"{flag}: expected a path without a null byte; name another one")
        try:
            if is_file and path.exists() and not path.is_file():
                raise ValueError(f"{flag}: a folder or a device; expected a file; name a file in it")
            if is_file and path.exists() and not os.access(path, os.W_OK):
                raise ValueError(f"{flag}: expected a file that can be written; chmod u+w it, or name another one")
            folder = _existing(path.parent if is_file else path)
            if not folder.is_dir():
                raise ValueError(
                    f"{flag}: {printable(folder, 200)} is a file; expected a folder; name another one, or move the "
                    "file away"
                )
            if os.statvfs(folder).f_flag & os.ST_RDONLY:
                raise ValueError(
                    f"{flag}: {printable(folder, 200)} cannot be written (Read-only file system); expected a writable "
                    "folder; mount it for writing, or name another one"
                )
            if not os.access(folder, os.W_OK | os.X_OK):
                raise ValueError(
                    f"{flag}: {printable(folder, 200)} cannot be written by this user; expected a writable folder; "
                    "chmod u+w it, or name another one"
                )
        except OSError as error:
            raise ValueError(f"{flag}: {error.strerror}; expected a path that can be used; name another one") from error


def checkpoint_bytes(args: Namespace, vocabulary: int | None = None) -> int:
    """About what one checkpoint takes: weights, and the optimizer's state (two moments and, with 16-bit weights, the
    fp32 copy) unless --no-save-optim. vocabulary: tokens, default args.vocab_size or 50,000."""
    hidden, layers, heads = args.hidden_size, args.num_layers, args.num_attention_heads
    if not (hidden and layers and heads):
        return 0
    head_dim = args.kv_channels or hidden // heads
    kv_heads = args.num_query_groups if args.group_query_attention else heads
    inner = args.ffn_hidden_size or (int(4 * hidden * 2 / 3 / 64) * 64 if args.swiglu else 4 * hidden)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = hidden * inner * (3 if args.swiglu else 2) * max(1, args.num_experts or 1)
    words = (vocabulary or args.vocab_size or 50_000) * hidden
    parameters = layers * (attention + mlp) + words * (2 if args.untie_embeddings_and_output_weights else 1)
    half = args.bf16 or args.fp16
    return parameters * ((2 if half else 4) + (0 if args.no_save_optim else (12 if half else 8)))


def space_warning(args: Namespace) -> str | None:
    """What to say when --save's disk has no room for one more checkpoint."""
    if not args.save or is_remote(args.save):
        return None
    needed, free = checkpoint_bytes(args), shutil.disk_usage(_existing(Path(args.save).absolute())).free
    if free >= needed:
        return None
    return (
        f"WARNING: --save={printable(args.save, 200)} has {_gigabytes(free)} free, and one checkpoint takes about "
        f"{_gigabytes(needed)}; free some, or name another folder"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 5e7 else f"{count / 1e6:,.1f} MB"


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
    """(flag, prefixes) of every data flag that is given. Raises ValueError for lists in files that cannot be read."""
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if getattr(args, name):
            yield f"--{name.replace('_', '-')}", prefixes(list(getattr(args, name)))
    for name in ("data_args_path", "per_split_data_args_path"):
        path = getattr(args, name)
        if not path or is_remote(path):
            continue
        flag = f"--{name.replace('_', '-')}={printable(path, 200)}"
        try:
            text = Path(path).read_text(encoding="utf-8")
            lists = [text] if name == "data_args_path" else json.loads(text).values()
            found = [prefixes(part.split() if isinstance(part, str) else list(part)) for part in lists if part]
        except (OSError, ValueError, AttributeError, TypeError) as error:
            why = getattr(error, "strerror", None) or "not in Megatron's form"
            raise ValueError(
                f"{flag}: {why}; expected a text of weights and prefixes (for --per-split-data-args-path JSON with "
                "train, valid and test); mend the file"
            ) from error
        yield flag, [str(prefix) for part in found for prefix in part]


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


DEFAULT_SPLIT = "969, 30, 1"  # Megatron's


def _header(prefix: str) -> tuple[int, int, int]:
    """(code of the tokens' type, sequences, documents with the end of the last) of a dataset that check_data passed."""
    with open(f"{prefix}.idx", "rb") as file:
        return INDEX_FIELDS.unpack(file.read(INDEX_FIELDS.size))[2:]


def _empty_parts(split: str, documents: int) -> list[str]:
    """The parts of a split that are to have data, and get none of so many documents; by Megatron's own arithmetic."""
    from megatron.core.datasets import blended_megatron_dataset_config as config

    ends = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    return [
        name
        for name, part in zip(("training", "validation", "test"), ends, strict=True)
        if part is not None and round(part[0] * documents) == round(part[1] * documents)
    ]


def check_parts(args: Namespace) -> None:
    """Raises ValueError for a part of --split that gets no document of a dataset: Megatron 0.19.2 then counts epochs of
    no tokens without end (core/datasets/gpt_dataset.py:693)."""
    other = Path(sys.argv[0]).name != "pretrain_gpt_s2.py"  # whose datasets may be others
    if other or args.mock_data or args.sft or getattr(args, "dataloader_fast_cache_load", False):
        return
    split = args.split or DEFAULT_SPLIT
    for flag, found in _data_flags(args):
        if not flag.startswith(("--data-path", "--data-args-path")):
            continue  # one list for each part
        for prefix in found:
            documents = 0 if is_remote(prefix) else _header(prefix)[1]
            empty = _empty_parts(split, documents) if documents else []
            if empty:
                better = [text for text in ("99,1,0", "90,10,0", "50,50,0") if not _empty_parts(text, documents)]
                use = f"--split {better[0]}" if better else "--split 100,0,0 and --eval-iters 0"
                default = "" if args.split else " (Megatron's default)"
                raise ValueError(
                    f"--split={printable(split)}{default} with {flag}={printable(prefix, 200)}: its part for "
                    f"{empty[0]} gets none of the {documents} documents, and Megatron fails or looks without end; "
                    f"expected one or more in each part that is not 0; use {use}"
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


def check_tokenizer(args: Namespace) -> None:
    """Raises ValueError for a tokenizer whose files are not there. Names of a hub are not looked up."""
    kind, model = args.tokenizer_type or DEFAULT_TOKENIZER, args.tokenizer_model
    if kind == "NullTokenizer" and args.vocab_size is None:
        raise ValueError("--tokenizer-type=NullTokenizer without --vocab-size; expected both; add --vocab-size 32000")
    if kind in ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"):
        wanted = ["vocab_file"] + ["merge_file"] * (kind == "GPT2BPETokenizer")
        for name in wanted:
            _check_readable(name, getattr(args, name), f"--tokenizer-type {kind}")
        return
    if kind in ("NullTokenizer", "NullMultimodalTokenizer", "MultimodalTokenizer"):
        return
    if model is not None and kind in ("HuggingFaceTokenizer", "SFTTokenizer") and _is_hub_name(model):
        return
    _check_readable("tokenizer_model", model, f"--tokenizer-type {kind}")
    if kind == "HuggingFaceTokenizer" and Path(model).is_dir():
        known = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
        if not any((Path(model) / name).is_file() for name in known):
            raise ValueError(
                f"--tokenizer-model={printable(model, 200)}: no tokenizer in this folder; expected tokenizer.json; "
                "name the folder that save_pretrained wrote"
            )


def _is_hub_name(model: str) -> bool:
    """Whether a tokenizer's name is one of the hub's, such as `org/name`, rather than a path."""
    return not Path(model).exists() and model.count("/") <= 1 and not model.startswith(("/", ".", "~"))


def check_read(args: Namespace) -> None:
    """Raises ValueError for a file of READ_FILES that is not there or cannot be read."""
    for name in READ_FILES:
        value = getattr(args, name, None)
        if value and not is_remote(value) and ("\0" in value or not os.access(value, os.R_OK) or Path(value).is_dir()):
            raise ValueError(
                f"--{name.replace('_', '-')}={printable(value, 200)}: no file that this user can read; expected one; "
                "correct the path, or leave the flag out"
            )


def _check_readable(name: str, value: str | None, wanted_by: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        raise ValueError(f"{flag} is not given, and {wanted_by} needs it; expected its path; add {flag} PATH")
    if is_remote(value):
        return
    if "\0" in value or not Path(value).exists():
        raise ValueError(
            f"{flag}={printable(value, 200)}: no such file or folder; expected the tokenizer's; correct it"
        )
    if not os.access(value, os.R_OK):
        raise ValueError(
            f"{flag}={printable(value, 200)}: cannot be read by this user; expected a readable file; chmod u+r"
        )


def check_files(args: Namespace) -> list[str]:
    """Everything of this module. Returns what is worth a warning, raises ValueError for what is wrong."""
    check_written(args)
    check_read(args)
    check_data(args)
    check_parts(args)
    check_sequences(args)
    check_tokenizer(args)
    warning = space_warning(args)
    return [] if warning is None else [warning]
