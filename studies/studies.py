"""What is compared: the models, and the sizes of the studies. arms.py has the arms.

Every arm is the same model with another sparsity. `s2` is all layers with a window and, beyond it, one block in
`stride`, another one in each KV head; `hybrid` has its first two layers dense. Two arms are controls: `window` attends
as many pairs as `s2` in a window alone, `one-offset` gives every head and layer the same blocks. `rules8k` has more of
them, around one `s2`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.quickstart.launch import Model
from s2_megatron.config.load import SparsityConfig
from studies.arms import (
    BASELINE,
    BY_QUERY_HEAD,
    CONTROLLED,
    PLACEMENTS,
    SHARDED,
    WITH_HYBRIDS,
    Arm,
    long_arms,
    rules_arms,
    stride_arm,
)
from studies.corpus import CorpusSettings
from studies.tasks import TaskSettings


@dataclass(frozen=True)
class Study:
    """Tokens are training tokens of one run.

    rates: the learning rates of which every arm takes its best, by the validation loss of a run of rate_tokens.
    batch, micro_batch: sequences. evaluations: during the training and at its end; eval_batches: batches of each.
    corpus: the text. tasks: of a study that goes on from a dense model of text, synthetic sequences to go on over, and
    tests of the trained model. flags: Megatron's, beyond those of every study. start: where the runs go on from, None
    where they begin with random weights.

    arms: what is trained; baseline: what the others are compared with. own_rates: each arm takes its own best rate;
    otherwise all take the baseline's. measured_beside: the arm beside whose sparse heads dense ones are measured.
    decay: of the learning rate. text_tests: modules that test a trained model of text.

    imported: a public model's name, whose weights the runs begin with: <runs>/imported/<name>/megatron, which import-hf
    made. tied: its output layer is its embedding.
    """

    name: str
    model: Model
    block_size: int
    local_tokens: int
    stride: int
    batch: int
    micro_batch: int
    tokens: int
    rate_tokens: int
    rates: tuple[float, ...] = (7.5e-4, 1.5e-3, 3e-3)
    evaluations: int = 8
    eval_batches: int = 32
    position_buckets: int = 16
    corpus: CorpusSettings = field(default_factory=CorpusSettings)
    tasks: TaskSettings | None = None
    flags: tuple[str, ...] = ()
    start: Start | None = None
    arms: tuple[Arm, ...] = CONTROLLED
    baseline: str = BASELINE
    own_rates: bool = True
    measured_beside: str = SHARDED
    decay: str = "cosine"
    text_tests: tuple[str, ...] = ("copies", "needles")
    imported: str = ""
    tied: bool = False

    @property
    def arm_names(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.arms)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def step_tokens(self) -> int:
        return self.batch * self.model.seq_length

    def iterations(self, tokens: float) -> int:
        """Steps of a run, at least 20. Raises ValueError for fewer."""
        steps = int(tokens // self.step_tokens)
        if steps < 20:
            raise ValueError(
                f"tokens {tokens:g}: {steps} steps of {self.step_tokens} tokens; expected 20 steps or more; use "
                f"{20 * self.step_tokens} or more"
            )
        return steps


@dataclass(frozen=True)
class Start:
    """A dense model that the arms of a study go on from: `study`'s, trained for `tokens`. Studies with the same one
    share its runs.

    text_share: the share of the training text that it reads; what goes on reads the rest. rate_share: the learning rate
    of all that go on, as a share of that of the dense run. from_scratch: arms that are trained from random weights,
    too, for the FLOPs of the dense run and of the arm's continuation together. switched: every arm is evaluated before
    any step, too.
    """

    study: Study
    tokens: int
    text_share: float
    rate_share: float = 1 / 3
    from_scratch: tuple[str, ...] = ()
    switched: bool = True


# The shape of the rules studies: as many KV heads as the stride of `s2`, so that the heads of one layer cover the
# context, and a quarter of the heads dense in every layer is as many pairs as a quarter of the layers dense.
_RULES = dict(window=512, stride=8, dense_heads=2)
_RULES_TINY = dict(window=64, stride=4, dense_heads=2)


def _rules(settings: dict) -> dict:
    """What a rules study has beyond the others."""
    return dict(
        local_tokens=settings["window"],
        stride=settings["stride"],
        arms=rules_arms(**settings),
        baseline=SHARDED,
        own_rates=False,
    )


# Of the studies in a size for two CPU cores.
_TINY = dict(block_size=16, tokens=100 * 1024, rate_tokens=20 * 1024, rates=(2e-3, 4e-3), position_buckets=4)


STUDIES = {
    study.name: study
    for study in (
        Study(
            "lm8k",
            Model(12, 768, 2048, 12, 4, 8192),
            block_size=64,
            local_tokens=512,
            stride=8,
            batch=8,
            micro_batch=8,
            tokens=150_000_000,
            rate_tokens=10_000_000,
            # The four KV heads of a layer cover half of a stride of 8. Two arms cover all of theirs: a stride of 4, and
            # offsets by query head (12 of them).
            arms=(*WITH_HYBRIDS, stride_arm(4), BY_QUERY_HEAD),
        ),
        Study(
            "lm32k",
            Model(12, 768, 2048, 12, 4, 32768),
            block_size=64,
            local_tokens=512,
            stride=8,
            batch=2,
            micro_batch=2,
            tokens=100_000_000,
            rate_tokens=10_000_000,
            evaluations=4,
            arms=long_arms(stride=8),
            own_rates=False,
        ),
        Study(
            "rules8k",
            Model(8, 512, 1408, 8, 8, 8192),
            block_size=64,
            batch=4,  # in lm8k the gap to dense opens between steps 630 and 1150: it takes steps
            micro_batch=4,
            tokens=100_000_000,
            rate_tokens=20_000_000,
            evaluations=2,
            **_rules(_RULES),
        ),
        # The same in a size for two CPU cores; the numbers say nothing about quality.
        Study(
            "rules-tiny",
            Model(4, 48, 96, 4, 4, 256),
            batch=4,
            micro_batch=4,
            evaluations=1,
            eval_batches=4,
            corpus=CorpusSettings(512, 1, 3, split="80,20,0", only=("stdlib",)),
            **_rules(_RULES_TINY),
            **_TINY,
        ),
        Study(
            "lm-tiny",
            Model(3, 48, 96, 4, 2, 256),
            local_tokens=32,
            stride=4,
            batch=4,
            micro_batch=4,
            evaluations=2,
            eval_batches=4,
            corpus=CorpusSettings(512, 1, 3, split="80,20,0", only=("stdlib",)),
            **_TINY,
        ),
    )
}


def sparsity(study: Study, name: str) -> dict:
    """The content of the YAML of the arm of this name. Of one whose heads are chosen in every seed: one with as many
    dense heads, hence of nearly as many pairs, dealt to the layers."""
    arm, plan = study.arm(name), plan_before_choice(study, name)
    if not arm.chosen:
        return plan
    count, spec = study.model.num_layers, plan["specs"]["S"]
    if arm.by_layer:
        return plan | {"layers": ["D"] * arm.chosen + ["S"] * (count - arm.chosen)}
    each, more = divmod(arm.chosen, count)
    specs = {"S": spec | ({"dense_heads": {"spread": each}} if each else {})}
    specs["S1"] = spec | {"dense_heads": {"spread": each + 1}}
    return plan | {"layers": ["S1"] * more + ["S"] * (count - more), "specs": specs}


def plan_before_choice(study: Study, name: str) -> dict:
    """The content of the arm's YAML without the dense heads that are chosen in every seed."""
    arm, count = study.arm(name), study.model.num_layers
    dense = set(PLACEMENTS[arm.dense](count))
    if len(dense) == count:
        return {"block_size": study.block_size, "layers": "D"}
    spec = {} if arm.whole_spec else dict(local_tokens=study.local_tokens, stride=study.stride)
    spec |= arm.spec
    if arm.window_alone:
        spec = dict(local_tokens=equal_window(study))
    layers = "".join("D" if layer in dense else "S" for layer in range(count)) if dense else "S"
    return {"block_size": study.block_size, "layers": layers, "specs": {"S": spec}}


def pairs(study: Study, content: dict) -> int:
    """Attended pairs of one sequence, all layers and heads."""
    return SparsityConfig.from_data(content).resolve(**study.model.shape).attended_pairs()


def density(study: Study, name: str) -> float:
    """The share of the causal pairs that the arm of this name attends."""
    return SparsityConfig.from_data(sparsity(study, name)).resolve(**study.model.shape).density()


def equal_window(study: Study) -> int:
    """The window, in tokens, with which a model of windows alone attends as nearly as many pairs as `s2` as whole
    blocks allow."""

    def pairs_of(window: int) -> int:
        spec = dict(local_tokens=window)
        return pairs(study, {"block_size": study.block_size, "layers": "S", "specs": {"S": spec}})

    wanted = pairs(study, sparsity(study, SHARDED))
    windows = range(study.local_tokens, study.model.seq_length + 1, study.block_size)
    return min(windows, key=lambda window: abs(pairs_of(window) - wanted))
