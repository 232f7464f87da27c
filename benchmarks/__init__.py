"""Measurements. `refuse`: how a benchmark ends that cannot measure what it is asked for, here: in one `error:` line and
with status 2, as every command of this project. Status 1 is a measurement that failed: a wrong result, a run that broke
off, nothing measured."""

from __future__ import annotations

import sys
from typing import NoReturn


def refuse(message: str) -> NoReturn:
    """message: what is wrong (a setting with its value, or the machine), what was expected, what to do."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
