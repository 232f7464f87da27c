"""Where a plan goes against what is known: `inspect` warns of it, `check` notes it; no run is stopped.

Every rule names the place in docs/ that shows it. Some are facts of the patterns; one that was found by a study carries
the number that it found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from s2_megatron.config.sparsity import ResolvedSparsity
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern

LONG, WINDOW, STRIDE = 4096, 512, 8  # tokens, tokens, blocks: of what the study of 8,192 tokens is taken to say


def canonical(head: HeadPattern) -> HeadPattern:
    """The same head with its ranges of one stride joined."""
    return HeadPattern(*head.canonical)


@dataclass(frozen=True)
class Rule:
    """found: a plan to sentences about what in it goes against the rule. source: `page#heading` in docs/. number: what
    a study measured, as the page has it; empty for a fact of the patterns."""

    found: Callable[[ResolvedSparsity], Iterable[str]]
    source: str
    number: str = ""


def unseen_blocks(sparsity: ResolvedSparsity) -> Iterator[str]:
    """Strides of which some residues are attended by no head of any layer."""
    for spec, (_, coverage) in sparsity.spec_coverage().items():
        layers = [layer.pattern for layer in sparsity.all_layers if layer.spec == spec]
        if coverage == 1 or not all(isinstance(pattern, RangePattern) for pattern in layers):
            continue
        heads = {
            (canonical(head).touched_ranges, canonical(head).offset)
            for pattern in {id(each): each for each in layers}.values()
            for head in pattern.heads
        }
        far = [(ranges, offset) for ranges, offset in heads if len(ranges) > 1 and ranges[-1][0] is None]
        before = max((ranges[-2][0] for ranges, _ in far), default=sparsity.n_blocks)
        blocks = np.arange(max(0, sparsity.n_blocks - before))  # beyond all windows, for the last query
        seen = np.zeros(len(blocks), bool)
        for stride, offset in {(ranges[-1][1], offset % ranges[-1][1]) for ranges, offset in far}:
            seen |= (blocks + offset) % stride == 0
        if seen.all() or _is_first(np.flatnonzero(seen)):
            continue
        stride = max(ranges[-1][1] for ranges, _ in far)
        offsets = len({offset % stride for _, offset in far})
        some = f"{offsets} offset{'s' * (offsets > 1)}"
        dense = any(layer.pattern is None for layer in sparsity.all_layers)
        yield (
            f"spec {spec}: {1 - seen.mean():.0%} of the blocks beyond its window are attended by no head of its "
            f"{len(layers)} layers, which have {some} for a stride of {stride}"
            f"{'; only dense layers see them' if dense else ''}; use layer_step: auto or more KV heads"
            f"{f', or a stride of {offsets} or less with head_step: auto' if offsets > 1 else ''}"
        )


def _is_first(blocks: np.ndarray) -> bool:
    """Whether of what lies beyond the window the first block alone is attended, on purpose: models put weight on it
    that belongs nowhere, and to move it from layer to layer would take it away from them."""
    return blocks.tolist() == [0]


def short_reach(sparsity: ResolvedSparsity) -> Iterator[str]:
    """Windows through which, over all layers, the start of the context does not reach its end."""
    reach, first_too, sinks_too = 0, False, False
    for layer in sparsity.layers:
        if not isinstance(layer.pattern, RangePattern):  # dense, or a block mask, whose reach is not known
            return
        ends = []
        for head in layer.pattern.heads:
            ranges = head.touched_ranges
            end = ranges[-1][0]
            sinks_too = sinks_too or head.sink_tokens > 0
            if end is None and len(ranges) > 1:
                end = ranges[-2][0]
                beyond = head.key_blocks(sparsity.n_blocks - 1)
                if not _is_first(beyond[beyond < sparsity.n_blocks - end]):
                    return
                first_too = True
            ends.append(end)
        if None in ends:
            return
        reach += max(ends) - 1
    if reach < sparsity.n_blocks - 1:
        tokens = reach * sparsity.block_size
        first = ", but the first block," if first_too else ", but the sink," if sinks_too else ""
        yield (
            f"the windows of all {len(sparsity.layers)} layers, one after the other, reach {tokens} of "
            f"{sparsity.seq_length} tokens back: what lies before{first} cannot "
            "change a prediction; use a stride, a dense layer, or a larger window, unless all packed documents are "
            "shorter"
        )


def nothing_dense(sparsity: ResolvedSparsity) -> Iterator[str]:
    """Plans of ranges in which no head of any layer attends everything, of long sequences."""
    if _is_sparse(sparsity):
        yield (
            "no layer and no KV head attends everything, so that a model that goes on from a dense one loses what "
            "single heads looked up far back; let s2-megatron choose-dense measure on the dense checkpoint which heads "
            "stay dense, unless all packed documents are short"
        )


def dense_at_the_start(sparsity: ResolvedSparsity) -> Iterator[str]:
    """Plans of long sequences whose dense layers and heads all lie in the first quarter of 8 layers or more."""
    layers = sparsity.layers
    known = all(layer.pattern is None or isinstance(layer.pattern, RangePattern) for layer in layers)
    if sparsity.seq_length < LONG or len(layers) < 8 or not known:
        return
    dense = [at for at, layer in enumerate(layers) if _has_dense_head(sparsity, layer.pattern)]
    if dense and dense[-1] < len(layers) // 4:
        yield (
            f"of {len(layers)} layers the last one that attends everything, or has a KV head that does, is layer "
            f"{dense[-1]} (from 0), and models that went on from dense ones looked things up in later ones; "
            "unless s2-megatron choose-dense chose these heads, let it measure which stay dense, or use layers: SSSD"
        )


def short_window(sparsity: ResolvedSparsity) -> Iterator[str]:
    """Specs of such plans whose heads all have a shorter window than WINDOW, and beyond it a stride of STRIDE or more,
    or nothing: what the study had."""
    if not _is_sparse(sparsity):
        return
    windows: dict[str, int] = {}  # the largest of every spec, in tokens
    by_token = {layer.spec for layer in sparsity.layers if any(head.window for head in layer.pattern.heads)}
    for layer in sparsity.layers:
        for head in layer.pattern.heads:
            (blocks, _), *beyond = canonical(head).touched_ranges
            sees_more = any(stride < STRIDE for _, stride in beyond)  # than what was measured
            tokens = WINDOW if sees_more else head.window or blocks * sparsity.block_size
            windows[layer.spec] = max(tokens, windows.get(layer.spec, tokens))
    for spec, tokens in windows.items():
        if tokens < WINDOW:
            yield (
                f"spec {spec}: its window is {tokens} tokens; models that went on from dense ones with 256 or less "
                f"lost most by their window; use {'window' if spec in by_token else 'local_tokens'}: {WINDOW} or more"
            )


def _is_sparse(sparsity: ResolvedSparsity) -> bool:
    """Whether all layers have ranges, and no head attends everything in a sequence of LONG tokens or more."""
    patterns = {id(layer.pattern): layer.pattern for layer in sparsity.layers}.values()
    if sparsity.seq_length < LONG or not all(isinstance(pattern, RangePattern) for pattern in patterns):
        return False  # short, or dense layers, or block masks
    return not any(_has_dense_head(sparsity, pattern) for pattern in patterns)


def _has_dense_head(sparsity: ResolvedSparsity, pattern: RangePattern | None) -> bool:
    """Whether all heads of a layer attend everything (None), or one of its pattern does."""
    last = sparsity.n_blocks - 1
    return pattern is None or any(len(head.key_blocks(last)) == sparsity.n_blocks for head in pattern.heads)


RULES: tuple[Rule, ...] = (
    Rule(unseen_blocks, "patterns.md#offsets-who-sees-what"),
    Rule(short_reach, "patterns.md#where-a-plan-goes-against-what-is-known"),
    Rule(
        nothing_dense,
        "choose-dense.md#what-it-gained",
        "dense models that went on with windows of 512, strides of 8 and no dense head ended 3.62 to 6.55 % above "
        "dense",
    ),
    Rule(
        dense_at_the_start,
        "patterns.md#dense-layers",
        "with the first two layers dense the loss ended within 0.1 % of that without a dense layer",
    ),
    Rule(
        short_window,
        "patterns.md#where-a-plan-goes-against-what-is-known",
        "windows of 256 and 128 ended 7 to 8 and 11 to 12 % above dense",
    ),
)


def warnings(sparsity: ResolvedSparsity) -> list[str]:
    """One sentence for each thing in the plan that goes against a rule."""
    return [
        f"{text}{f' ({rule.number})' if rule.number else ''}; docs/{rule.source}"
        for rule in RULES
        for text in rule.found(sparsity)
    ]
