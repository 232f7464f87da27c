"""`s2-megatron inspect` of Megatron's HybridModel (--hybrid-layer-pattern)."""

import pytest

from s2_megatron.tools import commands
from tests.tools.test_inspect_training import LINE, S2_YAML, inspected

HYBRID = [word for word in LINE if word not in ("--num-layers", "24")]


def test_a_hybrid_model_of_pairs_is_the_gpt(capsys):
    """Full recomputation keeps the input of each half, where a GPT keeps that of a layer."""
    gpt, hybrid = inspected(capsys, "--", *LINE), inspected(capsys, "--", *HYBRID, "--hybrid-layer-pattern", "*-" * 24)
    note = "a HybridModel: no step with it was measured; its layers are taken as the halves of a GPT's"
    assert note in hybrid["forecast"]["run"]["notes"] and hybrid["no_forecast"] == []
    assert [hybrid[name] for name in ("model", "pairs", "layers")] == [
        gpt[name] for name in ("model", "pairs", "layers")
    ]
    assert hybrid["flops_per_token"] == pytest.approx(gpt["flops_per_token"])
    assert hybrid["forecast"]["run"]["parts_ms"] == pytest.approx(gpt["forecast"]["run"]["parts_ms"])
    ours, theirs = (facts["memory"]["by_recompute"] for facts in (hybrid, gpt))
    assert ours["none"] == theirs["none"] and ours["full"] > theirs["full"]
    kinds = {kind["symbol"]: kind["parameters"] for kind in hybrid["kinds"]}
    assert kinds == {"*": 24 * (4 * 2048**2 + 2048), "-": 24 * (3 * 2048 * 5632 + 2048)}
    given = inspected(capsys, "--hybrid-layer-pattern", "*-*-*-", S2_YAML, "--", *LINE)
    assert (
        given["model"]["layers"] == 3 and commands.main(["inspect", "--", *HYBRID, "--hybrid-layer-pattern=*-*-"]) == 0
    )
    assert "in the model" in capsys.readouterr().out


def test_layers_that_no_forecast_knows(capsys):
    pattern = "M*-E" * 6
    experts = ["--num-experts", "8", "--moe-ffn-hidden-size", "512", "--moe-router-topk", "2"]
    facts = inspected(capsys, "--", *HYBRID, "--hybrid-layer-pattern", pattern, *experts)
    reasons = [f"not measured with --hybrid-layer-pattern {pattern}: layers {kind}" for kind in (
        "E, mixture of experts", "M, Mamba")]  # fmt: skip
    assert facts["no_forecast"] == reasons and "memory" not in facts and "forecast" not in facts
    assert facts["model"]["layers"] == 6 and facts["flops_per_token"]["linear"] > 0
    kinds = {kind["symbol"]: kind for kind in facts["kinds"]}
    weights, norm_and_router = 3 * 2048 * 512, 2048 + 8 * 2048
    assert kinds["E"]["parameters"] == 6 * (8 * weights + norm_and_router)
    assert kinds["E"]["active_parameters"] == 6 * (2 * weights + norm_and_router)
    assert kinds["M"]["parameters"] is None and kinds["M"]["layers"] == 6
    dense = [word for word in HYBRID if word not in ("--s2-config", S2_YAML)]
    for pattern, reason in (("*-D-", "layers D"), ("*-/*-", "multi-token prediction"), ("*-*|-", "uneven pipeline")):
        facts = inspected(capsys, "--", *dense, "--hybrid-layer-pattern", pattern)
        assert any(reason in text for text in facts["no_forecast"]) and "memory" not in facts
        assert ("flops_per_token" in facts) == (reason == "uneven pipeline")


def test_a_plan_for_other_attention_layers(capsys, tmp_path):
    (yaml := tmp_path / "plan.yaml").write_text("layers: DDDD\n")
    assert commands.main(["inspect", str(yaml), "--", *HYBRID, "--hybrid-layer-pattern", "*-*--"]) == 2
    error = capsys.readouterr().err
    assert commands.main(["inspect", "--", *HYBRID, "--hybrid-layer-pattern=--"]) == 2
    assert commands.main(["inspect", "--", *HYBRID, "--hybrid-layer-pattern", "*-X"]) == 2
    assert "no layer is called X; expected some of * - E M G D +" in capsys.readouterr().err
    assert "for attention layers (*) among the 5 layers of --hybrid-layer-pattern *-*--: 2" in error
