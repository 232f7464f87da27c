"""The sparsity YAML: every way to get it wrong gives one ValueError with file, key, got, expected and fix; what is right
resolves to the patterns that the design defines."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from s2_megatron.block_mask import BlockMaskPattern
from s2_megatron.config import ConfigError, S2Config, diff_sparsity, load_config, tensor_parallel_balance
from s2_megatron.patterns import make_range_pattern, period_coverage

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MODEL = {"num_layers": 8, "num_heads": 8, "num_kv_heads": 2, "seq_length": 1024}


@pytest.fixture
def write(tmp_path):
    """write(text) -> path of a YAML in an empty folder."""

    def write_file(text: str, name: str = "my.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def resolve(path, allow=False, **model):
    return load_config(path, allow_python_patterns=allow).resolve(**{**MODEL, **model})


S = "specs: {S: {local_blocks: 2, stride: 4}}\n"

# (YAML, key, line, got, expected, nearest valid). Each of the five must stand in the message.
BAD_FILES = {
    "unknown key": (f"layers: S\nblok_size: 64\n{S}", "blok_size", 2, "'blok_size'", "block_size, layers", "block_size"),
    "unknown key in a spec": (
        "layers: S\nspecs:\n  S:\n    local_tokns: 64\n",
        "specs.S.local_tokns",
        4,
        "'local_tokns'",
        "one of local_tokens, local_blocks",
        "local_tokens",
    ),
    "unknown key in a range": (
        "layers: S\nspecs:\n  S:\n    ranges:\n    - {end_block: 4, stride: 1}\n",
        "specs.S.ranges[0].end_block",
        5,
        "'end_block'",
        "end_tokens, end_blocks, stride",
        "end_blocks",
    ),
    "text for a number": (
        "layers: S\nspecs: {S: {local_tokens: '128'}}\n",
        "specs.S.local_tokens",
        2,
        "'128'",
        "an integer",
        "128",
    ),
    "fraction for a number": (
        "layers: S\nspecs: {S: {local_blocks: 2.6}}\n",
        "specs.S.local_blocks",
        2,
        "2.6",
        "an integer",
        "3",
    ),
    "boolean for a number": ("layers: S\nspecs: {S: {local_blocks: true}}\n", "local_blocks", 2, "true", "an integer", "16"),
    "YAML 1.1 float": ("layers: D\nsoftmax_scale: 1e-2\n", "softmax_scale", 2, "'1e-2'", "a number", "0.01"),
    "negative scale": ("layers: D\nsoftmax_scale: -1.0\n", "softmax_scale", 2, "-1.0", "more than 0", "0.125"),
    "infinite scale": ("layers: D\nsoftmax_scale: .inf\n", "softmax_scale", 2, "inf", "finite", "0.125"),
    "block size": ("layers: D\nblock_size: 60\n", "block_size", 2, "60", "16, 32, 64 or 128", "64"),
    "boolean plan": ("layers: NO\n", "layers", 1, "false", "a plan such as DSSS", "in quotes"),
    "number plan": ("layers: 12\n", "layers", 1, "12", "a plan such as DSSS", "DSSS"),
    "no plan": (S, "layers", 0, "nothing", "the key layers", "layers: DSSS"),
    "unknown spec": (f"layers: DSs\n{S}", "layers", 1, "'s'", "one of D, S", "S"),
    "unknown spec in mtp": (f"layers: S\nmtp_layers: s\n{S}", "mtp_layers", 2, "'s'", "one of D, S", "S"),
    "D redefined": ("layers: D\nspecs: {D: {local_blocks: 2}}\n", "specs.D", 2, "named D", "predefined as dense", "rename"),
    "spec name": ("layers: D\nspecs: {'a-b': {local_blocks: 2}}\n", "specs.a-b", 2, "'a-b'", "letters", "S"),
    "tokens": ("layers: S\nspecs: {S: {local_tokens: 1000}}\n", "local_tokens", 2, "1000", "multiple of block_size=64", "960 or 1024"),
    "few tokens": ("layers: S\nspecs: {S: {local_tokens: 8}}\n", "local_tokens", 2, "8", "multiple of block_size=64", "64"),
    "range tokens": (
        "layers: S\nspecs: {S: {ranges: [{end_tokens: 100, stride: 1}]}}\n",
        "specs.S.ranges[0].end_tokens",
        2,
        "100",
        "multiple of block_size=64",
        "64 or 128",
    ),
    "first stride": (
        "layers: S\nspecs: {S: {ranges: [{end_blocks: 4, stride: 2}, {stride: 4}]}}\n",
        "specs.S.ranges[0].stride",
        2,
        "2",
        "1 in the first range",
        "1",
    ),
    "ends do not grow": (
        "layers: S\nspecs: {S: {ranges: [{end_blocks: 4, stride: 1}, {end_tokens: 256, stride: 4}]}}\n",
        "specs.S.ranges[1].end_tokens",
        2,
        "256",
        "more than the range before it, 256",
        "320",
    ),
    "end left out": (
        "layers: S\nspecs: {S: {ranges: [{stride: 1}, {end_blocks: 4, stride: 4}]}}\n",
        "specs.S.ranges[0]",
        2,
        "no end",
        "in every range but the last",
        "end_tokens: 1024",
    ),
    "two ends": (
        "layers: S\nspecs: {S: {ranges: [{end_blocks: 4, end_tokens: 256, stride: 1}]}}\n",
        "specs.S.ranges[0]",
        2,
        "end_tokens and end_blocks",
        "one of the two",
        "remove end_blocks",
    ),
    "no stride in a range": (
        "layers: S\nspecs: {S: {ranges: [{end_blocks: 4}]}}\n",
        "specs.S.ranges[0].stride",
        2,
        "nothing",
        "the key stride",
        "stride: 16",
    ),
    "no ranges": ("layers: S\nspecs: {S: {ranges: []}}\n", "specs.S.ranges", 2, "[]", "at least 1 item", "stride: 1"),
    "two kinds": (
        "layers: S\nspecs: {S: {local_blocks: 4, local_tokens: 256}}\n",
        "specs.S",
        2,
        "local_tokens and local_blocks",
        "exactly one of",
        "remove local_blocks",
    ),
    "window and mask": (
        "layers: S\nspecs: {S: {local_blocks: 4, mask: a.npz}}\n",
        "specs.S",
        2,
        "local_blocks and mask",
        "exactly one of",
        "remove mask",
    ),
    "empty spec": ("layers: S\nspecs: {S: {}}\n", "specs.S", 2, "none of them", "exactly one of", "local_tokens: 1024"),
    "null spec": ("layers: S\nspecs:\n  S:\n", "specs.S", 3, "nothing (null)", "a mapping", "local_tokens: 1024"),
    "stride alone": ("layers: S\nspecs: {S: {stride: 4}}\n", "specs.S", 2, "stride without a window", "exactly one of", "local_tokens"),
    "stride beside ranges": (
        "layers: S\nspecs: {S: {stride: 4, ranges: [{stride: 1}]}}\n",
        "specs.S.stride",
        2,
        "4 beside ranges",
        "only beside local_tokens",
        "into the ranges",
    ),
    "zero stride": ("layers: S\nspecs: {S: {local_blocks: 4, stride: 0}}\n", "specs.S.stride", 2, "0", "1 or more", "1"),
    "slide": ("layers: S\nspecs: {S: {local_blocks: 4, slide: kvs}}\n", "specs.S.slide", 2, "'kvs'", "kv or query", "kv"),
    "head step": ("layers: S\nspecs: {S: {local_blocks: 4, head_step: papr}}\n", "specs.S.head_step", 2, "'papr'", "auto, paper", "paper"),
    "layer step": ("layers: S\nspecs: {S: {local_blocks: 4, layer_step: -1}}\n", "specs.S.layer_step", 2, "-1", "auto, or a number", "0"),
    "dense heads kind": (
        "layers: S\nspecs: {S: {local_blocks: 4, dense_heads: {lst: 2}}}\n",
        "specs.S.dense_heads",
        2,
        "lst",
        "{last: n} or {spread: n}",
        "{last: 2}",
    ),
    "dense heads twice": (
        "layers: S\nspecs: {S: {local_blocks: 4, dense_heads: [1, 1]}}\n",
        "specs.S.dense_heads",
        2,
        "[1, 1]",
        "each KV head once",
        "[1]",
    ),
    "slide beside mask": (
        "layers: S\nspecs: {S: {mask: a.npz, slide: kv}}\n",
        "specs.S.slide",
        2,
        "'kv' beside mask",
        "only beside ranges or a window",
        "remove it",
    ),
    "function name": (
        "layers: S\nspecs: {S: {function: my_module.my_function}}\n",
        "specs.S.function",
        2,
        "'my_module.my_function'",
        "module:function",
        "my_patterns:my_function",
    ),
    "list for a mapping": ("- layers: S\n", "the file", 0, "the list", "a mapping", "layers: D"),
    "empty file": ("# nothing\n", "the file", 0, "nothing", "a mapping", "layers: D"),
    "specs is a list": ("layers: S\nspecs: [S]\n", "specs", 2, '["S"]', "a mapping", "{S: {local_tokens"),
    "duplicate key": ("layers: S\nspecs: {S: {local_blocks: 2}}\nlayers: D\n", "layers", 1, "lines 1 and 3", "each key once", "remove line"),
    "duplicate spec": (
        "layers: S\nspecs:\n  S: {local_blocks: 2}\n  S: {local_blocks: 3}\n",
        "specs.S",
        3,
        "lines 3 and 4",
        "each key once",
        "remove line",
    ),
    "boolean key": ("layers: N\nspecs: {no: {local_blocks: 2}}\n", "specs", 2, "the key no", "a name", "'no'"),
    "syntax": ("layers: [S\nspecs: {}\n", "the file", 0, "line 2", "one YAML document", "correct that line"),
    "tab": ("layers: S\nspecs:\n\tS: {}\n", "the file", 0, "line 3", "one YAML document", "indent with spaces"),
    "two documents": ("layers: D\n---\nlayers: D\n", "the file", 0, "another document", "one YAML document", "correct"),
    "endless alias": ("layers: S\nspecs: &a {S: *a}\n", "specs.S", 2, "an alias", "values that end", "write the value out"),
    "object tag": (
        "layers: !!python/object/apply:os.system ['touch /tmp/never']\n",
        "layers",
        1,
        "!!python/object/apply:os.system",
        "no tag builds an object",
        "module:function",
    ),
    "object tag as key": ("layers: S\n!!python/name:os.system x: 1\n", "the file", 0, "on line 2, which YAML reads as python/name", "a name as the key", "'x'"),
    "date": ("layers: 2026-01-02\n", "layers", 1, "!!timestamp", "no tag builds an object", "remove the tag"),
}


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
    with pytest.raises(ValueError, match=r"quickstrat.yaml: the file: got no such file; .* nearest valid: .*quickstart.yaml"):
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
    "long plan": (f"layers: DSSS\n{S}", {"num_layers": 2}, "layers", "4 names, for --num-layers 2", "is 2 or divides it",
                  r"a plan of 2 names, or --num-layers 4"),
    "list plan": (f"layers: [D, S, S]\n{S}", {}, "layers", '["D", "S", "S"]', "is 8 or divides it", "2 or 4 names"),
    "no mtp policy": (f"layers: DS\n{S}", {"mtp_num_layers": 1}, "mtp_layers", "a model with --mtp-num-layers 1",
                      "of D, S", "mtp_layers: D or mtp_layers: S"),
    "mtp plan": (f"layers: DS\nmtp_layers: SS\n{S}", {"mtp_num_layers": 1}, "mtp_layers", "for --mtp-num-layers 1",
                 "is 1 or divides it", "a plan of 1 names"),
    "dense heads list": ("layers: S\nspecs: {S: {local_blocks: 2, dense_heads: [0, 5]}}\n", {}, "specs.S.dense_heads",
                         "[0, 5]", "--num-query-groups 2", "[0]"),
    "dense heads count": ("layers: S\nspecs: {S: {local_blocks: 2, dense_heads: {last: 3}}}\n", {}, "specs.S.dense_heads",
                          "{last: 3}", "--num-query-groups 2", "{last: 2}"),
    "no mask file": ("layers: S\nspecs: {S: {mask: other.npz}}\n", {}, "specs.S.mask", "does not exist",
                     "relative to the YAML", "an existing .npz"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_model(write, case):
    text, model, key, got, expected, fix = BAD_MODELS[case]
    path = write(text)
    config = load_config(path)
    with pytest.raises(ValueError) as caught:
        config.resolve(**{**MODEL, **model})
    message = str(caught.value)
    assert message.startswith(f"{path}: {key} ") or message.startswith(f"{path}: {key}:")
    before, after = message.split("; expected ")
    middle, last = after.split("; nearest valid: ")
    assert got in before and expected in middle and fix in last, message


def test_heads_that_do_not_divide(write):
    with pytest.raises(ValueError, match=r"--num-attention-heads 8 .* --num-query-groups 3: .* nearest valid: --num-query-groups [24]"):
        resolve(write("layers: D\n"), num_kv_heads=3)


def test_plan_tiles_and_matches(write):
    for plan in ("DS", "DSDSDSDS", "[D, S]"):
        resolved = resolve(write(f"layers: {plan}\n{S}"))
        assert [layer.spec for layer in resolved.layers] == list("DSDSDSDS")
        assert [layer.kind for layer in resolved.layers] == ["dense", "s2"] * 4
    long_names = resolve(write("layers: [D, wide]\nspecs: {wide: {local_blocks: 2}}\n"))
    assert long_names.layers[1].spec == "wide"


def test_tokens_and_blocks_are_the_same(write):
    texts = ["local_tokens: 128, stride: 4", "local_blocks: 2, stride: 4", "ranges: [{end_tokens: 128, stride: 1}, {stride: 4}]",
             "ranges: [{end_blocks: 2, stride: 1}, {stride: 4}]"]
    resolved = [resolve(write(f"layers: S\nspecs: {{S: {{{text}}}}}\n")) for text in texts]
    assert len({item.canonical_json() for item in resolved}) == 1
    expected = make_range_pattern(block_size=64, num_heads=8, num_kv_heads=2, ranges=((2, 1), (None, 4)))
    assert resolved[0].layers[0].pattern == expected
    window = resolve(write("layers: S\nspecs: {S: {local_tokens: 128}}\n"))
    assert window.layers[0].pattern.heads[0].ranges == ((2, 1),)


def test_settings_reach_the_pattern(write):
    spec = "local_blocks: 2, stride: 8, slide: query, head_step: paper, base_offset: 3, layer_step: 5, dense_heads: {last: 1}"
    resolved = resolve(write(f"block_size: 32\nlayers: DSS\nsoftmax_scale: 0.25\nspecs: {{S: {{{spec}}}}}\n"), num_layers=6)
    settings = dict(block_size=32, num_heads=8, num_kv_heads=2, ranges=((2, 1), (None, 8)), slide="query", head_step="paper",
                    base_offset=3, layer_step=5, dense_heads={"last": 1})
    # The ordinal counts the layers of the spec, so the dense layers do not move it.
    expected = [None, 0, 1, None, 2, 3]
    for layer, ordinal in zip(resolved.layers, expected):
        pattern = None if ordinal is None else make_range_pattern(**settings, layer_index=ordinal)
        assert layer.pattern == pattern
    assert resolved.softmax_scale == 0.25 and resolved.block_size == 32


def test_ordinals_are_counted_per_spec_and_run_on_into_mtp(write):
    text = "layers: SW\nmtp_layers: S\nspecs: {S: {local_blocks: 2, stride: 16, layer_step: 1}, W: {local_blocks: 2, stride: 16, layer_step: 1}}\n"
    resolved = resolve(write(text), num_layers=4, mtp_num_layers=2)
    offsets = [layer.pattern.heads[0].offset for layer in resolved.all_layers]
    assert offsets == [0, 0, 1, 1, 2, 3]
    # Without such layers in the model the policy is no error.
    assert resolve(write(text), num_layers=4).mtp_layers == ()


def test_a_number_of_dense_heads_is_spread(write):
    text = "layers: S\nspecs: {{S: {{local_blocks: 2, stride: 4, dense_heads: {}}}}}\n"
    results = [resolve(write(text.format(heads)), num_kv_heads=8).canonical_json() for heads in ("2", "{spread: 2}", "[0, 4]")]
    assert len(set(results)) == 1
    assert results[0] != resolve(write(text.format("{last: 2}")), num_kv_heads=8).canonical_json()


def test_equal_layers_share_their_pattern(write):
    resolved = resolve(write("layers: ST\nspecs: {S: {local_blocks: 2, stride: 4}, T: {local_tokens: 128, stride: 4, layer_step: 4}}\n"))
    by_form = {}
    for layer in resolved.layers:
        by_form.setdefault(json.dumps(layer.pattern.canonical()), set()).add(id(layer.pattern))
    assert all(len(ids) == 1 for ids in by_form.values())
    assert len(by_form) < len(resolved.layers)
    assert resolved.layers[1].pattern is resolved.layers[3].pattern, "an offset of 4 is none at a stride of 4"


# Masks


def save_mask(path, pattern, heads, blocks, one_dimensional=False):
    rows = [[pattern.key_blocks(head, query) for query in range(blocks)] for head in heads]
    indptr = np.array([np.cumsum([0] + [len(keys) for keys in head]) for head in rows])
    indices = np.concatenate([keys for head in rows for keys in head])
    np.savez(path, indptr=indptr[0] if one_dimensional else indptr, indices=indices)


@pytest.mark.parametrize("heads, one_dimensional", [([0], True), ([0], False), ([0, 4], False), (list(range(8)), False)])
def test_mask_file_gives_the_pattern_it_was_made_of(write, tmp_path, heads, one_dimensional):
    pattern = make_range_pattern(block_size=64, num_heads=8, num_kv_heads=2, ranges=((2, 1), (None, 4)))
    save_mask(tmp_path / "mask.npz", pattern, heads, 20, one_dimensional)
    resolved = resolve(write("layers: DS\nspecs: {S: {mask: mask.npz}}\n"))
    mask = resolved.layers[1].pattern
    assert isinstance(mask, BlockMaskPattern) and mask is resolved.layers[7].pattern
    for head in range(8):
        source = heads[head * len(heads) // 8]
        for query in (0, 7, 19):
            np.testing.assert_array_equal(mask.key_blocks(head, query), pattern.key_blocks(source, query))


def bad_mask(kind, path):
    ok = {"indptr": np.arange(17), "indices": np.arange(16)}
    if kind == "not an npz":
        path.write_bytes(b"hello")
    elif kind == "a single array":
        with path.open("wb") as file:
            np.save(file, np.arange(4))
    else:
        change = {
            "an array is missing": {"indices": None},
            "pickled": {"indices": np.array([{"a": 1}], dtype=object)},
            "fractions": {"indptr": np.arange(17.0)},
            "wrong heads": {"indptr": np.tile(np.arange(17), (3, 1)), "indices": np.tile(np.arange(16), 3)},
            "short indices": {"indices": np.arange(15)},
            "few blocks": {"indptr": np.arange(9), "indices": np.arange(8)},
            "not causal": {"indices": np.arange(16)[::-1].copy()},
            "empty row": {"indptr": np.array([0, *range(16), 15])[:17], "indices": np.arange(15)},
            "unsorted": {"indptr": np.array([0, 1, *range(3, 18)]), "indices": np.array([0, 1, 0, *range(2, 16)])},
        }[kind]
        np.savez(path, **{key: value for key, value in {**ok, **change}.items() if value is not None})


@pytest.mark.parametrize("kind, word", [
    ("not an npz", "cannot be read"), ("a single array", "cannot be read"), ("an array is missing", "indices"),
    ("pickled", "allow_pickle"), ("fractions", "float64"), ("wrong heads", "P = 2"), ("short indices", "one index for each"),
    ("few blocks", "--seq-length 512"), ("not causal", "causal"), ("empty row", "attends nothing"), ("unsorted", "ascending"),
])  # fmt: skip
def test_bad_mask(write, tmp_path, kind, word):
    bad_mask(kind, tmp_path / "mask.npz")
    path = write("layers: S\nspecs:\n  S: {mask: mask.npz}\n")
    with pytest.raises(ConfigError, match=r"specs.S.mask \(line 3\): got .*; expected .*; nearest valid: ") as caught:
        resolve(path)
    assert str(path) in str(caught.value) and word in str(caught.value)


def test_missing_mask_names_its_neighbour(write, tmp_path):
    np.savez(tmp_path / "mask.npz", indptr=np.arange(17), indices=np.arange(16))
    with pytest.raises(ValueError, match="nearest valid: mask.npz"):
        resolve(write("layers: S\nspecs: {S: {mask: maks.npz}}\n"))


# Python functions

FUNCTIONS = """
raise_on_import = None

def diagonal_and_first(head, query_block, key_blocks):
    return (key_blocks == query_block) | (key_blocks == head % 2)

def empty(head, query_block, key_blocks):
    return key_blocks < 0

def numbers(head, query_block, key_blocks):
    return key_blocks

not_a_function = 3
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "patterns_of_a_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "layers: S\nspecs: {{S: {{function: 'patterns_of_a_test:{}'}}}}\n"


def test_function_needs_permission_and_is_not_imported_without(write, tmp_path, monkeypatch):
    (tmp_path / "explosive_pattern.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = write("layers: S\nspecs: {S: {function: 'explosive_pattern:f'}}\n")
    with pytest.raises(ValueError, match=r"specs.S.function .* nearest valid: add the flag --s2-allow-python-patterns"):
        load_config(path)
    load_config(path, allow_python_patterns=True)


def test_function_gives_its_pattern(write, functions):
    resolved = resolve(write(functions.format("diagonal_and_first")), allow=True)
    pattern = resolved.layers[0].pattern
    assert pattern.key_blocks(0, 5).tolist() == [0, 5] and pattern.key_blocks(1, 5).tolist() == [1, 5]
    assert pattern.num_blocks == 16
    assert len({id(layer.pattern) for layer in resolved.layers}) == 1


@pytest.mark.parametrize("name, word", [("empty", "attends nothing"), ("numbers", "int64"), ("diagonal_and_frist", "diagonal_and_first"),
                                        ("not_a_function", "no function")])  # fmt: skip
def test_bad_function(write, functions, name, word):
    with pytest.raises(ConfigError, match=r"specs.S.function \(line 2\): got .*; expected .*; nearest valid: ") as caught:
        resolve(write(functions.format(name)), allow=True)
    assert word in str(caught.value)


def test_missing_module(write):
    with pytest.raises(ConfigError, match="no module 'nowhere_to_be_found'.*PYTHONPATH"):
        resolve(write("layers: S\nspecs: {S: {function: 'nowhere_to_be_found:f'}}\n"), allow=True)


# The shipped files

SHAPES = {"quickstart": (8, 4, 2, 512), "quickstart_dense": (8, 4, 2, 512), "phi3_small": (32, 32, 8, 8192)}
for _kind in ("dense", "s2", "hybrid"):
    SHAPES |= {f"s2_1p3b_{_kind}": (24, 16, 16, 8192), f"s2_7b_{_kind}": (32, 32, 32, 32768), f"s2_70b_{_kind}": (80, 64, 8, 32768)}


def shipped(name):
    layers, heads, kv_heads, length = SHAPES[name]
    return load_config(ROOT / "configs" / f"{name}.yaml").resolve(
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, seq_length=length)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_file_resolves(path):
    resolved = shipped(path.stem)
    kinds = [layer.kind for layer in resolved.layers]
    assert len(kinds) == SHAPES[path.stem][0]
    assert ("s2" in kinds) == ("dense" not in path.stem) and not resolved.notes
    if path.stem.endswith("hybrid"):
        assert kinds.count("dense") * 4 == len(kinds) and kinds[0] == "dense"
    assert path.read_text().startswith("# yaml-language-server: $schema=s2.schema.json\n")
    assert tensor_parallel_balance(resolved, 2) < 1.1


def test_every_size_has_its_three_plans():
    assert {path.stem for path in CONFIGS} == set(SHAPES)


@pytest.mark.parametrize("name", ["s2_7b_s2", "s2_7b_hybrid", "s2_70b_s2", "s2_70b_hybrid", "s2_1p3b_s2", "quickstart"])
def test_coverage_within_the_fewest_layers(name):
    """ceil(stride / KV heads) consecutive S2 layers attend every causal block, wherever one starts."""
    resolved = shipped(name)
    patterns = [layer.pattern for layer in resolved.layers if layer.kind == "s2"]
    stride = patterns[0].heads[0].ranges[-1][1]
    span = -(-stride // resolved.num_kv_heads)
    for start in range(min(len(patterns) - span + 1, stride)):
        assert period_coverage(patterns[start : start + span], 64) == 1
    if span > 1:
        assert period_coverage(patterns[: span - 1], 64) < 1, "fewer layers cannot; the test would not notice"
    (count, coverage), = resolved.spec_coverage().values()
    assert (count, coverage) == (span, 1)


def test_quickstart_is_a_real_s2_run():
    for length in (512, 1024):
        resolved = load_config(ROOT / "configs/quickstart.yaml").resolve(num_layers=8, num_heads=4, num_kv_heads=2, seq_length=length)
        sparse = [layer for layer in resolved.layers if layer.kind == "s2"]
        assert length // resolved.block_size >= 16
        assert 2 * len(sparse) >= len(resolved.layers) and len(sparse) < len(resolved.layers)
        for layer in sparse:
            assert layer.pattern.heads[0].ranges[0][0] * resolved.block_size <= length // 4
            assert layer.pattern.density(length) <= 0.6
    dense = load_config(ROOT / "configs/quickstart_dense.yaml")
    assert dense.block_size == resolved.block_size


def test_phi3_small_is_the_published_rule():
    resolved = shipped("phi3_small")
    assert [layer.kind for layer in resolved.layers] == ["s2", "dense"] * 16
    assert resolved.softmax_scale == 1 / 128
    for layer in resolved.layers[::2]:
        for head in (0, 3, 17, 31):
            for query in (0, 15, 16, 40):
                keys = [k for k in range(query + 1) if query - k < 16 or (k + head * max(1, 8 // 32) + 1) % 8 == 0]
                assert layer.pattern.key_blocks(head, query).tolist() == keys


LAUNCHERS = sorted((ROOT / "examples").glob("pretrain_*.sh"))


def launched(script, *arguments, **environment):
    """The command that a launcher would run, one argument per item."""
    path = "/usr/bin:/bin"
    settings = {"PATH": path, "DRY_RUN": "1", "MOCK_DATA": "1", "PYTHON": "python3", "TRANSFORMER_IMPL": "local", **environment}
    done = subprocess.run(["bash", script, *arguments], env=settings, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: path.stem)
def test_launcher_fits_its_configs(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    size = script.stem.removeprefix("pretrain_")
    names = [name for name in SHAPES if size in name]
    assert names
    for name in names:
        command = launched(script, "--train-iters", "5", CONFIG=f"configs/{name}.yaml")
        value = dict(zip(command, command[1:]))
        groups = value.get("--num-query-groups", value["--num-attention-heads"])
        shape = tuple(map(int, (value["--num-layers"], value["--num-attention-heads"], groups, value["--seq-length"])))
        assert shape == SHAPES[name]
        assert value["--s2-config"] == str(ROOT / "configs" / f"{name}.yaml")
        assert value["--attention-dropout"] == "0" and command[-2:] == ["--train-iters", "5"]
        assert "--use-distributed-optimizer" not in command


def test_launcher_says_what_is_missing():
    script = ROOT / "examples/pretrain_7b.sh"
    for environment, word in (({}, "DATA_PATH"), ({"DATA_PATH": "x"}, "TOKENIZER"), ({"MOCK_DATA": "1", "NNODES": "2"}, "NODE_RANK"),
                              ({"MOCK_DATA": "1", "TRANSFORMER_IMPL": "te"}, "expected transformer_engine or local")):  # fmt: skip
        settings = {"PATH": "/usr/bin:/bin", "TRANSFORMER_IMPL": "local", "DRY_RUN": "1", **environment}
        done = subprocess.run(["bash", str(script)], env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and word in done.stderr and done.stderr.count("\n") == 1
    data = launched(script, MOCK_DATA="0", DATA_PATH="0.3 /a 0.7 /b", TOKENIZER="/t")
    at = data.index("--data-path")
    assert data[at + 1 : at + 5] == ["0.3", "/a", "0.7", "/b"]


def test_config_from_python():
    config = S2Config.model_validate({"layers": "DS", "specs": {"S": {"local_blocks": 2, "stride": 4}}})
    assert config.resolve(**MODEL).layers[1].kind == "s2"
    with pytest.raises(ValueError, match="layers: got 'X'"):
        S2Config.model_validate({"layers": "X"})


def test_diff_is_empty_for_the_same_attention(write):
    resolved = shipped("s2_70b_hybrid")
    assert diff_sparsity(resolved.canonical_json(), resolved.canonical_json()) == []
