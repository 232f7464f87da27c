"""From samples to rows, and rows to text and to a file; where a file's numbers come from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import subprocess
from pathlib import Path
from statistics import median

import torch

from benchmarks.timing import quantile
from s2_megatron.tools.env_report import ENVIRONMENT_PREFIXES

FORMAT = 1  # of the JSON
ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = (
    "triton",
    "megatron-core",
    "transformer-engine",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "dkernel",
    "numpy",
)
PLACES = ("_DIR", "_HOME", "_PATH")  # ends of variables that say where something lies, not how fast it runs
BASELINE = "FA-2 dense"


def provenance(script: str, arguments: list[str], launcher: str = "python") -> dict[str, object]:
    """What every file of results begins with: {"command", "versions", "hardware", "environment", "commit"}. script: its
    path in the project."""
    names = sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIXES) and not name.endswith(PLACES))
    environment = {name: os.environ[name] for name in names}
    command = f"{launcher} {shlex.join([script, *arguments])}"
    return dict(command=command, versions=versions(), hardware=hardware(), environment=environment, commit=commit())


def commit() -> str | None:
    """The checkout's commit, with "-dirty" behind it when files other than results differ from it; S2_COMMIT instead
    where that is set, for machines to which the files were copied without .git. None where neither is there."""
    if os.environ.get("S2_COMMIT"):
        return os.environ["S2_COMMIT"]

    def git(*words):
        return subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:  # a copy inside of another checkout
            return None
        head = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


def versions() -> dict[str, str]:
    """Name to version. Triton's is that of the module: another release may lie in front of the installed package, by
    PYTHONPATH."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
    }
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if importlib.util.find_spec("triton") is not None:
        found["triton"] = importlib.import_module("triton").__version__
    return found


def hardware() -> dict[str, object]:
    """The first GPU, and the names of all that this process sees; {"gpu": "none"} without one."""
    if not torch.cuda.is_available():
        return {"gpu": "none", "gpus": []}
    properties = torch.cuda.get_device_properties(0)
    found: dict[str, object] = {
        "gpu": properties.name,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "sms": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
    }
    command = ["nvidia-smi", "--query-gpu=power.limit,clocks.max.sm,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        found |= dict(zip(("power_limit", "largest_sm_clock", "driver"), done.stdout.splitlines()[0].split(", ")))
    except (OSError, subprocess.SubprocessError, IndexError) as problem:
        found["nvidia_smi"] = f"could not be asked: {type(problem).__name__}"
    return found


def spread(samples: list[float]) -> dict[str, float]:
    """{"p20", "median", "p80"}"""
    return {"p20": quantile(samples, 0.2), "median": median(samples), "p80": quantile(samples, 0.8)}


def make_row(group: str, case, name: str, runner, measured, ceiling_tflops: float | None) -> dict:
    """One entry on one case, JSON-able. TF/s count attended pairs: 4 D a pair in the forward, 10 D in the backward."""
    pattern = runner.pattern
    samples = measured.total
    rates = [
        scale * case.head_dim * runner.pairs / milliseconds / 1e9
        for scale, milliseconds in (
            (4, median(measured.forward)),
            (10, median(measured.backward)),
            (14, median(samples)),
        )
    ]
    return dict(
        group=group,
        case=case.name,
        entry=name,
        seq_length=case.length,
        tokens=case.tokens,
        batch=case.batch,
        documents=None if case.documents is None else len(case.documents),
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        tensor_format=case.tensor_format,
        pattern=pattern.describe() if pattern else runner.note,
        block=pattern.block_size if pattern else None,
        note=runner.note,
        attended_pairs=runner.pairs,
        attended_share=runner.pairs / case.dense_pairs,
        forward_ms=spread(measured.forward),
        backward_ms=spread(measured.backward),
        total_ms=spread(samples),
        total_ms_samples=samples,
        forward_tflops=rates[0],
        backward_tflops=rates[1],
        tflops=rates[2],
        share_of_matmul=rates[2] / ceiling_tflops if ceiling_tflops else None,
        extra_bytes=measured.extra_bytes,
        memory_limit=case.memory_limit(),
        first_call_s=measured.first_call_s,
        rounds=len(samples),
    )


def add_ratios(rows: list[dict]) -> None:
    """row["speed_over"]: {other entry: its time over this one's} among the entries of the same case and group."""
    for row in rows:
        others = [
            other
            for other in rows
            if (other["group"], other["case"]) == (row["group"], row["case"]) and other is not row
        ]
        row["speed_over"] = {
            other["entry"]: other["total_ms"]["median"] / row["total_ms"]["median"] for other in others
        }


def text_of(row: dict) -> str:
    def part(kind):
        times = row[f"{kind}_ms"]
        return f"{times['median']:8.2f} ms ({times['p20']:.2f}-{times['p80']:.2f}) {row[f'{kind}_tflops']:4.0f} TF/s"

    over = row["speed_over"].get(BASELINE)
    return (
        f"{row['case']:32s} {row['entry']:26s} {100 * row['attended_share']:5.1f} %"
        f"  forward {part('forward')}  backward {part('backward')}"
        f"  {'' if row['share_of_matmul'] is None else f'{100 * row["share_of_matmul"]:3.0f} % of matmul'}"
        f"  +{row['extra_bytes'] / 2**20:6.0f} MiB  first {row['first_call_s']:5.1f} s"
        + (f"  {over:5.2f} x {BASELINE.split()[0]}" if over else "")
    )


def ratios_text(row: dict) -> str:
    return f"  {row['case']}, {row['entry']}: " + ", ".join(
        f"{ratio:.2f} x {name}" for name, ratio in row["speed_over"].items()
    )


def verdict_text(verdict) -> str:
    aims = [
        f"{what} {value:g}" for what, value in (("must", verdict.must), ("goal", verdict.goal)) if value is not None
    ]
    return f"  {'met   ' if verdict.met else 'MISSED'} {verdict.text}: {verdict.value:.2f} ({', '.join(aims)})"


def write_json(path: str | Path, content: dict) -> None:
    """Atomically: a reader never sees half a file, and a run that is cut off leaves what it wrote before."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **content}, file, indent=1)
        file.write("\n")
    os.replace(temporary, path)


def settings_of(args) -> dict:
    return {key: value for key, value in vars(args).items() if key != "json"}
