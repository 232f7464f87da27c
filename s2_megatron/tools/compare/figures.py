"""The pictures of a comparison, each drawn into a Matplotlib axis: once for the page, once for the PNG."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from s2_megatron.config.sparsity import joined_layers
from s2_megatron.config.stored import head_of_group
from s2_megatron.patterns.picture import MOST_BLOCKS, draw_patterns
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.tools.compare.measure import Comparison, smoothed, smoothed_steps
from s2_megatron.tools.compare.runs import TRAINING_LOSS, VALIDATION_LOSS, Run, number
from s2_megatron.tools.compare.settings import DENSE, Arm
from s2_megatron.tools.compare.table import AXIS_NAMES
from s2_megatron.tools.outputs import write_figure

COLOURS = ["#333333", "#2f6db3", "#e58a2e", "#1e8449", "#7d3c98", "#c0392b", "#16a085", "#b7950b", "#8c5a3c", "#d16ba5"]
MAX_POINTS = 1500  # of a line: more are not seen, and make the page heavy
POSITION = re.compile(r"lm loss by position/(\d+)-(\d+)( validation)?")


def _thinned(steps: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    drawn = (
        np.unique(np.linspace(0, len(steps) - 1, MAX_POINTS).astype(int)) if len(steps) > MAX_POINTS else slice(None)
    )
    return [column[drawn] for column in (steps, *columns)]


def _runs(comparison: Comparison):
    for index, result in enumerate(comparison.results):
        for run in result.arm.runs:
            label = result.arm.name if run is result.arm.runs[0] else None
            yield run, COLOURS[index % len(COLOURS)], label


def _ignore_start(axis, curves: list[np.ndarray]) -> None:
    """Scale to what follows the first tenth, in which a loss falls from its untrained value."""
    late = [curve[len(curve) // 10 :] for curve in curves if len(curve)]
    if late:
        low, high = min(map(np.min, late)), max(map(np.max, late))
        margin = 0.05 * (high - low) or 0.01
        axis.set_ylim(low - margin, high + margin)


def draw_loss(axis, comparison: Comparison, x: str) -> bool:
    curves = []
    for run, colour, label in _runs(comparison):
        places, raw, mean = _thinned(run.axis(x), run.series[TRAINING_LOSS].values, smoothed(run))
        axis.plot(places, raw, color=colour, alpha=0.2, linewidth=0.6)
        axis.plot(places, mean, color=colour, linewidth=1.5, label=label)
        curves.append(mean)
    _ignore_start(axis, curves)
    axis.set_title("training loss, raw and smoothed")
    return True


def draw_difference(axis, comparison: Comparison, x: str, arms: Collection[str] | None = None) -> bool:
    """arms: those to draw, in the colours that they have among all."""
    baseline = comparison.results[0].arm.runs[0]
    limits = []  # of the raw differences of each pair, without the first tenth
    for index, result in enumerate(comparison.results):
        if arms is not None and result.arm.name not in arms:
            continue
        colour = COLOURS[index % len(COLOURS)]
        for which, paired in enumerate(comparison.paired[result.arm.name]):
            difference = paired.arm - paired.baseline
            width = smoothed_steps(baseline)
            sums = np.cumsum(np.concatenate([[0.0], difference]))
            ends = np.arange(1, len(difference) + 1)
            starts = np.maximum(0, ends - width)
            places, raw, mean = _thinned(
                baseline.at(paired.steps, x), difference, (sums[ends] - sums[starts]) / (ends - starts)
            )
            axis.plot(places, raw, color=colour, alpha=0.2, linewidth=0.6)
            axis.plot(places, mean, color=colour, linewidth=1.5, label=result.arm.name if which == 0 else None)
            limits.append(np.percentile(raw[len(raw) // 10 :], [1, 99]))
        if result.difference is not None:
            first = comparison.paired[result.arm.name][0]
            start = baseline.at(first.steps[-result.difference.steps // result.difference.pairs :][:1], x)[0]
            axis.fill_between(
                [start, baseline.axis(x)[-1]], result.difference.low, result.difference.high, color=colour, alpha=0.25
            )
    axis.axhline(0, color="#333333", linewidth=0.8)
    axis.set_title("paired difference, and the interval of the verdict")
    if limits:
        low, high = np.min(limits), np.max(limits)
        axis.set_ylim(min(low, 0) * 1.3 - 1e-4, max(high, 0) * 1.3 + 1e-4)
    return bool(limits)


def draw_validation(axis, comparison: Comparison, x: str) -> bool:
    return _draw_series(axis, comparison, x, VALIDATION_LOSS, "validation loss", marker="o", markersize=3)


def draw_grad_norm(axis, comparison: Comparison, x: str) -> bool:
    return _draw_series(axis, comparison, x, "grad-norm", "gradient norm", linewidth=0.7)


def draw_throughput(axis, comparison: Comparison, x: str) -> bool:
    return _draw_series(axis, comparison, x, "throughput", "attended TFLOP/s/GPU", linewidth=0.8)


def draw_dense_throughput(axis, comparison: Comparison, x: str) -> bool:
    return _draw_series(
        axis, comparison, x, "throughput-dense-equivalent", "dense-equivalent TFLOP/s/GPU", linewidth=0.8
    )


def _draw_series(axis, comparison: Comparison, x: str, name: str, title: str, **style) -> bool:
    curves = []
    for run, colour, label in _runs(comparison):
        if name in run.series:
            series = run.series[name]
            finite = np.isfinite(series.values)  # a gradient norm may be infinite where an iteration was skipped
            places, values = _thinned(run.at(series.steps[finite], x), series.values[finite])
            axis.plot(places, values, color=colour, label=label, **style)
            curves.append(values)
    axis.set_title(title)
    _ignore_start(axis, curves)
    return bool(curves)


def position_losses(run: Run, validation: bool) -> tuple[np.ndarray, np.ndarray]:
    """(first position of each bucket, its loss at the end of the run: the last evaluation, or the mean of the last
    smoothed_steps); empty without --s2-position-loss."""
    found = []
    for name, series in run.series.items():
        match = POSITION.fullmatch(name)
        if match and bool(match[3]) == validation:
            values = series.values[-1:] if validation else series.values[-smoothed_steps(run) :]
            found.append((int(match[1]), float(np.nanmean(values))))
    found.sort()
    return np.array([first for first, _ in found]), np.array([loss for _, loss in found])


def draw_positions(axis, comparison: Comparison, x: str) -> bool:
    drawn = False
    validation = any(len(position_losses(run, True)[0]) for run, _, _ in _runs(comparison))
    for run, colour, label in _runs(comparison):
        places, losses = position_losses(run, validation)
        if len(places):
            axis.plot(places, losses, color=colour, marker="o", markersize=3, linewidth=1, label=label)
            drawn = True
    axis.set_title(f"{'validation' if validation else 'training'} loss by position, at the end")
    axis.set_xlabel("first position of the bucket")
    return drawn


# In the page's order. draw_positions has positions on its x axis, whatever the axis that was asked for.
PANELS: dict[str, Callable] = {
    "loss": draw_loss, "difference": draw_difference, "validation": draw_validation, "positions": draw_positions,
    "throughput": draw_throughput, "dense-throughput": draw_dense_throughput, "grad-norm": draw_grad_norm,
}  # fmt: skip


def _panel(axis, name: str, comparison: Comparison, x: str) -> bool:
    drawn = PANELS[name](axis, comparison, x)
    axis.title.set_fontsize(10)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    if name != "positions":
        from matplotlib.ticker import EngFormatter

        axis.set_xlabel(AXIS_NAMES[x], fontsize=8)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if drawn:
        axis.legend(fontsize=8, frameon=False)
    return drawn


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _svg(figure, name: str) -> str:
    """Without the XML prologue. Equal comparisons give equal pages: no time of day, and ids that `name` makes unique in
    the page. Text stays text."""
    pyplot, text = _pyplot(), io.StringIO()
    with pyplot.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def svg_panels(comparison: Comparison, x: str) -> dict[str, str]:
    """{panel: SVG} of the panels that the runs have data for."""
    pyplot = _pyplot()
    panels = {}
    for name in PANELS:
        figure, axis = pyplot.subplots(figsize=(5.6, 3.4), layout="constrained")
        if _panel(axis, name, comparison, x):
            panels[name] = _svg(figure, f"{name}-{x}")
        else:
            pyplot.close(figure)
    return panels


def write_png(comparison: Comparison, x: str, file: Path) -> None:
    """All panels that the runs have data for, in one picture."""
    pyplot = _pyplot()
    names = []
    for name in PANELS:
        figure, axis = pyplot.subplots()
        if _panel(axis, name, comparison, x):
            names.append(name)
        pyplot.close(figure)
    rows = -(-len(names) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(11.5, 3.5 * rows), layout="constrained", squeeze=False)
    for axis, name in zip(axes.flat, names):
        _panel(axis, name, comparison, x)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    write_figure(figure, file, dpi=120)
    pyplot.close(figure)


def pattern_of(form: dict) -> RangePattern | None:
    """The pattern that a canonical form stands for; None for dense layers and for block masks, of which a log has only
    the hash."""
    if form["kind"] != "ranges":
        return None
    heads = {
        head: head_of_group(group, offset, form["block_size"])
        for group in form["groups"]
        for head, offset in zip(group["heads"], group["offsets"])
    }
    return RangePattern(form["block_size"], form["kv_heads"], tuple(heads[head] for head in sorted(heads)))


def pattern_svg(arm: Arm) -> str | None:
    """The distinct patterns of an arm's layers; None for a dense arm, and where the log has only a hash of them."""
    if arm.sparsity == DENSE:
        return None
    content = json.loads(arm.sparsity)
    shown = []
    for index, form in enumerate(content["patterns"]):
        pattern = pattern_of(form)
        if pattern is not None:
            layers = [str(layer) for layer, kind in enumerate(content["layers"]) if kind == index]
            shown.append((f"layer{'s' * (len(layers) > 1)} {joined_layers(layers)}", pattern))
    if not shown:
        return None
    length = number(arm.runs[0].arguments, "seq_length")
    blocks = MOST_BLOCKS if length is None else -(-int(length) // shown[0][1].block_size)
    return _svg(draw_patterns(shown, blocks), arm.name)
