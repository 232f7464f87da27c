"""Where the time of one training step goes, from the Chrome trace that torch.profiler wrote of it.

    python benchmarks/end_to_end.py --gpus 1 --rows 1p3b-128k-full-keep-s2 --profile     # runs a row, reads its trace
    python benchmarks/step_profile.py runs/end_to_end/ROW/torch_profile/rank-0.json.gz   # reads a trace again

    ms of a step       linear  attention  norms/RoPE      loss  optimizer  communication     other      gaps     total
    ROW                   ...        ...         ...       ...        ...            ...       ...       ...       ...
      other: SwiGLUFunctionBackward 41.2, aten::add_ 20.3, ...
      gaps before: aten::copy_ 12.3, _Linear 2.1, ...

Each moment of the step is counted once. On a GPU it belongs to the kernel that runs then (to the one that started first
where streams overlap), on a CPU to the operator; moments without any are gaps. A kernel's part is decided by its name
and by the operators and autograd functions that launched it:

linear         matrix products of the linear layers, embedding gradients and logits
attention      the core attention: S2's, Transformer Engine's, or the local implementation's products and softmax
norms/RoPE     layer norms and rotary embeddings, where they are kernels of their own
loss           cross entropy, the logits' product excluded
optimizer      the step, the norm of the gradients, copies to and from master weights under the optimizer
communication  NCCL's kernels
other          the rest: activation functions, residual additions, copies; the largest are named below the table
gaps           nothing runs; named by the operator whose work ends them, or by the end of the step
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import refuse

PARTS = ("linear", "attention", "norms/RoPE", "loss", "optimizer", "communication", "other", "gaps")
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
SCOPES = {"cpu_op", "user_annotation"}
# In this order: (part, what its kernel is called, what an operator around the launch is called).
RULES = tuple(
    (part, re.compile(kernel, re.IGNORECASE), re.compile(scope, re.IGNORECASE))
    for part, kernel, scope in (
        ("communication", r"nccl", r"$^"),
        ("loss", r"cross_?entropy", r"CrossEntropy"),
        ("optimizer", r"multi_tensor|adam|l2norm|vector_norm", r"Optimizer\.step|multi_tensor"),
        (
            "attention",
            r"^_?s2_|flash|fmha|sdpa|^cudnn_",
            r"Attention(Backward)?$|FusedAttn|FlashAttn|scaled_dot_product|s2_megatron::|(badd)?bmm|softmax|masked_?fill",
        ),
        ("linear", r"gemm|nvjet|cublas|cutlass|splitk|^aten::(mm|addmm)$", r"^aten::(mm|addmm)$"),
        ("norms/RoPE", r"norm|_ln_|^ln_|rope|rotary", r"norm|rope|rotary"),
    )
)
LARGEST = 6  # of the operators in `other`, and behind gaps, that are named
END = "end of the step"


class Work(NamedTuple):
    """A piece of work: microseconds, its name, and the names of the operators around it, outermost first."""

    start: float
    end: float
    name: str
    scopes: tuple[str, ...]


def part_of(work: Work) -> str:
    for part, kernel, scope in RULES:
        if kernel.search(work.name) or any(map(scope.search, work.scopes)):
            return part
    return "other"


def _cause(work: Work) -> str:
    """What the table calls a piece of work: the autograd function around it, or the operator that launched it."""
    names = [name.removeprefix("autograd::engine::evaluate_function: ") for name in work.scopes]
    functions = [name for name in names if "::" not in name and "#" not in name]
    return (functions or names or [work.name])[-1]


def _stacks(events: Iterable[dict]) -> Iterator[tuple[dict, tuple[str, ...], tuple[tuple[float, float], ...]]]:
    """For the nested events of one thread: (event, names of the scopes around it, when it itself ran and none of the
    events inside it)."""
    open_events: list[tuple[dict, float, tuple[str, ...], list]] = []
    cursor = 0.0

    def close(until: float):
        nonlocal cursor
        while open_events and open_events[-1][1] <= until:
            event, end, scopes, own = open_events.pop()
            if end > cursor:
                own.append((cursor, end))
                cursor = end
            yield event, scopes, tuple(own)

    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start = event["ts"]
        yield from close(start)
        scopes: tuple[str, ...] = ()
        if open_events:
            outer, _, around, own = open_events[-1]
            if start > cursor:
                own.append((cursor, start))
            scopes = (*around, outer["name"])
        cursor = start
        open_events.append((event, start + event["dur"], scopes, []))
    yield from close(float("inf"))


def work_of(trace: dict) -> tuple[tuple[float, float], list[Work]]:
    """((start, end) of the profiled step, all work in it). Raises ValueError where the trace holds no step."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith("ProfilerStep#")
    ]
    if not steps:
        raise ValueError("the trace holds no profiled step (an event named ProfilerStep#N)")
    span = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") in SCOPES | LAUNCHES:
            threads[event["pid"], event["tid"]].append(event)
    launched: dict[int, tuple[str, ...]] = {}
    operators: list[Work] = []
    for nested in threads.values():
        for event, scopes, own in _stacks(nested):
            if event["cat"] in LAUNCHES:
                launched[event.get("args", {}).get("correlation", -1)] = scopes
            elif event["cat"] == "cpu_op":
                operators += [Work(start, end, event["name"], (*scopes, event["name"])) for start, end in own]
    kernels = [event for event in events if event.get("cat") in GPU_WORK]
    if not kernels:
        return span, operators
    work = []
    for event in kernels:
        scopes = launched.get(event.get("args", {}).get("correlation", -2), ())
        work.append(Work(event["ts"], event["ts"] + event["dur"], event["name"], scopes))
    return span, work


def read_trace(path: Path) -> dict:
    """{"step_ms", "parts_ms": {part: milliseconds, which add up to the step}, "other_ms" and "gaps_ms": {name: ms}, the
    largest}.

    Raises ValueError for a file that is no trace of a step."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            trace = json.load(file)
        span, work = work_of(trace)
    except (OSError, EOFError, KeyError, TypeError, json.JSONDecodeError) as problem:
        raise ValueError(f"{path}: not a trace of torch.profiler ({type(problem).__name__}: {problem})") from problem
    covered = span[0]
    parts, other, gaps = dict.fromkeys(PARTS, 0.0), Counter(), Counter()
    for piece in sorted(work):
        start, end = max(piece.start, covered), min(piece.end, span[1])
        if end <= start:
            continue
        gaps[_cause(piece)] += start - covered
        covered = end
        part = part_of(piece)
        parts[part] += end - start
        if part == "other":
            other[_cause(piece)] += end - start
    gaps[END] += span[1] - covered
    parts["gaps"] = gaps.total()
    return dict(
        step_ms=(span[1] - span[0]) / 1e3,
        parts_ms={part: microseconds / 1e3 for part, microseconds in parts.items()},
        other_ms={name: microseconds / 1e3 for name, microseconds in other.most_common(LARGEST)},
        gaps_ms={name: microseconds / 1e3 for name, microseconds in gaps.most_common(LARGEST) if microseconds},
    )


def table(profiles: dict[str, dict]) -> list[str]:
    """Lines of the profiles of read_trace, by the rows' names."""
    heads = (*PARTS, "total")
    width = max(len("ms of a step"), *map(len, profiles))
    columns = [max(len(head), 9) for head in heads]

    def line(name: str, cells: Iterable[str]) -> str:
        return f"{name:<{width}}" + "".join(f"  {cell:>{column}}" for cell, column in zip(cells, columns))

    lines = [line("ms of a step", heads)]
    for name, profile in profiles.items():
        times = [*profile["parts_ms"].values(), profile["step_ms"]]
        lines.append(line(name, [f"{time:.1f}" for time in times]))
        lines.append(line("", [f"{time / profile['step_ms']:.1%}" for time in times]))
        for label, named in (("other", profile["other_ms"]), ("gaps before", profile["gaps_ms"])):
            if named:
                lines.append(f"  {label}: " + ", ".join(f"{what} {time:.1f}" for what, time in named.items()))
    return lines


def main(paths: list[str]) -> None:
    if not paths:
        refuse("no TRACE; expected files of a profiler; python benchmarks/step_profile.py TRACE.json.gz ...")
    try:
        print("\n".join(table({path: read_trace(Path(path)) for path in paths})))
    except ValueError as problem:
        refuse(str(problem))


if __name__ == "__main__":
    main(sys.argv[1:])
