"""The tiers of the tests: `make test` runs one of each kind, `make test-all` the others, too (marker `slow`)."""

from collections.abc import Iterable

import pytest


def mostly_slow(values: Iterable, *quick) -> list:
    """The values of a parameter; all but `quick` are slow."""
    values = list(values)
    assert all(value in values for value in quick), f"{quick} are not all among {values}"
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
