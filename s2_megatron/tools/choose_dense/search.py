"""Candidates ranked by what each gains alone, and the smallest set of the best ones that is near enough to dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Unit(NamedTuple):
    """What becomes dense together. layer: from 0. heads: its KV heads, those that are sparse."""

    layer: int
    heads: tuple[int, ...]


class Ranked(NamedTuple):
    """A unit and the loss of the plan with it alone."""

    unit: Unit
    loss: float


class DenseSet(NamedTuple):
    """The `size` best units dense: the plan's loss, and how far above dense's, as a share."""

    size: int
    loss: float
    gap: float


LossOf = Callable[[Sequence[Unit]], float]  # of the plan with these units dense


def rank(units: Sequence[Unit], loss_of: LossOf, tell: Callable[[int], None] = lambda done: None) -> list[Ranked]:
    """The units, the one with the lowest loss first; equal ones in their order. tell: called with how many are done."""
    ranked = []
    for unit in units:
        ranked.append(Ranked(unit, loss_of([unit])))
        tell(len(ranked))
    return sorted(ranked, key=lambda each: each.loss)


class Sets:
    """Nested sets of the best units. dense: the loss of the dense model. measured: of every size that was asked for,
    each computed once."""

    def __init__(self, units: Sequence[Unit], loss_of: LossOf, dense: float):
        self.units, self.loss_of, self.dense = tuple(units), loss_of, dense
        self.measured: dict[int, DenseSet] = {}

    def of(self, size: int) -> DenseSet:
        if size not in self.measured:
            loss = self.loss_of(self.units[:size])
            self.measured[size] = DenseSet(size, loss, loss / self.dense - 1)
        return self.measured[size]

    def sizes(self, most: int) -> list[int]:
        """0, 1, 2, 4, 8, ... and `most`."""
        return [0, *(2**power for power in range(most.bit_length()) if 2**power < most), most]

    def smallest(self, within: float) -> DenseSet | None:
        """The smallest set whose gap is at most `within`, a share. The size is doubled until a set is near
        enough, then halved between that size and the one before; this assumes that more dense units are not worse.
        None if only the set of all units, the dense model itself, is near enough."""
        below = -1
        for size in self.sizes(len(self.units) - 1):
            if self.of(size).gap <= within:
                break
            below = size
        else:
            return None
        while size - below > 1:
            middle = (size + below) // 2
            if self.of(middle).gap <= within:
                size = middle
            else:
                below = middle
        return self.of(size)

    def exactly(self, size: int) -> DenseSet:
        """The set of this size. The table shows smaller ones too, so they are measured as well."""
        return [self.of(each) for each in self.sizes(size)][-1]
