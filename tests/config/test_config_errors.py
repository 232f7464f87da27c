"""Every way to get the sparsity YAML wrong gives one ValueError with file, key, got, expected and fix."""

import re

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s2_megatron.config.errors import ConfigError
from s2_megatron.config.load import load_config
from s2_megatron.config.schema import RangeConfig, S2Config, SpecConfig
from tests.config.test_config import MODEL

S = "specs: {S: {local_blocks: 2, stride: 4}}\n"

# (YAML, key, line, got, expected, nearest valid). Each of the five must stand in the message.
BAD_FILES = {
    "unknown key": (f"layers: S\nblok_size: 64\n{S}", "blok_size", 2, "'blok_size'", "block_size, layers",
        "block_size"),
    "unknown key in a spec": ("layers: S\nspecs:\n  S:\n    local_tokns: 64\n", "specs.S.local_tokns", 4,
        "'local_tokns'", "one of window, local_tokens, local_blocks", "local_tokens"),
    "unknown key in a range": ("layers: S\nspecs:\n  S:\n    ranges:\n    - {end_block: 4, stride: 1}\n",
        "specs.S.ranges[0].end_block", 5, "'end_block'", "end_tokens, end_blocks, stride", "end_blocks"),
    "text for a number": ("layers: S\nspecs: {S: {local_tokens: '128'}}\n", "specs.S.local_tokens", 2, "'128'",
        "an integer", "128"),
    "no tokens": ("layers: S\nspecs: {S: {local_tokens: 0}}\n", "specs.S.local_tokens", 2, "0", "1 or more", "1024"),
    "fraction of a block": ("layers: S\nspecs: {S: {local_tokens: 1000.0}}\n", "specs.S.local_tokens", 2, "1000.0",
        "an integer", "1024"),
    "number for a range": ("layers: S\nspecs: {S: {ranges: [{end_tokens: 64, stride: 1}, 16]}}\n",
        "specs.S.ranges[1]", 2, "16", "a mapping", "{stride: 16}"),
    "fraction for a number": ("layers: S\nspecs: {S: {local_blocks: 2.6}}\n", "specs.S.local_blocks", 2, "2.6",
        "an integer", "3"),
    "boolean for a number": ("layers: S\nspecs: {S: {local_blocks: true}}\n", "local_blocks", 2, "true",
        "an integer", "16"),
    "YAML 1.1 float": ("layers: D\nsoftmax_scale: 1e-2\n", "softmax_scale", 2, "'1e-2'", "a number", "0.01"),
    "YAML 1.1 small float": ("layers: D\nsoftmax_scale: 1e-5\n", "softmax_scale", 2, "'1e-5'", "a number",
        "1.0e-05"),
    "YAML 1.1 large float": ("layers: D\nsoftmax_scale: 1e22\n", "softmax_scale", 2, "'1e22'", "a number",
        "0.125"),
    "digits of a float": ("layers: D\nsoftmax_scale: 123456789e-9\n", "softmax_scale", 2, "'123456789e-9'",
        "a number", "0.123456789"),
    "no finite float": ("layers: D\nsoftmax_scale: nan\n", "softmax_scale", 2, "'nan'", "a number",
        "0.125"),
    "too large a float": ("layers: D\nsoftmax_scale: 1e400\n", "softmax_scale", 2, "'1e400'", "a number",
        "0.125"),
    "a negative float": ("layers: D\nsoftmax_scale: -1e-5\n", "softmax_scale", 2, "'-1e-5'", "a number",
        "0.125"),
    "negative scale": ("layers: D\nsoftmax_scale: -1.0\n", "softmax_scale", 2, "-1.0", "1.0e-06 or more", "1.0e-06"),
    "huge scale": ("layers: D\nsoftmax_scale: 1.0e+39\n", "softmax_scale", 2, "1e+39", "at most 1000000.0",
        "1000000.0"),
    "denormal scale": ("layers: D\nsoftmax_scale: 1.0e-39\n", "softmax_scale", 2, "1e-39", "1.0e-06 or more",
        "1.0e-06"),
    "infinite scale": ("layers: D\nsoftmax_scale: .inf\n", "softmax_scale", 2, "inf", "finite", "0.125"),
    "block size": ("layers: D\nblock_size: 60\n", "block_size", 2, "60", "16, 32, 64 or 128", "64"),
    "boolean plan": ("layers: NO\n", "layers", 1, "false", "a plan such as SSSD", "in quotes"),
    "number plan": ("layers: 12\n", "layers", 1, "12", "a plan such as SSSD", "SSSD"),
    "no plan": (S, "layers", 0, "nothing", "the key layers", "layers: SSSD"),
    "unknown spec": (f"layers: DSs\n{S}", "layers", 1, "'s'", "one of D, S", "S"),
    "unknown spec in mtp": (f"layers: S\nmtp_layers: s\n{S}", "mtp_layers", 2, "'s'", "one of D, S", "S"),
    "D redefined": ("layers: D\nspecs: {D: {local_blocks: 2}}\n", "specs.D", 2, "named D", "predefined as dense",
        "rename"),
    "spec name": ("layers: D\nspecs: {'a-b': {local_blocks: 2}}\n", "specs.a-b", 2, "'a-b'", "letters", "S"),
    "tokens": ("layers: S\nspecs: {S: {local_tokens: 1000}}\n", "local_tokens", 2, "1000",
        "multiple of block_size=64", "960 or 1024"),
    "few tokens": ("layers: S\nspecs: {S: {local_tokens: 8}}\n", "local_tokens", 2, "8",
        "multiple of block_size=64", "64"),
    "range tokens": ("layers: S\nspecs: {S: {ranges: [{end_tokens: 100, stride: 1}]}}\n",
        "specs.S.ranges[0].end_tokens", 2, "100", "multiple of block_size=64", "64 or 128"),
    "range of no blocks": ("layers: S\nspecs: {S: {ranges: [{end_blocks: 0, stride: 1}]}}\n",
        "specs.S.ranges[0].end_blocks", 2, "0", "1 or more", "1"),
    "offset": ("layers: S\nspecs: {S: {local_blocks: 2, stride: 4, base_offset: x}}\n", "specs.S.base_offset", 2, "'x'",
        "an integer", "0"),
    "first stride": ("layers: S\nspecs: {S: {ranges: [{end_blocks: 4, stride: 2}, {stride: 4}]}}\n",
        "specs.S.ranges[0].stride", 2, "2", "1 in the first range", "1"),
    "ends do not grow": (
        "layers: S\nspecs: {S: {ranges: [{end_blocks: 4, stride: 1}, {end_tokens: 256, stride: 4}]}}\n",
        "specs.S.ranges[1].end_tokens", 2, "256", "more than the range before it, 256", "320"),
    "end left out": ("layers: S\nspecs: {S: {ranges: [{stride: 1}, {end_blocks: 4, stride: 4}]}}\n",
        "specs.S.ranges[0]", 2, "no end", "in every range but the last", "end_tokens: 1024"),
    "two ends": ("layers: S\nspecs: {S: {ranges: [{end_blocks: 4, end_tokens: 256, stride: 1}]}}\n",
        "specs.S.ranges[0]", 2, "end_tokens and end_blocks", "one of the two", "remove end_blocks"),
    "no stride in a range": ("layers: S\nspecs: {S: {ranges: [{end_blocks: 4}]}}\n", "specs.S.ranges[0].stride", 2,
        "nothing", "the key stride", "stride: 16"),
    "no ranges": ("layers: S\nspecs: {S: {ranges: []}}\n", "specs.S.ranges", 2, "[]", "at least 1 item", "stride: 1"),
    "two kinds": ("layers: S\nspecs: {S: {local_blocks: 4, local_tokens: 256}}\n", "specs.S", 2,
        "local_tokens and local_blocks", "exactly one of", "remove local_blocks"),
    "window and mask": ("layers: S\nspecs: {S: {local_blocks: 4, mask: a.npz}}\n", "specs.S", 2,
        "local_blocks and mask", "exactly one of", "remove mask"),
    "empty spec": ("layers: S\nspecs: {S: {}}\n", "specs.S", 2, "none of them", "exactly one of", "local_tokens: 1024"),
    "null spec": ("layers: S\nspecs:\n  S:\n", "specs.S", 3, "nothing (null)", "a mapping", "local_tokens: 1024"),
    "stride alone": ("layers: S\nspecs: {S: {stride: 4}}\n", "specs.S", 2, "stride without a window",
        "exactly one of", "local_tokens"),
    "stride beside ranges": ("layers: S\nspecs: {S: {stride: 4, ranges: [{stride: 1}]}}\n", "specs.S.stride", 2,
        "4 beside ranges", "only beside window, local_tokens", "into the ranges"),
    "zero stride": ("layers: S\nspecs: {S: {local_blocks: 4, stride: 0}}\n", "specs.S.stride", 2, "0", "1 or more",
        "1"),
    "window of no token": ("layers: S\nspecs: {S: {window: 0}}\n", "specs.S.window", 2, "0", "1 to", "1024"),
    "window in text": ("layers: S\nspecs: {S: {window: wide}}\n", "specs.S.window", 2, "'wide'",
        "a number of tokens, 1 to", "1024"),
    "windows with a hole": ("layers: S\nspecs: {S: {window: [128, null]}}\n", "specs.S.window", 2, "[128, null]",
        "a list with one for each KV head", "1024"),
    "two windows": ("layers: S\nspecs: {S: {window: 100, local_blocks: 4}}\n", "specs.S", 2,
        "window and local_blocks", "exactly one of", "remove local_blocks"),
    "window and ranges": ("layers: S\nspecs: {S: {window: 100, ranges: [{stride: 1}]}}\n", "specs.S", 2,
        "window and ranges", "exactly one of", "remove ranges"),
    "no sink": ("layers: S\nspecs: {S: {window: 100, sink_tokens: -1}}\n", "specs.S.sink_tokens", 2, "-1", "0 or more",
        "0"),
    "sink beside mask": ("layers: S\nspecs: {S: {mask: a.npz, sink_tokens: 4}}\n", "specs.S.sink_tokens", 2,
        "4 beside mask", "only beside ranges or a window", "remove it"),
    "slide": ("layers: S\nspecs: {S: {local_blocks: 4, slide: kvs}}\n", "specs.S.slide", 2, "'kvs'", "kv or query",
        "kv"),
    "head step": ("layers: S\nspecs: {S: {local_blocks: 4, head_step: papr}}\n", "specs.S.head_step", 2, "'papr'",
        "auto, paper", "paper"),
    "layer step": ("layers: S\nspecs: {S: {local_blocks: 4, layer_step: -1}}\n", "specs.S.layer_step", 2, "-1",
        "auto, or a number", "0"),
    "dense heads kind": ("layers: S\nspecs: {S: {local_blocks: 4, dense_heads: {lst: 2}}}\n", "specs.S.dense_heads",
        2, "lst", "{last: n} or {spread: n}", "{last: 2}"),
    "dense heads twice": ("layers: S\nspecs: {S: {local_blocks: 4, dense_heads: [1, 1]}}\n", "specs.S.dense_heads",
        2, "[1, 1]", "each KV head once", "[1]"),
    "slide beside mask": ("layers: S\nspecs: {S: {mask: a.npz, slide: kv}}\n", "specs.S.slide", 2,
        "'kv' beside mask", "only beside ranges or a window", "remove it"),
    "function name": ("layers: S\nspecs: {S: {function: my_module.my_function}}\n", "specs.S.function", 2,
        "'my_module.my_function'", "module:function", "my_patterns:my_function"),
    "list for a mapping": ("- layers: S\n", "the file", 0, "the list", "a mapping", "layers: D"),
    "empty file": ("# nothing\n", "the file", 0, "nothing", "a mapping", "layers: D"),
    "specs is a list": ("layers: S\nspecs: [S]\n", "specs", 2, '["S"]', "a mapping", "{S: {local_tokens"),
    "duplicate key": ("layers: S\nspecs: {S: {local_blocks: 2}}\nlayers: D\n", "layers", 1, "lines 1 and 3",
        "each key once", "remove line"),
    "duplicate spec": ("layers: S\nspecs:\n  S: {local_blocks: 2}\n  S: {local_blocks: 3}\n", "specs.S", 3,
        "lines 3 and 4", "each key once", "remove line"),
    "boolean key": ("layers: N\nspecs: {no: {local_blocks: 2}}\n", "specs", 2, "the key no", "a name", "'no'"),
    "syntax": ("layers: [S\nspecs: {}\n", "the file", 0, "line 2", "one YAML document", "correct that line"),
    "tab": ("layers: S\nspecs:\n\tS: {}\n", "the file", 0, "line 3", "one YAML document", "indent with spaces"),
    "two documents": ("layers: D\n---\nlayers: D\n", "the file", 0, "another document", "one YAML document", "correct"),
    "endless alias": ("layers: S\nspecs: &a {S: *a}\n", "specs.S", 2, "an alias", "values that end",
        "write the value out"),
    "object tag": ("layers: !!python/object/apply:os.system ['touch /tmp/never']\n", "layers", 1,
        "!!python/object/apply:os.system", "no tag builds an object", "module:function"),
    "object tag as key": ("layers: S\n!!python/name:os.system x: 1\n", "the file", 0,
        "on line 2, which YAML reads as python/name", "a name as the key", "'x'"),
    "date": ("layers: 2026-01-02\n", "layers", 1, "!!timestamp", "no tag builds an object", "remove the tag"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(write, case):
    text, key, line, got, expected, fix = BAD_FILES[case]
    path = write(text)
    with pytest.raises(ValueError) as caught:
        load_config(path)
    message = str(caught.value)
    assert isinstance(caught.value, ConfigError)
    assert message.startswith(f"{path}: ")
    # The parts in their places: a got that stands in the expectation proves nothing.
    place = re.escape(f"{key} (line {line})" if line else key)
    found = re.search(rf"{place}: got (?P<got>.*?); expected (?P<expected>.*?); nearest valid: (?P<fix>.*)", message)
    assert found, message
    assert got in found["got"] and expected in found["expected"] and fix in found["fix"], message


def test_all_problems_in_one_error(write):
    path = write("layers: S\nblock_sise: 64\nspecs: {S: {local_blocks: x, stride: 0}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert f"{path}: 3 problems" in message
    assert all(key in message for key in ("block_sise", "specs.S.local_blocks", "specs.S.stride"))
    assert len(caught.value.problems) == 3


def test_missing_file_names_its_neighbour(write, tmp_path):
    write("layers: D\n", "quickstart.yaml")
    with pytest.raises(
        ValueError, match=r"quickstrat.yaml: the file: got no such file; .* nearest valid: .*quickstart.yaml"
    ):
        load_config(tmp_path / "quickstrat.yaml")
    with pytest.raises(ValueError, match="got a folder"):
        load_config(tmp_path)


def test_tags_run_nothing(write, tmp_path):
    target = tmp_path / "made"
    with pytest.raises(ValueError, match="no tag builds an object"):
        load_config(write(f"layers: D\nspecs: !!python/object/apply:os.mkdir ['{target}']\n"))
    assert not target.exists()


# Wrong only for a certain model: (YAML, model, key, got, expected, fix)
BAD_MODELS = {
    "plan": (f"layers: DSSS\n{S}", {"num_layers": 30}, "layers", "'DSSS', 4 names, for --num-layers 30",
        "length is 30 or divides it", r"a plan of 3 or 5 names, or --num-layers 28 or 32"),
    "long plan": (f"layers: DSSS\n{S}", {"num_layers": 2}, "layers", "4 names, for --num-layers 2",
        "is 2 or divides it", r"a plan of 2 names, or --num-layers 4"),
    "list plan": (f"layers: [D, S, S]\n{S}", {}, "layers", '["D", "S", "S"]', "is 8 or divides it", "2 or 4 names"),
    "no mtp policy": (f"layers: DS\n{S}", {"mtp_num_layers": 1}, "mtp_layers", "a model with --mtp-num-layers 1",
        "of D, S", "mtp_layers: D or mtp_layers: S"),
    "mtp plan": (f"layers: DS\nmtp_layers: SS\n{S}", {"mtp_num_layers": 1}, "mtp_layers", "for --mtp-num-layers 1",
        "is 1 or divides it", "a plan of 1 names"),
    "dense heads list": ("layers: S\nspecs: {S: {local_blocks: 2, dense_heads: [0, 5]}}\n", {},
        "specs.S.dense_heads", "[0, 5]", "--num-query-groups 2", "[0]"),
    "dense heads count": ("layers: S\nspecs: {S: {local_blocks: 2, dense_heads: {last: 3}}}\n", {},
        "specs.S.dense_heads", "{last: 3}", "--num-query-groups 2", "{last: 2}"),
    "no mask file": ("layers: S\nspecs: {S: {mask: other.npz}}\n", {}, "specs.S.mask", "does not exist",
        "relative to the YAML", "an existing .npz"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_model(write, case):
    text, model, key, got, expected, fix = BAD_MODELS[case]
    path = write(text)
    config = load_config(path)
    with pytest.raises(ValueError) as caught:
        config.resolve(**{**MODEL, **model})
    message = str(caught.value)
    assert message.startswith((f"{path}: {key} ", f"{path}: {key}:"))
    before, after = message.split("; expected ")
    middle, last = after.split("; nearest valid: ")
    assert got in before and expected in middle and fix in last, message


def test_heads_that_do_not_divide(write):
    with pytest.raises(
        ValueError, match=r"--num-attention-heads 8 .* --num-query-groups 3: .* nearest valid: --num-query-groups [24]"
    ):
        load_config(write("layers: D\n")).resolve(**{**MODEL, "num_kv_heads": 3})


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3), st.dates()
)
VALUES = st.recursive(
    SCALARS,
    lambda part: st.lists(part, max_size=2) | st.dictionaries(st.text(max_size=4), part, max_size=2),
    max_leaves=4,
)
SPECS = st.dictionaries(st.sampled_from([*SpecConfig.model_fields, "other"]), VALUES, max_size=4)
FILES = st.fixed_dictionaries(
    {"layers": st.just("S") | VALUES, "specs": VALUES | st.dictionaries(st.sampled_from("STD"), SPECS, max_size=2)},
    optional=dict.fromkeys(("block_size", "mtp_layers", "softmax_scale", "other"), VALUES),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=FILES)
def test_whatever_stands_there_is_one_error(write, data):
    path, caught = write(yaml.safe_dump(data)), None
    try:
        load_config(path)
    except ConfigError as error:
        caught = error
    if caught is not None:
        assert str(caught).startswith(str(path)) and caught.problems
        assert all(problem.got and problem.expected and problem.fix for problem in caught.problems)


def test_every_key_has_a_bad_example():
    """A new setting comes with what is said when it is wrong."""
    named = {case[1] for case in BAD_FILES.values()} | {case[2] for case in BAD_MODELS.values()}
    named = {key.split(".")[-1].partition("[")[0] for key in named}
    for model in (S2Config, SpecConfig, RangeConfig):
        assert set(model.model_fields) <= named, f"{model.__name__}: {set(model.model_fields) - named}"
