"""What is kept of the studies: one file of columns a study, which NumPy alone reads.

    results/<study>.npz    about: JSON, in bytes, a list of what is known of each run (Run.about);
                           train.<column>, validation.<column>: the rows of all runs one after the other, `run` is the
                           index into that list
    results/runs.csv       one row a run, made from these files
    results/manifest.json  of each file its SHA-256 and, of each set of its runs, command, commit, device and versions

Every table has the columns step, tokens and loss. Others are free: a row has NaN where its run has no such column.
loss_by_position [rows, buckets] has the positions of a run's `position_starts`; loss_trailing is that of the last
eighth of the context. `seconds` counts training steps alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"
TABLES = ("train", "validation")
INTEGERS = ("run", "step", "tokens", "samples")
KEY = ("scale", "role", "arm", "seed", "repeat")
LAST_QUARTER = 0.75  # of the steps, behind which the training losses count


@dataclass
class Run:
    """One run. about: JSON values; those of KEY tell it from the others: scale (tokens and corpus), role ("" of the
    runs that are compared), arm, seed, repeat (0 where runs of one seed are not repeated). Beside them: `settings`,
    Megatron's arguments that say what was learnt; `density`, the share of the causal pairs that it attends; `machine`;
    `tests`, what was measured of the trained model; `command` and `commit`. train, validation: {column: array}, one row
    a logged step; empty without any."""

    about: dict
    train: dict[str, np.ndarray] = field(default_factory=dict)
    validation: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def key(self) -> tuple:
        return key_of(self.about)

    @property
    def arm(self) -> str:
        return self.about["arm"]

    @property
    def seed(self) -> int:
        return self.about["seed"]

    @property
    def rate(self) -> float:
        return float(self.about["settings"]["lr"])

    @property
    def tokens(self) -> int:
        """Training tokens."""
        return int(self.train["tokens"][-1]) if self.train else 0

    @property
    def last_loss(self) -> float:
        """Of the last validation; NaN without any."""
        return float(self.validation["loss"][-1]) if self.validation else float("nan")

    @property
    def training_loss(self) -> float:
        """Mean over the logged rows of the last quarter of the steps; NaN without any."""
        if not self.train:
            return float("nan")
        steps = self.train["step"]
        return float(self.train["loss"][steps > LAST_QUARTER * steps[-1]].mean())

    def by_position(self, first: int, last: int, row: int = -1) -> float:
        """Mean validation loss of the positions from `first` to `last` (exclusive), of whole buckets; NaN where the
        buckets do not end there, or nothing was predicted."""
        starts, losses = self.about.get("position_starts", []), self.validation.get("loss_by_position")
        edges = [*starts, self.about["settings"].get("seq_length")]
        if losses is None or first not in edges or last not in edges:
            return float("nan")
        return float(losses[row, edges.index(first) : edges.index(last)].mean())


def key_of(about: dict) -> tuple:
    return tuple(about.get(name, 0 if name == "repeat" else "") for name in KEY)


def read_study(study: str, results: Path = RESULTS) -> list[Run]:
    """The runs of a study, [] where it has no file."""
    path = results / f"{study}.npz"
    if not path.exists():
        return []
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    runs = [Run(about) for about in json.loads(arrays.pop("about").tobytes())]
    for table in TABLES:
        columns = {name.partition(".")[2]: rows for name, rows in arrays.items() if name.startswith(f"{table}.")}
        if not columns:
            continue
        owners = columns.pop("run")
        for index, run in enumerate(runs):
            own = owners == index
            if own.any():
                found = {name: rows[own] for name, rows in columns.items()}
                setattr(run, table, {name: _trimmed(rows) for name, rows in found.items() if not _is_missing(rows)})
    return runs


def _is_missing(rows: np.ndarray) -> bool:
    return rows.dtype.kind == "f" and bool(np.isnan(rows).all())


def _trimmed(rows: np.ndarray) -> np.ndarray:
    """Without the buckets at the end that only other runs have."""
    if rows.ndim == 1:
        return rows
    return rows[:, : int(np.flatnonzero(~np.isnan(rows).all(axis=0))[-1]) + 1]


def study_arrays(runs: Sequence[Run]) -> dict[str, np.ndarray]:
    """The content of a study's file."""
    about = json.dumps([run.about for run in runs], indent=None, sort_keys=True).encode()
    arrays = {"about": np.frombuffer(about, np.uint8)}
    for table in TABLES:
        rows = [(index, getattr(run, table)) for index, run in enumerate(runs) if getattr(run, table)]
        names = dict.fromkeys(name for _, columns in rows for name in columns)
        if not rows:
            continue
        counts = [len(columns["step"]) for _, columns in rows]
        arrays[f"{table}.run"] = np.repeat([index for index, _ in rows], counts).astype(np.int32)
        for name in names:
            found = [np.asarray(columns[name]) if name in columns else None for _, columns in rows]
            arrays[f"{table}.{name}"] = _joined(name, found, counts)
    return arrays


def _joined(name: str, found: Sequence[np.ndarray | None], counts: Sequence[int]) -> np.ndarray:
    """One column of all runs, int64 or float32; NaN where a run has none. Raises ValueError for a column of integers
    that a run lacks."""
    if name in INTEGERS:
        if any(each is None for each in found):
            raise ValueError(f"column {name}: a run has none; expected it of every run, as of {', '.join(INTEGERS)}")
        return np.concatenate(found).astype(np.int64)
    widths = [each.shape[1] for each in found if each is not None and each.ndim == 2]
    shape = (sum(counts), max(widths)) if widths else (sum(counts),)
    column, start = np.full(shape, np.nan, np.float32), 0
    for each, count in zip(found, counts):
        if each is not None:
            column[start : start + count, ..., *([slice(each.shape[1])] if widths else [])] = each
        start += count
    return column


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def manifest_entry(study: str, runs: Sequence[Run], results: Path = RESULTS) -> dict:
    """{file, sha256, sets: what made the runs of each scale}."""
    path, sets = results / f"{study}.npz", []
    for scale in dict.fromkeys(run.about["scale"] for run in runs):
        own = [run.about for run in runs if run.about["scale"] == scale]
        corpus = next((about["corpus"] for about in own if about.get("corpus")), {})
        machines = sorted({json.dumps(about.get("machine", {}), sort_keys=True) for about in own})
        sets.append(
            {
                "scale": scale,
                "runs": len(own),
                "commands": sorted({about["command"] for about in own if about.get("command")}),
                "commits": sorted({about["commit"] for about in own if about.get("commit")}),
                "machines": [json.loads(each) for each in machines],
                "corpus": corpus.get("sha256"),
                "corpus_tokens": corpus.get("tokens"),
                "notes": sorted({about["note"] for about in own if about.get("note")}),
            }
        )
    return {"file": path.name, "sha256": sha256(path), "sets": sets}


def read_manifest(results: Path = RESULTS) -> dict:
    """{study: its entry}; {} without a manifest."""
    path = results / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {}


def select(runs: Sequence[Run], **wanted) -> list[Run]:
    """The runs whose `about` has these values; a tuple or list stands for any of its values."""

    def fits(run: Run) -> bool:
        own = {"role": "", "repeat": 0} | run.about
        return all(own.get(k) in v if isinstance(v, (tuple, list)) else own.get(k) == v for k, v in wanted.items())

    return [run for run in runs if fits(run)]


def as_csv_rows(study: str, runs: Sequence[Run]) -> list[list[str]]:
    """One row a run, of CSV_COLUMNS."""
    return [[study, *(_cell(value) for value in _summary(run))] for run in runs]


CSV_COLUMNS = (
    *("study", "scale", "role", "arm", "seed", "repeat", "learning_rate", "tokens", "pairs"),
    *("training_loss", "validation_loss", "first_512", "beyond_4096", "recall", "needle", "tracking"),
    *("ms_a_step", "device", "commit"),
)


def _summary(run: Run) -> list:
    about, tests = run.about, run.about.get("tests", {})
    seconds, length = run.train.get("seconds"), about["settings"].get("seq_length", 0)
    step = None if seconds is None else 1000 * float(np.polyfit(run.train["step"], seconds, 1)[0])
    return [
        *(about.get(name, 0 if name == "repeat" else "") for name in KEY),
        run.rate,
        run.tokens,
        about.get("density"),
        run.training_loss,
        run.last_loss,
        run.by_position(0, 512),
        run.by_position(4096, length),
        *(tests.get("recall", {}).get(task, {}).get("accuracy") for task in ("recall", "needle", "tracking")),
        step,
        about.get("machine", {}).get("device"),
        about.get("commit"),
    ]


def _cell(value) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
