"""The part of a page on needles in text: what arms copy from far back, from the needles files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from studies.cells import table
from studies.recall_page import percent
from studies.scales import read_text_tests, seeds_text, untested


def mean(scores: Sequence[dict], name: str) -> float | np.ndarray:
    """Over the seeds, float64, of a share or of each of a list of them; NaN for a group without needles."""
    return np.mean(np.array([each[name] for each in scores], float), axis=0)


def needles_lines(folder: Path, arms: Sequence[str], baseline: str, seeds: Sequence[str]) -> list[str]:
    """Lines of Markdown; [] without data."""
    found = read_text_tests("needles", ("questions", "sequences", "corpus"), folder, arms, baseline, seeds)
    if not found:
        return []
    has_scores, (first, *_) = tuple(found[baseline]), found[baseline].values()
    rows = []
    for arm, by_seed in found.items():
        scores = list(by_seed.values())
        shares = [mean(scores, name) for name in ("accuracy", "whole", "near")]
        shares += [np.nanmin(mean(scores, name)) for name in ("by_depth", "by_residue")]
        rows.append([arm, *(percent(share) for share in shares)])
    return [
        f"Copying {first['questions'] // first['sequences']} random tokens from far back, in {first['sequences']} "
        f"validation sequences ({seeds_text(has_scores)}). Right tokens in percent: of needles beyond the window of "
        "`s2`, of those that are right as a whole, of needles within the window, and beyond it at the worst depth and "
        f"the worst residue of the block.{untested(arms, found)}",
        "",
        *table(["arm", "far", "whole needles", "near", "worst depth", "worst residue"], rows),
        "",
    ]
