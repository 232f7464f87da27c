"""S2Cache against the computation with everything: step by step, in chunks, with padding, with beams."""

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from s2_megatron.config.load import load_config
from s2_megatron.huggingface import CACHE_ARGUMENT, S2Cache
from s2_megatron.huggingface.attention import attend, attend_rows
from tests.huggingface.tiny import (
    BLOCK,
    HEADS,
    KV_HEADS,
    NAMES,
    SHIPPED,
    VOCABULARY,
    config_of,
    model_of,
    sparsity_named,
    tokens,
)
from tests.tiers import mostly_slow

WINDOW, STRIDE = 2 * BLOCK, 4 * BLOCK  # of the pattern s2
GENERATED = 3 * WINDOW + 5 * STRIDE
DIM = 8
FP64 = 1e-13  # sums of a few hundred products of about 1


def qkv(rows, length, heads=HEADS, kv_heads=KV_HEADS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, length, DIM)
    return [
        torch.randn(shape[0], count, *shape[1:], dtype=torch.float64, generator=generator)
        for count in (heads, kv_heads, kv_heads)
    ]


def fed(cache, layer, parts, pieces, starts=None, scale=0.3):
    """The outputs of a layer that is given the tokens in pieces."""
    out, first, pattern = [], 0, cache.layers[layer].pattern
    for count in pieces:
        out.append(cache.attend(layer, *(part[:, :, first : first + count] for part in parts), starts, scale, pattern))
        first += count
    return torch.cat(out, 2)


@pytest.mark.parametrize("max_length", [None, 700])
@pytest.mark.parametrize("name", NAMES)
def test_every_step_equals_the_full_cache(name, max_length):
    if name.startswith("mask") and max_length:
        max_length = 40 * BLOCK
    sparsity = sparsity_named(name)
    prompt = 3 * BLOCK + 5
    parts = qkv(2, prompt + GENERATED)
    for layer in (0, 1):
        cache = S2Cache(config_of(sparsity), max_length=max_length)
        # The cache's layers advance together; here only one is fed.
        cache.layers = [cache.layers[layer]]
        out = fed(cache, 0, parts, [prompt] + [1] * GENERATED)
        expected = attend(*parts, sparsity.layers[layer].pattern, 0.3)
        assert (out - expected).abs().max() < FP64
    if name == "s2":
        assert cache.layers[0].keys[0].shape[2] < GENERATED  # it did drop something


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pieces", [[1] * 50, [7, 64, 1, 1, 100, 3, 1], [16, 16, 16, 160, 1]])
def test_prefill_in_chunks_and_conversations(name, pieces):
    sparsity = sparsity_named(name)
    parts = qkv(2, sum(pieces))
    cache = S2Cache(config_of(sparsity))
    cache.layers = [cache.layers[1]]
    assert (fed(cache, 0, parts, pieces) - attend(*parts, sparsity.layers[1].pattern, 0.3)).abs().max() < FP64


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pieces", [[150] + [1] * 60, [3, 20, 1, 1, 90, 1, 1, 1]])
def test_rows_of_unequal_length(name, pieces):
    """Left padding, in one piece or over several; each row equals that row alone."""
    sparsity = sparsity_named(name)
    pattern = sparsity.layers[1].pattern
    starts = torch.tensor([0, 37, 21, 37])
    parts = qkv(4, sum(pieces))
    cache = S2Cache(config_of(sparsity))
    cache.layers = [cache.layers[1]]
    out = fed(cache, 0, parts, pieces, starts)
    for row, start in enumerate(starts.tolist()):
        expected = attend(*(part[row : row + 1, :, start:] for part in parts), pattern, 0.3)
        assert (out[row : row + 1, :, start:] - expected).abs().max() < FP64


@pytest.mark.parametrize("name", NAMES)
def test_values_with_another_head_dim(name):
    sparsity, pieces, starts = sparsity_named(name), [3, 20, 1, 1, 90, 1, 1], torch.tensor([0, 37])
    pattern = sparsity.layers[1].pattern
    query, key, value = qkv(2, sum(pieces))
    parts = query, key, value[..., :5]
    cache = S2Cache(config_of(sparsity))
    cache.layers = [cache.layers[1]]
    expected = attend_rows(query, key, value, pattern, starts, 0.3)[..., :5]
    for out in (fed(cache, 0, parts, pieces, starts), attend_rows(*parts, pattern, starts, 0.3)):
        assert out.shape == expected.shape
        assert (out - expected)[0].abs().max() < FP64 and (out - expected)[1, :, 37:].abs().max() < FP64


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("starts", [[0, 37], [12, 12]])
@pytest.mark.parametrize("grows", [True, False])
def test_rows_that_begin_later_token_by_token(name, starts, grows):
    """A row is all padding at first: its start is the number of columns so far."""
    sparsity, starts = sparsity_named(name), torch.tensor(starts)
    parts = qkv(2, 120)
    cache = S2Cache(config_of(sparsity), max_length=None if grows else 120 - int(starts.min()))
    cache.layers = [cache.layers[1]]
    out = [
        cache.attend(
            0, *(part[:, :, at : at + 1] for part in parts), starts.clamp(max=at + 1), 0.3, cache.layers[0].pattern
        )
        for at in range(120)
    ]
    for row, start in enumerate(starts.tolist()):
        alone = (part[row : row + 1, :, start:] for part in parts)
        expected = attend(*alone, sparsity.layers[1].pattern, 0.3)
        assert (torch.cat(out, 2)[row : row + 1, :, start:] - expected).abs().max() < FP64


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("mask")])
def test_a_mask_that_is_longer_than_the_text(name):
    sparsity = sparsity_named(name)
    parts = qkv(2, 5 * BLOCK - 3)
    cache = S2Cache(config_of(sparsity), max_length=5 * BLOCK)
    cache.layers = [cache.layers[1]]
    out = fed(cache, 0, parts, [BLOCK] + [1] * (4 * BLOCK - 3))
    assert (out - attend(*parts, sparsity.layers[1].pattern, 0.3)).abs().max() < FP64


def test_padding_takes_no_room_in_a_replayed_step():
    cache = S2Cache(config_of(sparsity_named("s2")), max_length=12)
    cache.layers = [cache.layers[1]]
    fed(cache, 0, qkv(1, 20), [19, 1], torch.tensor([10]))
    cache.count_replay()
    cache.count_replay()
    with pytest.raises(ValueError, match=r"max_length=12\) got 13 tokens"):
        cache.count_replay()


@pytest.mark.parametrize("name", ["s2", "dense_heads", "mask_heads", "query_slide"])
def test_beams_move_with_their_rows(name):
    sparsity = sparsity_named(name)
    pattern = sparsity.layers[1].pattern
    starts = torch.tensor([0, 9, 20])
    parts = qkv(3, 260)
    cache = S2Cache(config_of(sparsity))
    cache.layers = [cache.layers[1]]
    fed(cache, 0, parts, [100, 1, 1], starts)
    order = torch.tensor([2, 2, 0])
    cache.reorder_cache(order)
    after = [torch.cat([part[order, :, :102], part[:, :, 102:]], 2) for part in parts]
    out = fed(cache, 0, [part[:, :, 102:] for part in after], [1] * 158, starts[order])
    for row, start in enumerate(starts[order].tolist()):
        expected = attend(*(part[row : row + 1, :, start:] for part in after), pattern, 0.3)
        assert (out[row : row + 1] - expected[:, :, 102 - start :]).abs().max() < FP64


@pytest.mark.parametrize("name", mostly_slow(["phi3_small", "s2_7b_mixed", "s2_70b_s2"], "s2_7b_mixed"))
def test_shipped_configs_decode(name):
    """The real heads and blocks, past window and stride."""
    sparsity = load_config(SHIPPED[name]).resolve(num_layers=4, num_heads=32, num_kv_heads=8, seq_length=4096)
    layer = next(index for index, layer in enumerate(sparsity.layers) if layer.pattern is not None)
    parts = qkv(1, 2300, 32, 8)
    cache = S2Cache(config_of(sparsity), max_length=2304)
    cache.layers = [cache.layers[layer]]
    out = fed(cache, 0, parts, [2170] + [1] * 130)
    assert (out - attend(*parts, sparsity.layers[layer].pattern, 0.3)).abs().max() < FP64


@pytest.mark.parametrize("name", mostly_slow(["s2", "dense_heads", "mask_kv"], "s2"))
def test_greedy_generation_equals_the_full_cache(name):
    model = model_of(sparsity_named(name))
    prompt = tokens(2, 70)
    mask = torch.ones_like(prompt)
    mask[1, :23] = 0
    settings = dict(attention_mask=mask, max_new_tokens=120, do_sample=False, return_dict_in_generate=True)
    compact = model.generate(prompt, output_logits=True, **settings)
    full = model.generate(prompt, output_logits=True, cache_implementation="dynamic", **settings)
    taken = [getattr(output, CACHE_ARGUMENT) for output in (compact, full)]
    assert isinstance(taken[0], S2Cache) and isinstance(taken[1], DynamicCache)
    assert torch.equal(compact.sequences, full.sequences)
    difference = (torch.stack(compact.logits) - torch.stack(full.logits)).abs().max()
    assert difference < 1e-5 * torch.stack(full.logits).abs().max()
    alone = model.generate(prompt[1:, 23:], **settings | dict(attention_mask=None))
    assert torch.equal(alone.sequences[0, 47:], compact.sequences[1, 70:])


def test_beam_search_equals_the_full_cache():
    model = model_of(sparsity_named("s2"))
    settings = dict(max_new_tokens=60, num_beams=3, do_sample=False)
    full = model.generate(tokens(2, 70), cache_implementation="dynamic", **settings)
    assert torch.equal(model.generate(tokens(2, 70), **settings), full)


def test_a_conversation_goes_on_in_the_same_cache():
    model = model_of(sparsity_named("s2"))
    cache = S2Cache(model.config)
    first = model.generate(tokens(1, 50), **{CACHE_ARGUMENT: cache}, max_new_tokens=40, do_sample=False)
    text = torch.cat([first, tokens(1, 30, seed=5)], 1)
    second = model.generate(text, **{CACHE_ARGUMENT: cache}, max_new_tokens=40, do_sample=False)
    assert torch.equal(second, model.generate(text, max_new_tokens=40, do_sample=False))


def test_reset_and_another_text():
    model = model_of(sparsity_named("s2"))
    cache = S2Cache(model.config, max_length=256)
    with torch.no_grad():
        for seed, rows in ((1, 2), (2, 2), (3, 1), (4, 3)):
            text = tokens(rows, 130, seed)
            parts = [model(piece, **{CACHE_ARGUMENT: cache}).logits for piece in text.split([90] + [1] * 40, 1)]
            expected = model(text, use_cache=False).logits
            assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-4)
            cache.reset()


@pytest.mark.parametrize("use_cache", [None, False])
def test_a_cache_of_another_name_is_refused(use_cache):
    """transformers has renamed the argument once: a cache that nobody reads is a text that the model forgets."""
    model = model_of(sparsity_named("s2"))
    cache = S2Cache(model.config)
    with torch.no_grad(), pytest.raises(ValueError, match=f"kv=S2Cache .* pass it as {CACHE_ARGUMENT}="):
        model(tokens(1, 20), kv=cache, use_cache=use_cache)
    assert cache.get_seq_length() == 0


def test_assisted_decoding_takes_the_full_cache():
    """By tokens looked up in the prompt, and with an S2 model as the assistant of another one."""
    model, assistant = (model_of(sparsity_named("s2")) for _ in range(2))
    with torch.no_grad():  # often of the same opinion, not always
        assistant.lm_head.weight += 0.1 * assistant.lm_head.weight.std() * torch.randn_like(assistant.lm_head.weight)
    prompt = tokens(1, 40).repeat(1, 2)
    settings = dict(max_new_tokens=60, do_sample=False, eos_token_id=0)
    expected = model.generate(prompt, **settings)
    for helper in (dict(prompt_lookup_num_tokens=3), dict(assistant_model=assistant)):
        helped = settings | helper
        with pytest.raises(ValueError, match="assisted decoding takes tokens back"):
            model.generate(prompt, **helped)
        with pytest.raises(ValueError, match="assisted decoding takes tokens back"):
            model.generate(prompt, **{CACHE_ARGUMENT: S2Cache(model.config)}, **helped)
        assert torch.equal(model.generate(prompt, **{CACHE_ARGUMENT: DynamicCache()}, **helped), expected)


def test_memory_is_that_of_the_kept_tokens():
    sparsity = sparsity_named("s2")
    model = model_of(sparsity)
    cache = S2Cache(model.config, max_length=1024)
    with torch.no_grad():
        model(tokens(3, 5), **{CACHE_ARGUMENT: cache})
    kept = 1024 + 2 * BLOCK + 1024 // 4  # the dense layer; window and stripes of the other
    assert cache.nbytes == 2 * 3 * KV_HEADS * kept * 16 * 4


def test_repeated_and_chosen_rows():
    model = model_of(sparsity_named("s2"))
    cache = S2Cache(model.config)
    text = tokens(2, 100)
    with torch.no_grad():
        model(text[:, :90], **{CACHE_ARGUMENT: cache})
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1, 2]))
        got = model(text[:, 90:], **{CACHE_ARGUMENT: cache}).logits
        assert torch.allclose(got, model(text, use_cache=False).logits[:, 90:], atol=1e-4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda cache: cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0), "DynamicCache"),
        (lambda cache: cache.crop(-3), "blocks that left the window are gone"),
        (lambda cache: fed(cache, 0, qkv(1, 80), [80]), "got 80 tokens"),
    ],
)
def test_what_it_cannot_do_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(S2Cache(config_of(sparsity_named("s2")), max_length=64))


def test_a_stock_model_cannot_take_it():
    config = config_of(sparsity_named("s2"))
    llama = LlamaForCausalLM(_llama())
    with pytest.raises(ValueError, match="works with models of type s2_gpt"):
        llama(tokens(1, 20), **{CACHE_ARGUMENT: S2Cache(config)})


def _llama():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip


def test_static_caches_are_refused():
    model = model_of(sparsity_named("s2"))
    with pytest.raises(ValueError, match="max_length"):
        model.generate(tokens(1, 20), max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="S2Cache"):
        model(tokens(1, 20), **{CACHE_ARGUMENT: StaticCache(model.config, max_cache_len=64)})


def test_a_mask_that_forgets_the_padding_is_refused():
    model = model_of(sparsity_named("s2"))
    cache = S2Cache(model.config)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        model(tokens(2, 20), attention_mask=mask, **{CACHE_ARGUMENT: cache})
        with pytest.raises(ValueError, match="pass it in every forward"):
            model(tokens(2, 1), **{CACHE_ARGUMENT: cache})


def test_decoding_has_no_gradient():
    model = model_of(sparsity_named("s2"))
    cache = S2Cache(model.config)
    model(tokens(1, 20), **{CACHE_ARGUMENT: cache})
    with pytest.raises(ValueError, match="no gradient"):
        model(tokens(1, 1), **{CACHE_ARGUMENT: cache})
