"""Thinned loss logs as runs of rules-tiny leave them, made up."""

from __future__ import annotations

import json
from pathlib import Path

from studies.results import write_json
from studies.studies import STUDIES
from s2_megatron.megatron.loss_log import HEADER

TINY = STUDIES["rules-tiny"]
STEPS = 20


def write_rules_log(path: Path, arm: str, seed: int, final: float) -> None:
    """The corpus beside it, too. final: the validation loss, and what the training loss falls to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arguments = {
        **TINY.model.shape,
        "seed": seed,
        "lr": 4e-3,
        "min_lr": 4e-4,
        "train_iters": STEPS,
        "global_batch_size": TINY.batch,
        "data_path": ["corpus/abababababab"],
        "s2_config": f"{arm}.yaml",
        "micro_batch_size": TINY.micro_batch,
    }
    header = {"arguments": arguments, "flops_per_token": {"attended": 1.0, "dense": 2.0}, "machine": {"device": "X"}}
    records = [{HEADER: header, "iteration": 1, "time": 0.0}]
    for step in range(1, STEPS + 1):
        record = {"iteration": step, "lm loss": final + 1 / step, "grad_norm": 1.0, "learning_rate": 4e-3}
        records.append({**record, "samples": TINY.batch * step, "time": float(step)})
    evaluated = {"lm loss": final, "lm loss by position/000-127": final + 0.1, "lm loss by position/128-255": final}
    name = f"iteration {STEPS} on validation set"
    records.append({"iteration": STEPS, "validation": name, **evaluated, "lm loss by position/trailing": final})
    write_json(path.with_name("corpus.json"), {"sha256": "ab" * 32, "tokens": 10**6})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
