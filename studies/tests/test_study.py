"""A whole study in its size for a CPU: corpus, runs through pretrain_gpt_s2.py, results, comparison, page."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

from studies import page, scales
from studies.positions import loses_from
from studies.run import AGAIN, COMPLETE, parse_arguments, run
from studies.studies import STUDIES
from s2_megatron.megatron.loss_log import HEADER, read_loss_log, read_records

TINY = STUDIES["lm-tiny"]
STEPS = 24


@pytest.fixture(scope="module")
def study(tmp_path_factory, new_runs):
    """(folder, what the command said): two arms, one seed."""
    folder, said = tmp_path_factory.mktemp("study"), []
    new_runs(folder)
    status = run(parse_arguments(arguments(folder)), said.append)
    assert status == COMPLETE, "\n".join(said)
    return folder, said


def arguments(folder, *more):
    tokens = str(STEPS * TINY.step_tokens)
    return ["lm-tiny", "--arms", "dense", "s2", "--rate", "4e-3", "--tokens", tokens, "--runs", str(folder / "runs"),
            "--results", str(folder / "results"), *more]  # fmt: skip


def test_the_arms_train_on_the_same_batches(study):
    folder, _ = study
    (scale,) = [path for path in (folder / "results" / "lm-tiny").iterdir() if path.is_dir()]
    assert sorted(path.name for path in scale.iterdir()) == [
        "corpus.json", "dense_seed1.copies.json", "dense_seed1.jsonl", "dense_seed1.needles.json",
        "s2_seed1.copies.json", "s2_seed1.jsonl", "s2_seed1.needles.json",
    ]  # fmt: skip
    logs = {arm: read_records(scale / f"{arm}_seed1.jsonl") for arm in ("dense", "s2")}
    headers = {arm: records[0][HEADER] for arm, records in logs.items()}
    assert headers["dense"]["flops_per_token"]["attended"] > headers["s2"]["flops_per_token"]["attended"]
    paths = {json.dumps(header["arguments"]["data_path"]) for header in headers.values()}
    assert paths == {json.dumps([f"corpus/{json.loads((scale / 'corpus.json').read_text())['sha256'][:12]}"])}
    losses = {arm: [record["lm loss"] for record in records[1:] if "validation" not in record]
              for arm, records in logs.items()}  # fmt: skip
    assert len(losses["dense"]) == STEPS and losses["dense"][-1] < losses["dense"][0] - 0.5
    # The same weights and the same first batch: only the attention differs, at initialisation by little.
    assert losses["s2"][0] == pytest.approx(losses["dense"][0], abs=0.02) and losses["s2"] != losses["dense"]
    assert not list((folder / "runs").rglob("checkpoints"))
    assert list((folder / "runs").rglob("compare.html"))


def test_evaluations_have_losses_by_position(study):
    folder, _ = study
    (log,) = (folder / "results").rglob("s2_seed1.jsonl")
    evaluations = read_loss_log(log)[1]
    assert list(evaluations) == ["iteration 13", f"iteration {STEPS} on validation set"]
    positions = [name for name in evaluations["iteration 13"] if name.startswith("lm loss by position/")]
    assert len(positions) == TINY.position_buckets + 1 and "lm loss by position/trailing" in positions


def test_where_the_loss_lies_adds_up_to_the_loss(study):
    """The checkpoint's own reader, over the validation documents, finds the loss that Megatron logged."""
    folder, _ = study
    (log,) = (folder / "results").rglob("s2_seed1.jsonl")
    found = json.loads(log.with_suffix(".copies.json").read_text())
    assert found["near"] == TINY.local_tokens and sum(found["tokens"]) == found["sequences"] * TINY.model.seq_length
    mean = np.average([loss or 0 for loss in found["losses"]], weights=found["tokens"])
    logged = read_loss_log(log)[1][f"iteration {STEPS} on validation set"]["lm loss"]
    assert mean == pytest.approx(logged, rel=0.05)  # Megatron takes other cuts of these documents


def test_the_needles_of_a_study(study):
    """Of 16 tokens here, as its blocks have: eight answers each. This model is too small to look anything up."""
    folder, _ = study
    (log,) = (folder / "results").rglob("s2_seed1.jsonl")
    found = json.loads(log.with_suffix(".needles.json").read_text())
    assert found.keys() == {
        "questions", "accuracy", "whole", "near", "by_depth", "by_residue", "sequences", "corpus",
    }  # fmt: skip
    assert found["questions"] == 256 * 8 and found["sequences"] == 256
    assert found["corpus"] == json.loads(log.with_name("corpus.json").read_text())["sha256"][:12]
    # The window is the last eighth of the context.
    assert found["by_depth"][-1] is None and None not in found["by_depth"][:-1] and len(found["by_depth"]) == 8
    shares = [found["accuracy"], found["near"], *found["by_depth"][:-1], *found["by_residue"]]
    assert len(found["by_residue"]) == TINY.stride and all(0 <= share < 0.2 for share in shares) and found["whole"] == 0


def test_the_same_command_goes_on_and_says_what_is_left(study):
    folder, _ = study
    said = []
    assert run(parse_arguments(arguments(folder, "--seeds", "1", "2", "--budget", "60")), said.append) == AGAIN
    assert not [line for line in said if "started" in line]  # too little time
    assert "2 of 4 runs are finished; the budget is spent; repeat the command to go on" in said


def test_several_runs_at_once_need_times_of_their_arms(study):
    folder, _ = study
    parsed = parse_arguments(arguments(folder, "--seeds", "2", "--arms", "dense", "window", "--runs-per-gpu", "2"))
    with pytest.raises(ValueError, match=r"--runs-per-gpu: no result in .* how long a step of window takes on a CPU"):
        run(parsed, [].append)


def test_the_page_has_a_section_for_the_data(study, tmp_path):
    folder, _ = study
    (scale,) = scales.read_scales(TINY, folder / "results")
    text = "\n".join(page.scale_section(scale, "x", pictures=False))
    assert f"Steps: {STEPS} of 1,024 tokens" in text
    assert "s2 at most 1 % above dense at equal tokens" in text and "| window |" not in text
    rows = [line for line in text.splitlines() if line.startswith(("| dense", "| s2"))]
    assert [row.split(" | ")[1] for row in rows[:2]] == ["100.0 %", "39.2 %"]
    # Then the losses by position: a gap in percent for each quarter of the context.
    assert "| arm | 0 | 64 | 128 | 192 |" in text and len(rows[2].split(" | ")) == 1 + TINY.position_buckets
    # And by what stood before the predicted token.
    assert "Where the loss lies, over " in text and len(rows) == 7
    assert re.fullmatch(r"\| s2( \| \d\.\d{3} \([+-]\d\.\d{3}\)){8} \|", rows[4])
    # And what they copy.
    assert "Copying 8 random tokens from far back, in 256 validation sequences (seed 1)." in text
    assert all(re.fullmatch(rf"\| {arm}( \| \d+\.\d){{5}} \|", row) for arm, row in zip(("dense", "s2"), rows[5:]))
    assert text.count("- s2 loses to dense") + text.count("- s2 does not lose to dense") == 1
    page.draw_curves(scale.comparison, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 20_000


def test_the_pages_in_the_repository_are_what_the_data_give(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["page", "--check"])
    with pytest.raises(SystemExit, match=r"^0$"):
        page.main()
    assert (
        page.with_results(f"a\n{page.BEGIN}\nold\n{page.END}\nb", "")
        == f"a\n{page.BEGIN}\n\n{page.NO_RESULTS}{page.END}\nb"
    )


def test_a_page_that_is_not_current_is_named(tmp_path, monkeypatch, capsys):
    data, patterns = tmp_path / "docs" / "quality", tmp_path / "docs" / "patterns.md"
    (data / "gone").mkdir(parents=True)
    (data / "gone" / "README.md").write_text("old\n")
    patterns.write_text(f"{page.BEGIN}\nold\n{page.END}\n")
    for name, value in (("ROOT", tmp_path), ("DATA", data), ("PATTERNS", patterns)):
        monkeypatch.setattr(page, name, value)
    monkeypatch.setattr(sys, "argv", ["page", "--check"])
    with pytest.raises(SystemExit, match=r"^1$"):
        page.main()
    said = capsys.readouterr().err
    assert "docs/quality/gone/README.md is not what" in said and "docs/patterns.md is not what" in said


def test_where_an_arm_begins_to_lose():
    starts = ["0", "8K", "16K", "24K"]
    said = [loses_from("s2", np.array(gaps), starts, "dense") for gaps in
            ((-0.1, 0.1, -0.1, 0.1), (0.1, 0.2, 0.1, 0.0), (0.1, 0.1, 0.1, 0.1), (-0.1, 0.1, 0.1, 0.1))]  # fmt: skip
    assert said == ["s2 loses to dense from 24K on.", "s2 does not lose to dense at the end of the context.",
                    "s2 loses to dense at every position.", "s2 loses to dense from 8K on."]  # fmt: skip


def test_arguments_are_refused(capsys):
    found = {
        "--tokens=-1": "a number above 0",
        "lm9k": "choose from lm8k",
        "sparse": "expected dense, hybrid",
        "0": "expected 1 or more",
        "1": "--seeds 1: expected each seed once",
        "-1": "--seeds -1: expected each seed once, 0 to",
        "--losses-only": "from-dense-recall8k is about its tests; expected a study of text",
    }
    for wrong in (
        ["lm8k", "--tokens=-1"],
        ["lm9k"],
        ["lm8k", "--arms", "sparse"],
        ["lm8k", "--runs-per-gpu", "0"],
        ["lm8k", "--seeds", "1", "2", "1"],
        ["lm8k", "--seeds", "-1"],
        ["from-dense-recall8k", "--losses-only"],
    ):
        with pytest.raises(SystemExit, match="2"):
            parse_arguments(wrong)
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and wrong[-1] in said, said
        assert found[wrong[-1]] in said.replace("'", "")


def test_prose_is_wrapped_and_code_is_not():
    code = f"`{'word ' * 12}end`"
    text = f"- {'prose ' * 15}{code} more.\n| {'cell | ' * 40}\n```bash\n{'command ' * 30}\n```"
    lines = page.wrapped(text).split("\n")
    assert lines[0] == f"- {'prose ' * 15}".rstrip() and lines[1] == f"  {code} more."
    assert lines[2:] == text.split("\n")[1:]
