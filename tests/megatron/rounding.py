"""Training on a GPU in bf16, judged by what bf16 costs the reference: all runs go on from one fp32 checkpoint.

By this rule alone a run without its sink, or with a window of 145 for 150 tokens, passes on the tiny models here: what
is attended is for the kernels in fp32 to show, within FP32 of the reference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.megatron.conftest import Lab, Run

ITERATIONS = 10
FP32 = 1e-4  # distance of the kernels, and of several GPUs, from the reference in fp32


def train_from_checkpoint(lab: Lab, name: str, more: str = "", **options) -> tuple[Callable[..., Run], Run]:
    """(function that trains from one fp32 checkpoint, that of the reference in fp32). more: flags of every run;
    options: of Lab.run, too."""
    folder = lab.folder / name
    start = f"--train-iters 2 --s2-backend reference --save {folder} --save-interval 2"
    lab.run(f"{name}_start", more, start, **options)

    def run(label: str, flags: str, processes: int = 1, **others) -> Run:
        load = f"--train-iters {ITERATIONS} --load {folder} --finetune --no-load-rng"
        return lab.run(f"{name}_{label}", more, load, flags, processes=processes, **options | others)

    return run, run("fp32", "--s2-backend reference")


def at_once(*runs: Callable[[], Run]) -> list[Run]:
    """What they return; most of a run's time is its start."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [started.result() for started in [pool.submit(run) for run in runs]]


def distance(run: Run, exact: Run) -> float:
    """Root mean square of the differences of the losses."""
    assert len(run.losses) == len(exact.losses) == ITERATIONS
    return math.sqrt(sum((run.losses[step] - loss) ** 2 for step, loss in exact.losses.items()) / len(exact.losses))


def assert_as_good_as_the_reference(run: Run, reference: Run, exact: Run) -> None:
    """run, reference: in bf16; exact: the reference in fp32."""
    assert distance(reference, exact) > 0, "bf16 must differ from fp32, or nothing is tested"
    assert distance(run, exact) <= 2 * distance(reference, exact)


def assert_given(run: Run, flags: str) -> None:
    """Megatron printed these settings: sizes of parallel groups, and switches that are on."""
    for name, value in re.findall(r"--(\S+-parallel-size) (\d+)", flags):
        assert re.search(rf"{name.replace('-', '_')} \.+ {value}\b", run.output), name
    for name in re.findall(r"--(sequence-parallel|use-distributed-optimizer|multi-latent-attention)\b", flags):
        assert re.search(rf"{name.replace('-', '_')} \.+ True\b", run.output), name
