"""Schedules that the preflight takes are those that Megatron's scheduler takes."""

from __future__ import annotations

import os

from tests.megatron import forks
from tests.megatron.arguments import ROOT


def test_what_is_refused_is_what_megatron_fails_on(tmp_path, scripts):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    forks.run(scripts / "schedules.py", ["600"], environment, tmp_path)
