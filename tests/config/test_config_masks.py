"""Block masks from a file and from a Python function: what is right gives the pattern, what is wrong one ValueError."""

import numpy as np
import pytest

from s2_megatron.config.errors import ConfigError
from s2_megatron.config.load import load_config
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import make_range_pattern
from tests.config.test_config import resolve


def save_mask(path, pattern, heads, blocks, one_dimensional=False):
    rows = [[pattern.key_blocks(head, query) for query in range(blocks)] for head in heads]
    indptr = np.array([np.cumsum([0] + [len(keys) for keys in head]) for head in rows])
    indices = np.concatenate([keys for head in rows for keys in head])
    np.savez(path, indptr=indptr[0] if one_dimensional else indptr, indices=indices)


@pytest.mark.parametrize(
    "heads, one_dimensional", [([0], True), ([0], False), ([0, 4], False), (list(range(8)), False)]
)
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
    ("pickled", "allow_pickle"), ("fractions", "float64"), ("wrong heads", "P = 2"), ("not causal", "causal"),
    ("short indices", "one index for each"), ("few blocks", "--seq-length 512"), ("empty row", "attends nothing"),
    ("unsorted", "ascending"),
])  # fmt: skip
def test_bad_mask(write, tmp_path, kind, word):
    bad_mask(kind, tmp_path / "mask.npz")
    path = write("layers: S\nspecs:\n  S: {mask: mask.npz}\n")
    with pytest.raises(ConfigError, match=r"specs.S.mask \(line 3\): got .*; expected .*; nearest valid: ") as caught:
        resolve(path)
    assert str(path) in str(caught.value) and word in str(caught.value)


def test_missing_mask_names_its_neighbour(write, tmp_path):
    np.savez(tmp_path / "mask.npz", indptr=np.arange(17), indices=np.arange(16))
    with pytest.raises(ValueError, match=r"nearest valid: mask\.npz"):
        resolve(write("layers: S\nspecs: {S: {mask: maks.npz}}\n"))


FUNCTIONS = """
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


@pytest.mark.parametrize("name, word", [
    ("empty", "attends nothing"), ("numbers", "int64"), ("diagonal_and_frist", "diagonal_and_first"),
    ("not_a_function", "no function"),
])  # fmt: skip
def test_bad_function(write, functions, name, word):
    with pytest.raises(
        ConfigError, match=r"specs.S.function \(line 2\): got .*; expected .*; nearest valid: "
    ) as caught:
        resolve(write(functions.format(name)), allow=True)
    assert word in str(caught.value)


def test_missing_module(write):
    with pytest.raises(ConfigError, match=r"no module 'nowhere_to_be_found'.*PYTHONPATH"):
        resolve(write("layers: S\nspecs: {S: {function: 'nowhere_to_be_found:f'}}\n"), allow=True)
