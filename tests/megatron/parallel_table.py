"""How far every mix of TP, SP, PP, VPP, CP, DP and EP is from one process, in the loss, over 10 iterations from one
checkpoint.

    python tests/megatron/parallel_table.py --processes 2 --precisions fp32 --json table.json   # two GPUs; then bf16
    python tests/megatron/parallel_table.py --processes 2 --only cp2 tp2_sp     # no GPU: gloo, fp32, a smaller model

    | layout | processes | backend | precision | largest difference | relative | stock dense | bound | verdict |
    |---|---|---|---|---|---|---|---|---|
    | cp2 | 2 | nccl | fp32 | 9.5e-07 | 2.0e-07 | | 1.0e-05 | yes |
    | cp2 | 2 | nccl | bf16 | 1.3e-03 | 2.7e-04 | 1.1e-03 | 2.2e-03 | yes |
    ...

fp32, without TF32 and with Megatron's local layers: at most 1e-5. bf16: at most twice the difference that Megatron's
own dense model shows between the same two layouts. Where that one cannot run (CP and SP take Transformer Engine, and CP
no packed rows) the bound is twice the largest of the layouts' above it in the table, in brackets; without any the row
is not judged, which is no success. With --seeds N all differences are the largest of N orders of the data: a single one
can be small by chance.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import report
from tests.megatron.conftest import LOCAL_SPEC, SPARSITY, Lab, write_corpus

# 8 query heads in 4 groups, so that a2a and TP mix; two virtual stages; blocks of 16 are the smallest of the kernels;
# CP 8 cuts 256 tokens.
MODEL = """
    --num-attention-heads 8 --group-query-attention --num-query-groups 4 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --init-method-std 0.05 --make-vocab-size-divisible-by 32
"""
SIZES = {
    "small": "--num-layers 8 --hidden-size 256 --ffn-hidden-size 512 --seq-length 512 --max-position-embeddings 512",
    "tiny": "--num-layers 4 --hidden-size 128 --ffn-hidden-size 128 --seq-length 256 --max-position-embeddings 256",
}
TP, SP, PP, CP = (
    "--tensor-model-parallel-size",
    "--sequence-parallel",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
# Experts whole (ETP 1): cut ones make Megatron gather rows of different lengths, which gloo refuses.
VPP, EP, ETP = (
    "--num-virtual-stages-per-pipeline-rank 2",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
A2A, GATHER, TYPES = (
    "--s2-cp-comm-type a2a",
    "--s2-cp-comm-type all_gather",
    "--s2-cp-comm-type all_gather sparse a2a sparse",
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
KEEP = f"{RECOMPUTE} --s2-keep-attention-output"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-token-dispatcher-type alltoall"
PACKED = "--dataloader-inter-document-masking"
MASKED = "--eod-mask-loss --s2-loss-from-token 100"  # context-parallel ranks then count unequal numbers of targets
ENGINE_SPEC = "--transformer-impl transformer_engine --no-rope-fusion --no-gradient-accumulation-fusion"
FP32_BOUND = 1e-5
FIRST_SEED = 1234  # Megatron's default


class Layout(NamedTuple):
    processes: int
    flags: str
    common: str = ""  # what one process gets, too


LAYOUTS = {
    "tp2_sp": Layout(2, f"{TP} 2 {SP}"),
    "tp2_sp_recompute": Layout(2, f"{TP} 2 {SP} {RECOMPUTE}"),
    "pp2_vpp2": Layout(2, f"{PP} 2 {VPP}"),
    "cp2": Layout(2, f"{CP} 2"),
    "cp2_received": Layout(2, f"{CP} 2 --s2-cp-keep-received"),
    "cp2_gather": Layout(2, f"{CP} 2 {GATHER}"),
    "cp2_a2a": Layout(2, f"{CP} 2 {A2A}"),
    "cp2_recompute": Layout(2, f"{CP} 2 {RECOMPUTE}"),
    "cp2_keep": Layout(2, f"{CP} 2 {KEEP}"),
    "cp2_gather_packed": Layout(2, f"{CP} 2 {GATHER}", PACKED),
    "cp2_a2a_packed": Layout(2, f"{CP} 2 {A2A}", PACKED),
    "cp2_masked": Layout(2, f"{CP} 2", MASKED),
    "cp2_a2a_masked": Layout(2, f"{CP} 2 {A2A}", MASKED),
    "dp2_ep2": Layout(2, f"{EP} 2", MOE),
    "tp2_sp_ep2": Layout(2, f"{TP} 2 {SP} {EP} 2 {ETP} 1", MOE),
    "cp2_ep2": Layout(2, f"{CP} 2 {EP} 2", MOE),
    "cp4": Layout(4, f"{CP} 4"),
    "cp4_a2a": Layout(4, f"{CP} 4 {A2A}"),
    "cp4_gather_packed": Layout(4, f"{CP} 4 {GATHER}", PACKED),
    "cp2_dp2": Layout(4, f"{CP} 2"),
    "tp2_sp_cp2": Layout(4, f"{TP} 2 {SP} {CP} 2"),
    "pp2_vpp2_cp2_masked": Layout(4, f"{PP} 2 {VPP} {CP} 2", MASKED),
    "tp2_sp_cp2_a2a": Layout(4, f"{TP} 2 {SP} {CP} 2 {A2A}"),
    "tp2_sp_cp2_a2a_packed": Layout(4, f"{TP} 2 {SP} {CP} 2 {A2A}", PACKED),
    "tp2_sp_pp2": Layout(4, f"{TP} 2 {SP} {PP} 2"),
    "tp2_sp_pp2_vpp2": Layout(4, f"{TP} 2 {SP} {PP} 2 {VPP}"),
    "pp2_vpp2_cp2": Layout(4, f"{PP} 2 {VPP} {CP} 2"),
    "pp2_vpp2_cp2_keep": Layout(4, f"{PP} 2 {VPP} {CP} 2 {KEEP}"),
    "tp2_sp_dp2_ep2": Layout(4, f"{TP} 2 {SP} {EP} 2 {ETP} 1", MOE),
    "pp2_dp2_ep2": Layout(4, f"{PP} 2 {EP} 2", MOE),
    "cp2_dp2_ep2": Layout(4, f"{CP} 2 {EP} 2", MOE),
    "cp8": Layout(8, f"{CP} 8"),
    "cp4_dp2": Layout(8, f"{CP} 4"),
    "tp2_sp_cp4": Layout(8, f"{TP} 2 {SP} {CP} 4"),
    "tp2_sp_pp2_vpp2_cp2": Layout(8, f"{TP} 2 {SP} {PP} 2 {VPP} {CP} 2"),
    "tp2_sp_pp2_vpp2_cp2_types": Layout(8, f"{TP} 2 {SP} {PP} 2 {VPP} {CP} 2 {TYPES} {KEEP}"),
    "pp2_vpp2_cp2_dp2": Layout(8, f"{PP} 2 {VPP} {CP} 2"),
    "tp2_sp_cp2_dp2_ep2": Layout(8, f"{TP} 2 {SP} {CP} 2 {EP} 2 {ETP} 1", MOE),
}
ALONE = {common: Layout(1, "", common) for common in ("", MOE, PACKED, MASKED)}
COLUMNS = (
    "layout",
    "processes",
    "backend",
    "precision",
    "largest difference",
    "relative",
    "stock dense",
    "bound",
    "verdict",
)


class Table:
    """Runs from one checkpoint of each kind of model, every one once, `jobs` at a time; the checkpoints' own runs
    beside them."""

    def __init__(self, lab: Lab, model: str, engine: bool, jobs: int, seeds: int = 1):
        self.lab, self.model, self.engine, self.seeds = lab, model, engine, range(FIRST_SEED, FIRST_SEED + seeds)
        self.pool, self.start_pool = ThreadPoolExecutor(jobs), ThreadPoolExecutor(4)
        self.runs: dict[tuple, Future] = {}
        self.starts: dict[Path, Future] = {}

    def _spec(self, precision: str) -> str:
        return (
            ENGINE_SPEC if self.engine and precision == "bf16" else LOCAL_SPEC
        )  # Transformer Engine has no fp32 attention under CP

    def start(self, moe: bool, precision: str) -> Path:
        """Where the checkpoint will be that the others go on from: two iterations in fp32, one for each kind of
        layers."""
        folder = (
            self.lab.folder
            / f"start_{'moe' if moe else 'dense'}_{'engine' if self._spec(precision) == ENGINE_SPEC else 'local'}"
        )
        if folder not in self.starts:
            flags = f"{MOE if moe else ''} --train-iters 2 --save {folder} --save-interval 2"
            self.starts[folder] = self.start_pool.submit(
                self._train, folder.name, 1, flags, True, self._spec(precision)
            )
        return folder

    def _train(self, name, processes, flags, sparse, spec) -> dict[int, float]:
        # Runs at the same time must not build one index cache.
        flags = f"{flags} --data-cache-path {self.lab.folder / 'caches' / name}"
        environment = {"NVIDIA_TF32_OVERRIDE": "0"}  # whatever a library would choose
        run = self.lab.run(
            name, flags, processes=processes, model=self.model, spec=spec, sparsity=sparse, environment=environment
        )
        return run.losses

    def _train_from(self, start: Future, *job) -> dict[int, float]:
        start.result()
        return self._train(*job)

    def request(self, layout: Layout, precision: str, sparse: bool, seed: int) -> Future:
        """{iteration: loss}, in the future. sparse: with S2, or Megatron's own dense model from the same weights."""
        key = (layout if sparse else layout._replace(flags=without_s2(layout.flags)), precision, sparse, seed)
        if key not in self.runs:
            start = self.start(layout.common == MOE, precision)
            schedule = f"--seed {seed} --train-iters 12 --lr-decay-iters 12 --override-opt-param-scheduler"
            load = f"--load {start} --no-load-optim --no-load-rng"
            bf16 = "--bf16 --no-masked-softmax-fusion" if precision == "bf16" else ""
            extra = " ".join([schedule, load, layout.common, key[0].flags, bf16])
            job = (f"run{len(self.runs)}", layout.processes, extra, sparse, self._spec(precision))
            self.runs[key] = self.pool.submit(self._train_from, self.starts[start], *job)
        return self.runs[key]

    def stock_runs(self, layout: Layout, precision: str) -> bool:
        """Whether the dense model is asked for, and can train in that layout."""
        if self.engine:
            return precision == "bf16" and (CP not in layout.flags or layout.common != PACKED)
        return (
            precision == "bf16" and CP not in layout.flags and SP not in layout.flags
        )  # Megatron's own norms refuse the latter

    def plan(self, layout: Layout, precision: str) -> None:
        """Asks for everything that a row needs."""
        for sparse in (True, False) if self.stock_runs(layout, precision) else (True,):
            for seed in self.seeds:
                self.request(layout, precision, sparse, seed)
                self.request(ALONE[layout.common], precision, sparse, seed)

    def differences(self, layout: Layout, precision: str, sparse: bool = True) -> tuple[float, float]:
        """The largest difference from one process, and the largest relative one. AssertionError: a run failed or
        stopped early."""
        absolute, relative = [], []
        for seed in self.seeds:
            mine, one = (
                self.request(which, precision, sparse, seed).result() for which in (layout, ALONE[layout.common])
            )
            assert len(mine) == len(one) == 10, f"{len(mine)} and {len(one)} iterations, expected 10"
            absolute += [abs(mine[step] - loss) for step, loss in one.items()]
            relative += [abs(mine[step] / loss - 1) for step, loss in one.items()]
        return float(np.max(absolute)), float(np.max(relative))  # NumPy's: NaN when one is


def without_s2(flags: str) -> str:
    """A command line without S2's flags and their values."""
    return " ".join(re.sub(r"--s2-\S+( (?!--)\S+)*", "", flags).split())


def make_row(table: Table, name: str, precision: str, backend: str, stock_seen: list[float]) -> dict:
    """One row of the table. stock_seen: the stock model's differences so far, to which this row's is added."""
    layout = LAYOUTS[name]
    row = dict.fromkeys(COLUMNS) | {
        "layout": name,
        "processes": layout.processes,
        "backend": backend,
        "precision": precision,
    }
    try:
        row["largest difference"], row["relative"] = table.differences(layout, precision)
        row["bound"] = FP32_BOUND if precision == "fp32" else None
        if table.stock_runs(layout, precision):
            row["stock dense"] = table.differences(layout, precision, False)[0]
            stock_seen.append(row["stock dense"])
            row["bound"] = 2 * row["stock dense"]
        elif precision == "bf16" and stock_seen:
            row["bound"] = 2 * max(stock_seen)
            row["bound from other layouts"] = True
    except AssertionError as problem:
        print(f"{name}, {precision}: {problem}", file=sys.stderr)
        return row | {"verdict": "FAILED"}
    row["verdict"] = (
        "not judged" if row["bound"] is None else "yes" if row["largest difference"] <= row["bound"] else "NO"
    )
    return row


def line_of(row: dict) -> str:
    """A row in Markdown."""
    texts = [
        "" if row[name] is None else f"{row[name]:.1e}" if isinstance(row[name], float) else str(row[name])
        for name in COLUMNS
    ]
    if row.get("bound from other layouts"):
        texts[COLUMNS.index("bound")] = f"({texts[COLUMNS.index('bound')]})"
    return f"| {' | '.join(texts)} |"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "megatron-core", "transformer-engine"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def listed_gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    output = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return [line.partition(": ")[2].partition(" (")[0] for line in output.splitlines() if line.startswith("GPU ")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--processes", type=int, default=2, help="layouts of up to so many processes")
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, help="these layouts")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), help="default: fp32, on GPUs bf16 too")
    parser.add_argument("--size", choices=SIZES, help="of the model; default: small on GPUs, else tiny")
    parser.add_argument("--jobs", type=int, help="runs at the same time, on the same GPUs; default: 8 on GPUs, else 1")
    parser.add_argument("--seeds", type=int, choices=range(1, 101), default=1, metavar="N",
                        help="orders of the data, every one trained in every layout")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    args = parser.parse_args()
    gpus = listed_gpus()
    engine = (
        bool(gpus)
        and subprocess.run([sys.executable, "-c", "import transformer_engine.pytorch"], capture_output=True).returncode
        == 0
    )
    backend, size = "nccl" if gpus else "gloo", args.size or ("small" if gpus else "tiny")
    precisions = args.precisions or (["fp32", "bf16"] if gpus else ["fp32"])
    possible = [name for name, layout in LAYOUTS.items() if layout.processes <= args.processes]
    names = args.only or possible
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), f"--distributed-backend {backend}", timeout=args.timeout, gpus=bool(gpus))
        lab.sparsity.write_text(SPARSITY)
        write_corpus(lab.folder / "corpus")
        table = Table(lab, f"{SIZES[size]} {MODEL}", engine, args.jobs or (8 if gpus else 1), args.seeds)
        wanted = [(name, precision) for precision in precisions for name in names]
        for name, precision in wanted:
            table.plan(LAYOUTS[name], precision)
        print(f"{line_of(dict(zip(COLUMNS, COLUMNS)))}\n|{'---|' * len(COLUMNS)}", flush=True)
        stock_seen: list[float] = []
        for name, precision in wanted:
            rows.append(make_row(table, name, precision, backend, stock_seen))
            print(line_of(rows[-1]), flush=True)
            if args.json:
                where = dict(device=gpus[0] if gpus else "CPU", gpus=len(gpus), versions=versions())
                about = dict(command=" ".join(["python", *sys.argv]), commit=report.commit(), **where)
                model = dict(
                    model=" ".join(table.model.split()),
                    transformer_engine=engine,
                    sparsity=SPARSITY,
                    iterations=10,
                    seeds=args.seeds,
                )
                args.json.write_text(json.dumps({**about, **model, "rows": rows}, indent=1) + "\n")
    wrong = sum(row["verdict"] != "yes" for row in rows)
    print(
        f"\n{wrong} of {len(rows)} are not within their bounds"
        if wrong
        else f"\nall {len(rows)} are within their bounds"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
