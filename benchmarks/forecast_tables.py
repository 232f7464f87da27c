"""Writes the tables from which `s2-megatron inspect` forecasts step times: attention, exchange and two fitted rates,
from benchmarks/results. Needs no GPU.

    python benchmarks/forecast_tables.py                 # writes s2_megatron/tools/forecast/h200.json
    python benchmarks/forecast_tables.py --check         # only the table below: every measured step left out of the fit

    step                           measured  forecast             peak GiB  forecast
    1p3b-8k-none-s2                  180 ms    176 ms    -2 %         38.2      38.2    +0 %

After new measurements: add their file to SOURCES and run it again.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from s2_megatron.config.load import load_config
from s2_megatron.tools.commands import CommandParser
from s2_megatron.tools.forecast.flags import read_flags
from s2_megatron.tools.forecast.memory import GIB, memory
from s2_megatron.tools.forecast.run import TrainingRun, dense_sparsity, sparsity_of, training_run
from s2_megatron.tools.forecast.step_time import step_time
from s2_megatron.tools.forecast.tables import FOLDER, FORMAT, Tables
from s2_megatron.tools.launch_line import parse_launch_line

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OUT = FOLDER / "h200.json"
SOURCES = {
    "attention": ("h200.json", "h200_8k.json", "h200_crossover.json", "h200_head_dims.json", "h200_patterns.json"),
    "exchange": ("h200_cp2.json", "h200_cp4_collective.json", "h200_cp4_te.json"),
    "steps": (
        "h200_one_gpu.json",
        "h200_recompute.json",
        "h200_cp2_end_to_end.json",
        "h200_cp4_end_to_end.json",
    ),
    # Compared, never fitted to: rows that were measured after the fit; another model, with S2's blocks by copy engines
    # (removed).
    "others": (
        "h200_128k_best.json",
        "h200_128k_same_flags.json",
        "h200_8k_step.json",
        "h200_7b_512k.json",
        "h200_7b_1m.json",
    ),
}
KERNELS = {"S2": "S2", "cuDNN dense": "dense"}  # Transformer Engine's dense attention is cuDNN's on these GPUs
# In h200_cp4_te.json S2's blocks travelled by copy engines, which is removed.
REMOVED = {("h200_cp4_te.json", "sparse")}


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def rounded(value: float) -> float:
    """To five digits: the rest is noise."""
    return float(f"{value:.5g}")


def attention_rows() -> list[dict]:
    rows = []
    for file in SOURCES["attention"]:
        for row in read(file)["rows"]:
            if row["entry"] not in KERNELS or row["backward_ms"] is None:
                continue
            tokens = row["seq_length"] * row["batch"] if row["documents"] is None else row["tokens"]
            rows.append(
                dict(
                    kernels=KERNELS[row["entry"]],
                    case=row["case"],
                    tokens=tokens,
                    heads=row["heads"],
                    kv_heads=row["kv_heads"] * row["batch"],
                    head_dim=row["head_dim"],
                    keys=rounded(row["attended_pairs"] / row["heads"] / tokens),
                    forward_ms=rounded(row["forward_ms"]["median"]),
                    backward_ms=rounded(row["backward_ms"]["median"]),
                )
            )
    return rows


def exchange_rows(attention: Tables) -> list[dict]:
    """What a rank's layer takes beyond its share of one GPU's time, per byte that it sends."""
    rows = []
    for file in SOURCES["exchange"]:
        content = read(file)
        settings = content["settings"]
        measured = [row for row in content["rows"] if not row.get("predicted")]
        gathered = {row["tokens"]: row for row in measured if row["exchange"] == "all_gather"}
        for row in measured:
            if (file, row["exchange"]) in REMOVED:
                continue
            tokens, ranks, ours = row["tokens"], row["ranks"], not row["exchange"].startswith("te:")
            sent, balance = row, row.get("work", 1.0)
            if ours:
                alone = row["one_gpu_forward_ms"], row["one_gpu_step_ms"]
            else:
                other = "a2a" if row["exchange"] == "te:a2a" else "all_gather"
                sent = next(each for each in measured if (each["exchange"], each["tokens"]) == (other, tokens))
                pairs = settings["heads"] * tokens * (tokens + 1) // 2
                time = attention.attention(
                    "dense",
                    pairs,
                    tokens=tokens,
                    heads=settings["heads"],
                    kv_heads=settings["kv_heads"],
                    head_dim=settings["head_dim"],
                    notes=set(),
                )
                alone = time.forward * 1e3, (time.forward + time.backward) * 1e3
            forward = row["forward_ms"] - alone[0] * balance / ranks
            step = row["step_ms"] - alone[1] * balance / ranks
            rows.append(
                dict(
                    exchange=row["exchange"],
                    ranks=ranks,
                    tokens=tokens,
                    forward_ns_per_byte=rounded(max(0.0, forward) * 1e6 / sent["sent_forward"]),
                    backward_ns_per_byte=rounded(max(0.0, step - max(0.0, forward)) * 1e6 / sent["sent_backward"]),
                )
            )
        assert gathered or all(row["exchange"] == "sparse" for row in measured), file
    return rows


def interconnect() -> float:
    """GB a second that a rank sends in a large collective: of the all-gather over most ranks of the longest sequence,
    what the layer takes longer than with communication disabled."""
    rows = [
        row
        for file in SOURCES["exchange"]
        for row in read(file)["rows"]
        if row["exchange"] == "all_gather" and not row.get("predicted")
    ]
    row = max(rows, key=lambda row: (row["ranks"], row["tokens"]))
    disabled = row["no_comm_forward_ms"] if "no_comm_forward_ms" in row else row["silent_forward_ms"]
    return rounded(row["sent_forward"] / (row["forward_ms"] - disabled) / 1e6)


def run_of(command: str, gpus: int) -> TrainingRun:
    """The run of a measured row's command."""
    flags = parse_launch_line(shlex.split(command)).flags
    args = read_flags(flags)
    sparsity = dense_sparsity(args) if args.s2_config is None else sparsity_of(load_config(ROOT / args.s2_config), args)
    return training_run(args, sparsity, gpus)


def measured_steps(kind: str = "steps") -> list[tuple[dict, TrainingRun]]:
    """[(name, milliseconds, peak GiB, file; its run)]. kind: of SOURCES."""
    steps = []
    for file in SOURCES[kind]:
        content = read(file)
        for row in content["rows"]:
            assert row["error"] is None, (file, row["row"])
            named = dict(row=row["row"], file=file, step_ms=row["step_ms"], peak_gib=row["peak_gib"])
            steps.append((named, run_of(row["command"], content["ranks"])))
    return steps


def fit(steps: list[tuple[dict, TrainingRun]], content: dict) -> dict:
    """The two rates, by least squares of the relative errors. Raises ValueError for rates that are not
    positive.

    A step is attention and exchange, which the tables say, plus FLOPs / rate, plus bytes / rate: linear in the
    rates' inverses.
    """
    unit = Tables({**content, "fit": dict(tflops=1.0, gb_per_s=1.0)})
    columns, rest = [], []
    for named, run in steps:
        seconds = step_time(run, unit).seconds
        measured = named["step_ms"] / 1e3
        linear = seconds["linear layers"]
        moved = seconds["memory-bound layers"] + seconds["optimizer"]
        known = sum(seconds.values()) - linear - moved
        columns.append((linear / measured, moved / measured))
        rest.append(1 - known / measured)
    inverse, *_ = np.linalg.lstsq(np.array(columns), np.array(rest), rcond=None)
    if not (inverse > 0).all():
        raise ValueError(
            f"the fit gives {inverse[0]:.3g} s per TFLOP and {inverse[1]:.3g} s per GB; expected positive numbers; "
            "look at the measured steps and at the attention's share of them"
        )
    return dict(tflops=rounded(1 / inverse[0]), gb_per_s=rounded(1 / inverse[1]))


def checked(steps: list[tuple[dict, TrainingRun]], content: dict) -> list[dict]:
    """Each measured step beside the forecast of a fit without the steps of its name, and those never fitted to."""
    found = []
    for named, run in [*steps, *measured_steps("others")]:
        others = [other for other in steps if other[0]["row"] != named["row"]]
        tables = Tables({**content, "fit": fit(others, content)})
        found.append(
            dict(
                **named,
                forecast_ms=round(step_time(run, tables).total * 1e3, 1),
                forecast_gib=round(memory(run).total / GIB, 2),
            )
        )
    return found


def build() -> dict:
    """The content of the table file."""
    hardware = read(SOURCES["attention"][0])["hardware"]
    sources = []
    for file in dict.fromkeys(name for names in SOURCES.values() for name in names):
        content = read(file)
        name = content["hardware"]["gpu"] if "hardware" in content else content["device"].split(",")[0]
        assert name == hardware["gpu"], (file, name)
        versions = {
            key: content["versions"][key]
            for key in ("torch", "triton", "megatron-core", "transformer-engine")
            if key in content["versions"]
        }
        commands = content["command"] if isinstance(content["command"], list) else [content["command"]]
        sources.append(dict(file=file, commit=content["commit"], versions=versions, commands=commands))
    content = dict(
        format=FORMAT,
        gpu=hardware["gpu"],
        memory_gib=hardware["memory_gib"],
        hardware=hardware,
        command="python benchmarks/forecast_tables.py",
        sources=sources,
        attention=attention_rows(),
        interconnect_gb_per_s=interconnect(),
    )
    content["exchange"] = exchange_rows(Tables(content))
    steps = measured_steps()
    content["fit"] = fit(steps, content)
    content["checked"] = checked(steps, content)
    return content


def error(forecast: float, measured: float) -> float:
    return forecast / measured - 1


def as_json(content: dict) -> str:
    """One line for each row."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list):
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            lines.append(f'"{key}": [\n{rows}\n ]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(arguments)
    try:
        content = build()
    except ValueError as problem:
        parser.exit(2, f"error: {problem}\n")
    print(f"{'step':<30}  {'measured':>9} {'forecast':>9} {'':>7}    {'peak GiB':>9} {'forecast':>9}")
    for row in content["checked"]:
        off = error(row["forecast_ms"], row["step_ms"]), error(row["forecast_gib"], row["peak_gib"])
        times = f"{row['step_ms']:>6.0f} ms {row['forecast_ms']:>6.0f} ms {off[0]:>+7.1%}"
        peaks = f"{row['peak_gib']:>9.1f} {row['forecast_gib']:>9.1f} {off[1]:>+7.1%}"
        print(f"{row['row']:<30}  {times}    {peaks}")
    fitted = content["fit"]
    print(f"fitted: {fitted['tflops']:.0f} TFLOP/s of the linear layers, {fitted['gb_per_s']:.0f} GB/s of the rest")
    if not args.check:
        args.out.write_text(as_json(content), encoding="utf-8")
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
