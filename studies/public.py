"""The study of a public model, SmolLM2-135M, which goes on sparse: public_model.md has its plan, made before any run.

`heal` trains the imported model on, dense, at a constant rate; every arm goes on from there. The names of arms: `w` a
window of 1024 tokens, `s2` a window of 512 and one block in 8 beyond it, `sink` with the first 64 tokens, `<n>h` with n
measured KV heads dense.
"""

from __future__ import annotations

from dataclasses import replace

from examples.quickstart.launch import Model
from studies.arms import BASELINE, SHARDED, Arm
from studies.corpus import CorpusSettings
from studies.studies import Start, Study

BESIDE = "w-sink"  # the arm beside whose heads all dense ones are measured


def public_arms(
    window: int, narrow: int, s2: int, stride: int, sink: int, counts: tuple[int, int, int, int], layers: int
) -> tuple[Arm, ...]:
    """window: of most arms, narrow: of one, s2: of S2; in tokens, as the sink. counts: of measured heads, the third
    one that of all other arms. layers: how many are dense where they are measured."""
    heads, sinks = counts[2], dict(sink_tokens=sink)
    alone, strided = dict(window=window), dict(window=s2, stride=stride)

    def arm(name: str, spec: dict, **more) -> Arm:
        return Arm(name, spec=spec, whole_spec=True, **{"ranked_on": "code" if "chosen" in more else ""} | more)

    return (
        Arm(BASELINE, dense="all"),
        arm(f"{heads}h-w-sink", alone | sinks, chosen=heads),
        arm(BESIDE, alone | sinks),
        arm("w", alone),
        *(arm(f"{count}h-w-sink", alone | sinks, chosen=count) for count in counts if count != heads),
        arm(f"{heads}h-w-offset", alone, chosen=heads, offset=True),
        arm(f"{heads}h-w", alone, chosen=heads),
        arm(f"{heads}h-copies", alone | sinks, chosen=heads, ranked_on="copies"),
        arm(f"{heads}h-prose", alone | sinks, chosen=heads, ranked_on="prose"),
        arm("layers-w-sink", alone | sinks, chosen=layers, by_layer=True),
        arm("fourth-w-sink", alone | sinks, dense="every fourth"),
        arm(SHARDED, strided),
        arm("s2-sink", strided | sinks),
        arm(f"{heads}h-s2-sink", strided | sinks, chosen=heads),
        arm(f"{heads}h-narrow-sink", dict(window=narrow) | sinks, chosen=heads),
        arm(f"{heads}h-wide-sink", dict(window=2 * window) | sinks, chosen=heads),
        *(arm(f"{count}h-w-sink-few", alone | sinks, chosen=count, ranked_on="few") for count in (heads, counts[1])),
    )


HEAL = Study(
    "heal-smollm2",
    Model(30, 576, 1536, 9, 3, 8192),
    block_size=64,
    local_tokens=512,
    stride=8,
    batch=8,
    micro_batch=4,
    tokens=30_000_000,
    rate_tokens=4_000_000,
    rates=(1e-4, 3e-4, 1e-3),
    evaluations=1,
    corpus=CorpusSettings(vocabulary=49152, tokenizer="smollm2"),
    arms=(Arm(BASELINE, dense="all"),),
    own_rates=False,
    decay="constant",
    imported="smollm2",
    tied=True,
    # NullTokenizer counts an end of text that it does not have.
    flags=("--rotary-base=100000", "--norm-epsilon=1e-05", "--vocab-size=49151", "--padded-vocab-size=49152"),
)

_TINY = "tiny-llama"  # of the tests
HEAL_TINY = replace(
    HEAL,
    name="heal-tiny",
    model=Model(4, 48, 96, 4, 2, 256),
    block_size=16,
    local_tokens=32,
    stride=4,
    batch=4,
    micro_batch=4,
    tokens=20 * 1024,
    rate_tokens=20 * 1024,
    rates=(1e-3, 2e-3),
    eval_batches=2,
    position_buckets=4,
    corpus=CorpusSettings(512, megabytes=3, split="80,20,0", only=("stdlib",), tokenizer=_TINY),
    imported=_TINY,
    flags=("--rotary-base=100000", "--norm-epsilon=1e-05", "--vocab-size=511", "--padded-vocab-size=512"),
)


def _public(name: str, heal: Study, text_share: float, tokens: int, arms: tuple[Arm, ...], **changed) -> Study:
    start = Start(heal, heal.tokens, text_share, rate_share=1.0, switched=False)
    settings = dict(arms=arms, decay="cosine", imported="", measured_beside=BESIDE, text_tests=("passages",))
    return replace(heal, name=name, tokens=tokens, evaluations=2, start=start, **settings | changed)


ARMS = public_arms(window=1024, narrow=256, s2=512, stride=8, sink=64, counts=(4, 8, 16, 24), layers=7)
SMOLLM2 = _public("smollm2-8k", HEAL, 0.4, 24_000_000, ARMS)
PUBLIC = {
    study.name: study
    for study in (
        SMOLLM2,
        # Llama 3's scaling of RoPE, as in the other studies at 32K.
        replace(
            SMOLLM2,
            name="smollm2-32k",
            model=replace(HEAL.model, seq_length=4 * HEAL.model.seq_length),
            batch=2,
            micro_batch=1,
            tokens=20_000_000,
            flags=(*HEAL.flags, "--use-rope-scaling", "--rope-scaling-factor=8"),
        ),
        _public(
            "smollm2-tiny",
            HEAL_TINY,
            0.5,
            20 * 1024,
            public_arms(window=32, narrow=16, s2=16, stride=4, sink=16, counts=(1, 2, 3, 4), layers=1),
        ),
    )
}
