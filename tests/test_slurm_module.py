"""The SLURM on one machine: what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm import Slurm, refusal, wait_until

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "tests.slurm"]
HERE = pytest.mark.skipif(refusal() is not None, reason=f"no SLURM here: {refusal()}")


def test_without_slurm_it_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal() == "munged is not installed; as root: apt-get install slurm-wlm munge"
    with pytest.raises(RuntimeError, match="apt-get install"):
        Slurm(tmp_path / "cluster")
    done = subprocess.run([*COMMAND, "sinfo"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2 and "error: munged is not installed" in done.stderr and not done.stdout


def test_a_wait_is_bounded_and_says_for_what():
    with pytest.raises(TimeoutError, match=r"waited 0 s for the moon"):
        wait_until(lambda: False, 0.1, "the moon", interval=0.02)


def processes(word: str) -> list[str]:
    """Command lines of this machine with the word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended
            continue
    return [line for line in found if word in line]


@HERE
@pytest.mark.long
def test_a_killed_node_is_gone_with_its_jobs(tmp_path):
    followed = tmp_path / "followed"
    followed.touch()

    def tasks() -> int:
        return sum(line.partition(" ")[0].endswith("tail") for line in processes(str(followed)))

    with Slurm(tmp_path / "cluster") as slurm:
        slurm.submit("--nodes=2", "--output=/dev/null", "--wrap", f"srun tail -f {followed}")
        wait_until(lambda: tasks() == 2, 60, "a task on each node")
        slurm.kill("n2")
        wait_until(lambda: tasks() == 1, 20, "the task of n2 to end")
        slurm.wait_for_nodes("down", ["n2"], seconds=120)
    wait_until(lambda: not processes(str(tmp_path)), 20, "every process to end")


@HERE
@pytest.mark.long
def test_nothing_outlives_the_process_that_started_it(tmp_path):
    """SIGKILL: no code of it runs any more."""
    ready = tmp_path / "ready"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [*COMMAND, "--nodes", "1", "--", "sh", "-c", f"touch {ready}; exec sleep 1000"]
    with subprocess.Popen(command, cwd=ROOT, env=environment) as started:
        wait_until(ready.exists, 90, "the cluster")
        assert len(processes(f"{tmp_path}/slurm-")) >= 3
        started.send_signal(signal.SIGKILL)
    wait_until(lambda: not processes(f"{tmp_path}/slurm-"), 20, "every daemon to end")
