"""What `--s2-position-loss 16` costs, as a share of a training step: one run, in which blocks of steps with it and
without it are interleaved.

    python benchmarks/position_loss.py --row 1p3b-32k-none-s2 --rounds 7 --steps 2          # one GPU, 80 seconds
    python benchmarks/position_loss.py --row tiny-512-none-mixed --rounds 2 --steps 2       # on a CPU

    1p3b-32k-none-s2, 7 rounds of 4 blocks of 2 steps, NVIDIA H200
    off 585.9 ms, on 586.1 ms: -0.00% of a step [-0.14%, +0.14%]; met: under 1%

The row is one of benchmarks/end_to_end.py, on one process; the default is the shortest step of the one-GPU rows, where
a fixed cost weighs most, and where the host's pace makes steps vary by some per cent. The cost has the sums of every
microbatch, the reduction over ranks and its reading by the host in every iteration, and TensorBoard's 17 scalars;
nothing else in the run reads a value from the device but Megatron's grad norm. The device is waited for at the borders
of the blocks alone. The interval (95 %) is a bootstrap over the rounds; the aim is met when its upper end is.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import refuse
from benchmarks.end_to_end import probe
from benchmarks.end_to_end_rows import SHAPES, Machine, Row, parse_row, row_environment, row_flags
from benchmarks.report import provenance, write_json
from s2_megatron.tools.commands import CommandParser

TARGET = 0.01  # of a step
DRAWS = 10000


def schedule(rounds: int) -> list[bool]:
    """Whether the loss by position is on in each block: rounds of on, off, off, on, in which a drift cancels; the first
    round warms up (compiles, allocates)."""
    return [True, False, False, True] * (1 + rounds)


def summary(milliseconds: list[float]) -> dict:
    """{"off_ms", "on_ms", "share", "low", "high", "met"}: medians, and the extra time over the time without it, with
    its interval. milliseconds: of a step, in each block of `schedule`."""
    rounds = np.array(milliseconds).reshape(-1, 4)[1:]
    on, off = rounds[:, [0, 3]].mean(axis=1), rounds[:, [1, 2]].mean(axis=1)
    picked = np.random.default_rng(0).integers(0, len(rounds), size=(DRAWS, len(rounds)))
    low, high = np.quantile(on[picked].sum(axis=1) / off[picked].sum(axis=1) - 1, [0.025, 0.975])
    return dict(
        off_ms=float(np.median(off)),
        on_ms=float(np.median(on)),
        share=float(on.sum() / off.sum() - 1),
        low=float(low),
        high=float(high),
        met=bool(high < TARGET),
    )


def measure(row: Row, machine: Machine, buckets: int, rounds: int, steps: int, folder: Path) -> list[float]:
    """Milliseconds of a step, in each block of `schedule`. Trains in this process, once a process."""
    os.environ.update({**row_environment(row), **os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    # In front of Megatron.
    from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu

    install_if_no_gpu()
    import torch
    from megatron.training import training

    import pretrain_gpt_s2
    from s2_megatron.megatron.records.position_loss import measure_position_loss

    on, borders, train_step = schedule(rounds), [], training.train_step
    counted = {"steps": 0}

    @functools.wraps(train_step)
    def switched_train_step(*args, **kwargs):
        block, step = divmod(counted["steps"], steps)
        counted["steps"] += 1
        if step == 0:
            torch.cuda.synchronize()
            borders.append(time.perf_counter())
            measure_position_loss(buckets if on[block] else None, row.tokens)
        return train_step(*args, **kwargs)

    training.train_step = switched_train_step
    flags = row_flags(row, machine, len(on) * steps + 1, 1)  # the last step is the border of the last block
    flags += ["--s2-position-loss", str(buckets), "--tensorboard-dir", str(folder), "--log-interval", "1000000"]
    flags += ["--log-memory-interval", "1000000"]
    on.append(False)
    sys.argv = ["pretrain_gpt_s2.py", *flags]
    pretrain_gpt_s2.main()
    return [(end - start) / steps * 1e3 for start, end in pairwise(borders)]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--row", default="1p3b-8k-none-s2", help="of benchmarks/end_to_end.py")
    parser.add_argument("--buckets", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8, help="of 4 blocks: on, off, off, on; one more warms up")
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--json", type=Path, help="write samples, command, versions, hardware, commit")
    args = parser.parse_args(argv)
    for name, least in (("rounds", 2), ("steps", 1), ("buckets", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: expected {least} or more")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        row = parse_row(args.row)
    except ValueError as problem:
        refuse(str(problem))
    if row.tp * row.cp * row.pp > 1:
        refuse(f"--row {args.row} is cut over ranks; expected one process; leave tp, cp and pp out")
    given = sys.argv[1:] if argv is None else argv
    found, origin = probe(given), provenance("benchmarks/position_loss.py", given)
    card = origin["hardware"]["gpu"] if origin["hardware"]["gpus"] else None
    if card is None and row.shape is not SHAPES["tiny"]:
        refuse(f"--row {args.row}: no GPU here, which it is made for; use --row tiny-512-none-mixed")
    machine = Machine(1, card is not None, found["transformer_engine"], found["fused_gradients"])
    with tempfile.TemporaryDirectory() as folder:
        milliseconds = measure(row, machine, args.buckets, args.rounds, args.steps, Path(folder))
    result = summary(milliseconds)
    print(f"{args.row}, {args.rounds} rounds of 4 blocks of {args.steps} steps, {card or 'CPU'}")
    print(
        f"off {result['off_ms']:.1f} ms, on {result['on_ms']:.1f} ms: {result['share']:+.2%} of a step "
        f"[{result['low']:+.2%}, {result['high']:+.2%}]; {'met' if result['met'] else 'MISSED'}: under {TARGET:.0%}"
    )
    if args.json:
        settings = {name: getattr(args, name) for name in ("row", "buckets", "rounds", "steps")}
        write_json(args.json, {**origin, "settings": settings, "block_ms": milliseconds, **result})


if __name__ == "__main__":
    main()
