"""What the study of a public model decides, by the rule of public_model.md; NumPy alone.

    python -m studies.decide smollm2-8k
    python -m studies.decide smollm2-8k --base 16h-w-sink

A table: every arm's distance from dense in percent, with its 95 % interval, the same of the first 512 tokens (without
one) and beyond 4K, and at every distance what it copies as a share of what dense of the same seeds copies. A second
table has the arms that are fitted apart.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from studies.data import RESULTS, Run, read_study, select
from studies.gaps import Fitted, fitted_gaps

LARGEST_GAP = 0.5  # percent of dense's loss
LEAST_COPIED = 0.95  # of what dense copies
# The end of the names of arms whose heads were ranked on few directories (public_model.md, after part 1). What varies
# between their seeds is the ranking, so they have a fit of their own.
APART = "-few"


def tested(run: Run) -> dict:
    return run.about["tests"]["passages"]


def loss_between(first: float, last: float) -> Callable[[Run], float]:
    """Of the positions between two shares of the context."""

    def measure(run: Run) -> float:
        buckets = tested(run)["by_position"]
        return float(np.mean(buckets[round(first * len(buckets)) : round(last * len(buckets))]))

    return measure


def copied_shares(runs: Sequence[Run], arm: str, base: str = "dense") -> dict[str, float]:
    """{distance: what the arm copies, over what `base` of the same seeds copies}; {} without such seeds. What is right
    without a copy counts as none, where it was measured of all of them."""
    own, dense = ({run.seed: tested(run) for run in select(runs, arm=name)} for name in (arm, base))
    seeds = sorted(own.keys() & dense.keys())
    is_known = all("uncopied" in each[seed] for each in (own, dense) for seed in seeds)

    def mean(each: dict[int, dict], distance: str) -> float:
        return float(
            np.mean([each[seed]["copied"][distance] - each[seed].get("uncopied", 0) * is_known for seed in seeds])
        )

    found = sorted(own[seeds[0]]["copied"], key=int) if seeds else ()
    return {distance: _share(mean(own, distance), mean(dense, distance)) for distance in found}


def _share(own: float, dense: float) -> float:
    """Infinite where dense copies nothing, of which nothing can be lost."""
    return own / dense if dense else math.inf


def verdict(gap: Fitted, copied: dict[str, float]) -> str:
    """met, missed, or not decided, which an arm without a seed that `base` has is at best."""
    if gap.low > LARGEST_GAP or min(copied.values(), default=1.0) < LEAST_COPIED:
        return "missed"
    return "met" if copied and gap.high < LARGEST_GAP else "not decided"


def scatter_of_dense(runs: Sequence[Run]) -> tuple[float, int]:
    """(standard deviation of dense's loss over its seeds, in percent of it; how many there are)."""
    losses = [tested(run)["loss"] for run in select(runs, arm="dense")]
    return (100 * float(np.std(losses, ddof=1) / np.mean(losses)) if len(losses) > 1 else float("nan")), len(losses)


def lines(runs: Sequence[Run], base: str = "dense") -> list[str]:
    """The table. runs: of one study that have been tested, each arm and seed once. base: what losses and copies are
    held against."""
    gaps = fitted_gaps(runs, lambda run: tested(run)["loss"], base)
    near, far = (fitted_gaps(runs, loss_between(*part), base) for part in ((0, 1 / 16), (1 / 2, 1)))
    some = next(iter(gaps.values()))
    found = [f"{len(runs)} runs; the rest varies by {some.deviation:.3f} % ({some.freedom} degrees of freedom)"]
    found.append("dense's loss varies by {:.3f} % over {} seeds".format(*scatter_of_dense(runs)))
    found.append(f"{'arm':<18}{'seeds':>6}  {f'loss, % above {base}':<24}{'first 16th':>11}  {'last half':<24}copied, "
                 f"of what {base} does")  # fmt: skip
    for arm, gap in gaps.items():
        copied = copied_shares(runs, arm, base)
        shares = " ".join(f"{distance}:{share:.2f}" for distance, share in copied.items())
        whole, last = (f"{own.mean:+.2f} [{own.low:+.2f}, {own.high:+.2f}]" for own in (gap, far[arm]))
        row = f"{arm:<18}{gap.seeds:>6}  {whole:<24}{near[arm].mean:>+11.2f}  {last:<24}"
        found.append(f"{row}{shares}  {verdict(gap, copied)}")
    return found


def parts(runs: Sequence[Run], base: str) -> list[list[Run]]:
    """The runs that one fit takes together: most, and those APART with what they are held against."""
    most = [run for run in runs if not run.arm.endswith(APART)]
    few = [run for run in runs if run.arm.endswith(APART)]
    return [most, *([[*select(runs, arm=base), *few]] if few else [])]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.decide", description=__doc__.splitlines()[0])
    parser.add_argument("study")
    parser.add_argument("--base", default="dense", help="the arm that the others are held against (default: dense)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parsed = parser.parse_args()
    runs = [
        run
        for run in select(read_study(parsed.study, parsed.results), role="", repeat=0)
        if "passages" in run.about.get("tests", {})
    ]
    scales = sorted({run.about["scale"] for run in runs})
    if not scales:
        parser.error(f"{parsed.study}: no tested runs in {parsed.results}; expected some; run the study")
    for scale in scales:
        print(f"{parsed.study}, {scale}")
        for part in parts(select(runs, scale=scale), parsed.base):
            try:
                print("\n".join(lines(part, parsed.base)))
            except ValueError as error:  # too few runs so far
                print(error)


if __name__ == "__main__":
    main()
