"""The command of one run: pretrain_gpt_s2.py with Megatron's flags, one process on one device."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from examples.quickstart.launch import ROOT, model_flags
from studies.corpus import Corpus
from studies.ranked import ranked_options
from studies.studies import Study, plan_before_choice, sparsity
from studies.tasks import ANSWERS

INIT_STD = 0.02
WARM_UP_SHARE = 0.05
FINAL_RATE_SHARE = 0.1
WSD_DECAY_SHARE = 0.2  # of the steps of a run whose rate is constant before
BEFORE = "before"  # role of a run that another arm goes on from


@dataclass(frozen=True)
class Job:
    """One run. folder: of this run alone; its files: sparsity.yaml, train.log, losses.jsonl, shared_gpu, checkpoints/.

    tokens: training tokens. seed: of weights and data order, the same for all arms. short: evaluated at the end alone,
    without checkpoints. start: the run whose weights it begins with. evaluated: before any step, and not
    trained. role: what the arm's run is for, where the study has several of an arm. weights: an imported model's
    folder, which a run without `start` begins with.
    """

    study: Study
    arm: str
    seed: int
    rate: float
    tokens: int
    folder: Path
    short: bool = False
    start: Job | None = None
    evaluated: bool = False
    role: str = ""
    weights: Path | None = None

    @property
    def label(self) -> str:
        return f"{self.role}-{self.arm}" if self.role else self.arm

    @property
    def name(self) -> str:
        return f"{self.label}, seed {self.seed}, learning rate {self.rate:g}"

    @property
    def iterations(self) -> int:
        return self.study.iterations(self.tokens)

    @property
    def decay(self) -> str:
        """Of the learning rate. Of an arm that is another one before, both runs together have the study's."""
        if self.role == BEFORE:
            return "constant"
        return "linear" if self.study.arm(self.arm).before else self.study.decay

    @property
    def last_step(self) -> int:
        return 0 if self.evaluated else self.iterations

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def losses(self) -> Path:
        return self.folder / "losses.jsonl"

    @property
    def shared(self) -> Path:
        """Is there once the run has been beside others on its GPU: its own times of a step say nothing then."""
        return self.folder / "shared_gpu"

    @property
    def log(self) -> Path:
        return self.folder / "train.log"

    def test_file(self, module: str) -> Path:
        """What a test of the trained model (the module that makes it) has found."""
        return self.folder / f"{module}.json"


def chosen_yaml(job: Job) -> Path:
    """Of an arm whose heads are chosen: with its dense run, for all runs, of all studies, that choose as many heads
    beside the same sparsity on it."""
    arm = job.study.arm(job.arm)
    asked = json.dumps([arm.chosen, plan_before_choice(job.study, job.arm), measured_plan(job), arm.ranked_on])
    return job.start.folder / f"chosen-{hashlib.sha256(asked.encode()).hexdigest()[:12]}" / f"{job.arm}.yaml"


def measured_plan(job: Job) -> dict:
    """The content of the YAML beside whose sparse heads the arm's dense ones are measured."""
    return plan_before_choice(job.study, job.arm if job.study.arm(job.arm).own_choice else job.study.measured_beside)


def write_sparsity(job: Job) -> Path:
    """The arm's YAML, in the run's folder under the arm's name, by which comparisons call it. One whose heads are
    chosen is not written here."""
    if job.study.arm(job.arm).chosen:
        return chosen_yaml(job)
    path = job.folder / f"{job.arm}.yaml"
    path.write_text(yaml.safe_dump(sparsity(job.study, job.arm), sort_keys=False))
    return path


def command(job: Job, corpus: Corpus, on_gpu: bool, choice: Corpus | None = None) -> list[str]:
    """The words of the command that trains one run, or goes on with it; writes the arm's YAML into its folder. choice:
    text on which the arm's dense heads are chosen, of an arm that has such."""
    return [
        sys.executable,
        *_choice(job, choice),
        str(ROOT / "pretrain_gpt_s2.py"),
        f"--s2-config={write_sparsity(job)}",
        *_model_flags(job.study),
        "--no-create-attention-mask-in-dataloader",
        *_implementation_flags(on_gpu),
        *_training_flags(job),
        *_data_flags(job, corpus),
        *_log_flags(job),
        *_start_flags(job),
        *job.study.flags,
    ]


def _choice(job: Job, corpus: Corpus | None) -> list[str]:
    """What stands before the script of a run whose dense heads are chosen: chosen.py, which makes the YAML first, and
    for softmax offsets offsets.py."""
    arm = job.study.arm(job.arm)
    if not arm.chosen:
        return []
    contents = {"s2-config": plan_before_choice(job.study, job.arm), "beside": measured_plan(job)}
    if contents["beside"] == contents["s2-config"]:
        del contents["beside"]
    plans = {option: job.folder / f"plan-{option}.yaml" for option in contents}
    for option, file in plans.items():
        file.write_text(yaml.safe_dump(contents[option], sort_keys=False))
    options = {
        "write": chosen_yaml(job),
        **({"by": "layer", "layers": arm.chosen} if arm.by_layer else {"heads": arm.chosen}),
        "load": job.start.checkpoints,
        **plans,
    }
    if arm.ranked_on:
        options |= ranked_options(corpus, arm.ranked_on, job.start.study.model.seq_length)
        options["known"] = job.start.folder / f"known-{arm.ranked_on}.json"
    else:
        options |= {"data-path": corpus.data_prefix, "split": choice_split(corpus.split)}
    words = ["-m", "studies.chosen", *(f"--{name}={value}" for name, value in options.items()), "--"]
    if arm.offset:
        given = {"load": job.start.checkpoints, "s2-config": chosen_yaml(job), "data-path": options["data-path"]}
        given["write"] = offsets_folder(job)
        words += ["-m", "studies.offsets", *(f"--{name}={value}" for name, value in given.items()), "--"]
    return words


def offsets_folder(job: Job) -> Path:
    """Of the checkpoint that a run with softmax offsets begins with."""
    return job.folder / "with_offsets"


def _model_flags(study: Study) -> list[str]:
    tied = {"--untie-embeddings-and-output-weights"} if study.tied else set()
    return [flag for flag in model_flags(study.model, INIT_STD) if flag not in tied]


def choice_split(split: str) -> str:
    """--split of the data on which heads are chosen: its second part is the last tenth of the training documents, which
    the dense model did not see and no result is reported on. split: training and validation documents, as numbers."""
    training, *others = (int(share) for share in split.split(","))
    measured = max(1, training // 10)
    return f"{training - measured},{measured},{sum(others)}"


def _implementation_flags(on_gpu: bool) -> list[str]:
    flags = ["--no-gradient-accumulation-fusion"]  # its extension comes with Apex
    if on_gpu and importlib.util.find_spec("transformer_engine") is not None:
        return [*flags, "--bf16", "--transformer-impl=transformer_engine", "--num-workers=2"]
    flags += ["--transformer-impl=local", "--no-persist-layer-norm", "--no-rope-fusion", "--no-masked-softmax-fusion"]
    return [*flags, *(["--bf16", "--num-workers=2"] if on_gpu else ["--distributed-backend=gloo", "--num-workers=0"])]


def _training_flags(job: Job) -> list[str]:
    study, steps = job.study, job.iterations
    wsd = ["--lr-wsd-decay-style=linear", f"--lr-wsd-decay-iters={max(1, round(WSD_DECAY_SHARE * steps))}"]
    return [
        f"--micro-batch-size={study.micro_batch}",
        f"--global-batch-size={study.batch}",
        f"--train-iters={steps}",
        f"--lr={job.rate:g}",
        f"--min-lr={job.rate * FINAL_RATE_SHARE:g}",
        f"--lr-decay-style={job.decay}",
        *(wsd if job.decay == "WSD" else []),
        f"--lr-decay-iters={steps}",
        f"--lr-warmup-iters={max(1, round(WARM_UP_SHARE * steps))}",
        "--weight-decay=0.1",
        "--adam-beta1=0.9",
        "--adam-beta2=0.95",
        "--clip-grad=1.0",
        f"--seed={job.seed}",
        # Never at the last step, after which Megatron evaluates in any case.
        f"--eval-interval={steps // (1 if job.short else study.evaluations) + 1}",
        f"--eval-iters={study.eval_batches}",
    ]


def _data_flags(job: Job, corpus: Corpus) -> list[str]:
    answers = [] if job.study.tasks is None else [f"--s2-loss-from-token={ANSWERS[0]}"]
    return [
        *answers,
        f"--data-path={corpus.data_prefix}",
        f"--data-cache-path={job.folder / 'cache'}",  # of this run alone: several start at once
        f"--split={corpus.split}",
        # The data are token ids already.
        "--tokenizer-type=NullTokenizer",
        f"--vocab-size={corpus.vocabulary}",
        "--null-tokenizer-eod-id=0",
    ]


def _log_flags(job: Job) -> list[str]:
    checkpoints = [
        f"--save={job.checkpoints}",
        f"--load={job.checkpoints}",
        f"--save-interval={job.iterations}",
        "--ckpt-format=torch_dist",
    ]
    return [
        *([] if job.short or job.evaluated else checkpoints),
        "--exit-signal-handler",  # SIGTERM: save a checkpoint, then end
        "--log-interval=20",
        "--log-throughput",
        f"--s2-loss-log={job.losses}",
        f"--s2-position-loss={job.study.position_buckets}",
    ]


def _start_flags(job: Job) -> list[str]:
    """As with --load and --finetune: the weights alone, at iteration 0; a run that was cut goes on from its own."""
    weights = job.weights if job.start is None else job.start.checkpoints
    start = []
    if job.study.arm(job.arm).offset:
        weights, start = offsets_folder(job), ["--softmax-type=learnable"]
    if weights is not None:
        start.append(f"--pretrained-checkpoint={weights}")
    return [*start, *(["--skip-train"] if job.evaluated else [])]


def environment(device: str | None) -> dict[str, str]:
    """Of one process by itself; what torchrun would set. device: of CUDA_VISIBLE_DEVICES, None for the CPU."""
    own = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # whichever is free when it is opened: other runs start at the same time
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONUNBUFFERED": "1",
        # Waiting OpenMP threads spin and take the cores of the other runs.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if device is not None:
        own["CUDA_VISIBLE_DEVICES"] = device
    return os.environ | own
