"""The op under CUDA's tools on a GPU: no waiting for the device, capture in a graph, memory, repeats under load, the
first call."""

from pathlib import Path

import pytest
import torch

from s2_megatron.ops.api import BACKENDS, s2_attention
from s2_megatron.ops.layout import build_layout
from s2_megatron.patterns.ranges import make_range_pattern
from tests.calls import KINDS, computes, make_call, results
from tests.kernels.first_call import first_call
from tests.kernels.repeats import count_differences, repeat
from tests.processes import found_by

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
KERNELS = [name for name in BACKENDS if name not in ("auto", "reference") and (name != "gluon" or HOPPER)]
CALLS = [(kind, backend) for backend in KERNELS for kind in KINDS if computes(backend, kind)]
MIB = 2**20


def attend(options, **more):
    return lambda *leaves: s2_attention(*leaves, **options, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("kind, backend", CALLS)
def test_never_waits_for_the_device(kind, backend):
    leaves, options = make_call(kind, "cuda", 520, 64, 64, torch.bfloat16)
    results(attend(options, backend=backend), leaves)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for deterministic in (False, True):
            results(attend(options, backend=backend, deterministic=deterministic), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_check_for_waiting_sees_it():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("kind, backend", CALLS)
def test_captured_in_a_graph(kind, backend, monkeypatch):
    """Replays with other inputs, and other documents of the same number, are the eager results bit for bit. Also of
    columns in parts."""
    if backend == "gluon":
        monkeypatch.setattr("s2_megatron.kernels.hopper.launch.PART_STEPS", 4)
    leaves, options = make_call(kind, "cuda", 520, 64, 64, torch.bfloat16)
    function = attend(options, backend=backend, deterministic=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            results(function, leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(function, leaves)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn(leaf.shape, device="cuda"))
        if kind == "thd":
            ends = torch.tensor([0, 100 + seed, 300, 520 - seed], dtype=torch.int32, device="cuda")
            options["packed"].cu_seqlens.copy_(ends)
        graph.replay()
        for name, one, two in zip(("out", "lse", "dq", "dk", "dv"), captured, results(function, leaves)):
            assert torch.equal(one, two), name


@pytest.mark.gpu
@pytest.mark.parametrize("backend", KERNELS)
def test_compiled_and_on_other_streams(backend):
    """Calls of a known kind are made again from compiled code too, on the stream that is current then."""
    leaves, options = make_call("sbhd", "cuda", 520, 64, 64, torch.bfloat16)
    eager = attend(options, backend=backend, deterministic=True)
    compiled = torch.compile(lambda query, key, value: eager(query, key, value), fullgraph=True)
    expected = results(eager, leaves)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = results(compiled, leaves), results(eager, leaves)
        torch.cuda.synchronize()
        assert all(torch.equal(one, two) for got in found for one, two in zip(got, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_beyond_the_results(deterministic, backend):
    """At most one fp32 dQ, one fp32 per query row and head, and 16 MiB beyond q, k, v, out, LSE and the gradients."""
    pattern = make_range_pattern(block_size=64, num_heads=32, num_kv_heads=8, ranges=((16, 1), (None, 16)))
    layout, rows = build_layout(pattern, "cuda"), 32768

    def run():
        fused = torch.randn(rows, 1, 48, 128, device="cuda", dtype=torch.bfloat16)
        leaves = [piece.detach().requires_grad_() for piece in fused.split([32, 8, 8], 2)]
        grad_out = torch.randn(rows, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = s2_attention(*leaves, layout, backend=backend, deterministic=deterministic, return_lse=True)
        after_forward = torch.cuda.max_memory_allocated() - before - out.nbytes - lse.nbytes
        grads = torch.autograd.grad(out, leaves, grad_out)
        peak = torch.cuda.max_memory_allocated() - before
        return after_forward, peak - out.nbytes - lse.nbytes - sum(grad.nbytes for grad in grads)

    run()  # what libraries keep once
    forward, backward = run()
    assert forward <= 16 * MIB, f"{forward / MIB:.1f} MiB in the forward"
    limit = 4 * rows * 32 * 128 + 4 * rows * 32 + 16 * MIB
    assert backward <= limit, f"{backward / MIB:.1f} MiB, allowed {limit / MIB:.1f}"


@pytest.mark.gpu
@pytest.mark.parametrize("kind, backend", [call for call in CALLS if call[0] in ("sbhd", "padded", "mask")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_repeats_under_load(kind, deterministic, backend):
    """`python tests/kernels/repeats.py` does a thousand."""
    assert set(repeat(kind, 50, "cuda", backend, deterministic).values()) == {0}


def test_repeats_are_compared():
    """The comparison sees one bit in one repeat."""
    numbers = iter(range(9))

    def step():
        other = torch.zeros(5)
        other[3] = -0.0 if next(numbers) == 6 else 0.0
        return {"same": torch.ones(2), "other": other}

    assert count_differences(step, 8, lambda: None) == {"same": 0, "other": 1}
    assert set(repeat("padded", 2, "cpu", "reference", True, 100, 16, 32, torch.float32).values()) == {0}


@pytest.mark.gpu
def test_first_call(tmp_path):
    """To the first result of a new shape: 60 s with an empty compile cache, 5 s with a warm one."""
    script = Path(__file__).with_name("first_call.py")
    for limit in (60, 5):
        seconds = found_by(script, TRITON_CACHE_DIR=str(tmp_path))
        assert max(seconds.values()) <= limit, seconds


def test_first_call_is_timed():
    assert 0 < first_call("padded", 100, 32, "cpu") < 60
