"""Shows what a sparsity YAML means for a model, and what its training will take and hold.

    s2-megatron inspect configs/quickstart.yaml --num-layers 4 --num-attention-heads 4 --num-query-groups 2 \
        --seq-length 512 --png docs/pattern.png

    Attention of 4 layers, 4 query / 2 KV heads, 512 tokens, blocks of 32
     layer   spec   kind    pattern                         density   coverage
     0, 2    D      dense   dense                            100.0%     100.0%
     1       S      s2      local 2 + stride 4, 2 offsets     40.0%      64.0%
     3       S      s2      local 2 + stride 4, 2 offsets     37.2%      58.8%
    attended pairs a sequence: 1,456,128 of 2,101,248 (69.3%)
    S: 2 consecutive S layers together cover 100.0% of the causal blocks

A launch line behind -- gives the sizes, the parallelism, the batch and the memory settings. With them it also shows
FLOPs, memory and a forecast of the step time. A single - behind the -- reads the line from the standard input:

    s2-megatron inspect -- torchrun --nproc-per-node 8 pretrain_gpt_s2.py --s2-config ... --num-layers 32 ...
    DRY_RUN=1 examples/pretrain_7b.sh | s2-megatron inspect -- -

Flags before the -- override those of the line, and CONFIG its --s2-config. The flags are named as Megatron's own.
No GPU is needed, and Megatron only for its --window-size. docs/inspect.md explains every table and the forecast.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from s2_megatron.config.errors import printable
from s2_megatron.config.load import load_config
from s2_megatron.config.resolve import MOST_LAYERS
from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.megatron.host.paths import check_writable
from s2_megatron.megatron.refusals.flags import refuse_flags
from s2_megatron.megatron.sparsity import FROM_FLAGS, resolve_windows
from s2_megatron.tools.forecast.flags import add_flags, check_line, integer, read_flags
from s2_megatron.tools.forecast.run import dense_sparsity, require_sizes, sparsity_of
from s2_megatron.tools.inspect.context_picture import draw_context
from s2_megatron.tools.inspect.exchange_picture import draw_exchange
from s2_megatron.tools.inspect.facts import all_facts
from s2_megatron.tools.inspect.pictures import MOST_DRAWN, draw
from s2_megatron.tools.inspect.printed import notes, tables
from s2_megatron.tools.launch_line import launch_words, parse_launch_line
from s2_megatron.tools.outputs import console

DEFAULT_GPU = "NVIDIA H200"
MOST_CP_WORK = 2**24  # ranks times blocks of the sequence, for the exchange
MOST_GPUS = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, nargs="?", help="the sparsity YAML (default: the launch line's --s2-config)"
    )
    parser.add_argument("--gpu", default=DEFAULT_GPU, help=f"what the forecast is for (default: {DEFAULT_GPU})")
    parser.add_argument(
        "--gpus",
        type=integer(1, MOST_GPUS),
        help="how many the run has (default: the launch line's processes, else one model's)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument("--png", type=Path, help="draw the patterns of the first S2 layers into this file")
    parser.add_argument(
        "--context-png",
        type=Path,
        help="draw the whole context into this file: every pattern and group of heads, and how the last query is "
        "served",
    )
    parser.add_argument(
        "--exchange-png", type=Path, help="draw which blocks the context-parallel ranks hold and receive into this file"
    )
    parser.add_argument(
        "--layers",
        type=integer(0, MOST_LAYERS - 1),
        nargs="+",
        help="the layers of --png and --exchange-png (default: the first S2 layers)",
    )
    parser.add_argument(
        "--blocks",
        type=integer(1, MOST_DRAWN),
        help="draw so many blocks of the sequence's start into --png, one by one (default: the whole context)",
    )
    add_flags(parser.add_argument_group("Megatron's flags"), skipped=("--s2-config",))


def _check_pictures(args: argparse.Namespace) -> None:
    """Raises ValueError, before the work, for a path that is not a picture's file name, is that of another one or
    cannot be written, and for settings of pictures without one."""
    for flag, given, beside in (
        ("--blocks", args.blocks, [args.png]),
        ("--layers", args.layers, [args.png, args.exchange_png]),
    ):
        if given is not None and not any(beside):
            raise ValueError(f"{flag} without a picture; expected it beside --png; add --png blocks.png")
    taken: dict[Path, str] = {}
    for flag, file in (("--png", args.png), ("--context-png", args.context_png), ("--exchange-png", args.exchange_png)):
        if file is None:
            continue
        if (other := taken.setdefault(file.absolute(), flag)) != flag:
            shown = printable(file, 200)
            raise ValueError(f"{flag} {shown}: {other} is written there; expected a file for each picture")
        if file.suffix.lower() != ".png" or file.is_dir():
            what = "a folder" if file.is_dir() else "another kind of file"
            raise ValueError(f"{flag} {printable(file, 200)}: {what}; expected a file name that ends in .png")
        check_writable(f"{flag} {printable(file, 200)}", file, is_file=True)


def _check_tensor_parallel(heads: int, kv_heads: int, size: int) -> None:
    """Raises ValueError for a number of ranks that the heads cannot be dealt to."""

    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(size):
        near = max(smaller for smaller in range(1, min(size, heads + 1)) if fits(smaller))
        raise ValueError(
            f"--tensor-model-parallel-size {size}: {heads} attention heads and {kv_heads} KV heads cannot be dealt to "
            f"so many ranks; expected a divisor of the first that divides the second or is a multiple of it; use {near}"
        )


def _read(args: argparse.Namespace) -> tuple[argparse.Namespace, tuple[str, ...], int | None]:
    """(Megatron's flags, the launch line's words, GPUs or None)."""
    if args.launch_line is None:
        return read_flags((), args), (), args.gpus
    line = parse_launch_line(launch_words(args.launch_line))
    gpus = args.gpus
    if gpus is None and line.script is not None:
        gpus = line.world_size()
    return read_flags(line.flags, args), line.flags, gpus


def _sparsity(args: argparse.Namespace, flags: argparse.Namespace) -> ResolvedSparsity:
    require_sizes(flags)
    config = args.config or flags.s2_config
    if config is None:
        if args.launch_line is None:
            raise ValueError(
                "CONFIG: not given; expected a sparsity YAML; name one (configs/ has some), or give a training's "
                "launch line behind --"
            )
        if flags.window_size is not None:
            raise ValueError(
                f"--window-size without --s2-config: Megatron's own windows, which inspect does not know; expected "
                f"S2's; add --s2-config {FROM_FLAGS}"
            )
        return dense_sparsity(flags)
    # Where CONFIG names the windows of the flags, or stands alone, it is the flag that a training would have.
    named = str(config) if flags.s2_config is None or str(config) == FROM_FLAGS else flags.s2_config
    refuse_flags(argparse.Namespace(**vars(flags) | {"s2_config": named}))
    if str(config) == FROM_FLAGS:
        return resolve_windows(flags)
    return sparsity_of(load_config(config, allow_python_patterns=flags.s2_allow_python_patterns), flags)


def run(args: argparse.Namespace) -> None:
    """Prints the tables and draws what is asked for. Raises ValueError for a config that is wrong or does not fit, for
    a launch line that starts no training, and for a picture that shows nothing."""
    _check_pictures(args)
    flags, words, gpus = _read(args)
    check_line(flags)
    sparsity = _sparsity(args, flags)
    _check_tensor_parallel(sparsity.num_heads, sparsity.num_kv_heads, flags.tensor_model_parallel_size)
    cp_size = flags.context_parallel_size
    if cp_size > 1 and cp_size * sparsity.n_blocks > MOST_CP_WORK:
        raise ValueError(
            f"--context-parallel-size {cp_size} with {sparsity.n_blocks} blocks: expected at most "
            f"{MOST_CP_WORK // sparsity.n_blocks} ranks at this length; use fewer, or a shorter --seq-length"
        )
    if args.exchange_png and cp_size == 1:
        raise ValueError(
            "--exchange-png with --context-parallel-size 1; expected 2 or more ranks; add --context-parallel-size 4"
        )
    facts = all_facts(flags, sparsity, gpus=gpus, gpu=args.gpu, words=words)
    remarks = []
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        _print(sparsity, facts, flags)
    if args.exchange_png:
        draw_exchange(sparsity, args.exchange_png, cp_size, layer=args.layers[0] if args.layers else None)
        remarks.append(f"wrote {args.exchange_png}")
    if args.png:
        draw(sparsity, args.png, layers=args.layers, blocks=args.blocks)
        remarks.append(f"wrote {args.png}")
    if args.context_png:
        remarks += [*draw_context(sparsity, args.context_png), f"wrote {args.context_png}"]
    for remark in remarks:
        print(remark, file=sys.stderr if args.json else sys.stdout)


def _print(sparsity: ResolvedSparsity, facts: dict, flags: argparse.Namespace) -> None:
    printed = console()
    for table in (sparsity.table(), *tables(facts)):
        printed.print(table)
    tp_size, cp_size, balance = flags.tensor_model_parallel_size, flags.context_parallel_size, facts["balance"]
    if tp_size > 1:
        print(f"attention work of {tp_size} tensor-parallel ranks, max / mean: {balance['tensor_parallel']:.3f}")
    for entry in facts["exchange"]:
        sent = entry["bytes"]
        if "sparse" in sent:
            share = sent["sparse"]["forward"] / sent["all_gather"]["forward"]
            print(
                f"{entry['spec']} over {cp_size} context-parallel ranks: the busiest sends {share:.1%} of an "
                f"all-gather, work max / mean {sent['sparse']['balance']:.3f}"
            )
    for note in notes(facts):
        print(note)
