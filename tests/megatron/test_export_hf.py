"""Checkpoints of real runs, in every parallel layout, become Hugging Face folders; one that came from there trains
on."""

import re

import pytest

from tests.megatron.test_hybrid import HYBRID

pytest.importorskip("transformers", reason="transformers is an optional extra: pip install 's2-megatron[hf]'")

LAYOUTS = {
    "tp2_pp2": (
        4, True, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --add-qkv-bias --qk-layernorm",
    ),
    "distributed_optimizer": (2, False, "--use-distributed-optimizer"),
}  # fmt: skip
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 1e-2 --qk-layernorm --s2-config window-size --window-size 31,0 --window-attn-skip-freq 2"
)
EXPERTS = {
    "ep2_tp2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1",
    "etp2": "--tensor-model-parallel-size 2 --sequence-parallel --moe-layer-freq [0,1,1,1] --moe-router-pre-softmax",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_exported_model_equals_the_checkpoint(lab, name):
    processes, sparsity, flags = LAYOUTS[name]
    save = lab.folder / f"export_{name}"
    lab.run(
        f"export_{name}",
        f"--train-iters 2 --save {save} --save-interval 2 {flags}",
        processes=processes,
        sparsity=sparsity,
    )
    printed = lab.python("exported.py", save, lab.folder / f"hf_{name}")
    difference, size = map(float, re.search(r"largest difference (\S+) of ([^\s,]+)", printed).groups())
    assert difference < 1e-4 and size > 1
    assert int(re.search(r"same continuation of (\d+) different tokens", printed)[1]) > (5 if sparsity else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_exported_experts_equal_the_checkpoint(lab, name):
    """As a stock model and as ours; Megatron's own text is that of `s2-megatron generate`."""
    save = lab.folder / f"experts_{name}"
    lab.run(f"experts_{name}", f"--train-iters 2 --save {save} --save-interval 2 {MOE} {EXPERTS[name]}", processes=2)
    for form in (["--stock"], []):
        printed = lab.python("exported.py", save, lab.folder / f"hf_experts_{name}{len(form)}", *form)
        difference, size = map(float, re.search(r"largest difference (\S+) of ([^\s,]+)", printed).groups())
        assert difference < 1e-4 and size > 1
        assert int(re.search(r"same continuation of (\d+) different tokens", printed)[1]) > 1


def test_an_imported_model_trains_on(lab, start, baseline):
    """Export the baseline's checkpoint, import it, and the first loss is that of the run that goes on."""
    folder, again = lab.folder / "hf_start", lab.folder / "imported"
    checkpoint = lab.folder / "tenth"
    checkpoint.mkdir()
    (checkpoint / "iter_0000010").symlink_to(start / "iter_0000010")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("10")
    lab.python("exported.py", checkpoint, folder)
    lab.python("run_tool.py", "import-hf", "--input", folder, "--output", again, "--make-vocab-size-divisible-by", 32)
    run = lab.run("imported", f"--train-iters 3 --load {again} --finetune")
    direct = lab.run("direct", f"--train-iters 3 --load {checkpoint} --finetune")
    assert run.losses == direct.losses and len(run.losses) == 3
    flags = f"--train-iters 1 --load {again} --finetune --hybrid-layer-pattern *-*-*-*-"
    hybrid = lab.run("imported_hybrid", flags, model=HYBRID)
    assert abs(hybrid.losses[1] - direct.losses[1]) <= 1e-6


def test_generation_notices_layers_that_go_around_s2_attention(lab, start, baseline):
    assert "went around the core attention" in lab.python("stock_generation.py", start)
