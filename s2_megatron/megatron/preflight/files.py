"""Folders that a run will write, the tokenizer and other files that it will read, the space that a checkpoint takes.

Nothing is written and no folder is made. Paths of other storage (s3://, msc://) are not looked at.
"""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from s2_megatron.config.errors import printable

DEFAULT_TOKENIZER = "GPT2BPETokenizer"  # of pretrain_gpt_s2.py, as of Megatron's pretrain_gpt.py
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
    """Raises ValueError for a folder that cannot be made or written, for a file where a folder belongs, and for a path
    without a character, which Megatron takes for none."""
    for name in (*WRITTEN_FOLDERS, *WRITTEN_FILES, *READ_FILES, "load", "pretrained_checkpoint"):
        if getattr(args, name, None) == "":
            raise ValueError(
                f"--{name.replace('_', '-')} is empty (an unset variable?); expected a path; set it, or leave the flag "
                "out"
            )
    for name in (*WRITTEN_FOLDERS, *WRITTEN_FILES):
        value = getattr(args, name, None)
        if not value or is_remote(str(value)):
            continue
        flag = f"--{name.replace('_', '-')}={printable(value, 200)}"
        check_writable(flag, value, is_file=name in WRITTEN_FILES)


def check_writable(flag: str, value: str | Path, *, is_file: bool) -> None:
    """Raises ValueError for a folder that cannot be made or written, or a file that cannot be made there. flag: the
    flag and its value, as the message begins."""
    path = Path(value).absolute()
    if "\0" in str(value):
        raise ValueError(f"{flag}: expected a path without a null byte; name another one")
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # says what exists() is silent about: links that loop, names that are too long
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
    if names_hub(args):
        return
    _check_readable("tokenizer_model", model, f"--tokenizer-type {kind}")
    if kind == "HuggingFaceTokenizer" and Path(model).is_dir():
        known = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
        if not any((Path(model) / name).is_file() for name in known):
            raise ValueError(
                f"--tokenizer-model={printable(model, 200)}: no tokenizer in this folder; expected tokenizer.json; "
                "name the folder that save_pretrained wrote"
            )


def names_hub(args: Namespace) -> bool:
    """Whether the tokenizer is a name of the Hugging Face hub, such as `org/name`, rather than a path."""
    model = args.tokenizer_model
    if model is None or args.tokenizer_type not in ("HuggingFaceTokenizer", "SFTTokenizer"):
        return False
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
    check_tokenizer(args)
    warning = space_warning(args)
    return [] if warning is None else [warning]
