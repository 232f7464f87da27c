"""The model in transformers: which attention it computes, with which gradients, and what it refuses."""

import subprocess
import sys

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from s2_megatron.config.sparsity import LayerSparsity, ResolvedSparsity
from s2_megatron.config.stored import sparsity_from_stored, stored_sparsity
from s2_megatron.huggingface import S2GPTConfig, S2GPTForCausalLM
from s2_megatron.patterns.ranges import make_range_pattern
from tests.huggingface.tiny import BLOCK, HEADS, KV_HEADS, NAMES, config_of, model_of, sparsity_named, tokens

SHAPE = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, initializer_range=0.2, attn_implementation="eager", pad_token_id=0,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip


NO_ATTENTION = {key: value for key, value in SHAPE.items() if key != "attn_implementation"}


def masked_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Plain softmax under a mask made token by token from the patterns; the sparsity is in `masked_attention.of`."""
    pattern = masked_attention.of.layers[module.layer_idx].pattern
    length, heads = query.shape[2], query.shape[1]
    mask = torch.zeros(heads, length, length, dtype=torch.bool)
    place = torch.arange(length)
    blocks, distance = place // BLOCK, place[:, None] // BLOCK - place[None, :] // BLOCK
    for head in range(heads):
        rule = None if pattern is None or not hasattr(pattern, "heads") else pattern.heads[head]
        if rule is not None and rule.by_token:
            mask[head] = (place[:, None] - place[None, :] < (rule.window or 0)) | (place < rule.sink_tokens)[None, :]
            start = 0
            for end, stride in rule.ranges:
                inside = (distance >= start) & (distance < (length if end is None else end))
                mask[head] |= inside & ((blocks + rule.offset) % stride == 0)[None, :]
                start = end
            continue
        for block in range(-(-length // BLOCK)):
            keys = range(block + 1) if pattern is None else pattern.key_blocks(head, block)
            for other in keys:
                mask[head, block * BLOCK : (block + 1) * BLOCK, other * BLOCK : (other + 1) * BLOCK] = True
    mask &= torch.ones(length, length, dtype=torch.bool).tril()
    repeats = heads // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), None


@pytest.fixture
def oracle():
    """A stock Llama of the same shape whose attention is the oracle above."""
    AttentionInterface.register("masked_oracle", masked_attention)

    def build(model, sparsity):
        masked_attention.of = sparsity
        llama = LlamaForCausalLM(LlamaConfig(**SHAPE | dict(attn_implementation="masked_oracle")))
        llama.load_state_dict(model.state_dict())
        return llama

    return build


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_equal_a_llama_with_the_patterns_as_masks(name, oracle):
    sparsity = sparsity_named(name)
    model = model_of(sparsity)
    expected = oracle(model, sparsity)
    text = tokens(2, 150)
    results = []
    for one in (model.train(), expected.train()):
        output = one(text, labels=text, use_cache=False)
        output.loss.backward()
        results.append((output.logits.detach(), {key: value.grad for key, value in one.named_parameters()}))
    (logits, grads), (logits_expected, grads_expected) = results
    assert (logits - logits_expected).abs().max() < 1e-5 * logits_expected.abs().max()
    assert grads.keys() == grads_expected.keys()
    for key, grad in grads.items():
        assert (grad - grads_expected[key]).abs().max() <= 1e-4 * grads_expected[key].abs().max(), key
    masked_attention.of = sparsity_named("dense" if name != "dense" else "s2")
    assert (expected(text).logits - logits_expected).abs().max() > 1e-2  # the patterns matter here


def test_every_layer_has_its_own_pattern():
    """Layers whose offsets differ: swapping two of them changes the logits."""
    patterns = [
        make_range_pattern(
            block_size=BLOCK, num_heads=HEADS, num_kv_heads=KV_HEADS, ranges=((1, 1), (None, 4)), base_offset=base
        )
        for base in (0, 1)
    ]
    sparsity, swapped = (
        ResolvedSparsity(tuple(LayerSparsity("S", p) for p in order), (), None, BLOCK, HEADS, KV_HEADS, 256)
        for order in (patterns, patterns[::-1])
    )
    model, other = model_of(sparsity), model_of(swapped)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (model(tokens(1, 150)).logits - other(tokens(1, 150)).logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    "config, family, more",
    [
        (Qwen2Config, Qwen2ForCausalLM, dict(qkv_bias=True)),
        (Qwen3Config, Qwen3ForCausalLM, dict(qk_norm=True)),
        (LlamaConfig, LlamaForCausalLM, dict(tie_word_embeddings=True)),
    ],
)
def test_weights_are_named_as_llamas_and_qwens(config, family, more):
    tied = more.get("tie_word_embeddings", False)
    stock = family(config(**SHAPE, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and norms start as 0 and 1
    model = model_of(sparsity_named("dense"), rms_norm_eps=stock.config.rms_norm_eps, **more)
    model.load_state_dict(stock.state_dict())
    with torch.no_grad():
        assert torch.allclose(model(tokens(2, 70)).logits, stock(tokens(2, 70)).logits, atol=2e-5)


def test_experts_are_made_and_trained():
    """In every layer but mlp_only_layers, each with gradients; transformers' other way to compute them agrees."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[0])
    model = model_of(sparsity_named("tokens"), **experts).train()
    named = {name: weight for name, weight in model.named_parameters() if name.startswith("model.layers.1.mlp.")}
    assert [hasattr(layer.mlp, "experts") for layer in model.model.layers] == [False, True]
    assert len(named) == 3 and all(0.17 < weight.std() < 0.23 for weight in named.values())
    text, grads = tokens(2, 150), []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        output = model(text, labels=text, use_cache=False)
        output.loss.backward()
        grads.append({name: weight.grad.clone() for name, weight in named.items()})
    assert all(grad.abs().max() > 0 for grad in grads[0].values())
    assert all(torch.allclose(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-7) for name in named)
    assert model.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation("eager")
    assert model.config._experts_implementation == "eager"
    assert torch.allclose(model(text, use_cache=False).logits, output.logits, atol=2e-5)


def test_left_padding_equals_each_row_alone_and_trains():
    model = model_of(sparsity_named("s2"))
    text, mask = tokens(3, 120), torch.ones(3, 120, dtype=torch.long)
    mask[1, :31] = 0
    mask[2, :] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(text, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert torch.allclose(logits[1, 31:], model(text[1:2, 31:], use_cache=False).logits[0], atol=2e-5)
    assert torch.allclose(logits[0], model(text[:1], use_cache=False).logits[0], atol=2e-5)
    assert logits.isfinite().all()
    grads = []
    for inputs, its_mask in ((text[1:2], mask[1:2]), (text[1:2, 31:], None)):
        model.zero_grad()
        model(inputs, attention_mask=its_mask, use_cache=False).logits[:, -50:].square().mean().backward()
        grads.append(model.model.layers[1].self_attn.k_proj.weight.grad.clone())
    assert torch.allclose(*grads, rtol=1e-4, atol=1e-6)


def test_right_padding_changes_nothing_before_it():
    model = model_of(sparsity_named("s2"))
    text, mask = tokens(2, 100), torch.ones(2, 100, dtype=torch.long)
    mask[1, 60:] = 0
    logits = model(text, attention_mask=mask, use_cache=False).logits
    assert torch.allclose(logits[1, :60], model(text[1:, :60], use_cache=False).logits[0], atol=2e-5)


def test_autocast_trains_and_generates_in_16_bits():
    model, text = model_of(sparsity_named("s2")).float(), tokens(2, 60)
    exact = model(text, labels=text)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(text, labels=text)
        model.generate(text, max_new_tokens=3, do_sample=False)
    assert abs(found.loss - exact.loss) < 2e-2 and (found.logits - exact.logits).abs().max() > 0
    found.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_gradient_checkpointing_gives_the_same_gradients():
    model = model_of(sparsity_named("s2")).train()
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(tokens(2, 100), labels=tokens(2, 100)).loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*grads))


def test_the_softmax_scale_of_the_sparsity_is_that_of_every_layer(oracle):
    base = sparsity_named("s2")
    sparsity = ResolvedSparsity(base.layers, (), 0.03, BLOCK, HEADS, KV_HEADS, 256)
    model = model_of(sparsity)
    llama = oracle(model, sparsity)
    for layer in llama.model.layers:
        layer.self_attn.scaling = 0.03
    with torch.no_grad():
        assert torch.allclose(model(tokens(1, 100)).logits, llama(tokens(1, 100)).logits, atol=2e-5)


def test_a_stock_model_with_the_sparsity_in_its_config_runs_it_too(oracle):
    sparsity = sparsity_named("s2")
    model = model_of(sparsity)
    config = LlamaConfig(**SHAPE | dict(attn_implementation="s2"), s2_sparsity=stored_sparsity(sparsity))
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(model.state_dict())
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[0, :20] = 0
    with torch.no_grad():
        ours, stock = (one(tokens(2, 100), attention_mask=mask).logits for one in (model, llama))
    assert torch.allclose(ours[1], stock[1], atol=2e-5) and torch.allclose(ours[0, 20:], stock[0, 20:], atol=2e-5)


def test_a_stock_model_without_sparsity_is_refused():
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE | dict(attn_implementation="s2")))
    with pytest.raises(ValueError, match="has no s2_sparsity"):
        llama(tokens(1, 20))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_keeps_everything(name, tmp_path):
    model = model_of(sparsity_named(name))
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).sparsity.canonical_json() == sparsity_named(name).canonical_json()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="s2")
    assert isinstance(again, S2GPTForCausalLM)
    with torch.no_grad():
        assert torch.equal(again(tokens(1, 100)).logits, model(tokens(1, 100)).logits)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2", "flex_attention", "kernels-x/y"])
def test_no_other_attention_runs_the_model(implementation, tmp_path):
    model = model_of(sparsity_named("s2"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="which only attn_implementation='s2' computes"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
    with pytest.raises(ValueError, match="which only attn_implementation='s2' computes"):
        model.set_attn_implementation(implementation)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "s2"


def test_masks_that_are_not_plain_are_refused():
    model = model_of(sparsity_named("s2"))
    text = tokens(2, 40)
    hole = torch.ones(2, 40, dtype=torch.long)
    hole[1, 7] = 0
    with pytest.raises(ValueError, match="a hole in row 1"):
        model(text, attention_mask=hole)
    with pytest.raises(ValueError, match="a mask per pair of tokens"):
        model(text, attention_mask=torch.ones(2, 1, 40, 40, dtype=torch.bool))
    with pytest.raises(ValueError, match="dropout"):
        model_of(sparsity_named("s2"), attention_dropout=0.1).train()(text)


def test_configs_that_do_not_fit_are_refused():
    stored = stored_sparsity(sparsity_named("s2"))
    with pytest.raises(ValueError, match="2 layers, 4 query and 2 KV heads; the config has 3"):
        S2GPTConfig(**NO_ATTENTION | dict(num_hidden_layers=3), s2_sparsity=stored)
    with pytest.raises(ValueError, match="has no s2_sparsity"):
        S2GPTForCausalLM(S2GPTConfig(**NO_ATTENTION))


@pytest.mark.parametrize("name", NAMES)
def test_stored_sparsity_is_complete(name):
    sparsity = sparsity_named(name)
    again = sparsity_from_stored(stored_sparsity(sparsity))
    assert again.canonical_json() == sparsity.canonical_json()
    assert again.attended_pairs() == sparsity.attended_pairs()
    assert (again.seq_length, again.block_size) == (sparsity.seq_length, sparsity.block_size)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda stored: stored.update(format=9), "format 9"),
        (lambda stored: stored.pop("patterns"), "incomplete"),
        (lambda stored: stored["layers"].append(7), "a layer of the stored sparsity=7; expected 0 to 1"),
        (lambda stored: stored["layers"].append(-1), "=-1; expected 0 to 1"),
        (lambda stored: stored["layers"].clear(), "stored sparsity has no layers; expected one or more"),
        (lambda stored: stored.update(seq_length="dense"), "seq_length of the stored sparsity='dense'"),
        (lambda stored: stored["patterns"][1].update(kind="other"), "kind 'other'"),
        (lambda stored: stored["patterns"][1]["sha256"].reverse(), "hash"),
        (lambda stored: stored["patterns"][1]["tables"][0].update(counts="x"), "cannot be unpacked"),
    ],
)
def test_stored_sparsity_that_is_damaged_is_refused(change, message):
    stored = stored_sparsity(sparsity_named("mask_heads"))
    change(stored)
    with pytest.raises(ValueError, match=message):
        sparsity_from_stored(stored)


def test_without_transformers_one_line_says_how_to_get_it():
    code = "import sys; sys.modules['transformers'] = None; import s2_megatron.huggingface"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.strip().splitlines()[-1].endswith("pip install 's2-megatron[hf]'")


def test_importing_the_rest_needs_no_transformers():
    code = "import sys; sys.modules['transformers'] = None; import s2_megatron, s2_megatron.config.stored"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="4 query and 2 KV heads; the config has 2, 8 and 2"):
        config_of(sparsity_named("s2"), num_attention_heads=8)
    with pytest.raises(ValueError, match="is not a multiple of num_key_value_heads"):
        S2GPTConfig(**NO_ATTENTION | dict(num_attention_heads=5))
