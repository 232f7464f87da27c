"""benchmarks/tune.py without a GPU: the rows that it prints, what it measures, and that it leaves the table alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import tune
from s2_megatron.kernels import tiles


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        tune.main([])
    assert capsys.readouterr().err.startswith("error: no GPU")


def test_tuner_prints_the_rows_of_the_table_and_leaves_it_alone():
    source = Path(tiles.__file__).read_text()
    for key, row in tiles._TABLE.items():
        assert tune.row_text(key, {}).strip() in source
        for name, family in tune.FAMILIES.items():
            candidates = list(family.candidates(key))
            assert row[tune.PORTABLE.index(name)] in candidates, f"{key} {name}: the present tile is not a candidate"
    tables = (tiles._TABLE, tiles._AMPERE_TABLE, tiles._SMALL_TABLE)
    key, before = (256, False), [dict(table) for table in tables]
    tile = tiles.Tile(32, 16, 4, 2)
    with tune.FAMILIES["forward"].force(key, tile):
        assert {tiles.tiles_for(256, False, 64, 8, card)[0] for card in ((8, 0), (8, 6), (9, 0), (12, 0))} == {tile}
    with pytest.raises(RuntimeError), tune.FAMILIES["grad_key"].force((64, True), tile):
        raise RuntimeError
    assert before == list(tables)
    assert "Tile(32, 16, 4, 2)" in tune.row_text(key, {"forward": tile})


def test_the_tuner_measures_every_row_unless_told_otherwise():
    args = tune.parse_arguments([])
    assert {tune.key_of(dim, dtype) for dim in args.head_dims for dtype in args.dtypes} == set(tiles._TABLE)
    assert set(args.families) == set(tune.PORTABLE)


def test_tiles_differ_where_shared_memory_does():
    hopper, ampere, small = (tiles.tiles_for(256, False, 64, 8, card) for card in ((9, 0), (8, 0), (8, 6)))
    assert hopper == tiles._TABLE[256, False] and ampere == (hopper[0], tiles.Tile(64, 32, 8, 2), hopper[2])
    assert small == tiles._SMALL_TABLE[256, False]


@pytest.mark.gpu
def test_tuner_on_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(
        tune,
        "FAMILIES",
        {"forward": tune.FAMILIES["forward"]._replace(candidates=lambda key: [tiles.Tile(64, 64, 4, 3)])},
    )
    tune.main(["--head-dims", "64", "--seq-length", "2048", "--families", "forward", "--rounds", "2"])
    assert "(64, False): (Tile(64, 64, 4, 3)" in capsys.readouterr().out
