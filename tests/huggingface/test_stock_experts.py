"""export-hf of models with experts: transformers' own classes (--stock), or ours, compute from the folder what
Megatron's model computes, and something else with another plan or another routing; what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from s2_megatron.config.load import SparsityConfig
from s2_megatron.config.stored import stored_sparsity
from s2_megatron.huggingface import CACHE_ARGUMENT, S2Cache, S2GPTForCausalLM
from s2_megatron.tools.hf.architecture import plain_config, shape_of_arguments
from s2_megatron.tools.hf.stock import stock_config
from s2_megatron.tools.hf.torch_dist import TorchDistReader
from s2_megatron.tools.hf.weights import EXPERTS, LAYERS, Experts
from tests.huggingface.stock_checkpoints import arguments_of, shape_of, written_config
from tests.huggingface.test_stock_export import FAR, NEAR, WINDOW, stock_logits
from tests.tiers import mostly_slow

ALL, SOME = (True,) * 4, (False, True, False, True)


def experts(layers=ALL, normalized=True) -> Experts:
    return Experts(layers=layers, count=6, hidden=48, top=2, normalized=normalized)


# (class, plan, experts, the rest)
MODELS = {
    "qwen3 moe": ("Qwen3MoeForCausalLM", "D", experts(), dict(sizes=dict(qk_norm=True))),
    "qwen3 moe, some layers": (
        "Qwen3MoeForCausalLM", "D", experts(SOME, normalized=False), dict(sizes=dict(qk_norm=True, tied=True)),
    ),
    "mellum": ("MellumForCausalLM", "DWWD", experts(), dict(sizes=dict(qk_norm=True, head_dim=32))),
    "mellum, some layers": (
        "MellumForCausalLM", "W", experts(SOME, normalized=False),
        dict(sizes=dict(qk_norm=True, tied=True), use_rope_scaling=True, flags=["--moe-grouped-gemm"]),
    ),
    "hybrid": ("MellumForCausalLM", "WD", experts(SOME), dict(sizes=dict(qk_norm=True), pattern="*-*E*-*E")),
    "mixtral": ("MixtralForCausalLM", "D", experts(), dict(sizes=dict(head_dim=32))),
    "mixtral windows": ("MixtralForCausalLM", "W", experts(), dict(sizes=dict(tied=True), pattern="*E*E*E*E")),
}  # fmt: skip


@pytest.mark.parametrize("name", mostly_slow(MODELS, "mellum"))
def test_transformers_computes_what_megatron_computes(tools, tmp_path, name):
    kind, layers, own, more = MODELS[name]
    plan = dict(block_size=16, layers=layers) | (dict(specs=dict(W=dict(window=WINDOW))) if "W" in layers else {})
    sizes = more["sizes"] | dict(experts=dataclasses.asdict(own))
    load, output = tmp_path / "mcore", tmp_path / "x.npz"
    answer = tools.ask(save=dict(load=str(load), plan=plan, tokens=300, output=str(output)) | more | dict(sizes=sizes))
    assert answer["status"] == 0, answer
    tools("export-hf", "--load", load, "--output", tmp_path / "out", "--stock")
    found = np.load(output)
    text, expected = torch.from_numpy(found["tokens"]), found["logits"]

    def difference(**changed):
        logits = stock_logits(tmp_path / "out", text, **changed)
        return np.abs(logits - expected).max() / np.abs(expected).max()

    # Engines' own code by these names would run another model, as llama.cpp's does.
    other = not own.normalized or (kind == "MixtralForCausalLM" and "W" in layers)
    assert written_config(tmp_path / "out")["architectures"] == ["TransformersMoEForCausalLM" if other else kind]
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__ == kind
    assert difference() <= NEAR
    assert difference(num_experts_per_tok=3) > FAR
    if kind != "MixtralForCausalLM":
        assert difference(norm_topk_prob=not own.normalized) > FAR
    if "W" in layers:
        for window in (WINDOW - 1, WINDOW + 1):
            assert difference(sliding_window=window) > FAR


# (experts, the rest): what Qwen3-MoE and Mixtral have, and what no stock architecture has beside experts
OWN_MODELS = {
    "qwen3 moe": (experts(), dict(sizes=dict(qk_norm=True))),
    "mixtral": (experts(), dict(sizes=dict(head_dim=32))),
    "biases, some layers": (experts(SOME, normalized=False), dict(sizes=dict(qkv_bias=True))),
    "hybrid": (experts(SOME, normalized=False), dict(sizes={}, pattern="*-*E*-*E")),
}
OWN_PLAN = dict(block_size=16, layers="W", specs=dict(W=dict(window=WINDOW, sink_tokens=3, dense_heads=[1])))


def generated(model, prompt, **more):
    """120 greedy tokens."""
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=120, do_sample=False, **more)


@pytest.mark.parametrize("name", mostly_slow(OWN_MODELS, "qwen3 moe", "mixtral"))
def test_our_model_computes_what_megatron_computes(tools, tmp_path, name):
    """With a window, a sink and a dense head: logits, text by the compact cache, and the way back."""
    own, more = OWN_MODELS[name]
    sizes = more["sizes"] | dict(experts=dataclasses.asdict(own))
    load, folder, output = tmp_path / "mcore", tmp_path / "out", tmp_path / "x.npz"
    job = dict(load=str(load), plan=OWN_PLAN, tokens=300, output=str(output)) | more | dict(sizes=sizes)
    answer = tools.ask(save=job)
    assert answer["status"] == 0, answer
    tools("export-hf", "--load", load, "--output", folder)
    found = np.load(output)
    text, expected = torch.from_numpy(found["tokens"]), found["logits"]

    def difference(**changed):
        return np.abs(stock_logits(folder, text, **changed) - expected).max() / np.abs(expected).max()

    def with_plan(**spec):
        data = OWN_PLAN | dict(specs=dict(W=OWN_PLAN["specs"]["W"] | spec))
        sparsity = SparsityConfig.from_data(data).resolve(num_layers=4, num_heads=4, num_kv_heads=2, seq_length=1024)
        return dict(s2_sparsity=stored_sparsity(sparsity))

    assert difference() <= NEAR and difference(**with_plan()) <= NEAR
    for changed in (
        dict(num_experts_per_tok=3), dict(norm_topk_prob=not own.normalized), with_plan(window=WINDOW + 1),
        with_plan(sink_tokens=4), with_plan(dense_heads=[0]),
    ):  # fmt: skip
        assert difference(**changed) > FAR, changed

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is S2GPTForCausalLM
    kinds = [type(layer.mlp) is Qwen3MoeSparseMoeBlock for layer in model.model.layers]
    assert kinds == list(own.layers)
    prompt = text[:, :70]
    compact = generated(model, prompt, return_dict_in_generate=True, output_logits=True)
    assert isinstance(getattr(compact, CACHE_ARGUMENT), S2Cache)
    assert torch.equal(compact.sequences, generated(model, prompt, use_cache=False))
    with torch.no_grad():
        whole = model(compact.sequences, use_cache=False).logits[0, 69:-1]
    assert (torch.cat(compact.logits) - whole).abs().max() <= NEAR * whole.abs().max()
    assert len(set(compact.sequences[0, 70:].tolist())) > 10

    out, _ = tools("import-hf", "--input", folder, "--output", tmp_path / "back")
    assert "logits equal transformers' (all layers;" in out
    tools("export-hf", "--load", tmp_path / "back", "--output", tmp_path / "again")
    model.save_pretrained(tmp_path / "saved")
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    first, saved = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert first.keys() == saved.keys() and all(torch.equal(first[key], saved[key]) for key in first)
    assert ("model.layers.1.mlp.experts.5.gate_proj.weight" in first) and not [key for key in first if "sparse" in key]


def test_the_shards_of_experts(tools, tmp_path):
    """Megatron writes each expert by itself, whatever the expert parallelism, and no other layout is read."""
    sizes = dict(qk_norm=True, experts=dataclasses.asdict(experts()))
    job = dict(load=str(tmp_path / "mcore"), plan=dict(block_size=16, layers="D"), tokens=2, sizes=sizes)
    assert tools.ask(save=job | dict(output=str(tmp_path / "x.npz")))["status"] == 0
    reader = TorchDistReader(tmp_path / "mcore" / "release")
    name = f"{LAYERS}{EXPERTS}linear_fc1.weight"
    assert reader.shapes[name] == (4, 6, 96, 64)
    assert len(reader._metadata.state_dict_metadata[name].chunks) == 4 * 6 * 2
    tools("export-hf", "--load", tmp_path / "mcore", "--output", tmp_path / "out", "--as-dense")
    assert written_config(tmp_path / "out")["model_type"] == "qwen3_moe"


def trained_with(**more):
    shape = shape_of(qk_norm=True)
    args = arguments_of(shape, num_experts=6, moe_ffn_hidden_size=48, moe_router_topk=2, **more)
    return shape_of_arguments(args, "--load x", None).experts


@pytest.mark.parametrize(
    "more, expected",
    [
        (dict(), experts()),
        (dict(moe_router_pre_softmax=True, moe_layer_freq=[0, 1, 0, 1]), experts(SOME, normalized=False)),
        (dict(moe_layer_freq=3), experts((True, False, False, True))),
        (dict(moe_layer_freq=[0] * 4, moe_router_score_function="sigmoid"), None),
        (dict(moe_layer_freq=2, hybrid_layer_pattern="*-*E|*-*E"), experts(SOME)),
        (dict(hybrid_layer_pattern="*-*-*-*-"), None),
        (
            dict(
                moe_router_load_balancing_type=["seq_aux_loss", "global_aux_loss"], moe_aux_loss_coeff=[0.1, 0.2],
                moe_z_loss_coeff=1e-3, moe_router_dtype="fp32", moe_token_dispatcher_type="alltoall",
                moe_router_topk_scaling_factor=1.0, moe_grouped_gemm=True,
            ),
            experts(),
        ),
    ],
)  # fmt: skip
def test_the_experts_of_megatron(more, expected):
    assert trained_with(**more) == expected


@pytest.mark.parametrize(
    "more, message",
    [
        (dict(moe_router_score_function="sigmoid"), "moe_router_score_function='sigmoid' (expected softmax)"),
        (dict(moe_router_enable_expert_bias=True), "moe_router_enable_expert_bias=True (expected off, its default)"),
        (dict(moe_router_topk_scaling_factor=2.5), "moe_router_topk_scaling_factor=2.5 (expected None or 1.0)"),
        (dict(moe_router_load_balancing_type="sinkhorn"), "moe_router_load_balancing_type='sinkhorn' (expected aux"),
        (dict(moe_router_load_balancing_type=["aux_loss", "quantile_balancing"]), "'quantile_balancing'] (expected"),
        (dict(moe_router_num_groups=2, moe_router_group_topk=1), "moe_router_num_groups=2 (expected off, its default)"),
        (dict(moe_shared_expert_intermediate_size=48), "moe_shared_expert_intermediate_size=48 (expected off"),
        (dict(moe_expert_capacity_factor=1.0), "moe_expert_capacity_factor=1.0 (expected off"),
        (dict(moe_expert_rank_capacity_factor=1.5), "moe_expert_rank_capacity_factor=1.5 (expected off"),
        (dict(moe_input_jitter_eps=0.01), "moe_input_jitter_eps=0.01 (expected off"),
        (dict(moe_latent_size=16), "moe_latent_size=16 (expected off"),
        (dict(moe_apply_probs_on_input=True), "moe_apply_probs_on_input=True (expected off"),
        (dict(moe_mlp_glu_interleave_size=8), "moe_mlp_glu_interleave_size=8 (expected off"),
        (dict(moe_router_force_biased=0.5), "moe_router_force_biased=0.5 (expected off"),
        (dict(moe_router_force_biased=0.0), "moe_router_force_biased=0.0 (expected off"),
        (dict(moe_expert_capacity_factor=0.0), "moe_expert_capacity_factor=0.0 (expected off"),
        (dict(moe_of_a_later_release="new"), "moe_of_a_later_release='new' (expected off"),
    ],
)  # fmt: skip
def test_experts_that_no_stock_architecture_has(more, message):
    with pytest.raises(ValueError) as refused:
        trained_with(**more)
    assert message in str(refused.value) and "train with the expected values" in str(refused.value)


@pytest.mark.parametrize(
    "more, message",
    [
        (dict(moe_layer_freq=[1, 0]), r"moe_layer_freq=\[1, 0\] has 2 entries; expected one for each of the 4 layers"),
        (dict(hybrid_layer_pattern="*E*EE"), r"--hybrid-layer-pattern \*E\*EE; expected \*- or \*E repeated"),
        (dict(hybrid_layer_pattern="*EM-"), r"--hybrid-layer-pattern \*EM-; expected \*- or \*E repeated"),
    ],
)
def test_layers_that_no_stock_architecture_has(more, message):
    with pytest.raises(ValueError, match=f"^--load x: {message}"):
        trained_with(**more)


@pytest.mark.parametrize(
    "sizes, windows, message",
    [
        (dict(qkv_bias=True), (None,) * 4, "experts beside --add-qkv-bias; expected none of it, or --qk-layernorm"),
        (
            dict(experts=experts(SOME)),
            (None,) * 4,
            r"experts, layers without experts \(--moe-layer-freq\) and no norms",
        ),
        (dict(experts=experts(normalized=False)), (None,) * 4, "experts, --moe-router-pre-softmax and no norms of"),
        (dict(), (5, None, 5, 5), "experts, windows in some layers only and no norms of query and key; expected"),
        (dict(softmax_type="learnable", qk_norm=True), (5,) * 4, "softmax_type=learnable in every layer and head has"),
    ],
)
def test_a_model_with_experts_that_has_no_stock_form(sizes, windows, message):
    shape = shape_of(**dict(experts=experts()) | sizes)
    with pytest.raises(ValueError, match=f"^--stock: .*{message}.*; leave --stock out"):
        stock_config(plain_config(arguments_of(shape), shape, "float32"), shape, None, windows, "--stock")


@pytest.mark.parametrize(
    "sizes, windows, name",
    [
        (dict(), (None,) * 4, "LlamaForCausalLM"),
        (dict(qkv_bias=True), (None,) * 4, "TransformersForCausalLM"),
        (dict(qk_norm=True), (None,) * 4, "TransformersForCausalLM"),
        (dict(experts=experts()), (None,) * 4, "MixtralForCausalLM"),
        (dict(experts=experts(), qk_norm=True), (None,) * 4, "TransformersMoEForCausalLM"),
        (dict(experts=experts(), qk_norm=True), (5, None, 5, 5), "TransformersMoEForCausalLM"),
    ],
)
def test_scaled_rope_that_llama_cpp_would_lose_has_the_name_of_no_class_of_its_own(sizes, windows, name):
    shape = shape_of(**sizes)
    content = plain_config(arguments_of(shape, use_rope_scaling=True), shape, "float32")
    assert stock_config(content, shape, None, windows, "--stock")["architectures"] == [name]


def test_transformers_without_the_architecture_or_with_another(monkeypatch):
    import transformers

    shape = shape_of(qk_norm=True, experts=experts())
    content = plain_config(arguments_of(shape), shape, "float32")
    reads_less = dict(transformers.CONFIG_MAPPING.items()) | dict(qwen3_moe=transformers.MixtralConfig)
    monkeypatch.setattr(transformers, "CONFIG_MAPPING", reads_less)
    with pytest.raises(ValueError, match=r"reads moe_intermediate_size=None from the qwen3_moe .*leave --stock out"):
        stock_config(content, shape, None, (None,) * 4, "--stock")
    monkeypatch.setattr(transformers, "CONFIG_MAPPING", {})
    with pytest.raises(ValueError, match=r"has no mellum; expected a release with it, e\.g\. 5\.24; upgrade it"):
        stock_config(content, shape, None, (5, None, 5, 5), "--stock")
