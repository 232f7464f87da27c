"""Which calls may leave PyTorch's dispatcher out, and that all others are right, too: tensors that are not what lies in
their memory, tensors of other classes, modes; and what is cached in one context and used in another."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import BaseTorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from s2_megatron.ops import autograd
from s2_megatron.ops.api import make_call as checked_call
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.layout import Placement, build_layout, layout_for
from s2_megatron.ops.recompute import RecomputeOutputs, recompute_attention
from s2_megatron.patterns.ranges import make_range_pattern
from s2_megatron.testing.oracle import random_mask
from tests.calls import KINDS, equal, make_call, results
from tests.ops.test_attention import PAPER, UNEVEN, pattern_of

PLAIN = torch.ones(2, 2)


class Named(torch.Tensor):
    pass


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def inference_tensor():
    with torch.inference_mode():
        return torch.ones(2)


NOT_PLAIN = {
    "subclass": lambda: PLAIN.as_subclass(Named),
    "dispatching subclass": lambda: TwoTensor(PLAIN, PLAIN),
    "fake": lambda: FakeTensorMode().from_tensor(PLAIN),
    "meta": lambda: PLAIN.to("meta"),
    "negated": lambda: torch._neg_view(PLAIN),
    "imaginary part of a conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "zero": lambda: torch._efficientzerotensor((2, 2)),
    "functional": lambda: torch._to_functional_tensor(PLAIN),
    "sparse": lambda: PLAIN.to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(PLAIN, 1.0, 0, torch.qint8),
}


def test_known_tensors_are_plain():
    for tensor in (PLAIN, PLAIN.T, torch.nn.Parameter(PLAIN), PLAIN.bfloat16(), inference_tensor(), None):
        assert autograd._is_plain(PLAIN, tensor)
    assert torch._C._dispatch_keys(PLAIN).raw_repr() in autograd._PLAIN_KEYS


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_other_tensors_are_not(case):
    other = NOT_PLAIN[case]()
    assert not autograd._is_plain(PLAIN, other) and not autograd._is_plain(other)


def test_modes_and_transforms_are_not_plain():
    found = {}

    def look(name, tensor=PLAIN):
        found[name] = autograd._is_plain(PLAIN, tensor)
        return tensor * 1

    modes = dict(
        dispatch=Passing(), function=BaseTorchFunctionMode(), fake=FakeTensorMode(), device=torch.device("cpu")
    )
    for name, mode in modes.items():
        with mode:
            found[name] = autograd._is_plain(PLAIN)
    torch.vmap(lambda tensor: look("vmap", tensor))(PLAIN)
    torch.vmap(lambda tensor: look("inside of vmap") * tensor)(PLAIN)
    torch.func.grad(lambda tensor: look("grad", tensor).sum())(PLAIN)
    torch.jit.trace(lambda tensor: look("trace", tensor), PLAIN, check_trace=False)
    assert len(found) == 8 and not any(found.values()), found


def test_services_that_need_no_dispatcher():
    """Their results are those without them, and each is given what it is there for."""
    leaves, options = make_call("sbhd", "cpu")
    attend = lambda *qkv: s2_attention(*qkv, **options)  # noqa: E731
    plain, packed = results(attend, leaves), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t)
    with torch.autograd.profiler.profile() as profile, hooks, torch.autograd.detect_anomaly(check_nan=True):
        assert equal(results(attend, leaves), plain)
    assert len(packed) >= 5 and any("Attention" in event.name for event in profile.function_events)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.set_multithreading_enabled(False):
        assert equal(results(attend, leaves), plain)
    with torch.inference_mode():
        assert torch.equal(attend(*leaves)[0], plain[0])


def test_hooks_may_return_what_is_not_plain():
    """The backward looks at what was saved once more."""
    leaves, options = make_call("sbhd", "cpu")
    options["backend"] = "triton"
    plain = results(lambda *qkv: s2_attention(*qkv, **options), leaves)

    def attend(*qkv):
        with torch.autograd.graph.saved_tensors_hooks(torch.neg, torch._neg_view):
            return s2_attention(*qkv, **options)

    assert equal(results(attend, leaves), plain)


def test_deterministic_algorithms_choose_the_deterministic_backward():
    leaves, options = make_call("sbhd", "cpu")
    layout = options["layout"]
    assert not checked_call(*leaves, layout).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert checked_call(*leaves, layout).deterministic
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("kind", ["sbhd", "padded", "mask", "placed", "ending"])
def test_lazily_negated_tensors(kind, backend):
    """Of queries, keys, values and the gradients of out and LSE: bit for bit as the tensors that they stand for."""
    leaves, options = make_call(kind, "cpu", length=48)
    options["backend"] = backend
    out, lse = s2_attention(*leaves, **options)
    gradients = torch.randn_like(out), torch.randn_like(lse)
    expected = out, lse, *torch.autograd.grad((out, lse), leaves, gradients)
    negated = [torch._neg_view(-leaf.detach()).requires_grad_() for leaf in leaves]
    assert all(tensor.is_neg() for tensor in negated)
    out, lse = s2_attention(*negated, **options)
    found = out, lse, *torch.autograd.grad((out, lse), negated, [torch._neg_view(-grad) for grad in gradients])
    assert equal(found, expected)


def test_lazily_negated_tensors_of_a_recomputed_layer():
    leaves, options = make_call("sbhd", "cpu", length=48)
    call = checked_call(*leaves, options["layout"], backend="triton")
    expected = torch.autograd.grad(s2_attention(*leaves, options["layout"], backend="triton").sum(), leaves)
    negated = [torch._neg_view(-leaf.detach()).requires_grad_() for leaf in leaves]
    outputs = RecomputeOutputs()
    with torch.no_grad():
        recompute_attention(*negated, call, outputs.of("layer"))
    outputs.begin()
    out = recompute_attention(*negated, call, outputs.of("layer"))
    assert len(outputs) == 0, "the second pass takes what the first one stored"
    gradients = torch.autograd.grad(out, negated, torch._neg_view(-torch.ones_like(out)))
    assert all(map(torch.equal, gradients, expected))


def test_zero_tensors_have_memory():
    """ZeroTensor has none; the kernels would read address 0."""
    leaves, options = make_call("sbhd", "cpu", length=48)
    out = s2_attention(*leaves, **{**options, "return_lse": False}, backend="triton")
    gradients = torch.autograd.grad(out, leaves, torch._efficientzerotensor(out.shape))
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("context", ["inference", "meta", "fake", "mode", "grad"])
def test_what_is_cached_is_ordinary(context):
    """Index tensors that a first call makes in some context serve all later ones."""
    contexts = dict(
        inference=torch.inference_mode, meta=lambda: torch.device("meta"), fake=FakeTensorMode, mode=Passing
    )
    ranges, uneven, mask = pattern_of(PAPER, 64, 4, 2), pattern_of(UNEVEN, 64, 4, 2), random_mask(64, 4, 2, 2)
    made = []

    def make():
        layouts = [layout_for(ranges), build_layout(uneven), build_layout(mask)]
        for layout in layouts:
            made.extend(layout.tensors)
            made.extend(layout.steps(2).query(False))
            made.extend(item for item in layout.steps(2).key() if isinstance(item, torch.Tensor))
        made.extend([layouts[0].head_order(1), layouts[1].pair_distances])
        placement = Placement.make([0, 1], 2, [[0, 1], [1, 0]], pattern=ranges)
        made.extend([placement.query_block_ids, placement.query_rank, placement.key_slot, *placement.runs])
        made.extend(layouts[0].to(torch.device("meta")).tensors)

    if context == "grad":
        torch.func.grad(lambda tensor: (make(), tensor.sum())[1])(torch.ones(2))
    else:
        with contexts[context]():
            make()
    tensors = [tensor for tensor in made if tensor is not None]
    assert len(tensors) > 20
    for tensor in tensors:
        assert not tensor.is_inference() and not isinstance(tensor, FakeTensor)
        assert not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    assert not any(tensor.is_meta for tensor in tensors[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_training_after_an_evaluation_in_inference_mode(kind):
    leaves, options = make_call(kind, "cpu", length=48)
    expected = results(lambda *qkv: s2_attention(*qkv, **options), leaves)
    options["layout"] = build_layout(options["layout"].pattern)
    with torch.inference_mode():
        s2_attention(*leaves, **options)
    assert equal(results(lambda *qkv: s2_attention(*qkv, **options), leaves), expected)


def test_bf16_is_refused_by_the_interpreter():
    pattern = make_range_pattern(block_size=16, num_heads=2, num_kv_heads=1, ranges=((None, 1),))
    query, key = torch.ones(16, 1, 2, 16).bfloat16(), torch.ones(16, 1, 1, 16).bfloat16()
    with pytest.raises(ValueError, match=r"bfloat16, which Triton's interpreter .* computes wrongly; expected float16"):
        s2_attention(query, key, key, pattern, backend="triton")
