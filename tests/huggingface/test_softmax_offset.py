"""Softmax offsets (sinks) in transformers: gpt-oss's own attention, the model that export-hf writes, and its cache."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, eager_attention_forward

from s2_megatron.config.stored import stored_sparsity
from s2_megatron.huggingface import CACHE_ARGUMENT, S2Cache
from s2_megatron.huggingface.attention import attend
from s2_megatron.patterns.ranges import RangePattern, make_range_pattern
from tests.huggingface.test_cache import qkv
from tests.huggingface.tiny import (
    BLOCK,
    HEADS,
    KV_HEADS,
    NAMES,
    SHIPPED,
    config_of,
    model_of,
    sparsity_named,
    tokens,
)
from tests.tiers import mostly_slow

OFFSET = torch.tensor([-2.0, 0.0, 1.0, 5.0], dtype=torch.float64)
TYPES = ("off-by-one", "learnable")


def test_gpt_oss_attention():
    """transformers' eager attention of gpt-oss at the same q, k, v and sinks, windows of 37 tokens and without."""
    for window in (37, None):
        leaves = [tensor.float().requires_grad_() for tensor in qkv(2, 130)]
        leaves.append(OFFSET.float().requires_grad_())
        distance = torch.arange(130)[:, None] - torch.arange(130)
        seen = (distance >= 0) & (distance < (window or 130))
        module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, sinks=leaves[3], training=False)
        mask = torch.zeros(130, 130).masked_fill(~seen, float("-inf"))[None, None]
        expected = eager_attention_forward(module, *leaves[:3], mask, scaling=0.3)[0].transpose(1, 2)
        shape = dict(block_size=64, num_heads=HEADS, num_kv_heads=KV_HEADS)
        pattern = RangePattern.dense(64, HEADS, KV_HEADS)
        if window is not None:
            pattern = make_range_pattern(**shape, ranges=(), window=window)
        out = attend(*leaves[:3], pattern, 0.3, leaves[3])
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        for one, two in zip(
            (out, *torch.autograd.grad(out, leaves, weights)),
            (expected, *torch.autograd.grad(expected, leaves, weights)),
            strict=True,
        ):
            assert (one - two).abs().max() <= 1e-5 * two.abs().max()


def test_a_stock_module_hands_its_sinks_over():
    """transformers' own attention module of gpt-oss, with the attention `s2` and with eager; its sinks train."""
    settings = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=16,
        layer_types=["full_attention"] * 2,
    )  # fmt: skip
    stored, text, found = stored_sparsity(sparsity_named("dense")), torch.linspace(-1, 1, 2 * 70 * 64), []
    torch.manual_seed(0)
    weights = None
    for implementation in ("eager", "s2"):
        config = GptOssConfig(**settings, s2_sparsity=stored)
        config._attn_implementation = implementation
        module = GptOssAttention(config, 1)
        weights = weights or {name: 0.2 * torch.randn_like(tensor) for name, tensor in module.state_dict().items()}
        module.load_state_dict(weights)
        mask = torch.full((70, 70), float("-inf")).triu(1)[None, None] if implementation == "eager" else None
        out, _ = module(text.view(2, 70, 64).sin(), (torch.ones(2, 70, 8), torch.zeros(2, 70, 8)), mask)
        out.square().sum().backward()
        found.append((out.detach(), module.sinks.grad, module.q_proj.weight.grad))
    for one, two in zip(*found, strict=True):
        assert (one - two).abs().max() <= 1e-5 * one.abs().max()


def model_with(softmax_type, name="s2", **more):
    model = model_of(sparsity_named(name), softmax_type=softmax_type, **more)
    if softmax_type == "learnable":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.copy_(OFFSET)
    return model


@pytest.mark.parametrize("softmax_type", TYPES)
def test_the_model_has_the_offset_in_every_layer(softmax_type):
    """Dense layers, too. A learned offset that is far below every score is none."""
    model, text = model_with(softmax_type), tokens(2, 150)
    names = [name for name in model.state_dict() if name.endswith("sinks")]
    assert len(names) == (2 if softmax_type == "learnable" else 0)
    plain = model_of(sparsity_named("s2"))
    plain.load_state_dict(model.state_dict(), strict=softmax_type != "learnable")
    out = model(text, labels=text)
    assert (out.logits - plain(text).logits).abs().max() > 1e-2
    if softmax_type == "off-by-one":
        zeros = model_of(sparsity_named("s2"), softmax_type="learnable")
        zeros.load_state_dict(plain.state_dict() | {f"model.layers.{i}.self_attn.sinks": OFFSET * 0 for i in range(2)})
        assert torch.equal(zeros(text).logits, out.logits)
        return
    out.loss.backward()
    for layer in model.model.layers:
        assert layer.self_attn.sinks.grad.abs().min() > 0
        with torch.no_grad():
            layer.self_attn.sinks.fill_(-1e4)
    assert torch.allclose(model(text).logits, plain(text).logits, atol=1e-5)


def test_new_models_have_small_offsets():
    torch.manual_seed(0)
    sinks = model_of(sparsity_named("s2"), softmax_type="learnable").model.layers[0].self_attn.sinks
    assert sinks.isfinite().all() and 0 < sinks.abs().max() < 1  # normal, initializer_range is 0.2


@pytest.mark.parametrize("name", mostly_slow(NAMES, "s2", "tokens_by_head", "mask_heads", "mixed"))
def test_every_step_equals_the_full_attention(name):
    """Prefill in pieces, rows of unequal length, decoding; a cache that grows."""
    sparsity = sparsity_named(name)
    pieces, starts = [70, 5, *[1] * 90, 20, *[1] * 10], torch.tensor([0, 21])
    parts = qkv(2, sum(pieces))
    for layer in (0, 1):
        cache = S2Cache(config_of(sparsity, softmax_type="learnable"))
        cache.layers = [cache.layers[layer]]
        pattern, out, first = cache.layers[0].pattern, [], 0
        for count in pieces:
            piece = (part[:, :, first : first + count] for part in parts)
            out.append(cache.attend(0, *piece, starts, 0.3, pattern, OFFSET))
            first += count
        whole = pattern or RangePattern.dense(BLOCK, HEADS, KV_HEADS)
        for row, start in enumerate(starts.tolist()):
            expected = attend(*(part[row : row + 1, :, start:] for part in parts), whole, 0.3, OFFSET)
            assert (torch.cat(out, 2)[row : row + 1, :, start:] - expected).abs().max() < 1e-13


@pytest.mark.parametrize("softmax_type", TYPES)
def test_generation_with_both_caches(softmax_type):
    model, text = model_with(softmax_type).double(), tokens(3, 60)
    mask = torch.ones_like(text)
    mask[1, :13] = 0
    options = dict(attention_mask=mask, max_new_tokens=50, do_sample=False, output_logits=True)
    options |= dict(return_dict_in_generate=True)
    one, two = (
        model.generate(text, **options, **{CACHE_ARGUMENT: cache})
        for cache in (S2Cache(model.config), DynamicCache(config=model.config))
    )
    assert torch.equal(one.sequences, two.sequences)
    assert torch.allclose(torch.stack(one.logits), torch.stack(two.logits), atol=1e-8)


def test_refused():
    with pytest.raises(ValueError, match="softmax_type='sink'; expected one of vanilla, off-by-one, learnable"):
        config_of(sparsity_named("s2"), softmax_type="sink")
    cache = S2Cache(config_of(sparsity_named("s2")))
    with pytest.raises(ValueError, match="made for another softmax_type"):
        cache.attend(0, *qkv(1, 8), None, 0.3, cache.layers[0].pattern, OFFSET)


def test_the_preset_of_gpt_oss_names_the_flag():
    assert "--softmax-type learnable" in SHIPPED["gpt_oss"].read_text()
