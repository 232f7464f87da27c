"""What is measured of a trained model before its checkpoint is removed, in a process of its own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from studies.corpus import Corpus
from studies.launch import ROOT, Job, environment
from studies.results import read_json
from studies.workers import CUT, FAILED, FINISHED, Budget


def run_test(job: Job, device: str | None, budget: Budget, tell, module: str, path: Path, more: Sequence[str]) -> str:
    """Run `python -m studies.<module>`, which writes `path`. Returns the outcome; CUT when the budget ends
    first."""
    seconds = budget.left()
    words = ["-m", f"studies.{module}", job.study.name, f"--load={job.checkpoints}", f"--json={path}", *more]
    with job.log.open("a") as output:
        try:
            done = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment(device),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=None if math.isinf(seconds) else max(0.0, seconds),
            )
        except subprocess.TimeoutExpired:
            tell(f"{job.name}: the budget ended before its test ({module}); repeat the command to test it")
            return CUT
    if done.returncode != 0:
        tell(f"{job.name}: its test ({module}) ended with status {done.returncode}; the output is at the end of "
             f"{job.log}")  # fmt: skip
        return FAILED
    return FINISHED


def measure_recall(job: Job, device: str | None, budget: Budget, tell) -> str:
    """Test a finished run's model on its tasks, unless that has been done. Returns the outcome; the next command tests
    what was CUT."""
    path = job.test_file("recall")
    if path.exists():
        return FINISHED
    outcome = run_test(job, device, budget, tell, "recall", path, [])
    if outcome == FINISHED:
        scores = ", ".join(f"{task} {100 * result['accuracy']:.1f} %" for task, result in read_json(path, {}).items())
        tell(f"tested {job.name}: {scores}")
    return outcome


def measure_text(job: Job, corpus: Corpus, device: str | None, budget: Budget, tell) -> str:
    """Test a finished language model, each test unless it has been made. Returns CUT where the next command makes the
    rest. A test that fails is told, and the run stands without it."""
    for module in job.study.text_tests:
        path = job.test_file(module)
        if path.exists():
            continue
        outcome = run_test(job, device, budget, tell, module, path, [f"--data={corpus.folder}"])
        if outcome == CUT:
            return CUT
        if outcome == FAILED:
            tell(f"{job.name}: its result has no {path.stem}")
    return FINISHED
