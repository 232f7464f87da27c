"""Kills a training with SIGKILL at random moments, in a checkpoint's write too, and starts it again, until it has been
killed often enough; what is left must be one gapless run with the losses of a run that nobody killed.

    python -m tests.megatron.kill_trial --kills 50 --seed 0

prints one line a kill and a summary:

    kill 1: rank at a random moment of the start-up, --async-save; nothing was trained; all processes ended after 0.4 s
    kill 2: launcher 12 ms after a save began, trained to 9, goes on from 8; all processes ended after 0.1 s
    ...
    50 kills: 204 iterations, each logged once, losses equal to an uninterrupted run's

Each process of a run has a mark in its environment, by which it is found however it was started.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from s2_megatron.megatron.checkpoints.checksums import damaged_files, files_of_rank, read_checksums
from s2_megatron.megatron.checkpoints.folder import TRACKER, CheckpointError, checkpoint_to_load, newest_complete
from s2_megatron.megatron.records.loss_log import read_loss_log
from tests.megatron.conftest import ENTRY, ROOT, SPARSITY, Lab, write_corpus
from tests.processes import python_path

MARK = "S2_KILL_TRIAL"
SAVE_INTERVAL = 4
# Whom: one rank, all ranks, torchrun, everything. When: while it starts, some iterations on, while it saves.
TARGETS = ("rank", "trainer", "launcher", "tree")
MOMENTS = ("start-up", "training", "save")
SAVES = ("", "--async-save --use-persistent-ckpt-worker --async-strategy mcore")
LONGEST_SECONDS = 900  # of one attempt, on a busy machine
ENDING_SECONDS = 300  # on a busy machine; torchrun gives ranks that do not heed SIGTERM 30


@dataclass
class Processes:
    """Those of one attempt. popen: torchrun, in a session of its own."""

    popen: subprocess.Popen
    mark: str

    def alive(self) -> dict[int, dict[str, str]]:
        """{process id: environment} of every process that has the mark and has not ended."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                text = (folder / "environ").read_bytes()
                if self.mark.encode() in text and " Z " not in (folder / "stat").read_text():
                    pairs = (item.partition("=") for item in text.decode(errors="replace").split("\0"))
                    found[int(folder.name)] = {name: value for name, _, value in pairs}
        return found

    def ranks(self) -> list[int]:
        """torchrun's children; a rank's own have its environment."""
        found = []
        for pid in self.alive():
            with suppress(OSError, IndexError):
                if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == self.popen.pid:
                    found.append(pid)
        return found

    def kill(self, target: str, choice: random.Random) -> None:
        ranks = self.ranks()
        if target == "rank" and ranks:
            victims = [choice.choice(ranks)]
        elif target == "trainer" and ranks:
            victims = ranks
        elif target == "tree":
            victims = list(self.alive())
        else:
            victims = [self.popen.pid]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_until_gone(self, seconds: float) -> float:
        """How long that took. Raises AssertionError that names the processes which are left."""
        start = time.monotonic()
        while True:
            self.popen.poll()
            left = self.alive()
            if not left:
                return time.monotonic() - start
            if time.monotonic() - start > seconds:
                names = [f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()[:200]}" for pid in left]
                raise AssertionError(f"{len(left)} processes outlived the run by {seconds} s: {names}")
            time.sleep(0.02)

    def end(self) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()


@dataclass
class Trial:
    """A run that is killed and started again. lab: its corpus and flags. flags: what every attempt has."""

    lab: Lab
    name: str
    iterations: int
    processes: int = 2
    save_interval: int = SAVE_INTERVAL
    flags: str = ""
    outputs: list[Path] = field(default_factory=list)

    def __post_init__(self):
        self.folder = self.lab.folder / self.name
        self.folder.mkdir()
        self.log, self.checkpoints = self.folder / "losses.jsonl", self.folder / "checkpoints"

    def start(self, *extra: str) -> Processes:
        common = f"""--train-iters {self.iterations} --lr-decay-iters {self.iterations}
            --save {self.checkpoints} --load {self.checkpoints} --save-interval {self.save_interval}
            --tensorboard-dir {self.folder / "tensorboard"} --tensorboard-log-interval 1
            --s2-loss-log {self.log} {self.flags}"""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self.processes}", str(ENTRY), *self.lab.flags(common, *extra)]
        mark = uuid.uuid4().hex
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
            **self.lab.environment,
            MARK: mark,
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": python_path(),
        }
        output = self.folder / f"attempt_{len(self.outputs)}.log"
        self.outputs.append(output)
        with output.open("w") as file:
            options = dict(stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            return Processes(subprocess.Popen(command, env=environment, cwd=ROOT, **options), mark)

    def last_output(self) -> str:
        return self.outputs[-1].read_text(errors="replace")

    def trained(self) -> int:
        """The last iteration in the loss log."""
        return max(read_loss_log(self.log)[0], default=0)

    def saved(self) -> int:
        """The iteration that the next start goes on from: the tracker's, or the newest complete one that the remedy
        names for a tracker whose writing was cut off."""
        try:
            found = checkpoint_to_load(self.checkpoints)
        except CheckpointError:
            return newest_complete(self.checkpoints) or 0
        return found.iteration if found else 0

    def mended(self) -> str | None:
        """Does what the last attempt's error line says about the tracker, as its user would; None for another error."""
        found = re.search(rf"; do: ((?:echo [0-9]+ > |rm ){self.checkpoints / TRACKER})", self.last_output())
        return found and subprocess.run(found[1], shell=True, check=True) and found[1]

    def saving(self, since: float) -> bool:
        """Whether a checkpoint's folder was written to since then; a save that was cut off before has left one, too."""
        for path in self.checkpoints.glob("iter_*"):
            with suppress(OSError):  # the new save removes what is left of it
                if path.stat().st_mtime > since:
                    return True
        return False

    def wait_for(self, condition, process: subprocess.Popen, interval: float) -> bool:
        """Whether the condition, asked every `interval` s, came true before the process ended. Raises AssertionError
        after LONGEST_SECONDS."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while not condition():
            if process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"nothing happens\n{self.last_output()[-3000:]}"
            time.sleep(interval)
        return True

    def kill_once(self, target: str, moment: str, choice: random.Random, *extra: str) -> str | None:
        """Starts the run and kills it; what happened, None when it has come to its end before."""
        start, since = self.saved(), time.time()
        run = self.start(*extra)
        try:
            if moment == "start-up":
                time.sleep(choice.uniform(0.5, 10.0))
                when = "while it started"
            elif moment == "training":
                until = start + choice.randrange(1, 2 * self.save_interval)
                until = min(until, self.iterations - 1)
                self.wait_for(lambda: self.log.exists() and self.trained() >= until, run.popen, 0.05)
                when = f"after iteration {until}"
            else:
                self.wait_for(lambda: self.saving(since), run.popen, 0.002)
                delay = choice.uniform(0, 0.4)
                time.sleep(delay)
                when = f"{1000 * delay:.0f} ms after a save began"
            if run.popen.poll() is not None:
                mended = run.popen.returncode != 0 and self.mended()
                assert run.popen.returncode == 0 or mended, f"ended by itself\n{self.last_output()[-5000:]}"
                return f"none: mended by `{mended}`" if mended else None
            run.kill(target, choice)
            seconds = run.wait_until_gone(ENDING_SECONDS)
        finally:
            run.end()
        return (
            f"{target} {when}, {' '.join(extra) or 'synchronous save'}; trained to {self.trained()}, goes on from "
            f"{self.saved()}; all processes ended after {seconds:.1f} s"
        )

    def finish(self) -> None:
        run = self.start()
        try:
            status = run.popen.wait(LONGEST_SECONDS)
            if status != 0 and self.mended():
                run = self.start()
                status = run.popen.wait(LONGEST_SECONDS)
            assert status == 0, f"status {status}\n{self.last_output()[-5000:]}"
            run.wait_until_gone(ENDING_SECONDS)
        finally:
            run.end()

    def losses(self) -> dict[int, float]:
        return {step: record["lm loss"] for step, record in read_loss_log(self.log)[0].items()}

    def tensorboard(self) -> dict[int, float]:
        """The training losses as TensorBoard shows them. Raises AssertionError when a step is there twice."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        events = EventAccumulator(str(self.folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        shown = events.Scalars("lm loss")
        steps = [event.step for event in shown]
        assert len(steps) == len(set(steps)), f"steps shown twice: {steps}"
        return {event.step: event.value for event in shown}

    def damaged(self) -> list[str]:
        """Files of complete checkpoints that are not what their checksums say."""
        folders = [path.parent for path in self.checkpoints.glob("iter_*/metadata.json")]
        return [name for folder in folders for name in damaged_files(folder, read_checksums(folder))]


def check_one_run(trial: Trial, losses: dict[int, float]) -> None:
    """The killed run's logs are those of a run with these losses. Raises AssertionError."""
    expected = {step: losses[step] for step in range(1, trial.iterations + 1)}
    assert trial.losses() == expected
    shown = trial.tensorboard()
    assert sorted(shown) == list(expected)
    assert all(abs(shown[step] - loss) < 1e-5 for step, loss in expected.items())
    assert trial.saved() == trial.iterations and trial.damaged() == []
    last = trial.checkpoints / f"iter_{trial.iterations:07d}"
    assert {path.name for path in files_of_rank(last, 0, 1)} == read_checksums(last).keys()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="leave the folder of the runs and print its name")
    parsed = parser.parse_args()
    choice = random.Random(parsed.seed)
    with tempfile.TemporaryDirectory(delete=not parsed.keep) as folder:
        print(*[folder] if parsed.keep else [], end="\n" if parsed.keep else "")
        lab = Lab(Path(folder), "--distributed-backend gloo")
        lab.sparsity.write_text(SPARSITY)
        write_corpus(lab.folder / "corpus")
        iterations = 2 * SAVE_INTERVAL * (parsed.kills + 1)
        whole = Trial(lab, "whole", iterations)
        whole.finish()
        killed = Trial(lab, "killed", iterations)
        for number in range(1, parsed.kills + 1):
            how = choice.choice(TARGETS), choice.choice(MOMENTS)
            print(f"kill {number}: {killed.kill_once(*how, choice, choice.choice(SAVES))}", flush=True)
        killed.finish()
        check_one_run(killed, whole.losses())
        print(
            f"{parsed.kills} kills: {iterations} iterations, each logged once, losses equal to an uninterrupted run's"
        )


if __name__ == "__main__":
    main()
