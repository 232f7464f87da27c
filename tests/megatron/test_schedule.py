"""Schedules that Megatron refuses, some in the middle of a training, are refused before it."""

from __future__ import annotations

import os

from tests.megatron import forks
from tests.processes import python_path


def test_megatron_goes_through_a_schedule_before_the_training(tmp_path, scripts):
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    forks.run(scripts / "schedules.py", [], environment, tmp_path)
