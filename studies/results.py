"""What is kept of a run: a thinned loss log, small enough to be committed, that `s2-megatron compare` reads.

Losses are means of blocks of steps, so that the difference of two runs of one seed, step by step, survives. `time`
counts training steps alone: an evaluation, a checkpoint, the compilation of the first step and the pause of a run that
was cut take the median step's time instead of their own. A run beside others on its GPU takes the time of a step
from one of its arm that was alone, or has none. Of the arguments those stay that say what was learnt; the data path is
`corpus/<hash of the corpus>`, so that `compare` refuses runs of different corpora.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from studies.corpus import Corpus
from studies.launch import Job
from studies.studies import Study
from s2_megatron.megatron.loss_log import HEADER, read_loss_log, read_records
from s2_megatron.tools.compare.settings import CHECKED, START_LOSSES
from s2_megatron.tools.outputs import write_file

MOST_RECORDS = 240
RATE_SEED = 1000  # of the short runs: data that no run with a seed of its own begins with
SHORT = "rates-"  # how the names of their folders begin
DIGITS = 5
TIMES_OF = "times_of"  # in the header of a run beside others on its GPU: the result whose time of a step it takes
UNTIMED = "untimed"  # in its header where there is none: it has no times
LONG_STEP = 1.5  # medians; a step that took longer held something else
KEPT = (
    *(name for names in CHECKED.values() for name in names),
    *("seed", "train_iters", "micro_batch_size", "world_size", "transformer_impl", "params_dtype"),
    *("s2_sparsity", "s2_backend", "s2_dense_core"),
)


@dataclass(frozen=True)
class Place:
    """Where one study's runs and results are. tokens: of a run."""

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
        return f"{SHORT}{tokens / 1e6:g}M-{self.corpus.sha256[:8]}"

    def short_result(self, arm: str, tokens: int) -> Path:
        """Of one of them, kept for its time of a step."""
        return self.results / self.study.name / self.short_scale(tokens) / f"{arm}_seed{RATE_SEED}.jsonl"

    def rate_job(self, arm: str, rate: float, tokens: int) -> Job:
        folder = self.runs / self.study.name / self.short_scale(tokens) / f"{arm}_{rate:g}"
        return Job(self.study, arm, RATE_SEED, rate, tokens, folder, short=True)

    def job(self, arm: str, seed: int, rate: float) -> Job:
        folder = self.runs / self.study.name / self.scale / f"{arm}_seed{seed}_{rate:g}"
        return Job(self.study, arm, seed, rate, self.tokens, folder)

    def result(self, arm: str, seed: int) -> Path:
        return self.results / self.study.name / self.scale / f"{arm}_seed{seed}.jsonl"

    def recall(self, arm: str, seed: int) -> Path:
        return self.result(arm, seed).with_suffix(".recall.json")

    def copies(self, arm: str, seed: int) -> Path:
        return self.result(arm, seed).with_suffix(".copies.json")

    def needles(self, arm: str, seed: int) -> Path:
        return self.result(arm, seed).with_suffix(".needles.json")

    def text_tests(self, arm: str, seed: int) -> dict[str, Path]:
        """{module that makes it: the file} of the tests of a language model."""
        return {"copies": self.copies(arm, seed), "needles": self.needles(arm, seed)}


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


def timed_result(folder: Path, arm: str, machine: dict) -> Path | None:
    """A result of the arm that had such a GPU alone, with the same versions; None without one. folder: the study's
    results, of all lengths."""
    for path in sorted(folder.glob(f"*/{arm}_seed*.jsonl")):
        about = header(path)
        if not about.keys() & {TIMES_OF, UNTIMED} and about["machine"] == machine:
            return path
    return None


def usual_step(path: Path) -> float:
    """Seconds of a training step, the mean over a thinned log."""
    times = {step: record["time"] for step, record in read_loss_log(path)[0].items()}
    first, last = min(times), max(times)
    return (times[last] - times[first]) / (last - first)


def thinned(job: Job, corpus: Corpus, machine: dict, timed: Path | None = None) -> list[dict]:
    """The records of the committed log: a header, blocks of training steps, evaluations. timed: the result whose steps'
    time these take; without one a run beside others on its GPU has no times."""
    iterations, evaluations = read_loss_log(job.losses)
    about = next(record for record in read_records(job.losses) if HEADER in record)[HEADER]
    arguments = {name: about["arguments"][name] for name in KEPT if about["arguments"].get(name) is not None}
    arguments["data_path"] = [f"corpus/{corpus.sha256[:12]}"]
    arguments["s2_config"] = f"{job.arm}.yaml"
    if job.start is not None:
        arguments["pretrained_checkpoint"] = job.start.label
        arguments[START_LOSSES] = losses_hash(job.start)
        arguments.pop("finetune", None)  # Megatron sets it in the process that loads them
    steps = sorted(iterations)
    times = {}
    if timed is not None:
        seconds = usual_step(timed) * np.arange(1, len(steps) + 1)
        times = {TIMES_OF: f"{timed.parent.name}/{timed.stem}"}
    elif job.shared.exists():
        seconds = None
        times = {UNTIMED: True}
    else:
        seconds = training_seconds([iterations[step]["time"] for step in steps])
    block = -(-len(steps) // MOST_RECORDS)
    records = [
        {
            HEADER: {
                "arguments": arguments,
                "flops_per_token": about["flops_per_token"],
                "machine": machine,
                **times,
            },
            "iteration": steps[0],
            **({} if seconds is None else {"time": 0.0}),
        }
    ]
    # Blocks end at the last step.
    for end in range((len(steps) - 1) % block, len(steps), block):
        members = [iterations[step] for step in steps[max(0, end - block + 1) : end + 1]]
        records.append(
            {
                "iteration": steps[end],
                "lm loss": round(float(np.mean([each["lm loss"] for each in members])), DIGITS),
                "grad_norm": round(float(np.mean([each["grad_norm"] for each in members])), DIGITS),
                "learning_rate": members[-1]["learning_rate"],
                "samples": members[-1]["samples"],
                **({} if seconds is None else {"time": round(float(seconds[end]), 3)}),
            }
        )
    for record in sorted(evaluations.values(), key=lambda record: record["iteration"]):
        records.append({name: _rounded(value) for name, value in record.items()})
    return records


def _rounded(value):
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else round(value, DIGITS)


def header(path: Path) -> dict:
    """What a thinned log says of its run: arguments, flops_per_token, machine."""
    return read_records(path)[0][HEADER]


def losses_hash(job: Job) -> str:
    """What tells one run's weights from those of another run of the same settings."""
    return hashlib.sha256(job.losses.read_bytes()).hexdigest()[:12]


def start_of(path: Path) -> str | None:
    """`losses_hash` of the run whose weights a thinned log's run began with (of old logs, its name); None for random
    weights."""
    arguments = header(path)["arguments"]
    return arguments.get(START_LOSSES, arguments.get("pretrained_checkpoint"))


def trained_rate(path: Path) -> float:
    """The learning rate of a run, from its thinned log."""
    return header(path)["arguments"]["lr"]


def write_run(path: Path, job: Job, corpus: Corpus, machine: dict, timed: Path | None = None) -> None:
    """Write the thinned log of a finished run. timed: as for thinned."""
    text = "".join(json.dumps(record) + "\n" for record in thinned(job, corpus, machine, timed))
    write_file(path, text.encode())


def write_json(path: Path, content) -> None:
    """Write a JSON file, its folder too; a reader sees the old file or the new one."""
    write_file(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def read_json(path: Path, default):
    """The content of a JSON file, or `default` where there is none."""
    return json.loads(path.read_text()) if path.exists() else default


class LearningRates:
    """The short runs that choose each arm's learning rate, in one file:
    {"tokens", "seed", "corpus", "arms": {arm: {rate: validation loss}}}.

    A choice stands for runs on other corpora too; runs of different settings are not mixed in one choice.
    """

    def __init__(self, path: Path, tokens: int, seed: int, corpus: str):
        self.path, self._lock = path, threading.Lock()  # runs that end together
        self.settings = {"tokens": tokens, "seed": seed, "corpus": corpus[:12]}
        self.content = read_json(path, {**self.settings, "arms": {}})

    def add(self, arm: str, rate: float, loss: float) -> None:
        """Raises ValueError when the file holds short runs of other settings."""
        with self._lock:
            self._add(arm, rate, loss)

    def _add(self, arm: str, rate: float, loss: float) -> None:
        before = {name: self.content[name] for name in self.settings}
        if before != self.settings:
            raise ValueError(
                f"{self.path} holds short runs with {before}, expected {self.settings}: a choice is made among equal "
                "runs; give another --results folder, or --rate to choose no rate"
            )
        self.content["arms"].setdefault(arm, {})[f"{rate:g}"] = round(loss, DIGITS)
        write_json(self.path, self.content)

    def choice(self, arm: str, rates: Sequence[float]) -> float | None:
        """The arm's best of these rates; None until all of them have been tried."""
        return chosen_rate(self.content, arm, rates)


def chosen_rate(content: dict, arm: str, rates: Sequence[float]) -> float | None:
    """The rate with the lowest validation loss; None until all of them have been tried."""
    losses = content["arms"].get(arm, {})
    if not all(f"{rate:g}" in losses for rate in rates):
        return None
    return min(rates, key=lambda rate: losses[f"{rate:g}"])
