"""The part of a page on where the loss lies: by what stood before the predicted token, from the copies files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from examples.quality.copies import GROUPS
from examples.quality.results import read_json


def read_copies(folder: Path, arms: Sequence[str], baseline: str) -> dict[str, list[tuple[dict, dict]]]:
    """{arm: [(its scores, the baseline's of that seed)]}; {} without the baseline's."""
    dense = {path.name: read_json(path, {}) for path in folder.glob(f"{baseline}_seed*.copies.json")}
    found = {}
    for arm in arms:
        paths = sorted(folder.glob(f"{arm}_seed*.copies.json"))
        pairs = [(read_json(path, {}), dense.get(f"{baseline}{path.name.removeprefix(arm)}")) for path in paths]
        pairs = [(own, other) for own, other in pairs if other is not None]
        if pairs:
            found[arm] = pairs
    return found


def gaps(pairs: Sequence[tuple[dict, dict]]) -> np.ndarray:
    """Of every group how much it adds to the gap to the baseline, in nats a token of all, float64 [groups]; mean over
    the seeds."""
    return np.mean([[tokens * ((own_loss or 0) - (loss or 0)) / sum(own["tokens"]) for tokens, own_loss, loss in
                     zip(own["tokens"], own["losses"], other["losses"])] for own, other in pairs], axis=0)  # fmt: skip


def copies_lines(folder: Path, arms: Sequence[str], baseline: str, table: Callable) -> list[str]:
    """Lines of Markdown; [] without data. table: (header, rows) to lines."""
    found = read_copies(folder, arms, baseline)
    others = [arm for arm in found if arm != baseline]
    if not others:
        return []
    first = found[others[0]][0][1]
    added = {arm: gaps(found[arm]) for arm in others}
    total = sum(first["tokens"])
    rows = []
    for index, (group, tokens) in enumerate(zip(GROUPS, first["tokens"])):
        losses = [f"{100 * tokens / total:.1f} %", _mean([other["losses"][index] for _, other in found[others[0]]])]
        for arm in others:
            losses += [_mean([own["losses"][index] for own, _ in found[arm]]), f"{added[arm][index]:+.4f}"]
        rows.append([f"{group.replace(' ', '-gram ', 1)}" if index else group, *losses])
    rows.append(["all", "100 %", "", *(cell for arm in others for cell in ("", f"{added[arm].sum():+.4f}"))])
    header = ["", "tokens", baseline, *(cell for arm in others for cell in (arm, "adds to its gap"))]
    return [
        f"Where the loss lies, over {first['sequences']} validation sequences: predictions by the longest n-gram in "
        "front of them that had stood in the sequence before, and whether it stood last in the window of "
        f"{first['window']} tokens or beyond it. What a group adds to an arm's gap is the difference of the losses "
        "times the group's share of the tokens.",
        "",
        *table(header, rows),
        "",
    ]


def _mean(losses: Sequence[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    return f"{np.mean(known):.4f}" if known else "-"
