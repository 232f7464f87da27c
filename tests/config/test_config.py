"""What the sparsity YAML says reaches the patterns, as the design defines them."""

import json

import pytest

from s2_megatron.config.errors import ConfigError
from s2_megatron.config.load import SparsityConfig, load_config
from s2_megatron.patterns.ranges import make_range_pattern

# What the tests of the sparsity YAML resolve their configs for.
MODEL = {"num_layers": 8, "num_heads": 8, "num_kv_heads": 2, "seq_length": 1024}
S = "specs: {S: {local_blocks: 2, stride: 4}}\n"


def resolve(path, allow=False, **model):
    return load_config(path, allow_python_patterns=allow).resolve(**{**MODEL, **model})


def test_plan_tiles_and_matches(write):
    for plan in ("DS", "DSDSDSDS", "[D, S]"):
        resolved = resolve(write(f"layers: {plan}\n{S}"))
        assert [layer.spec for layer in resolved.layers] == list("DSDSDSDS")
        assert [layer.kind for layer in resolved.layers] == ["dense", "s2"] * 4
    long_names = resolve(write("layers: [D, wide]\nspecs: {wide: {local_blocks: 2}}\n"))
    assert long_names.layers[1].spec == "wide"


def test_tokens_and_blocks_are_the_same(write):
    texts = [
        "local_tokens: 128, stride: 4",
        "local_blocks: 2, stride: 4",
        "ranges: [{end_tokens: 128, stride: 1}, {stride: 4}]",
        "ranges: [{end_blocks: 2, stride: 1}, {stride: 4}]",
    ]
    resolved = [resolve(write(f"layers: S\nspecs: {{S: {{{text}}}}}\n")) for text in texts]
    assert len({item.canonical_json() for item in resolved}) == 1
    expected = make_range_pattern(block_size=64, num_heads=8, num_kv_heads=2, ranges=((2, 1), (None, 4)))
    assert resolved[0].layers[0].pattern == expected
    window = resolve(write("layers: S\nspecs: {S: {local_tokens: 128}}\n"))
    assert window.layers[0].pattern.heads[0].ranges == ((2, 1),)


def test_windows_and_sinks_in_tokens(write):
    shape = dict(block_size=64, num_heads=8, num_kv_heads=2)
    for text, expected in (
        ("window: 1000", dict(ranges=(), window=1000)),
        ("window: 1000, stride: 4, sink_tokens: 5", dict(ranges=((None, 4),), window=1000, sink_tokens=5)),
        ("window: [70, 300]", dict(ranges=(), window=[70, 300])),
        ("local_blocks: 2, stride: 4, sink_tokens: 5", dict(ranges=((2, 1), (None, 4)), sink_tokens=5)),
    ):
        layer = resolve(write(f"layers: S\nspecs: {{S: {{{text}, dense_heads: [1]}}}}\n")).layers[0]
        assert layer.pattern == make_range_pattern(**shape, **expected, dense_heads=[1]), text
    with pytest.raises(ConfigError) as caught:
        resolve(write("layers: S\nspecs: {S: {window: [70, 300, 1]}}\n"))
    assert "specs.S.window (line 2): got 3 windows; expected one for each KV head of a model with" in str(caught.value)


def test_settings_reach_the_pattern(write):
    steps = "head_step: paper, base_offset: 3, layer_step: 5"
    spec = f"local_blocks: 2, stride: 8, slide: query, {steps}, dense_heads: {{last: 1}}"
    resolved = resolve(
        write(f"block_size: 32\nlayers: DSS\nsoftmax_scale: 0.25\nspecs: {{S: {{{spec}}}}}\n"), num_layers=6
    )
    settings = {
        "block_size": 32,
        "num_heads": 8,
        "num_kv_heads": 2,
        "ranges": ((2, 1), (None, 8)),
        "slide": "query",
        "head_step": "paper",
        "base_offset": 3,
        "layer_step": 5,
        "dense_heads": {"last": 1},
    }
    # The ordinal counts the layers of the spec, so the dense layers do not move it.
    expected = [None, 0, 1, None, 2, 3]
    for layer, ordinal in zip(resolved.layers, expected):
        pattern = None if ordinal is None else make_range_pattern(**settings, layer_index=ordinal)
        assert layer.pattern == pattern
    assert resolved.softmax_scale == 0.25 and resolved.block_size == 32


def test_ordinals_are_counted_per_spec_and_run_on_into_mtp(write):
    spec = "{local_blocks: 2, stride: 16, layer_step: 1}"
    text = f"layers: SW\nmtp_layers: S\nspecs: {{S: {spec}, W: {spec}}}\n"
    resolved = resolve(write(text), num_layers=4, mtp_num_layers=2)
    offsets = [layer.pattern.heads[0].offset for layer in resolved.all_layers]
    assert offsets == [0, 0, 1, 1, 2, 3]
    # Without such layers in the model the policy is no error.
    assert resolve(write(text), num_layers=4).mtp_layers == ()


def test_a_number_of_dense_heads_is_spread(write):
    text = "layers: S\nspecs: {{S: {{local_blocks: 2, stride: 4, dense_heads: {}}}}}\n"
    results = [
        resolve(write(text.format(heads)), num_kv_heads=8).canonical_json() for heads in ("2", "{spread: 2}", "[0, 4]")
    ]
    assert len(set(results)) == 1
    assert results[0] != resolve(write(text.format("{last: 2}")), num_kv_heads=8).canonical_json()


def test_equal_layers_share_their_pattern(write):
    resolved = resolve(
        write(
            "layers: ST\nspecs: {S: {local_blocks: 2, stride: 4}, T: {local_tokens: 128, stride: 4, layer_step: 4}}\n"
        )
    )
    by_form = {}
    for layer in resolved.layers:
        by_form.setdefault(json.dumps(layer.pattern.canonical()), set()).add(id(layer.pattern))
    assert all(len(ids) == 1 for ids in by_form.values())
    assert len(by_form) < len(resolved.layers)
    assert resolved.layers[1].pattern is resolved.layers[3].pattern, "an offset of 4 is none at a stride of 4"


def test_config_from_python():
    config = SparsityConfig.from_data({"layers": "DS", "specs": {"S": {"local_blocks": 2, "stride": 4}}})
    assert config.resolve(**MODEL).layers[1].kind == "s2"
    with pytest.raises(ValueError, match="layers: got 'X'"):
        SparsityConfig.from_data({"layers": "X"})
