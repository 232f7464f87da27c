"""Part `packed` of worker.py: packed documents over several ranks, by every exchange and both cuts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from s2_megatron.context_parallel.attention import ContextParallel
from s2_megatron.context_parallel.dense import cut_order
from s2_megatron.context_parallel.document_plan import plan_documents, reaches, slot_bytes
from s2_megatron.context_parallel.exchange import count_traffic
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import PackedSequence, build_layout
from s2_megatron.ops.recompute import keep_outputs, layer_output
from s2_megatron.patterns.ranges import Pattern
from s2_megatron.testing.context_parallel_cases import NAMES, inputs, ranges
from tests.context_parallel.watching import arrives_late, difference, handed_over


class PackedCase(NamedTuple):
    """lengths: of the documents; a row is filled up for the cut, with the last document or, `padded`, without one (a
    document that is cut by itself is then a token shorter than its place)."""

    pattern: Pattern
    lengths: list[int]
    cut: str = "sequence"
    padded: bool = False
    value_dim: int | None = None
    keep_received: bool = False
    offset: bool = False
    comm_types: tuple[str, ...] = ("sparse",)
    backend: str = "reference"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.backend == "reference" else torch.float32


def cases(size: int) -> dict[str, PackedCase]:
    unit, whole = 2 * size, ("all_gather", "a2a")
    stripes = ranges(((2, 1), (None, 4)), 4, 16, 8, layer_index=1)
    by_head = ranges((), 4, 16, 8, window=[7, 13, 1, 30, 9, 2, 64, 5], sink_tokens=6)
    few = ranges((), 8, 4, 2, window=[7, 40], sink_tokens=6)
    long = ranges((), 8, 4, 2, window=10 * size + 1, sink_tokens=9)
    blocks = ranges(((3, 1),), 4, 4, 2, sink_tokens=6)
    row, of_unit = [37, 1, 50, 24, 16], [unit * count for count in (3, 1, 5, 2)]
    return {
        "tokens": PackedCase(by_head, row, comm_types=("sparse", *whole)),
        "stripes": PackedCase(stripes, row, comm_types=whole),
        "stripes, cut by themselves": PackedCase(stripes, of_unit, "document", value_dim=12, comm_types=whole),
        "one": PackedCase(stripes, [16 * size], value_dim=5, comm_types=whole),
        "padded": PackedCase(few, [29, 3, 1, 40, 2, 33], padded=True, offset=True),
        "long windows": PackedCase(long, [3 * unit - 2, 7 * unit + 1], keep_received=True, offset=True),
        "chunk borders": PackedCase(long, [4, 8, (unit - 3) * 4], value_dim=5),
        "sink far away": PackedCase(ranges((), 8, 2, 2, window=5, sink_tokens=3), [16 * size]),
        "blocks": PackedCase(blocks, [50, 5, 29, 60, 1]),
        "blocks, cut by themselves": PackedCase(blocks, [5 * unit, unit, 9 * unit], "document", padded=True),
        "cut by themselves": PackedCase(few, of_unit, "document", padded=True, value_dim=12, keep_received=True),
    }


KERNELS = {
    "kernels": PackedCase(
        ranges((), 16, 4, 2, window=21, sink_tokens=3), [50, 30, 40], padded=True, offset=True, backend="triton"
    )
}


def documents_of(case: PackedCase, size: int) -> tuple[PackedSequence, int, torch.Tensor]:
    """(documents, tokens of the row, where each token lies on the ranks)"""
    lengths, unit = list(case.lengths), 2 * size
    tokens = -(-sum(lengths) // unit) * unit + (unit if case.padded else 0)
    if not case.padded:
        lengths[-1] += tokens - sum(lengths)
    borders = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    cut_at = borders if case.cut == "document" else torch.tensor([0, tokens], dtype=torch.int32)
    documents = PackedSequence(borders, tokens)
    if case.padded and case.cut == "document":
        documents = PackedSequence(borders - torch.arange(len(borders), dtype=torch.int32), tokens, borders)
    return documents, tokens, cut_order(cut_at, tokens, size)


def packed(group):
    """{case/comm type: differences, and for `sparse` what else must be true}"""
    return _results(cases(group.size()), group)


def packed_kernels(group):
    """The same of the kernels, through the interpreter."""
    return _results(KERNELS, group)


def _results(cases: dict[str, PackedCase], group) -> dict[str, dict]:
    results = {}
    for name, case in cases.items():
        documents, tokens, order = documents_of(case, group.size())
        whole = inputs(case.pattern, tokens, 8, 1, case.dtype, packed=True, value_dim=case.value_dim)
        heads = case.pattern.num_heads
        offset = torch.linspace(-2, 3, heads, dtype=torch.float64) if case.offset else None
        options = dict(softmax_scale=0.4, packed=documents)
        truth = _run(
            s2_attention, [a.double() for a in whole], offset, **options, backend="reference",
            layout=build_layout(case.pattern), tensor_format="thd",
        )  # fmt: skip
        rows = order.argsort().chunk(group.size())[group.rank()]
        mine = [tensor[rows] for tensor in whole]
        offset = None if offset is None else offset.to(case.dtype)
        for comm_type in case.comm_types:
            cp = ContextParallel(case.pattern, group, comm_type, keep_received=case.keep_received, cut=case.cut)
            with count_traffic() as traffic:
                got = _run(cp.attention, mine, offset, **options, backend=case.backend)
            shown = [got[0], *got[1:4], *(_summed(a) for a in got[4:])]
            expected = [*(a[rows] for a in truth[:4]), *truth[4:]]
            scales = zip((*NAMES, "d offset"), shown, expected, truth)
            found = results[f"{name}/{comm_type}"] = {part: difference(a, b, c) for part, a, b, c in scales}
            if comm_type == "sparse":
                found["exchanges"] = traffic.calls  # forward, backward again unless it keeps them, and gradients
                found["expected exchanges"] = 2 if case.keep_received else 3
                found |= _of_sparse(case, cp, documents, mine, offset, got, options | dict(backend=case.backend))
    return results


def _run(attend, tensors, offset, **options) -> list[torch.Tensor]:
    """[out, dq, dk, dv], and the offset's gradient where there is one."""
    leaves = [tensor.detach().requires_grad_() for tensor in (*tensors[:3], *([] if offset is None else [offset]))]
    out = attend(*leaves[:3], softmax_offset=leaves[3] if len(leaves) > 3 else None, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def _of_sparse(case, cp, documents, mine, offset, got, options) -> dict:
    """Whether a second pass that knows the first one's result repeats every bit, exchanges nothing for it, and blocks
    may arrive late; bytes of forward and backward, and the plan's."""
    rank, size = cp.rank, cp.size

    def attend(*tensors, **more):
        return cp.attention(*tensors, output=layer_output("layer"), **more)

    kept = keep_outputs(attend)
    with arrives_late():
        with torch.no_grad(), count_traffic() as forward, handed_over() as handed:
            kept(*mine[:3], softmax_offset=offset, **options)
        with count_traffic() as backward:
            again = _run(kept, mine, offset, **options)
    starts, ends = (tensor.numpy().astype(np.int64) for tensor in (documents.starts, documents.cu_seqlens))
    tokens = len(mine[0]) * size
    borders = starts if case.cut == "document" else np.array([0, tokens])
    plan = plan_documents(reaches(case.pattern), starts[:-1], np.diff(ends), borders, tokens, rank, size)
    slot = slot_bytes(max(8, case.value_dim or 0), case.dtype.itemsize)
    sent, received = (int(counts.sum()) * slot for counts in (plan.counts[rank], plan.counts[:, rank]))
    return {
        "repeats": all(map(torch.equal, again, got)),
        "bytes": [forward.bytes_sent, backward.bytes_sent],
        "plan": [sent, sent + received],
        "handed over": handed == [[sent, received]],
        "calls": [forward.calls, backward.calls],
    }
