"""The rules of thumb: the arms of a question differ in what it asks about, and what wins is told apart from seeds."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from studies import page, rules_page, scales, seeds_page
from studies.arms import SHARDED
from studies.continuations import ALL
from studies.effects import fit, judge
from studies.estimate import run_seconds
from studies.figures import draw_curves
from studies.results import write_json
from studies.run import COMPLETE, WRONG, main, parse_arguments, run
from studies.studies import STUDIES, density, pairs, sparsity
from s2_megatron.config.load import SparsityConfig
from s2_megatron.tools.compare.figures import COLOURS
from studies.tests.rules_logs import STEPS, write_rules_log

FULL, TINY = STUDIES["rules8k"], STUDIES["rules-tiny"]
# What the made-up runs have: losses above s2's. Every fourth layer dense is best, a stride of 8 and one of 4 are alike.
LOSSES = {"dense-fourth": -0.1, "hybrid": -0.05, "stride-2": -0.001, "stride-16": 0.2, "one-offset": 0.1}
NOISE = 0.004


def resolved(study, arm):
    return SparsityConfig.from_data(sparsity(study, arm)).resolve(**study.model.shape)


# The arms


@pytest.mark.parametrize("study", [FULL, TINY], ids=lambda study: study.name)
def test_the_arms_of_a_question_differ_in_what_it_asks(study):
    for question in study.questions:
        assert set(question.arms) <= set(study.arm_names)
    by_name = {question.name: {arm: resolved(study, arm) for arm in question.arms} for question in study.questions}
    dense = {
        arm: [at for at, layer in enumerate(sparsity.layers) if layer.pattern is None]
        for arm, sparsity in by_name["placement"].items()
    }
    last = study.model.num_layers - 1
    middle = study.model.num_layers // 2
    assert dense[SHARDED] == [] and dense["hybrid"] == [0, 1] and dense["dense-last"] == [last - 1, last]
    assert dense["dense-middle"] == [middle - 1, middle] and dense["dense-one"] == [middle - 1]
    assert dense["dense-fourth"] == list(range(3, last + 1, 4))
    ranges = {
        arm: {head.ranges for layer in sparsity.layers for head in layer.pattern.heads}
        for name in ("stride", "window")
        for arm, sparsity in by_name[name].items()
    }
    assert all(len(own) == 1 for own in ranges.values())
    assert len({next(iter(own)) for own in ranges.values()}) == len(ranges) == 7
    base = next(iter(ranges[SHARDED]))
    assert {own[-1][1] // base[-1][1] for arm in by_name["stride"] for own in ranges[arm]} == {0, 1, 2, 4}
    assert all(own[0] == base[0] for arm in by_name["stride"] for own in ranges[arm])
    assert sorted(own[0][0] / base[0][0] for arm in by_name["window"] for own in ranges[arm]) == [0.25, 0.5, 1, 2]


def test_dense_heads_attend_the_pairs_of_two_dense_layers():
    for study in (FULL, TINY):
        layer = resolved(study, "dense-heads").layers[0].pattern
        assert sum(head.is_dense for head in layer.heads) == 2
        assert pairs(study, sparsity(study, "dense-heads")) == pairs(study, sparsity(study, "hybrid"))


def test_offsets_by_head_by_layer_by_both_by_none():
    offsets = {
        arm: np.array([[head.offset for head in layer.pattern.heads] for layer in resolved(FULL, arm).layers]) % 8
        for arm in FULL.question("offsets").arms
    }
    assert all(len(set(layer)) == 8 for layer in offsets[SHARDED]) and (offsets[SHARDED] == offsets[SHARDED][0]).all()
    assert all(len(set(layer)) == 1 for layer in offsets["offsets-layer"])
    assert len(set(offsets["offsets-layer"][:, 0])) == 8
    assert all(len(set(layer)) == 8 for layer in offsets["offsets-both"])
    assert len(set(offsets["offsets-both"][:, 0])) == 8
    assert set(offsets["one-offset"].flat) == {0}
    half = [set(layer) for layer in offsets["offsets-half"]]
    assert all(len(layer) == 4 and layer | after == set(range(8)) for layer, after in pairwise(half))


def test_arms_that_cover_more_of_the_context_in_one_layer():
    """lm8k has 4 KV heads: half of a stride of 8 in a layer of s2, in two layers all of it."""
    study = STUDIES["lm8k"]
    layers = {}
    for arm in (SHARDED, "offsets-query", "stride-4"):
        first = resolved(study, arm).layers[0].pattern.heads
        layers[arm] = len({head.offset % head.ranges[-1][1] for head in first}) / first[0].ranges[-1][1]
    assert layers == {SHARDED: 0.5, "offsets-query": 1, "stride-4": 1}
    shares = {arm: density(study, arm) for arm in (SHARDED, "offsets-query", "dense-heads", "dense-fourth")}
    assert shares["offsets-query"] == pytest.approx(shares[SHARDED], rel=0.01)
    assert shares["dense-heads"] == pytest.approx(shares["dense-fourth"], rel=0.01)


def test_no_arm_is_trained_twice():
    wanted = Counter(parse_arguments(["rules8k", "--question", "placement", "heads", "offsets"]).arms)
    assert set(wanted.values()) == {1} and "dense-heads" in wanted and "stride-4" not in wanted
    assert SHARDED in parse_arguments(["rules8k", "--question", "heads"]).arms  # what the others are paired with
    everything = [json.dumps(sparsity(FULL, arm), sort_keys=True) for arm in FULL.arm_names]
    assert len(set(everything)) == len(everything)


def test_the_accuracies_are_of_the_same_sparsities():
    """Which go on from the same dense model, with as many chosen heads."""
    study = ALL["from-dense-rules8k"]
    twin = ALL[study.recall]
    assert twin.model == study.model and twin.start == study.start and twin.tasks is not None
    assert all(sparsity(study, arm) == sparsity(twin, arm) for arm in study.arm_names)
    assert all(study.arm(arm) == twin.arm(arm) for arm in study.arm_names)
    assert set(twin.arm_names) - set(study.arm_names) == {"window"}


def test_an_unknown_arm_or_question_is_refused(capsys):
    for wrong, said in (
        (["rules8k", "--question", "depth"], "expected placement, stride, offsets, window, heads"),
        (["lm8k", "--question", "stride"], "expected no --question"),
        (["lm32k", "--arms", "one-offset"], "expected dense, dense-fourth, s2, window, stride-16, stride-32"),
        (["rules8k", "--arms", "s2", "--question", "stride"], "not allowed with"),
    ):
        with pytest.raises(SystemExit) as ended:
            parse_arguments(wrong)
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_estimate_agrees_with_what_was_measured():
    """Of lm8k on one H200: 126 ms all-S2, 189 ms dense."""
    study = STUDIES["lm8k"]
    assert 0.1255 < run_seconds(study, "s2", study.tokens)[0] < 1.15 * 0.1255
    assert 0.1895 < run_seconds(study, "dense", study.tokens)[0] < 1.35 * 0.1895
    # Tasks are read by the model of text, with its vocabulary.
    steps = [run_seconds(ALL[f"from-dense-{name}8k"], "dense", 40_000_000)[0] for name in ("rules", "recall")]
    assert steps[0] == steps[1]
    said = []
    assert run(parse_arguments(["rules8k", "--stage", "estimate", "--seeds", "1", "2"]), said.append) == COMPLETE
    assert len(said) == len(FULL.arms) + 2 and said[-1].startswith(f"{2 * len(FULL.arms)} runs: ")


# Verdicts


def made_up(spread: float, seeds: int = 2) -> dict:
    rng = np.random.default_rng(3)
    return {
        (arm, str(seed)): 4 + 0.1 * seed + LOSSES.get(arm, 0.0) + spread * rng.standard_normal()
        for arm in FULL.arm_names
        for seed in range(1, seeds + 1)
    }


def test_effects_leave_out_what_a_seed_does_to_all():
    values = made_up(0.0)
    del values["hybrid", "2"]  # an arm with one seed: not taken for a better one
    effects = fit(values)
    assert effects.difference("hybrid", "s2") == pytest.approx(-0.05)
    assert effects.mean("s2") == pytest.approx(4.15) and effects.noise < 1e-9
    assert effects.freedom == len(values) - len(FULL.arms) - 1


def test_the_interval_of_a_difference_holds_as_often_as_it_says():
    rng, missed = np.random.default_rng(0), 0
    for _ in range(400):
        values = {(arm, seed): rng.standard_normal() + seed for arm in "abcdefgh" for seed in (1.0, 2.0)}
        effects = fit(values)
        missed += abs(effects.difference("a", "b")) > effects.half_width("a", "b")
    assert 8 <= missed <= 34  # of 20 expected


def test_so_many_seeds_make_an_interval_as_narrow_as_asked():
    effects = fit(made_up(NOISE))
    seeds = effects.seeds_for(NOISE)
    wide, narrow = (replace(fit(made_up(NOISE, seeds=n)), noise=effects.noise) for n in (seeds - 1, seeds))
    assert narrow.half_width("s2", "hybrid") <= NOISE < wide.half_width("s2", "hybrid")
    assert fit(made_up(NOISE, seeds=1)).seeds_for(NOISE) is None


def test_a_winner_is_told_apart_from_noise():
    effects = fit(made_up(NOISE))
    assert effects.noise == pytest.approx(NOISE, rel=0.6)
    assert judge(effects, ["s2", "hybrid", "dense-fourth"]).level == ("dense-fourth",)
    assert judge(effects, ["s2", "hybrid", "dense-fourth"], larger_is_better=True).level == ("s2",)
    assert set(judge(effects, ["s2", "stride-4", "stride-32"]).level) == {"s2", "stride-4", "stride-32"}
    single = judge(fit(made_up(NOISE, seeds=1)), ["s2", "hybrid"])
    assert not single.decided and single.best == "hybrid"


# The pages


def test_going_on_from_dense_each_question_has_its_own_noise():
    """An arm that costs much in one seed and nothing in the other says nothing of how far strides are apart."""
    values = {
        (arm, seed): 4 + 0.01 * at + (0.2 if (arm, seed) == ("dense-fourth", "1") else 0.0)
        for at, arm in enumerate(("s2", "stride-2", "stride-8", "stride-16", "dense-fourth", "hybrid"))
        for seed in "12"
    }
    for study, told in ((TINY, False), (ALL["from-dense-rules-tiny"], True)):
        found = rules_page.Findings(study, {rules_page.LOSS: values})
        verdict = found.verdict(study.question("stride"), rules_page.LOSS)
        assert (verdict.level == ("s2",)) is told and verdict.best == "s2"


def test_every_dense_model_is_shown_by_itself(tmp_path, monkeypatch):
    study, shares = ALL["from-dense-rules-tiny"], {"dense": (0.0, 0.0), "s2": (0.05, 0.04), "hybrid": (0.001, 0.0)}
    for arm, (switched, at_end) in shares.items():
        for seed in (2, 10) if arm != "hybrid" else (2,):
            write_rules_log(tmp_path / f"{arm}_seed{seed}.jsonl", arm, seed, (3 + seed) * (1 + at_end))
            write_json(tmp_path / f"switched-{arm}_seed{seed}.json", {"lm loss": (4 + seed) * (1 + switched * seed)})
    scale = scales.read_scale(replace(study, baseline="dense"), tmp_path)
    lines = seeds_page.section(study, tmp_path, scale.comparison, "x")
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    assert [row[0] for row in rows] == ["`s2`", "`hybrid`"]
    assert scale.seeds == ("2", "10")
    assert "| seed 2 | seed 10 |" in "\n".join(lines)
    assert rows[0][2:] == ["+10.00, +4.00", "+50.00, +4.00"]
    assert rows[1][2:] == ["+0.20, +0.00", "-"]
    assert lines[-2].endswith("(x/seeds.png)") and "Over these" not in "\n".join(lines)
    monkeypatch.setattr(seeds_page, "FEWEST", 3)
    lines = seeds_page.section(study, tmp_path, scale.comparison, "x")
    assert "Over these 3 runs the correlation of the two is" in lines[-4]
    heights = seeds_page._heights(("s2", "hybrid"), ("2", "10"), {("s2", "2"), ("s2", "10"), ("hybrid", "10")})
    assert heights == {("s2", "2"): -0.2, ("s2", "10"): 0.2, ("hybrid", "10"): 1.0}  # beside its own label
    seeds_page.draw(study, tmp_path, scale.comparison, tmp_path / "seeds.png")
    assert (tmp_path / "seeds.png").stat().st_size > 5000


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder of results as a study leaves it, two seeds, the arms of two questions."""
    data = tmp_path_factory.mktemp("results")
    arms = {arm for name in ("placement", "stride") for arm in TINY.question(name).arms}
    rng = np.random.default_rng(5)
    folder = data / TINY.name / "0.020480M-abababab"
    for arm in arms:
        for seed in (1, 2):
            final = 4 + 0.1 * seed + LOSSES.get(arm, 0.0) + NOISE * rng.standard_normal()
            write_rules_log(folder / f"{arm}_seed{seed}.jsonl", arm, seed, final)
    copies = {"corpus": "ab", "near": TINY.local_tokens, "sequences": 1, "tokens": [1] * 7, "losses": [2.0] * 7}
    needles = {"corpus": "ab", "sequences": 1, "questions": 16, "accuracy": 0.5, "whole": 0.25, "near": 1.0}
    needles |= {"by_depth": [0.5, None], "by_residue": [0.5, 0.25]}
    for arm in (SHARDED, "hybrid"):
        write_json(folder / f"{arm}_seed1.copies.json", copies)
        write_json(folder / f"{arm}_seed1.needles.json", needles)
    return data


def findings(data):
    (scale,) = scales.read_scales(TINY, data)
    return rules_page.read_findings(TINY, scale.comparison, rules_page.recall_folder(TINY, data))


def test_the_page_says_who_won(results):
    text = "\n".join(rules_page.section(findings(results), "pictures"))
    placement, stride = text.split("### ")[1:]  # the questions that have data
    assert placement.startswith("Which layers are dense") and stride.startswith("Stride")
    assert "- By validation loss: **every fourth layer dense** won." in placement
    rows = [line.split(" | ") for line in stride.splitlines() if line.startswith("| stride")]
    assert [row[0] for row in rows] == [f"| stride {each} (`{arm}`)" for each, arm in
                                        ((2, "stride-2"), (4, "s2"), (8, "stride-8"), (16, "stride-16"))]  # fmt: skip
    shares = [float(row[1].removesuffix(" %")) for row in rows]
    assert shares == sorted(shares, reverse=True) and rows[0][3] == "-" and " ± " in rows[1][3]
    verdict = next(line for line in stride.splitlines() if line.startswith("- By validation loss"))
    assert "stride 16" not in verdict and "the fewest pairs: **stride 8**" in verdict
    # All layers dense stand in the table and cannot win.
    assert "every layer dense (`dense`)" in placement
    assert "recall" not in text


def test_both_pages_get_what_was_found(results, monkeypatch):
    monkeypatch.setattr(page, "TITLES", {"rules-tiny": "Rules of thumb"})
    monkeypatch.setattr(page, "RULES", ("rules-tiny",))
    ((path, quality),) = page.study_pages(results, pictures=True).items()
    assert path == results / "rules-tiny" / "README.md"
    assert quality.startswith("# Rules of thumb\n") and "### Stride" in quality
    shown = re.findall(r"!\[.*\]\((.*)\)", quality)
    assert [name.rpartition("/")[2] for name in shown] == ["placement.png", "stride.png"]
    assert all((path.parent / name).stat().st_size > 10_000 for name in shown)
    *_, heading, losses, second, copied = re.split("^### (.*)$", quality, flags=re.MULTILINE)
    assert heading == "Where the loss lies" and "| hybrid | 2.000 (+0.000) |" in losses
    assert "scores: `" in losses and "`stride-2`" in losses and "one-offset" not in losses  # the latter has no run
    assert second == "Copying from far back" and "| hybrid | 50.0 | 25.0 | 100.0 | 50.0 | 25.0 |" in copied
    patterns = page.rules_text(results)
    assert "| Which layers are dense | **every fourth layer dense** won |" in patterns and "on X;" in patterns
    empty = results / "nothing"
    assert page.study_pages(empty, pictures=False) == {} and page.rules_text(empty) == ""


def test_more_arms_than_colours_are_drawn(tmp_path):
    arms = TINY.arm_names[: len(COLOURS) + 1]
    assert len(arms) > len(COLOURS)
    folder = tmp_path / TINY.name / "0.020480M-abababab"
    for arm in arms:
        write_rules_log(folder / f"{arm}_seed1.jsonl", arm, 1, 4.0)
    (scale,) = scales.read_scales(TINY, tmp_path)
    draw_curves(scale.comparison, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 20_000


def test_step_times_are_those_of_more_pairs():
    """Eight layers of a 7B model on one H200."""
    times = {arm: rules_page.forecast(FULL, arm, 131072) for arm in ("dense", "hybrid", "s2", "stride-32")}
    assert times["dense"] > times["hybrid"] > times["s2"] > times["stride-32"]
    assert density(FULL, "hybrid") > density(FULL, "s2")


# A study


@pytest.fixture(scope="module")
def study(tmp_path_factory, new_runs):
    """The folder of a study that trained the base and one more arm. Their comparison is a matter of test_study.py."""
    folder, said = tmp_path_factory.mktemp("rules"), []
    new_runs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("studies.run.compare_runs", lambda *arguments: None)
        patch.setattr("studies.run.devices", lambda: [(None, "CPU")])
        assert run(parse_arguments(arguments(folder)), said.append) == COMPLETE, "\n".join(said)
        yield folder


def arguments(folder, *more):
    tokens = str(STEPS * TINY.step_tokens)
    places = ["--runs", str(folder / "runs"), "--results", str(folder / "results")]
    arms = ["--arms", "s2", "dense-heads", "--losses-only"]
    return ["rules-tiny", *arms, "--tokens", tokens, *places, *(more or ["--rate", "4e-3"])]


def test_a_study_trains_its_arms_and_none_of_them_again(study):
    found = findings(study / "results")
    assert {arm for arm, _ in found.values["validation loss"]} == {"s2", "dense-heads"}
    assert not [*study.rglob("*.copies.json"), *study.rglob("*.needles.json"), *study.rglob("checkpoints")]
    (study / "runs" / "rules-tiny").rename(study / "runs" / "moved")  # another machine has the results alone
    said = []
    assert run(parse_arguments(arguments(study)), said.append) == COMPLETE
    assert not [line for line in said if line.startswith("started")]
    assert any(line.startswith("2 of 2 runs have a result in ") for line in said)


def test_a_result_of_another_learning_rate_is_refused(study, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", *arguments(study, "--rate", "2e-3")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == WRONG
    assert "was trained with the learning rate 0.004; expected 0.002; move it away" in capsys.readouterr().err
