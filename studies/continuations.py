"""The studies whose runs go on from a dense model: at the same length, and at four times its length."""

from __future__ import annotations

from dataclasses import replace

from studies.arms import WINDOW, chosen_arms
from studies.public import PUBLIC
from studies.studies import BASELINE, STUDIES, Start, Study, pairs, sparsity
from studies.tasks import VOCABULARY, TaskSettings
from studies.trunk import TRUNKS

# Megatron's RoPE scaling of Llama 3: what turns less than once in 8,192 tokens, turns an eighth as fast. The 8,192 are
# fixed in Megatron. The first runs were given 4, which Megatron did not hand on: they computed 8, too.
ROPE_SCALING = ("--use-rope-scaling", "--rope-scaling-factor=8")

ARMS = ("dense", "dense-fourth", "s2")


def _continued(
    name: str, start: Start, tokens: int, *, arms=None, more=(), chosen=0, tasks=None, from_scratch=(), **changed
) -> Study:
    """Goes on from the dense model of `start` as these arms of its study (None: as all) and `more`. chosen: as
    chosen_arms."""
    study = start.study
    trained = tuple(arm for arm in study.arms if arms is None or arm.name in arms)
    measured = chosen_arms(chosen, study.local_tokens, study.stride) if chosen else ()
    changed |= dict(arms=(*trained, *more, *measured), baseline=BASELINE, tasks=tasks)
    return replace(study, name=name, tokens=tokens, start=replace(start, from_scratch=tuple(from_scratch)), **changed)


def _longer(start: Start, batch: int) -> dict:
    """What a study at four times the length of the dense model has beyond it. batch: sequences."""
    model = replace(start.study.model, seq_length=4 * start.study.model.seq_length)
    return dict(model=model, batch=batch, micro_batch=batch, flags=ROPE_SCALING)


LM, RULES, LM_TINY, RULES_TINY = (STUDIES[name] for name in ("lm8k", "rules8k", "lm-tiny", "rules-tiny"))
LM_START = Start(LM, 80_000_000, text_share=2 / 3)
RULES_START = Start(RULES, 100_000_000, text_share=5 / 6)
LM_TINY_START = Start(LM_TINY, 40 * 1024, text_share=5 / 8)
RULES_TINY_START = Start(RULES_TINY, 40 * 1024, text_share=5 / 8)
# Its vocabulary is that of the tasks.
TASKS_TINY_START = replace(
    RULES_TINY_START, study=replace(RULES_TINY, corpus=replace(RULES_TINY.corpus, vocabulary=VOCABULARY))
)

CONTINUATIONS = {
    study.name: study
    for study in (
        _continued("from-dense8k", LM_START, 40_000_000, chosen=12, from_scratch=("dense-fourth", "s2")),
        # In from-dense8k the gap of `s2` has opened by 25M tokens; these steps are half as long.
        _continued("from-dense-rules8k", RULES_START, 20_000_000, chosen=16),
        # The heads of the chosen arms are chosen at the length of the dense model.
        _continued("extend32k", LM_START, 40_000_000, arms=ARMS, more=(WINDOW,), chosen=12, **_longer(LM_START, 2)),
        _continued(
            "extend-rules32k",
            RULES_START,
            20_000_000,
            arms=(*ARMS, "stride-16"),
            more=(WINDOW,),
            chosen=16,
            **_longer(RULES_START, 1),
        ),
        # What looks up keys is learnt from text, and from these tasks alone it was not.
        _continued(
            "from-dense-recall8k",
            RULES_START,
            40_000_000,
            more=(WINDOW,),
            chosen=16,
            eval_batches=16,
            tasks=TaskSettings(sequences=5_500, pairs=256, chains=32),
        ),
        _continued(
            "extend-recall32k",
            RULES_START,
            40_000_000,
            arms=(*ARMS, "dense-heads"),
            more=(WINDOW,),
            chosen=16,
            eval_batches=16,
            tasks=TaskSettings(sequences=1_400, pairs=1024, chains=128),
            **_longer(RULES_START, 1),
        ),
        # In a size for two CPU cores; the numbers say nothing about quality.
        _continued("from-dense-tiny", LM_TINY_START, 24 * 1024, chosen=3, from_scratch=("s2",)),
        _continued("from-dense-rules-tiny", RULES_TINY_START, 24 * 1024, chosen=8),
        _continued(
            "extend-recall-tiny",
            TASKS_TINY_START,
            24 * 1024,
            arms=ARMS,
            chosen=8,
            eval_batches=2,
            tasks=TaskSettings(64, pairs=8, chains=2, hops=2, tests=16),
            **_longer(TASKS_TINY_START, 1),
        ),
    )
}

ALL = STUDIES | CONTINUATIONS | PUBLIC | TRUNKS


def token_flops(study: Study, arm: str, vocabulary: int) -> float:
    """FLOPs of one training token, forward and backward, of attended pairs, as Megatron counts them (s2_megatron's
    megatron/records/flops.py): 6 for each weight of a matrix, 12 for each pair and number of a head."""
    model = study.model
    head_dim = model.hidden_size // model.num_heads
    projections = 2 * model.hidden_size + 2 * model.num_kv_heads * head_dim  # of query and output, key and value
    layer = model.hidden_size * (projections + 3 * model.ffn_hidden_size)
    linear = 6.0 * (model.num_layers * layer + model.hidden_size * vocabulary)
    return linear + 12.0 * head_dim * pairs(study, sparsity(study, arm)) / model.seq_length


def tokens_from_scratch(study: Study, arm: str, start_tokens: int, tokens: int, vocabulary: int) -> int:
    """Tokens of a run from random weights that takes the FLOPs of the dense run and of the arm's continuation."""
    before = start_tokens * token_flops(study.start.study, BASELINE, vocabulary)
    own = token_flops(study, arm, vocabulary)
    return round((before + tokens * own) / own)
