"""The kernels on a GPU, everything that is not about their results: sanitizers, repeats, graphs, torch.compile.

    scripts/sanitize.sh                       all parts; four minutes on an H200 of its own, with 16 cores
    scripts/sanitize.sh --parts memcheck racecheck --backends gluon

compile     the sanitizers' cases, without a tool: compiles the kernels, so that the tools' time is the kernels'; every
            kernel that Hopper launches has to be among them
memcheck    compute-sanitizer: nothing may be found
racecheck   compute-sanitizer: nothing but what sanitizer_explained.json explains (plain Triton: nothing). A log has to
            end as a complete run does: with the tool's summary and after "cases done"
repeats     --repeats calls of each kind while other work runs beside them: no bit may differ (repeats.py)
graphs      the op captured in CUDA graphs and replayed (test_tools_gpu.py)
torch       torch.compile, Inductor included where there is a GPU (tests/ops/test_custom_op.py)

The parts run beside each other, which disturbs the timing of the repeats as is wanted; `compile` runs first. Prints one
line for each part and backend, and what a failed one said; exit status 1 when one failed or was not done in time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.kernels.sanitizer_cases import case_names

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("compile", "memcheck", "racecheck", "repeats", "graphs", "torch")
TOOLS = ("memcheck", "racecheck")
PRINT_LIMIT = 1_000_000  # with so many reports some may be missing
EXPLAINED = Path(__file__).with_name("sanitizer_explained.json")
FRAME = re.compile(r"^COMPUTE-SANITIZER|SUMMARY|^Target application returned")
TOOL_FLAGS = {
    "memcheck": [],
    "racecheck": ["--racecheck-report", "all", "--show-backtrace", "no", "--print-limit", str(PRINT_LIMIT)],
}
# An allocation of its own for every tensor: inside torch's pools a write out of bounds would hit another tensor unseen.
TOOL_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def reports(log: str) -> list[str]:
    """The reports of a log: paragraphs of lines that begin with "=========", without the tool's own frame."""
    paragraphs, current = [], []
    for line in [*log.splitlines(), ""]:
        text = line[9:].rstrip() if line.startswith("=========") else ""
        starts = bool(text) and not text.startswith("  ")  # continuation lines are indented deeper than the first one
        if current and (not text or starts):
            paragraphs.append("\n".join(current))
            current = []
        if text:
            current.append(text.strip())
    return [paragraph for paragraph in paragraphs if not FRAME.search(paragraph)]


def unexplained(reports: list[str], tool: str, backend: str, explained: list[dict]) -> list[str]:
    """Those that no entry explains. An entry has tool, backend, report (a regular expression for the whole report)
    and why."""
    known = [
        re.compile(entry["report"], re.DOTALL)
        for entry in explained
        if (entry["tool"], entry["backend"]) == (tool, backend)
    ]
    return [report for report in reports if not any(pattern.search(report) for pattern in known)]


def kind_of(report: str) -> str:
    """A report without what differs between equal ones: addresses, blocks, values, the lane of a thread."""
    lines = [line for line in report.splitlines() if not line.startswith("Current Value")]
    text = re.sub(r"__shared__ 0x[0-9a-f]+ in block \(\d+,\d+,\d+\)", "__shared__", "\n".join(lines))
    return re.sub(r"Thread \((\d+),0,0\)", lambda match: f"Thread of warp {int(match[1]) // 32}", text)


def complete(log: str) -> bool:
    return bool(re.search(r"^cases done: [1-9]", log, re.MULTILINE)) and "SUMMARY" in log


@dataclass
class Job:
    """One process: part and backend say to which line of the summary it belongs."""

    part: str
    backend: str
    command: list[str]
    log: Path
    environment: dict = field(default_factory=dict)
    process: subprocess.Popen | None = None
    seconds: float = 0.0

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def shares(names: list[str], number: int) -> list[str]:
    """Regular expressions that divide the cases among `number` processes: neighbours cost alike, so by turns."""
    groups = [names[start::number] for start in range(number)]
    return ["^(" + "|".join(map(re.escape, group)) + ")$" for group in groups if group]


def make_jobs(parts: list[str], backends: list[str], arguments, folder: Path) -> list[Job]:
    jobs = []

    def add(part, backend, command, **environment):
        jobs.append(Job(part, backend, list(map(str, command)), folder / f"{len(jobs)}.log", environment))

    for part in parts:
        if part in ("compile", *TOOLS):
            for backend in backends:
                names = [name for name in case_names(backend) if re.search(arguments.only, name)]
                for only in shares(names, arguments.shares):
                    cases = [sys.executable, ROOT / "tests/kernels/sanitizer_cases.py", "--backend", backend]
                    cases += ["--device", arguments.device, "--only", only]
                    if part == "compile":
                        add(part, backend, cases)
                        continue
                    # Only kernels of ours (their names begin with s2_): torch's would take most of the time.
                    tool = [arguments.sanitizer, "--tool", part, *TOOL_FLAGS[part], "--kernel-name"]
                    add(part, backend, [*tool, "kernel_substring=s2_", *cases], **TOOL_ENVIRONMENT)
        elif part == "repeats":
            for backend in backends:
                repeat = [sys.executable, ROOT / "tests/kernels/repeats.py", "--backend", backend]
                add(part, backend, [*repeat, "--count", arguments.repeats, "--device", arguments.device])
        else:
            chosen = {
                "graphs": ["tests/kernels/test_tools_gpu.py", "-k", "captured"],
                "torch": ["tests/ops/test_custom_op.py"],
            }
            add(part, "", [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen[part]])
    return jobs


def run(jobs: list[Job], at_once: int, deadline: float) -> None:
    """All jobs, `at_once` at a time; those that are not done at the deadline are killed, each with its children."""
    waiting, running = list(jobs), []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **job.environment}
                options = dict(env=environment, cwd=ROOT, stderr=subprocess.STDOUT, start_new_session=True)
                with job.log.open("w") as log:
                    job.process = subprocess.Popen(job.command, stdout=log, **options)
                job.seconds = -time.monotonic()
                running.append(job)
            for job in [job for job in running if job.process.poll() is not None]:
                job.seconds += time.monotonic()
                running.remove(job)
            time.sleep(0.05)
    finally:
        for job in running:
            with suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()
            job.seconds += time.monotonic()


def status(job: Job) -> int | None:
    """The exit status; None for a job that was not done in time."""
    return None if job.process is None or job.process.returncode == -signal.SIGKILL else job.process.returncode


def judged(part: str, backend: str, jobs: list[Job]) -> tuple[list[str], str]:
    """(what is wrong, how much was done) of the jobs of one line."""
    texts = [job.text() for job in jobs]
    late = sum(status(job) is None for job in jobs)
    wrong = [f"{late} of {len(jobs)} processes were not done in time"] if late else []
    cases = sum(int(number) for text in texts for number in re.findall(r"^cases done: (\d+)", text, re.MULTILINE))
    if part in TOOLS:
        known, found, total = json.loads(EXPLAINED.read_text()), [], 0
        for job, text in zip(jobs, texts):
            if status(job) is not None and not complete(text):
                wrong.append(f"a run did not end as it should\n{text[-2000:]}")
            said = reports(text)  # of racecheck up to a million
            total += len(said)
            found += unexplained(said, part, backend, known)
            if len(said) >= PRINT_LIMIT:
                wrong.append(f"the tool prints {PRINT_LIMIT} reports at most, others may be missing; use more --shares")
        wrong += [f"{count} x {report}" for report, count in Counter(map(kind_of, found)).most_common(10)]
        return wrong, f"{cases} cases, {total} reports, {total - len(found)} of them explained"
    wrong += [f"exit status {status(job)}\n{job.text()[-2000:]}" for job in jobs if status(job)]
    if part == "compile":
        launched, all_kernels = (
            {name for text in texts for line in re.findall(rf"^kernels {which}:(.*)$", text, re.MULTILINE)
             for name in line.split()}
            for which in ("launched", "known")
        )  # fmt: skip
        done = f"{cases} cases" + (f", {len(launched)} of {len(all_kernels)} kernels" if all_kernels else "")
        if all_kernels - launched:
            wrong.append(f"no case launches {', '.join(sorted(all_kernels - launched))}")
        return wrong, done
    if part == "repeats":
        lines = [line for text in texts for line in text.splitlines() if " repeats differ " in line]
        if not lines and not wrong:
            wrong.append("no call was repeated")
        return wrong, f"{len(lines)} kinds of call, {sum(': 0 of ' not in line for line in lines)} of them differ"
    if not wrong and not all(re.search(r"\b[1-9]\d* passed", text) for text in texts):
        wrong.append("no test ran")  # all of them are skipped, for example
    return wrong, "; ".join(text.strip().splitlines()[-1].strip("= ") for text in texts if text.strip())


def report(jobs: list[Job]) -> bool:
    """Prints the summary; whether all is well."""
    lines = {}
    for job in jobs:
        lines.setdefault((job.part, job.backend), []).append(job)
    well = True
    for (part, backend), group in lines.items():
        wrong, done = judged(part, backend, group)
        well &= not wrong
        seconds = max(job.seconds for job in group)
        print(f"{part + ' ' + backend:18} {'FAILED' if wrong else 'ok':7} {seconds:4.0f} s  {done}", flush=True)
        for text in wrong:
            print("    " + text.replace("\n", "\n    "), flush=True)
    return well


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitizer", required=True, help="compute-sanitizer; scripts/sanitize.sh finds it")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--backends", nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--only", default="", help="a regular expression: the sanitizers' cases whose names contain it")
    parser.add_argument("--shares", type=int, default=6, help="processes for the cases of one tool and backend")
    parser.add_argument("--jobs", type=int, default=max(4, os.cpu_count() or 1), help="processes at once")
    parser.add_argument(
        "--seconds", type=float, default=300, help="for all processes; default: 300, and their logs are read after that"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args(argv)
    names = [name for backend in arguments.backends for name in case_names(backend)]
    if not any(re.search(arguments.only, name) for name in names):
        parser.error(f"--only {arguments.only}: it is in no case's name; expected a part of one, such as {names[0]}")
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        jobs = make_jobs(arguments.parts, arguments.backends, arguments, Path(folder))
        first = [job for job in jobs if job.part == "compile"]
        run(first, arguments.jobs, deadline)
        # The slowest first.
        order = ("racecheck", "repeats", "memcheck", "torch", "graphs")
        run(
            sorted((job for job in jobs if job not in first), key=lambda job: order.index(job.part)),
            arguments.jobs,
            deadline,
        )
        return 0 if report(jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
