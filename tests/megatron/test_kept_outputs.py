"""--s2-keep-attention-output: a stored result goes to the second pass of the call that computed it, and to no other,
whatever happens to the calls around it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from weakref import WeakSet

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import random

from s2_megatron.megatron.patches import keep_attention_outputs
from s2_megatron.megatron.settings import S2Settings
from s2_megatron.ops import recompute as kept
from s2_megatron.ops import reference
from tests.megatron.test_core_attention import make_core, make_qkv

ENGINE = "transformer_engine.pytorch.distributed"


class EngineCheckpoint(torch.autograd.Function):
    """Transformer Engine's checkpoint as far as it matters here: it tells Megatron nothing."""

    @staticmethod
    def forward(ctx, function, *args):
        ctx.function = function
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx, grad):
        args = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*args)
        torch.autograd.backward(out, grad)
        return None, *(tensor.grad for tensor in args)


def engine_checkpoint(function, *args, distribute_saved_activations, get_rng_state_tracker, tp_group):
    function.fsdp_wrapped = False  # as Transformer Engine does: the function takes attributes
    return EngineCheckpoint.apply(function, *args)


@pytest.fixture(params=["Megatron's", "Transformer Engine's"])
def checkpoint(request, monkeypatch):
    """(function, *tensors) through Megatron's own checkpoint, or Transformer Engine's as the layers call it under
    fp8."""
    monkeypatch.setattr(random, "_get_all_rng_states", tuple)  # a GPU's
    monkeypatch.setattr(random, "_set_all_rng_states", lambda: None)
    if request.param == "Megatron's":
        return lambda function, *args: tensor_parallel.checkpoint(function, False, *args)
    package = ModuleType(ENGINE)
    package.checkpoint = engine_checkpoint
    monkeypatch.setitem(sys.modules, ENGINE, package)
    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    monkeypatch.setattr(transformer_engine, "is_te_min_version", lambda version: True)
    return lambda function, *args: transformer_engine.te_checkpoint(function, False, None, None, *args)


@pytest.fixture
def forwards(monkeypatch):
    """How often the attention's forward was computed."""
    counted, forward = SimpleNamespace(number=0), reference.forward

    def counting(*args, **kwargs):
        counted.number += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(reference, "forward", counting)
    return counted


ALIVE = WeakSet()


class Counted(kept.RecomputeOutputs):
    """Noted in ALIVE."""

    def __init__(self):
        super().__init__()
        ALIVE.add(self)


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    monkeypatch.setattr(kept, "RecomputeOutputs", Counted)


def held():
    return sum(map(len, ALIVE))


def make_layers(keep=True):
    if keep:
        keep_attention_outputs()
    return [make_core(settings=S2Settings(backend="reference", keep_attention_output=keep)) for _ in range(2)]


def block(cores):
    """Layers that share a call, the first one's core computing twice."""

    def run(query, key, value):
        for core in (*cores, cores[0]):
            query = core(query, key, value).view_as(query)
        return query

    return run


def step(cores, checkpoint, seeds=(1, 2), backwards=None):
    """The gradients of calls with the tensors of these seeds; backwards: their order."""
    inputs = [make_qkv(seed=seed) for seed in seeds]
    outs = [checkpoint(block(cores), *qkv) for qkv in inputs]
    for number in backwards or range(len(seeds)):
        outs[number].backward(torch.ones_like(outs[number]))
    return [tensor.grad for qkv in inputs for tensor in qkv]


def same(got, expected):
    return all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))


@pytest.fixture
def expected():
    return step(make_layers(keep=False), lambda function, *args: function(*args))


def test_stored_once_and_taken_once(checkpoint, forwards, expected):
    forwards.number = 0
    assert same(step(make_layers(), checkpoint), expected)
    assert (forwards.number, held()) == (2 * 3, 0)


def test_backwards_in_another_order(checkpoint, expected):
    assert same(step(make_layers(), checkpoint, backwards=(1, 0)), expected)


def test_a_forward_without_gradients(checkpoint, forwards, expected):
    cores = make_layers()
    with torch.no_grad():
        checkpoint(block(cores), *make_qkv(seed=5))
    forwards.number = 0
    assert held() == 0 and same(step(cores, checkpoint), expected) and forwards.number == 2 * 3


def test_an_abandoned_step(checkpoint, expected):
    """Its forward done, no backward; then one that ends in the middle of a call, as at memory that ran out."""
    cores = make_layers()
    abandoned = checkpoint(block(cores), *make_qkv(seed=5))
    assert held() == 3
    del abandoned
    assert held() == 0

    def fails(*qkv):
        block(cores)(*qkv)
        raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(torch.OutOfMemoryError):
        checkpoint(fails, *make_qkv(seed=6))
    assert held() == 0 and same(step(cores, checkpoint), expected)
    # Attention beside a call computes by itself.
    query, key, value = make_qkv(seed=1)
    assert torch.equal(cores[0](query, key, value), make_layers(keep=False)[0](query, key, value))


def test_frozen_inputs(checkpoint):
    """Nothing has a backward, so nothing is held, however many steps there are."""
    cores = make_layers()
    outs = [checkpoint(block(cores), *(tensor.detach() for tensor in make_qkv(seed=seed))) for seed in range(3)]
    assert held() == 0 and not any(out.requires_grad for out in outs)


def test_a_second_backward_computes_again(checkpoint, forwards):
    cores, qkv = make_layers(), make_qkv()
    out = checkpoint(block(cores), *qkv)
    out.backward(torch.ones_like(out), retain_graph=True)
    once = [tensor.grad.clone() for tensor in qkv]
    out.backward(torch.ones_like(out))
    assert all(torch.equal(tensor.grad, 2 * grad) for tensor, grad in zip(qkv, once, strict=True))
    assert forwards.number == 3 + 3


def test_no_second_patch():
    def functions():
        return random.checkpoint, tensor_parallel.checkpoint, transformer_engine.te_checkpoint

    keep_attention_outputs()
    once = functions()
    keep_attention_outputs()
    assert functions() == once and once[0] is once[1]
