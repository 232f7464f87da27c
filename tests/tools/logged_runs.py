"""Made-up training runs with a planted effect, written as the logs that `s2-megatron compare` reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from s2_megatron.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
SEQ_LENGTH, BATCH = 512, 4
ARGUMENTS = {
    "seq_length": SEQ_LENGTH, "global_batch_size": BATCH, "seed": 1, "lr": 0.004, "min_lr": 0.0002, "train_iters": 300,
    "lr_decay_iters": 300, "num_layers": 4, "hidden_size": 128, "data_path": ["corpus/text"], "world_size": 1,
    "tokenizer_type": "HuggingFaceTokenizer", "bf16": False, "s2_config": None,
}  # fmt: skip
QUICKSTART = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "seq_length": SEQ_LENGTH}


def s2_arguments() -> dict:
    """What an S2 run logs beside ARGUMENTS."""
    config = ROOT / "configs/quickstart.yaml"
    return {"s2_config": str(config), "s2_sparsity": load_config(config).resolve(**QUICKSTART).canonical_json()}


def losses(seed: int, own: int, steps: int = 300, gap: float = 0.0, noise: float = 0.004):
    """Training losses float64 [steps]. seed: of the batches, whose noise all runs of the seed share. own: of this run's
    own noise, correlated from step to step. gap: share by which the loss is higher."""
    step = np.arange(1, steps + 1)
    batches = np.random.default_rng(seed).normal(0, 0.05, steps)
    shocks = np.random.default_rng([own, 1]).normal(0, noise * np.sqrt(1 - 0.5**2), steps)
    drift = np.zeros(steps)
    for index in range(1, steps):
        drift[index] = 0.5 * drift[index - 1] + shocks[index]
    return (3 + 4 * step**-0.5) * (1 + gap) + batches + drift


def write_loss_log(
    path: Path,
    values,
    *,
    header: bool = True,
    start: float = 1000.0,
    seconds: float = 0.5,
    first: int = 1,
    append: bool = False,
    rate=lambda step: 0.1,
    **arguments,
) -> Path:
    """A --s2-loss-log file. values: the losses from iteration `first` on. rate: learning rate of a step."""
    records = []
    if header:
        run = {"arguments": ARGUMENTS | arguments, "flops_per_token": {"attended": 5e6, "dense": 6e6}}
        records.append({"run": run, "iteration": first, "time": start})
    for step, loss in enumerate(values, start=first):
        records.append(
            {"iteration": step, "lm loss": float(loss), "grad_norm": 1 / step, "learning_rate": rate(step),
             "skipped": 0, "samples": step * BATCH, "time": start + seconds * step}
        )  # fmt: skip
        if step % 100 == 0:
            records.append({"iteration": step, "validation": f"iteration {step}", "lm loss": float(loss) + 0.1})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
    return path
