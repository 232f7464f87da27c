"""What the stand-in for a GPU redirects, by every way in which a call can name a device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from s2_megatron.megatron.host import cuda_on_cpu
from s2_megatron.megatron.host.cuda_on_cpu import _CudaMeansCpu
from tests.processes import python_path

CALLS = {
    "cuda": lambda tensor: tensor.cuda(),
    "cuda, an index": lambda tensor: tensor.cuda(0),
    "cuda by keyword": lambda tensor: tensor.cuda(non_blocking=True),
    "to": lambda tensor: tensor.to("cuda"),
    "to an index": lambda tensor: tensor.to(0),
    "to a device, and a dtype": lambda tensor: tensor.to(torch.device("cuda", 0), torch.float64),
    "to by keyword": lambda tensor: tensor.to(device="cuda", non_blocking=True),
    "pin_memory": lambda tensor: tensor.pin_memory(),
    "pinned factory": lambda tensor: torch.empty(2, pin_memory=True),
    "factory": lambda tensor: torch.zeros(2, device="cuda"),
    "like": lambda tensor: torch.empty_like(tensor, device=torch.device("cuda")),
    "new": lambda tensor: tensor.new_zeros(2, device="cuda:0"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_name_a_gpu_get_the_cpu(name):
    tensor = torch.ones(2)
    with _CudaMeansCpu():
        made = CALLS[name](tensor)
    assert made.device.type == "cpu" and made.shape == (2,) and not made.is_pinned()


def test_other_calls_are_as_they_were():
    tensor = torch.ones(2)
    with _CudaMeansCpu():
        assert torch.equal(tensor.to(torch.float64), torch.ones(2, dtype=torch.float64)) and torch.equal(
            torch.add(tensor, tensor), tensor + 1
        )
        assert tensor.type() == "torch.cuda.FloatTensor" and tensor.type(torch.float64).dtype is torch.float64


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU stands for a GPU where there is none")
def test_behind_the_import_of_megatron_is_too_late(monkeypatch):
    monkeypatch.setattr(cuda_on_cpu, "is_installed", lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.training", types.ModuleType("megatron.training"))
    with pytest.raises(ValueError, match="make it the first lines of the script"):
        cuda_on_cpu.install_if_no_gpu()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU stands for a GPU where there is none")
def test_coalesced_collectives_have_ended_where_they_are_launched(lab):
    """Of two ranks the second is a second late, and the first has its numbers all the same when its `with` ends."""
    output = lab.python("coalesced.py", processes=2)
    for rank in (0, 1):
        assert f"rank {rank} found [1.0, 2.0]" in output, output


COLLECTIVE = """
from s2_megatron.megatron.host.cuda_on_cpu import install_if_no_gpu
install_if_no_gpu()
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU stands for a GPU where there is none")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) for the delay of gloo's threads")
def test_a_late_thread_of_gloo_does_not_abort_the_end(tmp_path):
    """Without the moment at the end: status -6, "terminate called without an active exception"."""
    source, library = Path(__file__).parent / "scripts" / "late_gloo.c", str(tmp_path / "late_gloo.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(source), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", COLLECTIVE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
