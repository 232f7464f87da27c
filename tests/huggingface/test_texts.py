"""Where the texts of a row lie: padding and packed texts in all forms, against stock attention under explicit masks;
and what is refused."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache, MistralConfig, MistralForCausalLM

from s2_megatron.config.stored import stored_sparsity
from s2_megatron.huggingface import CACHE_ARGUMENT, S2Cache
from s2_megatron.huggingface.texts import row_extent, text_borders
from tests.huggingface.tiny import BLOCK, config_of, model_of, sparsity_named, tokens
from tests.huggingface.truth import NEAR, difference, stock_model, three_layers, truth_of

LENGTHS = (40, 1, 23, BLOCK)
ONE_ROW = torch.cat([torch.full((length,), text) for text, length in enumerate(LENGTHS)])[None]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
BORDERS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
TEXT = tokens(2, sum(LENGTHS))


@pytest.fixture(params=["own", "stock"])
def model(request):
    own = model_of(three_layers())
    return own if request.param == "own" else stock_model(own, three_layers())


def ones(rows: int = 1) -> torch.Tensor:
    return torch.ones(rows, TEXT.shape[1], dtype=torch.long)


PACKED = {
    "position_ids": dict(position_ids=POSITIONS),
    "position_ids and a mask": dict(position_ids=POSITIONS, attention_mask=ones()),
    "cu_seq_lens": dict(cu_seq_lens_q=BORDERS, cu_seq_lens_k=BORDERS, max_length_q=40, max_length_k=40),
    "cu_seq_lens and a mask": dict(cu_seq_lens_q=BORDERS, cu_seq_lens_k=BORDERS, attention_mask=ones()),
    "cu_seq_lens and position_ids": dict(cu_seq_lens_q=BORDERS, cu_seq_lens_k=BORDERS, position_ids=POSITIONS),
    "seq_idx": dict(seq_idx=ONE_ROW.int()),
}


@pytest.mark.parametrize("form", PACKED)
def test_packed_texts_do_not_attend_each_other(model, form):
    text = TEXT[:1]
    truth = truth_of(model, three_layers(), ONE_ROW).train()
    expected = truth(text, labels=text, use_cache=False)
    found = model.train()(text, labels=text, use_cache=False, **PACKED[form])
    assert difference(found.logits, expected.logits, ONE_ROW) < NEAR
    found.loss.backward()
    expected.loss.backward()
    wanted = dict(truth.named_parameters())
    for name, parameter in model.named_parameters():
        grad = wanted[name].grad
        assert (parameter.grad - grad).abs().max() <= 1e-4 * grad.abs().max(), name


@pytest.mark.parametrize(
    "settings", [{}, dict(return_flash_attn_kwargs=True, return_seq_idx=True), dict(return_position_ids=False)]
)
def test_the_flattening_collator(model, settings):
    if settings == dict(return_position_ids=False):
        settings = settings | dict(return_flash_attn_kwargs=True)
    texts = [dict(input_ids=part.tolist()) for part in TEXT[0].split(LENGTHS)]
    batch = DataCollatorWithFlattening(return_tensors="pt", **settings)(texts)
    with torch.no_grad():
        expected = truth_of(model, three_layers(), ONE_ROW)(TEXT[:1], use_cache=False).logits
        assert difference(model(**batch, use_cache=False).logits, expected, ONE_ROW) < NEAR


def test_packed_texts_between_padding_in_several_rows(model):
    """Padding on the left of one row and on the right of another, whose positions there mean nothing."""
    mask, positions, texts = ones(2), POSITIONS.repeat(2, 1), ONE_ROW.repeat(2, 1)
    for row, columns in ((0, slice(0, 11)), (1, slice(70, None))):
        mask[row, columns], positions[row, columns], texts[row, columns] = 0, 1, -1
    positions[0, 11:40] -= 11
    truth = truth_of(model, three_layers(), texts)
    with torch.no_grad():
        expected = truth(TEXT, use_cache=False).logits
        found = model(TEXT, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert difference(found, expected, texts) < NEAR


@pytest.mark.parametrize("name", ["s2", "dense_heads", "mask_heads", "mixed", "dense"])
def test_every_kind_of_pattern_packed(name):
    model = model_of(sparsity_named(name))
    with torch.no_grad():
        expected = truth_of(model, sparsity_named(name), ONE_ROW)(TEXT[:1], use_cache=False).logits
        found = model(TEXT[:1], position_ids=POSITIONS)
    assert difference(found.logits, expected, ONE_ROW) < NEAR
    assert getattr(found, CACHE_ARGUMENT) is None  # a cache could not go on from them


@pytest.mark.parametrize("cache", [DynamicCache, lambda: S2Cache(config_of(three_layers())), None])
def test_packed_texts_in_a_cache_are_refused(model, cache):
    if model.config.model_type != "s2_gpt" and cache not in (DynamicCache, None):
        return
    more = dict(use_cache=True) if cache is None else {CACHE_ARGUMENT: cache()}
    with torch.no_grad(), pytest.raises(ValueError, match=r"another text begins in row 0 at token 40.*use_cache=False"):
        model(TEXT[:1], position_ids=POSITIONS, **more)


@pytest.mark.parametrize("length", [1, 5])
def test_another_text_behind_a_cached_one_is_refused(model, length):
    with torch.no_grad():
        cache = getattr(model(TEXT, use_cache=True), CACHE_ARGUMENT)
        positions = torch.arange(length)[None]
        with pytest.raises(ValueError, match="packed texts with a cache: another text begins in row 0 at token 80"):
            model(tokens(2, length), position_ids=positions, **{CACHE_ARGUMENT: cache})
        cache = getattr(model(TEXT, use_cache=True), CACHE_ARGUMENT)
        model(tokens(2, length), position_ids=positions + 80, **{CACHE_ARGUMENT: cache})


def test_positions_of_generate_are_no_packed_texts(model):
    """In the padding they may be anything."""
    mask = ones(2)
    mask[0, :17] = 0
    for filler in (0, 1):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, filler)
        with torch.no_grad():
            expected = truth_of(model, three_layers(), mask - 1)(TEXT, use_cache=False).logits
            found = model(TEXT, attention_mask=mask, position_ids=positions).logits
        assert difference(found, expected, mask - 1) < NEAR


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(attention_mask=ones(2)[:, :50]), r"attention_mask has shape \[2, 50\]; expected \[2, 80\]"),
        (dict(attention_mask=torch.ones(2, 90)), r"attention_mask has shape \[2, 90\]; expected \[2, 80\]"),
        (dict(attention_mask=ones(1)), r"attention_mask has shape \[1, 80\]; expected \[2, 80\]"),
        (dict(attention_mask=0 * ones(2)), "attention_mask is 0 everywhere"),
        (dict(attention_mask=ones(2).view(2, 1, 1, 80)), "a mask per pair of tokens"),
        (dict(output_attentions=True), "output_attentions=True .* never has the probabilities"),
        (dict(is_causal=False), "got the argument is_causal=False|attention in both directions"),
        (dict(softcap=3.0), "got the argument softcap=3.0"),
        (dict(position_ids=2 * torch.arange(80)[None]), "position_ids jump from 0 to 2 in row 0"),
        (dict(cu_seq_lens_q=BORDERS), "for 2 rows of 80 tokens; expected one row of packed texts"),
        (dict(seq_idx=ONE_ROW, position_ids=(torch.arange(80) % 40)[None]), "different texts are packed"),
    ],
)
def test_what_is_refused(model, arguments, message):
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(TEXT, use_cache=False, **arguments)


@torch.no_grad()
def test_what_only_the_own_model_can_tell():
    """Of a stock model transformers has made ones of such a mask; it ends in an error of its own at such positions."""
    own = model_of(three_layers())
    with pytest.raises(ValueError, match=r"output_router_logits=True: .* does not return them"):
        own(TEXT[:1], output_router_logits=True)
    with pytest.raises(ValueError, match=r"attention_mask holds 2; .* pass position_ids"):
        own(TEXT[:1], attention_mask=ONE_ROW + 1)
    with pytest.raises(ValueError, match=r"position_ids has shape \[1, 79\]; expected \[2, 80\]"):
        own(TEXT, position_ids=torch.arange(79)[None])
    own.config.is_causal = False
    with pytest.raises(ValueError, match="got the argument is_causal=False"):
        own(TEXT)


def test_a_mask_of_the_new_tokens_alone_is_refused(model):
    with torch.no_grad():
        cache = getattr(model(TEXT, use_cache=True), CACHE_ARGUMENT)
        with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 3\]; expected \[2, 83\]"):
            model(tokens(2, 3), attention_mask=ones(2)[:, :3], **{CACHE_ARGUMENT: cache})


def test_what_tokenizers_and_trainers_pass_is_taken(model):
    with torch.no_grad():
        expected = model(TEXT, use_cache=False).logits
        more = dict(token_type_ids=0 * TEXT, num_items_in_batch=torch.tensor(3), output_attentions=False)
        assert torch.equal(model(TEXT, use_cache=False, **more).logits, expected)
        assert len(model(TEXT, use_cache=False, output_hidden_states=True).hidden_states) == 4


def test_a_stock_model_with_a_window_of_its_own_is_refused():
    settings = config_of(three_layers()).to_dict()
    shape = {name: settings[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = MistralConfig(
        **shape, num_key_value_heads=2, head_dim=16, intermediate_size=96, sliding_window=32,
        attn_implementation="s2", s2_sparsity=stored_sparsity(three_layers()),
    )  # fmt: skip
    with pytest.raises(ValueError, match="a sliding window"):
        MistralForCausalLM(config)(TEXT, use_cache=False)


@pytest.mark.parametrize("change", [dict(num_hidden_layers=4), dict(num_key_value_heads=4)])
def test_a_sparsity_of_another_shape_is_refused_in_a_stock_model(change):
    llama = stock_model(model_of(three_layers()), three_layers())
    for name, value in change.items():
        setattr(llama.config, name, value)
    with pytest.raises(ValueError, match="s2_sparsity is of a model with 3 layers, 4 query and 2 KV heads; the config"):
        llama(TEXT, use_cache=False)


def test_borders_at_random_texts():
    """Against a loop over tokens."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        length = int(torch.randint(1, 12, (), generator=generator))
        begins = torch.rand(2, length, generator=generator) < 0.3
        padded = torch.randint(0, length + 1, (2,), generator=generator)
        mask = torch.arange(length) >= padded[:, None]
        positions, expected = torch.zeros(2, length, dtype=torch.long), torch.zeros(2, length, dtype=torch.bool)
        for row in range(2):
            for column in range(int(padded[row]) + 1, length):
                expected[row, column] = begins[row, column]
                positions[row, column] = 0 if begins[row, column] else positions[row, column - 1] + 1
        extent = row_extent(mask, 2, length, may_be_empty=True)
        found = text_borders(2, length, 0, extent, dict(position_ids=positions))
        assert torch.equal(torch.zeros_like(expected) if found is None else found, expected)
