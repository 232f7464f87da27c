"""The pictures of a comparison, each drawn into a Matplotlib axis: once for the page, once for the PNG."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from s2_megatron.config.sparsity import joined_layers
from s2_megatron.config.stored import range_pattern
from s2_megatron.patterns.picture import MOST_BLOCKS, draw_patterns
from s2_megatron.patterns.ranges import RangePattern
from s2_megatron.tools.compare.measure import Comparison, smoothed, smoothed_steps
from s2_megatron.tools.compare.runs import TRAINING_LOSS, VALIDATION_LOSS, Run, number
from s2_megatron.tools.compare.settings import DENSE, Arm
from s2_megatron.tools.compare.table import AXIS_NAMES
from s2_megatron.tools.outputs import write_figure

COLOURS = ["#333333", "#2f6db3", "#e58a2e", "#1e8449", "#7d3c98", "#c0392b", "#16a085", "#b7950b", "#8c5a3c", "#d16ba5"]
MAX_POINTS, LEAST_POINTS = 1500, 200  # of a line, and of each of very many: more are not seen, and make the page heavy
MOST_RAW = 8  # runs whose unsmoothed losses are drawn: those of more hide the curves
LEGEND_LETTERS = 150  # in a row of the legend of a PNG
STYLES = ("-", "--", ":", "-.")
# Axes of losses span this share of a loss at least, and other ones that: noise does not fill them.
LEAST_SPAN, LEAST_DIFFERENCE, LEAST_OTHER = 0.02, 0.002, 0.1
POSITION = re.compile(r"lm loss by position/(\d+)-(\d+)( validation)?")


def colours(count: int) -> list:
    """So many colours that differ, the baseline's first."""
    if count <= len(COLOURS):
        return COLOURS[:count]
    from matplotlib import colormaps

    return [COLOURS[0], *(colormaps["turbo"](at) for at in np.linspace(0.02, 0.98, count - 1))]


def styles(comparison: Comparison) -> list[dict]:
    """How the lines of each arm look. Of more arms than COLOURS neighbours differ in their dashes, too."""
    count = len(comparison.results)
    dashes = STYLES if count > len(COLOURS) else STYLES[:1]
    return [{"color": colour, "linestyle": dashes[index % len(dashes)]} for index, colour in enumerate(colours(count))]


def _count(comparison: Comparison) -> int:
    return sum(len(result.arm.runs) for result in comparison.results)


def _thinned(count: int, steps: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """Every n-th of the points, of one of so many lines."""
    most = max(LEAST_POINTS, MAX_POINTS * MOST_RAW // max(count, MOST_RAW))
    drawn = np.unique(np.linspace(0, len(steps) - 1, most).astype(int)) if len(steps) > most else slice(None)
    return [column[drawn] for column in (steps, *columns)]


def _runs(comparison: Comparison):
    for result, style in zip(comparison.results, styles(comparison)):
        for run in result.arm.runs:
            label = result.arm.name if run is result.arm.runs[0] else None
            yield run, style, label


def _ignore_start(axis, curves: list[np.ndarray], least: float) -> None:
    """Scale to what follows the first tenth, in which a loss falls from its untrained value, and to this share of it at
    least."""
    late = [curve[len(curve) // 10 :] for curve in curves if len(curve)]
    if late:
        low, high = min(map(np.min, late)), max(map(np.max, late))
        middle = (low + high) / 2
        span = max(1.1 * (high - low), least * abs(middle), 1e-6)
        axis.set_ylim(middle - span / 2, middle + span / 2)


def draw_loss(axis, comparison: Comparison, x: str) -> bool:
    curves, count = [], _count(comparison)
    for run, style, label in _runs(comparison):
        places, raw, mean = _thinned(count, run.axis(x), run.series[TRAINING_LOSS].values, smoothed(run))
        if count <= MOST_RAW:
            axis.plot(places, raw, color=style["color"], alpha=0.2, linewidth=0.6)
        axis.plot(places, mean, **style, linewidth=1.5, label=label)
        curves.append(mean)
    _ignore_start(axis, curves, LEAST_SPAN)
    axis.set_title("training loss, raw and smoothed" if count <= MOST_RAW else "training loss, smoothed")
    axis.set_ylabel("loss, nats a token")
    return True


def draw_difference(axis, comparison: Comparison, x: str, arms: Collection[str] | None = None) -> bool:
    """arms: those to draw, in the colours that they have among all."""
    baseline = comparison.results[0].arm.runs[0]
    limits, count = [], _count(comparison)  # limits: of the raw differences of each pair, without the first tenth
    for result, style in zip(comparison.results, styles(comparison)):
        if arms is not None and result.arm.name not in arms:
            continue
        for which, paired in enumerate(comparison.paired[result.arm.name]):
            difference = paired.arm - paired.baseline
            width = smoothed_steps(baseline)
            sums = np.cumsum(np.concatenate([[0.0], difference]))
            ends = np.arange(1, len(difference) + 1)
            starts = np.maximum(0, ends - width)
            places, raw, mean = _thinned(
                count, baseline.at(paired.steps, x), difference, (sums[ends] - sums[starts]) / (ends - starts)
            )
            if count <= MOST_RAW:
                axis.plot(places, raw, color=style["color"], alpha=0.2, linewidth=0.6)
            axis.plot(places, mean, **style, linewidth=1.5, label=result.arm.name if which == 0 else None)
            shown = raw if count <= MOST_RAW else mean
            limits.append(np.percentile(shown[len(shown) // 10 :], [1, 99]))
        if result.difference is not None and not result.difference.undecided and count <= MOST_RAW:
            first = comparison.paired[result.arm.name][0]
            start = baseline.at(first.steps[-result.difference.steps // result.difference.pairs :][:1], x)[0]
            axis.fill_between(
                [start, baseline.axis(x)[-1]],
                result.difference.low,
                result.difference.high,
                color=style["color"],
                alpha=0.25,
            )
    axis.axhline(0, color="#333333", linewidth=0.8)
    band = ", and its interval" if count <= MOST_RAW else ""
    axis.set_title(f"difference to {comparison.results[0].arm.name}{band}")
    axis.set_ylabel("difference of loss, nats")
    if limits:
        least = LEAST_DIFFERENCE * abs(comparison.results[0].final_loss)
        axis.set_ylim(min(1.3 * np.min(limits), -least), max(1.3 * np.max(limits), least))
    return bool(limits)


def draw_validation(axis, comparison: Comparison, x: str) -> bool:
    drawn = _draw_series(axis, comparison, x, VALIDATION_LOSS, "validation loss", LEAST_SPAN, marker="o", markersize=3)
    axis.set_ylabel("loss, nats a token")
    return drawn


def draw_grad_norm(axis, comparison: Comparison, x: str) -> bool:
    axis.set_ylabel("gradient norm")
    return _draw_series(axis, comparison, x, "grad-norm", "gradient norm", LEAST_OTHER, linewidth=0.7)


def draw_throughput(axis, comparison: Comparison, x: str) -> bool:
    axis.set_ylabel("TFLOP/s a GPU")
    return _draw_series(axis, comparison, x, "throughput", "throughput, attended", LEAST_OTHER, linewidth=0.8)


def draw_dense_throughput(axis, comparison: Comparison, x: str) -> bool:
    axis.set_ylabel("TFLOP/s a GPU")
    title = "throughput, dense-equivalent"
    return _draw_series(axis, comparison, x, "throughput-dense-equivalent", title, LEAST_OTHER, linewidth=0.8)


def _draw_series(axis, comparison: Comparison, x: str, name: str, title: str, least: float, **lines) -> bool:
    """least: share of a value that the axis spans at least."""
    curves = []
    for run, style, label in _runs(comparison):
        if name in run.series:
            series = run.series[name]
            finite = np.isfinite(series.values)  # a gradient norm may be infinite where an iteration was skipped
            places, values = _thinned(_count(comparison), run.at(series.steps[finite], x), series.values[finite])
            axis.plot(places, values, **style, label=label, **lines)
            curves.append(values)
    axis.set_title(title)
    _ignore_start(axis, curves, least)
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
    curves = []
    validation = any(len(position_losses(run, True)[0]) for run, _, _ in _runs(comparison))
    for run, style, label in _runs(comparison):
        places, losses = position_losses(run, validation)
        if len(places):
            axis.plot(places, losses, **style, marker="o", markersize=3, linewidth=1, label=label)
            curves.append(losses)
    axis.set_title(f"{'validation' if validation else 'training'} loss by position, at the end")
    axis.set_xlabel("first position of the bucket, tokens", fontsize=8)
    axis.set_ylabel("loss, nats a token")
    _ignore_start(axis, curves, LEAST_SPAN)
    return bool(curves)


# In the page's order. draw_positions has positions on its x axis, whatever the axis that was asked for.
PANELS: dict[str, Callable] = {
    "loss": draw_loss, "difference": draw_difference, "validation": draw_validation, "positions": draw_positions,
    "throughput": draw_throughput, "dense-throughput": draw_dense_throughput, "grad-norm": draw_grad_norm,
}  # fmt: skip


def _panel(axis, name: str, comparison: Comparison, x: str) -> bool:
    drawn = PANELS[name](axis, comparison, x)
    axis.title.set_fontsize(10)
    axis.yaxis.label.set_fontsize(8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    if name != "positions":
        from matplotlib.ticker import EngFormatter

        axis.set_xlabel(AXIS_NAMES[x], fontsize=8)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
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


def _handles(comparison: Comparison) -> list:
    from matplotlib.lines import Line2D

    names = (result.arm.name for result in comparison.results)
    return [Line2D([], [], **style, linewidth=1.5, label=name) for name, style in zip(names, styles(comparison))]


def legend_svgs(comparison: Comparison) -> list[tuple[str, str]]:
    """[(arm, a small SVG of its line)], for the page."""
    from matplotlib.colors import to_hex

    dashes = {"-": "", "--": "6 3", ":": "2 3", "-.": "7 3 2 3"}
    return [
        (
            result.arm.name,
            '<svg class="line" width="34" height="10" role="img"><line x1="1" y1="5" x2="33" y2="5" '
            f'stroke-width="2.5" stroke="{to_hex(style["color"])}" '
            f'stroke-dasharray="{dashes[style["linestyle"]]}"/></svg>',
        )
        for result, style in zip(comparison.results, styles(comparison))
    ]


def write_png(comparison: Comparison, x: str, file: Path) -> None:
    """All panels that the runs have data for, in one picture."""
    pyplot = _pyplot()
    names = []
    for name in PANELS:
        figure, axis = pyplot.subplots()
        if _panel(axis, name, comparison, x):
            names.append(name)
        pyplot.close(figure)
    handles = _handles(comparison)
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(len(handles), LEGEND_LETTERS // (longest + 6)))
    legend = 0.2 * -(-len(handles) // columns) + 0.15  # inches
    rows = -(-len(names) // 2)
    height = 3.5 * rows + legend
    figure, axes = pyplot.subplots(rows, 2, figsize=(11.5, height), layout="constrained", squeeze=False)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - legend / height))
    for axis, name in zip(axes.flat, names):
        _panel(axis, name, comparison, x)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    figure.legend(handles=handles, loc="upper center", ncols=columns, fontsize=8, frameon=False).set_in_layout(False)
    write_figure(figure, file, dpi=120)
    pyplot.close(figure)


def pattern_of(form: dict) -> RangePattern | None:
    """The pattern that a canonical form stands for; None for dense layers and for block masks, of which a log has only
    the hash."""
    return range_pattern(form) if form["kind"] == "ranges" else None


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
