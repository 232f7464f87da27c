"""The studies whose runs go on from a dense model: at the same length, and at four times its length."""

from __future__ import annotations

from dataclasses import replace

from examples.quality.arms import chosen_arms, chosen_question
from examples.quality.studies import BASELINE, STUDIES, Model, Start, Study, pairs, sparsity
from examples.quality.tasks import VOCABULARY, TaskSettings

# Megatron's RoPE scaling of Llama 3: what turns less than once in 8,192 tokens, turns a fourth as fast. The 8,192 are
# fixed in Megatron.
ROPE_SCALING = ("--use-rope-scaling", "--rope-scaling-factor=4")


def _longer(study: Study, times: int) -> Model:
    return replace(study.model, seq_length=times * study.model.seq_length)


ARMS = ("dense", "dense-fourth", "s2")


def _continued(
    name: str, study: Study, start_tokens: int, tokens: int, *, arms=None, chosen=0, from_scratch=(), **changed
) -> Study:
    """Goes on from the study's dense model, as these of its arms (None: as all). chosen: as chosen_arms."""
    start = Start(study, start_tokens, from_scratch=tuple(from_scratch))
    trained = tuple(arm for arm in study.arms if arms is None or arm.name in arms)
    measured = chosen_arms(chosen, study.local_tokens, study.stride) if chosen else ()
    questions = (*study.questions, chosen_question(measured)) if study.questions and arms is None else ()
    changed |= dict(arms=(*trained, *measured), questions=questions)
    return replace(study, name=name, tokens=tokens, start=start, **changed)


LM, RETRIEVAL, RULES = (STUDIES[name] for name in ("lm8k", "retrieval8k", "rules8k"))
LM_TINY, RETRIEVAL_TINY, RULES_TINY = (STUDIES[name] for name in ("lm-tiny", "retrieval-tiny", "rules-tiny"))

CONTINUATIONS = {
    study.name: study
    for study in (
        _continued("from-dense8k", LM, 80_000_000, 40_000_000, chosen=12, from_scratch=("dense-fourth", "s2")),
        # In from-dense8k the gap of `s2` has opened by 25M tokens; these steps are half as long.
        _continued("from-dense-rules8k", RULES, 100_000_000, 30_000_000, chosen=16, recall=None),
        _continued(
            "extend32k",
            LM,
            80_000_000,
            40_000_000,
            arms=ARMS,
            chosen=12,  # at the length of the dense model
            model=_longer(LM, 4),
            batch=2,
            micro_batch=2,
            flags=ROPE_SCALING,
        ),
        _continued(
            "extend-retrieval32k",
            RETRIEVAL,
            150_000_000,
            60_000_000,
            arms=ARMS,
            model=_longer(RETRIEVAL, 4),
            batch=4,
            micro_batch=2,
            flags=ROPE_SCALING,
            tasks=TaskSettings(sequences=2_000, pairs=512, chains=64),
        ),
        # What looks up keys is learnt from text, and from these tasks alone it was not.
        _continued(
            "from-dense-recall8k",
            RULES,
            100_000_000,
            30_000_000,
            arms=(*ARMS, "dense-heads"),
            chosen=16,
            baseline=BASELINE,
            recall=None,
            eval_batches=16,
            tasks=TaskSettings(sequences=4_000, pairs=256, kinds=("recall", "needle")),
        ),
        # In a size for two CPU cores; the numbers say nothing about quality.
        _continued("from-dense-tiny", LM_TINY, 40 * 1024, 24 * 1024, chosen=3, from_scratch=("s2",)),
        _continued("from-dense-rules-tiny", RULES_TINY, 40 * 1024, 24 * 1024, chosen=8, recall=None),
        _continued(
            "from-dense-recall-tiny",
            replace(RULES_TINY, corpus=replace(RULES_TINY.corpus, vocabulary=VOCABULARY)),
            40 * 1024,
            24 * 1024,
            arms=ARMS,
            chosen=8,
            baseline=BASELINE,
            recall=None,
            eval_batches=2,
            tasks=TaskSettings(256, pairs=8, tests=16, kinds=("recall", "needle")),
        ),
        _continued(
            "extend-retrieval-tiny",
            RETRIEVAL_TINY,
            40 * 1024,
            24 * 1024,
            arms=("dense", "hybrid", "s2"),  # of three layers
            model=_longer(RETRIEVAL_TINY, 4),
            batch=2,
            micro_batch=2,
            flags=ROPE_SCALING,
            tasks=TaskSettings(256, pairs=8, needles=2, chains=2, hops=2, tests=16),
        ),
    )
}

ALL = STUDIES | CONTINUATIONS


def token_flops(study: Study, arm: str, vocabulary: int) -> float:
    """FLOPs of one training token, forward and backward, of attended pairs, as Megatron counts them (s2_megatron's
    megatron/flops.py): 6 for each weight of a matrix, 12 for each pair and number of a head."""
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
