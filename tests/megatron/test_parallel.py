"""Every way to spread or rerun the model computes what one process computes: same losses, same gradient norms.

All runs resume one checkpoint of one process after 10 iterations, with its optimizer unless said otherwise, and train
to 20.
"""

from __future__ import annotations

import pytest

from tests.megatron.conftest import altered
from tests.megatron.without_gpt import require_mtp
from tests.tiers import mostly_slow

MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 1e-2"
)
MTP = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
WEIGHTS_ONLY = "--no-load-optim --no-load-rng"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2_sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tp2_sp_recompute": (2, f"--tensor-model-parallel-size 2 --sequence-parallel {RECOMPUTE}"),
    "tp4_two_groups": (4, "--tensor-model-parallel-size 4"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2_vpp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "pp2_uneven": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "pp2_layout": (2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|t|t|L"),
    "full_recompute": (1, RECOMPUTE),
    "selective_recompute": (1, "--recompute-granularity selective --recompute-modules core_attn"),
    "micro_batch_2": (1, "--micro-batch-size 2"),
}
# The layout runs that the resume tests go on with, and therefore save.
SAVED = {"tp2": "--save-interval 5"}


@pytest.fixture(scope="session")
def layout_run(lab, start, baseline):
    """Runs a layout of LAYOUTS once a session."""
    done = {}

    def run(name):
        if name not in done:
            processes, flags = LAYOUTS[name]
            saving = f"--save {lab.folder / name} {SAVED[name]}" if name in SAVED else ""
            done[name] = lab.run(
                name, f"--train-iters 20 --load {start} --ckpt-step 10 {flags} {saving}", processes=processes
            )
        return done[name]

    return run


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, "tp2", "tp2_sp", "pp2_vpp2"))
def test_layout_equals_one_process(layout_run, baseline, same_training, name):
    same_training(layout_run(name), baseline)


def test_data_parallel_with_distributed_optimizer(lab, start, baseline, same_training):
    # Without Transformer Engine or Apex Megatron cannot load an optimizer into its distributed one.
    flags = f"--train-iters 20 --load {start} --ckpt-step 10 {WEIGHTS_ONLY}"
    one_process = lab.run("weights_only", flags)
    same_training(lab.run("dp2", f"{flags} --use-distributed-optimizer", processes=2), one_process)


@pytest.mark.slow
def test_expert_parallel(lab, same_training):
    # Megatron cannot load one process's plain optimizer into that of another number of local experts.
    folder = lab.folder / "moe"
    lab.run("moe_start", f"{MOE} --train-iters 2 --save {folder} --save-interval 2")
    flags = f"{MOE} --train-iters 12 --lr-decay-iters 12 --load {folder} {WEIGHTS_ONLY} --override-opt-param-scheduler"
    one_process = lab.run("moe", flags)
    same_training(lab.run("moe_ep2", f"{flags} --expert-model-parallel-size 2", processes=2), one_process)


@pytest.mark.slow
def test_multi_token_prediction(lab, same_training):
    require_mtp()
    folder = lab.folder / "mtp"
    sparsity = lab.folder / "mtp.yaml"
    sparsity.write_text(lab.sparsity.read_text() + "mtp_layers: S\n")
    flags = f"{MTP} --s2-config {sparsity} --train-iters 20"
    one_process = lab.run("mtp", f"{flags} --save {folder} --save-interval 10")
    assert "mtp 0" in one_process.output, "the start-up table does not show the MTP layer"
    run = lab.run("mtp_pp2", f"{flags} --load {folder} --ckpt-step 10 --pipeline-model-parallel-size 2", processes=2)
    same_training(run, one_process)


MUTATIONS = {"head_offset": "tp2", "layer_number": "pp2", "norm_gradient": "tp2_sp"}


@pytest.mark.parametrize("mutation", mostly_slow(MUTATIONS, "head_offset"))
def test_a_mistake_would_show(lab, start, baseline, same_training, mutation):
    """The comparisons above fail when a rank takes another rank's heads, counts its layers from 0, or keeps a norm's
    gradient to itself."""
    processes, flags = LAYOUTS[MUTATIONS[mutation]]
    run = lab.run(
        f"mutated_{mutation}",
        f"--train-iters 20 --exit-interval 12 --load {start} --ckpt-step 10 {flags}",
        processes=processes,
        **altered(mutation),
    )
    assert sorted(run.losses) == [11, 12]
    with pytest.raises(AssertionError, match="differ by"):
        same_training(run, baseline, steps=2)


def test_resume_is_bit_equal(lab, layout_run):
    uninterrupted = layout_run("tp2")
    processes, flags = LAYOUTS["tp2"]
    resumed = lab.run(
        "tp2_resumed", f"--train-iters 20 --load {lab.folder / 'tp2'} --ckpt-step 15 {flags}", processes=processes
    )
    assert sorted(resumed.losses) == [16, 17, 18, 19, 20]
    for step, loss in resumed.losses.items():
        assert loss == uninterrupted.losses[step]
        assert resumed.grad_norms[step] == uninterrupted.grad_norms[step]


@pytest.mark.slow
def test_resharding_keeps_every_bit(lab, layout_run):
    """TP2 to PP2: weights and Adam's moments are equal bit for bit, and the next losses within 1e-5."""
    uninterrupted = layout_run("tp2")
    processes, flags = LAYOUTS["pp2"]
    load = f"--load {lab.folder / 'tp2'} --ckpt-step 15 {flags}"
    resharded = lab.folder / "resharded"
    # No iteration is left at 15, and 15 is no multiple of 10: Megatron saves what it loaded.
    lab.run(
        "reshard",
        f"--train-iters 15 --override-opt-param-scheduler {load} --save {resharded} --save-interval 10",
        processes=processes,
    )
    compared = lab.python("compare_checkpoints.py", lab.folder / "tp2" / "iter_0000015", resharded / "iter_0000015")
    assert "optimizer moments" in compared
    assert "moments: 0" not in compared
    resumed = lab.run("resharded", f"--train-iters 20 {load}", processes=processes)
    assert sorted(resumed.losses) == [16, 17, 18, 19, 20]
    for step, loss in resumed.losses.items():
        assert abs(loss - uninterrupted.losses[step]) <= 1e-5
