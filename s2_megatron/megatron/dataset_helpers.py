"""Megatron's compiled dataset helpers, as the wheel ships them.

`pretrain()` always runs `make` in `megatron/core/datasets` and exits when that fails. The wheel has the compiled
library there but no Makefile, so without this guard no run from the wheel starts, on GPUs either.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def use_prebuilt_dataset_helpers() -> bool:
    """Skip Megatron's `make` when there is no Makefile to run; True when it is skipped (a source checkout is left
    alone).

    Raises ValueError when the compiled library is missing too.
    """
    from megatron.core.datasets import utils

    if (Path(utils.__file__).parent / "Makefile").exists():
        return False
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise ValueError(
            f"{Path(utils.__file__).parent} has neither helpers_cpp nor a Makefile to build it; expected one of them; "
            "reinstall megatron-core from its wheel (pip install --force-reinstall megatron-core)"
        )
    utils.compile_helpers = lambda: logger.info(
        "Megatron's dataset helpers come compiled with the wheel; `make` is skipped"
    )
    return True
