"""How far apart runs end that differ in nothing but rounding, and in nothing but their seed: the offset that
`s2-megatron compare` adds to the interval of a single pair (--run-offset).

    python benchmarks/run_offset.py --parallel 1 --json benchmarks/results/cpu_run_offset.json     # a CPU core, 45 min
    python benchmarks/run_offset.py --parallel 8 --json benchmarks/results/h200_run_offset.json    # one GPU
    python benchmarks/run_offset.py --iterations 20 --rounding 2 --seeds 2                          # a try

    17 runs of 300 iterations, quickstart.yaml, CPU
    differ in        runs   validation loss: sd [95 %]      training loss, last quarter: sd [95 %]
    rounding            9   0.00499 [0.00337, 0.00956]      0.00368 [0.00248, 0.00704]
    seed                9   0.02592 [0.01751, 0.04966]      -
    rounding alone is taken for a difference in 21 of 36 with a run offset of 0, 15 of 36 with a run offset of 0.0013,
    2 of 36 with a run offset of 0.0037

The runs are the quickstart's. A run differs in rounding alone when its loss is
multiplied by a constant before the backward (Megatron's --loss-scale) and its gradients are divided by it afterwards:
with 3, 5, 7, ... every gradient is rounded another way in every step, and nothing else changes. Every run's last
checkpoint is evaluated once more with the same seed, hence on the same --eval-batches batches. The training loss is
compared over the last quarter of the steps, as the verdict does it; of other seeds it is that of other batches, and is
left out. The last line counts how often `compare` would take rounding for a difference.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.report import provenance, write_json
from examples.quickstart import launch
from examples.quickstart.dataset import PreparedCorpus, prepare_corpus
from s2_megatron.megatron.records.loss_log import read_loss_log
from s2_megatron.tools.commands import CommandParser
from s2_megatron.tools.compare.measure import VERDICT_SHARE
from s2_megatron.tools.compare.statistics import LARGE_RUNS, SMALL_RUNS, difference_of_pairs

ROOT = Path(__file__).resolve().parent.parent
SEED = 1234
ROUNDING, OTHER_SEED = "rounding", "seed"


@dataclass(frozen=True)
class Variant:
    """A run. kind: what distinguishes it from the first one ("" of that one itself)."""

    kind: str
    seed: int = SEED
    loss_scale: int = 1

    @property
    def name(self) -> str:
        return f"seed{self.seed}_scale{self.loss_scale}"


def variants(rounding: int, seeds: int) -> list[Variant]:
    """The first run, `rounding` runs that round otherwise, and `seeds` of other seeds. No scale is a power of two,
    which would change no digit."""
    scaled = [Variant(ROUNDING, loss_scale=3 + 2 * index) for index in range(rounding)]
    return [Variant(""), *scaled, *(Variant(OTHER_SEED, seed=SEED + 1 + index) for index in range(seeds))]


def commands(variant: Variant, args: argparse.Namespace, corpus: PreparedCorpus, on_gpu: bool) -> list[list[str]]:
    """Training, and the evaluation of its last checkpoint."""
    folder = args.runs / variant.name
    # bf16 on a CPU, too: Megatron's optimizer for fp32 knows no scale.
    common = [f"--lr-decay-iters={args.iterations}", f"--lr-warmup-iters={min(20, args.iterations - 1)}"]
    common += ["--bf16", *args.flags.split()]

    def command(seed: int) -> list[str]:
        return (
            launch.training_command(
                args.config, args.iterations, seed, folder, corpus, on_gpu=on_gpu, save_interval=args.iterations
            )
            + common
        )

    evaluation = ["--finetune", "--skip-train", f"--eval-iters={args.eval_batches}"]
    return [
        [*command(variant.seed), f"--loss-scale={variant.loss_scale}", "--eval-iters=1"],
        [*command(SEED), *evaluation, f"--s2-loss-log={folder / 'evaluation.jsonl'}"],
    ]


def run_variant(variant: Variant, args: argparse.Namespace, corpus: PreparedCorpus, on_gpu: bool) -> dict:
    """The run's record: {"name", "kind", "seed", "loss_scale", "validation", "losses"}."""
    folder = args.runs / variant.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for step, command in enumerate(commands(variant, args, corpus, on_gpu)):
        log = folder / f"{('train', 'evaluate')[step]}.log"
        with log.open("w") as output:
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            raise SystemExit(f"error: {variant.name} ended with status {done.returncode}; its output is in {log}")
    records, _ = read_loss_log(launch.loss_log(folder))
    _, evaluations = read_loss_log(folder / "evaluation.jsonl")
    (evaluation,) = evaluations.values()
    losses = [records[step]["lm loss"] for step in sorted(records)]
    print(f"{variant.name}: validation loss {evaluation['lm loss']:.5f}", flush=True)
    return dict(name=variant.name, **vars(variant), validation=evaluation["lm loss"], losses=losses)


def spread(values: Sequence[float]) -> dict[str, float]:
    """{"sd", "low", "high"}: the standard deviation and its 95 % interval, of normal values (chi-squared)."""
    count, sd = len(values), float(np.std(values, ddof=1))
    low, high = stats.chi2.ppf([0.975, 0.025], count - 1)
    return dict(sd=sd, low=sd * float(np.sqrt((count - 1) / low)), high=sd * float(np.sqrt((count - 1) / high)))


def last_quarter(record: dict) -> np.ndarray:
    """The training losses that a verdict is about, float64 [n]."""
    losses = np.array(record["losses"])
    return losses[-max(1, round(VERDICT_SHARE * len(losses))) :]


def told_apart(records: Sequence[dict], run_offset: float) -> int:
    """How many pairs of these runs `compare` takes for different."""
    pairs = combinations(map(last_quarter, records), 2)
    return sum(difference_of_pairs([pair], run_offset).verdict != "not told apart" for pair in pairs)


def summary(records: Sequence[dict]) -> dict:
    """{kind: {"runs", "validation": spread, "training": spread of runs with the same batches}}, and of rounding the
    pairs that are told apart, by run offset."""
    found: dict[str, dict] = {}
    for kind in (ROUNDING, OTHER_SEED):
        group = [record for record in records if record["kind"] in ("", kind)]
        if len(group) > 1:
            found[kind] = dict(runs=len(group), validation=spread([record["validation"] for record in group]))
    if ROUNDING in found:
        group = [record for record in records if record["kind"] in ("", ROUNDING)]
        offsets = {f"{offset:g}": told_apart(group, offset) for offset in (0.0, LARGE_RUNS.nats, SMALL_RUNS.nats)}
        found[ROUNDING] |= dict(
            training=spread([float(last_quarter(record).mean()) for record in group]),
            pairs=len(group) * (len(group) - 1) // 2,
            told_apart=offsets,
        )
    return found


def lines(result: dict) -> list[str]:
    def text(part: dict | None) -> str:
        return "-" if part is None else f"{part['sd']:.5f} [{part['low']:.5f}, {part['high']:.5f}]"

    table = [f"{'differ in':<15}{'runs':>6}   {'validation loss: sd [95 %]':<32}training loss, last quarter: sd [95 %]"]
    for kind, part in result.items():
        table.append(f"{kind:<15}{part['runs']:>6}   {text(part['validation']):<32}{text(part.get('training'))}")
    if ROUNDING in result:
        part = result[ROUNDING]
        counts = [
            f"{count} of {part['pairs']} with a run offset of {name}" for name, count in part["told_apart"].items()
        ]
        table.append(f"rounding alone is taken for a difference in {', '.join(counts)}")
    return table


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml", help="sparsity YAML")
    parser.add_argument("--iterations", type=int, default=launch.DEFAULT_ITERATIONS)
    parser.add_argument("--rounding", type=int, default=8, help="runs that differ from the first one in rounding")
    parser.add_argument("--seeds", type=int, default=8, help="runs that differ from it in their seed")
    parser.add_argument("--eval-batches", type=int, default=64, help="of 4 sequences, the same for all runs")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once, after the first one")
    parser.add_argument(
        "--flags", default="", help="more flags of Megatron: --flags='--num-layers 8 --hidden-size 512'"
    )
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "run_offset", help="their folder; emptied run by run"
    )
    parser.add_argument("--json", type=Path, help="write losses, command, versions, hardware, commit")
    args = parser.parse_args(argv)
    for name, least in (("iterations", 2), ("rounding", 0), ("seeds", 0), ("eval_batches", 1), ("parallel", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected {least} or more")
    if args.rounding + args.seeds < 1:
        parser.error("--rounding 0 --seeds 0: expected one run beside the first one")
    args.config, args.runs = args.config.resolve(), args.runs.resolve()
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    origin = provenance("benchmarks/run_offset.py", sys.argv[1:] if argv is None else argv)
    on_gpu = bool(origin["hardware"]["gpus"])
    corpus = prepare_corpus(args.runs / "corpus", SEED)
    first, *others = variants(args.rounding, args.seeds)
    # The first one alone: it fills the caches that the others share.
    records = [run_variant(first, args, corpus, on_gpu)]
    with ThreadPoolExecutor(args.parallel) as pool:
        records += pool.map(lambda variant: run_variant(variant, args, corpus, on_gpu), others)
    result = summary(records)
    device = origin["hardware"]["gpu"] if on_gpu else "CPU"
    print(f"{len(records)} runs of {args.iterations} iterations, {args.config.name}, {device}")
    print("\n".join(lines(result)))
    if args.json:
        names = ("iterations", "rounding", "seeds", "eval_batches", "flags")
        settings = {name: getattr(args, name) for name in names} | dict(config=args.config.name)
        write_json(args.json, {**origin, "settings": settings, "runs": records, "summary": result})


if __name__ == "__main__":
    main()
