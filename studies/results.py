"""Write what is kept of a run: thinned losses and what was measured of it, into the file of its study (data.py).

Losses are means of blocks of steps, so that the difference of two runs of one seed, step by step, survives. `seconds`
count training steps alone: an evaluation, a checkpoint, the compilation of the first step and the pause of a run that
was cut take the median step's time instead of their own. A run that was beside others on its GPU has none. Of the
arguments those stay that say what was learnt; the data path is `corpus/<hash of the corpus>`, so that runs of different
corpora are not compared.
"""

from __future__ import annotations

import csv
import fcntl
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from s2_megatron.megatron.records.loss_log import HEADER, read_loss_log, read_records
from s2_megatron.tools.compare.settings import CHECKED, START_LOSSES
from s2_megatron.tools.outputs import write_file
from studies.corpus import Corpus
from studies.data import (
    CSV_COLUMNS,
    Run,
    as_csv_rows,
    key_of,
    manifest_entry,
    read_manifest,
    read_study,
    study_arrays,
)
from studies.launch import ROOT, Job, chosen_yaml
from studies.studies import Study, density

MOST_RECORDS = 240
RATE_SEED = 1000  # of the short runs: data that no run with a seed of its own begins with
RATE_ROLE = "rate-"  # of the short runs, before the rate
LONG_STEP = 1.5  # medians; a step that took longer held something else
TESTS = ("recall", "copies", "needles", "passages")  # files in a run's folder, of the modules of these names
POSITION = re.compile(r"lm loss by position/(\d+)-(\d+)")
KEPT = (
    *(name for names in CHECKED.values() for name in names),
    *("seed", "train_iters", "micro_batch_size", "world_size", "transformer_impl", "params_dtype"),
    *("s2_sparsity", "s2_backend", "s2_dense_core"),
)


@dataclass(frozen=True)
class Place:
    """Where one study's runs are, and its results. tokens: of a run. results: the folder of all studies'."""

    study: Study
    corpus: Corpus
    tokens: int
    runs: Path
    results: Path

    @property
    def scale(self) -> str:
        return f"{self.tokens / 1e6:g}M-{self.corpus.sha256[:8]}"

    def short_scale(self, tokens: int) -> str:
        """Of the short runs that choose a learning rate."""
        return f"rates-{tokens / 1e6:g}M-{self.corpus.sha256[:8]}"

    def rate_job(self, arm: str, rate: float, tokens: int) -> Job:
        folder = self.runs / self.study.name / self.short_scale(tokens) / f"{arm}_{rate:g}"
        role = f"{RATE_ROLE}{rate:g}"
        return Job(self.study, arm, RATE_SEED, rate, tokens, folder, short=True, role=role, weights=self.weights)

    @property
    def weights(self) -> Path | None:
        """What the runs of an imported model begin with. Raises ValueError where it has not been imported."""
        return imported_weights(self.study, self.runs)

    def job(self, arm: str, seed: int, rate: float) -> Job:
        folder = self.runs / self.study.name / self.scale / f"{arm}_seed{seed}_{rate:g}"
        return Job(self.study, arm, seed, rate, self.tokens, folder, weights=self.weights)

    def scale_of(self, job: Job) -> str:
        return self.short_scale(job.tokens) if job.short else self.scale

    @property
    def kept(self) -> list[Run]:
        """All runs of the study."""
        return read_study(self.study.name, self.results)

    def find(self, job: Job) -> Run | None:
        """What is kept of a run."""
        wanted = key_of(dict(scale=self.scale_of(job), role=job.role, arm=job.arm, seed=job.seed))
        return next((run for run in self.kept if run.key == wanted), None)

    def keep(self, job: Job, corpus: Corpus, machine: dict, command: str) -> None:
        """Keep a finished run, in the place of an earlier one of its arm and seed. corpus: what it read."""
        run = thinned(job, corpus, machine)
        run.about |= {"scale": self.scale_of(job), "command": command, "commit": commit()}
        run.about["corpus"] = self.corpus.description
        add_run(self.results, self.study.name, run, self.study.arm_names)


def imported_weights(study: Study, runs: Path) -> Path | None:
    """The checkpoint that a study begins with, None for random weights. Raises ValueError where it is missing."""
    if not study.imported:
        return None
    folder = runs / "imported" / study.imported / "megatron"
    if not folder.is_dir():
        raise ValueError(f"{folder}: is not there; expected the model that import-hf made; see studies/public_model.md")
    return folder


def add_run(results: Path, study: str, run: Run, order: Sequence[str] = ()) -> None:
    """Write a run into the file of its study, in the place of one of the same key, and what follows from it into
    runs.csv and the manifest. order: of the arms. Commands and threads may do so at once."""
    results.mkdir(parents=True, exist_ok=True)
    folder = os.open(results, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # released with the descriptor, however this ends
        runs = [*(each for each in read_study(study, results) if each.key != run.key), run]
        rank = {arm: number for number, arm in enumerate(order)}
        runs.sort(key=lambda each: (each.about["scale"], each.about["role"], rank.get(each.arm, len(rank)), each.seed))
        write_study(results, study, runs)
    finally:
        os.close(folder)


def write_study(results: Path, study: str, runs: Sequence[Run]) -> None:
    """Write the file of a study, its rows of runs.csv and its entry in the manifest."""
    content = io.BytesIO()
    np.savez_compressed(content, **study_arrays(runs))
    write_file(results / f"{study}.npz", content.getvalue())
    runs = read_study(study, results)  # as whoever reads the file finds them
    manifest = read_manifest(results) | {study: manifest_entry(study, runs, results)}
    write_json(results / "manifest.json", dict(sorted(manifest.items())))
    table = results / "runs.csv"
    rows = [*csv.reader(table.read_text().splitlines())][1:] if table.exists() else []
    rows = [*(row for row in rows if row[0] != study), *as_csv_rows(study, runs)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([CSV_COLUMNS, *sorted(rows, key=lambda row: row[0])])
    write_file(table, text.getvalue().encode())


@functools.cache
def commit() -> str | None:
    """Of the checkout, with `-dirty` where files differ from it; S2_COMMIT instead where that is set, for machines to
    which the files were copied without .git. None without either."""
    if given := os.environ.get("S2_COMMIT"):
        return given
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() or None


def machine(device: str) -> dict:
    """What computed the runs."""
    names = ("torch", "triton", "megatron-core", "transformer-engine", "s2-megatron")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # Transformer Engine is optional; a checkout need not be installed
    return {"device": device, **versions}


def training_seconds(times: Sequence[float]) -> np.ndarray:
    """Seconds spent in training steps up to each step, float64 [n]. times: of the clock, after each step."""
    if len(times) < 2:
        return np.zeros(len(times))
    seconds = np.diff(np.asarray(times, np.float64))
    usual = float(np.median(seconds))
    seconds = np.where((seconds > LONG_STEP * usual) | (seconds < 0), usual, seconds)
    return np.cumsum(np.concatenate([[usual], seconds]))


def thinned(job: Job, corpus: Corpus, machine: dict) -> Run:
    """What is kept of a run, but for where and by what command it was made."""
    iterations, evaluations = read_loss_log(job.losses)
    header = next(record for record in read_records(job.losses) if HEADER in record)[HEADER]
    settings = {name: header["arguments"][name] for name in KEPT if header["arguments"].get(name) is not None}
    settings |= {"data_path": [f"corpus/{corpus.sha256[:12]}"], "s2_config": f"{job.arm}.yaml"}
    if job.start is not None:
        settings |= {"pretrained_checkpoint": job.start.label, START_LOSSES: losses_hash(job.start)}
    if job.start is not None or job.weights is not None:
        settings.pop("finetune", None)  # Megatron sets it in the process that loads them
    if job.weights is not None:
        settings.pop("pretrained_checkpoint", None)  # a path; which model it is follows from the study
    about = {"role": job.role, "arm": job.arm, "seed": job.seed, "settings": settings, "machine": machine}
    about["flops_per_token"] = header["flops_per_token"]
    about["density"] = round(density(job.study, job.arm), 5)
    if tests := {name: found for name in TESTS if (found := read_json(job.test_file(name), None)) is not None}:
        about["tests"] = tests
    if job.study.arm(job.arm).chosen:  # which heads they are, and what was measured, differs from seed to seed
        made = chosen_yaml(job)
        about["choice"] = {"yaml": made.read_text(), "ranking": read_json(made.with_suffix(".json"), None)}
    run = Run(about, _blocks(iterations, job.study, not job.shared.exists()) if iterations else {})
    _add_evaluations(run, sorted(evaluations.values(), key=lambda record: record["iteration"]), job.study)
    return run


def _blocks(iterations: dict[int, dict], study: Study, is_timed: bool) -> dict[str, np.ndarray]:
    """The columns of the training: means of blocks of steps, which end at the last one."""
    steps = sorted(iterations)
    block = -(-len(steps) // MOST_RECORDS)
    ends = range((len(steps) - 1) % block, len(steps), block)

    def means(name: str) -> np.ndarray:
        values = [iterations[step][name] for step in steps]
        return np.array([np.mean(values[max(0, end - block + 1) : end + 1]) for end in ends])

    last = np.array([steps[end] for end in ends])
    found = {"step": last, "tokens": last * study.step_tokens, "loss": means("lm loss")}
    found["grad_norm"] = means("grad_norm")
    found["learning_rate"] = np.array([iterations[step]["learning_rate"] for step in last])
    if is_timed:
        found["seconds"] = training_seconds([iterations[step]["time"] for step in steps])[list(ends)]
    return found


def _add_evaluations(run: Run, records: Sequence[dict], study: Study) -> None:
    """The columns of the validation, and in `about` the first positions of its buckets."""
    if not records:
        return
    steps = np.array([record["iteration"] for record in records])
    losses = np.array([record["lm loss"] for record in records])
    run.validation = {"step": steps, "tokens": steps * study.step_tokens, "loss": losses}
    buckets = [match for name in records[0] if (match := POSITION.fullmatch(name))]
    if not buckets:
        return
    width = int(buckets[0][2]) - int(buckets[0][1]) + 1
    names = {int(match[1]): match[0] for match in buckets}
    starts = [*range(0, study.model.seq_length, width)]  # NaN where nothing was predicted
    by_position = [[record.get(names.get(start), np.nan) for start in starts] for record in records]
    trailing = [record["lm loss by position/trailing"] for record in records]
    run.validation |= {"loss_by_position": np.array(by_position), "loss_trailing": np.array(trailing)}
    run.about["position_starts"] = starts


def losses_hash(job: Job) -> str:
    """What tells one run's weights from those of another run of the same settings."""
    return hashlib.sha256(job.losses.read_bytes()).hexdigest()[:12]


def start_of(run: Run) -> str | None:
    """`losses_hash` of the run whose weights a run began with (of old ones, its name); None for random weights."""
    settings = run.about["settings"]
    return settings.get(START_LOSSES, settings.get("pretrained_checkpoint"))


def write_json(path: Path, content) -> None:
    """Write a JSON file, its folder too; a reader sees the old file or the new one."""
    write_file(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def read_json(path: Path, default):
    """The content of a JSON file, or `default` where there is none."""
    return json.loads(path.read_text()) if path.exists() else default


def tried_rates(runs: Sequence[Run], scale: str, arm: str) -> dict[float, float]:
    """{learning rate: last validation loss} of an arm's short runs."""
    own = [run for run in runs if run.about["role"].startswith(RATE_ROLE)]
    return {run.rate: run.last_loss for run in own if run.about["scale"] == scale and run.arm == arm}


def chosen_rate(tried: dict[float, float], rates: Sequence[float]) -> float | None:
    """The rate with the lowest validation loss; None until all of them have been tried."""
    return min(rates, key=tried.get) if all(rate in tried for rate in rates) else None
