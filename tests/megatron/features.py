"""Features of Megatron around the attention, each compared with the same run without it: for test_features.py (CPUs,
gloo) and test_gpu_features.py (GPUs, NCCL).

A feature may change how, when and where layers run, and never what they compute.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from s2_megatron.megatron.records.loss_log import read_loss_log
from s2_megatron.megatron.records.run import POSITION_LOSS
from tests.megatron.conftest import SCRIPTS, Lab, Run

MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 1e-2"
)
FULL_RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --s2-keep-attention-output"
)
ATTENTION_RECOMPUTE = "--recompute-granularity selective --recompute-modules core_attn --s2-keep-attention-output"
MEGATRON_FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
# Both kinds of FSDP refuse the value 1 that tests/megatron/conftest.py gives to other runs.
MANY_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
FSDP_CLASSES = {"--use-torch-fsdp2": "TorchFullyShardedDataParallel", "--use-megatron-fsdp": "FullyShardedDataParallel"}


@dataclass
class Watched:
    """A run, and what scripts/watched_pretrain.py saw of it: one dictionary a rank. positions: its losses by position,
    where it logs them, by (iteration or evaluation, bucket)."""

    run: Run
    ranks: list[dict]
    positions: dict[tuple, float]

    def least(self, name: str) -> int:
        return min(rank[name] for rank in self.ranks)


def watched(lab: Lab, name: str, *flags: str, processes: int = 1, **options) -> Watched:
    run = lab.run(name, *flags, processes=processes, script=SCRIPTS / "watched_pretrain.py", **options)
    ranks = [json.loads(line) for line in re.findall(r"^watched: (.*)$", run.output, re.MULTILINE)]
    assert len(ranks) == processes, run.output[-3000:]
    logged = [pair for part in read_loss_log(lab.folder / f"{name}.jsonl") for pair in part.items()]
    positions = {
        (when, key): value for when, record in logged for key, value in record.items() if key.startswith(POSITION_LOSS)
    }
    return Watched(run, ranks, positions)


def with_and_without(
    lab: Lab, name: str, common: str, feature: str, at_once: bool = True, environment: dict | None = None, **options
) -> tuple[Watched, Watched]:
    """(the run with `feature`, the run without it); `environment` is of the first one only."""
    with ThreadPoolExecutor(2 if at_once else 1) as pool:
        plain = pool.submit(watched, lab, f"{name}_without", common, **options)
        featured = pool.submit(watched, lab, f"{name}_with", common, feature, environment=environment, **options)
        return featured.result(), plain.result()


def assert_same_training(featured: Watched, plain: Watched, losses: float, norms: float, s2_calls: int) -> None:
    """The runs' losses differ by at most `losses`, their gradient norms by the share `norms`, and each rank of the
    featured one called the S2 core attention `s2_calls` times or more.

    Raises AssertionError otherwise, and for a run whose losses do not move by 5 times that bound: it would hide a
    mistake.
    """
    one, two = featured.run, plain.run
    assert list(one.losses) == list(two.losses) and one.losses, (one.losses, two.losses)
    moved = max(two.losses.values()) - min(two.losses.values())
    assert moved >= 5 * losses, f"the losses move by {moved}"
    far = {step: abs(loss - two.losses[step]) for step, loss in one.losses.items()}
    assert max(far.values()) <= losses, f"losses differ by {far}"
    far = {step: abs(norm / two.grad_norms[step] - 1) for step, norm in one.grad_norms.items()}
    assert max(far.values()) <= norms, f"gradient norms differ by these shares: {far}"
    assert set(one.evaluations) == set(two.evaluations)
    for name, loss in one.evaluations.items():
        assert abs(loss - two.evaluations[name]) <= losses, name
    assert set(featured.positions) == set(plain.positions)
    for place, loss in featured.positions.items():
        assert abs(loss - plain.positions[place]) <= 5 * losses, f"{place}: a bucket has fewer tokens"
    assert featured.least("s2_calls") >= s2_calls, featured.ranks
