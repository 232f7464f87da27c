"""s2-megatron make-dataset: text files become the indexed dataset that Megatron's --data-path reads.

    s2-megatron make-dataset --tokenizer Llama-3.1-8B --output data/text corpus/ more.jsonl.gz

A .jsonl (or .ndjson, .json) file has an object a line, with the document under "text"; any other file is one document,
or, with --lines, one a line. .gz, .bz2, .xz and, with Python 3.14 or the package backports.zstd, .zst are read as they
are; of a folder all files below it, in the order of their names. The tokenizer is the one that Megatron builds with
--tokenizer-type HuggingFaceTokenizer, and its end-of-document token ends each document. The bytes do not depend on
--workers. Megatron shuffles documents itself, but the last of them are for validation and test: shuffle sorted text.

It prints the flags of the launch. An interrupted or refused run leaves no dataset.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from s2_megatron.config.errors import printable
from s2_megatron.megatron.host.paths import check_writable
from s2_megatron.tools.dataset.texts import Batch, Source, batches, find_sources
from s2_megatron.tools.progress import progress, working

# From so many documents on each part of --split gets one.
SPLITS = ((100, "--split 99,1,0"), (10, "--split 90,10,0"), (1, "--split 100,0,0 --eval-iters 0"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="texts, JSON lines, folders of them")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER", help="a Hugging Face tokenizer's")
    parser.add_argument("--output", type=Path, required=True, metavar="PREFIX", help="makes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="of the text in JSON (default: text)")
    parser.add_argument("--lines", action="store_true", help="in plain text each line is a document")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: as many as there are cores)")


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for bad input."""
    workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    if not 1 <= workers <= 4096:
        raise ValueError(f"--workers {workers}: expected 1 to 4096; leave it out for one a core")
    for suffix in (".bin", ".idx"):
        file = args.output.with_name(args.output.name + suffix) if args.output.name else args.output
        shown = f"--output {printable(args.output, 200)}"
        if args.output.exists() and not args.output.is_file():
            what = "a folder" if args.output.is_dir() else "no file"
            raise ValueError(f"{shown}: {what}; expected a prefix of two files; give for example data/text")
        if file.exists():
            raise ValueError(
                f"{shown}: {printable(file.name)} is there already; expected a new prefix; give another one, or remove "
                "its .bin and .idx"
            )
        check_writable(shown, file, is_file=True)
    sources = find_sources(args.files)
    with working("loading the tokenizer"):
        from s2_megatron.tools.dataset.encode import TOKENIZER_TYPE, Encoder
        from s2_megatron.tools.dataset.write import write_dataset

        encoder = Encoder(args.tokenizer, args.text_key)
        from megatron.core.datasets.indexed_dataset import DType
    counts = {"documents": 0, "bytes": 0, "empty": 0}
    dtype = DType.optimal_dtype(encoder.vocabulary)
    tokens = write_dataset(args.output, _documents(sources, encoder, args.lines, workers, counts), dtype)
    left_out = f"; {counts['empty']:,} without text left out" if counts["empty"] else ""
    print(
        f"wrote {args.output}.bin and .idx: {counts['documents']:,} documents, {tokens:,} tokens of "
        f"{np.dtype(dtype).itemsize} bytes, {counts['bytes'] / tokens:.2f} bytes of text a token{left_out}. "
        "The launch's flags:"
    )
    split = next(flags for least, flags in SPLITS if counts["documents"] >= least)
    print(f"  --data-path {shlex.quote(str(args.output.absolute()))} {split} \\")
    print(f"  --tokenizer-type {TOKENIZER_TYPE} --tokenizer-model {shlex.quote(os.path.realpath(args.tokenizer))}")
    return 0


def _documents(
    sources: list[Source], encoder, lines: bool, workers: int, counts: dict[str, int]
) -> Iterator[np.ndarray]:
    """The documents' tokens; counts: gets what they add up to. Raises ValueError where none has text."""
    from s2_megatron.tools.dataset.encode import encoded

    read = {"files before": 0, "file": 0}  # bytes

    def all_batches() -> Iterator[Batch]:
        for source in sources:
            yield from batches(source, lines, partial(read.__setitem__, "file"))
            read["files before"] += source.size
            read["file"] = 0

    megabytes = sum(source.size for source in sources) / 1e6
    # The workers, which are forks, start with the first batch: before the bar, which has a thread.
    found = encoded(encoder, all_batches(), workers)
    first = next(found, None)
    with progress("make-dataset", megabytes) as tell:
        for batch in chain([] if first is None else [first], found):
            counts["documents"] += len(batch.documents)
            counts["bytes"] += batch.bytes
            counts["empty"] += batch.empty
            yield from batch.documents
            done = sum(read.values()) / 1e6
            tell(done, f"{done:,.0f} of {megabytes:,.0f} MB, {counts['documents']:,} documents")
    if not counts["documents"]:
        raise ValueError(f"{printable(sources[0].path, 200)}: none of the files has text; expected some; name others")
