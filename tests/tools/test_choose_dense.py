"""s2-megatron choose-dense: ranking, the choice of a set, the YAML that it writes, and what is refused.

That the printed losses are those of the written YAML is tested with real checkpoints, in tests/megatron.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from argparse import Namespace

import numpy as np
import pytest
import yaml

from s2_megatron.config.load import SparsityConfig, load_config
from s2_megatron.config.sparsity import diff_sparsity
from s2_megatron.tools import commands
from s2_megatron.tools.choose_dense.plan import (
    all_dense,
    candidates,
    count_dense,
    dense_kv_heads,
    with_dense,
    yaml_content,
    yaml_text,
)
from s2_megatron.tools.choose_dense.search import Sets, Unit, rank
from s2_megatron.tools.losses import evenly_chosen

DENSE_LOSS = 2.0
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


CONFIGS = {
    "plain": "layers: S\nspecs:\n  S: {local_tokens: 64, stride: 4}\n",
    "hybrid": "layers: SSSD\nspecs:\n  S: {local_tokens: 64, stride: 4}\n",
    "offsets by layer": "layers: S\nspecs:\n  S: {local_tokens: 64, stride: 16, base_offset: 3, layer_step: 5}\n",
    "two specs": "layers: [A, A1, D, A]\nspecs:\n  A: {local_blocks: 2, stride: 8}\n"
    "  A1: {local_blocks: 2, stride: 4}\n",
    "dense heads": "layers: S\nspecs:\n  S: {local_tokens: 64, stride: 8, dense_heads: {last: 1}}\n",
    "ranges": "layers: S\nsoftmax_scale: 0.25\nspecs:\n  S:\n    ranges: [{end_blocks: 2, stride: 1}, {end_blocks: 9, "
    "stride: 4}, {stride: 6}]\n    layer_step: 7\n",
    "window": "layers: SD\nspecs:\n  S: {local_tokens: 64}\n",
    "paper": "layers: S\nspecs:\n  S: {local_blocks: 2, stride: 16, head_step: paper, slide: query}\n",
}  # fmt: skip
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
    _, hybrid = resolved(CONFIGS["hybrid"], "GQA")
    assert candidates(hybrid, "layer") == [Unit(layer, (0, 1, 2, 3)) for layer in (0, 1, 2, 4, 5, 6)]
    assert len(candidates(hybrid, "head")) == 24 and count_dense(hybrid) == 8
    _, some = resolved(CONFIGS["dense heads"], "GQA")
    assert candidates(some, "layer")[1] == Unit(1, (0, 1, 2)) and Unit(1, (3,)) not in candidates(some, "head")
    _, short = resolved(CONFIGS["window"], "GQA", length=64)  # as long as the window
    assert candidates(short, "head") == []
    assert all_dense(hybrid).density() == 1


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


@pytest.fixture
def command(tmp_path, monkeypatch):
    """run(options, trained=changes of the checkpoint's arguments, config=text) -> the status."""
    from s2_megatron.tools.dataset.write import write_dataset

    trained = dict(
        num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        group_query_attention=True, padded_vocab_size=256, add_qkv_bias=False, qk_layernorm=False, seq_length=256,
        untie_embeddings_and_output_weights=True, split=None, swiglu=True, normalization="RMSNorm",
        position_embedding_type="rope",
    )  # fmt: skip
    write_dataset(tmp_path / "text", (np.full(600, number, np.uint16) for number in range(10)))

    def run(*options: str, config: str = CONFIGS["hybrid"], **changes) -> int:
        monkeypatch.setattr("s2_megatron.tools.hf.torch_dist.iteration_folder", lambda load: load / "iter_0000001")
        arguments = Namespace(**trained | changes)
        monkeypatch.setattr("s2_megatron.tools.hf.checkpoint_model.checkpoint_arguments", lambda folder: arguments)
        others = {"f": FUNCTION, "d": "layers: D\n", "w": WINDOWS, "h": CONFIGS["hybrid"], "v": ONE_WIDE}
        for name, text in {"plan": config, **others}.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        given = {"--load": "dense", "--s2-config": "plan.yaml", "--data-path": "text", "--write": "new.yaml"}
        given |= {"--split": "80,20,0", "--sequences": "4"} | dict(zip(options[::2], options[1::2]))
        switches = ["--eod-mask-loss"] if given.pop("--eod-mask-loss", None) else []
        monkeypatch.chdir(tmp_path)
        try:
            return commands.main(["choose-dense", *itertools.chain.from_iterable(given.items()), *switches])
        except SystemExit as end:
            return end.code

    return run


STORED = SparsityConfig.from_data({"layers": "S", "specs": {"S": {"local_tokens": 128, "stride": 4}}}).resolve(
    num_layers=4, num_heads=4, num_kv_heads=2, seq_length=256
)
ONE_HEAD = "layers: DDDS\nspecs:\n  S: {local_tokens: 64, stride: 4, dense_heads: [0]}\n"
ONE_WIDE = "layers: [S, A, S, S]\nspecs:\n  S: {local_tokens: 64}\n  A: {local_tokens: 256}\n"
WINDOWS = "layers: S\nspecs:\n  S: {local_tokens: 64}\n"
FUNCTION = "layers: S\nspecs:\n  S: {function: 'a:b'}\n"
REFUSED = {
    "sequences": (["--sequences", "0"], {}, "--sequences 0: expected a number of 1 or more"),
    "heads": (["--heads", "0"], {}, "--heads 0: expected a number of 1 or more"),
    "within": (["--within", "nan"], {}, "--within nan: expected percent of the dense loss, 0 or more"),
    "both": (["--heads", "2", "--within", "1"], {}, "not allowed with argument"),
    "heads by layer": (["--heads", "2", "--by", "layer"], {}, "--heads 2 with --by layer: expected heads that are"),
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
    "layers": ([], {"config": CONFIGS["hybrid"], "num_layers": 6}, "for --num-layers 6"),
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
    "another model": ([], {"num_experts": 4}, "num_experts=4; only a Llama- or Qwen-shaped model"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(name, command, tmp_path, capsys):
    options, changes, message = REFUSED[name]
    assert command(*options, **changes) == 2
    out, error = capsys.readouterr()
    assert message in error and error.startswith("error: ") and error.count("\n") == 1 and not out
    assert not (tmp_path / "new.yaml").exists()


# What it says and writes, with losses that are made up


@pytest.fixture
def made_up(monkeypatch):
    """Losses as if every head needed the context equally, but KV head 1 of layer 2 ten times as much."""

    class Measured:
        scale = 1.0

        built = measured = 0
        most = 10**9

        def __init__(self, folder, sequences):
            assert sequences.tokens.shape[1] == 257
            type(self).built += 1

        @classmethod
        def loss(cls, sparsity) -> float:
            if cls.measured == cls.most:
                raise KeyboardInterrupt
            cls.measured += 1
            print("what the kernels say")
            lost = 0.0
            for at, layer in enumerate(sparsity.layers):
                dense = range(2) if layer.pattern is None else dense_kv_heads(layer.pattern)
                lost += sum((0.1 if (at, kv) == (2, 1) else 0.01) for kv in range(2) if kv not in dense)
            return DENSE_LOSS + lost * cls.scale

    monkeypatch.setattr("s2_megatron.tools.choose_dense.measure.Measured", Measured)
    return Measured


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
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["candidates"][0] == {"layer": 2, "kv_heads": [1], "loss": pytest.approx(2.05)}
    assert facts["chosen"] == 2 and [each["size"] for each in facts["sets"]] == [0, 1, 2]
    assert command("--within", "2.1") == 2 and "new.yaml: is there already" in capsys.readouterr().err


def test_heads_that_are_measured_under_another_plan(command, made_up, tmp_path, capsys):
    """--beside loses 3 % and is measured under; the heads are dense in --s2-config, whose offsets and windows stay."""
    (tmp_path / "narrow.yaml").write_text("layers: S\nspecs:\n  S: {local_tokens: 64, stride: 2}\n")
    assert command("--heads", "6", "--beside", "narrow.yaml", config=CONFIGS["hybrid"]) == 2  # those of D are no choice
    assert (
        "--heads 6: 6 KV heads are sparse in --s2-config plan.yaml and in --beside narrow.yaml; expected fewer"
        in capsys.readouterr().err
    )
    assert command("--heads", "1", "--beside", "narrow.yaml", "--json", "facts.json", config=CONFIGS["hybrid"]) == 0
    out, error = capsys.readouterr()
    assert "│ narrow.yaml + the best 1, chosen" in out and "plan.yaml +" not in out and "warning" not in error
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
    assert (said in error) == warned and ("warning" in error) == warned


def test_a_plan_with_nothing_to_gain_is_told_at_once(command, made_up, tmp_path, capsys):
    made_up.scale = 0.01  # +0.075 %
    assert command("--within", "0.1") == 1
    out, error = capsys.readouterr()
    assert error.splitlines()[-1] == (
        "nothing to choose: --s2-config plan.yaml loses +0.0750% of the dense loss at 256 tokens, within 0.1 %; no "
        "YAML is written; train with plan.yaml as it is, or ask for --heads N"
    )
    assert not (tmp_path / "new.yaml").exists() and "warning" not in error and "one more dense" not in out
    assert len(json.loads((tmp_path / "new.json").read_text())["losses"]) == 2, "no candidate was measured"


def test_it_says_first_what_it_will_do(command, made_up, capsys):
    assert command("--heads", "1") == 0
    first, *rest = [line for line in capsys.readouterr().err.splitlines() if line != "what the kernels say"]
    assert first == (
        "choose-dense: 4 sequences of 256 tokens of text, fp32 on a CPU: 6 candidates, about 11 measurements"
    )
    assert re.fullmatch(r"a measurement takes 0\.0 s, all of them about \d+ s", rest[0])


def test_an_imported_model_is_not_measured_at_all_its_positions(command, made_up, monkeypatch, capsys):
    """Its checkpoint says nothing of a training; 131,072 positions would be as many tokens a sequence."""
    monkeypatch.setattr("s2_megatron.tools.choose_dense.command.IMPORTED", 256)
    assert command("--heads", "1", seq_length=131072, train_iters=None, train_samples=None) == 0
    assert (
        "4 sequences of 256 tokens of text, fp32 on a CPU (the model has positions for 131072)"
        in capsys.readouterr().err
    )
    assert command("--heads", "1", "--write", "b.yaml", seq_length=131072, train_iters=10, train_samples=None) == 2
    assert "1200 tokens to validate with; expected 131073" in capsys.readouterr().err


def test_losses_are_taken_again_for_another_choice(command, made_up, tmp_path, capsys):
    assert command("--within", "0.3") == 1 and (made_up.built, made_up.measured) == (1, 11)
    assert command("--within", "2.1", "--from-json", "new.json") == 0
    assert (made_up.built, made_up.measured) == (1, 11), "all sets were known: no model is built"
    assert "of dense" in capsys.readouterr().out
    fresh = (tmp_path / "new.yaml").read_text()
    assert command("--within", "2.1", "--write", "again.yaml") == 0 and made_up.measured == 20
    assert (tmp_path / "again.yaml").read_text() == fresh
    before = json.loads((tmp_path / "new.json").read_text())["losses"]
    assert command("--heads", "3", "--from-json", "new.json", "--write", "three.yaml") == 0
    after = json.loads((tmp_path / "new.json").read_text())["losses"]
    assert made_up.measured == 21 and len(after) == len(before) + 1 and before.items() <= after.items()
    other = "layers: SSSD\nspecs:\n  S: {local_tokens: 64, stride: 2}\n"
    assert command("--heads", "1", "--from-json", "new.json", "--write", "other.yaml", config=other) == 0
    assert made_up.measured == 21 + 7, "of another plan only the dense loss is known"


def test_an_interrupted_run_keeps_what_it_measured(command, made_up, tmp_path, capsys):
    made_up.most = 5
    assert command("--heads", "2") == 130
    assert "5 losses are kept; go on with --from-json new.json" in capsys.readouterr().err
    made_up.most = 10**9
    assert command("--heads", "2", "--from-json", "new.json") == 0 and made_up.measured == 5 + 4


FROM = {
    "other sequences": (
        ["--sequences", "3"],
        None,
        "measured with another choice of sequences; expected losses of this",
    ),
    "masked": (["--eod-mask-loss", "1"], None, "measured with another choice of sequences"),
    "no file": (
        ["--from-json", "none.json"],
        None,
        "--from-json none.json: No such file or directory; expected a file",
    ),
    "a list": ([], "[]", "--from-json kept.json: has no measured losses; expected a file that --json wrote"),
    "no number": ([], '{"measured_of": {}, "losses": {"a": NaN}}', "has no measured losses"),
    "nothing of it": ([], '{"measured_of": {}, "losses": {"a": 1.0}}', "another checkpoint and another choice of"),
}


@pytest.mark.parametrize("name", FROM)
def test_losses_of_something_else_are_refused(name, command, made_up, tmp_path, capsys):
    options, content, message = FROM[name]
    assert command("--heads", "1", "--json", "kept.json", "--write", "first.yaml") == 0
    if content is not None:
        (tmp_path / "kept.json").write_text(content)
    capsys.readouterr()
    assert command("--heads", "1", "--from-json", "kept.json", *options) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and message in lines[0] and not (tmp_path / "new.yaml").exists()


def test_losses_are_known_by_the_weights(tmp_path):
    from s2_megatron.tools.choose_dense.kept import weights_sha256

    def written(name: str, content: bytes, checksum: bool) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(content)
        if checksum:
            line = f"{hashlib.sha256(content).hexdigest()}  __0_0.distcp\n"
            (tmp_path / name / "rank_0.sha256").write_text(line)
        return weights_sha256(tmp_path / name)

    assert written("a", b"weights", True) == written("b", b"weights", False) != written("c", b"Weights", False)


def test_documents_end_and_begin_where_the_dataset_says(command, tmp_path):
    from s2_megatron.tools.choose_dense.measure import validation_sequences
    from s2_megatron.tools.dataset.write import write_dataset
    from s2_megatron.tools.losses import with_starts

    lengths = (5, 7, 1, 33, 2, 90)
    documents = [np.append(np.full(size - 1, 10 + at), 3) for at, size in enumerate(lengths)]
    write_dataset(tmp_path / "ended", documents)
    rows, starts = with_starts(tmp_path / "ended", range(6), 23, 100)
    whole = np.concatenate(documents)[: rows.size]
    first = np.zeros(138, bool)
    first[np.cumsum(lengths)[:-1]] = True
    for at, (row, found) in enumerate(zip(rows, starts)):
        assert np.array_equal(row, whole[23 * at : 23 * at + 23])
        assert found.tolist() == [place for place in range(1, 23) if first[23 * at + place]]
    trained = Namespace(split="50,50,0", padded_vocab_size=256)
    given = (str(tmp_path / "ended"), "0.00001,1,0", trained, 20, 5)
    found = validation_sequences(*given, eod_mask_loss=True, apart=True)
    assert np.array_equal(found.counted, found.tokens[:, :-1] != 3) and len(found.starts) == 5
    hashes = {validation_sequences(*given, eod_mask_loss=a, apart=b).sha256() for a in (0, 1) for b in (0, 1)}
    assert len(hashes) == 4
    write_dataset(tmp_path / "bare", [np.full(30, at) for at in range(6)])
    with pytest.raises(
        ValueError, match=r"--eod-mask-loss: documents of .*bare end with the tokens \[0, 3, 4\] and other"
    ):
        validation_sequences(str(tmp_path / "bare"), *given[1:], eod_mask_loss=True)


def test_layers_instead_of_heads(command, made_up, tmp_path):
    assert command("--within", "2.1", "--by", "layer") == 0
    assert yaml.safe_load((tmp_path / "new.yaml").read_text())["layers"][2:] == ["D", "D"]


def test_where_no_set_is_near_enough_nothing_is_written(command, made_up, tmp_path, capsys):
    assert command("--within", "0.3", "--json", "facts.json") == 1
    out, error = capsys.readouterr()
    last = error.splitlines()[-1]
    assert last.startswith("no set is within 0.3 % of the dense loss under --s2-config plan.yaml; the best one, of 5")
    assert "chosen" not in out and "the best 5" in out
    assert not (tmp_path / "new.yaml").exists()
    assert json.loads((tmp_path / "facts.json").read_text())["chosen"] is None
