"""Measures whole training steps of pretrain_gpt_s2.py under torchrun: S2 beside Megatron's dense model, with identical
flags otherwise.

    python benchmarks/end_to_end.py --gpus 4 --rows 1p3b-128k-cp4 --json e2e.json    # a group; --list prints all groups
    python benchmarks/end_to_end.py --gpus 1 --rows 1p3b-32k,memory                  # several groups
    python benchmarks/end_to_end.py --gpus 1 --rows 1p3b-one-gpu --budget 570 --train-iters 4   # at most 570 s
    python benchmarks/end_to_end.py --gpus 1 --rows 1p3b-one-gpu-128k --profile      # and where a step's time goes
    python benchmarks/end_to_end.py --gpus 4 --rows 7b-8layers-1m-cp4-full-keep-s2,7b-8layers-1m-cp4-full-dense
    python benchmarks/end_to_end.py --gpus 1 --rows tiny                             # a minute on a CPU (gloo, fp32)

    row                           step ms  tokens/s  peak GiB  MiB/token  beside weights  TFLOP/s  ...
    1p3b-128k-cp4-full-keep-s2    ...
    1p3b-32k-none-dense           out of memory: CUDA out of memory. Tried to allocate 64.00 GiB. ... (49 s; NAME.log)

A row is named by its shape, length, settings and attention; any mix of these parts is one, the shape first and the
attention last. A row needs tp * cp * pp GPUs, or a multiple of them:

1p3b, 7b         the models of examples/pretrain_1p3b.sh and pretrain_7b.sh; tiny: for a CPU
8layers          the same model with fewer layers, for fewer GPUs
32k, 128k, 1m    tokens of a sequence; one sequence a step and data-parallel rank (--micro-batches: more)
tp2, cp4, pp2    parallel sizes; what is left of the ranks is data parallel. With tp also sequence parallel
none, full       recompute of nothing, or of every layer
block18          full recompute of the first 18 layers of each pipeline stage, none of the others
selective        selective recompute of the core attention
mlp, layernorm   selective recompute of these modules; `selective-mlp` is of the core attention and the MLP. Transformer
                 Engine's layers fuse the norms into the linear layers: `layernorm` changes nothing there
keep, received   --s2-keep-attention-output, --s2-cp-keep-received
offload          Megatron's fine-grained activation offloading of every module of a layer; not with full
offload12        its older one, of whole layers; not with recompute or pp. Both need Transformer Engine
hostoptimizer    the optimizer's state and step on the host (--optimizer-cpu-offload)
fusedloss        cross entropy fused by Megatron (--cross-entropy-fusion-impl native)
p2p, a2a, allgather, sparse     what context-parallel ranks exchange: --cp-comm-type of a dense row, --s2-cp-comm-type
                 of the others
s2, mixed        all layers S2, or the layers of configs/*_mixed.yaml
dense            Megatron's own dense model; densekernels: dense layers computed by S2's kernels

Every row is a run of its own on Megatron's mock data, with bf16 (fp32 without a GPU), the distributed optimizer,
Transformer Engine where it can be imported and Megatron's local implementation elsewhere; nothing is saved. A row that
fails or runs out of memory is reported with its last error line, one that runs out of --time-limit with the numbers
that it had by then, and the others go on. --budget bounds all rows together: a row for which no time is left is
reported as not started. Columns:

step ms         median of Megatron's iteration times after the second
tokens/s        of all GPUs together
peak GiB        torch's largest allocated memory, of the fullest rank; Megatron asks one rank of those that are
                data-parallel to each other
MiB/token       that per token of a sequence on one context-parallel rank (1 MiB a token is 1 GiB per 1024 of them)
beside weights  MiB per token of what the step needs on top of what stays (weights, gradients, optimizer): activations
                and temporaries
TFLOP/s, util.  Megatron's FLOPs of the model per GPU and second, attention counted on attended pairs, recompute not;
                share of the card's dense bf16 rate (--peak-tflops for cards that are not in the list)
dense           tokens/s over those of the fastest `dense` row with the same shape, length, parallel sizes and memory
                flags (recompute, offload, optimizer, loss)
best dense      the same over the fastest `dense` row with any memory flags
loss, grad norm of the last step: rows of one shape, tp and pp start from the same weights

--profile runs three steps more, of which torch.profiler records one; step_profile.py explains its table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import refuse, step_profile
from benchmarks.end_to_end_log import SKIPPED_STEPS, error_of, read_log
from benchmarks.end_to_end_rows import GROUPS, SHAPES, Machine, Row, chosen_rows, row_environment, row_flags, sequences
from benchmarks.report import write_json
from s2_megatron.tools.commands import CommandParser

ROOT = Path(__file__).resolve().parent.parent
# Dense bf16 TFLOP/s of the data sheets, by a part of the card's name.
PEAK_TFLOPS = {"H200": 989.5, "H100 80GB HBM3": 989.5, "GH200": 989.5, "A100": 312.0, "B200": 2250.0}
GRACE_SECONDS = 40.0  # torchrun gives its ranks 30 seconds to end
PROFILER_STEPS = 3  # behind the measured ones: the profiler warms up, records, writes

# In a process of its own: this one must not hold memory of the GPUs that it measures.
PROBE = """
import importlib, json, sys
import torch
from benchmarks.report import provenance

def imports(module):
    try:
        importlib.import_module(module)
    except (ImportError, OSError):
        return False
    return torch.cuda.is_available()

found = {"origin": provenance("benchmarks/end_to_end.py", sys.argv[1:])}
found["transformer_engine"] = imports("transformer_engine.pytorch")
found["fused_gradients"] = imports("fused_weight_gradient_mlp_cuda")
print(json.dumps(found))
"""


def probe(arguments: list[str]) -> dict:
    """{"origin": report.provenance() of a run with these arguments; "transformer_engine" and "fused_gradients": whether
    Machine has them}"""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    if done.returncode != 0:
        raise SystemExit(f"the versions could not be asked: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def stop(process: subprocess.Popen, grace: float = GRACE_SECONDS) -> None:
    """End torchrun and its ranks, which are in sessions of their own: politely, then by force."""
    ranks = _children(process.pid)
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(rank, signal.SIGKILL)


def run_logged(command: list[str], log: Path, limit: float, environment: dict[str, str]) -> int | None:
    """Run a command, its output in `log`; its exit code, or None when it was stopped after `limit` seconds.

    Its ranks are stopped with it, also when this process is interrupted. A torchrun that something else kills may leave
    ranks behind."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:  # a pipe that nobody reads would fill up and stop the run
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # the limit, Ctrl-C, SIGTERM
            stop(process)


def profile_flags(folder: Path, measured_steps: int) -> list[str]:
    """Flags for a trace of one step behind the measured ones, written to <folder>/torch_profile/rank-0.json.gz. The
    profiler starts a step earlier and writes in the step after it."""
    start = measured_steps + 2
    steps = ("--profile-step-start", str(start), "--profile-step-end", str(start + 1), "--profile-ranks", "0")
    return ["--profile", "--use-pytorch-profiler", *steps, "--tensorboard-dir", str(folder / "tensorboard")]


def run_row(row: Row, machine: Machine, args, peak_tflops: float | None, time_limit: float) -> dict:
    """One row of the table, JSON-able. error: None for a run that went through."""
    folder = (args.logs / row.name).resolve()
    steps = args.train_iters + (PROFILER_STEPS if args.profile else 0)
    flags = [*row_flags(row, machine, steps, args.micro_batches), *shlex.split(args.flags)]
    if args.profile:
        shutil.rmtree(folder, ignore_errors=True)  # an earlier run's trace
        flags += profile_flags(folder, args.train_iters)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(machine.processes),
        "pretrain_gpt_s2.py",
        *flags,
    ]
    log = args.logs / f"{row.name}.log"
    start = time.monotonic()
    code = run_logged(
        [sys.executable, *command],
        log,
        time_limit,
        {**row_environment(row), **os.environ, "PYTHONUNBUFFERED": "1"},
    )
    wall = time.monotonic() - start
    output = log.read_text(errors="replace")
    error = None if code == 0 else f"time limit of {time_limit:.0f} s" if code is None else error_of(output)
    # A step that was measured before the time ran out is one; a failed run's may be those of a broken one.
    found = read_log(output, args.train_iters) if code in (0, None) else {}
    if code == 0 and not found:
        error = f"ended after fewer than {SKIPPED_STEPS + 1} steps"
    written = shlex.join(["python", *command])
    result = dict(
        row=row.name, settings=row.settings(), error=error, wall_s=wall, log=log.name, command=written, **found
    )
    if found:
        thousands = row.tokens / row.cp / 1024
        result.update(
            tokens_per_s=sequences(row, machine, args.micro_batches) * row.tokens / found["step_ms"] * 1e3,
            gib_per_1k=found["peak_gib"] / thousands,
            activation_gib_per_1k=(found["peak_gib"] - found["resident_gib"]) / thousands,
            utilisation=found["tflops"] / peak_tflops if peak_tflops else None,
        )
    if args.profile and code in (0, None):  # the time limit may have come behind the trace
        try:
            result["profile"] = step_profile.read_trace(folder / "torch_profile" / "rank-0.json.gz")
        except ValueError as problem:
            result["error"] = error or str(problem)
    return result


def not_started(row: Row, budget: float) -> dict:
    """The row of one for which no time was left."""
    error = f"not started: the budget of {budget:g} s is spent"
    return dict(row=row.name, settings=row.settings(), error=error, wall_s=0.0, log=None)


def add_ratios(rows: list[Row], results: list[dict]) -> None:
    """Ratios of the sparse rows' tokens/s to those of the fastest dense row: result["over_dense"] with the same
    memory flags, result["over_best_dense"] with any; None where there is none."""
    for row, result in zip(rows, results):
        if row.stock or "tokens_per_s" not in result:
            continue
        dense = [
            (twin, other["tokens_per_s"])
            for twin, other in zip(rows, results)
            if twin.stock and twin.task() == row.task() and "tokens_per_s" in other
        ]
        same = [speed for twin, speed in dense if twin.setting() == row.setting()]
        result["over_dense"] = result["tokens_per_s"] / max(same) if same else None
        result["over_best_dense"] = result["tokens_per_s"] / max(speed for _, speed in dense) if dense else None


COLUMNS = (  # head, field of a result, format
    ("step ms", "step_ms", "{:.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("peak GiB", "peak_gib", "{:.2f}"),
    ("MiB/token", "gib_per_1k", "{:.3f}"),
    ("beside weights", "activation_gib_per_1k", "{:.3f}"),
    ("TFLOP/s", "tflops", "{:.1f}"),
    ("util.", "utilisation", "{:.1%}"),
    ("dense", "over_dense", "{:.2f} x"),
    ("best dense", "over_best_dense", "{:.2f} x"),
    ("loss", "loss", "{:.4f}"),
    ("grad norm", "grad_norm", "{:.3f}"),
)


def table(results: list[dict]) -> list[str]:
    """Lines: the heads and one a row."""
    width = max(len(result["row"]) for result in results)
    heads = [head for head, _, _ in COLUMNS]
    columns = [max(len(head), 9) for head in heads]
    lines = [f"{'row':<{width}}" + "".join(f"  {head:>{column}}" for head, column in zip(heads, columns))]
    for result in results:
        line = f"{result['row']:<{width}}"
        if "step_ms" in result:
            cells = ["-" if result.get(field) is None else form.format(result[field]) for _, field, form in COLUMNS]
            line += "".join(f"  {cell:>{column}}" for cell, column in zip(cells, columns))
        if result["error"]:
            line += f"  {result['error']}" + (f" ({result['wall_s']:.0f} s; {result['log']})" if result["log"] else "")
        lines.append(line)
    return lines


def refuse_on_cpu(rows: list[Row]) -> None:
    """Ends the program for rows of a size that a CPU would not train in days."""
    large = [row.name for row in rows if row.shape is not SHAPES["tiny"]]
    if large:
        refuse(f"--rows {large[0]}: no GPU here, which it is made for; --rows tiny runs on a CPU")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        description=__doc__.split("\n\n")[0], epilog="The names of rows are explained at the top of this file."
    )
    parser.add_argument("--rows", default="tiny", help="comma-separated names of rows and groups")
    parser.add_argument("--list", action="store_true", help="print the groups")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of every run")
    parser.add_argument("--time-limit", type=float, default=240, help="seconds of a row, start included")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds of all rows together (default: no limit)"
    )
    parser.add_argument("--train-iters", type=int, default=6)
    parser.add_argument("--profile", action="store_true", help="also where the time of one more step goes, per row")
    parser.add_argument("--micro-batches", type=int, default=1, help="of one sequence, a step and data-parallel rank")
    parser.add_argument("--flags", default="", help="more flags of Megatron for every row: --flags='--lr 1e-4 --bf16'")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 TFLOP/s of a card, for the utilisation")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "end_to_end", help="folder of the runs' output")
    parser.add_argument(
        "--json", type=Path, help="write rows, command, versions, hardware, commit (S2_COMMIT without .git)"
    )
    args = parser.parse_args(argv)
    if args.gpus < 1:
        parser.error(f"--gpus {args.gpus}: expected 1 or more")
    if args.json is not None:
        try:
            args.json.absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            parser.error(f"--json {args.json}: its folder cannot be made ({problem.strerror}); use another one")
    if args.train_iters <= SKIPPED_STEPS:
        parser.error(f"--train-iters {args.train_iters}: expected more than {SKIPPED_STEPS}, which are not measured")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.list:
        for name, rows in GROUPS.items():
            print(f"{name}: {', '.join(rows)}")
        return
    try:
        rows = chosen_rows(args.rows)
    except ValueError as problem:
        refuse(f"--rows {problem}")
    found = probe(sys.argv[1:] if argv is None else argv)
    origin = found["origin"]
    card = origin["hardware"]["gpu"] if origin["hardware"]["gpus"] else None
    if card is None:
        refuse_on_cpu(rows)
    machine = Machine(args.gpus, card is not None, found["transformer_engine"], found["fused_gradients"])
    peak_tflops = args.peak_tflops or next((rate for name, rate in PEAK_TFLOPS.items() if card and name in card), None)
    implementation = "Transformer Engine" if machine.transformer_engine else "Megatron's local implementation"
    print(f"{args.gpus} ranks, {card or 'CPU'}, torch {origin['versions']['torch']}, {implementation}", flush=True)
    results: list[dict] = []
    end = time.monotonic() + args.budget
    for row in rows:
        limit = min(args.time_limit, end - time.monotonic() - GRACE_SECONDS)
        results.append(run_row(row, machine, args, peak_tflops, limit) if limit > 0 else not_started(row, args.budget))
        print(table(results[-1:])[-1], flush=True)
        add_ratios(rows, results)
        if args.json:
            content = dict(
                **origin, ranks=args.gpus, peak_tflops=peak_tflops, transformer_engine=machine.transformer_engine
            )
            write_json(args.json, {**content, "rows": results})
    print("\n" + "\n".join(table(results)))
    profiles = {result["row"]: result["profile"] for result in results if "profile" in result}
    if profiles:
        print("\n" + "\n".join(step_profile.table(profiles)))
    if not any("step_ms" in result for result in results):
        sys.exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress is ended, too
    main()
