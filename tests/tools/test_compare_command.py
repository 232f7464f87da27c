"""`s2-megatron compare` from the command line to the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from s2_megatron.tools import commands
from s2_megatron.tools.compare import measure
from s2_megatron.tools.compare.figures import PANELS, draw_difference, write_png
from s2_megatron.tools.compare.page import make_page
from s2_megatron.tools.compare.readers import read_run
from s2_megatron.tools.compare.settings import make_arms
from tests.tools.logged_runs import BATCH, SEQ_LENGTH, losses, s2_arguments, write_loss_log


def main(arguments: list[str]) -> int:
    """The exit status of `s2-megatron compare`."""
    return commands.main(["compare", *arguments])


@pytest.fixture
def dense(tmp_path):
    return str(write_loss_log(tmp_path / "dense.jsonl", losses(1, 11), seconds=0.6))


@pytest.fixture
def s2(tmp_path):
    """Half a percent worse, and a sixth faster."""
    return str(write_loss_log(tmp_path / "s2.jsonl", losses(1, 21, gap=0.005), **s2_arguments()))


@pytest.fixture
def equal(tmp_path):
    """Another run with the noise of its own and nothing else."""
    return str(write_loss_log(tmp_path / "equal.jsonl", losses(1, 31), **s2_arguments()))


def test_a_gap_of_half_a_percent_from_files(dense, s2, capsys):
    assert main([dense, s2]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    (low, high), *_ = re.findall(
        r"^s2 is worse than dense: its training loss is between (.*) % and (.*) % worse\.", printed
    )
    assert 0 < float(low) < 0.5 < float(high) < 1
    assert "0.0037 apart (nine quickstarts of this project" in printed
    assert re.search(r"effective speed-up \(time to that loss\) │ 1.00 x │ 1\.\d+ x", printed)
    # One number for one question: the losses of the table differ by that of the sentence.
    dense_loss, s2_loss, share = re.search(
        r"training loss, last 25% of the steps │ ([\d.]+) │ ([\d.]+) │ │ against the baseline │ - │ ([-+.\d]+)%",
        printed,
    ).groups()
    assert 100 * (float(s2_loss) / float(dense_loss) - 1) == pytest.approx(float(share), abs=0.01)
    assert "loss at equal attended FLOPs" in printed
    # Runs of one length end at equal tokens, and dense-equivalent FLOPs of one model are its tokens.
    assert "loss at equal tokens" not in printed and "dense-equivalent FLOPs to" not in printed


def test_equal_runs_are_not_told_apart(dense, equal, capsys):
    assert main([dense, equal]) == 0
    assert "equal and dense are not told apart: its training loss is between" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_gate_for_ci(dense, s2, equal, capsys):
    assert main([dense, equal, "--at-most", "0.005"]) == 0
    assert main([dense, s2, "--at-most", "0.005"]) == 1
    assert "s2 may be worse by" in capsys.readouterr().err
    assert main([dense, s2, "--at-most", "0.02"]) == 0
    # The bound is on what is shown, not on the mean: a wide interval is no pass.
    assert main([dense, equal, "--at-most", "0.005", "--run-offset", "0.05"]) == 1


def test_json_has_what_the_table_shows(dense, s2, capsys):
    assert main([dense, s2, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    baseline, arm = content["arms"]
    assert content["baseline"] == "dense" and baseline["difference"] is None
    assert arm["difference"]["verdict"] == "worse" and arm["difference"]["relative"][0] == pytest.approx(
        0.005, abs=0.002
    )
    assert arm["difference"]["steps"] == 75
    assert arm["loss_at_equal"]["tokens"] == arm["final_loss"] > baseline["final_loss"]
    # The dense run is slower: at equal time it has done 250 of its 300 steps.
    dense_run, _ = read_run(dense)
    assert baseline["loss_at_equal"]["hours"] == pytest.approx(float(measure.smoothed(dense_run)[249]))
    assert content["limits"]["tokens"] == 300 * BATCH * SEQ_LENGTH
    hours = [each["to_target"]["hours"] for each in (baseline, arm)]
    assert arm["speed_up"] == pytest.approx(hours[0] / hours[1])


def test_a_schedule_that_had_not_ended_is_named(tmp_path, dense, s2, capsys):
    """The slower run is measured at equal time in the middle of its schedule; constant rates have no such point."""

    def falling(step):
        return 0.1 * (1 - step / 300)

    slow = write_loss_log(tmp_path / "slow.jsonl", losses(1, 11), seconds=0.6, rate=falling)
    fast = write_loss_log(tmp_path / "fast.jsonl", losses(1, 21), rate=falling, **s2_arguments())
    assert main([str(slow), str(fast), "--json"]) == 0
    # At step 250 of 300.
    assert json.loads(capsys.readouterr().out)["remarks"] == [
        "At equal time slow was in the middle of the schedule (learning rate at 17% of its highest): a run whose "
        "schedule ends there would usually have a lower loss."
    ]
    assert main([dense, s2, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["remarks"] == []


def test_times_are_withheld_where_they_say_nothing(tmp_path, dense, s2, capsys):
    """One machine was busy for a third of the run; two kinds of GPUs; a CPU, as the log or its backend says."""
    busy = write_loss_log(tmp_path / "busy.jsonl", losses(1, 11)[:200], seconds=0.5)
    write_loss_log(busy, losses(1, 11)[200:], header=False, append=True, first=201, start=1100 - 2.5 * 200, seconds=2.5)
    other = write_loss_log(tmp_path / "other.jsonl", losses(1, 21), **s2_arguments())
    for name, change, reason in (
        ("busy", None, "half of the steps of busy took less than 0.5 s or more than 2.5 s: something else slowed"),
        ("kinds", {"device": "NVIDIA H100"}, "the runs were on different devices (NVIDIA H100, NVIDIA H200)"),
        ("cpu", {"device": "CPU"}, "a run was on a CPU"),
    ):
        runs = [str(busy), s2] if change is None else [f"{tmp_path}/{name}1.jsonl", f"{tmp_path}/{name}2.jsonl"]
        if change is not None:
            for path, source, machine in zip(runs, (dense, other), (change, {"device": "NVIDIA H200"})):
                header, *lines = Path(source).read_text().splitlines()
                header = json.loads(header)
                header["run"]["machine"] = machine
                Path(path).write_text("\n".join([json.dumps(header), *lines, ""]))
        assert main(runs) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert f"No times are compared, and no speed-up: {reason}" in printed, printed
        assert "time of a step" in printed  # with its spread, as a fact
        for row in ("speed-up (", "equal time", "time to", "tokens/s"):
            assert row not in printed
        assert main([*runs, "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["times_withheld"].startswith(reason[:20]) and "hours" not in content["limits"]
        assert content["arms"][1]["speed_up"] is None
    gloo = write_loss_log(tmp_path / "gloo.jsonl", losses(1, 21), distributed_backend="gloo", **s2_arguments())
    assert main([dense, str(gloo), "--json"]) == 0
    assert "a run was on a CPU" in json.loads(capsys.readouterr().out)["times_withheld"]


def test_a_verdict_that_cannot_be_given_is_no_pass(tmp_path, capsys):
    runs = [str(write_loss_log(tmp_path / f"{name}.jsonl", losses(1, at, steps=30), **more))
            for name, at, more in (("dense", 11, {}), ("s2", 21, s2_arguments()))]  # fmt: skip
    assert main([*runs, "--at-most", "0.5"]) == 1
    captured = capsys.readouterr()
    assert "s2 and dense are not told apart: 20 steps were compared, 40 or more are needed" in captured.out
    assert "(no interval)" in captured.out and "how much worse is not known: 20 steps" in captured.err


def test_forty_runs(tmp_path, capsys, recwarn):
    """The arms stand below each other, a line for each verdict and not for each run; no warnings, colours that differ,
    and equal patterns once."""
    files = [
        write_loss_log(tmp_path / f"run{index:02d}.jsonl", losses(1, 10 + index, steps=160), lr=1e-3 + 1e-5 * index,
                       rate=lambda step: 1 - step / 160, seconds=0.5 + 0.01 * index, **s2_arguments())
        for index in range(40)
    ]  # fmt: skip
    assert main([*map(str, files), "--vary", "lr"]) == 0
    printed = capsys.readouterr()
    assert "39 are not told apart from run00: run01, run02" in " ".join(printed.out.split())
    assert len([line for line in printed.out.splitlines() if "middle of the schedule" in line]) == 1
    comparison = measure.compare(make_arms([read_run(str(file))[0] for file in files], ["lr"], [False] * 40), ["lr"])
    comparison = replace(comparison, limits={"tokens": comparison.limits["tokens"]})  # one axis of the page is enough
    text = make_page(comparison, "tokens")
    write_png(comparison, "tokens", tmp_path / "curves.png")
    assert capsys.readouterr().err == printed.err == "" and not recwarn.list
    assert text.count('class="verdict') <= 3 and text.count("<figcaption>") == 1
    legend = re.search(r'<p class="legend">(.*?)</p>', text, re.DOTALL)[1]
    assert len(set(re.findall(r'stroke="(#\w+)"', legend))) == 40
    assert len(text) < 2e6


def test_axes_have_labels_and_do_not_blow_up_noise(tmp_path):
    files = [write_loss_log(tmp_path / f"{name}.jsonl", losses(1, at, noise=1e-4)) for at, name in enumerate("ab")]
    runs = [read_run(str(path))[0] for path in files]
    comparison = measure.compare(make_arms(runs, (), [True] * 2), ())
    for name, draw in PANELS.items():
        axis = Figure().subplots()
        if draw(axis, comparison, "tokens"):
            assert axis.get_ylabel() and axis.get_title(), name
        low, high = axis.get_ylim()
        if name == "validation":
            assert high - low >= 0.0199 * low
        if name == "difference":
            assert low <= -0.006 and high >= 0.006


def test_several_seeds(tmp_path, capsys):
    runs = []
    for seed in (1, 2, 3):
        runs.append(write_loss_log(tmp_path / f"dense{seed}.jsonl", losses(seed, 10 + seed), seed=seed))
        values = losses(seed, 20 + seed, gap=0.005)
        runs.append(write_loss_log(tmp_path / f"s2{seed}.jsonl", values, seed=seed, **s2_arguments()))
    assert main([*map(str, runs), "--json"]) == 0
    arm = json.loads(capsys.readouterr().out)["arms"][1]
    assert arm["seeds"] == ["1", "2", "3"] and arm["difference"]["pairs"] == 3 and arm["spread"] > 0
    assert arm["difference"]["verdict"] == "worse"
    assert main(list(map(str, runs))) == 0
    assert "3 pairs of seeds give their own spread" in " ".join(capsys.readouterr().out.split())
    # One arm alone: its spread, and no verdict.
    assert main([str(run) for run in runs[::2]]) == 0
    assert "nothing to compare but their spread" in capsys.readouterr().out


def test_an_arm_of_unlike_runs_is_named(tmp_path, dense, capsys):
    """Settings, also one that was not set, and sparsities; a number that was logged as text is no other one."""
    other = write_loss_log(
        tmp_path / "other.jsonl", losses(2, 3), seed=2, lr=0.002, min_lr="2.0e-4", lr_decay_samples=5, **s2_arguments()
    )
    third = write_loss_log(tmp_path / "third.jsonl", losses(3, 3), seed=3, lr_decay_samples=None)
    vary = ["--vary", "lr,lr_decay_samples", "--json"]
    assert main([f"x={dense}", f"x={other}", f"x={third}", *vary]) == 0
    assert json.loads(capsys.readouterr().out)["remarks"] == [
        "The runs of x differ in lr (0.004, 0.002); lr_decay_samples (5, None); sparsity (dense, quickstart): its "
        "numbers are means over runs that are not alike."
    ]


def test_batches_of_two_sizes_meet_at_equal_tokens(tmp_path):
    values = losses(1, 2, steps=200)
    twice = (values[::2] + values[1::2]) / 2
    small, _ = read_run(str(write_loss_log(tmp_path / "small.jsonl", values)))
    path = write_loss_log(tmp_path / "large.jsonl", twice)
    path.write_text(path.read_text().replace('"samples"', '"other"').replace('_size": 4', '_size": 8'))
    large, _ = read_run(str(path))
    assert large.axis("tokens")[-1] == small.axis("tokens")[-1]
    for paired in (measure.paired_steps(small, large), measure.paired_steps(large, small)):
        np.testing.assert_allclose(paired.arm, paired.baseline, rtol=1e-12)
        assert len(paired.steps) == 99


def test_the_differences_of_all_arms_are_in_the_picture(tmp_path):
    """Also those of arms before the last one."""
    gaps = {"dense": 0.0, "worse": 0.04, "better": -0.04, "equal": 0.0}
    files = [write_loss_log(tmp_path / f"{name}.jsonl", losses(1, at, gap=gap))
             for at, (name, gap) in enumerate(gaps.items())]  # fmt: skip
    runs = [read_run(f"{name}={path}")[0] for name, path in zip(gaps, files)]
    comparison = measure.compare(make_arms(runs, (), [True] * len(runs)), ())
    axis = Figure().subplots()
    assert draw_difference(axis, comparison, "tokens")
    low, high = axis.get_ylim()
    assert low < -0.12 < 0.12 < high < 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{dense}"], "expected two or more to compare"),
        (["{dense}", "/nowhere/run"], "no such file or folder"),
        (["{dense}", "{s2}", "--at-most", "-1"], "--at-most -1.0: expected a finite number of 0 or more"),
        (["{dense}", "{s2}", "--vary", "seeds"], "--vary seeds: not among the settings"),
        (["{dense}", "{other}"], "pass --vary global_batch_size"),
        (["{dense}", "{short}"], "have 12 logged steps in common; expected 20 or more"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, dense, s2, tmp_path, capsys):
    files = {
        "dense": dense,
        "s2": s2,
        "other": write_loss_log(tmp_path / "other.jsonl", losses(1, 2), global_batch_size=8),
        "short": write_loss_log(tmp_path / "short.jsonl", losses(1, 2, steps=12), **s2_arguments()),
    }
    assert main([argument.format(**files) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


# What a reader sees, put into the page's title by a script that runs after the page's own.
SEEN = """<script>
const seen = id => document.getElementById(id).getBoundingClientRect().height > 50;
const before = [seen('loss-tokens'), seen('loss-hours')];
document.querySelector('button[data-axis=hours]').click();
document.title = JSON.stringify({before, after: [seen('loss-tokens'), seen('loss-hours')],
  figures: document.querySelectorAll('svg:not(.line)').length, rows: document.querySelectorAll('tbody tr').length,
  verdict: document.querySelector('.verdict').innerText,
  data: JSON.parse(document.getElementById('comparison').textContent).baseline,
  outside: performance.getEntriesByType('resource').length});
</script></body>"""


def test_the_page_in_a_browser(dense, s2, tmp_path, capsys):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium: `apt-get install chromium` lets this test open the page")
    page = tmp_path / "out/compare.html"
    assert main([dense, s2, "--html", str(page), "--png", str(tmp_path / "compare.png")]) == 0
    assert f"wrote {page}" in capsys.readouterr().out
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)  # the page needs nothing but itself
    looked_at = tmp_path / "looked_at.html"
    looked_at.write_text(text.replace("</body>", SEEN))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([browser, *flags, looked_at.as_uri()], capture_output=True, text=True, timeout=600)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    found = json.loads(title[1].replace("&amp;", "&"))
    assert found["before"] == [True, False] and found["after"] == [False, True]
    # Four axes with loss, difference, validation and gradient norm; and the picture of the quickstart's patterns.
    assert found["figures"] == 4 * 4 + 1
    assert found["rows"] >= 13 and found["outside"] == 0
    assert found["verdict"].startswith("s2 is worse than dense") and found["data"] == "dense"
