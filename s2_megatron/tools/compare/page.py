"""The comparison as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import html
import json
from pathlib import Path

from s2_megatron.tools.compare import table
from s2_megatron.tools.compare.figures import legend_svgs, pattern_svg, svg_panels
from s2_megatron.tools.compare.measure import Comparison
from s2_megatron.tools.compare.settings import Arm
from s2_megatron.tools.outputs import write_file

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 1180px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
.verdict { border-left: 4px solid #999; padding: .4em .8em; margin: .6em 0; background: #f6f7f9; }
.better { border-color: #1e8449; } .worse { border-color: #c0392b; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .3em .8em; text-align: right; }
th:first-child, td:first-child { text-align: left; }
[hidden] { display: none !important; }
.panels { display: flex; flex-wrap: wrap; gap: .5em; } .panels svg { width: 560px; max-width: 100%; height: auto; }
.tabs button { font: inherit; padding: .3em .9em; border: 1px solid #bbb; background: #fff; cursor: pointer; }
.tabs button[aria-selected=true] { background: #2f6db3; border-color: #2f6db3; color: #fff; }
.legend span { display: inline-block; margin-right: 1.2em; white-space: nowrap; } .wide { overflow-x: auto; }
.note { color: #666; font-size: .9em; }
"""

_SCRIPT = """
const buttons = [...document.querySelectorAll('.tabs button')];
function show(axis) {
  for (const panels of document.querySelectorAll('.panels[data-axis]')) panels.hidden = panels.dataset.axis !== axis;
  for (const button of buttons) button.setAttribute('aria-selected', String(button.dataset.axis === axis));
}
for (const button of buttons) button.addEventListener('click', () => show(button.dataset.axis));
show(location.hash.slice(1) && buttons.some(b => b.dataset.axis === location.hash.slice(1)) ? location.hash.slice(1)
     : buttons[0].dataset.axis);
"""


def make_page(comparison: Comparison, x: str) -> str:
    """The page. x: the axis shown first; the others of the axes that all runs have are a click away."""
    axes = [x, *(axis for axis in comparison.limits if axis != x)]
    names = [result.arm.name for result in comparison.results]
    title = html.escape(
        " and ".join(names) if len(names) <= table.MOST_BESIDE else f"{len(names)} runs against {names[0]}"
    )
    parts = [f"<h1>{title}</h1>"]
    for verdict, text in table.verdict_lines(comparison):
        parts.append(f'<p class="verdict {verdict.replace(" ", "-")}">{html.escape(text)}</p>')
    parts += [f'<p class="note">{html.escape(text)}</p>' for text in table.about_verdicts(comparison)]
    parts += [_table(comparison), f'<p class="note">{html.escape(table.footnote())}</p>', *_remarks(comparison)]
    parts.append('<h2>Curves</h2><div class="tabs" role="tablist">over ')
    for axis in axes:
        parts.append(f'<button role="tab" data-axis="{axis}">{html.escape(table.AXIS_NAMES[axis])}</button>')
    parts.append("</div>")
    parts.append('<p class="legend">')
    parts += [f"<span>{line} {html.escape(name)}</span>" for name, line in legend_svgs(comparison)]
    parts.append("</p>")
    for axis in axes:
        panels = "".join(
            f'<figure id="{name}-{axis}" style="margin:0">{svg}</figure>'
            for name, svg in svg_panels(comparison, axis).items()
        )
        parts.append(f'<div class="panels" data-axis="{axis}">{panels}</div>')
    alike: dict[str, list[Arm]] = {}
    for result in comparison.results:
        alike.setdefault(result.arm.sparsity, []).append(result.arm)
    pictures = [
        (", ".join(arm.name for arm in arms), svg)
        for arms in alike.values()
        if (svg := pattern_svg(arms[0])) is not None
    ]
    if pictures:
        parts.append("<h2>Patterns</h2><p class=note>The share of a layer's heads that attend each key block.</p>")
        parts += [f"<figure><figcaption>{html.escape(name)}</figcaption>{svg}</figure>" for name, svg in pictures]
    # A script element ends at "</" whatever stands around it.
    data = json.dumps(table.as_json(comparison)).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n"
        f"<body>{''.join(parts)}\n"
        f'<script type="application/json" id="comparison">{data}</script>\n<script>{_SCRIPT}</script></body></html>\n'
    )


def _table(comparison: Comparison) -> str:
    columns, rows = table.shown_table(comparison)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _remarks(comparison: Comparison) -> list[str]:
    return [f'<p class="note">{html.escape(remark)}</p>' for remark in table.remarks(comparison)]


def write_page(comparison: Comparison, x: str, file: Path) -> None:
    write_file(file, make_page(comparison, x).encode("utf-8"))
