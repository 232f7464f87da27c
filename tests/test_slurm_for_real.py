"""slurm/pretrain.sbatch on a real SLURM, started here, on two of its three nodes: whatever happens to a job, its
loss curve is the one of a job that nothing happened to, bit for bit, without a gap and without a repeated step."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.quickstart.launch import MODEL, model_flags
from s2_megatron.megatron.records.loss_log import read_loss_log, read_records
from tests.slurm import Slurm, refusal, wait_until

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "slurm" / "pretrain.sbatch"
REFUSAL = refusal()
pytestmark = [pytest.mark.long, pytest.mark.skipif(REFUSAL is not None, reason=f"no SLURM here: {REFUSAL}")]

ITERATIONS, SAVE_INTERVAL = 120, 50
EVERY_STEP = list(range(1, ITERATIONS + 1))
STARTED = 240  # seconds that a job may take from its start to its first step, on two busy cores
ENDED = 600  # ... and an attempt to its end

LAUNCHER = f"""
source {shlex.quote(str(ROOT / "examples/launch.sh"))}
ROOT=$PACED_ROOT
EXTRA_FLAGS=("$@")
launch {shlex.join(model_flags(MODEL))} --micro-batch-size=1 --global-batch-size=2 --train-iters={ITERATIONS} --lr=1e-3
"""
# A step takes PACE seconds at least, so that there is time for what is to happen, on a fast machine too.
PACED = f"""
import os, runpy, sys, time
sys.path.insert(0, {str(ROOT)!r})
from s2_megatron.megatron.records.loss_log import LossLog
append = LossLog.append
def paced(self, record):
    time.sleep(45 if os.path.exists(os.environ["SLOW"]) else float(os.environ["PACE"]))
    append(self, record)
LossLog.append = paced
runpy.run_path({str(ROOT / "pretrain_gpt_s2.py")!r}, run_name="__main__")
"""


@dataclass
class Job:
    slurm: Slurm
    folder: Path
    number: str

    @property
    def losses(self) -> dict[int, float]:
        return {iteration: record["lm loss"] for iteration, record in read_loss_log(self.folder / "losses")[0].items()}

    @property
    def steps(self) -> list[int]:
        """The iterations in the order in which they were done, repeated ones included."""
        records = read_records(self.folder / "losses")
        return [record["iteration"] for record in records if "lm loss" in record and "validation" not in record]

    @property
    def printed(self) -> str:
        """What the job script printed, in all attempts."""
        return (self.folder / "job.out").read_text()

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: max(self.steps, default=0) >= step, STARTED, f"step {step}\n{self.report()}")

    def wait(self, *states: str, seconds: float = ENDED) -> dict[str, str]:
        try:
            return self.slurm.wait_for_job(self.number, *states, seconds=seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.report()}") from None

    def report(self) -> str:
        logs = [self.folder / "job.out", *sorted(self.folder.glob("run/logs/*.log"))]
        return "\n".join(f"--- {log}\n{log.read_text()[-3000:]}" for log in logs if log.exists())


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm") / "daemons", nodes=3) as running:
        yield running


@pytest.fixture
def submit(slurm, tmp_path):
    """submit(*flags of sbatch, setting=...) -> a Job that trains on two nodes; cancelled at the end of the test."""

    def start(*options: str, flags: tuple[str, ...] = (), **settings: str) -> Job:
        paced = tmp_path / "paced"
        paced.mkdir(exist_ok=True)
        (paced / "pretrain_gpt_s2.py").write_text(PACED)
        (tmp_path / "small.sh").write_text(LAUNCHER)
        environment = {
            "PYTHON": sys.executable,
            "TRANSFORMER_IMPL": "local",
            "MOCK_DATA": "1",
            "MOCK_VOCAB_SIZE": "512",
            "CONFIG": str(ROOT / "configs/quickstart.yaml"),
            "OUTPUT": str(tmp_path / "run"),
            "PACED_ROOT": str(paced),
            "PACE": "0.15",
            "SLOW": str(tmp_path / "slow"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "SAVE_MINUTES": "1",
        }
        allocation = ["--nodes=2", "--gpus-per-node=1", "--time=20", f"--output={tmp_path / 'job.out'}"]
        cpu = ["--distributed-backend=gloo", "--num-workers=0", "--eval-iters=1", f"--save-interval={SAVE_INTERVAL}"]
        log = ["--s2-loss-log", str(tmp_path / "losses")]
        number = slurm.submit(
            *(*allocation, *options, str(SCRIPT), str(tmp_path / "small.sh"), *cpu, *log, *flags),
            env=environment | settings,
            cwd=ROOT,
        )
        return Job(slurm, tmp_path, number)

    yield start
    slurm.run("scancel", f"--user={os.getuid()}", "--full", "--signal=KILL", check=False)
    slurm.run("scancel", f"--user={os.getuid()}", check=False)
    for node in set(slurm.nodes) - set(slurm.daemons):
        slurm.start(node)
    slurm.wait_for_nodes("idle", slurm.nodes, seconds=120)


@pytest.fixture(scope="module")
def curve():
    """The losses of the job that nothing happened to; the first test fills it."""
    return {}


def check(job: Job, curve: dict[int, float], restarts: int) -> None:
    ended = job.wait("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
    assert ended["JobState"] == "COMPLETED" and ended["ExitCode"] == "0:0", job.report()
    assert int(ended["Restarts"]) == restarts, job.report()
    assert job.losses == curve and list(job.losses) == EVERY_STEP
    shown = EventAccumulator(str(job.folder / "run/tensorboard")).Reload().Scalars("lm loss")
    assert [event.step for event in shown] == EVERY_STEP


def test_nothing_happens(submit, curve):
    job = submit(PACE="0")
    ended = job.wait("COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "0", job.report()
    assert "nothing is left to train" in job.printed
    assert job.steps == EVERY_STEP
    curve |= job.losses


def urgent(slurm: Slurm, seconds: int = 5) -> str:
    return slurm.submit(
        "--partition=urgent", "--nodes=3", "--exclusive", f"--wrap=sleep {seconds}", "--output=/dev/null"
    )


def test_pre_empted(slurm, submit, curve):
    job = submit()
    job.wait_for_step(20)
    other = urgent(slurm)
    slurm.wait_for_job(other, "COMPLETED", seconds=120)
    check(job, curve, restarts=1)
    assert job.steps == EVERY_STEP, "it saved on SIGTERM"


def test_pre_empted_with_notice(slurm, submit, curve):
    """Longer than the 30 seconds that torchrun gives its processes by itself."""
    job = submit("--partition=graceful")
    job.wait_for_step(20)
    (job.folder / "slow").touch()
    other = urgent(slurm)
    slurm.wait_for_job(other, "RUNNING", "COMPLETED", seconds=180)
    (job.folder / "slow").unlink()
    slurm.wait_for_job(other, "COMPLETED", seconds=60)
    check(job, curve, restarts=1)
    assert job.steps == EVERY_STEP, "it saved when it was told, so no step was done twice"


def kill_ranks(job: Job) -> int:
    """SIGKILL to the job's trainers, on all of its nodes; how many there were."""
    killed = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
            if f"SLURM_JOB_ID={job.number}".encode() in environment and b"LOCAL_RANK=0" in environment:
                os.kill(int(path.parent.name), signal.SIGKILL)
                killed += 1
        except OSError:  # it has ended
            continue
    return killed


def test_pre_empted_once_and_then_failed(slurm, submit):
    """SLURM notes a pre-emption with notice in the job's PreemptTime; it counts for that attempt alone."""
    job = submit("--partition=graceful", REQUEUE="1", PACE="0.5")
    job.wait_for_step(5)
    other = urgent(slurm)
    slurm.wait_for_job(other, "COMPLETED", seconds=180)
    assert "stopped for a pre-emption" in job.printed, job.report()
    job.wait_for_step(max(job.steps) + 5)
    assert kill_ranks(job) >= 2
    ended = job.wait("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")
    assert ended["JobState"] == "FAILED" and ended["Restarts"] == "1", job.report()
    assert "failed first, with exit code 1" in job.printed and job.printed.count("is queued again") == 1


def test_requeued_by_hand(slurm, submit, curve):
    job = submit()
    job.wait_for_step(SAVE_INTERVAL + 10)
    slurm.run("scontrol", "requeue", job.number)
    check(job, curve, restarts=1)
    assert job.steps == EVERY_STEP


def test_time_limit(submit, curve):
    job = submit("--time=5", SAVE_MINUTES="3", REQUEUE="1", PACE="1")  # it stops after two minutes at most
    ended = job.wait("COMPLETED", "FAILED", "TIMEOUT", seconds=900)
    assert ended["JobState"] == "COMPLETED" and int(ended["Restarts"]) >= 1, f"{ended}\n{job.report()}"
    assert "stopped for its time limit (iteration " in job.printed and "and is queued again" in job.printed
    assert job.losses == curve and job.steps == EVERY_STEP


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_dies(slurm, submit, curve, node):
    """n1 runs the job script, torchrun's store and rank 0. The next attempt takes n3 instead of the dead node."""
    job = submit()
    job.wait_for_step(SAVE_INTERVAL + 10)
    slurm.kill(node)
    check(job, curve, restarts=1)


def test_the_controller_dies(slurm, submit, curve):
    job = submit()
    job.wait_for_step(20)
    slurm.kill("slurmctld")
    slurm.start_controller()
    check(job, curve, restarts=0)


@pytest.mark.parametrize("options, state", [((), "CANCELLED"), (("--signal=TERM",), "COMPLETED")], ids=["", "TERM"])
def test_cancelled(slurm, submit, options, state):
    """It saves, and is not queued again."""
    job = submit(REQUEUE="1")
    job.wait_for_step(20)
    slurm.run("scancel", *options, job.number)
    ended = job.wait("CANCELLED", "COMPLETED", "FAILED")
    assert ended["JobState"] == state, job.report()
    slurm.wait_for_nodes("idle", slurm.nodes, seconds=120)
    saved = int((job.folder / "run/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert saved == max(job.steps) and ended["Restarts"] == "0", job.report()


# In the training process: what Megatron has to say, and what this package has to say.
@pytest.mark.parametrize("flag, value", [("--min-lr", "1"), ("--attention-dropout", "0.1")])
def test_a_job_with_a_mistake_is_not_queued_again(submit, flag, value):
    job = submit("--requeue", flags=(flag, value), REQUEUE="1")
    ended = job.wait("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")
    assert ended["JobState"] == "FAILED" and ended["ExitCode"] != "0:0" and ended["Restarts"] == "0", job.report()
    assert "pretrain.sbatch: refused: " in job.printed, job.report()
