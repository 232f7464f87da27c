"""Run a study whose arms go on from a dense model.

    python -m studies.run from-dense8k --seeds 1 --budget 570

Of every seed: the dense model (`start-dense`); its weights under every arm's attention, evaluated before any step
(`switched-<arm>`); every arm trained on from there (`<arm>`); and, where the study asks for it, from random weights for
as many FLOPs as the dense model and the arm's continuation (`scratch-<arm>`). What goes on waits for the dense model,
what does not runs beside it. Text that the dense model saw is not read again by those that go on. The dense model stays
in <runs>/starts/ with its checkpoint, for further arms and for the other studies that begin with it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from studies.after_training import measure_recall, measure_text
from studies.arms import BEFORE_SHARE
from studies.continuations import tokens_from_scratch
from studies.corpus import Corpus, prepare_corpus
from studies.data import select
from studies.estimate import estimate_continued
from studies.launch import BEFORE, Job
from studies.parts import split_corpus
from studies.ranked import make_ranked
from studies.results import Place, imported_weights, losses_hash, machine, start_of
from studies.run import (
    COMPLETE,
    FAILURE,
    choose_rates,
    compare_runs,
    has_result,
    start_job,
    tell_end,
    tell_missing_rates,
)
from studies.studies import BASELINE, Study
from studies.tasks import TRAINING_SHARE, prepare_tasks
from studies.workers import FINISHED, Budget, devices, final_evaluation, remove_checkpoints, run_jobs

START, SWITCHED, SCRATCH = "start", "switched", "scratch"  # roles of runs; those that go on have none
CHOICE = "choice"  # no run: what dense heads are chosen on


@dataclass(frozen=True)
class ContinuedPlace(Place):
    """Where the runs of such a study are. start_tokens: of the dense run. corpora: of each role, and of CHOICE."""

    start_tokens: int
    corpora: dict[str, Corpus]

    @property
    def scale(self) -> str:
        """Of tasks with the hash of the text before them, too: theirs is the same on every machine."""
        own = f"{self.start_tokens / 1e6:g}M+{super().scale}"
        return own if self.study.tasks is None else f"{own}-{self.corpora[START].sha256[:8]}"

    def corpus_of(self, job: Job) -> Corpus:
        return self.corpora[job.role]

    def start_folder(self, seed: int, rate: float) -> Path:
        """Of the dense run, which all studies that begin with it find there. rate: its own."""
        start, text = self.study.start, self.corpora[START].sha256[:8]
        name = f"{start.study.name}-{self.start_tokens / 1e6:g}M-of-{start.text_share:.3f}-{text}"
        return self.runs / "starts" / name / f"seed{seed}_{rate:g}"

    def folder(self, dense: Job, label: str, rate: float) -> Path:
        """Of a run that begins with the dense one."""
        return dense.folder / f"{self.study.name}-{super().scale}" / f"{label}_{rate:g}"

    def scratch_folder(self, arm: str, seed: int, rate: float) -> Path:
        return self.runs / self.study.name / self.scale / f"{SCRATCH}-{arm}_seed{seed}_{rate:g}"


def make_corpora(
    study: Study, tokens: int, runs: Path, tell, arms: Sequence[str] = ()
) -> tuple[Corpus, Corpus, dict[str, Corpus]]:
    """(the corpus that the study is about, the text of the dense run, {role, or CHOICE: what it reads}). arms: those
    whose heads may be ranked on sequences of their own, which are made, too.

    Raises ValueError for a text with too little for both parts, and for too few synthetic sequences.
    """
    text = prepare_corpus(runs, study.start.study.corpus, tell=tell)
    parts = split_corpus(text, study.start.text_share)
    kinds = {study.arm(arm).ranked_on for arm in arms} - {""}
    make_ranked(text, parts["more"], study.start.study.model.seq_length, kinds, tell)
    read = {START: parts["first"], CHOICE: parts["more"]}
    if study.tasks is None:
        going_on = dict.fromkeys((SWITCHED, BEFORE, ""), parts["more"])
        return text, text, {**read, **going_on, SCRATCH: parts["all"]}
    tasks = prepare_tasks(runs, study.model.seq_length, study.tasks, tell=tell)
    require_new_sequences(tasks, tokens)
    tasks = replace(tasks, description=tasks.description | {"vocabulary": text.vocabulary})  # the model's
    return tasks, text, {**read, **dict.fromkeys((SWITCHED, BEFORE, "", SCRATCH), tasks)}


def require_new_sequences(tasks: Corpus, tokens: int) -> None:
    """Raises ValueError when a run would see a synthetic sequence twice: it learns them by heart then, and nothing
    that helps with others."""
    new = int(tasks.description["tokens"] * TRAINING_SHARE)
    if tokens > new:
        raise ValueError(
            f"--tokens {tokens:g}: the study has {new} tokens of training sequences; expected no sequence twice; use "
            f"{new} or fewer"
        )


def make_jobs(place: ContinuedPlace, arms: list[str], seeds: list[int], rates: dict[str, float]) -> list[Job]:
    """The dense runs first: others wait for them."""
    study, start = place.study, place.study.start
    jobs, later = [], []
    for seed in seeds:
        rate = rates[BASELINE]
        folder, weights = place.start_folder(seed, rate), imported_weights(start.study, place.runs)
        dense = Job(start.study, BASELINE, seed, rate, place.start_tokens, folder, role=START, weights=weights)
        jobs.append(dense)
        for arm in (arm for arm in start.from_scratch if arm in arms):
            tokens = tokens_from_scratch(study, arm, place.start_tokens, place.tokens, place.corpus.vocabulary)
            folder = place.scratch_folder(arm, seed, rates[arm])
            later.append(Job(study, arm, seed, rates[arm], tokens, folder, role=SCRATCH))
        own = float(f"{rate * start.rate_share:g}")  # as the command line has it
        for arm in arms:
            going_on = Job(study, arm, seed, own, place.tokens, place.folder(dense, arm, own), start=dense)
            folder = place.folder(dense, f"{SWITCHED}-{arm}", own)
            if start.switched:
                jobs.append(replace(going_on, folder=folder, evaluated=True, role=SWITCHED))
            if own_before := study.arm(arm).before:
                first = int(BEFORE_SHARE * place.tokens)
                folder = place.folder(dense, f"{BEFORE}-{arm}", own)
                before = replace(going_on, arm=own_before, tokens=first, folder=folder, role=BEFORE)
                jobs.append(before)
                going_on = replace(going_on, tokens=place.tokens - first, start=before)
            jobs.append(going_on)
    if not start.switched:  # an arm in all seeds before the next one, for a command that is cut
        jobs = sorted(jobs, key=lambda job: _place_of_arm(job, jobs, arms))
    return jobs + later


def _place_of_arm(job: Job, jobs: Sequence[Job], arms: list[str]) -> int:
    """Where an arm stands in the order; a run that it goes on from stands with it, dense runs come first."""
    if job.role == BEFORE:
        job = next(each for each in jobs if each.start == job)
    return -1 if job.role == START else arms.index(job.arm)


def with_starts(left: Sequence[Job], asked: Sequence[Job]) -> list[Job]:
    """The jobs that are left, and those whose weights they begin with, in the order in which they were asked for."""
    needed = list(left)
    for job in needed:
        if job.start is not None:
            needed.append(job.start)
    return [job for job in asked if job in needed]


def keep(place: ContinuedPlace, about: dict, budget: Budget, tell, options, job: Job, device) -> str:
    """Keep what stays of a finished run; the outcome."""
    outcome = FINISHED
    if job.study.tasks is not None and not job.role:
        outcome = measure_recall(job, device, budget, tell)
        if outcome != FINISHED:
            return outcome
    elif not job.role and not options.losses_only:
        outcome = measure_text(job, place.corpus, device, budget, tell)
    place.keep(job, place.corpus_of(job), about, options.command)
    # The dense weights stay: other studies begin with them.
    if outcome == FINISHED and job.role not in (START, BEFORE) and not options.keep_checkpoints:
        remove_checkpoints(job)
    return outcome


def begin_again(jobs: Sequence[Job], tell) -> None:
    """Put the runs aside whose weights are gone though some are still to begin with them, and, of a dense run, all that
    began with them."""
    for first in (job for job in jobs if job.role in (START, BEFORE)):
        unfinished = any(final_evaluation(job) is None for job in jobs if job.start == first)
        if unfinished and final_evaluation(first) is not None and not first.checkpoints.exists():
            aside = first.folder.rename(first.folder.with_name(f"{first.folder.name}.gone-{time.time_ns()}"))
            tell(f"the weights of {first.name} are gone: it is trained again; what began with them is in {aside}")


@contextlib.contextmanager
def alone(jobs: Sequence[Job]) -> Iterator[None]:
    """Hold the dense runs that are still to be trained: commands of other studies have the same folder for them. Raises
    ValueError where another command holds one."""
    with contextlib.ExitStack() as held:
        for dense in (job for job in jobs if job.role == START and final_evaluation(job) is None):
            dense.folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((dense.folder / "lock").open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the file, however this ends
            except BlockingIOError:
                raise ValueError(
                    f"{dense.folder}: another command trains this dense model; expected one at a time until it has "
                    "ended; repeat the command then, or use another seed"
                ) from None
        yield


def require_one_start(place: ContinuedPlace, jobs: Sequence[Job]) -> None:
    """Raises ValueError where a seed has results that went on from other weights than those that are there, or are to
    be trained: dense runs of equal settings end too far apart for their arms to be compared."""
    for dense in (job for job in jobs if job.role == START):
        if all(final_evaluation(job) is not None for job in jobs if job.start == dense):
            continue
        own = losses_hash(dense) if dense.checkpoints.exists() else None
        kept = select(place.kept, scale=place.scale, seed=dense.seed)
        begun = {run.arm: start_of(run) for run in kept if not place.study.arm(run.arm).before}
        if there := sorted(name for name, start in begun.items() if start is not None and start != own):
            raise ValueError(
                f"seed {dense.seed} has results of {', '.join(there)} that went on from other weights than those of "
                f"{dense.folder}; expected all arms of a seed from one dense run; use another seed, or another "
                "--results folder to train all of it again"
            )


def tell_epochs(study: Study, text: Corpus, tokens: int, tell) -> None:
    """One line where what goes on reads its text more than once."""
    if study.tasks is None and (epochs := tokens / text.description["training_tokens"]) > 1:
        tell(f"note: {tokens / 1e6:g}M tokens are {epochs:.1f} times the text that the dense model does not read")


def run_continued(study: Study, parsed: argparse.Namespace, budget: Budget, tell) -> int:
    """The command for such a study; returns its status. Raises ValueError for settings that do not fit."""
    if parsed.from_scratch is not None:
        study = replace(study, start=replace(study.start, from_scratch=tuple(parsed.from_scratch)))
    start = study.start
    tokens, start_tokens = int(parsed.tokens or study.tokens), int(parsed.start_tokens or start.tokens)
    study.iterations(tokens), start.study.iterations(start_tokens)
    arms = [arm for arm in study.arm_names if arm in parsed.arms]
    if BASELINE not in arms:
        raise ValueError(
            f"--arms {' '.join(parsed.arms)}: expected {BASELINE} among them, the arm to compare with; add it"
        )
    if parsed.stage == "estimate":
        for line in estimate_continued(study, arms, parsed.seeds, tokens, start_tokens):
            tell(line)
        return COMPLETE
    found = devices()
    corpus, corpus_before, corpora = make_corpora(study, tokens, parsed.runs, tell, arms)
    tell(f"corpus {corpus.sha256[:12]}: {corpus.description['tokens']:,} tokens; devices: {len(found)} x {found[0][1]}")
    tell_epochs(study, corpora[""], tokens, tell)
    if parsed.stage == "corpus":
        return COMPLETE
    results = parsed.results.resolve()
    place = ContinuedPlace(study, corpus, tokens, parsed.runs.resolve(), results, start_tokens, corpora)

    # The study of the dense run chose them, or chooses them now.
    rate_arms = [BASELINE, *(arm for arm in start.from_scratch if arm in arms)]
    choosing = argparse.Namespace(**vars(parsed) | {"arms": rate_arms})
    # Of text: all of it, as in the study of the dense run, whose choices these are.
    before = Place(start.study, corpus_before, start_tokens, place.runs, results)
    rates, failed = choose_rates(before, choosing, found, budget, tell)
    if failed:
        return FAILURE
    if len(rates) < len(rate_arms):
        return tell_missing_rates(choosing, rates, tell)
    if parsed.stage == "rates":
        return COMPLETE

    asked = make_jobs(place, arms, parsed.seeds, rates)
    left = [job for job in asked if not has_result(place, job, parsed.losses_only)]
    jobs = with_starts(left, asked)
    if len(jobs) < len(asked):
        tell(f"{len(asked) - len(jobs)} of {len(asked)} runs have a result in {place.results} already")
    require_one_start(place, jobs)
    begin_again(jobs, tell)
    on_gpu = found[0][0] is not None

    def start_run(job: Job) -> list[str]:
        return start_job(job, place.corpus_of(job), on_gpu, parsed.runs_per_gpu, place.corpora[CHOICE])

    with alone(jobs):
        outcomes = run_jobs(
            jobs,
            [device for device, _ in found] * parsed.runs_per_gpu,
            start_run,
            budget,
            partial(keep, place, machine(found[0][1]), budget, tell, parsed),
            tell,
        )
    compare_runs(place, arms, tell)
    there = dict.fromkeys((job.name for job in asked if job not in jobs), FINISHED)
    return tell_end(place, there | {job.name: outcomes.get(job.name) for job in jobs}, tell)
