"""Write the runs of a study as loss logs that `s2-megatron compare` reads.

    python -m studies.logs lm8k --arms dense s2 --to runs/logs
    s2-megatron compare dense=runs/logs/150M-bfee4945/dense_seed2.jsonl s2=... --vary lr,min_lr

A log is <scale>/[<role>-]<arm>_seed<seed>.jsonl, of repeated runs <arm>_repeat<n>.jsonl.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from s2_megatron.megatron.records.loss_log import HEADER
from studies.data import RESULTS, Run, read_study

DIGITS = 5  # that a loss is kept with
IN_HEADER = ("flops_per_token", "machine", "times_of", "untimed")


def log_name(run: Run) -> str:
    about = run.about
    label = f"{about['role']}-{run.arm}" if about["role"] else run.arm
    number = f"repeat{about['repeat']}" if about.get("repeat") else f"seed{run.seed}"
    return f"{about['scale']}/{label}_{number}.jsonl"


def log_records(run: Run) -> list[dict]:
    """The records of a loss log: a header, the blocks of training steps, the evaluations."""
    about, settings = run.about, run.about["settings"]
    header = {"arguments": settings, **{name: about[name] for name in IN_HEADER if name in about}}
    is_timed = "seconds" in run.train
    records = [{HEADER: header, "iteration": 1, **({"time": 0.0} if is_timed else {})}]
    names = {"loss": "lm loss", "seconds": "time"}
    for row, step in enumerate(run.train.get("step", ())):
        record = {"iteration": int(step), "samples": int(run.train["tokens"][row]) // settings["seq_length"]}
        for name, values in run.train.items():
            if name not in ("step", "tokens"):
                record[names.get(name, name)] = _plain(values[row])
        records.append(record)
    for row, step in enumerate(run.validation.get("step", ())):
        is_last = step in (0, settings.get("train_iters"))
        record = {"iteration": int(step), "validation": f"iteration {step}{' on validation set' if is_last else ''}"}
        record["lm loss"] = _plain(run.validation["loss"][row])
        if "loss_by_position" in run.validation:
            record |= _positions(run, row)
        records.append(record)
    return records


def _positions(run: Run, row: int) -> dict[str, float]:
    starts, length = run.about["position_starts"], run.about["settings"]["seq_length"]
    digits = len(str(length - 1))
    losses = zip(starts, [*starts[1:], length], run.validation["loss_by_position"][row])
    buckets = {f"{start:0{digits}}-{end - 1:0{digits}}": loss for start, end, loss in losses if not np.isnan(loss)}
    buckets["trailing"] = run.validation["loss_trailing"][row]
    return {f"lm loss by position/{name}": _plain(loss) for name, loss in buckets.items()}


def _plain(value: np.floating) -> float:
    """The number that was kept, without what float32 adds to it; a small one (a learning rate) as it is."""
    return round(float(value), DIGITS) if abs(value) > 1e-2 else float(value)


def write_logs(study: str, folder: Path, arms: list[str] | None = None, results: Path = RESULTS) -> list[Path]:
    """Write the logs of a study's runs, of these arms (None: all); returns their paths. Runs that were only evaluated
    have none."""
    paths = []
    for run in read_study(study, results):
        if run.train and (arms is None or run.arm in arms):
            path = folder / log_name(run)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in log_records(run)))
            paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.logs", description=__doc__.splitlines()[0])
    parser.add_argument("study")
    parser.add_argument("--arms", nargs="+", help="default: all")
    parser.add_argument("--to", type=Path, required=True, help="the folder to write into")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: studies/results")
    parsed = parser.parse_args()
    paths = write_logs(parsed.study, parsed.to, parsed.arms, parsed.results)
    if not paths:
        there = ", ".join(sorted(path.stem for path in parsed.results.glob("*.npz")))
        parser.error(f"{parsed.study}: no such run in {parsed.results}; expected a study with results: {there}")
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    main()
