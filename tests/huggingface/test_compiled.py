"""torch.compile of the models: each layer keeps its own pattern, whatever ran before and whatever comes next.

To compile takes seconds, so one compiled model meets all kinds of batches, one after another.
"""

import copy

import pytest
import torch
from transformers import Trainer, TrainingArguments

from s2_megatron.config.stored import stored_sparsity
from s2_megatron.huggingface import CACHE_ARGUMENT, S2Cache
from tests.huggingface.tiny import BLOCK, model_of, tokens
from tests.huggingface.truth import NEAR, difference, stock_model, three_layers, truth_of
from tests.tiers import mostly_slow

TEXT = tokens(2, 3 * BLOCK + 7)
WHOLE = torch.zeros_like(TEXT)
MASK = torch.ones_like(TEXT)
MASK[0, :9] = 0
SECOND = (torch.arange(TEXT.shape[1]) >= 20).long()  # 1 for the tokens of a second text in each row
POSITIONS = torch.cat([torch.arange(20), torch.arange(TEXT.shape[1] - 20)])[None]


@pytest.fixture(params=mostly_slow(["own", "stock"], "own"))
def model(request):
    torch._dynamo.reset()
    own = model_of(three_layers())
    yield own if request.param == "own" else stock_model(own, three_layers())
    torch._dynamo.reset()


def truth(model, sparsity=None, texts=WHOLE):
    with torch.no_grad():
        return truth_of(model, sparsity or three_layers(), texts)(TEXT, use_cache=False).logits


@torch.no_grad()
def test_every_layer_keeps_its_pattern(model):
    """Eagerly, compiled, with padding, and compiled again; transformers takes every batch for packed while it is
    traced."""
    whole = truth(model)
    assert difference(model(TEXT, use_cache=False).logits, whole, WHOLE) < NEAR
    compiled = torch.compile(model, backend="eager")
    assert difference(compiled(TEXT, use_cache=False).logits, whole, WHOLE) < NEAR
    padded = compiled(TEXT, attention_mask=MASK, use_cache=False).logits
    assert difference(padded, truth(model, texts=MASK - 1), MASK - 1) < NEAR
    assert difference(compiled(TEXT, use_cache=False).logits, whole, WHOLE) < NEAR


@pytest.mark.long
@torch.no_grad()
def test_compiled_at_once_and_then_all_kinds_of_batches(model):
    compiled, whole, packed = torch.compile(model, backend="eager"), truth(model), SECOND.expand_as(TEXT)
    assert difference(compiled(TEXT).logits, whole, WHOLE) < NEAR
    for columns in (9, 21, 9):
        mask = torch.ones_like(TEXT)
        mask[0, :columns] = 0
        logits = compiled(TEXT, attention_mask=mask).logits
        assert difference(logits, truth(model, texts=mask - 1), mask - 1) < NEAR
    logits = compiled(TEXT, position_ids=POSITIONS, use_cache=False).logits
    assert difference(logits, truth(model, texts=packed), packed) < NEAR
    logits = compiled(TEXT, position_ids=torch.arange(TEXT.shape[1])[None], use_cache=False).logits
    assert difference(logits, whole, WHOLE) < NEAR


@pytest.mark.parametrize("assigned", [True, False])
@torch.no_grad()
def test_a_changed_sparsity_reaches_forward_and_cache(model, assigned):
    other = three_layers(stride=2)
    first = model(TEXT).logits
    change(model.config, other, assigned)
    expected = truth(model, other)
    assert (first - expected).abs().max() > 100 * NEAR
    assert difference(model(TEXT).logits, expected, WHOLE) < NEAR
    if model.config.model_type == "s2_gpt":
        cache = {CACHE_ARGUMENT: S2Cache(model.config)}
        pieces = [model(piece, **cache).logits for piece in TEXT.split([30, 1, 24], 1)]
        assert difference(torch.cat(pieces, 1), expected, WHOLE) < NEAR


def change(config, sparsity, assigned: bool) -> None:
    if assigned:
        config.s2_sparsity = stored_sparsity(sparsity)
    else:
        config.s2_sparsity.update(stored_sparsity(sparsity))


@pytest.mark.long
@torch.no_grad()
def test_a_changed_sparsity_reaches_a_compiled_model(model):
    compiled = torch.compile(model, backend="eager")
    compiled(TEXT, use_cache=False)
    change(model.config, three_layers(stride=2), False)
    expected = truth(model, three_layers(stride=2))
    assert difference(compiled(TEXT, use_cache=False).logits, expected, WHOLE) < NEAR


def test_plain_rows_are_one_graph_behind_the_look_at_their_texts():
    torch._dynamo.reset()
    assert torch._dynamo.explain(model_of(three_layers()))(TEXT).graph_break_count <= 1
    torch._dynamo.reset()


@pytest.mark.long
@torch.no_grad()
def test_decoding():
    torch._dynamo.reset()
    model = model_of(three_layers())
    compiled, cache = torch.compile(model, backend="eager"), {CACHE_ARGUMENT: S2Cache(model.config)}
    pieces = [compiled(piece, **cache).logits for piece in TEXT.split([30, *[1] * 25], 1)]
    assert difference(torch.cat(pieces, 1), truth(model), WHOLE) < NEAR
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients(model, backend):
    """After an evaluation, as a training loop has it; the truth's gradients come from stock attention."""
    expected = truth_of(model, three_layers(), WHOLE)
    model.eval()(TEXT)
    torch.compile(model.train(), backend=backend)(TEXT, labels=TEXT, use_cache=False).loss.backward()
    expected.train()(TEXT, labels=TEXT, use_cache=False).loss.backward()
    wanted = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        grad = wanted[name].grad
        assert (parameter.grad - grad).abs().max() <= 1e-4 * grad.abs().max(), name


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(TEXT)

    def __getitem__(self, index):
        return dict(input_ids=TEXT[index], labels=TEXT[index])


@pytest.mark.long
def test_trainer(tmp_path):
    """Three steps of SGD; the truth takes them with stock attention."""
    torch._dynamo.reset()
    model = model_of(three_layers())
    weights = []
    for one, compiling in ((copy.deepcopy(model), True), (truth_of(model, three_layers(), WHOLE), False)):
        settings = TrainingArguments(
            tmp_path, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, optim="sgd", report_to=[],
            torch_compile=compiling, torch_compile_backend="eager" if compiling else None, use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(one, settings, train_dataset=Rows()).train()
        weights.append(dict(one.named_parameters()))
    for name, parameter in weights[0].items():
        assert torch.allclose(parameter, weights[1][name], rtol=1e-4, atol=1e-5), name
    torch._dynamo.reset()
