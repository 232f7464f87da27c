"""Draws the results of benchmarks/attention.py.

    python benchmarks/plots.py benchmarks/results/h200_crossover.json benchmarks/results/h200.json --out docs

Takes the files of several runs; a length that two of them measured is drawn from the later one on the command line,
with its own peers. Writes speedup.png (forward + backward, over FlashAttention-2, by sequence length; dense peers and
the length where they are overtaken) and rates.png (TF/s on attended pairs at the longest length, beside the matmul's)
into --out, and prints the crossover lengths:

    S2 is faster than FA-2 dense from ... tokens on
"""

from __future__ import annotations

import json
import math
import os
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import refuse
from s2_megatron.tools.commands import CommandParser

BASELINE = "FA-2 dense"
DENSE = ("FA-2 dense", "cuDNN dense", "FA-4 dense")
COLOURS = {
    "S2": "#0b6e4f",
    "S2 deterministic": "#6fb98f",
    "FA-4 equal pairs": "#d1495b",
    "FA-4 block-sparse": "#e58a94",
    "FlexAttention equal pairs": "#edae49",
    "FlexAttention": "#f3cf94",
    "S2 paper's": "#8d6a9f",
    "FA-4 dense": "#30638e",
    "cuDNN dense": "#5b8db8",
    "FA-2 dense": "#8f8f8f",
}
ORDER = tuple(COLOURS)


def read_rows(paths: list[str]) -> tuple[list[dict], str]:
    """(rows of all files, a line about the machine). A row's group becomes (number of the file, group): groups of one
    name in two files were not interleaved. Raises ValueError for a file that attention.py did not write."""
    rows, machines = [], []
    for number, path in enumerate(paths):
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if not isinstance(content, dict) or content.get("format") != 1 or not isinstance(content.get("rows"), list):
            raise ValueError(
                f"{path} has not the form that benchmarks/attention.py --json writes (format 1); measure anew"
            )
        if any("entry" not in row for row in content["rows"]):
            raise ValueError(f"{path} is of another benchmark than benchmarks/attention.py")
        rows += [{**row, "group": (number, row["group"])} for row in content["rows"]]
        versions = content["versions"]
        machines.append(
            f"{content['hardware']['gpu']}, torch {versions['torch']}, triton {versions.get('triton', '?')}"
        )
    return rows, "; ".join(dict.fromkeys(machines))


def by_length(rows: list[dict]) -> dict[int, dict[str, dict]]:
    """{sequence length: {entry: row}} of single sequences, for the heads, head dim and pattern that S2 was measured
    with at most lengths beside the baseline. Of several measurements of one length the last counts. Raises ValueError
    when there is none."""

    def kind(row):
        return row["heads"], row["kv_heads"], row["head_dim"], row["dtype"], row["tensor_format"], row["pattern"]

    ours = [
        row
        for row in rows
        if row["entry"] == "S2" and row["documents"] is None and row["batch"] == 1 and BASELINE in row["speed_over"]
    ]
    lengths_of: dict[tuple, set[int]] = {}
    for row in ours:
        lengths_of.setdefault(kind(row), set()).add(row["seq_length"])
    if not lengths_of:
        raise ValueError(f"no rows of S2 beside {BASELINE} in the results; measure with both entries")
    wanted = max(lengths_of, key=lambda key: len(lengths_of[key]))
    found: dict[int, dict[str, dict]] = {}
    for own in ours:
        if kind(own) == wanted:
            beside = [row for row in rows if (row["group"], row["case"]) == (own["group"], own["case"])]
            found[own["seq_length"]] = {row["entry"]: row for row in beside}
    return dict(sorted(found.items()))


def speedups(lengths: dict[int, dict[str, dict]], entry: str, against: str = BASELINE) -> list[tuple[int, float]]:
    """[(length, time of `against` over that of `entry`)]"""
    return [
        (length, entries[against]["total_ms"]["median"] / entries[entry]["total_ms"]["median"])
        for length, entries in lengths.items()
        if entry in entries and against in entries
    ]


def crossover(points: list[tuple[int, float]]) -> int | None:
    """The length from which on the speed-up stays above 1, between measured lengths by logarithms; the first length
    where it always is, None where the last is still below."""
    if not points or points[-1][1] <= 1:
        return None
    for (low, before), (high, after) in reversed(list(pairwise(points))):
        if before <= 1 < after:
            share = -math.log(before) / (math.log(after) - math.log(before))
            return round(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
    return points[0][0]


def sentences(lengths: dict[int, dict[str, dict]]) -> list[str]:
    """From which length on S2 is faster than each dense peer."""
    found = []
    for entry in DENSE:
        points = speedups(lengths, "S2", entry)
        at = crossover(points)
        if points and at is None:
            found.append(f"S2 is slower than {entry} up to {points[-1][0]} tokens")
        elif points:
            found.append(
                f"S2 is faster than {entry} {'at every length from' if at == points[0][0] else 'from'} {at} tokens on"
            )
    return found


def _named(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def draw_speedup(lengths, machine: str, path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    for entry in ORDER:
        points = speedups(lengths, entry)
        if points:
            style, width = "--" if entry in DENSE else "-", 2.4 if entry == "S2" else 1.4
            axes.plot(
                *zip(*points), style, marker="o", markersize=4, color=COLOURS[entry], label=entry, linewidth=width
            )
    own = next(entries["S2"] for entries in lengths.values())
    for entry in DENSE:
        at = crossover(speedups(lengths, "S2", entry))
        if at and at > min(lengths):
            axes.axvline(at, color=COLOURS[entry], linewidth=0.8, linestyle=":")
    axes.text(0.01, 0.98, "\n".join(sentences(lengths)), transform=axes.transAxes, fontsize=8, ha="left", va="top")
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="times FlashAttention-2 (forward + backward)")
    axes.set_title(
        f"{own['heads']}/{own['kv_heads']} heads, D {own['head_dim']}, {own['dtype']}; S2: {own['pattern']}",
        fontsize=10,
    )
    axes.set_xticks(list(lengths), [_named(length) for length in lengths], minor=False)
    axes.minorticks_off()
    ticks = [value for value in (0.25, 0.5, 1, 2, 4, 8, 16, 32) if axes.get_ylim()[0] <= value <= axes.get_ylim()[1]]
    axes.set_yticks(ticks, [f"{value:g}" for value in ticks])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.supxlabel(machine, fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_rates(lengths, machine: str, path: str) -> None:
    from matplotlib import pyplot

    length = max(lengths, key=lambda key: (len(lengths[key]), key))
    entries = [entry for entry in ORDER if entry in lengths[length]]
    rows = [lengths[length][entry] for entry in entries]
    figure, axes = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
    for shift, kind in ((-0.2, "forward"), (0.2, "backward")):
        heights = [row[f"{kind}_tflops"] for row in rows]
        places = [index + shift for index in range(len(rows))]
        bars = axes.bar(
            places, heights, 0.38, color=[COLOURS[entry] for entry in entries], alpha=1.0 if kind == "forward" else 0.55
        )
        axes.bar_label(bars, [f"{height:.0f}" for height in heights], fontsize=7)
    names = [entry.replace(" equal", "\nequal") for entry in entries]
    times = [row["total_ms"]["median"] for row in rows]
    shares = [100 * row["attended_share"] for row in rows]
    labels = [
        f"{name}\n{share:.1f} %\n{time:.{0 if time >= 100 else 2}f} ms"
        for name, share, time in zip(names, shares, times)
    ]
    axes.set_xticks(range(len(entries)), labels, fontsize=7)
    ceiling = rows[0].get("matmul_tflops")
    if ceiling:
        axes.axhline(ceiling, color="black", linewidth=1, linestyle="--")
        axes.annotate("8192^3 matmul", (0, ceiling), xytext=(0, 2), textcoords="offset points", fontsize=7)
    axes.set_ylabel("TF/s on attended pairs")
    axes.set_title(
        f"{_named(length)} tokens: forward (full colour) and backward; attended pairs and time of both beneath",
        fontsize=10,
    )
    figure.supxlabel(machine, fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", help="JSON files of benchmarks/attention.py")
    parser.add_argument("--out", default=".", help="the folder for speedup.png and rates.png")
    args = parser.parse_args(arguments)
    import matplotlib

    matplotlib.use("Agg")
    try:
        rows, machine = read_rows(args.results)
        lengths = by_length(rows)
    except (ValueError, OSError) as problem:
        refuse(str(problem))
    os.makedirs(args.out, exist_ok=True)
    draw_speedup(lengths, machine, os.path.join(args.out, "speedup.png"))
    draw_rates(lengths, machine, os.path.join(args.out, "rates.png"))
    print("\n".join(sentences(lengths)))
    print(f"wrote {os.path.join(args.out, 'speedup.png')} and rates.png")


if __name__ == "__main__":
    main()
