"""No speed of a wrong result: every case is compared with fp64 on a short sequence before anything is timed, then at
full length on samples."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.cases import Case, Tensors
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.call import canonical_view
from s2_megatron.ops.layout import Placement, build_layout
from s2_megatron.testing.oracle import check_against_eager, packed_mask, token_mask

SHORT = 2065  # tokens: whole blocks and a piece
# Norm-wise error of sampled rows against the reference in fp32: about three times what rounding of inputs to matmuls
# and of results gives.
FULL_TOLERANCE = {"bfloat16": 1.5e-2, "float16": 3e-3, "float32": 1e-4}


class WrongResult(Exception):
    """A kernel computed something else; its speed means nothing."""


def short_case(case: Case, length: int = SHORT) -> Case:
    """The case on about `length` tokens, batch 1 or a few documents."""
    if case.documents is None:
        return replace(case, length=min(case.length, length), batch=1)
    documents, left = [], min(length, case.tokens)
    for tokens in case.documents:
        tokens = min(tokens, max(1, length // 3), left)
        if tokens == 0:
            break
        documents.append(tokens)
        left -= tokens
    return replace(case, length=max(documents), documents=tuple(documents))


# (short case, options) -> None: passed, or why it was refused; several cases have the same short one.
_known: dict[tuple, str | None] = {}


def gate(case: Case, options: dict[str, dict], device: str = "cuda", length: int = SHORT) -> dict[str, str]:
    """Compares out, LSE and gradients of s2_attention under each set of options with fp64 on a short sequence: the
    error may be twice that of plain attention in the inputs' dtype. Raises WrongResult. Returns {name: reason} of
    forced backends that refuse the case."""
    small = short_case(case, length)
    keys = {name: (replace(small, name=""), str(chosen)) for name, chosen in options.items()}
    todo = {name: chosen for name, chosen in options.items() if keys[name] not in _known}
    if todo:
        _compare_with_fp64(case.name, small, todo, keys, device)
    return {name: _known[key] for name, key in keys.items() if _known[key] is not None}


def _compare_with_fp64(title: str, small: Case, todo: dict[str, dict], keys: dict[str, tuple], device: str) -> None:
    tensors = Tensors(small, device)
    generator = torch.Generator(device).manual_seed(1)
    grad_lse = torch.randn(1, small.heads, small.tokens, device=device, generator=generator)
    if small.documents is not None:
        starts = tensors.packed.cu_seqlens[:-1].tolist()
        mask = packed_mask(small.pattern, starts, small.documents, small.tokens, device)
    else:
        mask = token_mask(small.pattern, small.length, device)
    inputs = [tensor.detach() for tensor in tensors.inputs] + [tensors.grad]
    extra = {} if tensors.packed is None else {"packed": tensors.packed}
    for name, chosen in todo.items():
        try:
            check_against_eager(
                inputs, grad_lse, small.pattern, small.tensor_format, mask, small.head_dim**-0.5, **extra, **chosen
            )
        except AssertionError as problem:
            raise WrongResult(f"{name} on {title}, {small.tokens} tokens: {problem}") from problem
        except ValueError as problem:
            if chosen["backend"] == "auto":
                raise
            _known[keys[name]] = str(problem)
        else:
            _known[keys[name]] = None


def _error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return ((got.double() - truth.double()).norm() / truth.double().norm()).item()


def _compare(name: str, found: dict[str, tuple[torch.Tensor, torch.Tensor]], tolerance: float) -> None:
    for what, (got, truth) in found.items():
        error = _error(got, truth)
        if not error <= tolerance:  # NaN fails too
            raise WrongResult(f"{name}: {what} is off by {error:.1e} of its norm; at most {tolerance:.1e} expected")


def check_full(case: Case, name: str, runner, samples: int = 4) -> None:
    """Compares a runner's own result on the case as it is timed: out and dQ of a few query blocks, and the sum of dV
    over all keys (the rows of a softmax sum to 1, so it is the sum of dO); of packed documents two whole ones. Raises
    WrongResult."""
    if runner.pattern is None:
        return
    out = runner.forward()
    grads = [canonical_view(grad, runner.tensor_format) for grad in runner.backward(out)]
    out = canonical_view(out.detach(), runner.tensor_format)
    query, key, value, grad_out = (
        canonical_view(tensor.detach(), runner.tensor_format) for tensor in (*runner.inputs, runner.grad)
    )
    tolerance, block = FULL_TOLERANCE[case.dtype], runner.pattern.block_size

    def reference(pattern, *tensors, upstream, **options):
        tensors = [tensor.float().requires_grad_() for tensor in tensors]
        result = s2_attention(
            *tensors, build_layout(pattern, query.device), tensor_format="bhsd", backend="reference", **options
        )
        return result.detach(), torch.autograd.grad(result, tensors, upstream.float())

    if case.documents is not None:
        edges = [0]
        for tokens in case.documents:
            edges.append(edges[-1] + tokens)
        for document in sorted({0, len(case.documents) - 1}):
            span = slice(edges[document], edges[document + 1])
            parts = [tensor[:, :, span] for tensor in (query, key, value)]
            truth, gradients = reference(runner.pattern, *parts, upstream=grad_out[:, :, span])
            pairs = zip(("dQ", "dK", "dV"), (grad[:, :, span] for grad in grads), gradients)
            _compare(
                f"{name} on {case.name}, document {document}",
                {"out": (out[:, :, span], truth), **{what: (mine, right) for what, mine, right in pairs}},
                tolerance,
            )
        return
    ratio = case.heads // case.kv_heads
    whole = case.length // block
    if whole:
        ids = sorted({whole - 1 - index * whole // samples for index in range(samples)})
        rows = torch.cat([torch.arange(index * block, (index + 1) * block) for index in ids]).to(query.device)
        placement = Placement.make(ids, -(-case.length // block), device=query.device)
        for group in range(case.kv_heads):  # one at a time: an fp32 copy of everything need not fit
            heads, own = slice(group * ratio, (group + 1) * ratio), slice(group, group + 1)
            part = runner.pattern.tensor_parallel_slice(group, case.kv_heads)
            truth, (grad_query, _, _) = reference(
                part,
                query[:, heads, rows],
                key[:, own],
                value[:, own],
                upstream=grad_out[:, heads, rows],
                placement=placement,
            )
            found = {"out": (out[:, heads, rows], truth), "dQ": (grads[0][:, heads, rows], grad_query)}
            _compare(f"{name} on {case.name}, KV head {group}", found, tolerance)
    sums = grad_out.sum(2, dtype=torch.float64).unflatten(1, (case.kv_heads, ratio)).sum(2)
    _compare(f"{name} on {case.name}", {"the sum of dV": (grads[2].sum(2, dtype=torch.float64), sums)}, tolerance)
