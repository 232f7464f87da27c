"""Lays training runs side by side, and says whether they differ beyond noise.

    s2-megatron compare runs/quickstart_dense runs/quickstart --html compare.html
    s2-megatron compare dense=a/tensorboard s2=b/tensorboard --x hours --at-most 0.005

The first run's settings are the baseline.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from s2_megatron.tools.compare.outputs import check_outputs
from s2_megatron.tools.compare.runs import AXES
from s2_megatron.tools.compare.settings import check_comparable, make_arms
from s2_megatron.tools.compare.statistics import (
    GOING_ON,
    LARGE_RUNS,
    LARGE_TOKENS,
    MIDDLE_RUNS,
    MIDDLE_TOKENS,
    SMALL_RUNS,
)
from s2_megatron.tools.outputs import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="[NAME=]PLACE[,PLACE...]: a --s2-loss-log file, a TensorBoard folder, an offline wandb folder, or "
        "entity/project/run of a wandb server. Commas join the pieces of a resumed run, or several logs of one run. "
        "Runs of equal settings and several seeds are one arm; runs with the same NAME, too. The first run's arm is "
        "the baseline.",
    )
    parser.add_argument("--x", choices=AXES, default="tokens", help="the axis of the curves (default: tokens)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the comparison as one .html page")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the curves as one .png picture")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--wandb-project", metavar="ENTITY/PROJECT", help="where a RUN that is not a file is looked up by its id"
    )
    parser.add_argument(
        "--vary",
        metavar="NAME,...",
        default="",
        help="arguments of Megatron that may differ beside sparsity and seed, e.g. lr,min_lr; all: no check",
    )
    parser.add_argument(
        "--target-loss", type=float, help="default: the largest final training loss, which all runs reach"
    )
    parser.add_argument(
        "--at-most",
        type=float,
        metavar="SHARE",
        help="exit with status 1 unless every arm's training loss is shown to be at most this share above the "
        "baseline's (the upper end of the interval), e.g. 0.005",
    )
    parser.add_argument(
        "--run-offset",
        type=float,
        metavar="NATS",
        help="standard deviation of the loss of runs that differ in nothing but rounding (or seed); used for fewer "
        f"than three pairs (default: {SMALL_RUNS.nats}, {SMALL_RUNS.source}; from {MIDDLE_TOKENS / 1e6:g}M tokens on "
        f"{MIDDLE_RUNS.nats}, {MIDDLE_RUNS.source}; from {LARGE_TOKENS / 1e6:g}M on {LARGE_RUNS.nats}, "
        f"{LARGE_RUNS.source}; {GOING_ON.nats} {GOING_ON.source})",
    )


def _check(args: argparse.Namespace) -> None:
    numbers = {"--at-most": args.at_most, "--run-offset": args.run_offset, "--target-loss": args.target_loss}
    for name, value in numbers.items():
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} {value}: expected a finite number of 0 or more; give one, or leave {name} out")
    if len(args.runs) < 2:
        raise ValueError(f"one run ({args.runs[0]}): expected two or more to compare; give the baseline first")
    check_outputs({"--html": args.html, "--png": args.png}, args.runs)


def run(args: argparse.Namespace) -> int:
    """The command. Returns the exit status: 0, or 1 when --at-most is not met. Raises ValueError for runs that cannot
    be compared."""
    _check(args)
    from s2_megatron.tools.compare import table
    from s2_megatron.tools.compare.measure import compare
    from s2_megatron.tools.compare.readers import read_runs

    vary = [name.strip().lstrip("-").replace("-", "_") for name in args.vary.split(",") if name.strip()]
    read = read_runs(args.runs, args.wandb_project)
    runs = [each for each, _ in read]
    check_comparable(runs, vary)
    arms = make_arms(runs, vary, [named for _, named in read])
    for each in runs:
        each.axis(args.x)
    comparison = compare(arms, vary, args.target_loss, args.run_offset)
    for file, write in ((args.html, _write_page), (args.png, _write_png)):  # before the reader of the table can go
        if file is not None:
            write(comparison, args.x, file)
    if args.json:
        print(json.dumps(table.as_json(comparison), indent=1))
    else:
        printed = console()
        for line in [*(text for _, text in table.verdict_lines(comparison)), *table.about_verdicts(comparison)]:
            printed.print(line, highlight=False, markup=False)
        printed.print()
        printed.print(table.rich_table(comparison), highlight=False)
        for line in table.remarks(comparison):
            printed.print(line, highlight=False, markup=False)
    for file in (args.html, args.png):
        if file is not None:
            print(f"wrote {file}", file=sys.stderr if args.json else sys.stdout)
    return 0 if args.at_most is None else _gate(comparison, args.at_most)


def _gate(comparison, at_most: float) -> int:
    """Status 1 unless every arm is shown to be within the bound."""
    if len(comparison.results) == 1:
        raise ValueError(
            f"--at-most {at_most}: all runs have the same settings; expected two arms; name them (one=PATH two=PATH)"
        )
    beyond = 0
    for result in comparison.results[1:]:
        high, undecided = result.difference.relative[2], result.difference.undecided
        if undecided or high > at_most:
            beyond += 1
            why = (
                f"how much worse is not known: {undecided}"
                if undecided
                else f"may be worse by {high:.2%} (upper end of the interval)"
            )
            print(f"--at-most {at_most:g}: {result.arm.name} {why}", file=sys.stderr)
    return 1 if beyond else 0


def _write_page(comparison, x: str, file: Path) -> None:
    from s2_megatron.tools.compare.page import write_page

    write_page(comparison, x, file)


def _write_png(comparison, x: str, file: Path) -> None:
    from s2_megatron.tools.compare.figures import write_png

    write_png(comparison, x, file)
