"""Run a study of quality: every arm with every seed, at equal data, and lay the runs side by side.

    python -m studies.run lm8k --seeds 1 2 3 --budget 570
    python -m studies.run lm8k --stage rates --budget 570          # only choose the learning rates
    python -m studies.run lm8k --seeds 1 --tokens 27.5e6 --budget 570
    python -m studies.run from-dense-rules8k --arms dense s2 chosen-few --seeds 1 --budget 570
    python -m studies.run rules8k --stage estimate --seeds 1 2     # only say how long it would take

In this order, each part only where it is missing: the corpus, the short runs that choose each arm's learning rate, the
runs, the comparison. One run per GPU at a time, or --runs-per-gpu. Repeat the command until it says that the study is
complete: a run that the budget cuts saves a checkpoint and goes on. Runs are in <runs>/<study>/; what is kept of them,
thinned losses and what was measured of the models, in <results>/<study>.npz. No run is made again that is in there.

Status 0: all that was asked for is there; 3: the budget is spent, repeat the command; 1: a run failed; 2: a wrong
argument.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from s2_megatron.tools.commands import CommandParser
from studies.after_training import measure_text
from studies.continuations import ALL
from studies.corpus import Corpus, prepare_corpus
from studies.data import RESULTS, select
from studies.estimate import estimate
from studies.launch import ROOT, Job, command
from studies.logs import log_name, write_logs
from studies.results import Place, chosen_rate, machine, tried_rates
from studies.workers import (
    FAILED,
    FINISHED,
    Budget,
    checkpoint_iteration,
    devices,
    final_evaluation,
    remove_checkpoints,
    run_jobs,
)

DEFAULT_RUNS = ROOT / "runs" / "quality"
COMPLETE, FAILURE, WRONG, AGAIN = 0, 1, 2, 3


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m studies.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=ALL)
    stages = ("all", "estimate", "corpus", "rates", "train")
    parser.add_argument("--stage", choices=stages, default="all", help="only this part")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="default: 1")
    parser.add_argument("--arms", nargs="+", help="default: all of the study")
    parser.add_argument("--tokens", type=float, help="of a run (default: the study's)")
    parser.add_argument(
        "--start-tokens", type=float, help="of the dense run that the others go on from (default: the study's)"
    )
    parser.add_argument(
        "--from-scratch",
        nargs="*",
        metavar="ARM",
        help="of a study that goes on from a dense run: arms that are trained from random weights, too (default: the "
        "study's; nothing: none)",
    )
    parser.add_argument("--rate-tokens", type=float, help="of a short run (default: the study's)")
    parser.add_argument("--rate", type=float, help="one learning rate for all arms, in place of a choice")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="end within them (default: no limit)")
    parser.add_argument("--runs", type=Path, default=DEFAULT_RUNS, help=f"default: {DEFAULT_RUNS.relative_to(ROOT)}")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS.relative_to(ROOT)}")
    parser.add_argument(
        "--runs-per-gpu",
        type=int,
        default=1,
        metavar="N",
        help="this many at once on each GPU (default: 1). Small models then wait less for the host; the runs have no "
        "times of their own",
    )
    parser.add_argument(
        "--losses-only",
        action="store_true",
        help="no tests of the trained models of text: where their loss lies, what they copy (under a minute each), "
        "which cannot be made up for once the checkpoints are gone",
    )
    parser.add_argument(
        "--keep-checkpoints", action="store_true", help="of finished runs; those that others begin with stay anyway"
    )
    parsed = parser.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    parsed.command = shlex.join([*parser.prog.split(), *words])
    if parsed.start_tokens is not None and ALL[parsed.study].start is None:
        parser.error(f"--start-tokens: {parsed.study} goes on from no other run; expected it with a study that does")
    if wrong := [seed for seed in parsed.seeds if not 0 <= seed < 2**31 or parsed.seeds.count(seed) > 1]:
        parser.error(f"--seeds {wrong[0]}: expected each seed once, 0 to {2**31 - 1}")
    if parsed.runs_per_gpu < 1:
        parser.error(f"--runs-per-gpu {parsed.runs_per_gpu}: expected 1 or more")
    for name in ("tokens", "start_tokens", "rate_tokens", "rate", "budget"):
        value = getattr(parsed, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')}={value:g}: expected a number above 0")
    if parsed.losses_only and ALL[parsed.study].tasks is not None:
        parser.error(f"--losses-only: {parsed.study} is about its tests; expected a study of text, or no --losses-only")
    if parsed.rate is not None:
        parsed.rate = float(f"{parsed.rate:g}")  # as the runs log it
    study = ALL[parsed.study]
    for name in parsed.arms or ():
        if name not in study.arm_names:
            parser.error(f"--arms {name}: {study.name} has none of this name; expected {', '.join(study.arm_names)}")
    parsed.arms = list(dict.fromkeys(parsed.arms or study.arm_names))
    if parsed.from_scratch is not None and ALL[parsed.study].start is None:
        parser.error(f"--from-scratch: all runs of {parsed.study} begin with random weights; remove --from-scratch")
    fit = [name for name in parsed.arms if not ALL[parsed.study].arm(name).chosen]
    for name in parsed.from_scratch or ():
        if name not in fit:
            parser.error(f"--from-scratch {name}: expected some of {', '.join(fit)}, which are trained here")
    return parsed


def choose_rates(
    place: Place, parsed: argparse.Namespace, found: list, budget: Budget, tell
) -> tuple[dict[str, float], bool]:
    """({arm: its learning rate}, whether a short run failed); arms that are not there have runs left to do."""
    study = place.study
    if parsed.rate is not None:
        return dict.fromkeys(parsed.arms, parsed.rate), False
    tokens = int(parsed.rate_tokens or study.rate_tokens)
    choosing = parsed.arms if study.own_rates else [study.baseline]

    def tried() -> dict[str, dict[float, float]]:
        kept = place.kept
        return {arm: tried_rates(kept, place.short_scale(tokens), arm) for arm in choosing}

    before = tried()
    jobs = [place.rate_job(arm, rate, tokens) for arm in choosing for rate in study.rates if rate not in before[arm]]
    failed, about = False, machine(found[0][1])
    if jobs and parsed.stage != "train":

        def finished(job: Job, device: str | None) -> str:
            place.keep(job, place.corpus, about, parsed.command)
            remove_checkpoints(job)
            return FINISHED

        on_gpu = found[0][0] is not None
        outcomes = run_jobs(
            jobs,
            [device for device, _ in found] * parsed.runs_per_gpu,
            lambda job: start_job(job, place.corpus, on_gpu, parsed.runs_per_gpu),
            budget,
            finished,
            tell,
        )
        failed = FAILED in outcomes.values()
    after = tried()
    chosen = {arm: rate for arm in choosing if (rate := chosen_rate(after[arm], study.rates)) is not None}
    for arm, rate in chosen.items():
        losses = ", ".join(f"{each:g}: {loss:.4f}" for each, loss in sorted(after[arm].items()))
        tell(f"learning rate of {arm if study.own_rates else 'all arms'}: {rate:g} (validation losses {losses})")
    if study.own_rates or not chosen:
        return chosen, failed
    return dict.fromkeys(parsed.arms, chosen[study.baseline]), failed


def start_job(job: Job, corpus: Corpus, on_gpu: bool, runs_per_gpu: int, choice: Corpus | None = None) -> list[str]:
    """`command` of a run that is about to start, which leaves a mark where others share its GPU."""
    if runs_per_gpu > 1:
        job.shared.touch()
    return command(job, corpus, on_gpu, choice)


def tell_missing_rates(parsed: argparse.Namespace, rates: dict[str, float], tell) -> int:
    """The command's status when the budget ended before all arms had a rate. Raises ValueError when nothing chooses."""
    if parsed.stage == "train":
        raise ValueError(
            f"--stage train: no learning rate for {', '.join(arm for arm in parsed.arms if arm not in rates)}; "
            "expected a choice; run --stage rates first, or give --rate"
        )
    tell("the budget is spent; repeat the command to go on")
    return AGAIN


def train(place: Place, parsed: argparse.Namespace, rates: dict[str, float], found: list, budget: Budget, tell) -> dict:
    """{name of a job: outcome} of all arms and seeds, in the study's order in every seed. Raises ValueError for a
    result of another learning rate."""
    about = machine(found[0][1])
    on_gpu = found[0][0] is not None
    jobs = [place.job(arm, seed, rates[arm]) for seed in parsed.seeds for arm in parsed.arms]
    there = [job for job in jobs if has_result(place, job, parsed.losses_only)]
    left = [job for job in jobs if job not in there]

    def finished(job: Job, device: str | None) -> str:
        outcome = FINISHED if parsed.losses_only else measure_text(job, place.corpus, device, budget, tell)
        place.keep(job, place.corpus, about, parsed.command)  # at once; a test that the budget cut adds to it later
        if outcome == FINISHED and not parsed.keep_checkpoints:
            remove_checkpoints(job)
        return outcome

    def starting(job: Job) -> list[str]:
        return start_job(job, place.corpus, on_gpu, parsed.runs_per_gpu)

    if there:
        tell(f"{len(there)} of {len(jobs)} runs have a result in {place.results} already")
    outcomes = run_jobs(left, [device for device, _ in found] * parsed.runs_per_gpu, starting, budget, finished, tell)
    return dict.fromkeys((job.name for job in there), FINISHED) | {job.name: outcomes.get(job.name) for job in left}


def has_result(place: Place, job: Job, losses_only: bool) -> bool:
    """Whether all that is kept of a run is there, or cannot be had without training it again. losses_only: without
    the tests of text. Raises ValueError for a result of another learning rate."""
    run = place.find(job)
    is_tested = job.study.tasks is not None and not job.role
    if run is None or (is_tested and "recall" not in run.about.get("tests", {})):
        return False
    if not losses_only and is_cut_before_its_test(job):
        return False
    if not job.evaluated and run.rate != job.rate:
        raise ValueError(
            f"{place.results / place.study.name}.npz has {job.label}, seed {job.seed}, trained with the learning rate "
            f"{run.rate:g}; expected {job.rate:g}; give another --results folder, another seed, or --rate {run.rate:g}"
        )
    return True


def is_cut_before_its_test(job: Job) -> bool:
    """Whether the checkpoint of a finished language model is still there, for a test that the budget cut."""
    if job.study.tasks or job.role or all(job.test_file(module).exists() for module in job.study.text_tests):
        return False
    return final_evaluation(job) is not None and checkpoint_iteration(job.folder) == job.iterations


def compare_runs(place: Place, arms: Sequence[str], tell) -> None:
    """Lay the finished runs side by side, the baseline first, with `s2-megatron compare`. An arm without a seed of the
    baseline's is left out."""
    baseline = place.study.baseline
    folder = place.runs / place.study.name / place.scale
    # An arm that is another one before has two logs.
    others = [arm.name for arm in place.study.arms if arm.name in arms and not arm.before]
    wanted = [baseline, *(arm for arm in others if arm != baseline)]
    runs = [run for arm in wanted for run in select(place.kept, scale=place.scale, role="", arm=arm)]
    seeds = {run.seed for run in runs if run.arm == baseline}
    shared = {run.arm for run in runs if run.seed in seeds}
    if len(shared) < 2:
        tell(f"no comparison yet: it takes a finished {baseline} run and another arm's of the same seed")
        return
    write_logs(place.study.name, folder / "logs", wanted, place.results)
    found = [f"{run.arm}={folder / 'logs' / log_name(run)}" for run in runs if run.arm in shared]
    arguments = ["compare", *found, "--vary", "lr,min_lr,softmax_type", "--html", str(folder / "compare.html")]
    subprocess.run([sys.executable, "-m", "s2_megatron", *arguments], cwd=ROOT, check=True)


def tell_end(place: Place, outcomes: dict, tell) -> int:
    """Say how much of the study is there; returns the command's status. outcomes: {name of a job: outcome or None}."""
    if FAILED in outcomes.values():
        return FAILURE
    done = sum(outcome == FINISHED for outcome in outcomes.values())
    if done < len(outcomes):
        tell(f"{done} of {len(outcomes)} runs are finished; the budget is spent; repeat the command to go on")
        return AGAIN
    tell(f"the study is complete: {done} runs of {place.scale} in {place.results / place.study.name}.npz")
    return COMPLETE


def say(text: str) -> None:
    print(text, flush=True)


def run(parsed: argparse.Namespace, tell=say) -> int:
    """The command; returns its status. Raises ValueError for settings that do not fit."""
    study, budget = ALL[parsed.study], Budget(parsed.budget)
    if study.start is not None:
        from studies.continued import run_continued

        return run_continued(study, parsed, budget, tell)
    tokens = int(parsed.tokens or study.tokens)
    study.iterations(tokens), study.iterations(parsed.rate_tokens or study.rate_tokens)
    if parsed.stage == "estimate":
        for line in estimate(study, parsed.arms, parsed.seeds, tokens):
            tell(line)
        return COMPLETE
    found = devices()
    corpus = prepare_corpus(parsed.runs, study.corpus, tell=tell)
    tell(f"corpus {corpus.sha256[:12]}: {corpus.description['tokens']:,} tokens; devices: {len(found)} x {found[0][1]}")
    if parsed.stage == "corpus":
        return COMPLETE
    place = Place(study, corpus, tokens, parsed.runs.resolve(), parsed.results.resolve())
    rates, failed = choose_rates(place, parsed, found, budget, tell)
    if failed:
        return FAILURE
    if len(rates) < len(set(parsed.arms)):
        return tell_missing_rates(parsed, rates, tell)
    if parsed.stage == "rates":
        return COMPLETE
    outcomes = train(place, parsed, rates, found, budget, tell)
    compare_runs(place, parsed.arms, tell)
    return tell_end(place, outcomes, tell)


def main() -> None:
    try:
        sys.exit(run(parse_arguments()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(WRONG)


if __name__ == "__main__":
    main()
