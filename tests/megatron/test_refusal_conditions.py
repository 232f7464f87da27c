"""When refusals apply that depend on several settings, without Megatron's parser; test_refusals.py has every refusal
through it."""

from __future__ import annotations

import dataclasses
from argparse import Namespace

import pytest

from s2_megatron.megatron.refusals import hybrid, table, unproven
from s2_megatron.megatron.refusals.table import REFUSALS
from tests.megatron.lifted import lift_unproven_refusals


def named(name):
    (refusal,) = (refusal for refusal in REFUSALS if refusal.name == name)
    return refusal


@pytest.mark.parametrize(
    "tokens, sizes, kv_heads, micro_batch, refused",
    [
        (2**20, (2, 2), 32, 1, True),
        (2**20, (1, 4), 32, 1, True),
        (2**20, (8, 1), 32, 1, False),
        (2**20, (2, 4), 32, 1, False),
        (2**20, (2, 4), 32, 2, True),
        (2**20, (4, 1), None, 1, True),
        (2**20, (4, 1), 4, 1, False),
        (2**20, (16, 4), 4, 1, False),
        (2**20, (16, 2), 4, 1, True),  # rows of all 40 heads, for ranks share KV heads
        (2**20, (1, 4), 16, 1, False),  # 2**31 just fit
        (2**20 + 4, (1, 4), 16, 1, True),
    ],
)
def test_what_fused_rope_can_address(tokens, sizes, kv_heads, micro_batch, refused):
    """The paper's 7B: 32 heads of 128. sizes: TP, CP."""
    args = fused_rope_args(tokens, sizes, kv_heads, micro_batch)
    refusal = named("apply_rope_fusion")
    assert refusal.refused(args) == refused
    args.apply_rope_fusion = False
    assert not refusal.refused(args)


def test_a_gate_widens_the_rows_and_norms_leave_them():
    refusal = named("apply_rope_fusion")
    rows_of_96_heads = fused_rope_args(2**19, (1, 4), 32, 1)
    assert not refusal.refused(rows_of_96_heads)
    assert not refusal.refused(Namespace(**{**vars(rows_of_96_heads), "attention_output_gate": True})), (
        "128 heads: 2**31 just fit"
    )
    longer = fused_rope_args(2**19 + 512, (1, 4), 32, 1)
    assert refusal.refused(Namespace(**{**vars(longer), "attention_output_gate": True})) and not refusal.refused(longer)
    assert not refusal.refused(Namespace(**{**vars(fused_rope_args(2**20, (2, 2), 32, 1)), "qk_layernorm": True}))
    assert refusal.refused(Namespace(**{**vars(fused_rope_args(2**21 + 512, (2, 2), 32, 1)), "qk_layernorm": True}))


def fused_rope_args(tokens, sizes, kv_heads, micro_batch):
    return Namespace(
        num_attention_heads=32,
        num_query_groups=kv_heads or 1,
        group_query_attention=kv_heads is not None,
        kv_channels=128,
        seq_length=tokens,
        tensor_model_parallel_size=sizes[0],
        context_parallel_size=sizes[1],
        micro_batch_size=micro_batch,
        apply_rope_fusion=True,
        qk_layernorm=False,
        attention_output_gate=False,
    )


def test_gpu_tests_reach_what_is_unproven(monkeypatch):
    """Only what unproven.py and hybrid.py refuse is lifted, and where refuse_unsupported looks."""
    monkeypatch.setattr(table, "REFUSALS", REFUSALS)
    lifted = (*unproven.REFUSALS, *hybrid.REFUSALS)
    proven = [refusal.name for refusal in REFUSALS if refusal not in lifted]
    lift_unproven_refusals()
    assert [refusal.name for refusal in table.REFUSALS] == proven
    assert len(proven) == len(REFUSALS) - len(lifted)
    monkeypatch.setattr(table.model, "VERSION", dataclasses.replace(table.model.VERSION, refused=lambda args: False))
    monkeypatch.setattr(table, "REFUSALS", (named("overlap_dispatch_backward_with_experts_wgrad"),))
    asked = Namespace(overlap_dispatch_backward_with_experts_wgrad=True)
    with pytest.raises(ValueError, match="remove --overlap-dispatch-backward-with-experts-wgrad"):
        table.refuse_unsupported(asked)
    lift_unproven_refusals()
    table.refuse_unsupported(asked)


def test_what_asks_for_an_installed_package_is_left_out_elsewhere():
    """A login node need not have what the training machine has."""
    installed = {"find_spec", "HAVE_APEX_OR_TE"}
    asking = {refusal.name for refusal in REFUSALS if installed & set(refusal.refused.__code__.co_names)}
    assert asking == {refusal.name for refusal in REFUSALS if refusal.of_machine} != set()
