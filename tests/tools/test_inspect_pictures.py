"""The pictures of `s2-megatron inspect`: as full as the pattern, at any length."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from s2_megatron.config.load import load_config
from s2_megatron.patterns.block_mask import BlockMaskPattern
from s2_megatron.patterns.ranges import make_range_pattern
from s2_megatron.tools import commands
from s2_megatron.tools.inspect import cells as cells_module
from s2_megatron.tools.inspect import context_picture, layer_kinds, pictures

ROOT = Path(__file__).resolve().parents[2]
S2_YAML = str(ROOT / "configs/s2_1p3b_s2.yaml")
FLAGS = ["--num-layers", "24", "--num-attention-heads", "16", "--seq-length", "131072"]
PATTERN = make_range_pattern(block_size=16, num_heads=8, num_kv_heads=2, ranges=((4, 1), (12, 2), (None, 4)))


def brute_grid(pattern, heads, n_blocks):
    """int64[n_blocks, n_blocks]: the index of the nearest range in which one of the heads attends, -1 for none."""
    grid = np.full((n_blocks, n_blocks), -1)
    for query, key in np.ndindex(n_blocks, n_blocks):
        for head in heads:
            rule = pattern.heads[head]
            if key <= query and rule.attends(query, key):
                bounds = rule.touched_bounds()
                within = (at for at, (_, end, _) in enumerate(bounds) if end is None or query - key < end)
                kind = next(within, len(bounds) - 1)
                grid[query, key] = kind if grid[query, key] < 0 else min(kind, grid[query, key])
    return grid


@pytest.mark.parametrize("n_blocks, cells", [(40, 64), (64, 16), (150, 10)])
@pytest.mark.parametrize("heads", [[4], range(8)])
def test_cells_count_every_block(n_blocks, cells, heads, monkeypatch):
    monkeypatch.setattr(cells_module, "ROWS_AT_ONCE", 17)
    edges = cells_module.cell_edges([PATTERN], n_blocks, cells)
    assert edges[0] == 0 and edges[-1] == n_blocks and len(edges) - 1 <= max(cells, min(cells, n_blocks))
    grid, counts = brute_grid(PATTERN, heads, n_blocks), cells_module.cell_counts(PATTERN, heads, n_blocks, edges)
    for kind in range(3):
        rows = np.add.reduceat(grid == kind, edges[:-1], axis=0, dtype=int)
        assert np.array_equal(counts[kind], np.add.reduceat(rows, edges[:-1], axis=1))
    causal = np.add.reduceat(np.add.reduceat(np.tri(n_blocks), edges[:-1], axis=0), edges[:-1], axis=1)
    assert np.array_equal(cells_module.causal_counts(n_blocks, edges), causal)
    shares = cells_module.cell_shares(PATTERN, 4, n_blocks, edges)
    assert np.isnan(shares[0, 1:]).all()
    if n_blocks > cells:  # whole strides: every cell that is far away has the share of one block in 4
        assert np.all(np.diff(edges)[:-1] % 4 == 0) and shares[-2, 0] == 0.25


@pytest.mark.parametrize("ranges, window, sink", [((), 40, 0), ((), [40, 5], 20), (((9, 2), (None, 4)), 33, 50)])
def test_cells_of_windows_and_sinks_in_tokens(ranges, window, sink):
    pattern = make_range_pattern(
        block_size=16, num_heads=4, num_kv_heads=2, ranges=ranges, window=window, sink_tokens=sink
    )
    edges = cells_module.cell_edges([pattern], 40, 16)
    grid, counts = brute_grid(pattern, range(4), 40), cells_module.cell_counts(pattern, range(4), 40, edges)
    for kind in range(3):
        cells = np.add.reduceat(np.add.reduceat(grid == kind, edges[:-1], axis=0, dtype=int), edges[:-1], axis=1)
        assert np.array_equal(counts[kind] if kind < len(counts) else 0 * cells, cells)
    blocks = pictures.block_grid(pattern, range(4), 40)
    assert np.array_equal(blocks >= pictures.LOCAL, grid >= 0)


def test_cells_of_a_mask():
    rows = [np.arange(query + 1) if query < 3 else np.array([0, query - 1, query]) for query in range(8)]
    mask = BlockMaskPattern.from_csr(16, 4, 2, [np.cumsum([0, *map(len, rows)])], [np.concatenate(rows)])
    edges = cells_module.cell_edges([mask], 8, 4)
    assert cells_module.cell_counts(mask, [0, 3], 8, edges)[0].sum() == 6 + 5 * 3
    assert cells_module.cell_counts(mask, [0], 8, edges)[0, -1].tolist() == [2, 0, 1, 3]


@pytest.mark.parametrize("length", [131072, 98304, 100_032])
def test_stripes_blend_into_one_shade(length):
    """16 heads over 128K tokens, one block in 16: nothing of the stripes is left in the cells, whatever the length."""
    pattern = load_config(S2_YAML).resolve(num_layers=1, num_heads=16, num_kv_heads=16, seq_length=length)
    pattern, n_blocks = pattern.layers[0].pattern, -(-length // 64)
    edges = cells_module.cell_edges([pattern], n_blocks, 64)
    far = cells_module.cell_shares(pattern, 3, n_blocks, edges)[-2, :-4]
    assert np.allclose(far, 1 / 16)
    _, cells = context_picture.last_query_cells([pattern], n_blocks)
    assert np.allclose(cells[:16, :-4], 1 / 16)


def test_a_long_picture_is_as_full_as_the_text_says():
    sparsity = load_config(S2_YAML).resolve(num_layers=1, num_heads=16, num_kv_heads=16, seq_length=131072)
    pattern = sparsity.layers[0].pattern
    edges = cells_module.cell_edges([pattern], 2048, pictures.CELLS)
    counts, causal = cells_module.cell_counts(pattern, [0], 2048, edges), cells_module.causal_counts(2048, edges)
    sizes = np.outer(np.diff(edges), np.diff(edges))
    image = pictures.mean_colours(counts, sizes, causal)
    # As many pairs of colour as there are attended ones: skipped and future ones are taken out of the picture's mean.
    palette = np.array([to_rgb(colour) for colour in pictures.COLOURS])
    ink = (image * sizes[..., None]).sum((0, 1)) / causal.sum()
    rest = palette[pictures.FUTURE] * (sizes.sum() - causal.sum()) / causal.sum()
    base, window, stride = palette[[pictures.SKIPPED, pictures.LOCAL, pictures.LOCAL + 1]]
    share, *_ = np.linalg.lstsq(np.stack([window - base, stride - base], 1), ink - rest - base, rcond=None)
    assert share.sum() == pytest.approx(sparsity.density(), abs=0.002) and 0.07 < share.sum() < 0.08
    # The enlarged part has the window and three strides.
    assert pictures.enlarged_blocks([pattern], 2048) == 16 + 3 * 16


def test_the_heads_together_serve_the_last_query():
    names, cells = context_picture.last_query_cells([PATTERN], 64)
    assert names == ["heads 0-3", "heads 4-7", "all heads"] and cells.shape == (3, 64)
    assert np.array_equal(cells[2], np.maximum(cells[0], cells[1]))
    assert cells[0, PATTERN.key_blocks(0, 63)].all() and cells[0].sum() == len(PATTERN.key_blocks(0, 63))
    _, near = context_picture.last_query_cells([PATTERN], 64, 8, first=56)
    assert near[0, -4:].tolist() == [1, 1, 1, 1]
    _, merged = context_picture.last_query_cells([PATTERN], 64, 16)  # cells of one stride
    assert merged[0, 0] == pytest.approx(1 / 4)


def test_consecutive_layers_serve_the_last_query_together():
    sparsity = load_config(ROOT / "configs/s2_70b_mixed.yaml").resolve(
        num_layers=8, num_heads=64, num_kv_heads=8, seq_length=8192
    )
    patterns = context_picture.covering_layers(sparsity)
    assert patterns == [sparsity.layers[0].pattern, sparsity.layers[1].pattern]  # 8 offsets each, of 16
    names, cells = context_picture.last_query_cells(patterns, 128)
    assert names[-2:] == ["all heads", "all, 2 layers"] and len(names) == 10
    assert cells[-1].all() and 0.5 < cells[-2].mean() < 0.65
    assert context_picture.last_query_sees(patterns, 128).all()


def test_the_picture_has_a_panel_for_every_pattern_and_group_of_heads(tmp_path, capsys):
    sparsity = load_config(S2_YAML).resolve(num_layers=24, num_heads=16, num_kv_heads=16, seq_length=131072)
    assert [name for name, _ in context_picture.distinct_patterns(sparsity)] == ["layers 0-23"]
    assert len(layer_kinds.head_groups(sparsity.layers[0].pattern)) == 16
    file = tmp_path / "new" / "context.png"
    assert commands.main(["inspect", S2_YAML, *FLAGS, "--context-png", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {file}"
    assert file.read_bytes().startswith(b"\x89PNG") and 20_000 < file.stat().st_size < 400_000
    dense = str(ROOT / "configs/s2_1p3b_dense.yaml")
    assert commands.main(["inspect", dense, *FLAGS, "--context-png", str(file)]) == 2
    assert "leave out --context-png" in capsys.readouterr().err


def test_too_many_panels_are_said(tmp_path, capsys):
    yaml = tmp_path / "many.yaml"
    yaml.write_text("block_size: 16\nlayers: S\nspecs: {S: {local_blocks: 2, stride: 64, layer_step: 1}}\n")
    flags = ["--num-layers", "8", "--num-attention-heads", "16", "--seq-length", "2048"]
    assert commands.main(["inspect", str(yaml), *flags, "--context-png", str(tmp_path / "a.png")]) == 0
    assert "a.png: 48 of 128 pairs of layer pattern and heads are drawn" in capsys.readouterr().out
