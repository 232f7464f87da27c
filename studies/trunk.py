"""Studies from random weights: one trunk of short sequences, in which all arms compute the same, and branches of long
ones. from_random_weights.md has the plan, made before any run.

    python -m studies.trunk branch8k        whether the trunks are past the steep fall: the gate
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from examples.quickstart.launch import Model
from studies.arms import BASELINE, SHARDED, Arm
from studies.corpus import CorpusSettings
from studies.data import Run, read_study, select
from studies.studies import Start, Study

LOSS, SLOPE = 2.3, 0.002  # nats, and nats a million tokens: the gate
MEASURED_SHARE = 0.25  # of the trunk's tokens, its end


def branch_arms(window: int, sink: int, local: int, stride: int) -> tuple[Arm, ...]:
    """window: with the sink as many pairs as S2 of a window of `local` and this stride, at the study's length."""
    alone, s2 = dict(window=window, sink_tokens=sink), dict(local_tokens=local, stride=stride)

    def arm(name: str, spec: dict, **more) -> Arm:
        return Arm(name, spec=spec, whole_spec=True, **more)

    return (
        Arm(BASELINE, dense="all"),
        arm("fourth-w-sink", alone, dense="every fourth"),
        arm("fourth-s2", s2, dense="every fourth"),
        arm(SHARDED, s2),
        arm("w-sink", alone),
        arm("w-then-dense", {}, dense="all", before="w-sink"),
    )


def _branches(name: str, trunk: Study, tokens: int, length: int, arms: tuple[Arm, ...], **more) -> Study:
    """Branches of `length` tokens a sequence, with as many tokens a step as their trunk."""
    longer = length // trunk.model.seq_length
    return replace(
        trunk,
        name=name,
        model=replace(trunk.model, seq_length=length),
        batch=trunk.batch // longer,
        micro_batch=trunk.micro_batch // longer,
        tokens=tokens,
        evaluations=2,
        flags=("--qk-layernorm",),
        start=Start(trunk, trunk.tokens, text_share=0.6, rate_share=1.0, switched=False),
        arms=arms,
        decay="WSD",
        text_tests=("passages",),
        **more,
    )


TRUNK = Study(
    "trunk512",
    Model(8, 512, 1408, 8, 8, 512),
    block_size=64,
    local_tokens=512,
    stride=8,
    batch=256,
    micro_batch=64,
    tokens=200_000_000,
    rate_tokens=100_000_000,
    rates=(7.5e-4, 1.5e-3, 3e-3, 6e-3),
    evaluations=2,
    flags=("--qk-layernorm", "--lr-warmup-iters=300"),
    arms=(Arm(BASELINE, dense="all"),),
    own_rates=False,
    decay="constant",
)
TRUNK_TINY = replace(
    TRUNK,
    name="trunk-tiny",
    model=Model(4, 48, 96, 4, 4, 64),
    block_size=16,
    local_tokens=64,
    stride=4,
    batch=16,
    micro_batch=16,
    tokens=40 * 1024,
    rate_tokens=20 * 1024,
    rates=(2e-3, 4e-3),
    evaluations=1,
    eval_batches=4,
    position_buckets=4,
    flags=("--qk-layernorm",),
    corpus=CorpusSettings(512, 1, 3, split="80,20,0", only=("stdlib",)),
)
TRUNKS = {
    study.name: study
    for study in (
        _branches("branch8k", TRUNK, 100_000_000, 8192, branch_arms(window=916, sink=64, local=512, stride=8)),
        _branches("branch-tiny", TRUNK_TINY, 104 * 1024, 256, branch_arms(window=67, sink=16, local=64, stride=4)),
    )
}


def fall(run: Run, share: float = MEASURED_SHARE) -> tuple[float, float]:
    """(the loss, in nats, at the end of a run; by how much it falls a million tokens), of a line through the training
    losses of the last `share` of its tokens."""
    tokens = np.asarray(run.train["tokens"], float) / 1e6
    late = tokens > (1 - share) * tokens[-1]
    slope, first = np.polyfit(tokens[late], np.asarray(run.train["loss"])[late], 1)
    return first + slope * tokens[-1], -slope


def gate(runs: list[Run]) -> list[str]:
    """A line for each trunk."""
    found = []
    for run in runs:
        loss, falls = fall(run)
        word = "open" if loss < LOSS and falls < SLOPE else "closed"
        found.append(
            f"seed {run.seed}: {loss:.3f} nats (below {LOSS}), falls by {falls:.4f} nats a million tokens (below "
            f"{SLOPE}): {word}"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.trunk", description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=TRUNKS)
    parsed = parser.parse_args()
    runs = select(read_study(parsed.study), role="start")
    print("\n".join(gate(runs)) or f"{parsed.study}: no trunk has been trained yet")


if __name__ == "__main__":
    main()
