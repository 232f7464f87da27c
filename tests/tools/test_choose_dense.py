"""s2-megatron choose-dense: ranking, the choice of a set, the YAML that it writes, and what is refused.

That the printed losses are those of the written YAML is tested with real checkpoints, in tests/megatron.
"""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
import yaml

from s2_megatron.config.load import SparsityConfig, load_config
from s2_megatron.config.sinks import without_sink
from s2_megatron.config.sparsity import diff_sparsity
from s2_megatron.tools.choose_dense.plan import (
    all_dense,
    candidates,
    count_dense,
    dense_kv_heads,
    sink_tokens,
    with_dense,
    with_sink,
    yaml_content,
    yaml_text,
)
from s2_megatron.tools.choose_dense.search import Sets, Unit, rank
from s2_megatron.tools.losses import evenly_chosen
from tests.tools.choosing import CONFIGS, DENSE_LOSS, EXPERTS, FUNCTION, ONE_HEAD, STORED, WINDOWS, command, made_up

__all__ = ["command", "made_up"]  # fixtures

UNITS = [Unit(layer, (head,)) for layer in range(4) for head in range(4)]


class Model:
    """Loses a fixed amount for every head that is needed and not dense. needed: {unit: nats}."""

    def __init__(self, needed: dict[Unit, float]):
        self.needed, self.calls = needed, []

    def __call__(self, dense) -> float:
        self.calls.append(tuple(dense))
        return DENSE_LOSS + sum(lost for unit, lost in self.needed.items() if unit not in dense)


NEEDED = {UNITS[13]: 0.5, UNITS[2]: 0.25, UNITS[7]: 0.25, UNITS[5]: 0.125, UNITS[0]: 0.03125}


def test_the_head_that_is_needed_most_comes_first():
    told = []
    ranked = rank(UNITS, Model(NEEDED), told.append)
    assert [each.unit for each in ranked[:5]] == list(NEEDED)  # equal ones in the order of the model
    assert ranked[0].loss == DENSE_LOSS + sum(NEEDED.values()) - 0.5
    assert told == list(range(1, 17)) and len(ranked) == 16


@pytest.mark.parametrize(
    "within, size, measured",
    [
        (0.0, 5, {0, 1, 2, 4, 5, 6, 8}),
        (0.02, 4, {0, 1, 2, 3, 4}),
        (0.1, 3, {0, 1, 2, 3, 4}),
        (0.2, 3, {0, 1, 2, 3, 4}),
        (0.35, 1, {0, 1}),
        (0.6, 0, {0}),
    ],
)
def test_the_smallest_set_that_is_near_enough(within, size, measured):
    model = Model(NEEDED)
    sets = Sets([each.unit for each in rank(UNITS, model)], model, DENSE_LOSS)
    del model.calls[:]
    found = sets.smallest(within)
    assert found.size == size and found.gap <= within
    assert set(sets.measured) == measured and len(model.calls) == len(measured)  # each once
    assert size == 0 or sets.of(size - 1).gap > within


def test_a_set_of_every_size_is_found():
    for size in range(16):
        needed = dict.fromkeys(UNITS[:size], 0.1)
        model = Model(needed)
        assert Sets([each.unit for each in rank(UNITS, model)], model, DENSE_LOSS).smallest(1e-9).size == size


def test_all_heads_dense_is_no_set():
    model = Model(dict.fromkeys(UNITS, 0.1))
    sets = Sets(UNITS, model, DENSE_LOSS)
    assert sets.smallest(1e-9) is None and max(sets.measured) == 15
    assert Sets(UNITS[:1], model, DENSE_LOSS).smallest(1e-9) is None  # a plan with one sparse head


def test_a_set_of_one_size():
    model = Model(NEEDED)
    sets = Sets([each.unit for each in rank(UNITS, model)], model, DENSE_LOSS)
    assert sets.exactly(3).loss == DENSE_LOSS + 0.125 + 0.03125
    assert sorted(sets.measured) == [0, 1, 2, 3]


# The plan


SHAPES = {"GQA": (8, 4), "MHA": (4, 4), "MQA": (4, 1)}


def resolved(text: str, shape: str, length: int = 2048):
    config = SparsityConfig.from_data({"block_size": 32, **yaml.safe_load(text)})
    heads, kv_heads = SHAPES[shape]
    return config, config.resolve(num_layers=8, num_heads=heads, num_kv_heads=kv_heads, seq_length=length)


@pytest.mark.parametrize(
    "name, shape",
    # The one head of MQA cannot be among the sparse and the dense.
    [(name, shape) for name in CONFIGS for shape in SHAPES if (name, shape) != ("dense heads", "MQA")],
)
def test_the_yaml_is_the_plan_with_the_heads_dense(name, shape):
    """Every other head keeps its blocks."""
    config, plan = resolved(CONFIGS[name], shape)
    units = candidates(plan, "head")
    rng = np.random.default_rng(0)
    for size in {0, 1, len(units) // 2, len(units) - 1}:
        chosen = [units[at] for at in rng.permutation(len(units))[:size]]
        text = yaml_text(yaml_content(config.settings, plan, chosen), ["made by a test"])
        read, again = resolved(text, shape)
        assert diff_sparsity(with_dense(plan, chosen).canonical_json(), again.canonical_json()) == []
        assert (
            text.startswith("# made by a test\nblock_size: 32\n") and read.settings.softmax_scale == plan.softmax_scale
        )
        assert count_dense(again) == count_dense(plan) + size
        for unit, layer, head in itertools.product(chosen, range(8), range(plan.num_heads)):
            if layer == unit.layer and head * plan.num_kv_heads // plan.num_heads in unit.heads:
                assert again.layers[layer].pattern is None or again.layers[layer].pattern.heads[head].is_dense


def test_candidates():
    _, mixed = resolved(CONFIGS["mixed"], "GQA")
    assert candidates(mixed, "layer") == [Unit(layer, (0, 1, 2, 3)) for layer in (0, 1, 2, 4, 5, 6)]
    assert len(candidates(mixed, "head")) == 24 and count_dense(mixed) == 8
    _, some = resolved(CONFIGS["dense heads"], "GQA")
    assert candidates(some, "layer")[1] == Unit(1, (0, 1, 2)) and Unit(1, (3,)) not in candidates(some, "head")
    _, short = resolved(CONFIGS["window"], "GQA", length=64)  # as long as the window
    assert candidates(short, "head") == []
    assert all_dense(mixed).density() == 1


def test_layers_that_become_dense_are_d():
    config, plan = resolved(CONFIGS["plain"], "GQA")
    chosen = [Unit(1, (0, 1, 2, 3)), Unit(2, (3,)), Unit(5, (3,)), Unit(6, (0,))]
    content = yaml_content(config.settings, plan, chosen)
    assert content["layers"] == ["S", "D", "S1", "S", "S", "S1", "S2", "S"]
    assert content["specs"]["S1"] == {"local_tokens": 64, "stride": 4, "layer_step": 0, "dense_heads": [3]}


def test_names_of_specs_that_are_taken():
    config, plan = resolved(CONFIGS["two specs"], "GQA")
    content = yaml_content(config.settings, plan, [Unit(0, (1,)), Unit(1, (2,))])
    assert content["layers"] == ["A", "A1", "D", "A2", "A3", "A11", "D", "A4"]


# Its data


def test_sequences_are_those_of_the_documents_one_after_the_other(tmp_path):
    from s2_megatron.tools.dataset.write import write_dataset

    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, size).astype(np.uint16) for size in (5, 70, 1, 33, 64, 2, 90)]
    write_dataset(tmp_path / "text", documents)
    whole = np.concatenate(documents[1:6]).astype(np.int64)
    for length, most in ((17, 100), (17, 4), (60, 2), (170, 1)):
        cut = whole[: len(whole) // length * length].reshape(-1, length)
        wanted = cut[np.linspace(0, len(cut) - 1, min(len(cut), most)).astype(int)]
        assert np.array_equal(evenly_chosen(tmp_path / "text", range(1, 6), length, most), wanted)
    for part in (range(1, 6), range(3, 3)):
        with pytest.raises(ValueError, match=r"tokens to validate with; expected 171 or more"):
            evenly_chosen(tmp_path / "text", part, 171, 1)


# What is refused before the model is built
REFUSED = {
    "sequences": (["--sequences", "0"], {}, "--sequences 0: expected a number of 1 or more"),
    "heads": (["--heads", "0"], {}, "--heads 0: expected a number of 1 or more"),
    "within": (["--within", "nan"], {}, "--within nan: expected percent of the dense loss, 0 or more"),
    "both": (["--heads", "2", "--within", "1"], {}, "not allowed with argument"),
    "heads by layer": (["--heads", "2", "--by", "layer"], {}, "--heads 2 with --by layer: expected heads that are"),
    "layers by head": (["--layers", "2"], {}, "--layers 2: expected --by layer beside it; add it, or give --heads"),
    "too many layers": (["--layers", "3", "--by", "layer"], {}, "--layers 3: 3 layers are sparse in --s2-config"),
    "no position": (["--loss-from-position", "-1"], {}, "--loss-from-position -1: expected 0 or more, a place in"),
    "nothing counts": (["--loss-from-position", "256"], {}, "the sequences have 256 tokens; expected less, so that"),
    "there": (["--write", "plan.yaml"], {}, "--write plan.yaml: is there already; expected a new file"),
    "measured": (["--json", "plan.yaml"], {}, "--json plan.yaml: is there already; expected a new file"),
    "one file": (["--json", "new.yaml"], {}, "--json new.yaml: is the file of another option"),
    "config": (["--s2-config", "none.yaml"], {}, "none.yaml"),
    "trained with S2": ([], {"s2_sparsity": STORED.canonical_json()}, "trained with S2-Attention already; expected a"),
    "longer": (["--seq-length", "512"], {}, "--seq-length 512: the checkpoint was trained with 256; expected at most"),
    "function": ([], {"config": FUNCTION}, "--s2-config plan.yaml: specs.S is a function; expected windows and"),
    "mask": ([], {"config": "layers: S\nspecs:\n  S: {mask: m.npz}\n"}, "specs.S is a mask; expected windows and"),
    "mtp": ([], {"config": f"mtp_layers: S\n{CONFIGS['plain']}"}, "mtp_layers: expected a plan without them"),
    "scale": ([], {"config": f"softmax_scale: 0.5\n{CONFIGS['plain']}"}, "softmax_scale 0.5; expected that of the"),
    "layers": ([], {"config": CONFIGS["mixed"], "num_layers": 6}, "for --num-layers 6"),
    "dense": ([], {"config": "layers: D\n"}, "nothing is sparse at 256 tokens; expected a plan with sparse heads"),
    "window": (["--seq-length", "64"], {"config": CONFIGS["window"]}, "nothing is sparse at 64 tokens"),
    "beside": (["--beside", "none.yaml"], {}, "none.yaml"),
    "beside a function": (["--beside", "f.yaml"], {}, "--beside f.yaml: specs.S is a function; expected windows and"),
    "beside dense": (["--beside", "d.yaml"], {}, "--beside d.yaml: nothing is sparse at 256 tokens that is sparse in "
        "--s2-config plan.yaml, too"),
    "beside dense in part": (["--beside", "h.yaml"], {"config": CONFIGS["plain"]}, "--beside h.yaml: KV head 0 of "
        "layer 3 (from 0) attends everything at 256 tokens, and is sparse in --s2-config plan.yaml; expected"),
    "beside a wide window": (["--beside", "v.yaml"], {"config": CONFIGS["plain"]}, "--beside v.yaml: KV head 0 of "
        "layer 1 (from 0) attends everything at 256 tokens"),
    "beside a window": (["--beside", "w.yaml", "--seq-length", "32"], {"config": WINDOWS},
        "--beside w.yaml: nothing is sparse at 32 tokens that is sparse in --s2-config plan.yaml, too"),
    "all dense": (["--beside", "w.yaml"], {"config": "layers: D\n"}, "--s2-config plan.yaml: nothing is sparse at 256"),
    "too many": (["--heads", "6"], {}, "--heads 6: 6 KV heads are sparse in --s2-config plan.yaml; expected fewer"),
    "one head": (["--heads", "1"], {"config": ONE_HEAD}, "--heads 1: 1 KV heads are sparse in --s2-config plan.yaml; "
        "expected fewer, so that one stays sparse; give a YAML with more"),
    "data": (["--data-path", "none"], {}, "--data-path none: .idx is missing; expected an indexed dataset"),
    "split": (["--split", "a,b"], {}, "--split=a,b: expected up to three numbers"),
    "no validation": (["--split", "100,0,0"], {}, "none of the 10 documents of text is for validation; expected one"),
    "short": (["--sequences", "5"], {}, "have 4 whole sequences of 256 tokens; expected as many as are asked for"),
    "shorter": ([], {"seq_length": 2048}, "1200 tokens to validate with; expected 2049 or more"),
    "vocabulary": ([], {"padded_vocab_size": 8}, "--data-path text: has the token 9; expected less than 8"),
    "other layers": ([], {"hybrid_layer_pattern": "**--", "num_layers": 4}, "pattern **--; expected *- or *E repeated"),
    "another model": ([], {"qk_l2_norm": True}, "qk_l2_norm=True; only a Llama- or Qwen-shaped model"),
    "another router": ([], EXPERTS | {"moe_router_score_function": "sigmoid"}, "score_function='sigmoid' (expected "
        "softmax); export-hf, generate and choose-dense take experts only where a softmax router chooses them"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(name, command, tmp_path, capsys):
    options, changes, message = REFUSED[name]
    assert command(*options, **changes) == 2
    out, error = capsys.readouterr()
    assert message in error and error.startswith("error: ") and error.count("\n") == 1 and not out
    assert not (tmp_path / "new.yaml").exists()


@pytest.mark.parametrize("documents", [1, 2, 3, 4, 5, 10])
def test_the_split_that_is_named_validates(documents, command, made_up, tmp_path, capsys):
    """One long document, as a book is, or a few: make-dataset then prints a split without validation."""
    from s2_megatron.tools.dataset.write import write_dataset

    write_dataset(tmp_path / "few", (np.full(6000, 1, np.uint16) for _ in range(documents)))
    given = ("--heads", "1", "--data-path", "few", "--split")
    assert command(*given, "100,0,0") == 2
    (named,) = re.findall(r"use --split (\S+)$", capsys.readouterr().err, re.M)
    assert command(*given, named) == 0


# What it says and writes, with losses that are made up


def test_the_yaml_and_the_table(command, made_up, tmp_path, capsys):
    assert command("--within", "2.1", "--json", "facts.json") == 0
    out, error = capsys.readouterr()
    assert "what the kernels say" in error and "what the kernels say" not in out
    assert re.search(r"│ 1 │ +2 │ +1 │ 2\.0500 │ \+0\.1000 │ +67% │", out)
    chosen = r"│ plan\.yaml \+ the best 2, chosen +│ +4 of 8 │ +[\d.]+% │ 2\.0400 │ +\+2\.00% │"
    assert re.search(chosen, out)
    assert out.splitlines()[-1].startswith("wrote new.yaml: 4 of 8 KV heads are dense, ")
    text = (tmp_path / "new.yaml").read_text()
    assert text.startswith("# Made by s2-megatron choose-dense from dense/iter_0000001\n")
    assert "2.0000 dense, 2.1500 with plan.yaml, 2.0400 with this one (+2.00%)" in text and str(tmp_path) not in text
    plan = load_config(tmp_path / "new.yaml").resolve(num_layers=4, num_heads=4, num_kv_heads=2, seq_length=256)
    assert count_dense(plan) == 4 and dense_kv_heads(plan.layers[2].pattern) == [1]
    hybrid = dict(num_layers=8, hybrid_layer_pattern="*-*E*E*-")  # counted by its attention layers
    for name, more in {"hybrid": EXPERTS | hybrid, "experts": EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]}}.items():
        assert command("--within", "2.1", "--write", f"{name}.yaml", **more) == 0
        assert (tmp_path / f"{name}.yaml").read_text() == text
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["candidates"][0] == {"layer": 2, "kv_heads": [1], "loss": pytest.approx(2.05)}
    assert facts["chosen"] == 2 and [each["size"] for each in facts["sets"]] == [0, 1, 2]
    assert command("--within", "2.1") == 2 and "new.yaml: is there already" in capsys.readouterr().err


def test_heads_that_are_measured_under_another_plan(command, made_up, tmp_path, capsys):
    """--beside loses 3 % and is measured under; the heads are dense in --s2-config, whose offsets and windows stay."""
    (tmp_path / "narrow.yaml").write_text("layers: S\nspecs:\n  S: {local_tokens: 64, stride: 2}\n")
    assert command("--heads", "6", "--beside", "narrow.yaml", config=CONFIGS["mixed"]) == 2  # those of D are no choice
    assert (
        "--heads 6: 6 KV heads are sparse in --s2-config plan.yaml and in --beside narrow.yaml; expected fewer"
        in capsys.readouterr().err
    )
    assert command("--heads", "1", "--beside", "narrow.yaml", "--json", "facts.json", config=CONFIGS["mixed"]) == 0
    out, error = capsys.readouterr()
    assert "│ narrow.yaml + the best 1, chosen" in out and "plan.yaml +" not in out and "loses only" not in error
    text = (tmp_path / "new.yaml").read_text()
    assert "They were measured beside the sparse heads of narrow.yaml." in text
    shape = dict(num_layers=4, num_heads=4, num_kv_heads=2, seq_length=256)
    wanted = with_dense(load_config(tmp_path / "plan.yaml").resolve(**shape), [Unit(2, (1,))])
    assert load_config(tmp_path / "new.yaml").resolve(**shape).canonical_json() == wanted.canonical_json()
    lost = made_up.loss(wanted) / DENSE_LOSS - 1
    assert f"with this one ({lost:+.2%})" in text and f"{lost:+.2%} of the dense loss" in out.splitlines()[-1]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["config"] == "plan.yaml" and facts["beside"] == "narrow.yaml" and len(facts["candidates"]) == 6
    assert facts["result"]["loss"] == pytest.approx(made_up.loss(wanted)) and facts["result"]["dense_kv_heads"] == 3
    assert facts["result"]["density"] == wanted.density() < facts["sets"][1]["density"]


@pytest.mark.parametrize("share, warned", [(0.0, True), (0.0009, True), (0.0011, False)])
def test_a_plan_that_loses_too_little_to_rank_by_is_told(share, warned, command, made_up, capsys):
    made_up.scale = share * DENSE_LOSS / 0.15  # the plan's loss above dense is 0.15 nats otherwise
    assert command("--heads", "1") == 0
    error = capsys.readouterr().err
    said = (
        f"warning: --s2-config plan.yaml loses only {share:+.4%} of the dense loss at 256 tokens, so chance has a say"
    )
    assert (said in error) == warned == ("chance has a say" in error)


def test_a_plan_without_the_first_token_is_told(command, made_up, capsys):
    """With it, heads are ranked beside sparse ones that see it."""
    assert command(config=CONFIGS["mixed"]) == 1
    assert "of 12 query heads in the layers of spec S do not see the first token" in capsys.readouterr().err
    assert command("--json", "other.json", config=CONFIGS["tokens"]) == 1
    assert "do not see the first token" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, row, sentence, sink",
    [
        (
            "tokens",
            r"plan\.yaml without its sink +│ +2 of 8 │ +[\d.]+% │ 2\.5500 │ +\+27\.50% │",
            "without its sink plan.yaml is +27.50% from dense, with it +7.50%, with 1 more dense +2.50%: "
            "the sink gives back 73%",
            {"tokens": 5, "in_plan": True},
        ),
        (
            "mixed",
            r"plan\.yaml with sink_tokens: 64 +│ +2 of 8 │ +[\d.]+% │ 2\.1500 │ +\+7\.50% │",
            "plan.yaml is +27.50% from dense, with sink_tokens: 64 it would be +7.50%: the sink gives back 73%",
            {"tokens": 64, "in_plan": False},
        ),
    ],
)
def test_what_of_the_loss_is_the_sinks(name, row, sentence, sink, command, made_up, monkeypatch, tmp_path, capsys):
    """With and without it, whichever of the two the plan has: 0.4 nats, while any head does not see the first token."""
    of_heads = made_up.loss
    monkeypatch.setattr(
        made_up,
        "loss",
        staticmethod(lambda plan: of_heads(plan) + (0 if without_sink(plan) is None else 0.4)),
    )
    assert command("--heads", "1", config=CONFIGS[name]) == 0
    out = capsys.readouterr().out
    assert re.search(row, out) and sentence in out
    found = json.loads((tmp_path / "new.json").read_text())["sink"]
    losses = {"loss_without": pytest.approx(2.55), "loss_with": pytest.approx(2.15)}
    assert found == sink | losses


def test_a_plan_that_shows_the_first_token_by_itself_has_no_sink_to_tell_of(command, made_up, tmp_path, capsys):
    text = "layers: S\nspecs:\n  S: {local_tokens: 64, stride: 4, head_step: 0, layer_step: 0}\n"
    assert command("--heads", "1", config=text) == 0
    assert "sink" not in capsys.readouterr().out and json.loads((tmp_path / "new.json").read_text())["sink"] is None


@pytest.mark.parametrize("name", ["tokens", "plain", "dense heads", "two specs"])
def test_a_sink_comes_and_goes(name):
    """The rest of the plan stays."""
    plan = resolved(CONFIGS[name], "GQA")[1]
    with_one = with_sink(plan, 20)
    assert sink_tokens(with_one) == 20 and sink_tokens(with_sink(plan, 0)) == 0
    assert count_dense(with_one) == count_dense(plan)
    specs = {key: spec | {"sink_tokens": 20} for key, spec in yaml.safe_load(CONFIGS[name])["specs"].items()}
    wanted = resolved(yaml.safe_dump(yaml.safe_load(CONFIGS[name]) | {"specs": specs}), "GQA")[1]
    assert with_one.canonical_json() == wanted.canonical_json()
    if name != "tokens":
        assert with_sink(with_one, 0).canonical_json() == plan.canonical_json()


def test_layers_instead_of_heads(command, made_up, tmp_path):
    assert command("--within", "2.1", "--by", "layer") == 0
    assert yaml.safe_load((tmp_path / "new.yaml").read_text())["layers"][2:] == ["D", "D"]
    assert command("--layers", "2", "--by", "layer", "--write", "two.yaml") == 0
    assert yaml.safe_load((tmp_path / "two.yaml").read_text())["layers"] == ["D", "S", "D", "D"]  # the last one was


def test_where_no_set_is_near_enough_nothing_is_written(command, made_up, tmp_path, capsys):
    assert command("--within", "0.3", "--json", "facts.json") == 1
    out, error = capsys.readouterr()
    last = error.splitlines()[-1]
    assert last.startswith("no set is within 0.3 % of the dense loss under --s2-config plan.yaml; the best one, of 5")
    assert "chosen" not in out and "the best 5" in out
    assert not (tmp_path / "new.yaml").exists()
    assert json.loads((tmp_path / "facts.json").read_text())["chosen"] is None
