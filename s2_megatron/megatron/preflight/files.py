"""Folders that a run will write, and the space that a checkpoint takes: a training without them is lost at its first
checkpoint. Nothing is written and no folder is made. Paths of other storage (s3://, msc://) are not looked at."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.megatron.host.paths import check_writable, existing, is_remote

# Folders that are written, by the argument's name; of files, the folder that holds them.
WRITTEN_FOLDERS = (
    "save", "tensorboard_dir", "wandb_save_dir", "data_cache_path", "flight_recorder_dump_path",
    "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir",
)  # fmt: skip
WRITTEN_FILES = ("s2_loss_log",)


def check_written(args: Namespace) -> None:
    """Raises ValueError for a folder that cannot be made or written, for a file where a folder belongs, and for a path
    without a character, which Megatron takes for none."""
    for name in (*WRITTEN_FOLDERS, *WRITTEN_FILES, "load", "pretrained_checkpoint"):
        value, flag = getattr(args, name, None), f"--{name.replace('_', '-')}"
        if value == "":
            raise ValueError(f"{flag} is empty (an unset variable?); expected a path; set it, or leave the flag out")
        if value and not is_remote(str(value)) and name in WRITTEN_FOLDERS + WRITTEN_FILES:
            check_writable(f"{flag}={printable(value, 200)}", value, is_file=name in WRITTEN_FILES)


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
    needed, free = checkpoint_bytes(args), shutil.disk_usage(existing(Path(args.save).absolute())).free
    if free >= needed:
        return None
    return (
        f"WARNING: --save={printable(args.save, 200)} has {_gigabytes(free)} free, and one checkpoint takes about "
        f"{_gigabytes(needed)}; free some, or name another folder"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 5e7 else f"{count / 1e6:,.1f} MB"


def check_files(args: Namespace) -> list[str]:
    """Everything of this module. Returns what is worth a warning, raises ValueError for what is wrong."""
    check_written(args)
    warning = space_warning(args)
    return [] if warning is None else [warning]
