"""Blocks of 128, which the exchange returns in parts of 64: dK and dV with what other ranks send back, by the backends
that compute whole blocks. The Hopper kernels: tests/gluon_emulator and tests/kernels/test_hopper.py."""

import pytest
import torch

from s2_megatron.context_parallel.plan import make_plan
from s2_megatron.context_parallel.sparse import place
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import build_layout
from s2_megatron.ops.parts import attention_backward_dkdv, attention_delta, attention_forward
from tests.kernels.placed_blocks import check_returned
from tests.ops.test_attention import pattern_of
from tests.tiers import mostly_slow


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("block", mostly_slow([32, 128, 256], 32, 128))
def test_returned_gradients_of_large_blocks(block, backend, device):
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
