"""Which runs are compared with each other: those of seeds that have the same arms at the same learning rates."""

from __future__ import annotations

import re
from dataclasses import replace

from scipy import stats

from studies import page, scales
from studies.arms import BASELINE, SHARDED
from studies.continuations import CONTINUATIONS
from studies.gaps_page import noise_lines
from studies.results import write_json
from studies.studies import STUDIES
from studies.tasks import TASKS
from studies.tests.rules_logs import TINY, write_rules_log

# As from-dense8k: without questions, beside dense.
GOING_ON = replace(CONTINUATIONS["from-dense-rules-tiny"], questions=(), baseline=BASELINE)


def test_means_over_seeds_are_of_seeds_with_the_same_arms(tmp_path):
    """An arm of one seed does not stand beside the baseline's mean over two."""
    folder = tmp_path / TINY.name / "0.020480M-abababab"
    runs = ((SHARDED, 1, 4.0), ("hybrid", 1, 4.2), (SHARDED, 2, 3.0), ("dense", 2, 2.9), (SHARDED, 3, 1.0))
    without_baseline = (("hybrid", 4, 4.0), ("dense", 4, 3.0))
    for arm, seed, final in (*runs, *without_baseline):
        write_rules_log(folder / f"{arm}_seed{seed}.jsonl", arm, seed, final)
    (scale,) = scales.read_scales(TINY, tmp_path)
    assert scale.seeds == ("1", "2", "3")
    first, second = scale.parts()
    assert [result.arm.name for result in first.comparison.results] == [SHARDED, "hybrid"]
    assert first.seeds == ("1",) and first.comparison.results[0].validation == 4.0
    assert [result.arm.name for result in second.comparison.results] == [SHARDED, "dense"]
    assert second.seeds == ("2",) and second.comparison.results[0].validation == 3.0


def write_going_on(folder, runs):
    """runs: {(arm, seed): (the validation loss right after the switch, at the end)}."""
    for (arm, seed), (switched, final) in runs.items():
        write_rules_log(folder / f"{arm}_seed{seed}.jsonl", arm, seed, final)
        losses = {"lm loss": switched, "lm loss by position/trailing": switched}
        losses |= {"lm loss by position/000-127": switched, "lm loss by position/128-255": switched}
        write_json(folder / f"switched-{arm}_seed{seed}.json", losses)


def test_seeds_with_other_arms_have_tables_and_pictures_of_their_own(tmp_path):
    """Percentages are against dense of the same seed, and no picture of fewer seeds stays."""
    folder = tmp_path / "scale"
    write_going_on(folder, {("dense", 1): (5.0, 4.0), ("hybrid", 1): (5.5, 4.2)})
    alone = page.scale_section(scales.read_scale(GOING_ON, folder), "x", pictures=True)
    assert not [line for line in alone if line.startswith("### Seed")] and "](x/curves.png)" in "\n".join(alone)
    assert {path.name for path in folder.glob("*.png")} == {"curves.png", "switch.png", "seeds.png"}
    write_going_on(folder, {("dense", 2): (3.0, 2.0), ("s2", 2): (3.3, 2.2)})
    lines = page.scale_section(scales.read_scale(GOING_ON, folder), "x", pictures=True)
    text = "\n".join(lines)
    _, first, second = text.split("### Seed ")
    assert first.startswith("1\n") and second.startswith("2\n")
    assert "| hybrid | 5.5000 (+10.00 %) | 5.5000 (+10.00 %) |" in first and "| 4.2000 (+5.00 %) |" in first
    assert "| s2 | 3.3000 (+10.00 %) | 3.3000 (+10.00 %) |" in second and "| 2.2000 (+10.00 %) |" in second
    assert "| s2 |" not in first and "| hybrid |" not in second and "Every seed" not in text
    shown = {f"{kind}-seed{seed}.png" for kind in ("curves", "switch") for seed in (1, 2)} | {"seeds.png"}
    assert {path.name for path in folder.glob("*.png")} == shown and all(f"](x/{name})" in text for name in shown)


def test_studies_of_tasks_have_no_shares_of_a_loss(tmp_path):
    """That of a task which is learnt is near zero."""
    tasks = CONTINUATIONS["extend-recall-tiny"]
    folder = tmp_path / "scale"
    write_going_on(folder, {("dense", 1): (5.0, 4.0), ("s2", 1): (5.5, 0.01)})
    group = {"accuracy": 0.25, "by_depth": [0.25] * 8, "by_residue": [0.25] * 4, "by_hops": [0.25] * 3}
    for arm in ("dense", "s2"):
        write_json(folder / f"{arm}_seed1.recall.json", dict.fromkeys(TASKS, group))
    (folder / "switch.png").touch()  # of an earlier page
    text = "\n".join(page.scale_section(scales.read_scale(tasks, folder), "x", pictures=True))
    assert "| s2 | 25.0 | 25.0 | 25.0 |" in text and "](x/curves.png)" in text and "s2-megatron compare dense=" in text
    assert "validation loss" not in text and "training loss" not in text and "Every dense model" not in text
    assert "](x/recall.png)" in text
    assert {path.name for path in folder.glob("*.png")} == {"curves.png", "recall.png"}


def test_a_run_without_one_of_the_baseline_is_named(tmp_path):
    """It lends the section neither its GPU nor its rate."""
    write_going_on(
        tmp_path, {("dense", 1): (5.0, 4.0), ("s2", 1): (5.5, 4.2), ("s2", 3): (5.5, 4.2), ("hybrid", 2): (5.5, 4.2)}
    )
    for arm, seed, device in (("s2", 1, "Y"), ("s2", 3, "Z"), ("hybrid", 2, "Z")):
        path = tmp_path / f"{arm}_seed{seed}.jsonl"
        path.write_text(path.read_text().replace('"device": "X"', f'"device": "{device}"'))
    (line,) = [
        line for line in page.about_runs(scales.read_scale(GOING_ON, tmp_path)) if line.startswith("Runs an arm")
    ]
    assert " none was chosen. X, Y; " in line
    assert line.endswith(" Not compared, for no dense run has their seed: s2_seed3, hybrid_seed2.")


def with_rate(path, rate):
    path.write_text(path.read_text().replace('"lr": 0.004', f'"lr": {rate}'))


def test_runs_of_other_learning_rates_share_no_mean(tmp_path):
    write_going_on(tmp_path, {(arm, seed): (5.0, 4.0) for arm in ("dense", "s2") for seed in (1, 2)})
    with_rate(tmp_path / "s2_seed2.jsonl", 0.002)
    text = "\n".join(page.scale_section(scales.read_scale(GOING_ON, tmp_path), "x", pictures=False))
    _, first, second = text.split("### Seed ")
    assert " % | 0.004 | 4.0000" in first and " % | 0.002 | 4.0000" in second


def test_every_seed_stands_beside_dense_where_means_are_not_alike(tmp_path):
    """The targets at equal tokens are then held over all seeds, and not again over some of them."""
    runs = {("dense", 1): 4.0, ("s2", 1): 4.4, ("dense", 2): 2.0, ("s2", 2): 2.1, ("window", 2): 1.8}
    for (arm, seed), final in runs.items():
        write_rules_log(tmp_path / f"{arm}_seed{seed}.jsonl", arm, seed, final)
        if seed == 2:
            with_rate(tmp_path / f"{arm}_seed{seed}.jsonl", 0.001 if arm == "window" else 0.002)
    text = "\n".join(page.scale_section(scales.read_scale(STUDIES["lm-tiny"], tmp_path), "x", pictures=False))
    _, every, first, second = text.split("### ")
    assert every.startswith("Every seed") and "The seeds have several learning rates." in every
    assert "| arm | pairs attended | seed 1, 0.004 | seed 2, 0.002, 0.001 | all its seeds |" in every
    assert every.count("_seed1.jsonl ") == 2 and every.count("_seed2.jsonl ") == 3 and "s2-megatron compare " in every
    assert "| dense | 100.0 % | 4.0000 | 2.0000 | - |" in every
    assert re.search(r" % \| 4\.4000 \(\+10\.00 %\) \| 2\.1000 \(\+5\.00 %\) \| \+.*\], seeds: 2 \|", every)
    assert re.search(r" % \| - \| 1\.8000 \(-10\.00 %\) \| -.*\], seeds: 1 \|", every)
    assert "- s2 at most 1 % above dense at equal tokens: **" in every and "equal time" not in every
    assert all("s2 ahead of dense at equal time" in part and "equal tokens" not in part for part in (first, second))
    for path in tmp_path.glob("*_seed2.jsonl"):
        path.unlink()
    alone = "\n".join(page.scale_section(scales.read_scale(STUDIES["lm-tiny"], tmp_path), "x", pictures=False))
    assert "###" not in alone and "at equal tokens: **" in alone and "at equal time: **" in alone
    assert "Beside what arm and seed explain" not in text + alone


def test_three_like_seeds_decide_by_themselves(tmp_path):
    """Their targets are not held over other seeds too, and all their runs tell how far runs scatter."""
    others, like_ones = {"dense": 3.0, "s2": 3.3, "hybrid": 3.4}, {"dense": 2.0, "s2": 2.1, "window": 1.8}
    for seed in (1, 2, 3, 4):
        for arm, final in (like_ones if seed > 1 else others).items():
            # 0.1 more in one of nine runs: a residual of 4/9 of it, over 4 degrees of freedom.
            final += 0.3 * seed + 0.1 * (arm == "s2" and seed == 4)
            write_rules_log(tmp_path / f"{arm}_seed{seed}.jsonl", arm, seed, final)
    text = "\n".join(page.scale_section(scales.read_scale(STUDIES["lm-tiny"], tmp_path), "x", pictures=False))
    _, every, first, like = text.split("### ")
    assert "equal tokens" not in first and "- s2 at most 1 % above dense at equal tokens: **" in like
    assert "- hybrid at most 0.5 % above dense at equal tokens: **" in every and "- s2 at most" not in every
    noise = (0.1**2 * 4 / 9 / 4) ** 0.5
    low, high = (noise * (4 / stats.chi2.ppf(share, 4)) ** 0.5 for share in (0.975, 0.025))
    half, widest = (
        100 * stats.t.ppf(1 - 0.05 / 2 / gaps, 4) * noise * (2 / 3) ** 0.5 / (2.0 + 0.3 * 3) for gaps in (2, 3)
    )
    assert f"scatter by {noise:.4f} nats (standard deviation, 4 degrees of freedom, 95 % interval {low:.4f} to " in like
    assert f" to {high:.4f})." in like and "scatter" not in every + first
    gaps = (f"{100 * gap / (2.0 + 0.3 * 3):+.2f} %" for gap in (0.1 + 0.1 / 3, -0.2))
    assert f"| all | {' | '.join(gaps)} | ± {half:.2f} % | ± {widest:.2f} % |" in like
    gaps = (f"{100 * gap / (2.0 + 0.3 * 2.5):+.2f} %" for gap in (0.1, -0.2))
    assert f"| without 4 | {' | '.join(gaps)} | ± 0.00 % | ± 0.00 % |" in like
    scale = scales.read_scale(STUDIES["lm-tiny"], tmp_path).parts()[1]
    assert noise_lines(scale) and not noise_lines(replace(scale, study=GOING_ON))
    two_arms = replace(scale.comparison, results=scale.comparison.results[:2])
    assert not noise_lines(replace(scale, comparison=two_arms))
