"""The op under torch.compile and torch.library's checks: one graph, forward and backward, with the eager results bit
for bit."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from s2_megatron.ops import stored_layouts
from s2_megatron.ops.api import s2_attention
from s2_megatron.ops.autograd import _taken_apart
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import build_layout
from s2_megatron.ops.stored_layouts import layout_of, text_of_layout
from s2_megatron.testing.oracle import random_mask
from tests.calls import KINDS, equal, make_call, results
from tests.ops.test_attention import PAPER, pattern_of

BLOCK = 16


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


BACKENDS_OF_COMPILE = ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


@pytest.mark.op
@pytest.mark.parametrize("compiler", BACKENDS_OF_COMPILE)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_is_eager_bit_for_bit(kind, compiler, device):
    leaves, options = make_call(kind, device)

    def attend(query, key, value):
        return s2_attention(query, key, value, **options)

    assert equal(results(torch.compile(attend, backend=compiler, fullgraph=True), leaves), results(attend, leaves))


@pytest.mark.parametrize("kind", KINDS)
def test_who_looks_on_sees_the_operator(kind):
    """Plain calls leave the dispatcher out; a mode gets the operators, with the same results bit for bit."""
    leaves, options = make_call(kind, "cpu")

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(str(func))
            return func(*args, **(kwargs or {}))

    def attend(query, key, value):
        return s2_attention(query, key, value, **options)

    names = set()
    plain = results(attend, leaves)
    with Seen():
        assert equal(results(attend, leaves), plain)
    assert {"s2_megatron.attention.default", "s2_megatron.attention_backward.default"} <= names
    names.clear()
    total = attend(*leaves)[0].sum()
    with Seen():
        gradients = torch.autograd.grad(total, leaves)
    assert "s2_megatron.attention_backward.default" in names
    assert all(map(torch.equal, gradients, torch.autograd.grad(attend(*leaves)[0].sum(), leaves)))


def test_compiled_autograd_takes_the_backward():
    leaves, options = make_call("sbhd", "cpu")

    def gradients():
        for leaf in leaves:
            leaf.grad = None
        s2_attention(*leaves, **options)[0].sum().backward()
        return [leaf.grad.clone() for leaf in leaves]

    eager = gradients()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        assert all(map(torch.equal, gradients(), eager))


def test_meta_tensors_have_the_shapes():
    leaves, options = make_call("sbhd", "cpu")
    out, lse = s2_attention(*(leaf.detach().to("meta") for leaf in leaves), **options)
    assert out.is_meta and out.shape == leaves[0].shape and lse.dtype == torch.float32


def test_a_transform_sees_the_operator():
    """torch.vmap calls it once for each; what left the dispatcher out would take the batched tensors for plain ones."""
    leaves, options = make_call("sbhd", "cpu")
    pairs = [(leaf.detach(), leaf.detach().flip(0)) for leaf in leaves]
    both = torch.vmap(lambda *tensors: s2_attention(*tensors, **options)[0])(*(torch.stack(pair) for pair in pairs))
    for number in range(2):
        assert torch.equal(both[number], s2_attention(*(pair[number] for pair in pairs), **options)[0])


@pytest.mark.parametrize("kind", ["sbhd", "thd", "ending"])
def test_one_graph_for_all_lengths_and_documents(kind):
    """Dynamic lengths, and packed batches with other documents: two graphs at most (the number of documents may be
    1)."""
    counter = CompileCounterWithBackend("aot_eager")

    def attend(query, key, value, options):
        return s2_attention(query, key, value, **options)

    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    _, fixed = make_call(kind, "cpu")
    for length in (80, 96, 100, 119):
        leaves, options = make_call(kind, "cpu", length)
        options["layout"] = fixed["layout"]
        call = [lambda q, k, v, f=f, o=options: f(q, k, v, o) for f in (compiled, attend)]
        assert equal(results(call[0], leaves), results(call[1], leaves)), length
    assert counter.frame_count <= 2


def test_another_layout_is_another_result():
    """A graph is not used for a layout that it was not made for."""
    leaves, options = make_call("sbhd", "cpu")
    others = [options["layout"], build_layout(pattern_of(((1, 1), (None, 2)), BLOCK, 4, 2))]

    def attend(query, key, value, layout):
        return s2_attention(query, key, value, **{**options, "layout": layout})

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found = [results(lambda *qkv, layout=layout: compiled(*qkv, layout), leaves) for layout in others]
    assert not torch.equal(found[0][0], found[1][0])
    for layout, result in zip(others, found):
        assert equal(result, results(lambda *qkv, layout=layout: attend(*qkv, layout), leaves))


def test_another_mask_is_another_result():
    """Handed over as patterns, whose layouts are looked up while a graph is traced."""
    leaves, options = make_call("mask", "cpu")
    compiled = torch.compile(lambda *qkv, layout: s2_attention(*qkv, **{**options, "layout": layout}), backend="eager")
    for seed in range(3):
        pattern = random_mask(BLOCK, 4, 2, 2, seed=seed)
        eager = results(lambda *qkv, p=pattern: s2_attention(*qkv, **{**options, "layout": p}), leaves)
        assert equal(results(lambda *qkv, p=pattern: compiled(*qkv, layout=p), leaves), eager)


@pytest.fixture
def another_process(monkeypatch):
    """another_process(): from now on no layout is known but those made later."""

    def forget():
        monkeypatch.setattr(stored_layouts, "_by_text", weakref.WeakValueDictionary())
        monkeypatch.setattr(stored_layouts, "_kept", {})

    return forget


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["sbhd", "mask", "padded", "placed"])
def test_an_exported_program_holds_its_layout(kind, strict, tmp_path, another_process):
    """It is loaded where other layouts were made, and computes with its own."""
    leaves, options = make_call(kind, "cpu")
    tensors = [leaf.detach() for leaf in leaves]

    class Attends(torch.nn.Module):
        def forward(self, query, key, value):
            return s2_attention(query, key, value, **options)

    torch.export.save(torch.export.export(Attends(), tuple(tensors), strict=strict), tmp_path / "program.pt2")
    another_process()
    others = [build_layout(pattern_of(((near, 1), (None, 2)), BLOCK, 4, 2)) for near in range(1, 9)]
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    assert all(map(torch.equal, loaded(*tensors), s2_attention(*tensors, **options))) and others


def test_a_program_runs_on_another_device_than_it_was_traced_on():
    """What was chosen for a GPU is chosen again for the CPU."""
    leaves, options = make_call("sbhd", "cpu")
    call = AttentionCall(options["layout"], 0.25, backend="auto")
    found = torch.ops.s2_megatron.attention(*leaves, *_taken_apart(call))
    assert torch.equal(found[0], s2_attention(*leaves, options["layout"], softmax_scale=0.25))


@pytest.mark.parametrize(
    "text", ["", "7", "[]", '{"format":2}', '{"format":1,"kind":"ranges"}', '{"format":1,"kind":"x","heads":[]}']
)
def test_a_text_that_is_no_layout_is_refused(text):
    leaves, options = make_call("sbhd", "cpu")
    arguments = list(_taken_apart(AttentionCall(options["layout"], 0.25)))
    arguments[5] = text
    with pytest.raises(ValueError, match=r"the stored layout .* cannot be read .*; export the program again"):
        torch.ops.s2_megatron.attention(*leaves, *arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_is_what_its_text_says(kind, another_process):
    _, options = make_call(kind, "cpu")
    layout = options["layout"]
    another_process()
    text = text_of_layout(layout.handle)
    assert layout_of(text) is layout
    another_process()
    other = layout_of(text)
    assert other is not layout and layout_of(text) is other and text_of_layout(other.handle) == text
    assert all(map(torch.equal, other.tensors, layout.tensors)) and other.tile_blocks == layout.tile_blocks


def test_a_graph_keeps_its_layout():
    """The layout may be dropped between the forward and the backward of a compiled call."""
    leaves, options = make_call("sbhd", "cpu")
    expected = results(lambda *qkv: s2_attention(*qkv, **options), leaves)

    def attend(query, key, value, layout):
        return s2_attention(query, key, value, **{**options, "layout": layout})

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    layout = build_layout(options["layout"].pattern)
    out, lse = compiled(*leaves, layout)
    text = text_of_layout(layout.handle)
    del layout
    gc.collect()
    assert text in stored_layouts._kept
    grads = torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)
    assert equal((out, lse, *grads), expected)


def test_eager_calls_keep_nothing():
    leaves, options = make_call("padded", "cpu")
    before = len(stored_layouts._kept)
    layout = build_layout(options["layout"].pattern)
    out = s2_attention(*leaves, **{**options, "layout": layout})[0]
    gone = [weakref.ref(item) for item in (layout, options["packed"].cu_seqlens)]
    del layout, options
    gc.collect()
    assert gone[0]() is not None, "the backward still needs it"
    out.sum().backward()
    del out
    gc.collect()
    assert [item() for item in gone] == [None, None]
    assert len(stored_layouts._kept) == before


def test_copies_of_a_layout_are_layouts_of_their_own():
    layout = build_layout(pattern_of(PAPER, BLOCK, 4, 2))
    for other in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert other.handle != layout.handle
        assert torch.equal(other.ranges, layout.ranges)
    elsewhere = layout.to("meta")
    assert elsewhere is layout.to("meta") and elsewhere.device.type == "meta"


@pytest.mark.op
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind, device):
    leaves, options = make_call(kind, device)
    backend = "reference" if device == "cpu" else "triton"
    call = AttentionCall(
        options["layout"],
        0.3,
        options["tensor_format"],
        options.get("packed"),
        options.get("placement"),
        backend,
        False,
    )
    arguments = _taken_apart(call)
    torch.library.opcheck(torch.ops.s2_megatron.attention.default, (*leaves, *arguments))
    out, lse = torch.ops.s2_megatron.attention(*leaves, *arguments)
    saved = [tensor.detach() for tensor in (*leaves, out, lse)]
    for grads in ((saved[3], saved[4]), (saved[3], None), (None, saved[4])):
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(
            torch.ops.s2_megatron.attention_backward.default, (*grads, *saved, *arguments), test_utils=checks
        )
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # opcheck does not compare strides
        fake = [mode.from_tensor(tensor) for tensor in saved]
        promised = (
            *torch.ops.s2_megatron.attention(*fake[:3], *arguments),
            *torch.ops.s2_megatron.attention_backward(fake[3], fake[4], *fake, *arguments),
        )
    real = (out, lse, *torch.ops.s2_megatron.attention_backward(saved[3], saved[4], *saved, *arguments))
    assert [tensor.stride() for tensor in promised] == [tensor.stride() for tensor in real]


@pytest.mark.parametrize("used", ["out", "lse", "neither"])
def test_compiled_with_one_output(used):
    leaves, options = make_call("sbhd", "cpu")

    def attend(query, key, value):
        out, lse = s2_attention(query, key, value, **options)
        return {"out": out.sin().sum(), "lse": lse.cos().sum(), "neither": (query * key.sum() * value.sum()).sum()}[
            used
        ]

    one, two = (
        torch.autograd.grad(f(*leaves), leaves)
        for f in (torch.compile(attend, backend="aot_eager", fullgraph=True), attend)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, two))


def test_a_second_derivative_raises_when_compiled():
    leaves, options = make_call("sbhd", "cpu")
    compiled = torch.compile(lambda *qkv: s2_attention(*qkv, **options)[0], backend="aot_eager", fullgraph=True)
    (grad,) = torch.autograd.grad(compiled(*leaves).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.square().sum().backward()


def test_bad_input_is_refused_when_compiled():
    leaves, options = make_call("sbhd", "cpu")
    compiled = torch.compile(
        lambda *qkv, **more: s2_attention(*qkv, **{**options, **more}), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(ValueError, match="query has 4 heads and key 1"):
        compiled(leaves[0], leaves[1][:, :, :1], leaves[2][:, :, :1])
    with pytest.raises(Exception, match="expected one of auto"):
        compiled(*leaves, backend="cuda")


def test_the_backend_is_printed_once_by_a_compiled_call(capsys, monkeypatch):
    from s2_megatron import printing

    monkeypatch.setattr(printing, "_printed", set())
    leaves, options = make_call("sbhd", "cpu")
    compiled = torch.compile(lambda *qkv: s2_attention(*qkv, **options)[0], backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(*leaves)
    assert capsys.readouterr().err.count("S2 attention backend: reference") == 1
