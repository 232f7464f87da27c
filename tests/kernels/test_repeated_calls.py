"""Which calls are made again with addresses alone, and which take the ordinary way each time: copies, tensors that are
given twice, other streams and devices, other settings of Triton. Without a GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from s2_megatron.kernels.hopper import descriptors as hopper_launch
from s2_megatron.kernels.hopper import repeats
from s2_megatron.kernels.hopper.gluon_versions import raw_launch
from s2_megatron.ops import api
from s2_megatron.ops.call import AttentionCall
from s2_megatron.ops.layout import PackedSequence, build_layout
from tests.kernels.test_hopper_launch import BF16, PATTERN, Case, tensors


def test_what_a_call_copies_is_not_made_again(triton_):
    """A gradient that TMA cannot read: its copy lies elsewhere every time."""
    layout, inputs = build_layout(PATTERN), tensors()
    call = AttentionCall(layout, 0.5, backend="gluon")
    out, lse = api._op_forward(*inputs, call)
    api._op_backward(torch.ones(()).to(BF16).expand(out.shape), None, *inputs, out, lse, call)
    assert len(layout.known_forwards) == 1 and not layout.known_backwards


def test_an_lse_that_is_copied_is_not_made_again(triton_):
    """A hook of saved tensors may return it with other strides, of which no kernel knows."""
    layout, inputs = build_layout(PATTERN), tensors()
    call = AttentionCall(layout, 0.5, backend="gluon")
    out, lse = api._op_forward(*inputs, call)
    strided = torch.empty(*lse.shape, 2)[..., 0].copy_(lse)
    api._op_backward(torch.randn_like(out), None, *inputs, out, strided, call)
    assert not layout.known_backwards


def test_a_tensor_that_is_given_twice_is_not_made_again(triton_):
    """Another call of this kind may have two tensors in its place."""
    layout, inputs = build_layout(PATTERN), tensors()
    call = AttentionCall(layout, 0.5, backend="gluon")
    out, lse = api._op_forward(*inputs, call)
    api._op_backward(torch.randn_like(out), lse, *inputs, out, lse, call)
    assert not layout.known_backwards
    api._op_backward(torch.randn_like(out), lse.clone(), *inputs, out, lse, call)
    assert layout.known_backwards


def known_call(device, tensor):
    """(a call of one launch that takes `tensor`, made again; [(stream, addresses)] of its launches)."""
    found = []
    repeat = SimpleNamespace(start=lambda stream, boxes, pointers: found.append((stream, pointers)))
    launched = repeats.Launched(torch.device(device))
    launched.start(SimpleNamespace(start=lambda *given, **constants: repeat), None, [], [tensor], {})
    return launched.again([tensor], torch.empty(1)), found


def test_launches_go_to_the_stream_of_their_call(monkeypatch):
    call, found = known_call("cpu", torch.empty(3))
    given = [torch.empty(3) for _ in range(2)]
    for stream, tensor in zip((5, 7), given):
        monkeypatch.setattr(repeats, "current_stream", lambda: stream)  # noqa: B023 (called in this turn)
        assert call(tensor)
    assert found == [(5, [given[0].data_ptr()]), (7, [given[1].data_ptr()])]


def test_launches_go_to_the_device_of_their_tensors(monkeypatch):
    current = [0]

    @contextmanager
    def device(wanted):
        current.append(wanted.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(repeats, "current_stream", lambda: 10 + current[-1])
    for index in (0, 1):
        call, found = known_call(f"cuda:{index}", torch.empty(3))
        tensor = torch.empty(3)
        assert call(tensor) and found == [(10 + index, [tensor.data_ptr()])] and current == [0]


SETTINGS = [
    (knobs.compilation, "instrumentation_mode", "other"),  # a profiler that looks into kernels
    (knobs.runtime, "debug", True),
    (knobs.runtime, "add_stages_inspection_hook", lambda *given: ("key", "hash")),
]


@pytest.mark.parametrize("place, name, value", SETTINGS, ids=[name for _, name, _ in SETTINGS])
def test_other_settings_of_triton_go_through_triton(triton_, monkeypatch, place, name, value):
    """It may compile something else, which it decides in every launch."""
    layout, inputs = build_layout(PATTERN), tensors()
    call = AttentionCall(layout, 0.5, backend="gluon")

    def ways():
        triton_.made.clear()
        out, lse = api._op_forward(*inputs, call)
        api._op_backward(torch.randn_like(out), None, *inputs, out, lse, call)
        return [without for *_, without in triton_.made]

    first = ways()
    assert not any(first) and all(ways())
    with monkeypatch.context() as other:
        other.setattr(place, name, value)
        assert ways() == first
    known = ways()  # these launches are known, if not as a call of this kind
    assert all(known) and len(known) == len(first)


@pytest.mark.parametrize("run", [
    SimpleNamespace(global_scratch_size=64, profile_scratch_size=0),
    SimpleNamespace(global_scratch_size=0, profile_scratch_size=64),
    SimpleNamespace(global_scratch_size=0, profile_scratch_size=0), None,
], ids=["memory of a launch", "memory of a profiler", "another launcher", "the interpreter"])  # fmt: skip
def test_other_launchers_are_left_to_triton(triton_, monkeypatch, run):
    compiled = run and SimpleNamespace(run=run, src=None, metadata=None)
    assert raw_launch(compiled, (1, 1, 1), [], [torch.empty(1)], []) is None
    monkeypatch.setattr(hopper_launch, "raw_launch", lambda real, *given: raw_launch(compiled, *given))
    case = Case()
    for _ in range(2):
        triton_.made.clear()
        api._op_forward(*tensors(), case.call())
        assert [without for *_, without in triton_.made] == [False]
    assert not case.layout.known_forwards


def test_nothing_is_prepared_for_launches_that_do_not_come_again(triton_, monkeypatch):
    """Those of packed documents, whose tables change from batch to batch."""
    monkeypatch.setattr(hopper_launch, "raw_launch", lambda *given: pytest.fail("prepared"))
    packed = PackedSequence(torch.tensor([0, 100, 200], dtype=torch.int32), 100)
    inputs, call = tensors(form="thd"), Case().call(packed=packed, form="thd")
    out, lse = api._op_forward(*inputs, call)
    api._op_backward(torch.randn_like(out), None, *inputs, out, lse, call)
    assert len(triton_.made) >= 3


def test_packed_and_placed_calls_are_not_made_again(triton_):
    case, packed = Case(), PackedSequence(torch.tensor([0, 100, 200], dtype=torch.int32), 100)
    for inputs, options in ((tensors(form="thd"), dict(packed=packed, form="thd")),
                            (tensors(256), dict(placement=case.placement))):  # fmt: skip
        call = case.call(**options)
        for _ in range(2):
            out, lse = api._op_forward(*inputs, call)
            if "packed" in options:
                api._op_backward(torch.randn_like(out), None, *inputs, out, lse, call)
    assert not case.layout.known_forwards and not case.layout.known_backwards
