"""The quickstart's model and training flags, all of them Megatron's but the --s2-* ones, and the torchrun command.

The sparsity is in the YAML; what follows is what any Megatron launch has to say about its model, kept small enough for
two CPU cores.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from examples.quickstart.dataset import SPLIT, PreparedCorpus
from s2_megatron.megatron.host.processes import signal_when_parent_ends

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_ITERATIONS = 300


@dataclass(frozen=True)
class Model:
    """A model's sizes. seq_length: tokens."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    seq_length: int

    @property
    def shape(self) -> dict[str, int]:
        """What a sparsity is resolved for."""
        return dict(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            seq_length=self.seq_length,
        )


@dataclass(frozen=True)
class Batch:
    micro_batch_size: int = 4
    global_batch_size: int = 4


MODEL = Model(num_layers=4, hidden_size=128, ffn_hidden_size=384, num_heads=4, num_kv_heads=2, seq_length=512)
BATCH = Batch()
TOKENS_PER_ITERATION = BATCH.global_batch_size * MODEL.seq_length


def model_flags(model: Model, init_std: float = 0.05) -> list[str]:
    """Megatron's flags of a Llama-like model: RMSNorm, RoPE, SwiGLU, no biases, untied embeddings, no dropout."""
    return [
        f"--num-layers={model.num_layers}",
        f"--hidden-size={model.hidden_size}",
        f"--ffn-hidden-size={model.ffn_hidden_size}",
        f"--num-attention-heads={model.num_heads}",
        "--group-query-attention",
        f"--num-query-groups={model.num_kv_heads}",
        f"--seq-length={model.seq_length}",
        f"--max-position-embeddings={model.seq_length}",
        "--position-embedding-type=rope",
        "--normalization=RMSNorm",
        "--swiglu",
        "--untie-embeddings-and-output-weights",
        "--disable-bias-linear",
        "--attention-dropout=0.0",
        "--hidden-dropout=0.0",
        f"--init-method-std={init_std:g}",
    ]


# The local implementation needs neither Transformer Engine nor Apex; these flags keep Megatron from looking for them.
IMPLEMENTATION_FLAGS = [
    "--transformer-impl=local",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-create-attention-mask-in-dataloader",
]


def device_flags(on_gpu: bool) -> list[str]:
    # Deterministic, so that a killed run's log joins without a seam on a GPU too; a CPU is so anyway.
    return ["--bf16", "--deterministic-mode"] if on_gpu else ["--distributed-backend=gloo", "--num-workers=0"]


def training_flags(iterations: int, seed: int) -> list[str]:
    """The schedule is the same for every number of iterations, so that a run with more of them continues a shorter
    one."""
    return [
        f"--micro-batch-size={BATCH.micro_batch_size}",
        f"--global-batch-size={BATCH.global_batch_size}",
        f"--train-iters={iterations}",
        "--lr=4e-3",
        "--min-lr=2e-4",
        "--lr-decay-style=cosine",
        f"--lr-decay-iters={DEFAULT_ITERATIONS}",
        "--lr-warmup-iters=20",
        "--override-opt_param-scheduler",
        "--weight-decay=0.1",
        "--adam-beta2=0.95",
        "--clip-grad=1.0",
        f"--seed={seed}",
        "--eval-iters=16",
        "--eval-interval=1000000",
    ]


def run_flags(run_folder: Path, corpus: PreparedCorpus, save_interval: int) -> list[str]:
    checkpoints = run_folder / "checkpoints"
    return [
        f"--data-path={corpus.data_prefix}",
        f"--data-cache-path={corpus.folder / 'cache'}",
        f"--split={SPLIT}",
        "--tokenizer-type=HuggingFaceTokenizer",
        f"--tokenizer-model={corpus.tokenizer}",
        f"--save={checkpoints}",
        f"--load={checkpoints}",
        f"--save-interval={save_interval}",
        "--ckpt-format=torch_dist",
        f"--tensorboard-dir={run_folder / 'tensorboard'}",
        "--log-interval=1",
        "--log-throughput",
        f"--s2-loss-log={loss_log(run_folder)}",
        "--s2-position-loss=8",
    ]


def loss_log(run_folder: Path) -> Path:
    return run_folder / "losses.jsonl"


def training_command(
    config: Path,
    iterations: int,
    seed: int,
    run_folder: Path,
    corpus: PreparedCorpus,
    *,
    on_gpu: bool,
    save_interval: int,
) -> list[str]:
    """The whole torchrun command of a run: one process on one device."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
        str(ROOT / "pretrain_gpt_s2.py"),
        f"--s2-config={config}",
        *model_flags(MODEL),
        *IMPLEMENTATION_FLAGS,
        *device_flags(on_gpu),
        *training_flags(iterations, seed),
        *run_flags(run_folder, corpus, save_interval),
    ]


def start_training(command: list[str], log: Path, lock_descriptor: int) -> subprocess.Popen:
    """Start the command, its output appended to `log`. It holds the run's lock too, until its last process has
    ended."""
    environment = os.environ | {
        # So small a model gains nothing from a second thread, and loses tenfold when the cores have other work to do:
        # waiting OpenMP threads spin. One thread also gives the same losses whatever the number of cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",  # the tokenizer is a local folder
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("a") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(lock_descriptor,),
            # When the launcher dies, torchrun ends its ranks: no trainer is left writing to the run's folder.
            preexec_fn=lambda: signal_when_parent_ends(signal.SIGTERM),
        )
