"""What export-pattern writes: the patterns block by block, FlexAttention over it, the test vectors, bad input."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from s2_megatron.config.load import load_config
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.config.stored import stored_sparsity
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.head import HeadPattern
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from s2_megatron.testing.oracle import token_mask
from s2_megatron.tools import commands
from s2_megatron.tools.export_pattern import write_pattern

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BLOCK, HEADS, KV_HEADS = 16, 4, 2
HEADS_4 = ["--num-layers", "4", "--num-attention-heads", "4"]


def mask(tables):
    generator = np.random.default_rng(tables)
    indptr, indices = [], []
    for _ in range(tables):
        rows = [np.flatnonzero((generator.random(q + 1) < 0.4) | (np.arange(q + 1) == q)) for q in range(20)]
        indptr.append(np.cumsum([0, *map(len, rows)]))
        indices.append(np.concatenate(rows))
    return BlockMaskPattern.from_csr(BLOCK, HEADS, KV_HEADS, indptr, indices)


def sparsity() -> ResolvedSparsity:
    """Every kind of pattern, one layer each."""
    shape = dict(block_size=BLOCK, num_heads=HEADS, num_kv_heads=KV_HEADS)
    forms = (((3, 1),), ((1, 1), (None, 2)), ((None, 1),), ((2, 1), (6, 3), (None, 4)))
    patterns = [
        None,
        make_range_pattern(**shape, ranges=((2, 1), (None, 4)), base_offset=3, dense_heads=(1,)),
        make_range_pattern(**shape, ranges=((2, 1), (None, 4)), slide="query"),
        RangePattern(BLOCK, KV_HEADS, tuple(HeadPattern(form, index) for index, form in enumerate(forms))),
        make_range_pattern(**shape, ranges=((None, 4),), window=[37, 5], sink_tokens=21),
        make_range_pattern(**shape, ranges=(), window=50),
        mask(1),
        mask(KV_HEADS),
        mask(HEADS),
    ]
    layers = [LayerSparsity("D" if pattern is None else "S", pattern) for pattern in (*patterns, patterns[1])]
    return ResolvedSparsity(tuple(layers), (), 0.2, BLOCK, HEADS, KV_HEADS, 320)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pattern")
    write_pattern(sparsity(), folder, head_dim=8)
    return folder


@pytest.fixture(scope="module")
def loaded(written):
    """The pattern, read by the copy of flex_mask.py that was written beside it."""
    spec = importlib.util.spec_from_file_location("written_flex_mask", written / "flex_mask.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(written)


@pytest.mark.parametrize("layer", range(10))
def test_mask_mod_is_the_pattern_of_every_head(loaded, layer):
    pattern = sparsity().layers[layer].pattern
    blocks = 20
    expected = None if pattern is None else token_mask(pattern, blocks * BLOCK)
    got = create_mask(loaded.mask_mod(layer), None, HEADS, blocks * BLOCK, blocks * BLOCK, device="cpu")[0]
    for head in range(HEADS):
        tokens = torch.ones(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool).tril()
        assert torch.equal(got[head], tokens if pattern is None else expected[head]), head


def test_flex_attention_computes_the_vectors(written, loaded):
    """What a port does: read the vectors, compute, compare."""
    assert loaded.content["layers"] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 1]
    for layer, index in enumerate(loaded.content["layers"]):
        stored = np.load(written / f"vectors_{index}.npz", allow_pickle=False)
        query, key, value = (torch.from_numpy(stored[name]) for name in ("query", "key", "value"))
        length = query.shape[2]
        assert length % BLOCK and stored["softmax_scale"] == np.float32(0.2)
        block_mask = create_block_mask(loaded.mask_mod(layer), None, HEADS, length, length, device="cpu")
        out, lse = flex_attention(
            query, key, value, block_mask=block_mask, scale=loaded.softmax_scale, enable_gqa=True, return_lse=True
        )
        assert np.abs(out.numpy() - stored["out"]).max() < 1e-5
        assert np.abs(lse.numpy() - stored["lse"]).max() < 1e-5


def test_vectors_tell_patterns_apart(written, loaded):
    """The outputs of one layer's vectors under another layer's pattern are not near."""
    stored = np.load(written / "vectors_1.npz")
    query, key, value = (torch.from_numpy(stored[name]) for name in ("query", "key", "value"))
    block_mask = create_block_mask(loaded.mask_mod(2), None, HEADS, query.shape[2], query.shape[2], device="cpu")
    out = flex_attention(query, key, value, block_mask=block_mask, scale=0.2, enable_gqa=True)
    assert np.abs(out.numpy() - stored["out"]).max() > 0.1


def test_vectors_tell_a_long_window_from_dense(tmp_path, capsys):
    """Of the last queries of enough tokens; where there would be too many, a line says that they cannot."""
    config = tmp_path / "plan.yaml"
    command = ["export-pattern", str(config), "--num-layers", "1", "--num-attention-heads", "2"]
    for window, queries, keys in ((4096, 256, 4383), (20000, 256, 16351)):
        config.write_text(f"block_size: 64\nlayers: S\nspecs:\n  S:\n    window: {window}\n")
        assert commands.main([*command, "--output", str(tmp_path / str(window))]) == 0
        stored = np.load(tmp_path / str(window) / "vectors_0.npz")
        query, key, value = (torch.from_numpy(stored[name]) for name in ("query", "key", "value"))
        assert (query.shape[2], key.shape[2]) == (queries, keys)
        position = torch.arange(keys)
        since = position[-queries:, None] - position
        for own, is_equal in ((window, True), (window + 1, window > keys), (keys, window > keys)):
            mask = (since >= 0) & (since < own)
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            assert (np.abs(out.numpy() - stored["out"]).max() < 1e-5) == is_equal, (window, own)
        told = "vectors_0.npz has 16,351 tokens, in which the pattern is dense" in capsys.readouterr().err
        assert told == (window > keys)


def test_the_command_from_a_yaml_and_from_a_model(tmp_path, capsys):
    numbers = ["--num-layers", "4", "--num-attention-heads", "4", "--num-query-groups", "2"]
    config = str(CONFIGS / "quickstart.yaml")
    assert commands.main(["export-pattern", config, *numbers, "--output", str(tmp_path / "yaml")]) == 0
    model = load_config(config).resolve(num_layers=4, num_heads=4, num_kv_heads=2, seq_length=8192)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"s2_sparsity": stored_sparsity(model)}))
    model = ["--model", str(tmp_path / "model")]
    assert commands.main(["export-pattern", *model, "--output", str(tmp_path / "again")]) == 0
    files = sorted(path.name for path in (tmp_path / "yaml").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in ("pattern.json", "flex_mask.py"):
        assert (tmp_path / "yaml" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert not (tmp_path / "yaml" / "masks.npz").exists()
    assert "4 layers, 4 heads" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "either a sparsity YAML or --model"),
        ([str(CONFIGS / "quickstart.yaml")], "needs --num-layers and --num-attention-heads"),
        (["--model", "nowhere"], "config.json cannot be read"),
        (["--model", "x", "--num-layers", "2"], "--num-layers beside --model"),
        ([str(CONFIGS / "quickstart.yaml"), *HEADS_4, "--num-query-groups", "0"], "--num-query-groups"),
        ([str(CONFIGS / "quickstart.yaml"), *HEADS_4, "--head-dim", "0"], "256"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments, message, tmp_path, capsys):
    assert commands.main(["export-pattern", *arguments, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path, capsys):
    assert commands.main(["export-pattern", "--model", "x", "--output", str(tmp_path)]) == 2
    arguments = [str(CONFIGS / "quickstart.yaml"), *HEADS_4, "--output", str(tmp_path)]
    assert commands.main(["export-pattern", *arguments]) == 2
    assert "never overwritten" in capsys.readouterr().err
