"""The part of a page on where the loss lies: by what stood before the predicted token, from the copies files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from examples.quality.copies import GROUPS
from examples.quality.results import read_json


def read_copies(folder: Path, arms: Sequence[str], baseline: str) -> dict[str, list[dict]]:
    """{arm: its scores, one of each seed that all these arms have}, the baseline first; {} without it or without
    another arm. Raises ValueError for scores over other predictions than the baseline's."""
    scores = {}
    for arm in (baseline, *(arm for arm in arms if arm != baseline)):
        files = {path.name.removeprefix(arm): path for path in folder.glob(f"{arm}_seed*.copies.json")}
        if files:
            scores[arm] = {name: read_json(path, {}) for name, path in files.items()}
    shared = sorted(set.intersection(*(set(each) for each in scores.values()))) if scores else []
    if baseline not in scores or len(scores) < 2 or not shared:
        return {}
    found = {arm: [each[name] for name in shared] for arm, each in scores.items()}
    for arm, each in found.items():
        for own, other in zip(each, found[baseline]):
            if any(own[name] != other[name] for name in ("tokens", "near", "corpus")):
                raise ValueError(
                    f"{folder}: the copies of {arm} are not over the predictions of {baseline}'s; expected equal "
                    "sequences; train one of them again"
                )
    return found


def losses(scores: Sequence[dict]) -> np.ndarray:
    """The mean loss of every group over the seeds, float64 [groups]; 0 for one without tokens."""
    return np.mean([[loss or 0.0 for loss in each["losses"]] for each in scores], axis=0)


def gaps(own: Sequence[dict], other: Sequence[dict]) -> np.ndarray:
    """What every group adds to the gap of the means over all tokens, in nats, float64 [groups]."""
    return (losses(own) - losses(other)) * shares(own[0])


def shares(score: dict) -> np.ndarray:
    """Of all predictions, float64 [groups]."""
    return np.array(score["tokens"]) / sum(score["tokens"])


def copies_lines(folder: Path, arms: Sequence[str], baseline: str, table: Callable) -> list[str]:
    """Lines of Markdown; [] without data. table: (header, rows) to lines."""
    found = read_copies(folder, arms, baseline)
    if not found:
        return []
    base = found[baseline]
    part, near = shares(base[0]), base[0]["near"]
    rows = [
        ["share of the tokens", *(f"{100 * each:.1f} %" for each in part), ""],
        [baseline, *(f"{each:.3f}" for each in losses(base)), f"{losses(base) @ part:.3f}"],
    ]
    for arm, scores in found.items():
        if arm != baseline:
            own, added = losses(scores), gaps(scores, base)
            cells = [f"{loss:.3f} ({gap:+.3f})" for loss, gap in zip(own, added)]
            rows.append([arm, *cells, f"{own @ part:.3f} ({added.sum():+.3f})"])
    titles = [group if group == "new" else group.replace(" ", "-gram, ") for group in GROUPS]
    return [
        f"Where the loss lies, over {base[0]['sequences']} validation sequences (seeds: {len(base)}): predictions by "
        "the longest n-gram in front of them that had stood in the sequence before, and whether it stood last within "
        f"{near} tokens (near) or further back (far). Mean losses of each group, in nats; in brackets what the group "
        f"adds to the arm's gap to {baseline} over all tokens, its share taken into account.",
        "",
        *table(["", *titles, "all"], rows),
        "",
    ]
