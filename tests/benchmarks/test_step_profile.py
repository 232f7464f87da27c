"""benchmarks/step_profile.py: parts of a step from a trace with kernels and from one of a CPU, and the table."""

from __future__ import annotations

import gzip
import json

import pytest

from benchmarks import step_profile
from benchmarks.step_profile import PARTS, read_trace, table


def event(category, name, start, duration, thread=1, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return dict(ph="X", cat=category, name=name, ts=start, dur=duration, pid=1, tid=thread, args=args)


STEP = event("user_annotation", "ProfilerStep#5", 0, 1000)


def launch(scopes, kernel, start, duration, correlation, at, stream=7):
    """Operators around a launch at `at`, and the kernel that it starts."""
    found = [event("cpu_op", name, at - 0.1, 1.0) for name in scopes]
    for depth, operator in enumerate(found):
        operator["ts"] += depth * 0.01
        operator["dur"] -= depth * 0.02
    found.append(event("cuda_runtime", "cudaLaunchKernel", at, 0.5, correlation=correlation))
    return [*found, event("kernel", kernel, start, duration, thread=stream, correlation=correlation)]


def written(tmp_path, events, name="rank-0.json.gz"):
    path = tmp_path / name
    with gzip.open(path, "wt") if name.endswith("gz") else path.open("w") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_parts_of_a_step_on_a_gpu(tmp_path):
    events = [STEP]
    for index, (scopes, kernel, duration) in enumerate([
        (["_Linear"], "nvjet_hsh_256x128", 200),
        (["AttentionBackward"], "s2_hopper_backward_kernel", 150),
        (["FusedAttnFunc"], "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 40),
        (["_LayerNormLinear"], "void transformer_engine::rmsnorm_fwd_tuned_kernel", 30),
        (["FusedRoPEFunc"], "void fused_rope_forward_kernel", 20),
        (["_VocabParallelCrossEntropy", "aten::exp"], "void at::native::vectorized_elementwise_kernel", 60),
        (["Optimizer.step#FusedAdam.step"], "multi_tensor_apply_kernel", 70),
        ([], "ncclDevKernel_AllGather", 10),
        (["SwiGLUFunction", "aten::mul"], "triton_poi_fused_mul", 50),
        (["aten::add_"], "void at::native::vectorized_elementwise_kernel", 25),
    ]):  # fmt: skip
        at = 10 + 20 * index
        start = 100 + sum(kernel["dur"] for kernel in events if kernel["cat"] == "kernel")
        events += launch(scopes, kernel, start, duration, index, at)
    # On another stream, half of it beside the last kernel: each moment counts once.
    end = max(kernel["ts"] + kernel["dur"] for kernel in events if kernel["cat"] == "kernel")
    events += launch(["aten::add_"], "elementwise", end - 10, 20, 99, 990, stream=8)
    profile = read_trace(written(tmp_path, events))
    assert profile["step_ms"] == 1.0
    microseconds = {part: round(1000 * time, 6) for part, time in profile["parts_ms"].items()}
    assert microseconds == {
        "linear": 200, "attention": 190, "norms/RoPE": 50, "loss": 60, "optimizer": 70, "communication": 10,
        "other": 85, "gaps": 335,
    }  # fmt: skip
    assert sum(microseconds.values()) == 1000 and tuple(microseconds) == PARTS
    assert list(profile["other_ms"]) == ["SwiGLUFunction", "aten::add_"]
    # Nothing runs before the first kernel and after the last.
    assert {name: round(1000 * time) for name, time in profile["gaps_ms"].items()} == {
        "end of the step": 235,
        "_Linear": 100,
    }
    assert "  gaps before: end of the step 0.2, _Linear 0.1" in table({"a": profile})


def test_parts_of_a_step_on_a_cpu(tmp_path):
    """No kernels: an operator's own time, without that of the operators inside it."""
    events = [
        STEP,
        event("cpu_op", "aten::linear", 100, 300),
        event("cpu_op", "aten::mm", 150, 200),
        event("cpu_op", "autograd::engine::evaluate_function: _VocabParallelCrossEntropyBackward", 500, 100),
        event("cpu_op", "aten::mul_", 520, 50),
        event("cpu_op", "aten::bmm", 700, 100),
    ]
    parts = read_trace(written(tmp_path, events, "plain.json"))["parts_ms"]
    assert {part: round(1000 * time) for part, time in parts.items() if time} == {
        "linear": 200, "other": 100, "loss": 100, "attention": 100, "gaps": 500,
    }  # fmt: skip


def test_a_table_of_two_rows(tmp_path):
    profile = read_trace(written(tmp_path, [STEP, event("cpu_op", "aten::mm", 0, 250)]))
    lines = table({"a": profile, "a-longer-name": profile})
    assert lines[0].split() == ["ms", "of", "a", "step", *PARTS, "total"]
    assert lines[1].split() == ["a", "0.2", "0.0", "0.0", "0.0", "0.0", "0.0", "0.0", "0.8", "1.0"]
    assert lines[2].split()[0] == "25.0%" and lines[2].split()[-1] == "100.0%"


@pytest.mark.parametrize("content, expected", [
    (b"", "not a trace"), (b"{}", "not a trace"), (b"[1]", "not a trace"),
    (b'{"traceEvents": []}', "no profiled step"),
])  # fmt: skip
def test_what_is_no_trace_is_said(tmp_path, capsys, content, expected):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    for paths, words in (([path], expected), ([tmp_path / "none.json.gz"], "No such file"), ([], "no TRACE")):
        with pytest.raises(SystemExit, match="2"):
            step_profile.main([*map(str, paths)])
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error
