"""What a run and its dense twin log: one set of names in the loss log, TensorBoard and wandb, read back by `s2-megatron
compare`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from s2_megatron.megatron.records.loss_log import HEADER, read_records
from s2_megatron.tools.commands import main
from s2_megatron.tools.compare.readers import read_place, read_run

pytest.importorskip("wandb")
pytestmark = pytest.mark.slow
STEPS = 30
ARMS = ("dense", "s2")


@pytest.fixture(scope="module")
def logs(lab):
    """{arm: (loss log, TensorBoard folder, wandb folder)} of two runs that differ in --s2-config alone; both are
    stopped and resumed at iteration 20.

    Without a test set: Megatron logs its loss under the name of the validation set, and wandb keeps the last one."""
    found = {}
    for arm in ARMS:
        folder = lab.folder / f"logs_{arm}"
        flags = f"""--train-iters {STEPS} --lr-decay-iters {STEPS} --eval-interval 20 --eval-iters 2 --split 90,10,0
            --s2-position-loss 4 --save {folder / "checkpoints"} --load {folder / "checkpoints"} --save-interval 20
            --tensorboard-dir {folder / "tensorboard"} --tensorboard-log-interval 1
            --log-throughput --log-timers-to-tensorboard
            --wandb-project p --wandb-exp-name {arm} --wandb-save-dir {folder}"""
        environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(folder)}
        environment |= {"WANDB_RUN_ID": f"id{arm}", "WANDB_RESUME": "allow"}
        for stop in ("--exit-interval 20", ""):
            lab.run(f"logs_{arm}", f"{flags} {stop}", sparsity=arm == "s2", environment=environment)
        found[arm] = (lab.folder / f"logs_{arm}.jsonl", folder / "tensorboard", folder / "wandb")
    return found


@pytest.fixture(scope="module")
def runs(logs):
    """{arm: its run as read from the loss log, from TensorBoard and from wandb}"""
    return {arm: [read_run(str(place))[0] for place in places] for arm, places in logs.items()}


def test_every_process_has_a_header(logs):
    for log, *_ in logs.values():
        headers = [record for record in read_records(log) if HEADER in record]
        assert [header["iteration"] for header in headers] == [1, 21]
        arguments = headers[0][HEADER]["arguments"]
        assert arguments["seq_length"] == 128 and arguments["global_batch_size"] == 4 and arguments["seed"] == 7


def test_the_steps_of_wandb_never_go_back(logs):
    for *_, wandb in logs.values():
        _, pieces = read_place(str(wandb))
        assert [list(piece.times) for piece in pieces] == [list(range(1, 21)), list(range(21, STEPS + 1))]


def test_flops_are_attended_and_dense(runs):
    dense, s2 = (runs[arm][0] for arm in ARMS)
    assert dense.axis("flops")[-1] == dense.axis("dense-flops")[-1] == s2.axis("dense-flops")[-1] > s2.axis("flops")[-1]


@pytest.mark.parametrize("arm", ARMS)
def test_three_logs_of_one_run_agree(runs, arm):
    loss_log, tensorboard, wandb = runs[arm]
    for other in (tensorboard, wandb):
        assert other.remarks == loss_log.remarks == ()
        np.testing.assert_array_equal(other.steps, np.arange(1, STEPS + 1))
        for name, series in loss_log.series.items():
            if name.startswith(("tokens by position", "samples")):
                continue
            np.testing.assert_array_equal(other.series[name].steps, series.steps, err_msg=name)
            np.testing.assert_allclose(other.series[name].values, series.values, rtol=1e-6, err_msg=name)
        assert other.axis("tokens")[-1] == loss_log.axis("tokens")[-1] == STEPS * 4 * 128
        # The flag of each arm is all that the pieces of this test differ in.
        assert int(other.arguments["seed"]) == 7
    positions = [name for name in loss_log.series if name.startswith("lm loss by position/")]
    assert len(positions) == 2 * (4 + 1)  # four buckets and the trailing one, training and validation


def test_both_arms_log_the_same_names(runs):
    for log in range(3):
        dense, s2 = (set(runs[arm][log].series) for arm in ARMS)
        assert dense ^ s2 == set()


@pytest.mark.parametrize("log", [0, 1, 2])
def test_they_compare(logs, log, lab, capsys):
    places = [str(logs[arm][log]) for arm in ARMS]
    assert main(["compare", *places, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    baseline, arm = content["arms"]
    assert (baseline["name"], arm["name"]) == tuple(f"logs_{name}" for name in ARMS)
    assert lab.gpus or "CPU" in content["times_withheld"]
    axes = {"tokens", "flops", "dense-flops"} | (set() if content["times_withheld"] else {"hours"})
    assert arm["difference"]["steps"] == 20 and set(arm["loss_at_equal"]) == axes
    assert main(["compare", *places, "--vary", "all"]) == 0
