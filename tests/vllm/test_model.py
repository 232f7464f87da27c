"""The model's attention around stand-ins of vLLM's parts: head by head what the model in transformers computes, on any
number of ranks; its registration. vLLM itself: tests/engines."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is an optional extra: pip install 's2-megatron[hf]'")

from s2_megatron import vllm as plugin
from s2_megatron.config.load import SparsityConfig
from tests.huggingface.tiny import model_of
from tests.vllm import stand_in

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, TOKENS = 8, 4, 60
# Neighbours or not, one size or another.
WINDOWS = {
    "one by one": dict(window=[7, 7, 7, 9], dense_heads=[1]),
    "in pairs": dict(window=7, dense_heads=[0, 3]),
    "alike": dict(window=7),
}
# name: what the config has besides
KINDS = {
    "plain": {},
    "norms": dict(qk_norm=True),
    "bias, learnable": dict(qkv_bias=True, softmax_type="learnable"),
    "off-by-one": dict(softmax_type="off-by-one"),
}


@pytest.fixture
def standing(monkeypatch):
    """(the stand-in's records, the module made with it)."""
    records = stand_in.install(monkeypatch)
    yield records, importlib.import_module("s2_megatron.vllm.model")
    sys.modules.pop("s2_megatron.vllm.model")


def model(spec, scale=None, **config):
    data = dict(block_size=16, layers="SD", specs=dict(S=spec)) | ({} if scale is None else dict(softmax_scale=scale))
    sparsity = SparsityConfig.from_data(data).resolve(
        num_layers=2, num_heads=HEADS, num_kv_heads=KV_HEADS, seq_length=1024
    )
    made = model_of(sparsity, **config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(("norm.weight", "bias", "sinks")):
                weight.add_(0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    return made


def attention_of_rank(module, theirs, layer: int):
    config = theirs.config
    own = module.S2GPTAttention(
        config=config, hidden_size=64, num_heads=HEADS, num_kv_heads=KV_HEADS, max_position_embeddings=128,
        quant_config=None, bias=config.qkv_bias, bias_o_proj=False, cache_config=None,
        prefix=f"model.layers.{layer}.self_attn", attn_type="decoder",
    )  # fmt: skip
    own.qkv_proj.load([theirs.q_proj, theirs.k_proj, theirs.v_proj])
    own.o_proj.load(theirs.o_proj)
    for name in ("q_norm", "k_norm"):
        if config.qk_norm:
            getattr(own, name).load_state_dict(getattr(theirs, name).state_dict())
    if config.softmax_type == "learnable":
        own.sinks.weight_loader(own.sinks, theirs.sinks.data)
    return own


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("windows, kind, scale", [
    ("one by one", "norms", None), ("in pairs", "bias, learnable", 0.4), ("in pairs", "plain", None),
    ("alike", "off-by-one", None), ("one by one", "bias, learnable", None),
])  # fmt: skip
def test_every_head_meets_its_own_keys(standing, monkeypatch, windows, kind, scale, ranks):
    _, module = standing
    whole = model(WINDOWS[windows], scale, **KINDS[kind])
    hidden = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(TOKENS)
    for layer in (0, 1):
        theirs = whole.model.layers[layer].self_attn
        angles = whole.model.rotary_emb(hidden[None], positions[None])
        parts = []
        monkeypatch.setattr(stand_in.Ranks, "size", ranks)
        with torch.no_grad():
            expected = theirs(hidden[None], angles)[0][0]
            for rank in range(ranks):
                monkeypatch.setattr(stand_in.Ranks, "rank", rank)
                monkeypatch.setattr(stand_in.Attention, "made", {})
                parts.append(attention_of_rank(module, theirs, layer)(positions, hidden))
                (shape,) = {attention.shape for attention in stand_in.Attention.made.values()}
        assert (sum(parts) - expected).abs().max() <= 1e-5 * expected.abs().max()
        sizes = {"one by one": (1, 1, 1, 1), "in pairs": (2, 1, 1, 1), "alike": (4, 2, 1, 1)}
        assert shape[1] == sizes[windows][ranks.bit_length() - 1]  # KV heads of an attention


def test_ranks_name_their_attentions_by_the_models_heads(standing, monkeypatch):
    """vLLM joins the caches of all ranks by name: one name must not stand for two windows."""
    _, module = standing
    theirs = model(WINDOWS["one by one"]).model.layers[0].self_attn
    monkeypatch.setattr(stand_in.Ranks, "size", 2)
    found = {}
    for rank in range(2):
        monkeypatch.setattr(stand_in.Ranks, "rank", rank)
        monkeypatch.setattr(stand_in.Attention, "made", {})
        attention_of_rank(module, theirs, 0)
        found |= {name.rpartition(".")[2]: one.window for name, one in stand_in.Attention.made.items()}
    assert found == {"kv_head_0": 7, "kv_head_1": None, "kv_head_2": 7, "kv_head_3": 9}


def test_a_backend_that_counts_the_models_heads_is_refused(standing, monkeypatch):
    """Where a layer is split; a layer of one attention has the model's number."""
    _, module = standing
    monkeypatch.setattr(stand_in.Attention, "attn_backend", SimpleNamespace(get_name=lambda: "FLEX_ATTENTION"))
    attention_of_rank(module, model(WINDOWS["alike"]).model.layers[0].self_attn, 0)
    monkeypatch.setattr(stand_in.Attention, "made", {})
    with pytest.raises(ValueError, match=r"^vLLM: the attention backend FLEX_ATTENTION for a layer .* one of CPU_ATTN"):
        attention_of_rank(module, model(WINDOWS["in pairs"]).model.layers[0].self_attn, 0)


def made_in_vllm(module, softmax_type="vanilla", one_cache=False, experts=None, **spec):
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=model(spec, softmax_type=softmax_type, **experts or {}).config),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=one_cache),
    )
    return module.S2GPTForCausalLM(vllm_config=config)


def test_a_plan_is_refused_before_weights_are_made(standing):
    records, module = standing
    made_in_vllm(module, window=7)
    with pytest.raises(ValueError, match=r"^vLLM: layer 0, head 0 has stride 4; expected heads that are dense"):
        made_in_vllm(module, local_blocks=2, stride=4)
    assert not records.warnings


@pytest.mark.parametrize("spec", [dict(window=7), dict(window=7, sink_tokens=4)], ids=str)
def test_experts_are_refused_before_weights_are_made(standing, spec):
    """Whatever the plan: the layers of the plugin have dense MLPs."""
    _, module = standing
    experts = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48)
    with pytest.raises(ValueError, match=r"^vLLM: a model of type s2_gpt with num_experts=6; expected one without "):
        made_in_vllm(module, experts=experts, **spec)


@pytest.mark.parametrize("softmax_type", ["learnable", "off-by-one"])
def test_softmax_offsets_want_a_cache_for_each_window(standing, softmax_type):
    """vLLM's CPU backend computes noise with one cache for all; without offsets it does not."""
    _, module = standing
    made_in_vllm(module, one_cache=True, window=7)
    made_in_vllm(module, softmax_type, window=7)
    with pytest.raises(ValueError, match=r"^vLLM: disable_hybrid_kv_cache_manager=True .*; leave --disable-hybrid"):
        made_in_vllm(module, softmax_type, one_cache=True, window=7)


def test_another_release_is_told_of(standing, monkeypatch):
    records, module = standing
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.33.1")
    made_in_vllm(module, window=7)
    assert len(records.warnings) == 1 and records.warnings[0].startswith("vLLM 0.33.1: models of type s2_gpt were")


def test_the_registration(standing, monkeypatch, caplog):
    """By the names in setup.py and in config.json, as often as vLLM calls it; no obstacle to vLLM's other models."""
    records, module = standing
    entry = re.search(r'"vllm\.general_plugins": \["s2_gpt = ([\w.]+):(\w+)"\]', (ROOT / "setup.py").read_text())
    assert getattr(importlib.import_module(entry[1]), entry[2]) is plugin.register
    plugin.register()
    plugin.register()
    ((architecture, place),) = records.registry.models.items()
    assert architecture == model(WINDOWS["alike"]).__class__.__name__
    name, _, kind = place.partition(":")
    assert getattr(importlib.import_module(name), kind) is module.S2GPTForCausalLM
    monkeypatch.setitem(sys.modules, "s2_megatron.huggingface", None)  # its import raises ImportError
    records.registry.models.clear()
    plugin.register()
    assert not records.registry.models and "models of type s2_gpt are unknown here" in caplog.text


def test_neither_megatron_nor_kernels_are_imported():
    """vLLM's environment need not have Megatron, and every process of vLLM's imports this."""
    code = (
        "import sys, transformers; before = set(sys.modules)\n"
        "import s2_megatron.huggingface, s2_megatron.vllm.head_groups\n"
        "new = set(sys.modules) - before\n"
        "ours = [name for name in new if name.startswith('s2_megatron.kernels.')]\n"
        "print(ours, 'megatron' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert ran.stdout.strip() == "['s2_megatron.kernels.step_descriptor'] False", ran.stdout + ran.stderr
