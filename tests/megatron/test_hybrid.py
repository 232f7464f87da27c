"""Megatron's HybridModel (--hybrid-layer-pattern) with S2 in its attention layers."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, get_hybrid_layer_counts
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import MetricEntry
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from megatron.training.models.hybrid import HybridModelConfig

from s2_megatron.megatron import hybrid_specs
from s2_megatron.megatron.hybrid_specs import (
    HybridAttentionLayer,
    model_config_from_args,
    s2_stack_spec,
)
from s2_megatron.megatron.layer_specs import apply_s2
from s2_megatron.megatron.model.check import check_model
from s2_megatron.megatron.model.core_attention import S2SelfAttention
from s2_megatron.megatron.model.expert_metrics import StageMetrics
from s2_megatron.megatron.model.hybrid_stack import FIELDS, LocalHybridStack, local_stack_spec, require_layers
from s2_megatron.megatron.model.norms import sequence_parallel_norm
from s2_megatron.megatron.model.rope_scaling import refuse_dropped
from s2_megatron.megatron.settings import S2Run, S2Settings
from s2_megatron.megatron.sparsity import resolve_sparsity, stock_sparsity
from tests.megatron.conftest import MODEL, ROOT
from tests.megatron.without_gpt import require_gpt_model, require_mtp, write_megatron
from tests.tiers import mostly_slow

# Of attention in 0, 2 and 5, counted from 0.
PATTERN = "*-*E-*"
HYBRID = MODEL.replace("--num-layers 4", "")  # Megatron counts the pattern's layers


def make_config(**settings):
    defaults = dict(
        num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0,
        normalization="RMSNorm", persist_layer_norm=False, transformer_impl="local", pipeline_dtype=torch.float32,
    )  # fmt: skip
    return TransformerConfig(**{**defaults, **settings})


def test_the_local_stack_is_of_the_halves_of_a_gpt_layer():
    spec = local_stack_spec(make_config(num_moe_experts=2))
    assert spec.module is LocalHybridStack and issubclass(LocalHybridStack, HybridStack)
    assert spec.params["final_norm"] is WrappedTorchNorm
    layers = spec.submodules
    modules = (layers.attention_layer.module, layers.mlp_layer.module, layers.moe_layer.module)
    assert modules == (TransformerLayer, MLPLayer, MoETransformerLayer)
    assert layers.moe_layer.submodules.mlp.func is MoELayer
    assert "transformer_engine" not in repr(spec), "a module of Transformer Engine"
    assert repr(copy.deepcopy(spec)) == repr(spec)
    assert local_stack_spec(make_config()).submodules.moe_layer is not layers.moe_layer


def test_norms_under_sequence_parallelism():
    layers = local_stack_spec(make_config(sequence_parallel=True, tensor_model_parallel_size=2))
    assert layers.params["final_norm"] is sequence_parallel_norm
    halves = layers.submodules
    assert halves.attention_layer.submodules.input_layernorm is sequence_parallel_norm
    assert halves.mlp_layer.submodules.pre_mlp_layernorm is sequence_parallel_norm


def arguments(**given):
    """Those of Megatron's that say which layers a model has."""
    defaults = dict(
        num_layers=6, num_attention_heads=4, num_query_groups=2, group_query_attention=True, seq_length=256,
        mtp_num_layers=None, window_size=None, hybrid_layer_pattern=PATTERN, s2_allow_python_patterns=False,
    )  # fmt: skip
    return Namespace(**{**defaults, **given})


def resolved(tmp_path, plan, **given):
    path = tmp_path / "sparsity.yaml"
    path.write_text(f"block_size: 16\nlayers: {plan}\nspecs:\n  S: {{local_blocks: 2, stride: 4}}\n")
    return resolve_sparsity(arguments(s2_config=str(path), **given))


def test_the_plan_counts_attention_layers_alone(tmp_path):
    sparsity = resolved(tmp_path, "SSD")
    assert [layer.spec for layer in sparsity.layers] == list("SSD") and sparsity.places == (0, 2, 5)
    alone = resolved(tmp_path, "SSD", num_layers=3, hybrid_layer_pattern=None)
    assert alone.places == () and alone.canonical_json() == sparsity.canonical_json()
    assert resolved(tmp_path, "SSD", hybrid_layer_pattern="*-|*E|-*").places == (0, 2, 5)
    with pytest.raises(ValueError) as caught:
        resolved(tmp_path, "SSDSSD")
    expected = f"SSDSSD, 6 names, for attention layers (*) among the 6 layers of --hybrid-layer-pattern {PATTERN}: 3"
    assert expected in str(caught.value).replace("'", "")
    with pytest.raises(
        ValueError, match=r"attention layers \(\*\) among the 2 layers of --hybrid-layer-pattern --: 0: expected 1 or"
    ):
        resolved(tmp_path, "S", hybrid_layer_pattern="--")
    assert len(stock_sparsity(arguments()).layers) == 3


def test_windows_count_every_layer_as_megatron_does():
    windows = arguments(window_size=(63, 0), window_attn_skip_freq=3, s2_config="window-size")
    assert [layer.spec for layer in resolve_sparsity(windows).layers] == list("WDD")  # layers 1, 3 and 6 of 6, from 1


def test_each_attention_layer_has_its_own_core(tmp_path):
    run = S2Run(resolved(tmp_path, "SSD"), S2Settings(seq_length=256))
    config = make_config(num_layers=6, num_moe_experts=2)
    spec = s2_stack_spec(config, run, PATTERN)
    stock = local_stack_spec(config).submodules
    assert repr(spec.submodules.mlp_layer) == repr(stock.mlp_layer)
    assert spec.module is LocalHybridStack and repr(spec.submodules.moe_layer) == repr(stock.moe_layer)
    attention = spec.submodules.attention_layer
    assert attention.module is HybridAttentionLayer
    for place, layer in zip((0, 2, 5), run.sparsity.layers):
        half = attention.params["by_place"][place]
        core = half.self_attention.submodules.core_attention
        if layer.pattern is None:
            assert core is DotProductAttention and half.self_attention.module is SelfAttention
            continue
        assert half.self_attention.module is S2SelfAttention
        assert core.params["pattern"] is layer.pattern and core.params["layer_index"] == place
    assert sorted(attention.params["by_place"]) == [0, 2, 5]
    assert repr(copy.deepcopy(spec)) == repr(spec)
    for pattern in ("*-*E*-", "*-*E", "**E-*"):
        with pytest.raises(ValueError, match=r"was resolved for \[0, 2, 5\]; expected the same"):
            s2_stack_spec(config, run, pattern)
    gpt = dataclasses.replace(run.sparsity, places=())
    with pytest.raises(ValueError, match="expected the same"):
        s2_stack_spec(config, S2Run(gpt, run.settings), PATTERN)


def test_a_stack_of_another_source_is_refused(tmp_path):
    run = S2Run(resolved(tmp_path, "SSD"), S2Settings(seq_length=256))
    config = HybridModelConfig(transformer=make_config(num_layers=6, num_moe_experts=2), hybrid_layer_pattern=PATTERN)
    apply_s2(config, run)
    first = config.hybrid_stack_spec
    apply_s2(config, run)
    assert repr(config.hybrid_stack_spec) == repr(first), "applied twice it is another model"
    config.hybrid_stack_spec = ModuleSpec(module=HybridStack)
    with pytest.raises(ValueError, match="expected one of them; drop --spec"):
        apply_s2(config, run)
    config.hybrid_stack_spec, config.builder = None, "another.Builder"
    with pytest.raises(ValueError, match=r"built by another\.Builder; expected megatron\.training\.models\.hybrid"):
        apply_s2(config, run)


def test_a_gpt_is_refused_under_the_pattern(tmp_path):
    require_gpt_model()
    from megatron.training.models.gpt import GPTModelConfig

    gpt = GPTModelConfig(transformer=make_config(num_layers=3))
    with pytest.raises(ValueError, match="expected the HybridModelConfig of hybrid_config_from_args"):
        apply_s2(gpt, S2Run(resolved(tmp_path, "SSD"), S2Settings(seq_length=256)))


def test_a_model_that_a_script_built_without_s2_is_found(tmp_path):
    def layer(place, attention):
        found = TransformerLayer.__new__(TransformerLayer)
        torch.nn.Module.__init__(found)
        found.layer_number, found.self_attention = place + 1, attention.__new__(attention)
        torch.nn.Module.__init__(found.self_attention)
        return found

    sparsity = resolved(tmp_path, "SSD")
    others = [layer(place, torch.nn.Identity) for place in (1, 3, 4)]  # MLPs have no attention
    built = [layer(0, S2SelfAttention), layer(2, S2SelfAttention), layer(5, SelfAttention)]
    check_model("a.yaml", sparsity, [torch.nn.ModuleList(built + others)])
    built[1] = layer(2, SelfAttention)
    with pytest.raises(ValueError, match=r"layers 1 \(counted from 0\) were built without S2"):
        check_model("a.yaml", sparsity, [torch.nn.ModuleList(built + others)])


@pytest.mark.parametrize(
    "symbol, words",
    [("E", "layers E, without --num-experts"), *((symbol, f"layers {symbol} with --tr") for symbol in "MGD+")],
)
def test_no_layer_is_built_as_one_that_does_nothing(tmp_path, symbol, words):
    """Megatron builds what has no spec as an identity."""
    pattern, config = f"**{symbol}*", make_config()
    with pytest.raises(ValueError) as caught:
        require_layers(local_stack_spec(config).submodules, pattern)
    assert words in str(caught.value)
    run = S2Run(resolved(tmp_path, "S", hybrid_layer_pattern=pattern), S2Settings(seq_length=256))
    with pytest.raises(ValueError, match="--hybrid-layer-pattern has layers"):
        s2_stack_spec(config, run, pattern)
    stack = local_stack_spec(config)
    with pytest.raises(ValueError, match="--hybrid-layer-pattern has layers"):
        stack.module(config, stack.submodules, layer_type_list=list(pattern), **stack.params)
    assert set(FIELDS) == Symbols.VALID_LAYERS


def test_rope_scaling_is_not_left_out_in_silence():
    for refuse in (refuse_dropped, model_config_from_args):
        with pytest.raises(ValueError, match="leave --use-rope-scaling out"):
            refuse(arguments(use_rope_scaling=True))
    refuse_dropped(arguments(use_rope_scaling=True, hybrid_layer_pattern=None))


@pytest.mark.parametrize(
    "experts, every, pattern",
    [(None, 1, "*-" * 12), (8, 1, "*E" * 12), (8, 3, "*E*-*-" * 4), (8, [0] + [1] * 11, "*-" + "*E" * 11)],
)
def test_the_pattern_in_place_of_a_gpt_keeps_its_experts(monkeypatch, experts, every, pattern):
    """Where Megatron has no GPTModel: without E, or with fewer layers, it would train another model."""
    monkeypatch.setattr(hybrid_specs, "argument_utils", object())
    with pytest.raises(ValueError, match="has no GPTModel; .*add --hybrid-layer-pattern " + re.escape(f"'{pattern}'")):
        model_config_from_args(
            Namespace(hybrid_layer_pattern=None, num_layers=12, num_experts=experts, moe_layer_freq=every)
        )


def test_multi_token_prediction_has_its_own_layers(tmp_path):
    """Each depth its own patterns, counted among its own layers from the start."""
    pattern, config = "*-*E-*/-**/-**", make_config(num_layers=6, num_moe_experts=2, mtp_num_layers=2)
    given = dict(hybrid_layer_pattern=pattern, mtp_num_layers=2)
    sparsity = resolved(tmp_path, "SSD\nmtp_layers: SDDS", **given)
    assert sparsity.mtp_places == (1, 2, 1, 2) and [layer.spec for layer in sparsity.mtp_layers] == list("SDDS")
    stack = s2_stack_spec(config, S2Run(sparsity, S2Settings(seq_length=256)), pattern).submodules
    found = []
    for depth in stack.mtp_block_spec.submodules.layer_specs:
        params = depth.params["attention"].params
        assert params["of_mtp"] and sorted(params["by_place"]) == [1, 2]
        cores = [half.self_attention.submodules.core_attention for half in params["by_place"].values()]
        found += [None if core is DotProductAttention else core.params["pattern"] for core in cores]
    assert found == [layer.pattern for layer in sparsity.mtp_layers]
    with pytest.raises(ValueError, match=r"4 names, for attention layers .* behind the first / of .*: 2"):
        resolved(tmp_path, "SSD\nmtp_layers: SDDS", hybrid_layer_pattern="*-*E-*/*/*", mtp_num_layers=2)
    config.mtp_use_repeated_layer = True
    for plan, fits in (("SD", True), ("SDDS", False)):
        given["mtp_use_repeated_layer"] = fits
        run = S2Run(resolved(tmp_path, f"SSD\nmtp_layers: {plan}", **given), S2Settings(seq_length=256))
        assert len(run.sparsity.mtp_layers) == 4
        with nullcontext() if fits else pytest.raises(ValueError, match="expected one pattern"):
            s2_stack_spec(config, run, pattern)
    one = resolved(tmp_path, "SSD\nmtp_layers: SD", hybrid_layer_pattern="*-*E-*/-**", mtp_num_layers=1)
    with pytest.raises(ValueError, match="resolved for 2 layers; expected the same"):
        s2_stack_spec(config, S2Run(one, S2Settings(seq_length=256)), pattern)
    given["mtp_use_repeated_layer"] = False
    windows = arguments(window_size=(63, 0), window_attn_skip_freq=2, s2_config="window-size", **given)
    assert [layer.spec for layer in resolve_sparsity(windows).mtp_layers] == list("DWDW")
    assert len(stock_sparsity(arguments(**given)).mtp_layers) == 4


def test_the_logged_mean_is_over_the_layers_with_experts(monkeypatch):
    """As Megatron's training_log asks for it: three, one of them behind the `/`."""
    tracker = StageMetrics(num_layers=5)
    monkeypatch.setattr(tracker, "_sync_metrics", lambda *arguments: None)  # over ranks
    tracker.metrics["load_balancing_loss"] = MetricEntry(torch.tensor([0.0, 2.0, 0.0, 3.0, 4.0]))
    experts, logged = get_hybrid_layer_counts("*E*E/*E")["E"], {}
    tracker.report(1.0, 1, num_layers=experts, moe_layer_freq=1, mtp_num_layers=1, total_loss_dict=logged)
    assert logged == {"load_balancing_loss": 3.0}


CASES = {
    "mixed": ("--hidden-dropout 0.1", "DSSS"),
    "s2": ("--qk-layernorm --normalization LayerNorm --squared-relu --no-bias-gelu-fusion", "SSSS"),
    "experts": (
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-dtype fp32 "
        "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 2 "
        "--moe-router-group-topk 1 --moe-z-loss-coeff 1e-3 --moe-aux-loss-coeff 1e-2 "
        "--moe-router-load-balancing-type seq_aux_loss --qk-l2-norm --moe-token-dispatcher-type alltoall",
        "SD",
    ),
    "bf16": (
        "--bf16 --no-masked-softmax-fusion --add-qkv-bias --attention-output-gate --kv-channels 32 "
        "--softmax-type learnable --rotary-percent 0.5 --rotary-base 5000 --rotary-seq-len-interpolation-factor 2 "
        "--deterministic-mode --norm-epsilon 1e-6",
        "SD",
    ),
    "windows": (
        "--window-size 31,0 --s2-config window-size --attention-softmax-in-fp32 --cross-entropy-loss-fusion "
        "--position-embedding-type learned_absolute --use-mup --mup-base-hidden-size 32 "
        "--apply-residual-connection-post-layernorm",
        "SSSS",
    ),
    "mtp": ("--mtp-num-layers 3 --mtp-loss-scaling-factor 0.3", "DSSS\nmtp_layers: SDS"),
    "mtp_experts": (
        "--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --mtp-num-layers 2",
        "SD\nmtp_layers: SD",
    ),
    "mtp_repeated": ("--mtp-num-layers 2 --mtp-use-repeated-layer", "DSSS\nmtp_layers: S"),
    "dense": ("", None),
}


@pytest.mark.parametrize("name", mostly_slow(CASES, "mixed", "s2", "experts", "mtp", "dense"))
def test_equals_the_gpt_of_equal_weights(lab, name):
    flags, plan = CASES[name]
    if "--mtp-num-layers" in flags:
        require_mtp()
    if plan is not None and "--s2-config" not in flags:
        config = lab.folder / f"hybrid_{name}.yaml"
        config.write_text(lab.sparsity.read_text().replace("DSSS", plan))
        flags += f" --s2-config {config}"
    model = MODEL.replace("--swiglu --disable-bias-linear", "") if "--squared-relu" in flags else MODEL
    output = lab.python("hybrid_equals_gpt.py", *lab.flags(flags, model=model, sparsity=False))
    found = json.loads(output.split("RESULT ")[1].splitlines()[0])
    gpt, hybrid = found["gpt"], found["hybrid"]
    assert (gpt["model"], hybrid["model"]) == ("GPTModel", "HybridModel") and found["weights"] > 10
    plan, _, of_mtp = (plan or "D").partition("\nmtp_layers: ")
    assert gpt["s2_depths"] == hybrid["s2_depths"] == [depth for depth, letter in enumerate(of_mtp) if letter == "S"]
    sparse = [layer for layer, letter in enumerate(plan * 4) if letter == "S" and layer < 4]
    assert gpt["s2_layers"] == sparse and hybrid["s2_layers"] == [2 * layer for layer in sparse]
    assert hybrid["patterns"] == gpt["patterns"]
    assert hybrid["losses"] == pytest.approx(gpt["losses"], rel=0, abs=1e-6)
    assert hybrid["norms"] == pytest.approx(gpt["norms"], rel=1e-6, abs=0)
    assert hybrid["routers"] == pytest.approx(gpt["routers"], rel=1e-6) and bool(gpt["routers"]) == ("experts" in name)
    assert gpt["losses"][0] != gpt["losses"][1] and min(gpt["norms"]) > 0.1


def test_it_trains_is_saved_and_resumed(lab):
    """Two iterations, then a third from the checkpoint; the table shows the layers by both numbers."""
    config = lab.folder / "hybrid.yaml"
    config.write_text(lab.sparsity.read_text().replace("DSSS", "DS"))
    folder = lab.folder / "hybrid_start"
    flags = f"--hybrid-layer-pattern *-*- --s2-config {config} --log-throughput"
    whole = lab.run("hybrid", f"--train-iters 3 {flags} --save {folder} --save-interval 2", model=HYBRID)
    assert len(whole.losses) == 3
    assert "Attention of 2 layers" in whole.output
    assert re.search(r"┃ layer +┃ in the model +┃ spec", whole.output), whole.output
    assert re.search(r"│ 0 +│ 0 +│ D +│ dense", whole.output) and re.search(r"│ 1 +│ 2 +│ S +│ s2", whole.output)
    script = lab.folder / "own_hybrid.py"  # the four lines, with Megatron's other model config
    text = (ROOT / "examples/existing_launch/with_s2.py").read_text()
    script.write_text(text.replace("gpt_config_from_args", "hybrid_config_from_args"))
    own = lab.run("hybrid_own", f"--train-iters 3 {flags}", model=HYBRID, script=script)
    assert (own.losses, own.grad_norms) == (whole.losses, whole.grad_norms)
    resumed = lab.run("hybrid_resumed", f"--train-iters 3 {flags} --load {folder} --ckpt-step 2", model=HYBRID)
    assert resumed.losses == {3: whole.losses[3]} and resumed.grad_norms == {3: whole.grad_norms[3]}
    flags = f"--train-iters 3 --s2-config {config} --load {folder} --hybrid-layer-pattern **--"
    run = lab.run("hybrid_as_pattern", flags, model=HYBRID, fails=True)
    assert "\nerror: " in run.output and "Traceback" not in run.output
    assert "--hybrid-layer-pattern *-*-, not **--" in run.output


@pytest.fixture(scope="module")
def without_gpt(tmp_path_factory):
    require_gpt_model()
    return write_megatron(tmp_path_factory.mktemp("megatron"))


@pytest.mark.slow
def test_where_megatron_has_no_gpt_model_a_hybrid_model_trains_as_before(lab, without_gpt):
    flags = "--train-iters 2 --hybrid-layer-pattern *-*-*-*-"
    expected = lab.run("with_gpt", flags, model=HYBRID)
    run = lab.run("without_gpt", flags, model=HYBRID, python_path=without_gpt, torchrun=True)
    assert (run.losses, run.grad_norms) == (expected.losses, expected.grad_norms) and len(run.losses) == 2
    assert "GPTModel is DEPRECATED" not in run.output


@pytest.mark.slow
def test_where_megatron_has_no_gpt_model_a_gpt_is_refused(lab, without_gpt):
    run = lab.run("gpt", "--train-iters 2", python_path=without_gpt, torchrun=True, fails=True)
    (line,) = (line for line in run.output.splitlines() if line.startswith("error: "))
    assert line.startswith("error: --hybrid-layer-pattern is not given, and Megatron ")
    assert line.endswith("; add --hybrid-layer-pattern '*-*-*-*-'")
