"""Whether a plan leaves the first token in sight: what to say where a dense model goes on with one that does not."""

from __future__ import annotations

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.patterns.ranges import Pattern, RangePattern
from s2_megatron.patterns.tokens import attends_whole

MEASURED = (
    "SmolLM2-135M at 4,096 tokens, before any step: with a window of 1024 its loss was 16.8 % (prose) and 26.1 % "
    "(code) above dense, with the first block of 64 tokens in sight 2.2 and 0.7 %"
)


def without_sink(sparsity: ResolvedSparsity) -> str | None:
    """A sentence about the specs of which a query head does not see the first token at the end of a sequence; None
    where all heads do."""
    known: dict[int, int] = {}  # by pattern: of how many heads
    hidden: dict[str, int] = {}
    heads: dict[str, int] = {}
    for layer in sparsity.all_layers:
        pattern = layer.pattern
        if pattern is None:
            continue
        if id(pattern) not in known:
            sees = [_sees_first_token(pattern, head, sparsity.seq_length) for head in range(sparsity.num_heads)]
            known[id(pattern)] = sees.count(False)
        hidden[layer.spec] = hidden.get(layer.spec, 0) + known[id(pattern)]
        heads[layer.spec] = heads.get(layer.spec, 0) + sparsity.num_heads
    if not any(hidden.values()):
        return None
    specs = " and ".join(
        f"{count} of {heads[spec]} query heads in the layers of spec {spec}" for spec, count in hidden.items() if count
    )
    return (
        f"{specs} do not see the first token, on which dense models put the weight that belongs nowhere ({MEASURED}); "
        "use sink_tokens: 64"
    )


def _sees_first_token(pattern: Pattern, head: int, seq_length: int) -> bool:
    """Whether the last query of a sequence does."""
    last = (seq_length - 1) // pattern.block_size
    rule = pattern.heads[head] if isinstance(pattern, RangePattern) else None
    if rule is None or not rule.by_token:
        return bool(pattern.key_blocks(head, last)[0] == 0)
    return rule.sink_tokens > 0 or (rule.window or 0) >= seq_length or bool(attends_whole(rule, last, 0))
