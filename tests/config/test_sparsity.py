"""What a checkpoint stores and a start-up prints of a model's sparsity, and how two of them are compared."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity, diff_sparsity, tensor_parallel_balance
from s2_megatron.config.stored import range_pattern
from s2_megatron.patterns.head import DENSE, HeadPattern
from s2_megatron.patterns.ranges import RangePattern

MODEL = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "seq_length": 512}


def resolved(layers="DS", spec=None, model=None, **settings):
    spec = {"local_blocks": 2, "stride": 4} if spec is None else spec
    config = SparsityConfig.from_data({"layers": layers, "specs": {"S": spec}, **settings})
    return config.resolve(**{**MODEL, **(model or {})})


def text(**arguments):
    return resolved(**arguments).canonical_json()


def rendered(table, width=160):
    output = io.StringIO()
    Console(file=output, width=width).print(table)
    return output.getvalue()


def test_canonical_json_ignores_what_computes_the_same():
    base = text()
    assert base == text(layers="DSDS") == text(layers=["D", "S"])
    assert base == text(model={"seq_length": 8192})
    assert base == text(spec={"local_tokens": 128, "stride": 4, "layer_step": 4})
    assert base == text(
        spec={"ranges": [{"end_blocks": 1, "stride": 1}, {"end_blocks": 2, "stride": 1}, {"stride": 4}]}
    )
    assert base == text(spec={"local_blocks": 2, "stride": 4, "base_offset": 8})
    renamed = SparsityConfig.from_data({"layers": "DT", "specs": {"T": {"local_blocks": 2, "stride": 4}}})
    assert base == renamed.resolve(**MODEL).canonical_json()
    # A spec that attends everything is dense attention, in whatever block size.
    everything = {"ranges": [{"stride": 1}]}
    assert text(layers="D") == text(layers="S", spec=everything) == text(layers="D", block_size=16)


@pytest.mark.parametrize("change", [
    {"layers": "SD"}, {"layers": "S"}, {"block_size": 32}, {"softmax_scale": 0.5}, {"model": {"num_layers": 6}},
    {"model": {"num_heads": 16}}, {"model": {"num_kv_heads": 8}}, {"model": {"mtp_num_layers": 1}, "mtp_layers": "S"},
    *({"spec": {"local_blocks": 2, "stride": 4, **spec}} for spec in (
        {"local_blocks": 3}, {"stride": 2}, {"stride": None}, {"base_offset": 1}, {"layer_step": 1}, {"head_step": 0},
        {"slide": "query"}, {"dense_heads": [1]})),
])  # fmt: skip
def test_canonical_json_and_diff_see_every_change(change):
    old, new = text(), text(**change)
    assert old != new
    assert diff_sparsity(old, new) and diff_sparsity(new, old)
    assert diff_sparsity(old, old) == diff_sparsity(new, new) == []
    assert json.loads(new)["format"] == 1


def test_diff_in_words():
    def changes(before, after, **settings):
        settings["model"] = {"seq_length": 1024, **settings.get("model", {})}
        return diff_sparsity(text(spec=before, **settings), text(spec=after, **settings))

    window = {"local_blocks": 2}
    assert changes({**window, "stride": 16, "layer_step": 0}, {**window, "stride": 8, "layer_step": 0}) == [
        "layers 1, 3: stride 16 -> 8"
    ]
    assert changes({**window, "stride": 4}, {"local_blocks": 3, "stride": 4}) == [
        "layers 1, 3: local 2 blocks -> 3 blocks"
    ]
    assert changes({**window, "stride": 4}, {**window, "stride": 4, "sink_tokens": 3}) == [
        "layers 1, 3: sink_tokens 0 -> 3"
    ]
    assert changes({"window": 100, "stride": 4}, {"window": 101, "stride": 4, "sink_tokens": 3}) == [
        "layers 1, 3: window 100 + stride 4 in 8 heads (blocks of 64) -> "
        "window 101 + stride 4 + sink 3 in 8 heads (blocks of 64)"
    ]
    assert changes({**window, "stride": 4}, window) == ["layers 1, 3: local 2 + stride 4 -> local 2"]
    assert changes({**window, "stride": 4}, {**window, "stride": 4, "dense_heads": [1], "layer_step": 0}) == [
        "layers 1, 3: dense query heads none -> [2, 3]"
    ]
    assert changes({**window, "stride": 4}, {**window, "stride": 4, "base_offset": 1}) == [
        "layers 1, 3: offsets of 8 heads (head 0: 0 -> 1)"
    ]
    assert diff_sparsity(text(), text(layers="DSDD")) == [
        "layer 3: local 2 + stride 4 in 8 heads (blocks of 64) -> dense"
    ]
    assert diff_sparsity(text(), text(block_size=32)) == ["layers 1, 3: block_size 64 -> 32"]
    assert diff_sparsity(text(), text(softmax_scale=0.5)) == ["softmax_scale: default (1/sqrt(head dim)) -> 0.5"]
    assert diff_sparsity(text(), text(model={"num_layers": 6})) == ["number of layers: 4 -> 6"]
    assert diff_sparsity(text(), text(model={"mtp_num_layers": 1}, mtp_layers="D")) == ["number of mtp layers: 0 -> 1"]


def test_diff_of_masks(tmp_path):
    texts = []
    for name, first in (("a", 0), ("b", 1)):
        rows = [sorted({query, min(first, query)}) for query in range(8)]
        np.savez(tmp_path / name, indptr=np.cumsum([0, *map(len, rows)]), indices=np.concatenate(rows))
        config = SparsityConfig.from_data({"layers": "DS", "specs": {"S": {"mask": str(tmp_path / f"{name}.npz")}}})
        texts.append(config.resolve(**MODEL).canonical_json())
    (line,) = diff_sparsity(*texts)
    assert line.startswith("layers 1, 3: block mask ") and line.count("block mask") == 2
    # The masks themselves stay out of the checkpoint.
    assert len(texts[0]) < 1500


@pytest.mark.parametrize("stored", ["", "hello", "[]", "{}", '{"format": 2}'])
def test_diff_refuses_what_it_did_not_write(stored):
    with pytest.raises(ValueError, match=r"stored sparsity .* expected"):
        diff_sparsity(stored, text())


def test_pairs_are_those_of_the_blocks():
    sparsity = resolved(model={"mtp_num_layers": 1}, mtp_layers="S")
    length = 200  # ends inside a block
    dense = 8 * length * (length + 1) // 2
    tokens = np.arange(length)
    total = 2 * dense
    for layer in (*sparsity.layers[1::2], *sparsity.mtp_layers):
        for head in range(8):
            attended = np.zeros((4, 4), dtype=bool)
            for query in range(4):
                attended[query, layer.pattern.key_blocks(head, query)] = True
            mask = attended[tokens[:, None] // 64, tokens[None] // 64] & (tokens[:, None] >= tokens[None])
            total += int(mask.sum())
    assert sparsity.attended_pairs(length) == total
    assert sparsity.density(length) == pytest.approx(total / (5 * dense))
    assert 0 < sparsity.density() < 1 and resolved(layers="D").density() == 1


def test_balance_of_tensor_parallel_ranks():
    spec = {"local_blocks": 1, "stride": 8, "layer_step": 0}
    long = {"num_heads": 8, "num_kv_heads": 8, "seq_length": 8192}
    even = resolved(layers="S", spec=spec, model=long)
    assert 1 <= tensor_parallel_balance(even, 4) < 1.1
    last = resolved(layers="S", spec={**spec, "dense_heads": {"last": 2}}, model=long)
    spread = resolved(layers="S", spec={**spec, "dense_heads": {"spread": 2}}, model=long)
    assert tensor_parallel_balance(last, 4) > 2.5, "one rank has both dense heads"
    assert tensor_parallel_balance(spread, 2) < 1.1 < tensor_parallel_balance(spread, 4)
    assert tensor_parallel_balance(spread, 1) == 1
    # By hand: rank 3 of 4 has the two dense heads of every layer.
    pattern = last.layers[0].pattern
    shares = [pattern.tensor_parallel_slice(rank, 4).attended_pairs(8192) for rank in range(4)]
    assert tensor_parallel_balance(last, 4) == pytest.approx(max(shares) / (sum(shares) / 4))
    assert tensor_parallel_balance(resolved(layers="D"), 8) == 1
    # More ranks than KV heads.
    assert tensor_parallel_balance(resolved(), 8) < 1.2


def test_every_layer_waits_for_its_slowest_rank():
    """Two layers whose dense heads lie on different ranks are balanced in the sum and not in time."""
    model = {**MODEL, "num_layers": 2, "num_kv_heads": 2, "seq_length": 8192}
    spec = {"local_blocks": 1, "stride": 16}
    config = SparsityConfig.from_data(
        {"layers": "ST", "specs": {"S": {**spec, "dense_heads": [0]}, "T": {**spec, "dense_heads": [1]}}}
    )
    assert tensor_parallel_balance(config.resolve(**model), 2) > 1.5


def test_table_says_what_every_layer_does():
    spec, model = {"local_blocks": 2, "stride": 8}, {"num_layers": 8, "mtp_num_layers": 1}
    sparsity = resolved(layers="DSSS", spec=spec, model=model, mtp_layers="D", softmax_scale=0.25)
    lines = rendered(sparsity.table()).splitlines()
    dense = next(line for line in lines if "│ D " in line)
    assert "0, 4, mtp 0" in dense and "100.0%" in dense and " dense " in dense
    sparse = [line for line in lines if "│ S " in line]
    names = {name for line in sparse for name in line.split("│")[1].strip().split(", ")}
    assert names == {"1-3", "5-7"} or names == {"1", "2", "3", "5", "6", "7"}
    pattern = sparsity.layers[1].pattern
    assert f"{pattern.density(512):.1%}" in sparse[0] and f"{pattern.coverage(8):.1%}" in sparse[0]
    assert pattern.describe() in sparse[0] and " s2 " in sparse[0]
    rest = "\n".join(lines)
    assert f"{sparsity.attended_pairs():,}" in rest and f"({sparsity.density():.1%})" in rest
    assert "2 consecutive S layers together cover 100.0%" in rest and "softmax scale: 0.25" in rest


def test_table_with_core_modules():
    sparsity = resolved()
    lines = rendered(sparsity.table(["Stock", "Ours", "Other", "Ours"])).splitlines()
    assert any("│ 1, 3 " in line and "Ours" in line for line in lines)
    assert any("│ 0 " in line and "Stock" in line for line in lines) and any(
        "│ 2 " in line and "Other" in line for line in lines
    )
    with pytest.raises(ValueError, match="3 entries; expected 4"):
        sparsity.table(["a"] * 3)


def test_notes():
    assert any("attends everything" in note for note in resolved(spec={"local_blocks": 8}).notes)
    assert not resolved(spec={"local_blocks": 7}).notes
    assert any("specs.S is in no plan" in note for note in resolved(layers="D").notes)
    assert "note: spec S attends everything" in rendered(resolved(spec={"local_blocks": 8}).table())


def test_a_dense_pattern_of_ours_is_dense_in_the_canonical_form():
    pattern = RangePattern.dense(64, 8, 4)
    layers = tuple(LayerSparsity("X", item) for item in (None, pattern))
    sparsity = ResolvedSparsity(layers, (), None, 64, 8, 4, 512)
    assert json.loads(sparsity.canonical_json())["patterns"] == [{"kind": "dense"}]
    assert [layer.kind for layer in layers] == ["dense", "s2"]


def test_a_form_is_a_pattern_again_where_a_head_needs_no_window_or_sink():
    """Which the form leaves out, and the other heads of the KV head have."""
    for ranges in (DENSE, ((3, 1),), ((2, 1), (None, 4))):
        heads = tuple(HeadPattern(each, 0, 70, 5, 64) for each in ((), ranges))
        pattern = RangePattern(64, 1, heads)
        assert range_pattern(pattern.canonical()).canonical() == pattern.canonical()
