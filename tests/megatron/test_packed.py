"""Packed documents end to end (`--dataloader-inter-document-masking`, `--sft`)."""

from __future__ import annotations

import pytest

from tests.tiers import mostly_slow

PACKED = "--dataloader-inter-document-masking"
LAYOUTS = {
    "micro_batch_2": (1, "--micro-batch-size 2"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    # The second and third virtual stage have neither tokens nor labels, only the documents' borders.
    "pp2_vpp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}


@pytest.fixture(scope="session")
def packed_baseline(lab, start, baseline):
    return lab.run("packed", f"--train-iters 20 --load {start} --ckpt-step 10 {PACKED}")


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, "pp2_vpp2"))
def test_layout_equals_one_process(lab, start, packed_baseline, same_training, name):
    processes, flags = LAYOUTS[name]
    run = lab.run(
        f"packed_{name}", f"--train-iters 20 --load {start} --ckpt-step 10 {PACKED} {flags}", processes=processes
    )
    same_training(run, packed_baseline)


def test_packing_changes_the_attention(packed_baseline, baseline):
    """The control of the comparison above: with one document a sample the losses are others."""
    assert abs(packed_baseline.losses[11] - baseline.losses[11]) > 1e-3
    assert "S2 dense layers: computed by S2-Attention" in packed_baseline.output


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_document_does_not_see_its_neighbours(lab, micro_batch_size):
    """Documents shuffled within their sample, moved to the other one, or alone: the same loss for each token."""
    printed = lab.python(
        "packed_documents.py", *lab.flags(PACKED, "--train-iters 1", f"--micro-batch-size {micro_batch_size}")
    )
    found = {line.split(":")[0]: float(line.split()[-1]) for line in printed.splitlines() if ": max difference" in line}
    assert found.pop("control") > 0.1, "as one document the losses must differ"
    assert set(found) == {"shuffled", "alone"} | ({"moved"} if micro_batch_size == 2 else set())
    assert max(found.values()) <= 1e-5, found


def test_supervised_fine_tuning(lab, conversations):
    """--sft trains on packed conversations, and micro-batch 2 gives the losses of micro-batch 1."""
    path, tokenizer, package = conversations
    flags = f"""--sft --sft-tokenizer-prompt-format default --tokenizer-type SFTTokenizer
        --tokenizer-model {tokenizer} --data-path {path} --split 100,0,0 --train-iters 4 --calculate-per-token-loss"""
    runs = [lab.run(f"sft_{size}", flags, f"--micro-batch-size {size}", python_path=package) for size in (1, 2)]
    assert len(runs[0].losses) == 4
    for step, loss in runs[0].losses.items():
        assert abs(runs[1].losses[step] - loss) <= 1e-5
