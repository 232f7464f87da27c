"""Run a study of quality: every arm with every seed, at equal data, and lay the runs side by side.

    python -m studies.run lm8k --seeds 1 2 3 --budget 570
    python -m studies.run lm8k --stage rates --budget 570          # only choose the learning rates
    python -m studies.run lm8k --seeds 1 --tokens 27.5e6 --budget 570
    python -m studies.run rules8k --question stride --seeds 1 2 --budget 570
    python -m studies.run from-dense-rules8k --seeds 1 --budget 570
    python -m studies.run rules8k --stage estimate --seeds 1 2     # only say how long it would take

In this order, each part only where it is missing: the corpus, the short runs that choose each arm's learning rate, the
runs, the comparison. One run per GPU at a time, or --runs-per-gpu. Repeat the command until it says that the study is
complete: a run that the budget cuts saves a checkpoint and goes on. Runs are in <runs>/<study>/; what is kept of them,
thinned losses and the chosen rates, in <results>/<study>/, in a folder named by the tokens of a run and the hash of the
corpus. No run is made again whose result is there.

Status 0: all that was asked for is there; 3: the budget is spent, repeat the command; 1: a run failed; 2: a wrong
argument.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from studies.after_training import measure_text
from studies.continuations import ALL
from studies.corpus import Corpus, prepare_corpus
from studies.estimate import estimate
from studies.launch import ROOT, Job, command
from studies.results import (
    RATE_SEED,
    LearningRates,
    Place,
    machine,
    timed_result,
    trained_rate,
    write_json,
    write_run,
)
from studies.scales import comparable_logs
from studies.studies import BASELINE, Study
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
from s2_megatron.tools.commands import CommandParser

DEFAULT_RUNS = ROOT / "runs" / "quality"
DEFAULT_RESULTS = ROOT / "docs" / "quality"
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
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--arms", nargs="+", help="default: all of the study")
    chosen.add_argument("--question", nargs="+", help="the arms that answer it (default: all)")
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
    parser.add_argument(
        "--results", type=Path, default=DEFAULT_RESULTS, help=f"default: {DEFAULT_RESULTS.relative_to(ROOT)}"
    )
    parser.add_argument(
        "--runs-per-gpu",
        type=int,
        default=1,
        metavar="N",
        help="this many at once on each GPU (default: 1). Small models then wait less for the host; a run takes the "
        "time of a step from one of its arm that had such a GPU alone; in studies from a dense model it has no times",
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
    parsed.arms = chosen_arms(ALL[parsed.study], parsed, parser)
    if parsed.from_scratch is not None and ALL[parsed.study].start is None:
        parser.error(f"--from-scratch: all runs of {parsed.study} begin with random weights; remove --from-scratch")
    fit = [name for name in parsed.arms if not ALL[parsed.study].arm(name).chosen]
    for name in parsed.from_scratch or ():
        if name not in fit:
            parser.error(f"--from-scratch {name}: expected some of {', '.join(fit)}, which are trained here")
    return parsed


def chosen_arms(study: Study, parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The arms of the questions, each once, in the study's order, with those that they are compared with; those of
    --arms; or all."""
    questions = [question.name for question in study.questions]
    for option, known in (("arms", study.arm_names), ("question", questions)):
        for name in getattr(parsed, option) or ():
            if name not in known:
                parser.error(
                    f"--{option} {name}: {study.name} has none of this name; expected "
                    f"{', '.join(known) or f'no --{option}'}"
                )
    if parsed.question is not None:
        wanted = {arm for name in parsed.question for arm in study.question(name).arms} | {study.baseline}
        wanted |= set() if study.start is None else {BASELINE}
        return [arm for arm in study.arm_names if arm in wanted]
    return list(dict.fromkeys(parsed.arms or study.arm_names))


def choose_rates(
    place: Place, parsed: argparse.Namespace, found: list, budget: Budget, tell
) -> tuple[dict[str, float], bool]:
    """({arm: its learning rate}, whether a short run failed); arms that are not there have runs left to do."""
    study = place.study
    if parsed.rate is not None:
        return dict.fromkeys(parsed.arms, parsed.rate), False
    tokens = int(parsed.rate_tokens or study.rate_tokens)
    path = place.results / study.name / "learning_rates.json"
    rates = LearningRates(path, tokens, RATE_SEED, place.corpus.sha256)
    choosing = parsed.arms if study.own_rates else [study.baseline]
    missing = [arm for arm in choosing if rates.choice(arm, study.rates) is None]
    jobs = [place.rate_job(arm, rate, tokens) for arm in missing for rate in study.rates]
    failed, about = False, machine(found[0][1])
    if jobs and parsed.stage != "train":

        def finished(job: Job, device: str | None) -> str:
            kept = place.short_result(job.arm, tokens)
            if not job.shared.exists() and not kept.exists():  # of any rate: for its time of a step
                write_run(kept, job, place.corpus, about)
            rates.add(job.arm, job.rate, final_evaluation(job)["lm loss"])
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
    chosen = {arm: rate for arm in choosing if (rate := rates.choice(arm, study.rates)) is not None}
    for arm, rate in chosen.items():
        tried = ", ".join(f"{each}: {loss:.4f}" for each, loss in rates.content["arms"][arm].items())
        tell(f"learning rate of {arm if study.own_rates else 'all arms'}: {rate:g} (validation losses {tried})")
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
    study, about = place.study, machine(found[0][1])
    on_gpu = found[0][0] is not None
    jobs = [place.job(arm, seed, rates[arm]) for seed in parsed.seeds for arm in parsed.arms]
    there = [job for job in jobs if has_result(place, job, parsed.losses_only)]
    left = [job for job in jobs if job not in there]
    shared = [job.arm for job in left if parsed.runs_per_gpu > 1 or job.shared.exists()]
    timed = require_times(place, shared, about)

    def finished(job: Job, device: str | None) -> str:
        tests = {} if parsed.losses_only else place.text_tests(job.arm, job.seed)
        outcome = measure_text(job, tests, place.corpus, device, budget, tell)
        # The losses are kept at once; a test that the budget cut adds to them later.
        times = timed[job.arm] if job.shared.exists() else None
        write_run(place.result(job.arm, job.seed), job, place.corpus, about, times)
        write_json(place.result(job.arm, job.seed).with_name("corpus.json"), place.corpus.description)
        if outcome == FINISHED and not parsed.keep_checkpoints:
            remove_checkpoints(job)
        return outcome

    def starting(job: Job) -> list[str]:
        return start_job(job, place.corpus, on_gpu, parsed.runs_per_gpu)

    remove_stale_tests(place, left)
    if there:
        tell(f"{len(there)} of {len(jobs)} runs have a result in {place.result(study.baseline, 0).parent} already")
    outcomes = run_jobs(left, [device for device, _ in found] * parsed.runs_per_gpu, starting, budget, finished, tell)
    return dict.fromkeys((job.name for job in there), FINISHED) | {job.name: outcomes.get(job.name) for job in left}


def require_times(place: Place, arms: Sequence[str], about: dict) -> dict[str, Path]:
    """{arm: the result whose time of a step those of its runs take that share a GPU}. about: what `machine`
    returned. Raises ValueError for an arm without."""
    folder = place.results / place.study.name
    timed = {arm: path for arm in arms if (path := timed_result(folder, arm, about)) is not None}
    if missing := ", ".join(dict.fromkeys(arm for arm in arms if arm not in timed)):
        versions = ", ".join(f"{name} {version}" for name, version in about.items() if name != "device")
        raise ValueError(
            f"--runs-per-gpu: no result in {folder} says how long a step of {missing} takes on a {about['device']} "
            f"alone with {versions}; expected one of any seed and length, for runs beside others; train it with "
            "--runs-per-gpu 1 first (--stage rates will do, where the rates are still to be chosen)"
        )
    return timed


def has_result(place: Place, job: Job, losses_only: bool) -> bool:
    """Whether all that is kept of a run is there, or cannot be had without training it again. losses_only: without
    the tests of text. Raises ValueError for a result of another learning rate."""
    path = place.result(job.label, job.seed)
    is_tested = job.study.tasks is not None and not job.role
    if not path.exists() or (is_tested and not place.recall(job.arm, job.seed).exists()):
        return False
    if not losses_only and is_cut_before_its_test(place, job):
        return False
    rate = trained_rate(path)
    if rate != job.rate:
        raise ValueError(
            f"{path} was trained with the learning rate {rate:g}; expected {job.rate:g}; move it away to train the arm "
            f"again, give another --results folder, or --rate {rate:g}"
        )
    return True


def is_cut_before_its_test(place: Place, job: Job) -> bool:
    """Whether the checkpoint of a finished language model is still there, for a test that the budget cut."""
    if job.study.tasks or job.role or all(path.exists() for path in place.text_tests(job.arm, job.seed).values()):
        return False
    return final_evaluation(job) is not None and checkpoint_iteration(job.folder) == job.iterations


def remove_stale_tests(place: Place, jobs: Sequence[Job]) -> None:
    """Remove the tests of earlier models of the jobs that are still to be trained."""
    for job in jobs:
        if not job.role and final_evaluation(job) is None:
            for path in (place.recall(job.arm, job.seed), *place.text_tests(job.arm, job.seed).values()):
                path.unlink(missing_ok=True)


def compare_runs(place: Place, arms: Sequence[str], tell) -> None:
    """Lay the finished runs side by side, the baseline first, with `s2-megatron compare`. An arm without a seed of the
    baseline's is left out."""
    baseline, order = place.study.baseline, place.study.arm_names
    wanted = sorted({baseline, *arms}, key=lambda arm: (arm != baseline, order.index(arm)))
    logs = comparable_logs(place.result(baseline, 0).parent, baseline, wanted)
    found = [f"{arm}={path}" for arm, paths in logs.items() for path in paths]
    if len(logs) < 2:
        tell(f"no comparison yet: it takes a finished {baseline} run and another arm's of the same seed")
        return
    page = place.runs / place.study.name / place.scale / "compare.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    arguments = ["compare", *found, "--vary", "lr,min_lr", "--html", str(page)]
    subprocess.run([sys.executable, "-m", "s2_megatron", *arguments], cwd=ROOT, check=True)


def tell_end(place: Place, outcomes: dict, tell) -> int:
    """Say how much of the study is there; returns the command's status. outcomes: {name of a job: outcome or None}."""
    if FAILED in outcomes.values():
        return FAILURE
    done = sum(outcome == FINISHED for outcome in outcomes.values())
    if done < len(outcomes):
        tell(f"{done} of {len(outcomes)} runs are finished; the budget is spent; repeat the command to go on")
        return AGAIN
    tell(f"the study is complete: {done} runs in {place.result(place.study.baseline, 0).parent}")
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
    if parsed.runs_per_gpu > 1 and parsed.stage != "rates":  # before hours of other runs
        unfinished = [arm for arm in parsed.arms if not all(place.result(arm, seed).exists() for seed in parsed.seeds)]
        require_times(place, unfinished, machine(found[0][1]))
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
