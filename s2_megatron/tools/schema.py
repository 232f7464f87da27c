"""The schema of the sparsity YAML: `s2-megatron schema` prints it as JSON Schema, with which editors check and complete
such files.

`s2-megatron schema --write` regenerates what a checkout has of it: configs/s2.schema.json and docs/configuration.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from s2_megatron.config.schema import schema_text
from s2_megatron.tools.configuration_page import configuration_page
from s2_megatron.tools.outputs import write_file

CHECKOUT = Path(__file__).resolve().parents[2]
GENERATED = {"configs/s2.schema.json": schema_text, "docs/configuration.md": configuration_page}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help=f"write {' and '.join(GENERATED)} of this checkout")


def run(args: argparse.Namespace) -> None:
    """Raises ValueError for --write where there is no checkout."""
    if not args.write:
        print(schema_text(), end="")
        return
    for name, text in GENERATED.items():
        file = CHECKOUT / name
        if not file.parent.is_dir():
            raise ValueError(f"--write: {file.parent} does not exist; run it from a checkout of this project")
        write_file(file, text().encode())
        print(f"wrote {name}")
