"""Real training runs of Megatron's loop, in processes of their own (gloo on a CPU, NCCL on a GPU), on a tiny GPT and a
tiny corpus.

On a machine without a GPU they are forked from a process that has imported Megatron (forks.py), except those that
torchrun starts. Every run appends its exact losses to a file (`--s2-loss-log`), so that comparisons do not depend on
printed digits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from s2_megatron.megatron.records.loss_log import read_loss_log
from tests.megatron import forks
from tests.megatron.without_gpt import require_gpt_model
from tests.processes import free_port
from tests.processes import python_path as tests_python_path

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "pretrain_gpt_s2.py"
SCRIPTS = Path(__file__).resolve().parent / "scripts"

# 4 query heads in 2 groups, stride 4: two offsets a layer, other ones in the next layer, so a wrong head or layer
# number shows.
SPARSITY = "block_size: 16\nlayers: DSSS\nspecs:\n  S: {local_blocks: 2, stride: 4}\n"
SEQ_LENGTH, VOCABULARY = 128, 127

MODEL = f"""
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --init-method-std 0.1 --make-vocab-size-divisible-by 32
"""
TRAINING = """
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant --seed 7 --log-interval 1
    --eval-iters 0 --eval-interval 1000 --num-workers 0 --no-create-attention-mask-in-dataloader
"""
LOCAL_SPEC = (
    "--transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion "
    "--no-bias-swiglu-fusion"
)


def altered(name: str, **variables: str) -> dict:
    """Of Lab.run: pretrain_gpt_s2.py with an alteration of scripts/altered_pretrain.py, and what that reads."""
    return dict(script=SCRIPTS / "altered_pretrain.py", environment={"ALTERATION": name, **variables})


@dataclass
class Run:
    """What a run left. losses and grad_norms: by iteration. evaluations: losses by name. output: everything that its
    ranks printed."""

    losses: dict[int, float]
    grad_norms: dict[int, float]
    evaluations: dict[str, float]
    output: str


def run_processes(
    command: list[str],
    processes: int,
    timeout: float,
    environment: dict | None = None,
    python_path: Path | None = None,
    forked: bool = False,
) -> tuple[int, str]:
    """Run `command` as ranks 0 .. processes-1 of one job; (the worst exit code, all output). Stragglers are killed
    after `timeout` s.

    forked: by forks.py; the command is then a Python script and its arguments.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    common = {
        **inherited,
        "PYTHONPATH": tests_python_path(python_path),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        **(environment or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(processes)]
        jobs = []
        try:
            for rank, log in enumerate(logs):
                environ = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("w") as file:  # a pipe that nobody reads would fill up and stop the process
                    if forked:
                        jobs.append(forks.start(Path(command[0]), command[1:], environ, ROOT, log))
                        continue
                    options = dict(start_new_session=True, stdout=file, stderr=subprocess.STDOUT)
                    jobs.append(subprocess.Popen(command, env=environ, cwd=ROOT, **options))
            _wait_for_all(jobs, time.monotonic() + timeout)
        finally:
            end_all(jobs)
        output = "\n".join(log.read_text(errors="replace") for log in logs)
    return max(abs(job.returncode) for job in jobs), output


def _wait_for_all(jobs: list[subprocess.Popen | forks.Forked], deadline: float) -> None:
    """Wait until every job has ended. Once one has failed the others only wait for it: they get another minute, for
    what they write about it."""
    failed = False
    while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
        if not failed and any(job.poll() not in (None, 0) for job in jobs):
            failed, deadline = True, min(deadline, time.monotonic() + 60)
        time.sleep(0.05)


def end_all(jobs: list[subprocess.Popen | forks.Forked]) -> None:
    """Kill those that still run, each with its session."""
    for job in jobs:
        if job.poll() is None:
            try:
                os.killpg(job.pid, signal.SIGKILL)
            except ProcessLookupError:  # forked, and not in a session of its own yet
                with suppress(ProcessLookupError):
                    os.kill(job.pid, signal.SIGKILL)
        job.wait()


@dataclass
class Lab:
    """Folders and defaults of a test session's runs. device_flags: what this machine's processes need. forked: as in
    run_processes. gpus: whether the runs see GPUs."""

    folder: Path
    device_flags: str
    timeout: float = 900
    forked: bool = False
    gpus: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """What every run has beside this process's variables."""
        return {} if self.gpus else {"CUDA_VISIBLE_DEVICES": ""}

    @property
    def sparsity(self) -> Path:
        return self.folder / "sparsity.yaml"

    @property
    def data(self) -> str:
        return (
            f"--data-path {self.folder / 'corpus'} --split 90,5,5 --tokenizer-type NullTokenizer "
            f"--vocab-size {VOCABULARY} --data-cache-path {self.folder / 'cache'}"
        )

    def flags(self, *extra: str, model: str = MODEL, spec: str = LOCAL_SPEC, sparsity: bool = True) -> list[str]:
        """The command line of a run; later flags win. --s2-config, which may stand there only once, is this session's
        unless the flags have their own. Skips the tests of GPTs where Megatron has no GPTModel."""
        if not any("--hybrid-layer-pattern" in part for part in (model, *extra)):
            require_gpt_model()
        parts = [model, TRAINING, spec, self.data, self.device_flags]
        if sparsity and "--s2-config" not in " ".join([self.device_flags, *extra]):
            parts.append(f"--s2-config {self.sparsity}")
        return " ".join([*parts, *extra]).split()

    def run(
        self,
        name: str,
        *extra: str,
        processes: int = 1,
        model: str = MODEL,
        spec: str = LOCAL_SPEC,
        sparsity: bool = True,
        script: Path = ENTRY,
        fails: bool = False,
        environment: dict | None = None,
        python_path: Path | None = None,
        log_flag: bool = True,
        torchrun: bool = False,
    ) -> Run:
        """Train with the given flags on top of the defaults, and check that it went through (or, with fails, that it
        did not).

        python_path: a folder of modules to put first. log_flag: False for a script without --s2-loss-log, which reads
        LOSS_LOG. torchrun: start the ranks with torchrun, as a user does; the default is quicker.
        """
        log, forked = self.folder / f"{name}.jsonl", self.forked and not torchrun
        launcher = [] if forked else [sys.executable]
        if torchrun:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            processes = 1
        command = [*launcher, str(script), *self.flags(*extra, model=model, spec=spec, sparsity=sparsity)]
        if log_flag:
            command += ["--s2-loss-log", str(log)]
        environment = {"LOSS_LOG": str(log), **self.environment, **(environment or {})}
        code, output = run_processes(command, processes, self.timeout, environment, python_path, forked)
        assert (code != 0) == fails, f"{name}: exit code {code}\n{output[-6000:]}"
        records, evaluations = read_loss_log(log)
        return Run(
            {step: record["lm loss"] for step, record in records.items()},
            {step: record["grad_norm"] for step, record in records.items()},
            {name: record["lm loss"] for name, record in evaluations.items()},
            output,
        )

    def python(self, script: str, *arguments, processes: int = 1) -> str:
        """Run one of tests/megatron/scripts; what it printed."""
        command = [*([] if self.forked else [sys.executable]), str(SCRIPTS / script), *map(str, arguments)]
        code, output = run_processes(command, processes, self.timeout, self.environment, forked=self.forked)
        assert code == 0, f"{script}: exit code {code}\n{output[-6000:]}"
        return output


def write_corpus(prefix: Path, documents: int = 400) -> None:
    """An indexed dataset of short documents: random tokens whose second half repeats the first, so that distant tokens
    matter."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(documents):
        half = rng.integers(1, VOCABULARY, size=rng.integers(3, 60))
        builder.add_document([*half.tolist(), *half.tolist(), VOCABULARY], [2 * len(half) + 1])
    builder.finalize(f"{prefix}.idx")


def _same_training(run: Run, baseline: Run, steps: int = 10) -> None:
    """Losses of `run` within 1e-5 of the baseline's over `steps` iterations or more, and grad norms equal to 3
    decimals."""
    assert len(run.losses) >= steps, f"{len(run.losses)} iterations, expected {steps}\n{run.output[-3000:]}"
    losses = {step: abs(loss - baseline.losses[step]) for step, loss in run.losses.items()}
    norms = {step: abs(norm - baseline.grad_norms[step]) for step, norm in run.grad_norms.items()}
    assert max(losses.values()) <= 1e-5, f"losses differ by {losses}"
    assert max(norms.values()) <= 1e-3, f"grad norms differ by {norms}"


@pytest.fixture(scope="session")
def same_training():
    """The comparison of a run with its baseline."""
    return _same_training


@pytest.fixture(scope="session")
def count_gpus() -> int:
    """Asked of the driver, not of torch: pytest's own process starts neither CUDA nor Megatron's CPU stand-in."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


@pytest.fixture(scope="session")
def lab(tmp_path_factory, count_gpus) -> Lab:
    # Not where there is a GPU: to ask for it would initialise CUDA in the process that is forked.
    lab = Lab(tmp_path_factory.mktemp("megatron"), device_flags="--distributed-backend gloo", forked=count_gpus == 0)
    lab.sparsity.write_text(SPARSITY)
    write_corpus(lab.folder / "corpus")
    return lab


@pytest.fixture(scope="session")
def start(lab) -> Path:
    """A checkpoint after 10 iterations in one process; the run itself goes on to 20 and is the `baseline`."""
    return lab.folder / "start"


@pytest.fixture(scope="session")
def baseline(lab, start) -> Run:
    return lab.run("baseline", f"--train-iters 20 --save {start} --save-interval 10")


CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"


@pytest.fixture
def conversations(lab):
    """(JSON lines of two conversations each, folder of a word tokenizer with a chat template, folder of modules to put
    first)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "<eos>", "system", "user", "assistant", *(f"w{number}" for number in range(100))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(lab.folder / "tokenizer")

    def conversation(seed):
        said = [
            " ".join(f"w{(seed * 7 + turn * 11 + word * 3) % 100}" for word in range(12 + seed % 9))
            for turn in range(3)
        ]
        return [{"role": role, "content": text} for role, text in zip(("system", "user", "assistant"), said)]

    path = lab.folder / "conversations.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": conversation(line) + conversation(line + 50)}) + "\n" for line in range(40))
    )
    # The Hugging Face package `datasets`, which Megatron reads JSON lines with, is not needed for anything else here: a
    # stand-in does.
    package = lab.folder / "stand_in"
    package.mkdir(exist_ok=True)
    (package / "datasets.py").write_text(
        "import json\n\ndef load_dataset(kind, data_files, split):\n    assert kind == 'json'\n"
        "    return [json.loads(line) for line in open(data_files)]\n"
    )
    return path, lab.folder / "tokenizer", package
