"""pretrain_gpt_s2.py without S2, S2 in a user's own script, and static inference of a model that the script builds."""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from s2_megatron.megatron.host.processes import start_without_torchrun
from s2_megatron.megatron.preflight.start_up import start_up
from tests.megatron.conftest import ROOT, SCRIPTS, end_all, run_processes

EXAMPLE = ROOT / "examples" / "existing_launch"  # a script before and after

STOCK = (
    "--train-iters 6 --attention-dropout 0.1 --hidden-dropout 0.1 --calculate-per-token-loss --eval-iters 2 "
    "--eval-interval 3"
)


def test_without_a_config_it_is_megatron(lab):
    """Losses, grad norms and evaluations are bit for bit those of a short script that builds Megatron's stock model."""
    corpus = lab.folder / "corpus"
    flags = f"{STOCK} --data-path 30 {corpus} 70 {corpus}"
    stock = lab.run("stock", flags, sparsity=False, script=SCRIPTS / "logged_stock.py", log_flag=False)
    ours = lab.run("ours_without_s2", flags, sparsity=False)
    assert len(stock.losses) == 6
    assert ours.losses == stock.losses
    assert ours.grad_norms == stock.grad_norms
    assert len(stock.evaluations) >= 2
    assert ours.evaluations == stock.evaluations


def test_four_lines_in_a_script_of_ones_own(lab, baseline):
    before, after = ((EXAMPLE / name).read_text().splitlines() for name in ("stock.py", "with_s2.py"))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith(("- ", "+ "))]
    assert [line[0] for line in changed] == ["+", "-", "+", "+", "+"]
    run = lab.run("user", "--train-iters 10", script=EXAMPLE / "with_s2.py")
    assert run.losses == {step: loss for step, loss in baseline.losses.items() if step <= 10}
    assert run.grad_norms == {step: norm for step, norm in baseline.grad_norms.items() if step <= 10}


@pytest.mark.parametrize(
    "line, instead, message",
    [
        ("apply_s2(model_config, run)", "pass", "layers 1, 2, 3 (counted from 0) were built without"),
        ("apply_s2(model_config, run)", "apply_s2(gpt_config_from_args(args), run)", "were built without S2"),
        ("prepare_s2(args)", "None", "the script has not called prepare_s2"),
    ],
)
def test_a_script_that_lacks_a_line_trains_nothing_dense(lab, tmp_path, line, instead, message):
    text = (EXAMPLE / "with_s2.py").read_text()
    assert text.count(line) == 1
    (script := tmp_path / "lacks.py").write_text(text.replace(line, instead))
    run = lab.run("lacks", "--train-iters 1", script=script, fails=True)
    assert "ValueError: --s2-config=" in run.output and message in run.output and not run.losses


def test_a_loss_of_ones_own_does_not_know_answers(lab):
    run = lab.run("answers", "--train-iters 1 --s2-loss-from-token 9", script=EXAMPLE / "with_s2.py", fails=True)
    assert "ValueError: --s2-loss-from-token: the loss of this script" in run.output and not run.losses


@pytest.mark.slow
def test_start_up_says_what_runs_where(lab):
    output = lab.run("start_up", "--train-iters 1", torchrun=True).output
    before = output[: output.index("iteration        1/")]
    assert "No GPU found" in before
    assert re.search(r"0 +│ D +│ dense", before)
    assert re.search(r"│ S +│ s2 +│ local 2 \+ stride 4", before)
    assert "S2 dense layers: computed by Megatron local" in before


def test_a_log_without_room_is_one_line(monkeypatch, capsys):
    """What Megatron has printed finds no room on stdout, where the start ends."""
    monkeypatch.setenv("LOCAL_RANK", "1")  # which leaves the checks of flags to the first
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match="2"), start_up(lambda parser: parser):
            print("using world size: 1")
    expected = "error: standard output: No space left on device; expected room for the log; free some, or write it to"
    assert capsys.readouterr().err == f"{expected} another disk\n"


def test_ranks_that_outlive_their_time_are_ended(lab, tmp_path):
    (script := tmp_path / "sleeps.py").write_text("import time\ntime.sleep(5000)\n")
    command, start = [*([] if lab.forked else [sys.executable]), str(script)], time.monotonic()
    code, _ = run_processes(command, 2, 2.0, forked=lab.forked)
    assert code == signal.SIGKILL and time.monotonic() - start < 600
    alone = subprocess.Popen(["sleep", "100"])  # not in a session of its own, as a rank that has just been forked
    end_all([alone])
    assert alone.returncode == -signal.SIGKILL


def test_settings_that_a_cpu_lacks(lab):
    run = lab.run("nccl", "--train-iters 1 --distributed-backend nccl", fails=True)
    assert "\nerror: --distributed-backend nccl" in run.output and "Traceback" not in run.output
    assert "add --distributed-backend gloo" in run.output


def test_static_inference_equals_the_full_forward(lab):
    config = lab.folder / "blocks_of_64.yaml"
    config.write_text(lab.sparsity.read_text().replace("block_size: 16", "block_size: 64"))
    flags = lab.flags(
        "--train-iters 1 --seq-length 1024 --max-position-embeddings 1024 --s2-dense-core s2", f"--s2-config {config}"
    )
    printed = lab.python("static_inference.py", *flags)
    found = dict(re.findall(r"prefix (\d+): max difference (\S+)", printed))
    assert [int(prefix) for prefix in found] == [1, 63, 64, 65, 1000]
    # Logits of size 5 in fp32, in another order of summation.
    assert max(float(difference) for difference in found.values()) <= 1e-5, found


def test_a_process_without_a_rank_is_the_only_one(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that all are as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    start_without_torchrun()
    assert "MASTER_ADDR" not in os.environ, "eight tasks would train beside each other"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    start_without_torchrun()
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and 0 < int(os.environ["MASTER_PORT"]) < 65536
    assert "no torchrun started this process" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("MASTER_ADDR")
    start_without_torchrun()
    assert os.environ["MASTER_PORT"] == "1" and "MASTER_ADDR" not in os.environ, "what is set stays"
