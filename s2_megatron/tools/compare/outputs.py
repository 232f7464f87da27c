"""The files that a comparison writes: which paths are refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from s2_megatron.megatron.host.paths import check_writable
from s2_megatron.tools.compare.readers import split_run

_SUFFIXES = {"--html": (".html", ".htm"), "--png": (".png",)}


def check_outputs(outputs: dict[str, Path | None], runs: Sequence[str]) -> None:
    """Raises ValueError for an output that has another kind's suffix, or is a folder, an input or another output, and
    for one that cannot be written: the folders above it are made when it is.

    outputs: {option: its path, None without it}. runs: the runs of the command line.
    """
    taken = {os.path.realpath(place): f"the input {place}" for text in runs for place in split_run(text)[1]}
    for option, file in outputs.items():
        if file is None:
            continue
        suffixes = _SUFFIXES[option]
        if file.suffix.lower() not in suffixes or file.is_dir():
            raise ValueError(
                f"{option} {file}: expected a file whose name ends in {' or '.join(suffixes)}; give a path such as "
                f"compare{suffixes[0]}"
            )
        check_writable(f"{option} {file}", file, is_file=True)
        place = os.path.realpath(file)
        if place in taken:
            raise ValueError(
                f"{option} {file}: would overwrite {taken[place]}; expected a file of its own; give another path"
            )
        taken[place] = f"the file of {option}"
