"""The part of a page on where the loss lies: by what stood before the predicted token, from the copies files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from studies.cells import table
from studies.copies import GROUPS
from studies.scales import read_text_tests, seeds_text, untested


def losses(scores: Sequence[dict]) -> np.ndarray:
    """The mean loss of every group over the seeds, float64 [groups]; 0 for one without tokens."""
    return np.mean([[loss or 0.0 for loss in each["losses"]] for each in scores], axis=0)


def gaps(own: Sequence[dict], other: Sequence[dict]) -> np.ndarray:
    """What every group adds to the gap of the means over all tokens, in nats, float64 [groups]."""
    return (losses(own) - losses(other)) * shares(own[0])


def shares(score: dict) -> np.ndarray:
    """Of all predictions, float64 [groups]."""
    return np.array(score["tokens"]) / sum(score["tokens"])


def copies_lines(folder: Path, arms: Sequence[str], baseline: str, seeds: Sequence[str]) -> list[str]:
    """Lines of Markdown; [] without data."""
    found = read_text_tests("copies", ("tokens", "near", "corpus"), folder, arms, baseline, seeds)
    if not found:
        return []
    has_scores = tuple(found[baseline])
    found = {arm: list(scores.values()) for arm, scores in found.items()}
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
        f"Where the loss lies, over {base[0]['sequences']} validation sequences ({seeds_text(has_scores)}): "
        "predictions by the longest n-gram in front of them that had stood in the sequence before, and whether it "
        f"stood last within {near} tokens (near) or further back (far). Mean losses of each group, in nats; in "
        f"brackets what the group adds to the arm's gap to {baseline} over all tokens, its share taken into account."
        f"{untested(arms, found)}",
        "",
        *table(["", *titles, "all"], rows),
        "",
    ]
