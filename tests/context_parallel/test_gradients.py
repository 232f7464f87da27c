"""Context parallelism over 2, 4 and 8 ranks computes what one process computes: out, dq, dk, dv, for every comm type
and pattern kind."""

from __future__ import annotations

import pytest
import torch

from s2_megatron.context_parallel.plan import COMM_TYPES, make_plan
from s2_megatron.context_parallel.sparse import place
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import build_layout
from s2_megatron.ops.parts import attention_backward_dkdv, attention_delta, attention_forward
from s2_megatron.testing.context_parallel_cases import CASES, NAMES
from tests.kernels.placed_blocks import check_returned
from tests.ops.test_attention import pattern_of
from tests.tiers import mostly_slow

# Four ranks are for `make test-long`: eight have every cut that they have.
RANKS = {2: (), 4: (pytest.mark.long,), 8: (pytest.mark.slow,)}
TWO_QUICK = [pytest.param(ranks, marks=marks) for ranks, marks in RANKS.items()]
# Of the largest value of the tensor, in fp64.
EXACT = 1e-12
FORMS = [
    pytest.param(name, comm_type, ranks, marks=marks)
    for name, case in CASES.items()
    for comm_type in COMM_TYPES
    for ranks, marks in RANKS.items()
    if comm_type != "a2a" or case.pattern.num_kv_heads % ranks == 0
]


@pytest.mark.parametrize("name, comm_type, ranks", FORMS)
def test_equals_one_process(found, name, comm_type, ranks):
    for rank, results in enumerate(found(ranks)):
        result = results["gradients"][f"{name}/{comm_type}"]
        assert max(result[part] for part in NAMES) <= EXACT, f"rank {rank}: {result}"
        assert result["repeats"], f"rank {rank}: a second run, whose blocks arrive late, differs"


@pytest.mark.parametrize("ranks", TWO_QUICK)
def test_bytes_are_those_of_the_plan(found, ranks):
    """Counted at the collective: one call in the forward, two in the backward (the exchange again, and the
    gradients)."""
    for results in found(ranks):
        for name, case in CASES.items():
            sparse, gathered = (results["gradients"][f"{name}/{comm_type}"] for comm_type in ("sparse", "all_gather"))
            assert [sparse["forward bytes"], sparse["backward bytes"]] == sparse["plan"]
            assert sparse["calls"] == [1, 1 if case.keep_received else 2]
            assert sparse["forward bytes"] <= gathered["forward bytes"]
    needed = [
        sum(results["gradients"][f"{name}/sparse"]["forward bytes"] for results in found(ranks))
        for name in ("paper", "dense")
    ]
    assert 0 < needed[0] < needed[1], "a sparse pattern moves less than a dense one"


@pytest.mark.parametrize("ranks", TWO_QUICK)
def test_the_tensors_that_torch_is_given_are_as_large(found, ranks):
    """What is counted and planned, against the tensors that torch's collectives get: nothing is padded, and no rank
    sends to itself."""
    for results in found(ranks):
        for name, case in CASES.items():
            sparse, gathered = (results["gradients"][f"{name}/{comm_type}"] for comm_type in ("sparse", "all_gather"))
            forward, backward = sparse["handed over"]
            ((sent, received),) = forward
            assert sent == sparse["plan"][0] == sparse["forward bytes"]
            # Backward: the blocks again, and their gradients the other way round.
            assert backward == ([] if case.keep_received else [[sent, received]]) + [[received, sent]]
            assert sum(given for given, _ in backward) == sparse["backward bytes"]
            (whole,), _ = gathered["handed over"]
            assert whole[1] == ranks * whole[0]
            assert (ranks - 1) * whole[0] == gathered["forward bytes"]


@pytest.mark.slow
def test_volume_of_the_exchange_at_128k(found):
    """Eight ranks really exchange the blocks of 128K tokens: the plan's bytes, at most 8 % of an all-gather's, each
    block in its slot."""
    results = [rank["volume"] for rank in found(8)]
    for result in results:
        assert result["right"]
        assert result["handed over"] == [result["plan"]]
        assert result["counted"] == result["plan"][0]
        (gathered,) = result["all-gather"]
        assert gathered == 7 * 2**17 // 8 * 32 * 2 * 2 * 4
        assert 0 < max(result["plan"]) <= 0.08 * gathered
    assert sum(result["plan"][0] for result in results) == sum(result["plan"][1] for result in results)


@pytest.mark.parametrize("ranks", TWO_QUICK)
def test_a_mistake_would_show(found, ranks):
    """Keys in other places, other tokens, or another head's or layer's offset move the results by far more than
    rounding does."""
    mistakes = found(ranks)[0]["wrong"]
    assert len(mistakes) == 4
    for name in mistakes:
        worst = max(results["wrong"][name]["out"] for results in found(ranks))
        assert worst > 0.01, f"{name}: {worst}"
        worst = max(results["wrong"][name]["dk"] for results in found(ranks))
        assert worst > 0.01, f"{name}: {worst}"


@pytest.mark.parametrize("ranks", TWO_QUICK)
def test_packed_documents(found, ranks):
    """Both cuts of packed batches: the whole row as one sequence, and every document by itself."""
    for results in found(ranks):
        assert len(results["packed"]) == 16
        for name, result in results["packed"].items():
            assert max(*(result[part] for part in NAMES), result.get("d offset", 0)) <= EXACT, (name, result)


@pytest.mark.parametrize("ranks", TWO_QUICK)
def test_packed_documents_by_sparse(found, ranks):
    """Blocks that come late change no bit, a result that is kept is not exchanged for again, and what is sent is what
    the plan says."""
    for results in found(ranks):
        assert check_sparse(results["packed"]) == 8


def check_sparse(packed) -> int:
    """How many cases of packed documents by `sparse` there are; all are right."""
    sparse = {name: result for name, result in packed.items() if name.endswith("/sparse")}
    for name, result in sparse.items():
        assert result["repeats"] and result["handed over"], (name, result)
        assert result["bytes"] == result["plan"] and result["calls"] == [1, 2], (name, result)
        assert result["exchanges"] == result["expected exchanges"], (name, result)
    return len(sparse)


@pytest.mark.slow
def test_packed_documents_by_the_kernels(found):
    for results in found(2, "packed_kernels"):
        assert check_sparse(results["packed_kernels"]) == 1
        result = results["packed_kernels"]["kernels/sparse"]
        assert max(result[part] for part in (*NAMES, "d offset")) <= 3e-6, result


def test_softmax_offsets(found):
    """Also their own gradient, each rank's part of which is counted once, and outputs that are kept for a second
    pass."""
    for results in found(2, "offsets"):
        assert len(results["offsets"]) == 8
        for name, result in results["offsets"].items():
            assert max(result.values()) <= (3e-6 if name.startswith("kernels") else EXACT), (name, result)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])  # with 4 several ranks return gradients of one block
def test_triton_kernels(found, ranks):
    """The kernels (through the interpreter here) in fp32."""
    for results in found(ranks, "triton"):
        assert len(results["triton"]) == (6 if ranks == 2 else 2)
        for name, result in results["triton"].items():
            assert max(result[part] for part in NAMES) <= 2e-6, (name, result)
            assert result["repeats"]


@pytest.mark.parametrize("ranks", TWO_QUICK[:2])
def test_a_context_before_and_lazy_negation_change_nothing(found, ranks):
    """And what was saved is fetched once."""
    for results in found(ranks):
        wrong = [name for name, right in results["contexts"].items() if not right]
        assert not wrong and len(results["contexts"]) == 21


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("block", mostly_slow([32, 128, 256], 32, 128))
def test_returned_gradients_of_large_blocks(block, backend, device):
    """Blocks of 128, which the exchange returns in parts of 64: dK and dV with what other ranks send back, by the
    backends that compute whole blocks. The Hopper kernels: tests/gluon_emulator and tests/kernels/test_hopper.py."""
    pattern = pattern_of(((2, 1), (None, 2)), block, 4, 2)
    plan, layout = make_plan(pattern, 1, 2, 4), build_layout(pattern, device)
    own, *_ = place(plan, pattern, torch.device(device))
    call = AttentionCall(layout, 0.3, "sbhd", None, own, backend, True)
    rows = len(plan.query_blocks) * block
    query, key, value, grad = (torch.randn(rows, 1, heads, 16, device=device) for heads in (4, 2, 2, 4))
    out, lse = attention_forward(query, key, value, call)
    sums = attention_delta(grad, out, lse, call)
    alone = [torch.full_like(key, float("nan")) for _ in range(2)]
    tensors = grad, query, key, value, lse, sums
    attention_backward_dkdv(*tensors, *alone, call)
    assert len(plan.send_heads)
    check_returned(plan, alone, tensors, call)
