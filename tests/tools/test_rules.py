"""What inspect warns of and check notes: plans that go against a rule, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from s2_megatron.config.load import SparsityConfig, load_config
from s2_megatron.tools import rules
from s2_megatron.tools.commands import main
from s2_megatron.tools.rules import RULES, Rule, warnings

ROOT = Path(__file__).resolve().parents[2]
SHAPE = dict(num_layers=12, num_heads=12, num_kv_heads=4, seq_length=8192)


def plan(layers: str, spec: dict | None = None, block_size: int = 64, **shape):
    content = {"block_size": block_size, "layers": layers, **({"specs": {"S": spec}} if spec else {})}
    return SparsityConfig.from_data(content).resolve(**SHAPE | shape)


SPREAD = dict(dense_heads={"spread": 1})


@pytest.mark.parametrize(
    "layers, spec, shape",
    [
        ("DS", dict(local_tokens=512, stride=8), {}),
        ("DS", dict(local_tokens=512, stride=16), {}),
        ("S", dict(local_tokens=512, stride=8, layer_step=0, **SPREAD), {}),
        ("S", dict(local_tokens=512, stride=8, layer_step=0, head_step=0), dict(seq_length=512)),  # all window
        ("DS", dict(local_tokens=512), {}),
        ("DS", dict(window=333, sink_tokens=4), {}),
        ("S", dict(local_tokens=256, stride=8), dict(seq_length=2048)),
        ("DS", dict(local_tokens=256, stride=8), {}),
        ("S", dict(local_tokens=128, stride=8, **SPREAD), {}),
        ("DS", dict(ranges=[dict(end_tokens=256, stride=1), dict(end_tokens=1024, stride=2), dict(stride=4)]), {}),
        ("D", None, {}),
        ([*"DDDDSSSS"], dict(local_tokens=512, stride=8), dict(num_layers=8)),
        ([*"DDSSSSSS"], dict(local_tokens=512, stride=8), dict(num_layers=8, seq_length=2048)),
        ([*"DSSS"], dict(local_tokens=512, stride=8), dict(num_layers=4)),
        ([*"DDSSSSSS"], dict(local_tokens=512, stride=8, **SPREAD), dict(num_layers=8)),
    ],
)
def test_plans_without_a_warning(layers, spec, shape):
    assert warnings(plan(layers, spec, **shape)) == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("length", [8192, 131072])
def test_the_configurations_of_the_repository_have_none(path, length):
    """But those of S2 in every layer, and the windows of the quickstart, whose sequences are short."""
    shape = dict(num_heads=32, num_kv_heads=8, seq_length=256 if "quickstart" in path.stem else length)
    shape["num_layers"] = 48 if path.stem == "gemma3" else 32
    found = warnings(load_config(path).resolve(**shape))
    assert len(found) == path.stem.endswith("_s2") and all("no layer and no KV head attends" in text for text in found)


@pytest.mark.parametrize(
    "layers, spec, shape, expected",
    [
        # 4 of 8 residues: one offset a KV head, the same in every layer.
        ("SSSD", dict(local_tokens=512, stride=8, layer_step=0), {},
         "which have 4 offsets for a stride of 8; only dense layers see them; use layer_step: auto or more KV heads, "
         "or a stride of 4 or less with head_step: auto; docs/"),
        ("SSSD", dict(local_tokens=512, stride=8, layer_step=0, head_step=0), {},
         "which have 1 offset for a stride of 8; only dense layers see them; use layer_step: auto or more KV heads; "
         "docs/"),
        # Two layers of four heads do not reach 16 residues.
        ("DS", dict(local_tokens=512, stride=16), dict(num_layers=4),
         "50% of the blocks beyond its window are attended by no head of its 2 layers, which have 8 offsets for a "
         "stride of 16; only dense layers see them; use layer_step: auto"),
        ("S", dict(local_tokens=512, stride=8), {},
         "no layer and no KV head attends everything, so that a model that goes on from a dense one loses what single"),
        ("S", dict(local_tokens=768), {}, "no layer and no KV head attends everything"),  # 12 windows reach the start
        # A window of 1024 in two ranges; strides beside which no short window was measured.
        ("S", dict(ranges=[dict(end_tokens=256, stride=1), dict(end_tokens=1024, stride=1), dict(stride=8)]), {},
         "no layer and no KV head attends everything"),
        ([*"DDSSSSSS"], dict(local_tokens=512, stride=8), dict(num_layers=8),
         "of 8 layers the last one that attends everything, or has a KV head that does, is layer 1 (from 0), and"),
        ([*"DDDSSSSSSSSS"], dict(local_tokens=512, stride=8), {}, "of 12 layers the last one that attends everything"),
        ("S", dict(local_tokens=256, stride=4), {}, "no layer and no KV head attends everything"),
    ],
)  # fmt: skip
def test_plans_with_one_warning(layers, spec, shape, expected):
    (text,) = warnings(plan(layers, spec, **shape))
    assert expected in text and re.search(r"; docs/(patterns|choose-dense)\.md#[a-z-]+$", text)


FIRST = dict(local_tokens=128, stride=16, head_step=0, layer_step=0)


@pytest.mark.parametrize(
    "spec",
    [FIRST, dict(ranges=[dict(end_tokens=128, stride=1), dict(stride=16)], head_step=0, layer_step=0)],
)
def test_a_plan_that_keeps_the_first_block_is_not_told_to_move_it(spec):
    """16 blocks, a window of 4; with another offset, or more blocks, it is a stride that the layers do not share."""
    short = dict(seq_length=512, block_size=32)
    assert [text for text in warnings(plan("S", spec, **short)) if "attended by no head" in text] == []
    (text,) = warnings(plan("S", spec, num_layers=3, **short))
    assert "reach 288 of 512 tokens back: what lies before, but the first block, cannot change a prediction" in text
    for other in (spec | dict(base_offset=3), FIRST | dict(stride=4)):
        (text,) = warnings(plan("S", other, **short))
        assert "of the blocks beyond its window are attended by no head" in text and "use layer_step: auto" in text


@pytest.mark.parametrize(
    "spec, tokens",
    [
        (dict(local_tokens=256, stride=8), 256),
        (dict(local_tokens=128, stride=16), 128),
        (dict(window=300, stride=8), 300),
        (dict(window=[511, 100, 100, 100], stride=8, sink_tokens=4), 511),
        (dict(ranges=[dict(end_tokens=128, stride=1), dict(end_tokens=256, stride=1), dict(stride=8)]), 256),
    ],
)
def test_short_windows(spec, tokens):
    nothing_dense, window = warnings(plan("S", spec))
    assert nothing_dense.startswith("no layer and no KV head attends everything")
    key = "window" if "window" in spec else "local_tokens"
    assert window.startswith(f"spec S: its window is {tokens} tokens; ") and f"use {key}: 512 or more" in window


def test_a_window_with_a_sink_does_not_hide_the_sink():
    texts = warnings(plan("S", dict(window=128, sink_tokens=4), seq_length=8192))
    (text,) = [text for text in texts if "cannot change a prediction" in text]
    assert "what lies before, but the sink, cannot change" in text


@pytest.mark.parametrize(
    "spec, expected",
    [
        (dict(local_tokens=512, stride=8, layer_step=0),
         "50% of the blocks beyond its window are attended by no head of its 12 layers, which have 4 offsets for a "
         "stride of 8; use layer_step: auto or more KV heads, or a stride of 4 or less with head_step: auto; docs/"),
        (dict(local_tokens=512, stride=8, layer_step=0, head_step=0),
         "which have 1 offset for a stride of 8; use layer_step: auto or more KV heads; docs/"),
        (dict(local_tokens=512),
         "the windows of all 12 layers, one after the other, reach 5376 of 8192 tokens back"),
    ],
)  # fmt: skip
def test_plans_in_which_nothing_is_dense_either(spec, expected):
    text, nothing_dense = warnings(plan("S", spec))
    assert expected in text and nothing_dense.startswith("no layer and no KV head attends everything")


def test_more_layers_take_the_warning_away():
    """The other one, that nothing is dense, stays."""
    spec = dict(local_tokens=512, stride=16)
    found = {layers: len(warnings(plan("S", spec, num_layers=layers))) for layers in (2, 3, 4, 8)}
    assert found == {2: 2, 3: 2, 4: 1, 8: 1}


def heading_anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_rule_cites_a_heading_and_its_number_is_there():
    for rule in RULES:
        page, anchor = rule.source.split("#")
        text = (ROOT / "docs" / page).read_text()
        assert anchor in [heading_anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)], rule.source
        assert rule.number in " ".join(text.split())


def test_the_number_of_a_study_stands_in_the_warning(monkeypatch):
    rule = Rule(lambda sparsity: ["the first layer is sparse"], "quality.md#results", number="+0.5 % loss")
    monkeypatch.setattr(rules, "RULES", (rule,))
    assert warnings(plan("D")) == ["the first layer is sparse (+0.5 % loss); docs/quality.md#results"]


def test_inspect_prints_it(tmp_path, capsys):
    config = tmp_path / "windows.yaml"
    config.write_text("block_size: 64\nlayers: S\nspecs:\n  S:\n    local_tokens: 512\n")
    line = ["inspect", str(config), "--num-layers=12", "--num-attention-heads=12", "--seq-length=8192"]
    assert not main(line)
    printed = " ".join(capsys.readouterr().out.split())
    assert "warning: the windows of all 12 layers, one after the other, reach 5376 of 8192 tokens back" in printed
    assert not main([*line, "--json"])
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 2
