"""s2-megatron choose-dense on a real checkpoint: its losses are those of Megatron's own evaluation with the same
YAML, and heads are numbered as the YAML numbers them."""

import json

import numpy as np
import pytest

from s2_megatron.config.load import load_config
from tests.megatron.conftest import SEQ_LENGTH, VOCABULARY

# Layers 0, 1 and 3 see nearly everything; in layer 2 KV head 1 sees a block. No head matters as much as that one.
PLAN = """\
block_size: 16
layers: [A, A, B, A]
specs:
  A: {local_tokens: 112}
  B: {local_tokens: 16, dense_heads: [0]}
"""
NEEDED = {"layer": 2, "kv_heads": [1]}


@pytest.fixture(scope="module")
def dense(lab):
    """(a dense checkpoint, the flags of data whose validation part is one sequence)."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{lab.folder / 'sequence'}.bin", dtype=np.uint16)
    for _ in range(5):
        builder.add_document(rng.integers(1, VOCABULARY, SEQ_LENGTH + 1).tolist(), [SEQ_LENGTH + 1])
    builder.finalize(f"{lab.folder / 'sequence'}.idx")
    save = lab.folder / "dense_to_choose"
    lab.run("dense_to_choose", f"--train-iters 3 --save {save} --save-interval 3 --init-method-std 0.3", sparsity=False)
    return save, f"--data-path {lab.folder / 'sequence'} --split 4,1,0"


def choose(lab, dense, plan: str, name: str, *options) -> tuple[dict, str]:
    """(what --json says, the printed tables); the YAML is <name>.yaml."""
    checkpoints, data = dense
    (lab.folder / "plan.yaml").write_text(plan)
    files = ("--write", lab.folder / f"{name}.yaml", "--json", lab.folder / f"{name}.json")
    given = ("choose-dense", "--load", checkpoints, "--s2-config", lab.folder / "plan.yaml", *data.split())
    printed = lab.python("run_tool.py", *given, "--sequences", 1, *options, *files)
    return json.loads((lab.folder / f"{name}.json").read_text()), printed


@pytest.mark.slow
def test_the_losses_are_megatrons(lab, dense):
    found, printed = choose(lab, dense, PLAN, "two", "--heads", 2)
    assert found["chosen"] == 2 and [each["size"] for each in found["sets"]] == [0, 1, 2]
    wanted = {"plan": found["sets"][0]["loss"], "two": found["sets"][2]["loss"]}
    config = load_config(lab.folder / "two.yaml")
    resolved = config.resolve(num_layers=4, num_heads=4, num_kv_heads=2, seq_length=SEQ_LENGTH)
    assert resolved.density() == pytest.approx(found["sets"][2]["density"], abs=1e-9)
    assert f"{wanted['two']:.4f} with this one" in (lab.folder / "two.yaml").read_text()
    assert str(lab.folder) not in (lab.folder / "two.yaml").read_text()
    evaluated = (
        f"--load {dense[0]} --finetune --skip-train --train-iters 1 --eval-iters 1 --global-batch-size 1 {dense[1]}"
    )
    for name, loss in wanted.items():
        run = lab.run(f"chosen_{name}", evaluated, f"--s2-config {lab.folder / name}.yaml")
        assert run.evaluations["iteration 0 on validation set"] == pytest.approx(loss, abs=1e-5)
    run = lab.run("chosen_none", evaluated, sparsity=False)
    assert run.evaluations["iteration 0 on validation set"] == pytest.approx(found["dense_loss"], abs=1e-5)
    assert len({round(loss, 4) for loss in (*wanted.values(), found["dense_loss"])}) == 3
    assert "3 of 8 KV heads are dense" in printed


def test_the_head_that_sees_least_matters_most(lab, dense):
    found, _ = choose(lab, dense, PLAN, "needed", "--heads", 1)
    plan = found["sets"][0]["loss"]
    changes = {(each["layer"], *each["kv_heads"]): abs(each["loss"] - plan) for each in found["candidates"]}
    assert len(changes) == 7 and max(changes, key=changes.get) == (NEEDED["layer"], *NEEDED["kv_heads"])


def test_documents_are_those_of_training(lab, dense):
    """Three equal documents in one sequence that do not attend each other, and whose ends do not count: in whatever
    order Megatron takes them, its evaluation has this loss, and another one without the two flags."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    own = (SEQ_LENGTH + 1) // 3
    assert 3 * own == SEQ_LENGTH + 1
    rng = np.random.default_rng(2)
    builder = IndexedDatasetBuilder(f"{lab.folder / 'documents'}.bin", dtype=np.uint16)
    for _ in range(4):
        builder.add_document(rng.integers(1, VOCABULARY - 1, SEQ_LENGTH + 1).tolist(), [SEQ_LENGTH + 1])
    same = [*rng.integers(1, VOCABULARY - 1, own - 1).tolist(), VOCABULARY - 1]  # NullTokenizer's end of document
    for _ in range(3):
        builder.add_document(same, [own])
    builder.finalize(f"{lab.folder / 'documents'}.idx")
    data = f"--data-path {lab.folder / 'documents'} --split 4,3,0"
    masks = "--eod-mask-loss --dataloader-inter-document-masking"
    found, _ = choose(lab, (dense[0], data), PLAN, "apart", "--heads", 1, *masks.split())
    together, _ = choose(lab, (dense[0], data), PLAN, "together", "--heads", 1)
    evaluated = f"--load {dense[0]} --finetune --skip-train --train-iters 1 --eval-iters 1 --global-batch-size 1 {data}"
    run = lab.run("documents", f"{evaluated} {masks}", f"--s2-config {lab.folder / 'plan'}.yaml")
    wanted = run.evaluations["iteration 0 on validation set"]
    assert found["sets"][0]["loss"] == pytest.approx(wanted, abs=1e-5) != pytest.approx(together["sets"][0]["loss"])
