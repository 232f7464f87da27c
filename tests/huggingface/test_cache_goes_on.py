"""An S2Cache between contexts: copies, chosen rows, inference mode, gradients, forwards that ended half-way."""

import copy
import io
import pickle

import pytest
import torch

from s2_megatron.huggingface import CACHE_ARGUMENT, S2Cache
from tests.huggingface.tiny import BLOCK, config_of, model_of, sparsity_named, tokens
from tests.huggingface.truth import NEAR, difference, three_layers, truth_of

TEXT = tokens(3, 7 * BLOCK + 5)
PROMPT = 40


def sparsity(name: str):
    return three_layers() if name == "three" else sparsity_named(name)


def run(model, cache, ids, mask=None):
    return model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits


def saved(cache):
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache)), "torch.save": saved}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["three", "mask_heads", "dense_heads", "not_efficient"])
@torch.no_grad()
def test_a_copied_prompt_goes_on_as_the_first_one(name, how):
    """transformers' documented way to use a prompt again; the texts grow beyond the copy's room."""
    model = model_of(sparsity(name))
    cache = S2Cache(model.config)
    run(model, cache, TEXT[:1, :PROMPT])
    texts = torch.zeros_like(TEXT[:1])
    for row in range(3):
        text = torch.cat([TEXT[:1, :PROMPT], TEXT[row : row + 1, PROMPT:]], 1)
        truth = truth_of(model, sparsity(name), texts)(text, use_cache=False).logits[:, PROMPT:]
        branch = COPIES[how](cache)
        pieces = [run(model, branch, piece) for piece in text[:, PROMPT:].split([30, *[1] * 20, 27], 1)]
        assert difference(torch.cat(pieces, 1), truth, texts[:, PROMPT:]) < NEAR
    assert cache.get_seq_length() == PROMPT


@pytest.mark.parametrize("max_length", [None, TEXT.shape[1]])
def test_filled_in_inference_mode_and_gone_on_without(max_length):
    """And with a gradient in the second piece, whose past is a constant."""
    model = model_of(three_layers())
    cache = S2Cache(model.config, max_length=max_length)
    texts = torch.zeros_like(TEXT)
    truth = truth_of(model, three_layers(), texts)
    expected = truth(TEXT, use_cache=False).logits
    with torch.inference_mode():
        run(model, cache, TEXT[:, :PROMPT])
        run(model, cache, TEXT[:, PROMPT : PROMPT + 1])
    branch = copy.deepcopy(cache)
    with torch.no_grad():
        pieces = [run(model, cache, piece) for piece in TEXT[:, PROMPT + 1 :].split([30, *[1] * 20, 26], 1)]
        cache.reorder_cache(torch.tensor([2, 1, 0]))
    assert difference(torch.cat(pieces, 1), expected[:, PROMPT + 1 :], texts[:, PROMPT + 1 :]) < NEAR
    logits = run(model, branch, TEXT[:, PROMPT + 1 :])
    logits.square().mean().backward()
    with torch.no_grad():  # the truth: transformers' cache under the same pattern, its past without a gradient
        full = model(TEXT[:, : PROMPT + 1], use_cache=True)
    model_again = copy.deepcopy(model)
    model_again.zero_grad()
    past = {CACHE_ARGUMENT: getattr(full, CACHE_ARGUMENT)}
    model_again(TEXT[:, PROMPT + 1 :], **past).logits.square().mean().backward()
    for ours, wanted in zip(model.parameters(), model_again.parameters()):
        assert (ours.grad - wanted.grad).abs().max() <= 1e-4 * wanted.grad.abs().max()


def test_training_after_an_evaluation_in_inference_mode():
    model = model_of(three_layers())
    model.config.s2_sparsity["seq_length"] = 257  # a sparsity that nothing has seen before
    with torch.inference_mode():
        model.generate(TEXT[:, :PROMPT], max_new_tokens=3, do_sample=False)
        model(TEXT)
    model.train()(TEXT, labels=TEXT).loss.backward()
    cache = S2Cache(model.config)
    with torch.no_grad():
        run(model, cache, TEXT[:, :PROMPT])
    run(model, cache, TEXT[:, PROMPT:]).mean().backward()


def test_gradients_over_two_pieces_are_refused():
    model = model_of(three_layers())
    cache = S2Cache(model.config)
    run(model, cache, TEXT[:, :PROMPT])
    with pytest.raises(ValueError, match="S2Cache has no gradient of the tokens that it was given before"):
        run(model, cache, TEXT[:, PROMPT:])
    with torch.no_grad():  # refused before anything was written
        found = run(model, cache, TEXT[:, PROMPT:])
        assert (found - model(TEXT, use_cache=False).logits[:, PROMPT:]).abs().max() < NEAR
    cache.reset()
    run(model, cache, TEXT[:, :PROMPT]).mean().backward()


@pytest.mark.parametrize("chosen", [[0], [1], [0, 0], [2, 1], [2, 2, 0]])
@torch.no_grad()
def test_chosen_rows_of_a_padded_batch(chosen):
    model = model_of(three_layers())
    mask = torch.ones_like(TEXT)
    mask[1, :9], mask[2, :21] = 0, 0
    cache = S2Cache(model.config)
    run(model, cache, TEXT[:, :PROMPT], mask[:, :PROMPT])
    cache.batch_select_indices(torch.tensor(chosen))
    texts = mask[chosen] - 1
    expected = truth_of(model, three_layers(), texts)(TEXT[chosen], use_cache=False).logits[:, PROMPT:]
    parts, first = [], PROMPT
    for count in (30, 1, 1, 45):
        columns = slice(0, first + count)
        parts.append(run(model, cache, TEXT[chosen, first : first + count], mask[chosen, columns]))
        first += count
    assert difference(torch.cat(parts, 1), expected[:, : first - PROMPT], texts[:, PROMPT:first]) < NEAR


@torch.no_grad()
def test_other_rows_are_refused():
    model = model_of(three_layers())
    cache = S2Cache(model.config)
    run(model, cache, TEXT[:, :PROMPT])
    for rows in (1, 2):
        with pytest.raises(ValueError, match=f"holds 3 rows and got {rows}"):
            run(model, cache, TEXT[:rows, PROMPT : PROMPT + 1])


@pytest.mark.parametrize("where", ["between", "inside"])
@torch.no_grad()
def test_after_a_forward_that_ended_half_way(where, monkeypatch):
    """A caught out-of-memory: the first layers have seen the tokens, the others not."""
    model = model_of(three_layers())
    cache = S2Cache(model.config)
    run(model, cache, TEXT[:, :PROMPT])
    broken = model.model.layers[1].mlp if where == "between" else cache.layers[0]
    name = "forward" if where == "between" else "extend"

    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(broken, name, fail)
        with pytest.raises(torch.OutOfMemoryError):
            run(model, cache, TEXT[:, PROMPT : PROMPT + 5])
    with pytest.raises(ValueError, match=r"this S2Cache is torn.*call reset\(\)"):
        run(model, cache, TEXT[:, PROMPT : PROMPT + 5])
    cache.reset()
    assert (run(model, cache, TEXT) - model(TEXT, use_cache=False).logits).abs().max() < NEAR


@torch.no_grad()
def test_a_refused_forward_leaves_the_cache_as_it_was():
    model = model_of(three_layers())
    cache = S2Cache(model.config, max_length=PROMPT + 1)
    run(model, cache, TEXT[:, :PROMPT])
    with pytest.raises(ValueError, match="got 45 tokens"):
        run(model, cache, TEXT[:, PROMPT : PROMPT + 5])
    found = run(model, cache, TEXT[:, PROMPT : PROMPT + 1])
    assert (found - model(TEXT, use_cache=False).logits[:, PROMPT : PROMPT + 1]).abs().max() < NEAR


@torch.no_grad()
def test_a_cache_of_another_sparsity_is_refused():
    model = model_of(three_layers())
    cache = S2Cache(config_of(three_layers(stride=2)))
    with pytest.raises(ValueError, match="made for another sparsity than the model's in layer 1"):
        run(model, cache, TEXT)


@pytest.mark.parametrize("piece", [1, 20])
@pytest.mark.parametrize("first, then", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
@torch.no_grad()
def test_a_text_has_one_dtype(first, then, piece):
    """What is kept would be rounded, or torch would stop in the middle of the forward."""
    model = model_of(three_layers())
    cache = S2Cache(model.config)
    run(model.to(first), cache, TEXT[:, :PROMPT])
    with pytest.raises(ValueError, match=f"holds {first} and got {then}; expected one dtype for all of a text; give"):
        run(model.to(then), cache, TEXT[:, PROMPT : PROMPT + piece])
    run(model.to(first), cache, TEXT[:, PROMPT : PROMPT + piece])  # nothing was written
    assert cache.get_seq_length() == PROMPT + piece


@torch.no_grad()
def test_a_reset_cache_takes_another_dtype():
    model = model_of(three_layers())
    cache, fresh = S2Cache(model.config), S2Cache(model.config)
    run(copy.deepcopy(model).to(torch.bfloat16), cache, TEXT[:, :PROMPT])
    cache.reset()
    for each in TEXT.split([PROMPT, 1, 30, TEXT.shape[1] - PROMPT - 31], 1):
        assert torch.equal(run(model, cache, each), run(model, fresh, each))
