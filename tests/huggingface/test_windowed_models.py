"""Released families with sliding windows: the op computes what transformers' own attention code computes (masks,
outputs and gradients, at lengths beyond the window, in fp32), and the presets in configs/ are their layers.

B batch, H query heads, G KV heads, T tokens, D head dim.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MinistralConfig,
    MistralConfig,
    Olmo3Config,
    Qwen3Config,
)
from transformers.masking_utils import eager_mask, sliding_window_causal_mask_function

from s2_megatron.config.load import load_config
from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.config.stored import stored_sparsity
from s2_megatron.huggingface.attention import register_attention
from s2_megatron.ops.api import s2_attention
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from s2_megatron.testing.oracle import token_mask

ROOT = Path(__file__).resolve().parents[2]
WINDOW, LENGTH, HEADS, KV_HEADS = 37, 150, 4, 2
SLIDING, FULL = "sliding_attention", "full_attention"
LAYERS = [SLIDING, SLIDING, FULL, SLIDING]
TINY = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=len(LAYERS), num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=8, sliding_window=WINDOW, initializer_range=0.3, pad_token_id=0,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
FAMILIES = {
    "gemma3": (Gemma3TextConfig, dict(layer_types=LAYERS, query_pre_attn_scalar=11)),
    "olmo3": (Olmo3Config, dict(layer_types=LAYERS)),
    "qwen3": (Qwen3Config, dict(layer_types=LAYERS, use_sliding_window=True)),
    "ministral": (MinistralConfig, dict(layer_types=LAYERS)),
    "cohere2": (Cohere2Config, dict(layer_types=LAYERS)),  # whose full layers have no positions
    "mistral": (MistralConfig, {}),  # a window in every layer
}


def pattern_of(window: int | None, heads: int = HEADS, kv_heads: int = KV_HEADS) -> RangePattern:
    if window is None:
        return RangePattern.dense(16, heads, kv_heads)
    return make_range_pattern(block_size=16, num_heads=heads, num_kv_heads=kv_heads, ranges=(), window=window)


def model_of(name: str, implementation: str, **more):
    kind, settings = FAMILIES[name]
    config = kind(**TINY | settings | more)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def by_the_op(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    pattern = pattern_of(sliding_window)
    out = s2_attention(query, key, value, pattern, softmax_scale=scaling, tensor_format="bhsd")
    return out.transpose(1, 2).contiguous(), None


compared: list[int | None] = []  # windows of the layers that `beside_the_op` has seen


def beside_the_op(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """The eager attention of the module's own file; and that mask, output and gradients are the op's."""
    visible = attention_mask[:, 0] == 0
    assert torch.equal(visible, token_mask(pattern_of(sliding_window), LENGTH)[:1].expand_as(visible))
    eager = sys.modules[type(module).__module__].eager_attention_forward
    found = []
    grad = torch.randn(len(query), LENGTH, HEADS, query.shape[-1], generator=torch.Generator().manual_seed(1))
    for attention in (eager, by_the_op):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
        out, _ = attention(module, *inputs, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs)
        found.append([out, *torch.autograd.grad(out, inputs, grad)])
    for theirs, ours in zip(*found, strict=True):
        assert (theirs - ours).abs().max() <= 1e-5 * max(1, theirs.abs().max())
    compared.append(sliding_window)
    return eager(module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs)


@pytest.fixture(autouse=True, scope="module")
def registered():
    register_attention()
    AttentionInterface.register("by_the_op", by_the_op)
    AttentionInterface.register("beside_the_op", beside_the_op)
    AttentionMaskInterface.register("beside_the_op", eager_mask)


TOKENS = torch.randint(1, 97, (2, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_given_the_same_queries_keys_and_values(name):
    """In every layer of the model: the mask that transformers makes, out, dq, dk and dv."""
    compared.clear()
    model_of(name, "beside_the_op").eval()(TOKENS, use_cache=False)
    layers = [SLIDING] * len(LAYERS) if name == "mistral" else LAYERS
    assert compared == [WINDOW if kind == SLIDING else None for kind in layers]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_model_at_the_same_weights(name):
    """Logits, and the gradients of all weights."""
    results = []
    for implementation in ("eager", "by_the_op"):
        model = model_of(name, implementation).eval()
        logits = model(TOKENS, use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
        results.append([logits, *(weight.grad for weight in model.parameters())])
    for theirs, ours in zip(*results, strict=True):
        assert (theirs - ours).abs().max() <= 1e-5 * max(1, theirs.abs().max())


@pytest.mark.parametrize("window", [128, 512, 1024, 4096])
def test_released_windows_to_the_token(window):
    """transformers' mask function and the pattern, in rows around the window's length."""
    length = window + 200
    rows, keys = torch.tensor([0, 1, window - 2, window - 1, window, window + 1, length - 1]), torch.arange(length)
    theirs = sliding_window_causal_mask_function(window)(0, 0, rows[:, None], keys)
    assert torch.equal(theirs, token_mask(pattern_of(window, 1, 1), length)[0, rows])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("length", [WINDOW - 20, LENGTH])
def test_the_attention_s2_refuses_a_stock_model_with_windows(name, length):
    """Also where the window holds every token yet."""
    window = pattern_of(WINDOW)
    layers = tuple(LayerSparsity("S", window) for _ in LAYERS)
    sparsity = ResolvedSparsity(layers, (), None, 16, HEADS, KV_HEADS, LENGTH)
    model = model_of(name, "s2", s2_sparsity=stored_sparsity(sparsity))
    with pytest.raises(ValueError, match=r"not the plain causal one.*a sliding window"):
        model(TOKENS[:, :length], use_cache=False)


# (config, the window where the class's default is that of the released models)
PRESETS = {
    "gemma3": (Gemma3TextConfig(num_hidden_layers=48), None),
    "olmo3": (Olmo3Config(), 4096),
    "gpt_oss": (GptOssConfig(num_hidden_layers=24), 128),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_layers_of_its_family(name):
    config, window = PRESETS[name]
    sparsity = load_config(ROOT / "configs" / f"{name}.yaml").resolve(
        num_layers=config.num_hidden_layers, num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads, seq_length=8192,
    )  # fmt: skip
    assert [SLIDING if layer.pattern is not None else FULL for layer in sparsity.layers] == config.layer_types
    windows = {head.window for layer in sparsity.layers if layer.pattern is not None for head in layer.pattern.heads}
    assert windows == {config.sliding_window if window is not None else 1024}
    assert window in (None, config.sliding_window)


def test_what_the_presets_say_they_do_not_cover():
    """The other settings of these families, as transformers has them."""
    texts = {name: " ".join((ROOT / f"configs/{name}.yaml").read_text().replace("#", "").split()) for name in PRESETS}
    gemma = Gemma3TextConfig()
    bases = (gemma.rope_parameters[kind]["rope_theta"] for kind in (SLIDING, FULL))
    assert "RoPE base, {:,.0f} in window layers and {:,.0f} in dense ones".format(*bases) in texts["gemma3"]
    assert gemma.attn_logit_softcapping is None and "caps no scores" in texts["gemma3"]
    layer = model_of("gemma3", "eager").model.layers[0]
    assert layer.self_attn.q_norm.weight.shape == (8,) and "--qk-layernorm" in texts["gemma3"]
    assert layer.post_feedforward_layernorm is not None and "norms behind attention and MLP" in texts["gemma3"]
    layer = model_of("olmo3", "eager").model.layers[0]
    assert layer.self_attn.q_norm.weight.shape == (HEADS * 8,) and "over all heads" in texts["olmo3"]
    assert not hasattr(layer, "input_layernorm") and "norms behind attention and MLP" in texts["olmo3"]
