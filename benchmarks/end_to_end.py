"""Measures whole training steps of pretrain_gpt_s2.py under torchrun: S2 beside Megatron's dense model, with identical
flags otherwise.

    python benchmarks/end_to_end.py --gpus 4 --rows 1p3b-128k-cp4 --json e2e.json      # a group of rows; --list prints the groups
    python benchmarks/end_to_end.py --gpus 1 --rows 1p3b-32k,memory                    # several; --gpus: the ranks of every run
    python benchmarks/end_to_end.py --gpus 2 --rows 1p3b-128k-cp2                      # a row needs tp * cp * pp GPUs, or a multiple
    python benchmarks/end_to_end.py --gpus 4 --rows 7b-8layers-1m-cp4-full-keep-s2,7b-8layers-1m-cp4-full-dense
    python benchmarks/end_to_end.py --gpus 1 --rows tiny                               # a minute on a CPU (gloo, fp32)

    row                           step ms  tokens/s  peak GiB  MiB/token  beside weights  TFLOP/s   util.   dense      loss  grad norm
    1p3b-128k-cp4-full-keep-s2    ...
    1p3b-32k-none-dense           out of memory: CUDA out of memory. Tried to allocate 64.00 GiB. ... (49 s; 1p3b-32k-none-dense.log)

A row is named by its shape, length, settings and attention; any mix of these parts is one, the shape first and the
attention last:

1p3b, 7b           the models of examples/pretrain_1p3b.sh and pretrain_7b.sh; `8layers`: with fewer layers, for fewer GPUs. tiny: for a CPU
32k, 128k, 1m      tokens of a sequence; one sequence a step and data-parallel rank (--micro-batches: more)
tp2, cp4, pp2      parallel sizes; what is left of the ranks is data parallel. With tp also sequence parallel
none, selective, full     recomputation (selective: the core attention)
keep, received     --s2-keep-attention-output, --s2-cp-keep-received
offload            Megatron's fine-grained activation offloading of every module of a layer; not with full
offload12          its older one, of whole layers; not with recomputation or pp. Both need Transformer Engine
p2p, a2a, allgather, sparse     what context-parallel ranks exchange: --cp-comm-type of a dense row, --s2-cp-comm-type of the others
s2, hybrid, dense  all layers S2, configs/*_hybrid.yaml, Megatron's own dense model; densekernels: dense layers computed by S2's kernels

Every row is a run of its own on Megatron's mock data, with bf16 (fp32 without a GPU), the distributed optimizer,
Transformer Engine where it can be imported and Megatron's local implementation elsewhere; nothing is saved. A row that
fails or runs out of memory is reported with its last error line, one that runs out of --time-limit with the numbers
that it had by then, and the others go on. Columns:

step ms         median of Megatron's iteration times after the second
tokens/s        of all GPUs together
peak GiB        torch's largest allocated memory, of the fullest rank; Megatron asks one rank of those that are data-parallel to each other
MiB/token       that per token of a sequence on one context-parallel rank (1 MiB a token is 1 GiB per 1024 of them)
beside weights  MiB per token of what the step needs on top of what stays (weights, gradients, optimizer): activations and temporaries
TFLOP/s, util.  Megatron's FLOPs of the model per GPU and second, attention counted on attended pairs, recomputation not; share of the card's
                dense bf16 rate (--peak-tflops for cards that are not in the list)
dense           tokens/s over those of the fastest `dense` row with the same shape, length, parallel sizes, recomputation and offloading
loss, grad norm of the last step: rows of one shape, tp and pp start from the same weights
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.end_to_end_rows import GROUPS, Machine, Row, chosen_rows, row_environment, row_flags, sequences
from benchmarks.report import write_json

ROOT = Path(__file__).resolve().parent.parent
SKIPPED_STEPS = 2  # the first compiles, and the time of the second in Megatron's log is the mean of both
# Dense bf16 TFLOP/s of the data sheets, by a part of the card's name.
PEAK_TFLOPS = {"H200": 989.5, "H100 80GB HBM3": 989.5, "GH200": 989.5, "A100": 312.0, "B200": 2250.0}
GRACE_SECONDS = 40.0  # torchrun gives its ranks 30 seconds to end

NUMBER = r"([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|(?i:nan|inf)))"
STEP = re.compile(r"iteration +(\d+)/ *\d+ \| consumed samples.*? elapsed time per iteration \(ms\): ([\d.]+) \|(.*)")
DENSE_EQUIVALENT = re.compile(r"iteration +(\d+) \| dense-equivalent throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)")
MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \| allocated: ([\d.]+) \| max allocated: ([\d.]+)"
    r" \| reserved: [\d.]+ \| max reserved: ([\d.]+)"
)
KERNELS = re.compile(r"^S2 attention (?:backend|kernels): (\w+)", re.MULTILINE)
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/.*(?:closing signal|failed \(exitcode)|ChildFailedError")
ERROR = re.compile(r"(?:^|[\s\]:])((?:[\w.]*(?:Error|Exception)|[\w.]+: error): .*)")

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


def _last_number(pattern: str, text: str) -> float | None:
    found = re.search(pattern + NUMBER, text)
    return float(found[1]) if found else None


def read_log(output: str) -> dict:
    """What Megatron printed: {} before the third step, else step_ms (median) and steps_ms, tflops and
    dense_equivalent_tflops per GPU (medians), loss and grad_norm of the last step, peak_gib, resident_gib and
    reserved_gib of the fullest rank, kernels of S2."""
    steps = {int(number): (float(elapsed), rest) for number, elapsed, rest in STEP.findall(output)}
    measured = {number: step for number, step in steps.items() if number > SKIPPED_STEPS}
    if not measured:
        return {}
    times = [elapsed for elapsed, _ in measured.values()]
    rates = [_last_number(r"throughput per GPU \(TFLOP/s/GPU\): ", rest) for _, rest in measured.values()]
    dense = [float(rate) for number, rate in DENSE_EQUIVALENT.findall(output) if int(number) > SKIPPED_STEPS]
    last = steps[max(steps)][1]
    # Resident and largest of each rank, of its last report: they grow until the optimizer's state is there.
    ranks = {rank: [float(size) / 1024 for size in sizes] for rank, *sizes in MEMORY.findall(output)}
    resident, peak, reserved = max(ranks.values(), key=lambda sizes: sizes[1], default=(0.0, 0.0, 0.0))
    kernels = KERNELS.findall(output)
    return dict(
        step_ms=median(times),
        steps_ms=times,
        tflops=median([rate for rate in rates if rate is not None] or [0.0]),
        dense_equivalent_tflops=median(dense) if dense else None,
        loss=_last_number("lm loss: ", last),
        grad_norm=_last_number("grad norm: ", last),
        peak_gib=peak,
        resident_gib=resident,
        reserved_gib=reserved,
        kernels=kernels[-1] if kernels else None,
    )


def error_of(output: str) -> str:
    """The last error line of a failed run, without torchrun's; of a rank that ran out of memory, that line."""
    own = []
    for line in output.splitlines():
        if TORCHRUN_REPORT.search(line):
            break
        own.append(line.strip())
    errors = [found[1] for line in own if (found := ERROR.search(line))]
    for error in errors:
        if "OutOfMemoryError" in error or "out of memory" in error:
            return f"out of memory: {error.partition(': ')[2]}"
    return next((line for line in reversed(errors or own) if line), "no output")


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


def run_row(row: Row, machine: Machine, args, peak_tflops: float | None) -> dict:
    """One row of the table, JSON-able. error: None for a run that went through."""
    flags = [*row_flags(row, machine, args.train_iters, args.micro_batches), *shlex.split(args.flags)]
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
        args.time_limit,
        {**row_environment(row), **os.environ, "PYTHONUNBUFFERED": "1"},
    )
    wall = time.monotonic() - start
    output = log.read_text(errors="replace")
    error = None if code == 0 else f"time limit of {args.time_limit:g} s" if code is None else error_of(output)
    # A step that was measured before the time ran out is one; a failed run's may be those of a broken one.
    found = read_log(output) if code in (0, None) else {}
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
    return result


def add_ratios(rows: list[Row], results: list[dict]) -> None:
    """result["over_dense"] of the sparse rows: tokens/s over those of the fastest dense row of the same setting, None
    where there is none."""
    for row, result in zip(rows, results):
        if row.stock or "tokens_per_s" not in result:
            continue
        dense = [
            other["tokens_per_s"]
            for twin, other in zip(rows, results)
            if twin.stock and twin.setting() == row.setting() and "tokens_per_s" in other
        ]
        result["over_dense"] = result["tokens_per_s"] / max(dense) if dense else None


HEADS = (
    "step ms",
    "tokens/s",
    "peak GiB",
    "MiB/token",
    "beside weights",
    "TFLOP/s",
    "util.",
    "dense",
    "loss",
    "grad norm",
)
FIELDS = (
    ("step_ms", "{:.1f}"), ("tokens_per_s", "{:,.0f}"), ("peak_gib", "{:.2f}"), ("gib_per_1k", "{:.3f}"), ("activation_gib_per_1k", "{:.3f}"),
    ("tflops", "{:.1f}"), ("utilisation", "{:.1%}"), ("over_dense", "{:.2f} x"), ("loss", "{:.4f}"), ("grad_norm", "{:.3f}"),
)  # fmt: skip


def table(results: list[dict]) -> list[str]:
    """Lines: the heads and one a row."""
    width = max(len(result["row"]) for result in results)
    columns = [max(len(head), 9) for head in HEADS]
    lines = [f"{'row':<{width}}" + "".join(f"  {head:>{column}}" for head, column in zip(HEADS, columns))]
    for result in results:
        line = f"{result['row']:<{width}}"
        if "step_ms" in result:
            cells = ["-" if result.get(field) is None else form.format(result[field]) for field, form in FIELDS]
            line += "".join(f"  {cell:>{column}}" for cell, column in zip(cells, columns))
        if result["error"]:
            line += f"  {result['error']} ({result['wall_s']:.0f} s; {result['log']})"
        lines.append(line)
    return lines


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="The names of rows are explained at the top of this file."
    )
    parser.add_argument("--rows", default="tiny", help="comma-separated names of rows and groups")
    parser.add_argument("--list", action="store_true", help="print the groups")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of every run")
    parser.add_argument("--time-limit", type=float, default=240, help="seconds of a row, start included")
    parser.add_argument("--train-iters", type=int, default=6)
    parser.add_argument("--micro-batches", type=int, default=1, help="of one sequence, a step and data-parallel rank")
    parser.add_argument("--flags", default="", help="more flags of Megatron for every row: --flags='--lr 1e-4 --bf16'")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 TFLOP/s of a card, for the utilisation")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs" / "end_to_end", help="folder of the runs' output")
    parser.add_argument(
        "--json", type=Path, help="write rows, command, versions, hardware, commit (S2_COMMIT without .git)"
    )
    args = parser.parse_args(argv)
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
        raise SystemExit(str(problem)) from None
    found = probe(sys.argv[1:] if argv is None else argv)
    origin = found["origin"]
    card = origin["hardware"]["gpu"] if origin["hardware"]["gpus"] else None
    machine = Machine(args.gpus, card is not None, found["transformer_engine"], found["fused_gradients"])
    peak_tflops = args.peak_tflops or next((rate for name, rate in PEAK_TFLOPS.items() if card and name in card), None)
    implementation = "Transformer Engine" if machine.transformer_engine else "Megatron's local implementation"
    print(f"{args.gpus} ranks, {card or 'CPU'}, torch {origin['versions']['torch']}, {implementation}", flush=True)
    results: list[dict] = []
    for row in rows:
        results.append(run_row(row, machine, args, peak_tflops))
        print(table(results[-1:])[-1], flush=True)
        add_ratios(rows, results)
        if args.json:
            content = dict(
                **origin, ranks=args.gpus, peak_tflops=peak_tflops, transformer_engine=machine.transformer_engine
            )
            write_json(args.json, {**content, "rows": results})
    print("\n" + "\n".join(table(results)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress is ended, too
    main()
