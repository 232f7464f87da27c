"""A training run as it was logged: its settings and its series over iterations, joined from the pieces of its resumes.

Names of series are Megatron's TensorBoard tags ("lm loss", "lm loss validation", "grad-norm", "throughput"), whatever
the run was read from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

TRAINING_LOSS = "lm loss"
LEARNING_RATE = "learning-rate"
VALIDATION_LOSS = "lm loss validation"
AXES = ("tokens", "hours", "flops", "dense-flops")
CPU = "CPU"  # as a device


@dataclass(frozen=True)
class Series:
    """steps: int64 [n], strictly ascending iterations. values: float64 [n]."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, values: dict[int, float]) -> Series:
        steps = sorted(values)
        return cls(np.array(steps, dtype=np.int64), np.array([values[step] for step in steps], dtype=np.float64))

    def __len__(self) -> int:
        return len(self.steps)


@dataclass
class Piece:
    """What one process logged, from its start or resume to its end.

    source: where it was read. values: {series: {iteration: value}}. times: {iteration: seconds of the clock}.
    arguments: Megatron's, None when they were not logged. flops_per_token: {"attended": .., "dense": ..}, forward and
    backward, None when they were not logged. device: the name of what computed it, None when it was not logged.
    """

    source: str
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    arguments: dict | None = None
    flops_per_token: dict[str, float] | None = None
    device: str | None = None

    def add(self, series: str, step: int, value: float) -> None:
        """The first value of a step stands: after the last iteration Megatron logs its test set under the name of the
        validation set."""
        self.values.setdefault(series, {}).setdefault(step, value)

    @property
    def steps(self) -> set[int]:
        """The iterations that were trained."""
        return set(self.values.get(TRAINING_LOSS, ()))


@dataclass(frozen=True)
class Run:
    """One training run. remarks: what joining its pieces showed. The cumulative axes have one value per entry of
    `steps`; an axis that was not logged is missing. devices: those of its pieces that are known."""

    name: str
    sources: tuple[str, ...]
    arguments: dict | None
    series: dict[str, Series]
    steps: np.ndarray
    axes: dict[str, np.ndarray]
    remarks: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def axis(self, name: str) -> np.ndarray:
        """The cumulative quantity at every entry of `steps`. Raises ValueError when it was not logged."""
        if name in self.axes:
            return self.axes[name]
        needed = {
            "tokens": "the arguments global_batch_size and seq_length",
            "hours": "the time of each iteration",
            "flops": "FLOPs per token, or --log-throughput with --log-timers-to-tensorboard",
            "dense-flops": "FLOPs per token, or --log-throughput with --log-timers-to-tensorboard",
        }[name]
        raise ValueError(
            f"--x {name}: run {self.name} ({', '.join(self.sources)}) has no such axis; expected {needed} in what was "
            f"logged; use --x with one of: {', '.join(self.axes) or 'none'}"
        )

    def at(self, steps: np.ndarray, axis: str) -> np.ndarray:
        """The axis at other iterations than those of `steps`, interpolated."""
        return np.interp(steps, self.steps, self.axis(axis))


def join(name: str, logs: Sequence[Sequence[Piece]]) -> Run:
    """The run of which every entry of `logs` is a log, in pieces: one per start or resume.

    A piece that starts at iteration s was resumed from the checkpoint of s - 1: what earlier pieces logged from s on
    never reached the weights and is dropped. Of two logs of the run the second fills in what the first does not have.
    Raises ValueError when the first log has no training loss.
    """
    values: dict[str, dict[int, float]] = {}
    elapsed: dict[int, float] = {}
    remarks: list[str] = []
    for pieces in logs:
        joined, durations, repeats = _join_pieces(pieces)
        values = joined | values
        elapsed = elapsed or durations
        remarks += [remark for remark in repeats if remark not in remarks]
    pieces = [piece for log in logs for piece in log]
    sources = tuple(dict.fromkeys(piece.source for piece in pieces))
    series = {name: Series.of(items) for name, items in values.items() if items}
    if TRAINING_LOSS not in series:
        raise ValueError(
            f"run {name} ({', '.join(sources)}): no series named {TRAINING_LOSS!r}; expected the log of a Megatron "
            "training run; "
            "check the path"
        )
    steps = series[TRAINING_LOSS].steps
    arguments = next((piece.arguments for log in logs for piece in reversed(log) if piece.arguments), None)
    flops = next((piece.flops_per_token for log in logs for piece in reversed(log) if piece.flops_per_token), None)
    return Run(
        name=name,
        sources=sources,
        arguments=arguments,
        series=series,
        steps=steps,
        axes=_axes(steps, series, elapsed, arguments, flops),
        remarks=(*remarks, *_gaps(steps)),
        devices=tuple(dict.fromkeys(device for piece in pieces if (device := _device(piece)) is not None)),
    )


def _device(piece: Piece) -> str | None:
    """Logs of older releases do not name it; gloo is the backend of runs on a CPU."""
    on_cpu = (piece.arguments or {}).get("distributed_backend") == "gloo"
    return piece.device or (CPU if on_cpu else None)


def _join_pieces(pieces: Sequence[Piece]) -> tuple[dict[str, dict[int, float]], dict[int, float], list[str]]:
    """(values by series, seconds by iteration, remarks on what was repeated) of one log."""
    trained = _ordered([piece for piece in pieces if piece.steps])
    limits = [min((min(later.steps) for later in trained[index + 1 :]), default=None) for index in range(len(trained))]
    values: dict[str, dict[int, float]] = {}
    elapsed: dict[int, float] = {}
    for piece, limit in zip(trained, limits):
        for series, items in piece.values.items():
            before = {step: value for step, value in items.items() if limit is None or step < limit}
            values.setdefault(series, {}).update(before)
        durations = _durations(piece)
        elapsed.update({step: value for step, value in durations.items() if limit is None or step < limit})
    return values, elapsed, _repeats(trained, limits)


def _ordered(pieces: list[Piece]) -> list[Piece]:
    """By the time of their first iteration, where all have one; otherwise as they were given."""
    if all(piece.times for piece in pieces):
        return sorted(pieces, key=lambda piece: min(piece.times.values()))
    return pieces


def _durations(piece: Piece) -> dict[int, float]:
    """Seconds between each logged iteration and the one before; of the first one, which starts Megatron, the median
    of the others, for as many iterations as usually lie between two that are logged."""
    steps = sorted(piece.steps & set(piece.times))
    if len(steps) < 2:
        return {}
    times = np.array([piece.times[step] for step in steps])
    seconds = np.maximum(np.diff(times), 0)
    first = float(np.median(seconds / np.diff(steps)) * min(steps[0], np.median(np.diff(steps))))
    return {steps[0]: first, **dict(zip(steps[1:], seconds.tolist()))}


def _repeats(pieces: list[Piece], limits: list[int | None]) -> list[str]:
    remarks = []
    for piece, limit in zip(pieces, limits):
        dropped = sorted(step for step in piece.steps if limit is not None and step >= limit)
        if dropped:
            remarks.append(
                f"iterations {_span(dropped)} were repeated after a resume: the later ones count ({piece.source})"
            )
    return remarks


def _gaps(steps: np.ndarray) -> list[str]:
    if len(steps) < 3:
        return []
    distance = np.diff(steps)
    usual = int(np.median(distance))
    return [
        f"gap: nothing is logged between iterations {steps[index]} and {steps[index + 1]}"
        for index in np.flatnonzero(distance > usual)
    ]


def _span(steps: list[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"


def number(arguments: dict | None, name: str) -> float | None:
    """A numeric argument; logs keep arguments as JSON or as text."""
    try:
        return float((arguments or {}).get(name))
    except (TypeError, ValueError):
        return None


def _axes(
    steps: np.ndarray, series: dict[str, Series], elapsed: dict[int, float], arguments: dict | None, flops: dict | None
) -> dict[str, np.ndarray]:
    axes = {}
    samples = _samples(steps, series, arguments)
    length = number(arguments, "seq_length")
    if samples is not None and length is not None:
        axes["tokens"] = samples * length
    # An iteration whose duration is unknown (a piece of one iteration) takes the usual one.
    if elapsed:
        usual = float(np.median(list(elapsed.values())))
        axes["hours"] = np.cumsum([elapsed.get(step, usual) for step in steps.tolist()]) / 3600
    for axis, kind, throughput in (
        ("flops", "attended", "throughput"),
        ("dense-flops", "dense", "throughput-dense-equivalent"),
    ):
        if flops is not None and flops.get(kind) is not None and "tokens" in axes:
            axes[axis] = axes["tokens"] * flops[kind]
        elif throughput in series and "hours" in axes and number(arguments, "world_size") is not None:
            # TFLOP/s/GPU of the steps that logged it, for the seconds that they and those before them took.
            rate = np.interp(steps, series[throughput].steps, series[throughput].values)
            seconds = np.diff(axes["hours"], prepend=0.0) * 3600
            axes[axis] = np.cumsum(rate * 1e12 * number(arguments, "world_size") * seconds)
    return axes


def _samples(steps: np.ndarray, series: dict[str, Series], arguments: dict | None) -> np.ndarray | None:
    """Sequences consumed up to each step: as logged, or from the batch size."""
    if "samples vs steps" in series:
        logged = series["samples vs steps"]
        return np.interp(steps, logged.steps, logged.values)
    if "batch-size" in series:
        logged = series["batch-size"]
        sizes = np.interp(steps, logged.steps, logged.values)
        return np.cumsum(sizes * np.diff(steps, prepend=0))
    batch = number(arguments, "global_batch_size")
    return None if batch is None else steps * batch
