"""The JSON Schema of the sparsity YAML, with which editors check and complete it: `s2-megatron schema`.

`s2-megatron schema --write` regenerates configs/s2.schema.json of a checkout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from s2_megatron.config.schema import SCHEMA_FILE, schema_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--write",
        metavar="FILE",
        nargs="?",
        const=SCHEMA_FILE,
        type=Path,
        help="write it to FILE (default: configs/s2.schema.json of the checkout) instead of printing it",
    )


def run(args: argparse.Namespace) -> None:
    """Raises ValueError for a file in a folder that does not exist."""
    if args.write is None:
        print(schema_text(), end="")
        return
    if not args.write.parent.is_dir():
        raise ValueError(
            f"--write {args.write}: the folder {args.write.parent} does not exist; name a file in an existing folder"
        )
    args.write.write_text(schema_text())
    print(f"wrote {args.write}")
