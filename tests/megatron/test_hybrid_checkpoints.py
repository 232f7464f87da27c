"""A GPT's checkpoint goes on as a HybridModel, through Megatron's translation at load."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pytest

from s2_megatron.megatron.checkpoints.compare import compare_shapes, compare_sparsity
from s2_megatron.megatron.checkpoints.folder import StoredCheckpoint
from s2_megatron.megatron.checkpoints.hooks import CheckpointHooks
from s2_megatron.megatron.checkpoints.translation import finetune_note, loads_weights_only
from s2_megatron.megatron.sparsity import resolve_sparsity
from tests.megatron.test_hybrid import HYBRID
from tests.tiers import mostly_slow

EXPERTS = "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax"
CASES = {"*-*-": "", "*E*E": EXPERTS}


@pytest.mark.parametrize("pattern", mostly_slow(CASES, "*-*-"))
def test_goes_on_as_the_gpt_would(lab, pattern):
    """The first loss shows the weights, the second one the optimizer's state; with --no-load-optim the first alone.
    What is saved then, Hugging Face and Megatron's inference compute alike, where an MLP stands behind each attention.
    """
    config, name = lab.folder / "two.yaml", f"translated_{len(CASES[pattern])}"
    config.write_text(lab.sparsity.read_text().replace("DSSS", "DS"))
    flags = f"--train-iters 4 {CASES[pattern]} --s2-config {config}"
    folder = lab.folder / name
    gpt = lab.run(f"{name}_gpt", f"{flags} --num-layers 2 --save {folder} --save-interval 2", model=HYBRID)
    flags += f" --load {folder} --ckpt-step 2 --hybrid-layer-pattern {pattern}"
    for optimizer in ("", "--no-load-optim")[: 1 if pattern == "*-*-" else 2]:
        saved = lab.folder / f"{name}_hybrid{optimizer}"
        hybrid = lab.run(f"{name}{optimizer}", flags, optimizer, f"--save {saved} --save-interval 2", model=HYBRID)
        assert "2 GPT layers feed 2 attention and 2 MLP positions" in hybrid.output
        assert "another sparsity" not in hybrid.output and sorted(hybrid.losses) == [3, 4]
        differences = [abs(hybrid.losses[step] - gpt.losses[step]) for step in (3, 4)]
        assert differences[0] <= 1e-6 and (differences[1] <= 1e-6) == (not optimizer), differences
        assert hybrid.grad_norms[3] == pytest.approx(gpt.grad_norms[3], rel=1e-5)
    if pattern != "*-*-":
        return
    printed = lab.python("exported.py", saved, lab.folder / "hybrid_hf")
    difference, size, loss = map(float, re.search(r"difference (\S+) of (\S+), of a loss (\S+)", printed).groups())
    assert difference < 1e-4 and loss < 1e-5 and size > 1
    assert int(re.search(r"same continuation of (\d+) different tokens", printed)[1]) > 3
    config = json.loads((lab.folder / "hybrid_hf/config.json").read_text())
    assert config["num_hidden_layers"] == 2 and len(config["s2_sparsity"]["layers"]) == 2


SHAPES = dict(
    hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, group_query_attention=True, num_query_groups=2,
    kv_channels=16, num_experts=None, swiglu=True, untie_embeddings_and_output_weights=True, padded_vocab_size=128,
    make_vocab_size_divisible_by=32, tensor_model_parallel_size=1, mtp_num_layers=None, window_size=None,
    seq_length=128, softmax_scale=None, use_rope_scaling=False, no_rope_freq=None, moe_layer_freq=1,
    use_distributed_optimizer=False, finetune=False, no_load_optim=False, s2_allow_sparsity_change=False,
)  # fmt: skip
GPT = dict(num_layers=3, hybrid_layer_pattern=None)
# Weights that Megatron would leave out, or other models of the same weights: (argument, the checkpoint's, this run's).
OTHERS = [
    ("qk_layernorm", True, False), ("normalization", "LayerNorm", "RMSNorm"), ("add_bias_linear", True, False),
    ("add_qkv_bias", True, False), ("position_embedding_type", "learned_absolute", "rope"),
    ("moe_ffn_hidden_size", 64, 32), ("moe_shared_expert_intermediate_size", 64, None),
]  # fmt: skip
HYBRID_ARGS = dict(num_layers=6, hybrid_layer_pattern="*-*-*-")


def stored(given: dict | None = None, kind: str = "GLOBAL", sharding: str | None = None, **more) -> StoredCheckpoint:
    content = {"singleton_local_shards": False, "distrib_optim_sharding_type": sharding}
    args = Namespace(**{**SHAPES, **GPT, **(given or {}), **more})
    return StoredCheckpoint("runs/a", args, 7, False, content=content, kind=kind)


def mine(pattern: str = "*-*-*-", **given) -> Namespace:
    layers = len(pattern.replace("|", ""))
    return Namespace(**{**SHAPES, "num_layers": layers, "hybrid_layer_pattern": pattern, **given})


def test_what_megatron_translates_is_let_through():
    compare_shapes(mine(), stored())
    compare_shapes(mine("*-|*-*-"), stored())
    compare_shapes(mine("M*-M*-*-"), stored())
    compare_shapes(mine("*E*E*E", num_experts=4), stored(num_experts=4))
    compare_shapes(mine(no_rope_freq=[0, 0, 0, 0, 1, 0]), stored(no_rope_freq=3))
    compare_shapes(mine(use_distributed_optimizer=True), stored(sharding="fully_reshardable"))


@pytest.mark.parametrize(
    "ours, theirs, words",
    [
        (mine("*-*-"), stored(), "it has 3 layers, and the pattern 2 attention layers (*); expected equal numbers; "
         "give --hybrid-layer-pattern '*-*-*-'"),
        (mine("**-*--"), stored(), "a layer of it is attention (*), then a dense MLP (-); expected these in turn"),
        (mine("*E*E*E", num_experts=4), stored(), "then a dense MLP (-)"),
        (mine(), stored(num_experts=4), "experts (E); expected these in turn; give --hybrid-layer-pattern '*E*E*E'"),
        (mine("*E*E*E", num_experts=2), stored(num_experts=4), "it has --num-experts 4, not 2"),
        (mine("*-*E*-"), stored(), "Megatron cannot translate it (Hybrid layer pattern '*-*E*-' mixes dense"),
        (mine("*-*-*"), stored(), "Megatron cannot translate it (Hybrid layer pattern '*-*-*' has 3 attention"),
        (mine(hidden_size=96), stored(), "is of another model, with --hidden-size 64, not 96"),
        *((mine(**{name: ours}), stored(**{name: theirs}), f"--{name.replace('_', '-')} {theirs}, not {ours}")
          for name, theirs, ours in OTHERS),
        (mine(), stored(kind="LEGACY"), "its format is LEGACY; expected torch_dist"),
        (mine(), stored(num_experts=4, moe_layer_freq=[1, 1, 1]), "it was saved layer by layer"),
        (mine("*-*-"), stored(num_experts=4, moe_layer_freq=2), "it was saved layer by layer, which Megatron does not "
         "translate; expected equal layers; train the GPT on"),
        (mine("*E*E*E", num_experts=4), stored(num_experts=4, moe_layer_freq=[1, 1, 1]), "it was saved layer by layer"),
        (mine(), stored(use_rope_scaling=True), "it was trained with --use-rope-scaling, which a HybridModel has not"),
        (mine(no_rope_freq=3), stored(no_rope_freq=3), "its attention layers [2] (counted from 0) have no RoPE by "
         "--no-rope-freq, and here [1]"),
        (mine(use_distributed_optimizer=True), stored(sharding="dp_reshardable"), "the format dp_reshardable; expected "
         "fully_reshardable; add --no-load-optim for the weights alone"),
        (mine("**--"), stored(HYBRID_ARGS), "is of another model, with --num-layers 6, not 4; --hybrid-layer-pattern "
         "*-*-*-, not **--"),
        (Namespace(**{**SHAPES, **GPT}), stored(HYBRID_ARGS), "iteration 7 is of a HybridModel, and this run builds a "
         "GPT; expected a HybridModel, as Megatron translates a GPT's checkpoint, but none back"),
        (Namespace(**{**SHAPES, **GPT}), stored(hybrid_override_pattern="M-*-"), "give --hybrid-layer-pattern 'M-*-'"),
    ],
)  # fmt: skip
def test_other_models_are_refused(ours, theirs, words):
    with pytest.raises(ValueError) as caught:
        compare_shapes(ours, theirs)
    assert str(caught.value).startswith("--load runs/a: iteration 7 is of ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_local_checkpoint_is_not_translated():
    args = mine(load="runs/a", s2_checksums=False, non_persistent_local_ckpt_dir="local")
    hooks = CheckpointHooks(args, None)
    with pytest.raises(ValueError, match="its format is LOCAL; expected torch_dist"):
        hooks.local_loaded({"args": stored().args, "iteration": 7})
    hooks.args = Namespace(**{**vars(args), **GPT})
    with pytest.raises(ValueError, match="is of a HybridModel, and this run builds a GPT"):
        hooks.local_loaded({"args": stored(HYBRID_ARGS).args, "iteration": 7})


def test_sparsity_is_compared_by_attention_layers(tmp_path):
    """--finetune leaves a HybridModel the optimizer's state of a GPT: run with Megatron 0.19.2."""

    def plan(letters, args):
        path = tmp_path / "plan.yaml"
        path.write_text(f"block_size: 16\nlayers: {letters}\nspecs:\n  S: {{local_blocks: 2, stride: 4}}\n")
        return resolve_sparsity(Namespace(**vars(args), s2_config=str(path), s2_allow_python_patterns=False))

    gpt = stored()
    gpt.args.s2_sparsity = plan("DSS", gpt.args).canonical_json()
    compare_sparsity(mine(), plan("DSS", mine()), gpt)
    for finetune in (False, True):
        args = mine(finetune=finetune)
        assert not loads_weights_only(args, gpt.args)
        note = finetune_note(args, gpt)
        assert ("add --no-load-optim for the weights alone" in note) if finetune else note is None
        with pytest.raises(ValueError) as caught:
            compare_sparsity(args, plan("DDS", args), gpt)
        assert "\n  layer 1: local 2" in str(caught.value) and "add --no-load-optim to load" in str(caught.value)
    assert loads_weights_only(mine(no_load_optim=True), gpt.args)
    assert loads_weights_only(mine(finetune=True), stored(HYBRID_ARGS).args)
    windows = dict(window_size=(31, 0), window_attn_skip_freq=3)
    with pytest.raises(ValueError, match=r"layer 1: .* -> dense"):  # Megatron's windows count every layer
        compare_sparsity(mine(**windows), None, stored(**windows))
