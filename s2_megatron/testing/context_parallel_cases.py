"""The cases of context parallelism (a small covering subset of patterns, GQA ratios, batches and layer offsets), their
inputs, and what is compared of them."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from s2_megatron.ops.layout import PackedSequence
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import Pattern, RangePattern, make_range_pattern
from s2_megatron.testing.oracle import random_mask


class Case(NamedTuple):
    pattern: Pattern
    blocks_a_chunk: int = 1  # n_blocks = 2 * ranks * this
    dim: int = 16
    batch: int = 1
    keep_received: bool = False
    value_dim: int | None = None  # where it is not dim
    documents: tuple[float, ...] = ()  # packed into one row: their shares of it, the rest is padding

    @property
    def width(self) -> int:
        """The head dim that travels."""
        return max(self.dim, self.value_dim or 0)


def ranges(ranges, block, heads, groups, **options):
    return make_range_pattern(block_size=block, num_heads=heads, num_kv_heads=groups, ranges=ranges, **options)


block_mask = partial(random_mask, n_blocks=48, density=0.3)
PAPER = ((2, 1), (None, 4))
CASES = {
    "paper": Case(ranges(PAPER, 4, 8, 8)),
    "paper-gqa": Case(ranges(PAPER, 4, 16, 8, layer_index=3), batch=2),
    "paper-mqa": Case(ranges(PAPER, 4, 8, 1), 3),
    "layer-offset": Case(
        ranges(((1, 1), (None, 8)), 4, 8, 8, layer_index=5, layer_step=3, base_offset=1), 2, keep_received=True
    ),
    "window": Case(ranges(((3, 1),), 4, 8, 8), 2),
    "window-of-one": Case(ranges(((1, 1),), 4, 8, 8)),
    "several": Case(ranges(((2, 1), (5, 2), (None, 4)), 4, 16, 8), 2, batch=2),
    "uneven": Case(ranges(((2, 1), (5, 3), (None, 4)), 4, 8, 8), 2),
    "query-slide": Case(ranges(PAPER, 4, 16, 8, slide="query"), 2),
    "dense-heads": Case(ranges(PAPER, 4, 16, 8, dense_heads={"spread": 2}), keep_received=True),
    "dense": Case(RangePattern.dense(4, 8, 8)),
    "value-narrower": Case(ranges(PAPER, 4, 16, 8), 2, 24, 2, value_dim=16),
    "value-wider": Case(ranges(PAPER, 4, 8, 8), 2, 16, keep_received=True, value_dim=24),
    "ranges-per-head": Case(
        RangePattern(
            4, 8, (HeadPattern(((3, 1),)), HeadPattern(((1, 1), (None, 2))), *[HeadPattern(((2, 1), (6, 2)), 1)] * 6)
        ),
        2,
    ),
    # Tokens: a chunk has 4 times so many as blocks. A window in one chunk, over several, by KV head beside a stride;
    # sinks of less and of more than a block, and beyond a chunk.
    "window-in-tokens": Case(ranges((), 4, 16, 8, window=7), 2, batch=2),
    "long-window-and-sink": Case(ranges((), 4, 8, 8, window=13, sink_tokens=6), keep_received=True),
    "windows-by-head-and-sink": Case(
        ranges(((None, 4),), 4, 16, 8, window=[1, 3, 5, 7, 9, 21, 4, 8], sink_tokens=3, dense_heads=[7]), 2
    ),
    "sink-beside-blocks": Case(ranges(((2, 1),), 4, 8, 8, sink_tokens=11)),
    "mask-shared": Case(block_mask(4, 16, 8, 1), 2),
    "mask-kv-heads": Case(block_mask(4, 16, 8, 8), 3, batch=2),
    "mask-query-heads": Case(block_mask(4, 16, 8, 16), keep_received=True),
    "mask-without-diagonal": Case(block_mask(4, 8, 8, 8, diagonal=False), 2),
}
# Two tensor-parallel slices: a rank's heads keep the offsets of the whole model.
WHOLE = ranges(((1, 1), (None, 16)), 4, 16, 16)
CASES |= {f"tensor-parallel-{rank}": Case(WHOLE.tensor_parallel_slice(rank, 2), 2) for rank in range(2)}

NAMES = ("out", "dq", "dk", "dv")  # what `differentiate` returns


def inputs(pattern, tokens, dim, batch, dtype, packed=False, value_dim=None):
    """query, key, value, grad_out of the whole sequence, query to value as strided pieces of one tensor."""
    if value_dim is not None:
        whole = inputs(pattern, tokens, max(dim, value_dim), batch, dtype, packed)
        return [tensor[..., :size] for tensor, size in zip(whole, (dim, dim, value_dim, value_dim))]
    generator = torch.Generator().manual_seed(1)
    heads, groups = pattern.num_heads, pattern.num_kv_heads
    shape = (tokens,) if packed else (tokens, batch)
    fused = torch.randn(*shape, heads + 2 * groups, dim, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(*shape, heads, dim, generator=generator, dtype=torch.float64).to(dtype)
    return [*fused.split([heads, groups, groups], -2), grad]


def differentiate(tensors, function, *arguments, **options):
    """[out, dq, dk, dv], detached, of function(query, key, value, *arguments, **options)."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    out = function(*leaves, *arguments, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def own_rows(tensor, rank, size):
    """The rows of a tensor of the whole sequence that a rank holds, in Megatron's zigzag order."""
    chunks = tensor.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def documents_of(case: Case, size: int, device) -> PackedSequence | None:
    """The packed documents of a case, None where it has none."""
    if not case.documents:
        return None
    tokens = tokens_of(case, size)
    lengths = [int(share * tokens) for share in case.documents]
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return PackedSequence(borders, max(lengths))


def tokens_of(case: Case, size: int) -> int:
    return 2 * size * case.blocks_a_chunk * case.pattern.block_size
