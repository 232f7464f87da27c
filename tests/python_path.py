"""What the processes that tests start can import."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path(*first: Path | None) -> str:
    """PYTHONPATH: `first`, this checkout, and what the tests themselves have there, such as a checkout of
    Megatron-LM."""
    return os.pathsep.join(str(path) for path in (*first, ROOT, os.environ.get("PYTHONPATH")) if path)
