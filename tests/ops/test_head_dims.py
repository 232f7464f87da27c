"""Values with another head dim than queries and keys (192 and 128 in multi-latent attention): the reference computes
with both, the kernels with zeros up to the larger one. Errors against fp64 as in test_attention.py."""

from __future__ import annotations

import pytest
import torch

from s2_megatron import printing
from s2_megatron.ops.api import make_call, s2_attention
from s2_megatron.ops.layout import PackedSequence
from s2_megatron.ops.recompute import keep_outputs, layer_output, recompute_attention
from s2_megatron.testing.oracle import check_against_eager, make_inputs, packed_mask, random_mask, token_mask
from tests.ops.test_attention import PAPER, pattern_of

BACKENDS = ("reference", "triton")
F32, F16 = torch.float32, torch.float16
# (head dims of query and key, of value), dtype, tokens, format, batch
CASES = {
    "192-128": ((192, 128), F16, 70, "sbhd", 1),
    "128-192": ((128, 192), F16, 40, "bhsd", 1),
    "24-16": ((24, 16), F16, 130, "sbhd", 2),
    "16-72": ((16, 72), F16, 70, "bshd", 2),
    "8-1": ((8, 1), F32, 70, "bhsd", 1),
}


def inputs_of(pattern, dims, dtype, device, length, form="sbhd", batch=1):
    """make_inputs with two head dims, as views of wider tensors."""
    tensors, grad_lse = make_inputs(pattern, length, max(dims), dtype, device, batch, form=form)
    return [tensor[..., :dim] for tensor, dim in zip(tensors, (dims[0], dims[0], dims[1], dims[1]))], grad_lse


@pytest.mark.op
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("nan_scratch")
def test_gradients(case, backend, device):
    dims, dtype, length, form, batch = CASES[case]
    pattern = pattern_of(PAPER, 16, 4, 2)
    tensors, grad_lse = inputs_of(pattern, dims, dtype, device, length, form, batch)
    mask = token_mask(pattern, length, device)
    got, _ = check_against_eager(tensors, grad_lse, pattern, form, mask, 2 * dims[0] ** -0.5, backend=backend)
    assert [tensor.shape[-1] for tensor in got if tensor.ndim == 4] == [dims[1], dims[0], dims[0], dims[1]]


@pytest.mark.op
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dims", [(24, 16), (16, 24)])
@pytest.mark.usefixtures("nan_scratch")
def test_packed_gradients(dims, backend, device):
    pattern, lengths, starts = random_mask(16, 4, 2, 2), [40, 1, 33], [0, 48, 64, 104]
    tensors, grad_lse = inputs_of(pattern, dims, F32, device, 110, "thd")
    borders = [torch.tensor(ends, dtype=torch.int32, device=device) for ends in ([0, 40, 41, 74], starts)]
    packed, mask = PackedSequence(borders[0], 40, borders[1]), packed_mask(pattern, starts, lengths, 110, device)
    got, _ = check_against_eager(tensors, grad_lse, pattern, "thd", mask, 0.3, backend=backend, packed=packed)
    assert not got.out[:, :, ~mask.any(0).any(-1)].any()


@pytest.mark.op
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dims", [(24, 16), (16, 24)])
def test_the_scale_is_that_of_the_queries(dims, backend, device):
    pattern = pattern_of(PAPER, 16, 4, 2)
    (query, key, value, _), _ = inputs_of(pattern, dims, F32, device, 90)
    out = s2_attention(query, key, value, pattern, backend=backend)
    assert torch.equal(out, s2_attention(query, key, value, pattern, softmax_scale=dims[0] ** -0.5, backend=backend))


@pytest.mark.op
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_end_of_a_sequence(backend, device):
    pattern = pattern_of(PAPER, 16, 4, 2)
    (query, key, value, grad), _ = inputs_of(pattern, (24, 16), F32, device, 117)
    leaves = [tensor.detach().requires_grad_() for tensor in (query[100:], key, value)]
    whole = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    end, out = (s2_attention(*tensors, pattern, backend=backend) for tensors in (leaves, whole))
    torch.testing.assert_close(end, out[100:], rtol=0, atol=2e-6)
    of_end, of_whole = torch.autograd.grad(end, leaves, grad[100:]), torch.autograd.grad(out[100:], whole, grad[100:])
    torch.testing.assert_close(of_end, (of_whole[0][100:], *of_whole[1:]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_recomputed_layer_keeps_its_output(backend, device):
    pattern = pattern_of(PAPER, 16, 4, 2)
    (query, key, value, grad), _ = inputs_of(pattern, (24, 16), F32, device, 90)
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    call = make_call(*leaves, pattern, backend=backend)
    run = keep_outputs(lambda *tensors: recompute_attention(*tensors, call, layer_output("layer")))
    with torch.no_grad():
        first = run(*leaves)
    second, plain = run(*leaves), s2_attention(*leaves, pattern, backend=backend)
    assert second.grad_fn.name().startswith("_Known") and torch.equal(first, second) and torch.equal(second, plain)
    assert all(map(torch.equal, torch.autograd.grad(second, leaves, grad), torch.autograd.grad(plain, leaves, grad)))


def test_a_traced_call_has_the_shapes(device):
    pattern = pattern_of(PAPER, 16, 4, 2)
    (query, key, value, grad), _ = inputs_of(pattern, (24, 16), F32, device, 90)
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]

    def attend(*tensors):
        return s2_attention(*tensors, pattern, backend="reference")

    results = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = function(*leaves)
        assert out.shape == (90, 1, 4, 16)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(map(torch.equal, *results))
    assert attend(*(tensor.to("meta") for tensor in leaves)).shape == (90, 1, 4, 16)


@pytest.mark.parametrize(
    "dims, words", [((24, 16), "so value gets zeros from 16 to 24"), ((16, 24), "so both get zeros from 16 to 24")]
)
def test_the_cost_is_printed_once(dims, words, monkeypatch, capsys, device):
    monkeypatch.setattr(printing, "_printed", set())
    pattern = pattern_of(PAPER, 16, 4, 2)
    (query, key, value, _), _ = inputs_of(pattern, dims, F32, device, 20)
    for backend, lines in (("reference", 0), ("triton", 1), ("triton", 0)):
        s2_attention(query, key, value, pattern, backend=backend)
        said = [line for line in capsys.readouterr().err.splitlines() if "head dim" in line]
        assert len(said) == lines and all(words in line for line in said)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dims, words",
    [
        ((32, 24, 16), "shapes do not fit: query [20, 1, 4, 32], key [20, 1, 2, 24]"),
        ((32, 32, 264), "head dim 264; expected at most 256"),
        ((32, 32, 0), "value has shape [20, 1, 2, 0]; expected a head dim of 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(dims, words, backend, device):
    tensors = [torch.zeros(20, 1, heads, dim, device=device) for heads, dim in zip((4, 2, 2), dims)]
    with pytest.raises(ValueError) as error:
        s2_attention(*tensors, pattern_of(PAPER, 16, 4, 2), backend=backend)
    assert words in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("dims", [(192, 128), (128, 192), (64, 128)])
@pytest.mark.usefixtures("nan_scratch")
def test_gradients_in_bf16(dims, backend):
    pattern = pattern_of(((4, 1), (None, 4)), 64, 4, 2)
    tensors, grad_lse = inputs_of(pattern, dims, torch.bfloat16, "cuda", 1028, batch=2)
    mask = token_mask(pattern, 1028, "cuda")
    check_against_eager(tensors, grad_lse, pattern, "sbhd", mask, 2 * dims[0] ** -0.5, backend=backend)
