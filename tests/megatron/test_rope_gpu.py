"""Why fused RoPE of more than 2**31 elements is refused (s2_megatron/megatron/refusals/attention.py): Transformer
Engine's kernel
on a GPU."""

from __future__ import annotations

import pytest
import torch

from s2_megatron.megatron.refusals.attention import FUSED_ROPE_ELEMENTS

pytestmark = pytest.mark.gpu

HEADS, HEAD_DIM = 32, 128
WIDTH = 3 * HEADS * HEAD_DIM  # of a row with queries, keys and values
TOKENS = 2**18


def test_fused_rope_beyond_2_31_elements_reads_other_memory():
    """When this fails because all rows are right, Transformer Engine counts in 64 bits now, and the refusal can name
    that version."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("less than 30 GiB of GPU memory are free")
    rope = pytest.importorskip(
        "transformer_engine.pytorch.attention.rope", reason="Transformer Engine is not installed", exc_type=ImportError
    )
    # What a count that wraps around reads lies in front of the rows: NaN.
    memory = torch.full((FUSED_ROPE_ELEMENTS + TOKENS * WIDTH,), float("nan"), device="cuda", dtype=torch.bfloat16)
    rows = memory[FUSED_ROPE_ELEMENTS:].view(TOKENS, 1, HEADS, 3 * HEAD_DIM)
    rows.normal_()
    query = rows[..., :HEAD_DIM]
    frequencies = 500000.0 ** (-torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
    angles = (torch.arange(TOKENS, device="cuda")[:, None] * frequencies).repeat(1, 2)[:, None, None]
    found = rope.apply_rotary_pos_emb(query, angles, tensor_format="sbhd", fused=True)
    last_right = FUSED_ROPE_ELEMENTS // WIDTH  # the row in which the count wraps around
    for first, right in ((last_right - 64, True), (last_right + 1, False), (TOKENS - 64, False)):
        chosen = slice(first, first + 64)
        turned = torch.cat([-query[chosen, ..., HEAD_DIM // 2 :], query[chosen, ..., : HEAD_DIM // 2]], -1).float()
        expected = query[chosen].float() * angles[chosen].cos() + turned * angles[chosen].sin()
        # One rounding to bf16 of numbers up to about 5, and angles of which the kernel's sine is a little off.
        assert torch.allclose(found[chosen].float(), expected, atol=0.03) == right, f"rows from {first} on"
        assert found[chosen].isnan().any() != right, f"rows from {first} on"
