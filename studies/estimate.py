"""How long the runs of a study take, before any: from the package's forecast of a training step on one GPU.

    python -m studies.run rules8k --stage estimate --seeds 1 2

The forecast is too long for dense layers with heads of 64 (the tables take them as heads of 128): of the model of
`lm8k`, 8 sequences of 8K a step, it says 241 ms dense and 130 ms all-S2; one H200 took 189 and 126 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

from examples.quickstart.launch import Model, model_flags
from s2_megatron.config.load import SparsityConfig
from s2_megatron.tools.forecast.flags import read_flags
from s2_megatron.tools.forecast.run import training_run
from s2_megatron.tools.forecast.step_time import step_time
from s2_megatron.tools.forecast.tables import Tables, load_tables
from studies.continuations import tokens_from_scratch
from studies.studies import BASELINE, Study, density, sparsity

GPU = "NVIDIA H200"
START_SECONDS = 45.0  # of a run: imports, the model, the kernels' first call, a checkpoint
FORWARD_SHARE = 1 / 3  # an evaluated batch takes the forward of a step
TASKS_TEST_SECONDS = 40.0  # of a model on the tasks
LOSS_TEST_SECONDS = 15.0  # of where a language model's loss lies


def tables() -> Tables:
    """Of the GPU that the estimates are for."""
    found = load_tables(GPU)
    assert found is not None, GPU
    return found


def step_seconds(model: Model, content: dict, micro_batch: int, batch: int, vocabulary: int) -> float:
    """The forecast of one step of a model with a sparsity (the content of its YAML) on one GPU. batches: sequences."""
    flags = [*model_flags(model), "--bf16", "--no-gradient-accumulation-fusion", f"--vocab-size={vocabulary}"]
    flags += [f"--micro-batch-size={micro_batch}", f"--global-batch-size={batch}"]
    resolved = SparsityConfig.from_data(content).resolve(**model.shape)
    return step_time(training_run(read_flags(flags), resolved), tables()).total


def run_seconds(study: Study, arm: str, tokens: int) -> tuple[float, float]:
    """(a training step, a whole run with its evaluations), in seconds on one GPU."""
    step = step_seconds(study.model, sparsity(study, arm), study.micro_batch, study.batch, study.corpus.vocabulary)
    evaluated = study.evaluations * study.eval_batches * FORWARD_SHARE
    return step, START_SECONDS + step * (study.iterations(tokens) + evaluated)


def estimate(study: Study, arms: Sequence[str], seeds: Sequence[int], tokens: int) -> list[str]:
    """The lines of `--stage estimate`."""
    lines, total = [f"{study.name}, {tokens / 1e6:g}M tokens a run, on one {GPU} (forecast):"], 0.0
    for arm in arms:
        step, seconds = run_seconds(study, arm, tokens)
        seconds += LOSS_TEST_SECONDS
        total += seconds * len(seeds)
        lines.append(
            f"  {arm:<14} {100 * density(study, arm):5.1f} % of the pairs  {1000 * step:5.0f} ms a step  "
            f"{seconds / 60:5.1f} min"
        )
    lines.append(f"{len(arms) * len(seeds)} runs: {total / 60:.0f} GPU minutes, {total / 120:.0f} minutes on two GPUs; "
                 "the corpus and the short runs that choose learning rates come on top")  # fmt: skip
    return lines


def estimate_continued(
    study: Study, arms: Sequence[str], seeds: Sequence[int], tokens: int, start_tokens: int
) -> list[str]:
    """The lines of `--stage estimate` of a study that goes on from a dense model."""
    start = study.start
    runs = [("start-dense", start_tokens, *run_seconds(start.study, BASELINE, start_tokens))]
    for arm in arms:
        step, seconds = run_seconds(study, arm, tokens)
        evaluated = START_SECONDS + step * study.eval_batches * FORWARD_SHARE
        seconds += LOSS_TEST_SECONDS if study.tasks is None else TASKS_TEST_SECONDS
        runs += [(f"switched-{arm}", 0, step, evaluated)] if start.switched else []
        runs.append((arm, tokens, step, seconds))
    for arm in (arm for arm in start.from_scratch if arm in arms):
        own = tokens_from_scratch(study, arm, start_tokens, tokens, study.corpus.vocabulary)
        runs.append((f"scratch-{arm}", own, *run_seconds(study, arm, own)))
    lines = [f"{study.name}, on one {GPU} (forecast):"]
    for label, own, step, seconds in runs:
        lines.append(f"  {label:<22} {own / 1e6:6.1f}M tokens  {1000 * step:5.0f} ms a step  {seconds / 60:5.1f} min")
    total = len(seeds) * sum(seconds for *_, seconds in runs)
    lines.append(f"{len(runs) * len(seeds)} runs: {total / 60:.0f} GPU minutes; the corpus comes on top")
    return lines
