"""The tiers of the tests: `make test` runs one of each kind, `make test-all` the others, too (marker `slow`)."""

from collections.abc import Iterable

import pytest


def mostly_slow(values: Iterable, *quick) -> list:
    """The values of a parameter, or of several (tuples); all but `quick` are slow."""
    values = list(values)
    assert all(value in values for value in quick), f"{quick} are not all among {values}"
    slow = pytest.mark.slow
    of_several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [value if value in quick else pytest.param(*each, marks=slow) for value, each in zip(values, of_several)]
