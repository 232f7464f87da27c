"""Runs on several devices at once: one process for every entry in a list of devices, the next run as soon as one ends,
all within a budget.

When the budget is nearly spent every process gets SIGTERM, on which Megatron saves a checkpoint and ends. The same
command goes on from there: a run that was cut is started again before the others.
"""

from __future__ import annotations

import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from examples.quickstart.failures import last_lines, own_output
from s2_megatron.megatron.checkpoints.folder import checkpoint_to_load
from s2_megatron.megatron.host.processes import signal_when_parent_ends
from s2_megatron.megatron.records.loss_log import read_loss_log, truncate_loss_log
from studies.launch import ROOT, Job, environment, offsets_folder

POLL_SECONDS = 0.5
TELL_SECONDS = 30.0
FINISHED, CUT, FAILED = "finished", "cut", "failed"


@dataclass(frozen=True)
class Budget:
    """Seconds of this command. save_seconds: kept for the checkpoints of what is running then. start_seconds: without
    as many before that no further run is started. seconds: None for no limit."""

    seconds: float | None = None
    save_seconds: float = 45.0
    start_seconds: float = 60.0
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Until the running processes are told to save."""
        if self.seconds is None:
            return float("inf")
        return self.began + self.seconds - self.save_seconds - time.monotonic()


def devices() -> list[tuple[str | None, str]]:
    """(its entry of CUDA_VISIBLE_DEVICES, name) of every GPU that this process sees; one entry (None, "CPU") without
    any."""
    code = (
        "import json, os, torch\n"
        "n = torch.cuda.device_count()\n"
        "ids = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(n)))).split(',')\n"
        "print(json.dumps([(ids[i], torch.cuda.get_device_name(i)) for i in range(n)]))\n"
    )
    # In a process of its own, so that this one holds no memory of a GPU.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return [tuple(entry) for entry in json.loads(done.stdout.strip().splitlines()[-1])] or [(None, "CPU")]


def checkpoint_iteration(folder: Path) -> int:
    """Of the checkpoint that a run goes on from, 0 without one. folder: the run's. Raises ValueError for a damaged
    one."""
    found = checkpoint_to_load(folder / "checkpoints")
    return 0 if found is None else found.iteration or 0


def final_evaluation(job: Job) -> dict | None:
    """The record of the evaluation after the last step (of a run that is only evaluated, before any); None for a run
    that has not got there."""
    return read_loss_log(job.losses)[1].get(f"iteration {job.last_step} on validation set")


class _Running:
    def __init__(self, job: Job, device: str | None, command: list[str]):
        self.job, self.device, self.told_to_save = job, device, False
        self.after: Future | None = None  # what follows the training of one that ended well
        truncate_loss_log(job.losses, checkpoint_iteration(job.folder))
        job.log.touch()
        self.output_start = job.log.stat().st_size
        with job.log.open("a") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(device),
                stdout=output,
                stderr=subprocess.STDOUT,
                # A run saves and ends, too, when this process is killed.
                preexec_fn=functools.partial(signal_when_parent_ends, signal.SIGTERM),
            )

    def save(self, tell) -> None:
        if not self.told_to_save and self.process.poll() is None:
            tell(f"the budget is spent: {self.job.name} saves a checkpoint")
            self.told_to_save = True
            self.process.send_signal(signal.SIGTERM)

    def outcome(self) -> str | None:
        """None while it runs."""
        if self.process.poll() is None:
            return None
        if final_evaluation(self.job) is not None:
            return FINISHED
        return CUT if self.told_to_save else FAILED


def run_jobs(
    jobs: Sequence[Job],
    device_ids: Sequence[str | None],
    command: Callable[[Job], list[str]],
    budget: Budget,
    on_finished: Callable[[Job, str | None], str],
    tell: Callable[[str], None] = print,
) -> dict[str, str]:
    """Run the jobs that are not finished. Returns {name of a job: FINISHED, CUT or FAILED}; a job that the budget left
    no time to start, or that was not started because the one it goes on from or two others failed, is missing.

    on_finished: called in this process, with the job and a device that is free then, for every job that ends well,
    those that had ended before included. Returns the outcome: CUT or FAILED where what it does did not end. It runs in
    a thread beside the other runs, and its device is free for the next one when it returns. A job that goes on from
    another one waits for it; the other one is among `jobs`, too.
    """
    assert all(job.start is None or job.start in jobs for job in jobs), jobs
    ended = [job for job in jobs if final_evaluation(job) is not None]
    waiting = [job for job in jobs if job not in ended]
    outcomes = {job.name: on_finished(job, device_ids[0]) for job in ended}
    if FAILED in outcomes.values():
        return outcomes
    waiting.sort(key=lambda job: -checkpoint_iteration(job.folder))  # a stable sort: cut ones first
    free, running, told = list(device_ids), [], time.monotonic()
    pool = ThreadPoolExecutor(len(free))
    try:
        while running or (waiting and budget.left() > budget.start_seconds):
            while free and budget.left() > budget.start_seconds and (job := _first_ready(waiting, running)):
                waiting.remove(job)
                job.folder.mkdir(parents=True, exist_ok=True)
                running.append(_Running(job, free.pop(0), command(job)))
                tell(f"started {job.name}{_where(running[-1].device)}")
            if budget.left() <= 0:
                _save_all(running, budget, tell)
            for each in list(running):
                outcome = each.outcome()
                if outcome == FINISHED:
                    if each.after is None:
                        _tell_outcome(each, outcome, tell)
                        each.after = pool.submit(on_finished, each.job, each.device)
                    outcome = _after_outcome(each, tell)
                elif outcome is not None:
                    _tell_outcome(each, outcome, tell)
                if outcome is None:
                    continue
                running.remove(each)
                free.append(each.device)
                outcomes[each.job.name] = outcome
                if outcome == FAILED:
                    # What ends two runs is likely to end the others.
                    is_second = [*outcomes.values()].count(FAILED) > 1
                    waiting = [] if is_second else [job for job in waiting if not _begins_with(job, each.job)]
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                for each in running:
                    if each.after is None:
                        tell(_progress(each.job))
            time.sleep(POLL_SECONDS)
    finally:
        for each in running:
            each.process.kill()
            each.process.wait()
        pool.shutdown()
    return outcomes


def _after_outcome(each: _Running, tell) -> str | None:
    """Of what follows a run; None while it runs. An error there is told, and the other runs go on to their ends."""
    if not each.after.done():
        return None
    if (error := each.after.exception()) is None:
        return each.after.result()
    tell(f"{each.job.name}: what follows the run failed: {type(error).__name__}: {error}")
    return FAILED


def _begins_with(job: Job, other: Job) -> bool:
    """Whether a job goes on from another one, or from one that does."""
    return job.start is not None and (job.start == other or _begins_with(job.start, other))


def _first_ready(waiting: list[Job], running: list[_Running]) -> Job | None:
    """The first job whose start, if it has one, has ended."""
    busy = [each.job for each in running]
    for job in waiting:
        if job.start is None or (job.start not in busy and final_evaluation(job.start) is not None):
            return job
    return None


def _save_all(running: list[_Running], budget: Budget, tell) -> None:
    for each in running:
        each.save(tell)
    if budget.left() < 5 - budget.save_seconds:
        for each in running:
            if each.process.poll() is None:
                tell(f"{each.job.name} did not end in {budget.save_seconds:.0f} s and is killed")
                each.process.kill()
                each.process.wait()


def _where(device: str | None) -> str:
    return " on the CPU" if device is None else f" on GPU {device}"


def _progress(job: Job) -> str:
    iterations, _ = read_loss_log(job.losses)
    newest = max(iterations, default=0)
    loss = f", loss {iterations[newest]['lm loss']:.4f}" if newest else ""
    return f"{job.name}: step {newest} of {job.iterations}{loss}"


def _tell_outcome(each: _Running, outcome: str, tell) -> None:
    if outcome == FAILED:
        tell(last_lines(own_output(each.job.log, each.output_start)))
        tell(f"{each.job.name} ended with status {each.process.returncode}; its output is in {each.job.log}")
    elif outcome == CUT:
        step = checkpoint_iteration(each.job.folder)
        tell(f"{each.job.name} was cut; the same command goes on from step {step}")
    else:
        tell(f"finished {each.job.name}: validation loss {final_evaluation(each.job)['lm loss']:.4f}")


def remove_checkpoints(job: Job) -> None:
    """Of a finished run: they take gigabytes."""
    shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
    shutil.rmtree(offsets_folder(job), ignore_errors=True)
    shutil.rmtree(job.folder / "cache", ignore_errors=True)
