"""Rows between packed documents: whatever lies there before, and however wide the gaps are."""

import pytest
import torch

pytest.importorskip("triton")
from s2_megatron.kernels import dispatch as launch
from s2_megatron.ops.layout import PackedSequence

# name: (starts, tokens of each document, rows). Programs look at 1024 rows and 8 heads at a time.
CASES = {
    "no gap": ([0, 700, 1024], [700, 324, 1026], 2050),
    "one row, at the border of a program": ([0, 1024], [1023, 176], 1200),
    "wide": ([5, 1200, 1300, 2500], [0, 90, 1100, 10], 3000),
    "after the last": ([3], [5], 2100),
}


@pytest.mark.op
@pytest.mark.parametrize("heads, dim, dtype, contiguous", [(9, 1, torch.float32, True), (9, 80, torch.bfloat16, False)])
@pytest.mark.parametrize("name", CASES)
def test_rows_between_documents(name, heads, dim, dtype, contiguous, device):
    starts, lengths, rows = CASES[name]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    packed = PackedSequence(ends, max(lengths), torch.tensor([*starts, rows], dtype=torch.int32, device=device))
    guard = torch.randn(heads, rows + 1, dim, device=device).to(dtype)  # a row more, which must stay
    if not contiguous:
        guard = guard.transpose(0, 1).contiguous().transpose(0, 1)
    expected = guard.clone()
    between = torch.ones(rows + 1, dtype=torch.bool)
    between[-1] = False
    for start, length in zip(starts, lengths):
        between[start : start + length] = False
    expected[:, between.to(device)] = -1.5
    with launch.on_device(guard.device):
        launch._fill_between(packed, -1.5, guard[None, :, :rows])
    assert torch.equal(guard, expected)
