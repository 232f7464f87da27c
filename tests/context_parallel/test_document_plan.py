"""The exchange of packed documents by `sparse`, against its definition: every query sees its document's keys as in one
process, and what is received is what is seen, no more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from s2_megatron.context_parallel import documents as cp_documents
from s2_megatron.context_parallel.attention import ContextParallel
from s2_megatron.context_parallel.dense import cut_order
from s2_megatron.context_parallel.document_plan import most_received_slots, plan_documents, reaches, why_not
from s2_megatron.context_parallel.documents import DocumentPlans, keep_borders, read_borders
from s2_megatron.ops.layout import PackedSequence
from s2_megatron.testing.context_parallel_cases import CASES, ranges
from s2_megatron.testing.oracle import packed_mask

PATTERNS = {
    "window": ranges((), 4, 2, 2, window=7),
    "window-of-one-and-sink": ranges((), 4, 2, 1, window=1, sink_tokens=3),
    "windows-by-head": ranges((), 4, 4, 2, window=[2, 19], sink_tokens=6),
    "longer-than-a-chunk": ranges((), 4, 2, 2, window=45, sink_tokens=18),
    "blocks": ranges(((3, 1),), 4, 2, 2),
    "blocks-and-sink": ranges(((2, 1),), 4, 2, 1, sink_tokens=6),
}


def rows_of(size, per_rank, seed):
    """(starts, lengths, the whole borders) of documents in rows of several kinds."""
    generator, unit = np.random.default_rng(seed), 2 * size
    tokens = size * per_rank
    chunk = tokens // unit
    kinds = [
        ("one document", [tokens]),
        ("from chunk to chunk", [chunk, 2 * chunk, (unit - 3) * chunk]),
        ("shorter than a block, padding at the end", [1, 3, 1, 2, tokens // 2]),
        ("a document begins just before a chunk", [chunk - 2, tokens - chunk + 2]),
        ("an empty one", [chunk + 1, 0, tokens - 3 * chunk]),
        ("none", [0]),
    ]
    drawn = np.diff(np.sort(generator.integers(0, tokens + 1, 6)), prepend=0).tolist()
    for name, lengths in [*kinds, ("drawn", drawn)]:
        borders = np.cumsum([0, *lengths])
        yield f"{name}, one sequence", borders[:-1], np.array(lengths), np.array([0, tokens])
    padded = unit * np.array([1, 4, 2, 1])
    padded = np.append(padded, max(tokens - padded.sum() - unit, 0) // unit * unit)
    real = padded - np.array([0, unit - 1, 3, 1, 0])
    borders = np.cumsum(np.append(0, padded))
    yield "cut by themselves", borders[:-1], real, borders
    yield "one, cut by itself", np.array([0]), np.array([tokens]), np.array([0, tokens])


def check(pattern, starts, lengths, borders, tokens, size):
    of_heads = reaches(pattern)
    plans = [plan_documents(of_heads, starts, lengths, borders, tokens, rank, size) for rank in range(size)]
    order = cut_order(torch.tensor(borders, dtype=torch.int32), tokens, size).argsort().numpy().reshape(size, -1)
    truth = packed_mask(pattern, starts.tolist(), lengths.tolist(), tokens).numpy()
    ratio = pattern.num_heads // pattern.num_kv_heads
    travelling = {}  # (from, to): [(token, KV head)]
    for rank, plan in enumerate(plans):
        assert np.array_equal(plan.counts, plans[0].counts) and not plan.counts.diagonal().any()
        slots = list(zip(order[rank][plan.send_rows].tolist(), plan.send_heads.tolist()))
        for other, end in enumerate(np.cumsum(plan.counts[rank])):
            travelling[rank, other] = slots[end - plan.counts[rank, other] : end]
    for rank, plan in enumerate(plans):
        held = np.full((plan.n_places, pattern.num_kv_heads), -1)
        held[plan.place] = order[rank][:, None]
        came = [slot for other in range(size) for slot in travelling[other, rank]]
        assert [head for _, head in came] == plan.receive_heads.tolist()
        assert (held[plan.receive_places, plan.receive_heads] == -1).all()
        held[plan.receive_places, plan.receive_heads] = [token for token, _ in came]
        held[plan.copies] = held[plan.copied]
        assert len(set(came)) == len(came)
        own = packed_mask(pattern, plan.borders[:-1].tolist(), np.diff(plan.borders).tolist(), plan.n_places).numpy()
        needed = set()
        for head in range(pattern.num_heads):
            seen = own[head][plan.place]  # [rows, places]
            found = np.zeros((len(seen), tokens + 1), dtype=int)
            row, place = np.nonzero(seen)
            np.add.at(found, (row, held[place, head // ratio]), 1)
            assert not found[:, -1].any(), "a key is seen that did not come"
            assert np.array_equal(found[:, :-1], truth[head][order[rank]])
            remote = set(np.flatnonzero(found[:, :-1].any(0)).tolist()) - set(order[rank].tolist())
            needed |= {(token, head // ratio) for token in remote}
        rounded = of_heads[0].unit > 1 and of_heads[0].sink % of_heads[0].unit
        assert needed <= set(came) if rounded else needed == set(came)


@pytest.mark.parametrize("size, per_rank", [(2, 48), (3, 18), (8, 16)])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_query_sees_what_it_sees_in_one_process(name, size, per_rank):
    for kind, starts, lengths, borders in rows_of(size, per_rank, seed=size):
        try:
            check(PATTERNS[name], starts, lengths, borders, size * per_rank, size)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from error


def test_windows_and_sinks_only():
    """Of all kinds of patterns; a window of blocks counts blocks of the document."""
    packable = {name for name, case in CASES.items() if why_not(case.pattern) is None}
    assert packable == {"window", "window-of-one", "window-in-tokens", "long-window-and-sink", "sink-beside-blocks"}
    assert reaches(ranges((), 4, 4, 2, window=[3, 9], sink_tokens=5)) == ((2, 5, 1), (8, 5, 1))
    assert reaches(ranges(((3, 1),), 4, 2, 2)) == ((8, 0, 4),) * 2
    assert "s2_cp_comm_type='sparse'" in why_not(CASES["paper"].pattern)
    assert "--s2-cp-comm-type all_gather" in why_not(CASES["mask-shared"].pattern)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_most_that_a_rank_receives(name):
    """What the start of a run prints: of a row cut as one sequence; of documents cut by themselves, for each."""
    pattern, most = PATTERNS[name], []
    for _, starts, lengths, borders in rows_of(4, 48, seed=0):
        plan = plan_documents(reaches(pattern), starts, lengths, borders, 192, 0, 4)
        most.append(plan.counts.sum(0).max() / most_received_slots(pattern) / (len(borders) - 1))
    assert 0.5 < max(most) <= 1


@pytest.mark.parametrize(
    "starts, lengths, borders, message",
    [
        ([0, 8], [9, 8], [0, 32], "expected one behind the other"),
        ([0], [33], [0, 32], "within the 32 tokens"),
        ([0], [30], [0, 30], "multiples of 2 \\* 2"),
        ([2], [30], [2, 32], "from 0 on"),
    ],
)
def test_documents_that_do_not_fit(starts, lengths, borders, message):
    with pytest.raises(ValueError, match=message):
        plan_documents(((3, 0, 1),), *(np.array(a) for a in (starts, lengths, borders)), 32, 0, 2)


class Group:
    """Two ranks, of which this is the first."""

    size, rank = (lambda self: 2), (lambda self: 0)


def test_borders_are_read_in_every_call_or_once_for_all(monkeypatch):
    """A batch's layers share a plan; borders that were kept are not read again, and of others every write is seen, also
    one of which torch does not count the version; plans of many batches do not pile up."""
    borders, reads = torch.tensor([0, 9, 16], dtype=torch.int32), []
    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: reads.append(tensor) or plain(tensor))
    plans = DocumentPlans(PATTERNS["window"], Group(), "sequence")
    packed, device = PackedSequence(borders, 16), torch.device("cpu")
    first = plans.of(packed, 16, device)
    assert plans.of(packed, 16, device) is first and len(reads) == 2
    borders.data[1] = 5
    second = plans.of(packed, 16, device)
    assert second is not first and read_borders(borders).tolist() == [0, 5, 16]
    kept = PackedSequence(borders.clone(), 16)
    keep_borders(kept.starts)
    reads.clear()
    assert plans.of(kept, 16, device) is second and not reads
    monkeypatch.setattr(cp_documents, "MOST_BATCHES", 2)
    borders[1] = 6
    plans.of(packed, 16, device)
    borders[1] = 9
    assert plans.of(packed, 16, device) is not first


def test_a_pattern_with_strides_is_refused():
    packed = PackedSequence(torch.tensor([0, 32], dtype=torch.int32), 32)
    tensors = [torch.zeros(16, heads, 8) for heads in (2, 2, 2)]
    cp = ContextParallel(ranges(((1, 1), (None, 2)), 4, 2, 2), Group(), "sparse")
    with pytest.raises(ValueError, match=r"has strides or a mask.*--s2-cp-comm-type all_gather"):
        cp.attention(*tensors, packed=packed, backend="reference")
