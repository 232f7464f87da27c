"""The files of results: what is written is read, by several at once; what the page says is checked against them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import stats

from s2_megatron.tools.compare.readers import read_run
from studies import check
from studies.data import Run, manifest_entry, read_manifest, read_study, select
from studies.gaps import gap, joint_half_width, scatter, t_quantile
from studies.logs import write_logs
from studies.results import add_run

LENGTH, STEPS = 256, 20


def made_up(arm: str, seed: int, final: float = 3.0, near: float = 0.0, **columns) -> Run:
    """A run whose loss falls to `final`, by `near` more in the first half of the context."""
    steps = np.arange(1, STEPS + 1)
    settings = {"lr": 1e-3, "seq_length": LENGTH, "global_batch_size": 4, "seed": seed, "train_iters": STEPS}
    about = {"scale": "1M-ab", "role": "", "arm": arm, "seed": seed, "settings": settings, "position_starts": [0, 128]}
    about |= {"machine": {"device": "X"}, "command": "python -m studies.run x", "commit": "abc"}
    about["flops_per_token"] = {"attended": 1.0, "dense": 2.0}
    train = {"step": steps, "tokens": steps * 4 * LENGTH, "loss": final + 1 / steps, "learning_rate": steps / 1e5}
    by_position = np.array([[final + 1 - near, final + 1], [final - near, final]])
    validation = {"step": np.array([10, STEPS]), "tokens": np.array([10, STEPS]) * 4 * LENGTH}
    validation |= {"loss": np.array([final + 1, final]), "loss_by_position": by_position}
    return Run(about, {**train, **columns}, {**validation, "loss_trailing": by_position[:, 1]})


def test_what_is_written_is_read(tmp_path):
    """Runs of different columns, one that was only evaluated, and one of another number of buckets."""
    plain, timed, evaluated = made_up("dense", 1), made_up("s2", 1, seconds=0.5 * np.arange(1, 21)), made_up("s2", 2)
    evaluated.train, evaluated.about["role"] = {}, "switched"
    evaluated.validation["loss_by_position"] = np.array([[1.0, np.nan, 2.0, 3.0]] * 2)
    for run in (timed, evaluated, plain):
        add_run(tmp_path, "x", run, ("dense", "s2"))
    found = read_study("x", tmp_path)
    assert [run.key for run in found] == [plain.key, timed.key, evaluated.key]
    for run, own in zip((plain, timed, evaluated), found):
        assert own.about == run.about and own.train.keys() == run.train.keys()
        for table, columns in ((own.train, run.train), (own.validation, run.validation)):
            for name, values in columns.items():
                np.testing.assert_allclose(table[name], values, rtol=1e-6, err_msg=name)
    assert select(found, role="", arm="s2")[0].training_loss == pytest.approx(3 + np.mean(1 / np.arange(16, 21)))
    assert found[0].tokens == STEPS * 4 * LENGTH and found[2].tokens == 0 and np.isnan(found[2].training_loss)
    assert found[1].by_position(128, 256) == 3.0 and np.isnan(found[1].by_position(0, 100))
    table = (tmp_path / "runs.csv").read_text().splitlines()
    keys = ["x,1M-ab,,dense,1", "x,1M-ab,,s2,1", "x,1M-ab,switched,s2,2"]
    assert [line.startswith(f"{key},0,") for line, key in zip(table[1:], keys, strict=True)] == [True] * 3
    assert ",500," in table[2]  # ms a step
    (made,) = read_manifest(tmp_path)["x"]["sets"]
    assert made["runs"] == 3 and made["commits"] == ["abc"] and made["machines"] == [{"device": "X"}]


def test_a_run_takes_the_place_of_its_earlier_one_and_none_is_lost(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: add_run(tmp_path, "x", made_up("s2", seed % 12)), range(24)))
    assert [run.seed for run in read_study("x", tmp_path)] == list(range(12))
    add_run(tmp_path, "x", made_up("s2", 3, final=2.0))
    add_run(tmp_path, "y", made_up("s2", 3))
    assert [run.last_loss for run in read_study("x", tmp_path)] == [2.0 if seed == 3 else 3.0 for seed in range(12)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "runs.csv", "x.npz", "y.npz"]
    said = []
    assert check.check_results(tmp_path, said.append) == 0 and said == ["ok       x: 12 runs", "ok       y: 1 runs"]


def test_integer_columns_are_those_of_every_run(tmp_path):
    run = made_up("s2", 1)
    del run.train["tokens"]
    add_run(tmp_path, "x", made_up("dense", 1))
    with pytest.raises(ValueError, match="column tokens: a run has none; expected it of every run"):
        add_run(tmp_path, "x", run)
    assert len(read_study("x", tmp_path)) == 1


def test_results_that_were_changed_by_hand_are_named(tmp_path):
    add_run(tmp_path, "x", made_up("s2", 1))
    table = tmp_path / "runs.csv"
    table.write_text(table.read_text().replace(",3,", ",2,"))
    said = []
    assert check.check_results(tmp_path, said.append) == 1 and "do not agree" in said[0]
    add_run(tmp_path, "x", made_up("s2", 1))
    assert manifest_entry("x", read_study("x", tmp_path), tmp_path) == read_manifest(tmp_path)["x"]
    (tmp_path / "x.npz").unlink()
    assert check.check_results(tmp_path, said.append) == 1


def test_compare_reads_the_logs(tmp_path):
    add_run(tmp_path, "x", made_up("s2", 1, seconds=0.5 * np.arange(1, 21)))
    (path,) = write_logs("x", tmp_path / "logs", None, tmp_path)
    run = read_run(f"s2={path}")[0]
    assert run.series["lm loss"].values[-1] == pytest.approx(3.05) and run.axis("tokens")[-1] == STEPS * 4 * LENGTH
    assert run.series["lm loss validation"].values.tolist() == [4.0, 3.0]


def test_quantiles_are_students():
    for freedom in (1, 2, 3, 12, 60):
        for share in (0.9, 0.975, 0.99375):
            assert t_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-6)


def test_gaps_are_of_seeds_that_both_have():
    dense = [made_up("dense", seed, 3.0 + 0.1 * seed) for seed in (1, 2)]
    runs = [*dense, *(made_up("s2", seed, 3.3 + 0.13 * seed) for seed in (1, 2, 3))]
    found = gap(runs, "s2", percent=False)
    assert found.values == {1: pytest.approx(0.33), 2: pytest.approx(0.36)} and found.mean == pytest.approx(0.345)
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, 1) * 0.03 / 2)  # spread 0.0212 over two seeds
    assert np.isinf(gap(runs[:3], "s2").half_width)


def test_scatter_is_what_arm_and_seed_do_not_explain():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.02, (3, 5))
    runs = [made_up(arm, seed, 3 + 0.2 * row + 0.1 * seed + noise[row, seed])
            for row, arm in enumerate(("dense", "s2", "window")) for seed in range(5)]  # fmt: skip
    deviation, freedom = scatter(runs, ("dense", "s2", "window"), range(5))
    assert freedom == 8 and deviation == pytest.approx(0.02, rel=0.5)
    assert joint_half_width(deviation, freedom, 5, 4) > joint_half_width(deviation, freedom, 5, 1) > 0


def test_another_number_on_the_page_is_named():
    found = [text for each in check.HEADLINES for text in each()]
    page, said = check.PAGE.read_text(), []
    assert check.check_page(page, found, said.append) == 0
    other = page.replace("-0.121", "-0.141")
    assert check.check_page(other, found, said.append) == 2
    wrong = [line for line in said if line.startswith("DIFFERS")]
    assert "windows by -0.121 nats\n         the page: windows by -0.141 nats" in wrong[0]
    assert check.check_page(f"{page}\nAnd 12.5 % more.", found, said.append) == 1
    assert said[-1].startswith("DIFFERS  12.5 stands on the page outside of the headlines")


def test_the_table_of_a_study():
    lines = check.study_table("lm8k")
    (first,) = [line for line in lines if line.startswith("s2") and "1.8" in line]
    assert "1.8043 (+1.97)" in first and any("150M-bfee4945" in line for line in lines)
