"""What is compared: the arms, the models, and the sizes of the studies.

Every arm is the same model with another sparsity. `s2` is all layers with a window and, beyond it, one block in
`stride`, another one in each KV head; `hybrid` has its first two layers dense. Two arms are controls: `window` attends
as many pairs as `s2` in a window alone, `one-offset` gives every head and layer the same blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.quality.corpus import CorpusSettings
from examples.quality.tasks import TaskSettings
from s2_megatron.config.load import SparsityConfig

BASELINE = "dense"
ARMS = (BASELINE, "hybrid", "s2", "one-offset", "window")
HYBRID_DENSE_LAYERS = 2


@dataclass(frozen=True)
class Model:
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
class Study:
    """Tokens are training tokens of one run.

    rates: the learning rates of which every arm takes its best, by the validation loss of a run of rate_tokens.
    batch, micro_batch: sequences. evaluations: during the training and at its end; eval_batches: batches of each.
    corpus: the text. tasks: synthetic sequences in its place, and tests of the trained model. flags: Megatron's, beyond
    those of every study. start: where the runs go on from, None where they begin with random weights.
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
    """A dense model that the arms of a study go on from: `study`'s, trained for `tokens`.

    arms: those that go on from it. rate_share: their learning rate as a share of that of the dense run, the same for
    all. from_scratch: arms that are trained from random weights, too, for the FLOPs of the dense run and of the arm's
    continuation together.
    """

    study: Study
    tokens: int
    arms: tuple[str, ...] = ("dense", "hybrid", "s2")
    rate_share: float = 1 / 3
    from_scratch: tuple[str, ...] = ()


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
        ),
        Study(
            "retrieval8k",
            Model(6, 512, 1408, 8, 4, 8192),
            block_size=64,
            local_tokens=512,
            stride=8,
            batch=8,
            micro_batch=8,
            tokens=150_000_000,
            rate_tokens=50_000_000,
            eval_batches=16,
            tasks=TaskSettings(sequences=20_000, pairs=256, chains=32),
        ),
        Study(
            "retrieval32k",
            Model(6, 512, 1408, 8, 4, 32768),
            block_size=64,
            local_tokens=512,
            stride=8,
            batch=4,
            micro_batch=2,
            tokens=300_000_000,
            rate_tokens=100_000_000,
            eval_batches=16,
            tasks=TaskSettings(sequences=10_000, pairs=512, chains=64),
        ),
        # The same in a size for two CPU cores; the numbers say nothing about quality.
        Study(
            "retrieval-tiny",
            Model(3, 48, 96, 4, 2, 128),
            block_size=16,
            local_tokens=32,
            stride=4,
            batch=8,
            micro_batch=8,
            tokens=100 * 1024,
            rate_tokens=20 * 1024,
            rates=(2e-3, 4e-3),
            evaluations=1,
            eval_batches=2,
            position_buckets=4,
            tasks=TaskSettings(1024, pairs=4, needles=2, chains=2, hops=2, tests=16),
        ),
        Study(
            "lm-tiny",
            Model(3, 48, 96, 4, 2, 256),
            block_size=16,
            local_tokens=32,
            stride=4,
            batch=4,
            micro_batch=4,
            tokens=100 * 1024,
            rate_tokens=20 * 1024,
            rates=(2e-3, 4e-3),
            evaluations=2,
            eval_batches=4,
            position_buckets=4,
            corpus=CorpusSettings(512, 1, 3, split="80,20,0", only=("stdlib",)),
        ),
    )
}


def _one_spec(study: Study, layers: str, **spec) -> dict:
    return {"block_size": study.block_size, "layers": layers, "specs": {"S": spec}}


def sparsity(study: Study, arm: str) -> dict:
    """The content of the arm's sparsity YAML."""
    strided = dict(local_tokens=study.local_tokens, stride=study.stride)
    if arm == "dense":
        return {"block_size": study.block_size, "layers": "D"}
    if arm == "hybrid":
        sparse = study.model.num_layers - HYBRID_DENSE_LAYERS
        return _one_spec(study, "D" * HYBRID_DENSE_LAYERS + "S" * sparse, **strided)
    if arm == "s2":
        return _one_spec(study, "S", **strided)
    if arm == "one-offset":
        return _one_spec(study, "S", **strided, head_step=0, layer_step=0)
    assert arm == "window", arm
    return _one_spec(study, "S", local_tokens=equal_window(study))


def pairs(study: Study, content: dict) -> int:
    """Attended pairs of one sequence, all layers and heads."""
    return SparsityConfig.from_data(content).resolve(**study.model.shape).attended_pairs()


def equal_window(study: Study) -> int:
    """The window, in tokens, with which a model of windows alone attends as nearly as many pairs as `s2` as whole
    blocks allow."""
    wanted = pairs(study, sparsity(study, "s2"))
    windows = range(study.local_tokens, study.model.seq_length + 1, study.block_size)
    return min(windows, key=lambda window: abs(pairs(study, _one_spec(study, "S", local_tokens=window)) - wanted))
