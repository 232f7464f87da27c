"""What a CUDA driver is given by launches that leave Triton's Python out: byte for byte what it is given through it.
Without a GPU: fake_cuda.c stands for the driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from s2_megatron.kernels.trial import OLDEST
from tests.processes import found_by

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory):
    """The folder of a libcuda.so.1."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (gcc), which Triton needs on a GPU machine too")
    folder = tmp_path_factory.mktemp("fake_cuda")
    options = ["-shared", "-fPIC", "-O1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([compiler, *options, str(HERE / "fake_cuda.c")], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("release", ["installed", OLDEST])
def test_launches_without_triton_give_the_driver_the_same(release, fake_cuda):
    environment = {"TRITON_INTERPRET": "0", "TRITON_LIBCUDA_PATH": str(fake_cuda)}
    environment["LD_LIBRARY_PATH"] = f"{fake_cuda}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    if release != "installed":
        name = ".".join(map(str, release))
        folder = Path(sys.prefix) / f"triton-{name}.x"
        if not folder.exists():
            pytest.skip(f"there is no Triton {name} in {folder}; scripts/make-venv.sh installs it there")
        environment["PYTHONPATH"] = str(folder)
    found = found_by(HERE / "launches_in_c.py", **environment)
    assert found["compared"] == 8
    assert found["new_maps"] <= 4 and found["more_maps"] == 0  # a map is made once for an address
    assert found["hooks"] == ["s2_hopper_forward_kernel"] * 2  # before and after
