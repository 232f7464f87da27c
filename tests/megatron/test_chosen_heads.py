"""s2-megatron choose-dense on a real checkpoint: its losses are those of Megatron's own evaluation with the same
YAML, and heads are numbered as the YAML numbers them."""

import json
from pathlib import Path

import numpy as np
import pytest

from s2_megatron.config.load import load_config
from tests.megatron.conftest import MODEL, SEQ_LENGTH, VOCABULARY
from tests.megatron.test_hybrid import HYBRID
from tests.tiers import mostly_slow

# Layers 0, 1 and 3 see nearly everything; in layer 2 KV head 1 sees a block. No head matters as much as that one.
PLAN = """\
block_size: 16
layers: [A, A, B, A]
specs:
  A: {local_tokens: 112}
  B: {local_tokens: 16, dense_heads: [0]}
"""
NEEDED = {"layer": 2, "kv_heads": [1]}


# (flags, the model's where it is no GPT of MODEL)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type aux_loss"
MODELS = {
    "dense": ("", MODEL),
    "experts": (f"{EXPERTS} --moe-layer-freq [0,1,1,1] --moe-aux-loss-coeff 1e-2 --qk-layernorm", MODEL),
    "hybrid experts": (f"{EXPERTS} --moe-router-pre-softmax --hybrid-layer-pattern *E*-*E*E", HYBRID),
}


@pytest.fixture(scope="module")
def trained(lab):
    """name -> (the checkpoint of a model without S2, the flags of data whose validation part is one sequence, of the
    model, its own), trained once."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{lab.folder / 'sequence'}.bin", dtype=np.uint16)
    for _ in range(5):
        builder.add_document(rng.integers(1, VOCABULARY, SEQ_LENGTH + 1).tolist(), [SEQ_LENGTH + 1])
    builder.finalize(f"{lab.folder / 'sequence'}.idx")
    data, made = f"--data-path {lab.folder / 'sequence'} --split 4,1,0", {}

    def train(name):
        if name not in made:
            flags, model = MODELS[name]
            run, save = f"{name.replace(' ', '_')}_to_choose", lab.folder / f"{name.replace(' ', '_')}_to_choose"
            saved = f"--train-iters 3 --save {save} --save-interval 3 --init-method-std 0.3 {flags}"
            lab.run(run, saved, sparsity=False, model=model)
            made[name] = save, data
        return made[name]

    return train


@pytest.fixture
def dense(trained):
    return trained("dense")


def choose(lab, dense, plan: str, name: str, *options) -> tuple[dict, str]:
    """(what --json says, the printed tables); the YAML is <name>.yaml."""
    checkpoints, data = dense
    (lab.folder / "plan.yaml").write_text(plan)
    files = ("--write", lab.folder / f"{name}.yaml", "--json", lab.folder / f"{name}.json")
    given = ("choose-dense", "--load", checkpoints, "--s2-config", lab.folder / "plan.yaml", *data.split())
    printed = lab.python("run_tool.py", *given, "--sequences", 1, *options, *files)
    return json.loads((lab.folder / f"{name}.json").read_text()), printed


@pytest.mark.parametrize("name", mostly_slow(MODELS, "experts"))
def test_the_losses_are_megatrons(lab, trained, name):
    own, model = MODELS[name]
    checkpoints, data = trained(name)
    found, printed = choose(lab, (checkpoints, data), PLAN, f"two of {name}".replace(" ", "_"), "--heads", 2)
    assert found["chosen"] == 2 and [each["size"] for each in found["sets"]] == [0, 1, 2]
    written = lab.folder / f"two of {name}.yaml".replace(" ", "_")
    wanted = {lab.folder / "plan.yaml": found["sets"][0]["loss"], written: found["sets"][2]["loss"]}
    resolved = load_config(written).resolve(num_layers=4, num_heads=4, num_kv_heads=2, seq_length=SEQ_LENGTH)
    assert resolved.density() == pytest.approx(found["sets"][2]["density"], abs=1e-9)
    assert f"{wanted[written]:.4f} with this one" in written.read_text()
    assert str(lab.folder) not in written.read_text()
    evaluated = f"--load {checkpoints} --finetune --skip-train --train-iters 1 --eval-iters 1 --global-batch-size 1"

    def megatrons(plan: Path | None) -> float:
        given = dict(sparsity=False) if plan is None else {}
        plan_flag = [] if plan is None else [f"--s2-config {plan}"]
        label = f"{name}_{'none' if plan is None else plan.stem}".replace(" ", "_")
        run = lab.run(f"chosen_{label}", evaluated, data, own, *plan_flag, model=model, **given)
        return run.evaluations["iteration 0 on validation set"]

    # The last candidate: what the layers before it give is not computed again.
    last = lab.folder / "last.yaml"
    last.write_text(PLAN.replace("B, A]", "B, C]") + "  C: {local_tokens: 112, dense_heads: [1]}\n")
    (candidate,) = (each for each in found["candidates"] if (each["layer"], each["kv_heads"]) == (3, [1]))
    for plan, loss in [*wanted.items(), (last, candidate["loss"])]:
        assert megatrons(plan) == pytest.approx(loss, abs=1e-5)
    assert megatrons(None) == pytest.approx(found["dense_loss"], abs=1e-5)
    assert len({round(loss, 4) for loss in (*wanted.values(), found["dense_loss"])}) == 3
    assert "3 of 8 KV heads are dense" in printed


def test_layers_of_a_model_with_experts_under_another_plan(lab, trained):
    """--beside and --by layer."""
    (lab.folder / "beside.yaml").write_text("block_size: 16\nlayers: S\nspecs:\n  S: {local_tokens: 16}\n")
    options = ("--beside", lab.folder / "beside.yaml", "--by", "layer", "--layers", 1)
    found, _ = choose(lab, trained("experts"), PLAN, "layers", *options)
    assert len(found["candidates"]) == 4 and found["sets"][1]["size"] == 1
    resolved = load_config(lab.folder / "layers.yaml").resolve(
        num_layers=4, num_heads=4, num_kv_heads=2, seq_length=SEQ_LENGTH
    )
    assert [layer.pattern is None for layer in resolved.layers].count(True) == 1


def test_the_head_that_sees_least_matters_most(lab, dense):
    found, _ = choose(lab, dense, PLAN, "needed", "--heads", 1)
    plan = found["sets"][0]["loss"]
    changes = {(each["layer"], *each["kv_heads"]): abs(each["loss"] - plan) for each in found["candidates"]}
    assert len(changes) == 7 and max(changes, key=changes.get) == (NEEDED["layer"], *NEEDED["kv_heads"])


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_documents_are_those_of_training(lab, trained, name):
    """Three equal documents in one sequence that do not attend each other, and whose ends do not count: in whatever
    order Megatron takes them, its evaluation has this loss, and another one without the two flags."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    own = (SEQ_LENGTH + 1) // 3
    assert 3 * own == SEQ_LENGTH + 1
    rng = np.random.default_rng(2)
    (checkpoints, _), (flags, _) = trained(name), MODELS[name]
    builder = IndexedDatasetBuilder(f"{lab.folder / 'documents'}.bin", dtype=np.uint16)
    for _ in range(4):
        builder.add_document(rng.integers(1, VOCABULARY - 1, SEQ_LENGTH + 1).tolist(), [SEQ_LENGTH + 1])
    same = [*rng.integers(1, VOCABULARY - 1, own - 1).tolist(), VOCABULARY - 1]  # NullTokenizer's end of document
    for _ in range(3):
        builder.add_document(same, [own])
    builder.finalize(f"{lab.folder / 'documents'}.idx")
    data = f"--data-path {lab.folder / 'documents'} --split 4,3,0"
    masks = "--eod-mask-loss --dataloader-inter-document-masking"
    found, _ = choose(lab, (checkpoints, data), PLAN, f"apart_{name}", "--heads", 1, *masks.split())
    together, _ = choose(lab, (checkpoints, data), PLAN, f"together_{name}", "--heads", 1)
    evaluated = f"--load {checkpoints} --finetune --skip-train --train-iters 1 --eval-iters 1 --global-batch-size 1"
    run = lab.run(f"documents_{name}", f"{evaluated} {data} {masks} {flags}", f"--s2-config {lab.folder / 'plan'}.yaml")
    wanted = run.evaluations["iteration 0 on validation set"]
    assert found["sets"][0]["loss"] == pytest.approx(wanted, abs=1e-5) != pytest.approx(together["sets"][0]["loss"])
