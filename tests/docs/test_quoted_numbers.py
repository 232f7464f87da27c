"""The numbers in the tables of docs/performance.md, and of the parallel layouts in docs/validation.md, are those of the
results that their rows link."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = {path.name: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
ENTRIES = {
    "S2, portable kernels": "S2 triton",
    "FA-4 sparse, equal pairs": "FA-4 equal pairs",
    "FlexAttention, equal pairs": "FlexAttention equal pairs",
} | {name: name for name in ("S2", "FA-2 dense", "cuDNN dense", "FA-4 dense")}


def rows_of(first_header: str, page: str = "performance.md") -> list[tuple[str, str, dict[str, str]]]:
    """Rows of the table whose first column is first_header: what the first cell says and links, cells by header."""
    text = (ROOT / "docs" / page).read_text()
    table = re.search(rf"^\| {first_header} \|.*\n(\|.*\n)+", text, re.M)[0].splitlines()
    headers, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in (table[0], *table[2:]))
    found = []
    for row in rows:
        label, link = re.match(r"\[([^\]]+)\]\(\S+?/([\w.#-]+)\)", row[0]).groups()
        found.append((label, link, dict(zip(headers, row, strict=True))))
    return found


def same(shown: str, value: float | None) -> bool:
    """Whether `shown` is the value, rounded to as many decimals as are shown; an empty cell is no claim."""
    unit = 10.0 ** -len(shown.partition(".")[2])
    return not shown or abs(float(shown.replace(",", "")) - value) <= unit / 2 + 1e-9


def only(rows):
    (row,) = rows
    return row


def test_layers_by_length():
    for label, link, cells in rows_of("tokens"):
        rows = {row["entry"]: row for row in RESULTS[link]["rows"] if row["case"] == f"{label} 32/32 D128"}
        assert same(cells["pairs, %"], 100 * rows["S2"]["attended_share"]), label
        assert same(cells["S2 over FA-2"], rows["S2"]["speed_over"].get("FA-2 dense")), label
        for header, entry in ENTRIES.items():
            if cells[header]:
                forward, backward = cells[header].split("+")
                assert same(forward, rows[entry]["forward_ms"]["median"]), (label, header)
                assert same(backward, rows[entry]["backward_ms"]["median"]), (label, header)


def test_layers_of_other_patterns():
    for label, link, cells in rows_of("case"):
        entry = "S2 deterministic" if "--deterministic-mode" in cells[""] else "S2"
        row = only(row for row in RESULTS[link]["rows"] if (row["case"], row["entry"]) == (label, entry))
        assert same(cells["pairs, %"], 100 * row["attended_share"]), label
        assert same(cells["TF/s forward"], row["forward_tflops"]), label
        assert same(cells["TF/s backward"], row["backward_tflops"]), label
        assert same(cells["over FA-2"], row["speed_over"].get("FA-2 dense")), label
        assert (row["block"] == 128) == ("blocks of 128" in cells[""])


def test_context_parallelism():
    for label, link, cells in rows_of("GPUs"):
        names = [link] if link in RESULTS else ["h200_cp4_collective.json", "h200_cp4_te.json"]
        row = only(
            row
            for name in names
            for row in RESULTS[name]["rows"]
            if (row["ranks"], row["tokens"]) == (int(label), int(cells["tokens"][:-1]) * 1024)
            and f"`{row['exchange']}`" == cells["comm type"]
            and not row.get("predicted")
            and row.get("transport") != "copies"
        )
        silent = row.get("no_comm_step_ms") or row["silent_step_ms"]
        assert same(cells["sent forward"], row["sent_forward"] / 2**20), cells
        assert same(cells["sent backward"], row["sent_backward"] / 2**20), cells
        assert same(cells["forward"], row["forward_ms"]), cells
        assert same(cells["forward + backward"], row["step_ms"]), cells
        assert same(cells["exposed, %"], 100 * (row["step_ms"] - silent) / row["step_ms"]), cells
        assert same(cells["over one GPU"], row["speed_up"]), cells


def test_training_steps():
    for label, link, cells in rows_of("row"):
        row = only(row for row in RESULTS[link]["rows"] if row["row"] == label)
        assert same(cells["step"], row["step_ms"]), label
        assert same(cells["tokens/s of all GPUs"], row["tokens_per_s"]), label
        assert same(cells["over dense"], row.get("over_dense")), label
        assert same(cells["peak GiB"], row["peak_gib"]), label
        assert same(cells["TF/s a GPU"], row["tflops"]), label
        assert ("--overlap-grad-reduce" in str(row["command"])) == (r"\*" in cells["row"]), label


def test_parallel_layouts():
    for label, link, cells in rows_of("file", "validation.md"):
        rows = {name: [row for row in RESULTS[link]["rows"] if row["precision"] == name] for name in ("fp32", "bf16")}
        assert int(cells["layouts"]) == len({row["layout"] for row in RESULTS[link]["rows"]}), label
        largest = [row["largest difference"] for row in rows["fp32"]]
        assert cells["fp32: largest difference"] == (f"{max(largest):.1e}" if largest else ""), label
        within = sum(row["largest difference"] <= row["bound"] for row in rows["bf16"])
        assert cells["bf16: within the bound"] == (str(within) if rows["bf16"] else ""), label


def test_a_wrong_number_is_noticed():
    assert same("16,556", 16555.5) and same("0.96", 0.959) and same("", None)
    assert not same("16,557", 16555.5) and not same("0.97", 0.959) and not same("20.0", 20.06)
