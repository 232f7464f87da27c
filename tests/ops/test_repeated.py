"""ops/repeated.py: a call is made again with addresses alone only when it is of the same kind in everything that
checks, the choice of kernels and launches depend on."""

import pytest
import torch

from s2_megatron.ops import parts, repeated
from s2_megatron.ops.api import attend, s2_attention
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import PackedSequence, Placement, build_layout
from s2_megatron.patterns.ranges import make_range_pattern

PATTERN = make_range_pattern(block_size=16, num_heads=4, num_kv_heads=2, ranges=((1, 1), (None, 2)))
SHAPE = (64, 1, 4, 16)


def tensor(shape=SHAPE, dtype=torch.float32, wider=0, shift=0, device="cpu"):
    memory = torch.empty(shift + torch.Size(shape[:-1]).numel() * (shape[-1] + wider), dtype=dtype, device=device)
    return memory[shift:].view(*shape[:-1], shape[-1] + wider)[..., : shape[-1]]


def test_a_kind_is_everything_that_a_launch_depends_on():
    one = tensor()
    assert repeated.kind_of(one) == repeated.kind_of(tensor()) and repeated.kind_of(None) is None
    others = [
        tensor((48, *SHAPE[1:])),
        tensor(dtype=torch.float16),
        tensor(wider=4),
        tensor(shift=1),
        tensor(device="meta"),
        torch.empty_strided(SHAPE, (64, 7, 16, 1)),  # of a batch of 1
    ]
    kinds = [repeated.kind_of(other) for other in (one, *others)]
    assert len(set(kinds)) == len(kinds)


def test_settings_belong_to_a_kind():
    call = AttentionCall(build_layout(PATTERN), 0.25, "sbhd", None, None, "gluon", False)
    options = [
        dict(), dict(softmax_scale=0.5), dict(tensor_format="bshd"), dict(backend="triton"), dict(deterministic=True),
    ]  # fmt: skip
    kinds = {repeated.kind_of_call(call._replace(**changed), tensor()) for changed in options}
    assert len(kinds) == len(options) and None not in kinds
    packed = PackedSequence(torch.tensor([0, 64], dtype=torch.int32), 64)
    for changed in (dict(packed=packed), dict(placement=Placement.make(range(4), 4))):
        assert repeated.kind_of_call(call._replace(**changed), tensor()) is None
    # A gradient of LSE that is there, or not, is another kind of backward.
    assert repeated.kind_of_call(call, tensor(), None) != repeated.kind_of_call(call, tensor(), tensor())


class Quick:
    """A backend that computes nothing the first time, and can do it again, as long as it `can`. again: the tensors of
    all calls made again."""

    def __init__(self):
        self.first, self.again, self.can = [], [], True

    def forward(self, query, key, value, out, lse, call, initial=None, kv_heads=None, more=None):
        self.first.append("forward")
        return self.repeat

    def backward(self, *given):
        self.first.append("backward")
        return self.repeat

    def repeat(self, *given) -> bool:
        if self.can:
            self.again.append(given)
        return self.can


@pytest.fixture
def quick(monkeypatch):
    backend = Quick()
    monkeypatch.setattr(parts, "_implementation", lambda name: backend)
    return backend


def inputs(wider=0):
    return [tensor((64, 1, heads, 16), wider=wider).requires_grad_() for heads in (4, 2, 2)]


def test_a_call_of_a_known_kind_is_made_again_with_its_own_tensors(quick):
    layout = build_layout(PATTERN)
    for count in range(3):
        query, key, value = inputs()
        out, lse = s2_attention(query, key, value, layout, return_lse=True)
        grad = torch.randn_like(out)
        grads = torch.autograd.grad(out, (query, key, value), grad)
        assert quick.first == ["forward", "backward"] and len(quick.again) == 2 * count
        if count == 0:
            continue
        forward, backward = quick.again[-2:]
        assert all(map(same_memory, forward, (query, key, value, out, lse)))
        assert all(map(same_memory, backward, (grad, None, query, key, value, out, lse, *grads)))
        assert lse.shape == (1, 4, 64) and lse.dtype == torch.float32
        assert all(
            made.shape == given.shape and made.is_contiguous() for made, given in zip(grads, (query, key, value))
        )
    s2_attention(*inputs(wider=4), layout)
    assert quick.first == ["forward", "backward", "forward"]
    s2_attention(*inputs(), build_layout(PATTERN))  # what is known is a layout's own
    assert quick.first[3:] == ["forward"]


def same_memory(one, other) -> bool:
    return one is other if other is None else (one.data_ptr(), one.stride()) == (other.data_ptr(), other.stride())


def test_strides_that_saved_tensors_come_back_with_count(quick):
    """A hook of saved tensors (offload) may return them with others."""
    layout = build_layout(PATTERN)
    for pack, expected in ((lambda t: t, 1), (lambda t: t, 1), (lambda t: tensor(t.shape, t.dtype, wider=4), 2)):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = s2_attention(*inputs(), layout)
        out.sum().backward()
        assert quick.first.count("backward") == expected


def test_what_can_no_longer_be_made_again_is_computed_as_the_first_time(quick):
    layout = build_layout(PATTERN)
    for quick.can in (True, True, False, True):
        s2_attention(*inputs(), layout).sum().backward()
    assert quick.first == ["forward", "backward"] * 2 and len(quick.again) == 4


def test_a_copy_of_the_gradient_is_not_made_again(quick, monkeypatch):
    """Its strides do not fit into 32 bits, and would be taken for those of the copy."""
    monkeypatch.setattr(parts, "addressable", lambda view: False)
    layout = build_layout(PATTERN)
    for count in (1, 2):
        out, _ = attend(*inputs(), AttentionCall(layout, 0.5, backend="gluon"))
        out.sum().backward()
        assert quick.first.count("backward") == count
    assert layout.known_forwards and not layout.known_backwards


def test_another_thread_may_forget_what_is_known(quick, monkeypatch):
    class Forgets(dict):
        def __contains__(self, kind):
            found = super().__contains__(kind)
            self.clear()
            return found

    layout = build_layout(PATTERN)
    for name in ("known_forwards", "known_backwards"):
        object.__setattr__(layout, name, Forgets())
    for _ in range(2):
        s2_attention(*inputs(), layout).sum().backward()
    assert quick.first == ["forward", "backward"] and len(quick.again) == 2


def test_compiled_calls_are_made_again_with_their_own_tensors(quick):
    layout = build_layout(PATTERN)

    def attend(query, key, value):
        return s2_attention(query, key, value, layout, return_lse=True)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for count in range(3):
        given = inputs()
        out, lse = compiled(*given)
        grads = torch.autograd.grad(out.sum(), given)
        assert quick.first == ["forward", "backward"] and len(quick.again) == 2 * count
        if count:
            forward, backward = quick.again[-2:]
            assert all(map(same_memory, forward, (*given, out, lse)))
            assert all(map(same_memory, backward[2:], (*given, out, lse, *grads)))
    torch._dynamo.reset()


def test_not_more_kinds_are_remembered_than_fit(quick, monkeypatch):
    monkeypatch.setattr(repeated, "MOST_KINDS", 3)
    layout = build_layout(PATTERN)
    for scale in range(1, 9):
        attend(*inputs(), AttentionCall(layout, 1 / scale, backend="gluon"))
        assert 0 < len(layout.known_forwards) <= 3


def test_what_no_backend_can_do_again_is_not_remembered():
    layout = build_layout(PATTERN)
    for _ in range(2):
        s2_attention(*inputs(), layout).sum().backward()  # on the reference
    assert not layout.known_forwards and not layout.known_backwards
