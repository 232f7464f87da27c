"""Multi-latent attention (--multi-latent-attention), whose keys have another head dim than its values, with S2: dense
layers train as Megatron's own core attention does, sparse ones as one process does however they are spread."""

from __future__ import annotations

import pytest

from tests.megatron.conftest import MODEL, altered
from tests.tiers import mostly_slow

# Head dims 24 of queries and keys, 16 of values.
LATENT = MODEL.replace("--group-query-attention", "").replace(
    "--num-query-groups 2",
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --qk-layernorm --rope-type rope",
)
CP2 = "--context-parallel-size 2"
LAYOUTS = {
    "cp2": (2, CP2),
    "cp2_types": (2, f"{CP2} --s2-cp-comm-type all_gather sparse a2a sparse --s2-cp-keep-received"),
    "pp2_vpp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "recomputed": (
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --s2-keep-attention-output",
    ),
    "up_projections_recomputed": (1, "--recompute-granularity selective --recompute-modules mla_up_proj core_attn"),
}


def test_dense_layers_train_as_megatrons_own(lab, same_training):
    config = lab.folder / "latent_dense.yaml"
    config.write_text("block_size: 16\nlayers: DDDD\nspecs: {}\n")
    dense = lab.run("latent_dense", f"--train-iters 10 --s2-config {config}", model=LATENT)
    assert "S2 dense layers: computed by S2-Attention (Megatron's local attention does not suit" in dense.output
    stock = lab.run("latent_stock", "--train-iters 10", model=LATENT, sparsity=False, **altered("latent_stock"))
    same_training(dense, stock)


@pytest.fixture(scope="module")
def latent_start(lab):
    """A checkpoint after 10 iterations in one process, and the run that went on to 20."""
    folder = lab.folder / "latent_start"
    return folder, lab.run("latent", f"--train-iters 20 --save {folder} --save-interval 10", model=LATENT)


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, "cp2_types"))
def test_layout_equals_one_process(lab, latent_start, same_training, name):
    folder, whole = latent_start
    processes, flags = LAYOUTS[name]
    run = lab.run(
        f"latent_{name}",
        f"--train-iters 20 --load {folder} --ckpt-step 10 {flags}",
        processes=processes,
        model=LATENT,
    )
    same_training(run, whole)
    if CP2 in flags:
        assert "S2 attention: head dim 16 of value, 24 of query and key" in run.output


@pytest.mark.slow
def test_packed_rows(lab, latent_start, same_training):
    """Megatron pads their values itself, to the head dim of keys."""
    flags = f"--train-iters 20 --load {latent_start[0]} --ckpt-step 10 --dataloader-inter-document-masking"
    whole = lab.run("latent_packed", flags, model=LATENT)
    spread = lab.run("latent_packed_cp2", f"{flags} {CP2} --s2-cp-comm-type a2a", processes=2, model=LATENT)
    same_training(spread, whole)


@pytest.mark.slow
def test_tensor_parallel_ranks_of_megatron_train_otherwise(lab, same_training):
    """Without S2. When this fails, Megatron adds up the gradients of the keys' RoPE part, and the refusal
    mla_tensor_parallel can go."""
    folder, options = lab.folder / "latent_faulty", dict(model=LATENT, sparsity=False, **altered("latent_stock"))
    whole = lab.run("latent_faulty", f"--train-iters 20 --save {folder} --save-interval 10", **options)
    flags = f"--train-iters 20 --load {folder} --ckpt-step 10 --tensor-model-parallel-size 2"
    spread = lab.run("latent_faulty_tp2", flags, processes=2, **options)
    assert spread.losses[11] == pytest.approx(whole.losses[11], abs=1e-5)
    with pytest.raises(AssertionError, match="losses differ"):
        same_training(spread, whole)
